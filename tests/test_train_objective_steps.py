"""Optimizer steps on every objective: micro-batches and ranks that share a step change nothing.

Also the program of one rank, as a launcher would start it, for micro-batches of so many sequences:

    python tests/test_train_objective_steps.py FILE SEQUENCES ...
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rank_processes import run_ranks
from small_training import DRAFTER, HIDDEN
from test_train_step import SEQUENCES, Outcome, assert_same, start, take_steps, train_settings

from recipes.errors import UserError
from train.batches import Batch, worst_case_batch
from train.feed import Feed, MicroBatch
from train.objective import final_states
from train.ranks import Ranks, joined_ranks
from train.step import Learner

FROM_DISTRIBUTIONS = ["kl", "total_variation", "lk"]
KINDS = ["cross_entropy", "d_pace", *FROM_DISTRIBUTIONS]
SLOTS = DRAFTER.block_size


@dataclass(frozen=True)
class TaughtFeed:
    """The feed's micro-batches with final states, as random as the target."""

    feed: Feed

    def read_step(self, step: int) -> list[MicroBatch]:
        return [replace(micro, batch=self._teach(micro)) for micro in self.feed.read_step(step)]

    def _teach(self, micro: MicroBatch) -> Batch:
        batch, states = micro.batch, []
        for visit, document in zip(micro.visits, batch.documents, strict=True):
            anchors_A = batch.block_positions_Q[document.blocks][::SLOTS]
            generator = torch.Generator().manual_seed(visit.index)
            final_LD = torch.randn(len(SEQUENCES[visit.index].token_ids) - 1, HIDDEN, generator=generator)
            states.append(final_states(final_LD, anchors_A, SLOTS))
        return replace(batch, final_QD=torch.cat(states))


# Steps, in processes of their own: DeepSpeed joins ranks once in a process


class Split(NamedTuple):
    ranks: int
    micro_batch_sequences: int


WHOLE, SPLITS = Split(1, 4), [Split(1, 1), Split(2, 1)]


def take_steps_of(kind: str, ranks: Ranks, micro_batch_sequences: int) -> Outcome:
    train = train_settings(micro_batch_sequences=micro_batch_sequences, objective={"kind": kind})
    learner, feed = start(ranks, train)
    feed = replace(feed, rank=ranks.rank, world_size=ranks.world_size)
    return take_steps(learner, TaughtFeed(feed), ranks, range(2))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[Split, dict[str, Outcome]]:
    file, by_split = tmp_path_factory.mktemp("outcomes") / "outcomes.pt", {}
    for num_ranks in (1, 2):
        sizes = [split.micro_batch_sequences for split in (WHOLE, *SPLITS) if split.ranks == num_ranks]
        run_ranks(__file__, num_ranks, file, *sizes)
        for size, by_kind in torch.load(file, weights_only=True).items():
            outcome_of = {kind: Outcome(*outcome) for kind, outcome in by_kind.items()}
            by_split[Split(num_ranks, size)] = outcome_of
    return by_split


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_how_a_step_is_split_changes_nothing(kind, split, outcomes):
    assert_same(outcomes[split][kind], outcomes[WHOLE][kind], 1e-5)


def test_objectives_differ(outcomes):
    norms = [outcome.gradient_norms[0] for outcome in outcomes[WHOLE].values()]
    assert len({round(norm, 4) for norm in norms}) == len(KINDS)


# Without an engine


def learner_of(kind: str) -> Learner:
    train = train_settings(objective={"kind": kind})
    return Learner(None, None, train, Ranks(0, 1, torch.device("cpu")))


@pytest.mark.parametrize("kind", FROM_DISTRIBUTIONS)
def test_shards_without_final_states_are_refused_before_the_drafter_runs(kind):
    learner = learner_of(kind)
    batch = learner.sender.send(worst_case_batch(2, 40, 4, DRAFTER, HIDDEN)).receive()
    with pytest.raises(
        UserError, match=rf"kind {kind} learns from .* the shards hold none: write data\.final_states"
    ):
        learner._score(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_final_states_are_taken_by_those_objectives_that_need_them(kind):
    final_QD = torch.ones(2 * 4 * SLOTS, HIDDEN, dtype=torch.bfloat16)
    batch = replace(worst_case_batch(2, 40, 4, DRAFTER, HIDDEN), final_QD=final_QD)
    found = learner_of(kind)._final_states_of(batch)
    if kind in FROM_DISTRIBUTIONS:
        assert found is final_QD
    else:
        assert found is None


def test_d_pace_divides_by_blocks():
    micro_batches = Feed(SEQUENCES, train_settings(), DRAFTER, 0, 1).read_step(0)
    num_blocks = sum(len(micro.batch.labels_AK) for micro in micro_batches)
    assert learner_of("d_pace")._weight_of(micro_batches) == num_blocks


def main(file: Path, sizes: list[int]) -> None:
    with joined_ranks() as ranks:
        taken = {size: {kind: take_steps_of(kind, ranks, size) for kind in KINDS} for size in sizes}
        if ranks.is_main:
            parts = {
                size: {
                    kind: (each.losses, each.gradient_norms, each.weights) for kind, each in by_kind.items()
                }
                for size, by_kind in taken.items()
            }
            torch.save(parts, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]])
