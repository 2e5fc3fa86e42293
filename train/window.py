"""What the steps between two readings add up to, and how long they took.  Called by `train/loop.py`."""

import time
from collections.abc import Iterable, Iterator
from functools import reduce

from train.feed import Coverage, MicroBatch
from train.pairwise_companion import Taught
from train.ranks import Ranks
from train.reporting import CompanionReading, Reading
from train.step import Totals


class Window:
    """The steps since the last reading, and the time they took; saving is not counted."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.totals: Totals | None = None
        self.coverage = Coverage()
        self.steps = 0
        self.seconds = self.wait_seconds = 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        self.since = time.perf_counter()

    def timed(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """The same items; the time each takes to come is counted as waiting."""
        asked = time.perf_counter()
        for micro_batches in steps:
            self.wait_seconds += time.perf_counter() - asked
            yield micro_batches
            asked = time.perf_counter()

    def add(self, totals: Totals, micro_batches: Iterable[MicroBatch]) -> None:
        now = time.perf_counter()
        self.seconds, self.since = self.seconds + now - self.since, now
        self.steps += 1
        self.totals = totals if self.totals is None else self.totals.then(totals)
        self.coverage = reduce(Coverage.then, (each.coverage for each in micro_batches), self.coverage)

    def read(self, step: int, learning_rate: float, ranks: Ranks) -> Reading:
        """What the window holds, which is then empty; all ranks call it."""
        totals = self.totals
        assert totals is not None, f"no step was taken before the reading at step {step}"
        coverage = reduce(Coverage.then, ranks.gather(self.coverage))
        reading = Reading(
            step=step,
            loss=totals.loss,
            acceptance=totals.acceptance,
            share_by_depth=totals.share_by_depth,
            learning_rate=learning_rate,
            gradient_norm=totals.gradient_norm,
            anchor_coverage=coverage.mean,
            least_anchor_coverage=coverage.least,
            step_seconds=self.seconds / self.steps,
            wait_seconds=self.wait_seconds / self.steps,
            tokens_per_second=totals.num_tokens / self.seconds,
            head=None if totals.taught is None else _read_companion(totals.taught),
        )
        self._clear()
        return reading


def _read_companion(taught: Taught) -> CompanionReading:
    return CompanionReading(taught.loss, taught.acceptance, taught.gradient_norm)
