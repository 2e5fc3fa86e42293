"""data/shard_maker.py and data/shard_check.py on a function as engine: what is written, refused, counted."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data import shard_check, shard_maker
from data.check_taps import FINAL
from data.dialogue import count_accepted
from data.filling import Tally
from data.groups import Rendered
from data.shard_check import choose
from data.shard_maker import ShardMaker
from data.shard_plan import ShardPlan
from data.shards import Shard
from recipes.errors import MachineError
from recipes.schema import Sampling
from serve.generation import Answer, Request
from tests.drafters import tiny_recipe
from tests.stepping_stub import SteppingStub

LAYERS, HIDDEN, DRAFTED = 8, 24, 3
TAPS = tiny_recipe().drafter.target_layer_ids
PROMPTS = [Rendered(f"{number:016x}", [7, 7, 20 + number, 3]) for number in range(6)]
SEEDED = [replace(prompt, id=f"{number:015x}0") for number, prompt in enumerate(PROMPTS)]
"""Their seeds are 0 to 5."""
MIXED = [0, 0.7, 1]


def states_of(tokens: Sequence[int], shift: int = 0) -> torch.Tensor:
    """[tokens - 1, taps x HIDDEN]: each row depends on all tokens up to its own, and layers differ."""
    rows = []
    for end in range(1, len(tokens)):
        generator = torch.Generator().manual_seed(hash(tuple(tokens[:end])) % 2**31)
        of_layers = torch.randn(LAYERS, HIDDEN, generator=generator)
        rows.append(of_layers[[layer + shift for layer in TAPS]].flatten())
    return torch.stack(rows).bfloat16()


Fault = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""What becomes of the states of the sequences that are captured together."""


