"""data/dialogue.py and data/shard_maker.py: conversations of several turns, answered by a scripted engine."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from chat_targets import END_OF_TURN, TEMPLATES, write_chat_target
from safetensors import safe_open

from data import shard_check, shard_maker
from data.conversations import Conversation, make_conversation
from data.dialogue import Dialogue, draw_seed
from data.groups import Rendered, begin, group_by_shard
from data.render import ChatTemplate, load_chat_template
from data.shard_maker import Made, ShardMaker
from data.shard_plan import ShardPlan, count_without
from data.shards import Shard
from data.skips import Skips
from recipes.schema import Data, DataSampling, Sampling, Target
from serve.generation import Answer, Request
from tests.drafters import tiny_recipe
from tests.stepping_stub import SteppingStub

KINDS = ("plain", "stripping", "inserting", "strict")
WIDTH = len(tiny_recipe().drafter.target_layer_ids) * 8


def states_of(tokens: Sequence[int]) -> torch.Tensor:
    """[tokens - 1, WIDTH]: each row depends on all tokens up to its own."""
    seeds = [hash(tuple(tokens[:end])) % 2**31 for end in range(1, len(tokens))]
    rows = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows).bfloat16()


def talk(*asked: str, said: str = "given") -> Conversation:
    """Users' turns, a given answer between each two."""
    users = [{"role": "user", "content": text} for text in asked]
    between = [{"role": "assistant", "content": said} for _ in users]
    return make_conversation([each for pair in zip(users, between, strict=True) for each in pair][:-1])


