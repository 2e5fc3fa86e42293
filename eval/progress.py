"""Where a measurement stands, on stderr: a line per phase with its bar, its time so far and what is left."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Phases:
    """Shows the phases of a job one after the other and remembers what each took."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Clocks its block; yields what to call as each of `total` parts is done (None: no parts)."""
        task = self._show(name, total)
        start = time.monotonic()
        yield lambda: self._progress.advance(task)
        self.seconds[name] = time.monotonic() - start
        if total is None:
            self._progress.update(task, total=1, completed=1)

    def _show(self, name: str, total: int | None) -> TaskID:
        if not self._progress.console.is_terminal:  # a log gets no bars until the end
            self._progress.console.print(f"{name} ...")
        return self._progress.add_task(name, total=total)


@contextmanager
def show_phases() -> Iterator[Phases]:
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Phases(progress)
