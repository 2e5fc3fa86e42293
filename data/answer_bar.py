"""How far the answers are, on stderr: a bar with tokens a second and what is left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class AnswerBar:
    """Advanced by the engines' steps."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._tokens = 0
        self._start: float | None = None

    def advance(self, new_tokens: int, finished_answers: int) -> None:
        if self._start is None:  # an engine's start takes its time
            self._start = time.monotonic()
        self._tokens += new_tokens
        self._progress.update(self._task, advance=finished_answers, rate=self._rate)

    def tell(self, line: str) -> None:
        self._progress.console.print(f"{line} ({self._rate:.0f} tokens/s so far)")

    @property
    def _rate(self) -> float:
        seconds = 0.0 if self._start is None else time.monotonic() - self._start
        return self._tokens / seconds if seconds else 0.0


@contextmanager
def answer_bar(num_answers: int) -> Iterator[AnswerBar]:
    columns = (
        TextColumn("answers"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True, highlight=False)) as progress:
        yield AnswerBar(progress, progress.add_task("", total=num_answers, rate=0.0))
