"""Texts whose given answers are read: which, how long, and with which mask; data/groups.py and its plan."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from drafters import tiny_recipe

from data.conversations import Message, make_conversation
from data.given_text import mask_given_text
from data.groups import Rendered, begin, group_by_shard
from data.render import ChatTemplate, load_chat_template
from data.shard_plan import find_end_ids, make_plan
from recipes.errors import UserError
from recipes.schema import Data, Target

TARGET = Target(model="recipes/embedded/target")
GIVEN = Data(prompts="x", num_prompts=9, answers="given", max_prompt_tokens=500)


def chat(*said: str) -> list[Message]:
    """The user begins."""
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return load_chat_template(TARGET)


def take(template: ChatTemplate, data: Data, messages: Sequence[Message]) -> Rendered:
    (found,) = begin([make_conversation(messages)], template, data, find_end_ids(TARGET)).prompts
    return found


def test_every_answer_that_is_given_is_supervised_and_none_is_asked_for(template):
    messages = chat("What is 1 + 1?", "2", "And 2 + 2?", "Four.")
    found = take(template, GIVEN, messages)
    end = template.tokenizer.eos_token
    said = [template.tokenizer.decode(found.token_ids[start:stop]) for start, stop in found.spans]
    assert said == [f"2{end}", f"Four.{end}"]
    assert found.token_ids == template.render_whole(messages)
    assert (found.num_turns, found.most_tokens(GIVEN)) == (1, len(found.token_ids))


def test_a_text_is_cut_where_the_longest_sequence_ends(template):
    messages = chat("Count.", " ".join(map(str, range(90))), "More.", "No.")
    whole = mask_given_text(make_conversation(messages), template, find_end_ids(TARGET))
    (start, end), second = whole.spans
    for longest in (start + 1, end - 1, end, second[0], second[0] + 1, second[1] - 1, second[1]):
        data = GIVEN.model_copy(update={"max_prompt_tokens": longest - GIVEN.sampling.max_tokens})
        found = take(template, data, messages)
        assert found.token_ids == whole.token_ids[:longest]
        supervised = {place for span in found.spans for place in range(*span)}
        assert supervised == {place for span in whole.spans for place in range(*span) if place < longest}
        assert found.fits(data)
        is_whole = longest >= len(whole.token_ids)
        kept = take(template, data.model_copy(update={"keep_truncated": False}), messages)
        assert (kept.token_ids, kept.fits(data)) == (whole.token_ids, is_whole)


def test_a_text_that_is_cut_before_anything_is_said_does_not_fit(template):
    messages = chat(" ".join(map(str, range(90))), "Four.")
    start = take(template, GIVEN, messages).spans[0][0]
    data = GIVEN.model_copy(update={"max_prompt_tokens": start - GIVEN.sampling.max_tokens})
    assert not take(template, data, messages).fits(data)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (["Nobody answers."], "the assistant says nothing"),
        (["Hello.", "Hi.", "Go on."], None),
        (["Hello.", ""], "message 1 of the assistant's is empty"),
        (["Hello.", "I say <|im_end|> and go on."], "the template makes"),
    ],
)
def test_a_text_without_a_sound_mask_is_refused_by_its_reason(template, said, reason):
    begun = begin([make_conversation(chat(*said))], template, GIVEN, find_end_ids(TARGET))
    assert [why.reason for _, why in begun.refused] == ["no_sound_mask"] * (reason is not None)
    assert reason is None or reason in str(begun.refused[0][1])


def test_a_source_may_be_read_beside_one_that_is_answered(template, tmp_path):
    for name, messages in (("own", chat("Ask.", "Old answer.")), ("read", chat("Hello.", "Given."))):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": messages}))
    sources = [{"path": f"{tmp_path}/own.jsonl"}, {"path": f"{tmp_path}/read.jsonl", "answers": "given"}]
    prompts = plan(tmp_path, f"data.prompts={json.dumps(sources)}")
    by_source = {Path(prompt.source).stem: prompt for prompt in prompts}
    assert len(by_source["read"].spans) == 1
    assert by_source["own"].spans == ()
    assert by_source["own"].token_ids == template.render(chat("Ask."))


def plan(folder: Path, *overrides: str) -> list[Rendered]:
    recipe = tiny_recipe(f"output_dir={folder / 'run'}", "rounds.count=1", "data.num_prompts=4", *overrides)
    return [prompt for group in make_plan(recipe).groups for prompt in group]


def test_texts_fill_shards_by_their_own_length():
    texts = [Rendered(f"{number:016x}", [1] * 100, spans=((50, 100),)) for number in range(9)]
    data = GIVEN.model_copy(update={"shard_tokens": 300})
    assert [len(group) for group in group_by_shard(texts, data)] == [3, 3, 3]


def test_shards_of_the_targets_answers_are_not_gone_on_with_by_given_ones(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat("Ask.", "Told.")}))
    prompts = f"data.prompts={tmp_path / 'a.jsonl'}"
    begun = make_plan(tiny_recipe(f"output_dir={tmp_path / 'run'}", "rounds.count=1", prompts))
    begun.writer.finish({})
    with pytest.raises(UserError, match=r"data\.answers: found target, the recipe says given"):
        plan(tmp_path, prompts, "data.answers=given")