class FunctionEngine(SteppingStub):
    """Answers a prompt with `emitted` tokens, three a step; a fault may befall what it captures."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Fault = lambda states: states
        self.shift = 0
        self.lost: set[int] = set()
        self.read_texts: list[list[int]] = []
        self.asked: list[list[tuple[int, float]]] = []
        """Seed and temperature of the prompts, of each step that some began with."""

    def _capture(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return self.fault([states_of(text, self.shift) for text in texts])

    def answer_together(
        self, _numbers: Sequence[int], requests: Sequence[Request], samplings: Sequence[Sampling]
    ) -> list[Answer]:
        temperatures = [sampling.temperature for sampling in samplings]
        self.asked.append(list(zip([request.seed for request in requests], temperatures, strict=True)))
        emitted = [[request.token_ids[2] + 100 + step for step in range(7)] for request in requests]
        texts = [[*request.token_ids, *answer] for request, answer in zip(requests, emitted, strict=True)]
        return [
            Answer(tokens, "length", None if number in self.lost else states, [1, DRAFTED, DRAFTED])
            for number, (tokens, states) in enumerate(zip(emitted, self._capture(texts), strict=True))
        ]

    def read_together(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        self.read_texts += map(list, texts)
        return [None if number in self.lost else part for number, part in enumerate(self._capture(texts))]

    def swap(self, _ckpt: Path) -> None:
        """Nothing changes but what a test has it change."""


@pytest.fixture
def engine(monkeypatch) -> FunctionEngine:
    made = FunctionEngine()
    monkeypatch.setattr(shard_maker, "CapturingEngine", lambda *_, **__: made)
    return made


@pytest.fixture
def asked(monkeypatch) -> list[list[int]]:
    """The texts that transformers was asked for."""
    texts: list[list[int]] = []

    def compute_taps(token_ids: torch.Tensor) -> torch.Tensor:
        texts.append(token_ids.tolist())
        return states_of([*token_ids.tolist(), 0])

    reference = SimpleNamespace(compute_taps=compute_taps)
    monkeypatch.setattr(shard_check, "HookedTarget", lambda *_: reference)
    return texts


def begin(folder: Path, *overrides: str) -> ShardMaker:
    usual = ["data.check_sequences=2", "data.check_again=3", "data.final_states=false"]
    recipe = tiny_recipe(*usual, "train.objective.kind=cross_entropy", *overrides)
    return ShardMaker(recipe, folder, folder / "spool", lambda *_: None)


def shard_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_shard_of_right_states_is_written_with_all_of_them(engine, asked, tmp_path):
    made = begin(tmp_path).make(0, PROMPTS)
    assert (made.entry.sequences, made.entry.incomplete) == (6, 0)
    assert made.least_cosines == {layer: pytest.approx(1, abs=1e-5) for layer in TAPS}
    found = Shard(tmp_path / made.entry.file).read_sequence(4)
    assert torch.equal(found.hidden, states_of(found.token_ids.tolist()))


def test_transformers_is_asked_of_the_first_shard_and_the_engine_of_every_one(engine, asked, tmp_path):
    maker = begin(tmp_path)
    for number in range(3):
        maker.make(number, PROMPTS)
        assert len(asked) == 2
        assert len(engine.read_texts) == 3 * (number + 1)


GIVEN_TEXTS = [
    Rendered("e" * 16, [1, 2, 3, 4, 5], spans=((2, 3), (4, 5)), source="b"),
    Rendered("f" * 16, [1, 2, 9], spans=((1, 3),), source="b"),
]


def test_given_texts_are_read_and_stay_in_their_places(engine, asked, tmp_path):
    made = begin(tmp_path).make(0, [PROMPTS[0], GIVEN_TEXTS[0], PROMPTS[1], GIVEN_TEXTS[1]])
    assert (made.entry.sequences, made.read_tokens, made.finish_reasons) == (4, 8, {"length": 2})
    shard = Shard(tmp_path / made.entry.file)
    found = [shard.read_sequence(number) for number in range(4)]
    assert [each.token_ids.tolist() for each in found[1::2]] == [[1, 2, 3, 4, 5], [1, 2, 9]]
    assert [each.loss_mask.tolist() for each in found[1::2]] == [[0, 0, 1, 0, 1], [0, 1, 1]]
    assert all(torch.equal(each.hidden, states_of(each.token_ids.tolist())) for each in found)
    assert found[0].token_ids.tolist()[:4] == PROMPTS[0].token_ids


def test_a_given_text_that_the_engine_gave_up_is_counted(engine, asked, tmp_path):
    engine.lost = {0}
    made = begin(tmp_path, "data.check_again=0").make(0, GIVEN_TEXTS)
    assert (made.entry.sequences, made.entry.incomplete) == (1, 1)


def test_states_of_given_texts_are_checked_as_others_are(engine, asked, tmp_path):
    engine.shift = 1
    with pytest.raises(MachineError):
        begin(tmp_path).make(0, GIVEN_TEXTS)


def test_after_a_swap_transformers_is_asked_again(engine, asked, tmp_path):
    maker = begin(tmp_path)
    maker.make(0, PROMPTS)
    maker.swap(Path("checkpoint"))
    maker.make(1, PROMPTS)
    assert len(asked) == 4


def test_nobody_is_asked_where_the_recipe_says_so(engine, asked, tmp_path):
    made = begin(tmp_path, "data.check_sequences=0", "data.check_again=0").make(0, PROMPTS)
    assert (made.least_cosines, asked, engine.read_texts) == ({}, [], [])


def test_each_prompt_is_answered_at_its_own_temperature_and_stays_in_its_place(engine, asked, tmp_path):
    made = begin(tmp_path, f"data.sampling.temperature={MIXED}").make(0, SEEDED)
    assert engine.asked == [[(0, 0), (1, 0.7), (2, 1), (3, 0), (4, 0.7), (5, 1)]]
    found = [Shard(tmp_path / made.entry.file).read_sequence(index) for index in range(6)]
    assert [each.token_ids[2].item() - 20 for each in found] == list(range(6))
    assert all(torch.equal(each.hidden, states_of(each.token_ids.tolist())) for each in found)


def test_the_batch_is_as_full_as_answers_grow_in_the_engines_steps(engine, asked, tmp_path):
    """Six prompts of three temperatures take three steps together, and one alone another three."""
    maker, tally = begin(tmp_path, f"data.sampling.temperature={MIXED}"), Tally()
    assert tally.occupancy(8) is None
    tally.add(maker.make(0, SEEDED))
    tally.add(maker.make(1, SEEDED[:1]))
    assert (tally.engine_steps, tally.request_steps) == (3 + 3, 18 + 3)
    assert tally.occupancy(8) == 21 / (6 * 8)


def test_a_prompts_temperature_does_not_depend_on_its_company(engine, asked, tmp_path):
    maker = begin(tmp_path, f"data.sampling.temperature={MIXED}")
    for number, prompts in enumerate([SEEDED, SEEDED[::-1], SEEDED[4:5], SEEDED[1:3]]):
        maker.make(number, prompts)
    assert len({each for together in engine.asked for each in together}) == len(SEEDED)


# Faults


def zero_rows(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """After the first five of every sequence, captured while generating or read again."""
    return [each * (torch.arange(len(each)) < 5)[:, None] for each in states]


def of_the_next(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """No row is lost and none stands twice; a sequence that is captured alone keeps its own."""
    return [*states[1:], states[0]]


def copied(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tail of one sequence in another, once."""
    if len(states) > 1:
        states[4] = torch.cat([states[4][:6], states[2][6:]])
    return states


