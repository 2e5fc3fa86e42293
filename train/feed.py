"""Which sequences an optimizer step sees, in which order, with which anchors; read ahead by one step.

Everything is a function of (seed, number of sequences, step): ranks, micro-batches and resuming change
nothing.
"""

from collections.abc import Callable, Iterable, Iterator
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
from train.blocks import draw_anchors

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
class MicroBatch:
    visits: tuple[Visit, ...]
    batch: Batch

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

    def read_step(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of optimizer step `step` (0-based, of the whole training)."""
        share = self.train.sequences_per_step // self.world_size
        first = (step - self.first_step) * self.train.sequences_per_step + self.rank * share
        size = self.train.micro_batch_sequences
        return [self._read(range(start, start + size)) for start in range(first, first + share, size)]

    def _read(self, numbers: Iterable[int]) -> MicroBatch:
        visits = tuple(visit_at(number, len(self.shards), self.train.seed) for number in numbers)
        sequences = [self.shards[visit.index] for visit in visits]
        anchors = [
            draw_anchors(sequence.loss_mask, self.train.num_anchors, visit_generator(self.train.seed, visit))
            for sequence, visit in zip(sequences, visits, strict=True)
        ]
        bare = [visit.index for visit, anchors_A in zip(visits, anchors, strict=True) if not len(anchors_A)]
        if bare:
            raise UserError(
                f"sequence {bare[0]} of the shards has no supervised token: make the shards again"
            )
        return MicroBatch(visits, pack(sequences, anchors, self.drafter))


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
