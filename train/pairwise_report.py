"""What the training of a head shows: a progress bar (lines where there is no terminal) and TensorBoard.

It is handed finished numbers and computes none.  Curves are a run of their own below those of the drafter,
which count other steps.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.utils.tensorboard import SummaryWriter

from train.pairwise_manifest import Simulated


@dataclass(frozen=True)
class HeadReading:
    """The steps since the last reading, up to and with step `step` (1-based: steps taken)."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    """Of the last step, before clipping."""
    step_seconds: float

    def curves(self) -> Iterator[tuple[str, float]]:
        yield "pairwise/loss", self.loss
        yield "pairwise/learning_rate", self.learning_rate
        yield "pairwise/grad_norm", self.gradient_norm
        yield "pairwise/step_s", self.step_seconds


class HeadReporter:
    """Opened by `reporting_head`."""

    def __init__(
        self, writer: SummaryWriter, bar: Progress, task: TaskID, steps: int, budgets: Sequence[int]
    ) -> None:
        self._writer, self._bar, self._task = writer, bar, task
        self._steps, self._budgets = steps, budgets
        self._simulated = ""

    def show(self, reading: HeadReading) -> None:
        for tag, value in reading.curves():
            self._writer.add_scalar(tag, value, reading.step)
        said = f"loss {reading.loss:.4f}{self._simulated}"
        self._bar.update(self._task, completed=reading.step, description=said)
        if not self._bar.console.is_terminal:
            eta_s = (self._steps - reading.step) * reading.step_seconds
            self.say(f"step {reading.step}/{self._steps}  {said}  ETA {eta_s:.0f} s")

    def judge(self, step: int, before: Simulated, now: Simulated) -> None:
        """On held-out text; the progress shows the chain and the first of the trees from then on."""
        for name, was, is_now in rows(before, now, self._budgets):
            tag = f"pairwise/{name.replace(' ', '_')}"
            self._writer.add_scalar(tag, is_now, step)
            self._writer.add_scalar(f"{tag}_without", was, step)
        pairs = list(rows(before, now, self._budgets))[:2]
        self._simulated = "".join(f"  {name} {was:.2f} -> {is_now:.2f}" for name, was, is_now in pairs)

    def say(self, text: str) -> None:
        self._bar.console.print(text)


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
    """Curves go on at `first_step`; TensorBoard drops what a killed run wrote beyond it."""
    console = Console(soft_wrap=True, highlight=False)
    columns = (
        TextColumn("pairwise head"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with (
        SummaryWriter(str(tensorboard_dir), purge_step=first_step + 1) as writer,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("", total=steps, completed=first_step)
        yield HeadReporter(writer, bar, task, steps, budgets)