def stale(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """The last row of one step in the next, of one sequence."""
    states[-1][7:] = states[-1][6].clone()
    return states


def untidy(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Two accepted nodes in the tree's order instead of the path's, in every answer."""
    if len(states) > 1:
        for each in states:
            each[[5, 6]] = each[[6, 5]]
    return states


@pytest.mark.parametrize(
    ("fault", "again", "whose"),
    [
        (zero_rows, 0, r"transformers model's: cosine 0\.000000 at the tap after layer 2, .* position 5;"),
        (of_the_next, 3, r"a prefill of the same tokens alone: .* position [2-9];"),
        (copied, 0, r"transformers model's: .* sequence 0{15}4, position [6-9];"),
        (stale, 0, r"transformers model's: .* sequence 0{15}5, position [7-9];"),
        (untidy, 3, r"a prefill of the same tokens alone: .* position [56];"),
    ],
)
def test_a_fault_that_begins_after_the_first_shard_is_refused(engine, asked, tmp_path, fault, again, whose):
    maker = begin(tmp_path, f"data.check_again={again}")
    maker.make(0, PROMPTS)
    engine.fault = fault
    with pytest.raises(MachineError, match=whose + ".* this shard was not written"):
        maker.make(1, PROMPTS)
    assert shard_files(tmp_path) == ["shard-00000.safetensors"]


@pytest.mark.parametrize("shift", [1, -1])
def test_taps_off_by_one_are_refused_from_the_start_and_after_a_swap(engine, asked, tmp_path, shift):
    engine.shift = shift
    with pytest.raises(MachineError, match=r"not the transformers model's: .* at the tap after layer 2"):
        begin(tmp_path).make(0, PROMPTS)
    assert shard_files(tmp_path) == []
    engine.shift = 0
    maker = begin(tmp_path)
    maker.make(0, PROMPTS)
    maker.swap(Path("checkpoint"))
    engine.shift = shift
    with pytest.raises(MachineError, match="not the transformers model's"):
        maker.make(1, PROMPTS)


def test_zeros_that_transformers_has_too_are_right(engine, tmp_path, monkeypatch):
    reference = SimpleNamespace(compute_taps=lambda tokens: zero_rows([states_of([*tokens.tolist(), 0])])[0])
    monkeypatch.setattr(shard_check, "HookedTarget", lambda *_: reference)
    engine.fault = zero_rows
    assert begin(tmp_path).make(0, PROMPTS).entry.sequences == 6


def test_doubtful_states_are_refused_where_transformers_may_not_be_asked(engine, asked, tmp_path):
    engine.fault = zero_rows
    with pytest.raises(MachineError, match=r"in 6 sequences, first in 0{16}: position 5 is zero at the tap"):
        begin(tmp_path, "data.check_sequences=0").make(0, PROMPTS)
    assert (asked, shard_files(tmp_path)) == ([], [])


# What is left out


def test_answers_whose_states_are_not_whole_are_left_out_and_counted(engine, asked, tmp_path):
    engine.lost = {1, 4}
    entry = begin(tmp_path).make(0, PROMPTS).entry
    assert (entry.sequences, entry.incomplete) == (4, 2)
    kept = [Shard(tmp_path / entry.file).read_sequence(index).token_ids[2].item() - 20 for index in range(4)]
    assert kept == [0, 2, 3, 5]
    plan = ShardPlan(
        tiny_recipe(),
        tmp_path,
        num_prompts=9,
        groups=[PROMPTS, PROMPTS[:1]],
        missing=[],
        writer=SimpleNamespace(manifest=SimpleNamespace(shards=[entry])),
    )
    assert plan.count_dropped() == {"prompt_too_long": 2, "empty_answer": 1, "incomplete": 2}


def test_a_shard_of_nothing_whole_is_an_empty_one_and_vouches_for_no_engine(engine, asked, tmp_path):
    engine.lost = set(range(6))
    maker = begin(tmp_path)
    made = maker.make(0, PROMPTS)
    assert (made.entry.sequences, made.entry.incomplete, made.least_cosines) == (0, 6, {})
    engine.lost = set()
    maker.make(1, PROMPTS)
    assert len(asked) == 2


# Which are read again


def test_sequences_with_accepted_drafts_are_chosen_first():
    accepted = [0, 5, 0, 1, 0, 9]
    assert sorted(choose(accepted, 3, seed=1)) == [1, 3, 5]
    assert len(set(choose(accepted, 4, seed=1))) == 4
    assert sorted(choose(accepted, 99, seed=1)) == [0, 1, 2, 3, 4, 5]


def test_a_shard_chooses_the_same_again_and_others_choose_others():
    drawn = {tuple(choose([0] * 50, 2, seed)) for seed in range(20)}
    assert choose([0] * 50, 2, seed=3) == choose([0] * 50, 2, seed=3)
    assert len(drawn) > 15


def test_each_accepted_draft_is_a_lot():
    accepted = [1, 2, 7]
    drawn = Counter(choose(accepted, 1, seed)[0] for seed in range(4000))
    assert [drawn[index] / 4000 for index in range(3)] == pytest.approx([0.1, 0.2, 0.7], abs=0.03)


def test_an_answers_accepted_drafts_are_its_steps_without_their_own_tokens():
    answer = Answer([0] * 9, "stop", None, [1, 3, 1, 4])
    assert count_accepted(answer) == 5
    assert count_accepted(replace(answer, chunks=[1])) == 0


def test_final_states_are_captured_as_one_more_tap_and_written_apart(engine, asked, tmp_path, monkeypatch):
    """The deepest layer stands for what the head reads."""
    monkeypatch.setattr(f"{__name__}.TAPS", [*TAPS, FINAL])
    made = begin(tmp_path, "data.final_states=true").make(0, PROMPTS)
    assert list(made.least_cosines) == TAPS
    found = Shard(tmp_path / made.entry.file, with_final=True).read_sequence(4)
    states = states_of(found.token_ids.tolist())
    assert torch.equal(found.hidden, states[:, :-HIDDEN])
    assert torch.equal(found.final, states[:, -HIDDEN:])


def test_a_wrong_final_state_is_refused_by_its_name(engine, asked, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.TAPS", [*TAPS, FINAL])

    def spoil(states: list[torch.Tensor]) -> list[torch.Tensor]:
        for each in states:
            each[2, -HIDDEN:] *= -1
        return states

    engine.fault = spoil
    with pytest.raises(MachineError, match=r"at the tap after the final norm, sequence \w+, position 2"):
        begin(tmp_path, "data.final_states=true").make(0, PROMPTS)
