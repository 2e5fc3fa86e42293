"""The capture sink: the target's tap states of every request, row by row, spooled to one file per request.

Rows go from where a step's copy lands to the files (serve/spool.py), in a thread: the engine's own only hands
steps over, and waits where the disk is slower than it.  The runner (serve/seam/) does so after every step.
Making data, the driver (serve/generation.py) starts it, reads the files and cuts them to the text that was
returned; a server keeps the files of what it serves (serve/admin_capture.py).  A request is captured from its
first token or not at all.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serve.engine import SECTION
from serve.spool import Spool, StepTaps

_LOG = logging.getLogger(__name__)
_MOST_WAITING = 64  # steps: where the disk is slower than the engine, memory must not be the buffer


def capture_options(target_layer_ids: Sequence[int], *, final_states: bool = False) -> dict[str, Any]:
    """additional_config of an engine that can capture the outputs of these layers.

    final_states: and, as one more tap, what the target's head reads.
    """
    return {SECTION: {"capture": {"target_layer_ids": list(target_layer_ids), "final_states": final_states}}}


class CaptureSink:
    """A spool in a thread of its own: an engine goes on while its rows are on their way."""

    is_open = True
    """Takes steps."""
    error: str | None = None
    """What closed it, where nobody did."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._spool = self._make_spool(directory)
        self._thread = ThreadPoolExecutor(1, "capture")
        self._tasks: deque[Future[None]] = deque()

    def add_step(self, step: StepTaps) -> None:
        """Raises OSError, as all do that are called after it, where rows before could not be written."""
        self._give(self._take, step)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Their files will be there after `wait`."""
        self._give(self._spool.finish, list(request_ids))

    def flush(self, names: Collection[str] | None = None) -> None:
        """Finishes requests that ended, by their external ids, or every one: their files are there."""
        self._give(self._spool.finish_named, names)
        self.wait()

    def wait(self, most: int = 0) -> None:
        """Until no more than so many things are still to be done."""
        while self._tasks and (len(self._tasks) > most or self._tasks[0].done()):
            self._tasks.popleft().result()

    def close(self) -> None:
        """Finishes every request, those still running as far as they are."""
        self.flush()
        self.is_open = False
        self._thread.shutdown()

    def status(self) -> dict[str, Any]:
        """As JSON: where it captures to, if it does, and what it has written."""
        self.wait()
        folder = str(self._directory) if self.is_open else None
        written = {"sequences": self._spool.num_sequences, "tokens": self._spool.num_tokens}
        return {"folder": folder} | written | ({"error": self.error} if self.error else {})

    def _make_spool(self, directory: Path) -> Spool:
        return Spool(directory)

    def _give(self, act: Callable[..., None], *given: Any) -> None:
        """To the thread, or to nobody once this is closed."""
        if self.is_open:
            self._tasks.append(self._thread.submit(act, *given))
            self.wait(_MOST_WAITING)

    def _take(self, step: StepTaps) -> None:
        try:
            self._spool.add_step(step)
        finally:
            step.release()


class TrafficSink(CaptureSink):
    """Of what a server serves: a disk that fills ends the capture, not the server; no file is overwritten."""

    def wait(self, most: int = 0) -> None:
        try:
            super().wait(most)
        except OSError as fault:
            self._give_up(f"capture into {self._directory} stopped, requests go on: {fault}")

    def _make_spool(self, directory: Path) -> Spool:
        return Spool(directory, overwrites=False)

    def _give_up(self, error: str) -> None:
        _LOG.error(error)
        self.error, self.is_open = error, False
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._thread.submit(self._spool.discard)
        self._thread.shutdown(wait=False)