class Script(SteppingStub):
    """An engine that answers as it is told, by what the user asked last, a token a step."""

    def __init__(self, tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self.says: dict[str, str] = {}
        """What was asked last -> the answer; else it is "to " and that."""
        self.truncated: set[str] = set()
        self.lost: set[str] = set()
        self.empty: set[str] = set()
        self.calls: list[list[tuple[str, int]]] = []
        """Of each step that some began with, what was asked last and the seed."""
        self.samplings: dict[str, Sampling] = {}
        """By what was asked last."""

    def answer_together(
        self, _numbers: Sequence[int], requests: Sequence[Request], samplings: Sequence[Sampling]
    ) -> list[Answer]:
        asked = [self._read_last(request) for request in requests]
        self.calls.append([(text, request.seed) for text, request in zip(asked, requests, strict=True)])
        self.samplings |= zip(asked, samplings, strict=True)
        return [self._answer(request, text) for request, text in zip(requests, asked, strict=True)]

    def _read_last(self, request: Request) -> str:
        text = self._tokenizer.decode(request.token_ids)
        return text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]

    def _answer(self, request: Request, asked: str) -> Answer:
        text = "" if asked in self.empty else self.says.get(asked, f"to {asked}")
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        ids += [] if asked in self.truncated else [END_OF_TURN]
        states = None if asked in self.lost else states_of([*request.token_ids, *ids])
        return Answer(ids, "length" if asked in self.truncated else "stop", states, [1] * len(ids))

    def read_together(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [states_of(text) for text in texts]


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> dict[str, ChatTemplate]:
    root = tmp_path_factory.mktemp("targets")
    folders = {name: write_chat_target(root / name, TEMPLATES[name]) for name in KINDS}
    return {name: load_chat_template(Target(model=str(folder))) for name, folder in folders.items()}


@pytest.fixture
def play(templates, monkeypatch, tmp_path) -> Callable[..., tuple[Made, Script, list[tuple[str, str, str]]]]:
    """Makes a shard of conversations: what it says of itself, and each sequence's name, text and answers."""

    def make(
        conversations: Sequence[Conversation], *overrides: str, name: str = "plain", **script: object
    ) -> tuple[Made, Script, list[tuple[str, str, str]]]:
        template = templates[name]
        engine = Script(template.tokenizer)
        vars(engine).update(script)
        reference = SimpleNamespace(compute_taps=lambda ids: states_of([*ids.tolist(), 0]))
        monkeypatch.setattr(shard_maker, "CapturingEngine", lambda *_, **__: engine)
        monkeypatch.setattr(shard_maker, "load_chat_template", lambda _: template)
        monkeypatch.setattr(shard_check, "HookedTarget", lambda *_: reference)
        plain = ["data.final_states=false", "train.objective.kind=cross_entropy", "data.check_sequences=99"]
        recipe = tiny_recipe(*plain, "data.check_again=99", *overrides)
        prompts = begin(conversations, template, recipe.data).prompts
        maker = ShardMaker(recipe, tmp_path, tmp_path / "spool", lambda *_: None)
        made = maker.make(0, prompts)
        return made, engine, read_all(tmp_path / made.entry.file, made.entry.sequences, template)

    return make


def read_all(path: Path, count: int, template: ChatTemplate) -> list[tuple[str, str, str]]:
    """Checks that states are those of the sequence's own tokens."""
    found = [Shard(path).read_sequence(index) for index in range(count)]
    with safe_open(path, framework="pt") as shard:
        names = json.loads(shard.metadata()["prompt_ids"])
    for each in found:
        assert torch.equal(each.hidden, states_of(each.token_ids.tolist()))
    decode = template.tokenizer.decode
    return [
        (name, decode(each.token_ids), decode(each.token_ids[each.loss_mask]))
        for name, each in zip(names, found, strict=True)
    ]


THREE = talk("one", "two", "three")
ENDS = "<|im_end|>"


def test_the_targets_own_answers_are_the_history_and_all_are_in_one_sequence(play):
    made, _, [(name, text, answers)] = play([THREE])
    assert name == THREE.id
    assert answers == f"to one{ENDS}to two{ENDS}to three{ENDS}"
    assert text.count("<|im_start|>") == 6
    assert "given" not in text
    assert (made.entry.sequences, made.entry.further, made.entry.cut) == (1, 0, {})
    assert made.finish_reasons == {"stop": 3}


def test_first_events_are_asked_together_and_each_next_one_once_its_answer_is_there(play):
    says = {"b": "b b b b b b b b b b b b b b"}
    _, engine, _ = play([talk("a"), talk("b", "c"), THREE, talk("d", "e")], says=says)
    asked = [[text for text, _ in call] for call in engine.calls]
    assert asked[0] == ["a", "b", "one", "d"]
    assert asked[1:] == [["two", "e"], ["three"], ["c"]]


def test_first_events_come_before_second_ones_where_there_is_no_room_for_all(play):
    conversations = [talk("a", "b"), talk("c", "d"), talk("e")]
    _, engine, found = play(conversations, "serve.max_num_seqs=1")
    assert [[text for text, _ in call] for call in engine.calls] == [[text] for text in "acebd"]
    assert max(map(len, engine.at_once)) == 1
    assert [name for name, *_ in found] == [each.id for each in conversations]


def test_seeds_differ_by_event_and_conversation_and_the_first_is_that_of_a_single_turn(play):
    _, engine, _ = play([talk("a"), talk("b", "c"), THREE])
    seeds = [seed for call in engine.calls for _, seed in call]
    assert len(set(seeds)) == 6
    prompt = Rendered(THREE.id, [])
    of_text = {text: seed for call in engine.calls for text, seed in call}
    expected = [of_text[text] for text in ("one", "two", "three")]
    assert [draw_seed(prompt, number) for number in range(3)] == expected
    assert draw_seed(prompt, 0) == prompt.seed
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_conversation_keeps_its_temperature_over_its_turns(play):
    conversations = [talk(f"a{number}", f"b{number}") for number in range(8)]
    _, engine, found = play(conversations, "data.sampling.temperature=[0, 0.7]")
    of_text = {text: sampling.temperature for text, sampling in engine.samplings.items()}
    assert len(of_text) == 16
    assert set(of_text.values()) == {0, 0.7}
    assert all(of_text[f"a{number}"] == of_text[f"b{number}"] for number in range(8))
    assert [name for name, *_ in found] == [each.id for each in conversations]


def test_stripped_reasoning_gives_a_sequence_of_its_own_to_each_event(play):
    says = {"one": "<think>why</think>1", "two": "2", "three": "<think>so</think>3"}
    made, _, found = play([THREE, talk("x")], name="stripping", says=says)
    assert [name for name, *_ in found] == [THREE.id, f"{THREE.id}-1", talk("x").id]
    assert [answers for *_, answers in found] == [
        f"<think>why</think>1{ENDS}",
        f"2{ENDS}<think>so</think>3{ENDS}",
        f"to x{ENDS}",
    ]
    assert "why" not in found[1][1]
    assert (made.entry.sequences, made.entry.further) == (3, 1)
    assert count_without(2, [made.entry]) == {"empty_answer": 0, "incomplete": 0}


# Sources


MIXED = [
    {"path": "a.jsonl", "name": "warm", "sampling": {"temperature": 0.7, "max_tokens": 9}, "thinking": "on"},
    {"path": "b.jsonl", "name": "plain"},
]


def from_source(name: str, *conversations: Conversation) -> list[Conversation]:
    return [replace(conversation, source=name) for conversation in conversations]


def test_each_source_is_sampled_in_its_own_way_and_counted_by_its_name(play, tmp_path):
    conversations = [
        *from_source("plain", talk("a", "b")),
        *from_source("warm", talk("c"), talk("d", "e")),
        *from_source("plain", talk("f")),
    ]
    settings = [f"data.prompts={json.dumps(MIXED)}", "data.sampling.max_tokens=11"]
    made, engine, found = play(conversations, *settings, name="inserting", says={"d": "r</think>d"})
    asked = {text: (each.temperature, each.max_tokens) for text, each in engine.samplings.items()}
    assert asked == dict.fromkeys("abf", (0, 11)) | dict.fromkeys("cde", (0.7, 9))
    texts = list(Shard(tmp_path / made.entry.file).read_texts(list(made.entry.sources)))
    sources = [each.source for each in texts]
    of_ids = {each.id: each.source for each in conversations}
    assert sources == [of_ids[name.partition("-")[0]] for name, *_ in found]
    assert sources == [("warm" if "<think>\n" in text else "plain") for _, text, _ in found]
    counts = {name: count.sequences for name, count in made.entry.sources.items()}
    assert counts == Counter(sources)
    for name, count in made.entry.sources.items():
        read = [each for each in texts if each.source == name]
        assert count.tokens == sum(len(each.token_ids) for each in read)
        assert count.supervised_tokens == sum(int(each.loss_mask.sum()) for each in read)


# Ends


ENDINGS = {
    "a truncated answer": ({"truncated": {"two"}}, [], "truncated", f"to one{ENDS}to two"),
    "one that is not kept": (
        {"truncated": {"two"}},
        ["data.keep_truncated=false"],
        "truncated",
        f"to one{ENDS}",
    ),
    "lost states": ({"lost": {"two"}}, [], "incomplete", f"to one{ENDS}"),
    "an empty answer": ({"empty": {"two"}}, [], "empty_answer", f"to one{ENDS}"),
    "a call": (
        {"says": {"two": "<tool_call>f"}},
        [],
        "unreadable_answer",
        f"to one{ENDS}<tool_call>f{ENDS}",
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_conversation_ends_early_is_counted_and_keeps_what_it_has(play, name):
    script, overrides, reason, answers = ENDINGS[name]
    made, engine, found = play([THREE, talk("x")], *overrides, **script)
    assert [each[2] for each in found] == [answers, f"to x{ENDS}"]
    assert (made.entry.cut, made.entry.dropped, made.entry.incomplete) == ({reason: 1}, {}, 0)
    assert "three" not in [text for call in engine.calls for text, _ in call]


def test_a_history_longer_than_a_prompt_may_be_ends_the_conversation(play, templates):
    own = [{"role": "assistant", "content": f"to {text}"} for text in ("one", "two")]
    users = THREE.messages[::2]
    longest = len(templates["plain"].render([users[0], own[0], users[1], own[1], users[2]]))
    made, *_ = play([THREE], f"data.max_prompt_tokens={longest}")
    assert made.entry.cut == {}
    made, _, [(*_, answers)] = play([THREE], f"data.max_prompt_tokens={longest - 1}")
    assert made.entry.cut == {"prompt_too_long": 1}
    assert answers == f"to one{ENDS}to two{ENDS}"


@pytest.mark.parametrize("kept", [True, False])
def test_a_truncated_only_answer_is_kept_or_dropped_as_the_recipe_says(play, kept):
    made, _, found = play([talk("x"), talk("y")], f"data.keep_truncated={str(kept).lower()}", truncated={"x"})
    assert [answers for *_, answers in found] == [*(["to x"] if kept else []), f"to y{ENDS}"]
    assert (made.entry.cut, made.entry.dropped) == ({}, {} if kept else {"truncated": 1})
    assert count_without(2, [made.entry])["empty_answer"] == 0


def test_reasons_for_no_sequence_at_all_are_counted_apart(play):
    conversations = [talk(text, "more") for text in ("whole", "lost", "empty", "cut")]
    script = {"lost": {"lost"}, "empty": {"empty"}, "truncated": {"cut"}}
    made, _, found = play(conversations, "data.keep_truncated=false", **script)
    assert len(found) == 1
    assert count_without(4, [made.entry]) == {"empty_answer": 1, "incomplete": 1, "truncated": 1}
    plan = ShardPlan(
        tiny_recipe(),
        Path(),
        num_prompts=9,
        groups=[[Rendered("0" * 16, [])] * 4],
        missing=[],
        writer=SimpleNamespace(manifest=SimpleNamespace(shards=[made.entry])),
        left_out={"nothing_to_answer": 2},
        skips=[Skips("p", counts=Counter({"nothing_to_answer": 2, "not_utf8": 5}))],
    )
    assert plan.count_dropped() == {
        "prompt_too_long": 3,
        "empty_answer": 1,
        "incomplete": 1,
        "truncated": 1,
        "nothing_to_answer": 2,
        "not_utf8": 5,
    }


def test_a_template_that_refuses_a_later_turn_ends_the_conversation(templates):
    prompt = Rendered(
        "0" * 16, [1], make_conversation([{"role": "system", "content": "x"}, *THREE.messages]), (2, 4)
    )
    dialogue = Dialogue(prompt, Data(prompts="p", num_prompts=1), templates["strict"])
    dialogue.add(Answer([20, END_OF_TURN], "stop", torch.zeros(2, 4), [1, 1]))
    assert (dialogue.request, dialogue.reason, len(dialogue.sequences())) == (None, "refused_by_template", 1)


# Beginning


def data(**fields: object) -> Data:
    return Data(prompts="p", num_prompts=1, sampling=DataSampling(max_tokens=10), **fields)


def test_conversations_begin_with_their_first_turn_or_are_left_out_by_reason(templates):
    system = make_conversation([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    nothing = make_conversation([{"role": "assistant", "content": "a"}])
    begun = begin([THREE, system, nothing, talk("x")], templates["strict"], data())
    assert [prompt.id for prompt in begun.prompts] == [THREE.id, talk("x").id]
    assert begun.left_out == {"nothing_to_answer": 1, "refused_by_template": 1}
    three, one = begun.prompts
    assert three.token_ids == templates["strict"].render(THREE.messages[:1])
    assert (three.num_turns, three.conversation) == (3, THREE)
    assert one == Rendered(talk("x").id, templates["strict"].render(talk("x").messages))


def test_each_conversation_takes_a_mode_by_its_id_and_keeps_it_over_its_turns(templates):
    settings = data(thinking={"on": 0.5, "off": 0.5})
    template = templates["inserting"]
    conversations = [talk(f"a{number}", "b") for number in range(20)]
    modes = []
    for prompt in begin(conversations, template, settings).prompts:
        assert prompt.thinking == settings.choose_thinking(prompt.id)
        assert prompt.token_ids == template.render(prompt.conversation.messages[:1], (), prompt.thinking)
        dialogue = Dialogue(prompt, settings, template)
        text = "why</think>c" if prompt.thinking == "on" else "c"
        ids = [*template.tokenizer.encode(text, add_special_tokens=False), END_OF_TURN]
        dialogue.add(Answer(ids, "stop", torch.zeros(len(prompt.token_ids) + len(ids) - 1, 4), [1]))
        head = template.tokenizer.decode(dialogue.request.token_ids).rpartition("assistant\n")[2]
        assert head == {"on": "<think>\n", "off": "<think>\n\n</think>\n\n"}[prompt.thinking]
        modes.append(prompt.thinking)
    assert set(modes) == {"on", "off"}


def test_room_is_kept_for_every_event_as_long_as_it_may_become(templates):
    (three,) = begin([THREE], templates["plain"], data()).prompts
    lengths = [len(templates["plain"].render(THREE.messages[:turn])) for turn in (1, 3, 5)]
    assert three.most_tokens(data()) == lengths[0] + lengths[1] + 10 + lengths[2] + 20 + 3 * 10
    (short,) = begin([THREE], templates["plain"], data(max_prompt_tokens=30)).prompts
    assert short.most_tokens(data()) == lengths[0] + 2 * 30 + 3 * 10
    pair = begin([THREE, talk("x")], templates["plain"], data()).prompts
    assert len(group_by_shard(pair, data(shard_tokens=three.most_tokens(data())))) == 2
    assert len(group_by_shard(pair, data(shard_tokens=three.most_tokens(data()) + 1))) == 1
