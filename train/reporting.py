"""What a training shows while it runs: a progress bar (lines where there is no terminal) and TensorBoard.

The main rank's only; it is handed finished numbers and computes none.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True)
class CompanionReading:
    """Of the pairwise head that learns beside the drafter, over the same steps."""

    loss: float
    acceptance: Mapping[str, float]
    """Simulated acceptance length by way of drafting (`train.pairwise_companion.WAYS`)."""
    gradient_norm: float

    def curves(self) -> Iterator[tuple[str, float]]:
        yield "head/loss", self.loss
        yield "head/grad_norm", self.gradient_norm
        for way, acceptance in self.acceptance.items():
            yield f"head/{way}", acceptance


@dataclass(frozen=True)
class Reading:
    """The steps since the last reading, up to and with step `step` (1-based: steps taken)."""

    step: int
    loss: float
    acceptance: float
    """Simulated acceptance length of the chain."""
    share_by_depth: Sequence[float]
    """Share of blocks that accept at least 1, 2, ... drafts."""
    learning_rate: float
    gradient_norm: float | None
    anchor_coverage: float
    """Share of a sequence's candidates that are anchors, the mean over sequences; and the least."""
    least_anchor_coverage: float
    step_seconds: float
    wait_seconds: float
    """Of each step: how long it waited for its data."""
    tokens_per_second: float
    head: CompanionReading | None = None

    @property
    def served_acceptance(self) -> float:
        """Simulated acceptance length of the chain that an engine would draft."""
        return self.acceptance if self.head is None else self.head.acceptance["chain"]

    def curves(self) -> Iterator[tuple[str, float]]:
        yield "loss/train", self.loss
        yield "accept_sim/chain", self.acceptance
        for depth, share in enumerate(self.share_by_depth, start=1):
            yield f"accept_sim/depth_{depth}", share
        yield "train/learning_rate", self.learning_rate
        if self.gradient_norm is not None:
            yield "train/grad_norm", self.gradient_norm
        yield "data/anchor_coverage", self.anchor_coverage
        yield "data/anchor_coverage_least", self.least_anchor_coverage
        yield "time/step_s", self.step_seconds
        yield "data/wait_s", self.wait_seconds
        if self.head is not None:
            yield from self.head.curves()

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:,.0f} tokens/s"
        with_head = "" if self.head is None else f", {self.served_acceptance:.2f} with the head"
        return f"loss {self.loss:.4f}  accepts {self.acceptance:.2f}{with_head} (simulated)  {speed}"


class Shown(Protocol):
    """A `Reading`, or another training's; its str is what the progress says."""

    @property
    def step(self) -> int: ...
    @property
    def step_seconds(self) -> float: ...
    def curves(self) -> Iterator[tuple[str, float]]: ...


class Reporter:
    """Opened by `reporting`; `show` takes one reading after another."""

    def __init__(self, writer: SummaryWriter, bar: Progress, task: TaskID, steps: int):
        self.writer, self.bar, self.task, self.steps = writer, bar, task, steps

    def show(self, reading: Shown) -> None:
        for tag, value in reading.curves():
            self.writer.add_scalar(tag, value, reading.step)
        self.bar.update(self.task, completed=reading.step, description=str(reading))
        if not self.bar.console.is_terminal:
            eta_s = (self.steps - reading.step) * reading.step_seconds
            self.bar.console.print(f"step {reading.step}/{self.steps}  {reading}  ETA {eta_s:.0f} s")

    def draw(self, tag: str, value: float, step: int) -> None:
        """One point of a curve that no reading holds."""
        self.writer.add_scalar(tag, value, step)

    def say(self, text: str) -> None:
        self.bar.console.print(text)


@contextmanager
def reporting(
    tensorboard_dir: Path, first_step: int, steps: int, title: str = "distil"
) -> Iterator[Reporter]:
    """Curves go on at `first_step`; TensorBoard drops what a killed run wrote beyond it."""
    console = Console(soft_wrap=True, highlight=False)
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with (
        SummaryWriter(str(tensorboard_dir), purge_step=first_step + 1) as writer,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        yield Reporter(writer, bar, bar.add_task("", total=steps, completed=first_step), steps)
