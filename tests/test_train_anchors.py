"""What is learnt from: exactly the supervised slots, also across gaps, and no sequence below the floor."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_training import DRAFTER, HIDDEN, VOCAB, make_sequence, small_recipe, write_shards, write_target
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.shards import Sequence
from recipes.errors import UserError
from recipes.schema import Recipe, Train
from train.drafter import DFlashDrafter
from train.feed import Feed
from train.loop import distil
from train.ranks import Ranks
from train.step import Learner
from train.target_parts import TargetParts
from train.zero import start_engine

GAP = range(14, 20)
"""Tokens of another speaker between two answers."""


@pytest.fixture(scope="module")
def ranks(only_rank):
    return only_rank


def gapped_sequence() -> Sequence:
    """8 unsupervised tokens, then an answer, the gap, and an answer to the end."""
    sequence = make_sequence(0, 30)
    loss_mask = torch.arange(30) >= 8
    loss_mask[GAP.start : GAP.stop] = False
    return replace(sequence, loss_mask=loss_mask)


def loss_on(sequence: Sequence, ranks: Ranks) -> float:
    """Of every possible anchor's block."""
    train = Train(steps=1, sequences_per_step=1, num_anchors=99, precision="float32", zero_stage=0)
    generator = torch.Generator().manual_seed(0)
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    torch.manual_seed(0)
    engine = start_engine(DFlashDrafter(DRAFTER, HIDDEN), train, ranks)
    learner = Learner(engine, TargetParts(embedding, head), train, ranks)
    return learner.learn(Feed([sequence], train, DRAFTER, 0, 1).read_step(0), 0.0).loss


def with_another_token(sequence: Sequence, *positions: int) -> Sequence:
    token_ids = sequence.token_ids.clone()
    token_ids[list(positions)] = (token_ids[list(positions)] + 1) % 90
    return replace(sequence, token_ids=token_ids)


def test_a_gaps_own_tokens_have_no_part_in_the_loss(ranks):
    """But for its last, the anchor of the answer that follows."""
    sequence = gapped_sequence()
    assert loss_on(with_another_token(sequence, *GAP[:-1]), ranks) == loss_on(sequence, ranks)


@pytest.mark.parametrize("position", [GAP.start - 1, GAP.stop - 1, GAP.stop, 29])
def test_the_tokens_around_a_gap_and_the_last_have_one(position, ranks):
    sequence = gapped_sequence()
    assert loss_on(with_another_token(sequence, position), ranks) != loss_on(sequence, ranks)


# The floor, in a whole training


def run(folder: Path, ranks: Ranks, **train) -> Recipe:
    recipe = small_recipe(folder, write_target(folder / "target"), **({"steps": 2} | train))
    write_shards(recipe, num_sequences=8)
    distil(recipe, ranks)
    return recipe


def supervised_counts() -> list[int]:
    return [int(make_sequence(index).loss_mask.sum()) for index in range(8)]


def test_what_the_floor_leaves_out_is_said_once(ranks, tmp_path, capsys):
    counts = supervised_counts()
    floor = sorted(counts)[3]
    short = [count for count in counts if count < floor]
    run(tmp_path, ranks, least_anchors=floor)
    said = (
        f"train.least_anchors {floor} leaves out {len(short)} of 8 sequences, with {sum(short)} of"
        f" {sum(counts)} supervised tokens"
    )
    assert capsys.readouterr().out.count(said) == 1


def test_without_a_floor_nothing_is_said(ranks, tmp_path, capsys):
    run(tmp_path, ranks)
    assert "least_anchors" not in capsys.readouterr().out


def test_a_floor_above_every_sequence_ends_the_training(ranks, tmp_path):
    with pytest.raises(UserError, match="least_anchors is 99, but no sequence of the shards has more than"):
        run(tmp_path, ranks, least_anchors=99)


def test_coverage_is_drawn_as_its_mean_over_sequences_and_its_least(ranks, tmp_path):
    """One step sees each of the 8 sequences once, with at most 5 anchors."""
    recipe = run(tmp_path, ranks, sequences_per_step=8)
    shares = [min(1.0, 5 / count) for count in supervised_counts()]
    events = EventAccumulator(str(recipe.output_dir / "tensorboard")).Reload()
    mean = [point.value for point in events.Scalars("data/anchor_coverage")]
    least = [point.value for point in events.Scalars("data/anchor_coverage_least")]
    assert mean == pytest.approx([sum(shares) / 8] * 2)
    assert least == pytest.approx([min(shares)] * 2)
