"""What the training of a head shows, by `train.reporting`'s means, and the table at its end.

Curves are a run of their own below those of the drafter, which count other steps.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from train.pairwise_manifest import Simulated
from train.reporting import Reporter, reporting


@dataclass(frozen=True)
class HeadReading:
    """The steps since the last reading, up to and with step `step` (1-based: steps taken)."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    """Of the last step, before clipping."""
    step_seconds: float
    simulated: str = ""
    """What held-out text said last."""

    def curves(self) -> Iterator[tuple[str, float]]:
        yield "pairwise/loss", self.loss
        yield "pairwise/learning_rate", self.learning_rate
        yield "pairwise/grad_norm", self.gradient_norm
        yield "pairwise/step_s", self.step_seconds

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}{self.simulated}"


class HeadReporter:
    """Opened by `reporting_head`."""

    def __init__(self, reporter: Reporter, budgets: Sequence[int]) -> None:
        self._reporter, self._budgets, self._simulated = reporter, budgets, ""

    def show(self, reading: HeadReading) -> None:
        self._reporter.show(replace(reading, simulated=self._simulated))

    def judge(self, step: int, before: Simulated, now: Simulated) -> None:
        """On held-out text; the progress shows the chain and the first of the trees from then on."""
        judged = list(rows(before, now, self._budgets))
        for name, was, is_now in judged:
            tag = f"pairwise/{name.replace(' ', '_')}"
            self._reporter.draw(tag, is_now, step)
            self._reporter.draw(f"{tag}_without", was, step)
        self._simulated = "".join(f"  {name} {was:.2f} -> {is_now:.2f}" for name, was, is_now in judged[:2])

    def say(self, text: str) -> None:
        self._reporter.say(text)


def rows(before: Simulated, after: Simulated, budgets: Sequence[int]) -> Iterator[tuple[str, float, float]]:
    yield "chain", before.chain, after.chain
    for budget, was, is_now in zip(budgets, before.trees, after.trees, strict=True):
        yield f"tree {budget}", was, is_now


def acceptance_table(before: Simulated, after: Simulated, budgets: Sequence[int]) -> Table:
    table = Table("simulated", "without", "with the head", box=None)
    for name, was, is_now in rows(before, after, budgets):
        table.add_row(name, f"{was:.2f}", f"{is_now:.2f}")
    return table


@contextmanager
def reporting_head(
    tensorboard_dir: Path, first_step: int, steps: int, budgets: Sequence[int]
) -> Iterator[HeadReporter]:
    with reporting(tensorboard_dir, first_step, steps, "pairwise head") as reporter:
        yield HeadReporter(reporter, budgets)
