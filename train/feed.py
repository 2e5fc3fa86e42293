"""Which sequences an optimizer step sees, in which order, with which anchors; read ahead by one step.

Everything is a function of (seed, number of sequences, step): ranks, micro-batches and resuming change
nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch

from data.shards import Shards
from recipes.errors import UserError
from recipes.schema import Drafter, Train
from train.batches import Batch, pack
from train.blocks import anchor_candidates, draw_anchors
from train.sending import Sent

Item = TypeVar("Item")


@dataclass(frozen=True)
class Visit:
    """One look at one sequence."""

    epoch: int
    index: int
    """Of the sequence in the shards."""


@lru_cache(maxsize=2)  # a step may straddle two epochs
def epoch_order(num_sequences: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_sequences)


def visit_at(number: int, num_sequences: int, seed: int) -> Visit:
    """The `number`-th sequence of the whole training, 0-based."""
    epoch, place = divmod(number, num_sequences)
    return Visit(epoch, int(epoch_order(num_sequences, seed, epoch)[place]))


def visit_generator(seed: int, visit: Visit) -> torch.Generator:
    entropy = np.random.SeedSequence([seed, visit.epoch, visit.index]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(entropy >> np.uint64(1)))  # manual_seed takes 63 bits


@dataclass(frozen=True)
class Choice:
    """Which sequences of the shards are trained on: those with `least_anchors` candidates or more."""

    least_anchors: int
    candidates_N: np.ndarray
    """Of every sequence of the shards: tokens that an anchor may stand before."""

    @property
    def kept(self) -> np.ndarray:
        """Their numbers, ascending."""
        return (self.candidates_N >= self.least_anchors).nonzero()[0]

    def __str__(self) -> str:
        short_N = self.candidates_N[self.candidates_N < self.least_anchors]
        return (
            f"train.least_anchors {self.least_anchors} leaves out {len(short_N):,} of"
            f" {len(self.candidates_N):,} sequences, with {short_N.sum():,} of"
            f" {self.candidates_N.sum():,} supervised tokens"
        )


def choose_sequences(shards: Shards, least_anchors: int) -> Choice:
    """Raises UserError when a sequence has no supervised token, or none has enough."""
    candidates = [len(anchor_candidates(loss_mask_L)) for loss_mask_L in shards.read_loss_masks()]
    for index, count in enumerate(candidates):
        _require_supervised(index, count)
    choice = Choice(least_anchors, np.array(candidates))
    if not len(choice.kept):
        raise UserError(
            f"train.least_anchors is {least_anchors}, but no sequence of the shards has more than"
            f" {max(candidates, default=0)} supervised tokens: lower it"
        )
    return choice


def _require_supervised(index: int, num_candidates: int) -> None:
    if not num_candidates:
        raise UserError(f"sequence {index} of the shards has no supervised token: make the shards again")


@dataclass(frozen=True)
class Coverage:
    """How much of each sequence is learnt from in a visit: the share of its candidates that are anchors."""

    share_sum: float = 0.0
    sequences: int = 0
    least: float = 1.0

    @property
    def mean(self) -> float:
        return self.share_sum / self.sequences

    def then(self, later: "Coverage") -> "Coverage":
        return Coverage(
            self.share_sum + later.share_sum,
            self.sequences + later.sequences,
            min(self.least, later.least),
        )


@dataclass(frozen=True)
class MicroBatch:
    visits: tuple[Visit, ...]
    batch: Batch
    """On the host."""
    coverage: Coverage = Coverage()
    sent: Sent | None = None
    """The batch, where it is on its way already."""

    def sick_visits(self) -> list[Visit]:
        """Those whose tap states are not all finite."""
        taps_SE, documents = self.batch.taps_SE, self.batch.documents
        finite = [bool(taps_SE[document.context].isfinite().all()) for document in documents]
        return [visit for visit, is_finite in zip(self.visits, finite, strict=True) if not is_finite]


@dataclass(frozen=True)
class Feed:
    """The shards as one rank trains on them."""

    shards: Shards
    train: Train
    drafter: Drafter
    rank: int
    world_size: int
    first_step: int = 0
    """Of the round."""
    kept: Many[int] | np.ndarray | None = None
    """Numbers of the sequences that are trained on, ascending; None: all."""
    pins: bool = False
    """Batches are for a GPU."""

    def read_step(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of optimizer step `step` (0-based, of the whole training)."""
        share = self.train.sequences_per_step // self.world_size
        first = (step - self.first_step) * self.train.sequences_per_step + self.rank * share
        size = self.train.micro_batch_sequences
        return [self._read(range(start, start + size)) for start in range(first, first + share, size)]

    def _read(self, numbers: Iterable[int]) -> MicroBatch:
        visits = tuple(self._visit(number) for number in numbers)
        sequences = [self.shards[visit.index] for visit in visits]
        anchors, coverage = [], Coverage()
        for visit, sequence in zip(visits, sequences, strict=True):
            num_candidates = len(anchor_candidates(sequence.loss_mask))
            _require_supervised(visit.index, num_candidates)
            generator = visit_generator(self.train.seed, visit)
            anchors.append(draw_anchors(sequence.loss_mask, self.train.num_anchors, generator))
            share = len(anchors[-1]) / num_candidates
            coverage = coverage.then(Coverage(share, 1, share))
        batch = pack(sequences, anchors, self.drafter, pins=self.pins)
        return MicroBatch(visits, batch, coverage)

    def _visit(self, number: int) -> Visit:
        if self.kept is None:
            return visit_at(number, len(self.shards), self.train.seed)
        visit = visit_at(number, len(self.kept), self.train.seed)
        return Visit(visit.epoch, int(self.kept[visit.index]))


def read_ahead(read: Callable[[int], Item], steps: Iterable[int]) -> Iterator[Item]:
    """`read` of every step, the next one read in a thread while the caller uses the last."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed") as pool:
        pending = None
        for step in steps:
            coming = pool.submit(read, step)
            if pending is not None:
                yield pending.result()
            pending = coming
        if pending is not None:
            yield pending.result()
