"""data/batch.py with data/shard_maker.py on a stub for the engine: shards overlap, and stay apart."""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from data import batch, shard_maker
from data.filling import Tally
from data.groups import Rendered
from data.shard_maker import Made, ShardMaker, Unwritten
from data.shards import Shard
from recipes.errors import MachineError
from recipes.schema import Sampling
from serve.generation import Answer, Request
from tests.drafters import tiny_recipe
from tests.stepping_stub import SteppingStub

AT_ONCE = 4
WIDTH = len(tiny_recipe().drafter.target_layer_ids) * 8


def states_of(tokens: Sequence[int]) -> torch.Tensor:
    """[tokens - 1, WIDTH]: each row depends on all tokens up to its own."""
    seeds = [hash(tuple(tokens[:end])) % 2**31 for end in range(1, len(tokens))]
    rows = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows).bfloat16()


class RaggedEngine(SteppingStub):
    """A prompt's first token says how many tokens its answer has, a token a step."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        """The seed of each prompt, in the order they were begun."""
        self.company: list[int] = []
        """How many others ran in the step in which a text was read."""

    def begin(self, request: Request, sampling: Sampling, *, is_chain: bool = False) -> int:
        self.begun.append(request.seed)
        return super().begin(request, sampling)

    def answer_together(
        self, _numbers: Sequence[int], requests: Sequence[Request], _samplings: Sequence[Sampling]
    ) -> list[Answer]:
        emitted = [list(range(50, 50 + request.token_ids[0])) for request in requests]
        return [
            Answer(tokens, "length", states_of([*request.token_ids, *tokens]), [1] * len(tokens))
            for request, tokens in zip(requests, emitted, strict=True)
        ]

    def read_together(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        self.company.append(sum(not each.has_ended for each in self._grown.values()))
        return [states_of(text) for text in texts]


def prompts_of(shard: int, *lengths: int) -> list[Rendered]:
    """With their seeds 100 x shard + their place."""
    seeds = [100 * shard + place for place in range(len(lengths))]
    return [
        Rendered(f"{seed:015x}0", [length, 7, 200 + seed])
        for seed, length in zip(seeds, lengths, strict=True)
    ]


def ragged(shard: int) -> list[Rendered]:
    """One answer is by far the longest."""
    return prompts_of(shard, *[3, 5, 4, 2, 3, 6, 2, 40, 4, 3])


@pytest.fixture
def engine(monkeypatch) -> RaggedEngine:
    made = RaggedEngine()
    monkeypatch.setattr(shard_maker, "CapturingEngine", lambda *_, **__: made)
    return made


def begin(folder: Path, *overrides: str, again: int = 0) -> ShardMaker:
    recipe = tiny_recipe(
        f"serve.max_num_seqs={AT_ONCE}",
        *("data.final_states=false", "train.objective.kind=cross_entropy", "data.check_sequences=0"),
        f"data.check_again={again}",
        *overrides,
    )
    return ShardMaker(recipe, folder, folder / "spool", lambda *_: None)


def generate_all(maker: ShardMaker, shards: Sequence[Sequence[Rendered]]) -> Iterator[Unwritten]:
    """As an engine's process: the next is opened once the last one's prompts were all begun."""
    left = list(enumerate(shards))
    while left or maker.num_open:
        if left and maker.num_open < 2 and maker.wants_more:
            maker.begin(*left.pop(0))
        yield from maker.step()


def make_all(maker: ShardMaker, shards: Sequence[Sequence[Rendered]]) -> list[Made]:
    return [maker.write(shard) for shard in generate_all(maker, shards)]


def tally_of(made: Sequence[Made]) -> Tally:
    tally = Tally()
    for each in made:
        tally.add(each)
    return tally


def test_the_batch_is_fuller_than_with_one_shard_after_the_other(engine, tmp_path):
    shards = [ragged(number) for number in range(6)]
    alone = [begin(tmp_path).make(number, prompts) for number, prompts in enumerate(shards)]
    steps = len(engine.at_once)
    together = make_all(begin(tmp_path), shards)
    assert tally_of(alone).occupancy(AT_ONCE) == pytest.approx(6 * 72 / (steps * AT_ONCE))
    assert tally_of(alone).occupancy(AT_ONCE) < 0.45
    assert tally_of(together).occupancy(AT_ONCE) > 0.7
    assert max(map(len, engine.at_once)) == AT_ONCE


def test_no_prompt_is_begun_before_all_of_the_shard_before_it(engine, tmp_path):
    shards = [ragged(number) for number in range(3)]
    maker = begin(tmp_path)
    maker.begin(0, shards[0])
    maker.begin(1, shards[1])  # although the first one's prompts fill the batch
    maker.step()
    make_all(maker, [])
    assert engine.begun == [prompt.seed for shard in shards[:2] for prompt in shard]


def test_a_shards_sequences_stand_in_the_order_of_its_prompts_with_their_own_states(engine, tmp_path):
    shards = [ragged(number) for number in range(4)]
    make_all(begin(tmp_path, again=3), shards)
    for number, prompts in enumerate(shards):
        path = tmp_path / f"shard-{number:05}.safetensors"
        with safe_open(path, framework="pt") as shard:
            assert json.loads(shard.metadata()["prompt_ids"]) == [prompt.id for prompt in prompts]
        for place, prompt in enumerate(prompts):
            found = Shard(path).read_sequence(place)
            assert found.token_ids[:3].tolist() == prompt.token_ids
            assert torch.equal(found.hidden, states_of(found.token_ids.tolist()))


def test_a_shard_that_is_generated_first_need_not_wait_for_the_one_before_it(engine, tmp_path):
    shards = [prompts_of(0, 2, 90), prompts_of(1, 3, 3), prompts_of(2, 3, 3)]
    assert [shard.number for shard in generate_all(begin(tmp_path), shards)] == [1, 2, 0]


def test_texts_are_read_again_while_the_next_shard_goes_on(engine, tmp_path):
    make_all(begin(tmp_path, again=2), [prompts_of(0, 2, 2, 9), prompts_of(1, 20, 20)])
    assert engine.company == [2, 2, 0, 0]


def test_what_is_wrong_in_the_first_shard_is_refused_though_another_runs(engine, tmp_path):
    maker = begin(tmp_path, again=2)
    engine.read_together = lambda texts: [-states_of(text) for text in texts]
    with pytest.raises(MachineError, match=r"those of a prefill .* this shard was not written"):
        make_all(maker, [prompts_of(0, 2, 9), prompts_of(1, 20, 20)])


# Each step is counted once


@pytest.mark.parametrize("again", [0, 2])
def test_steps_and_seconds_of_the_shards_are_the_runs(engine, tmp_path, monkeypatch, again):
    """A check's own steps are no shard's; the clock goes a second at each look."""
    monkeypatch.setattr(batch.time, "monotonic", count().__next__)
    made = make_all(begin(tmp_path, again=again), [ragged(number) for number in range(3)])
    alone = again  # of the last shard, when no other is open
    assert sum(each.engine_steps for each in made) == len(engine.at_once) - alone
    assert sum(each.seconds for each in made) == len(engine.at_once) - alone
    assert sum(each.request_steps for each in made) == sum(each.emitted_tokens for each in made) == 3 * 72


def test_a_step_is_the_first_open_shards(engine, tmp_path):
    first, second = make_all(begin(tmp_path), [prompts_of(0, 2, 9), prompts_of(1, 5, 12)])
    assert (first.engine_steps, first.request_steps) == (9, 11)
    assert (second.engine_steps, second.request_steps) == (12 - 8, 17)  # it was begun in the second step


def test_steps_of_texts_that_are_only_read_are_not_counted(engine, tmp_path):
    texts = [Rendered(f"{number:016x}", [9, 8, 7, 6], spans=((2, 4),)) for number in range(6)]
    (made,) = make_all(begin(tmp_path), [texts])
    assert len(engine.at_once) == 2
    assert (made.engine_steps, made.request_steps, made.emitted_tokens) == (0, 0, 0)
    assert made.entry.sequences == 6
