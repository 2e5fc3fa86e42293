"""The capture sink: the target's tap states of every request, row by row, spooled to one file per request.

Rows go from where a step's copy lands straight to the files, in a thread: the engine's own only hands steps
over, and waits where the disk is slower than it.  The runner (serve/seam/) does so after every step.  Making
data, the driver (serve/generation.py) starts it, reads the files and cuts them to the text that was returned;
a server keeps the files of what it serves (serve/admin_capture.py).  A request is captured from its first
token or not at all.
Shapes: T=tokens of the step  R=requests of the step  H=hidden size  W=taps x H (the final states are one)
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from safetensors import safe_open

from serve.engine import SECTION
from serve.tensor_file import TEMPORARY_SUFFIX, GrowingFile, TensorParts

_LOG = logging.getLogger(__name__)
_LONGEST_NAME = 200
_MOST_WAITING = 64  # steps: where the disk is slower than the engine, memory must not be the buffer
_PROMPT_TOKENS = "prompt_tokens"


def capture_options(target_layer_ids: Sequence[int], *, final_states: bool = False) -> dict[str, Any]:
    """additional_config of an engine that can capture the outputs of these layers.

    final_states: and, as one more tap, what the target's head reads.
    """
    return {SECTION: {"capture": {"target_layer_ids": list(target_layer_ids), "final_states": final_states}}}


@dataclass(frozen=True)
class StepTaps:
    """One step of the runner, copied to host memory (or on its way there until `arrived` says so)."""

    request_ids: Sequence[str]
    """[R], the engine's internal ids."""
    starts: torch.Tensor
    """[R + 1]: rows starts[r] .. starts[r + 1] - 1 belong to request r."""
    prompt_lengths: np.ndarray
    """[R]"""
    states: torch.Tensor
    """[T, W]: taps ascending; the final states last, where they are asked for."""
    positions: torch.Tensor
    """[T]"""
    token_ids: torch.Tensor
    """[T], as the request's text has them."""
    num_rejected: torch.Tensor
    """[R]: so many of a request's last rows were drafts that the target refused."""
    arrived: torch.cuda.Event | None = None
    """None where nothing is copied asynchronously."""
    release: Callable[[], None] = lambda: None
    """To be called once nobody reads `states` any more."""


@dataclass
class _Rows:
    """A request's rows so far: `count` of them, from position 0, with no gap."""

    file: GrowingFile
    token_ids: list[torch.Tensor] = field(default_factory=list)
    count: int = 0

    def cut_to_text(self, first: int, token_ids: torch.Tensor) -> None:
        """Forgets rows whose tokens are not the text's: a swap has requests sample their last ones anew.

        token_ids: the text from position `first` on, as far as it is computed again.
        """
        if first == self.count:
            return
        held = torch.cat(self.token_ids)[first : first + len(token_ids)]
        others = torch.nonzero(held != token_ids[: len(held)])
        if len(others):
            self.count = first + int(others[0])
            self.token_ids = [torch.cat(self.token_ids)[: self.count]]


class Spool:
    """Writes each request's rows to its file as steps bring them.

    A preempted request computes its rows again: the first copy of a position is kept (they are equal), up to
    the first token that is another one.
    """

    def __init__(self, directory: Path, *, overwrites: bool = True) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._overwrites = directory, overwrites
        self._rows: dict[str, _Rows] = {}
        self.num_sequences = self.num_tokens = 0

    def add_step(self, step: StepTaps) -> None:
        """Waits until the step's copies are there."""
        if step.arrived is not None:
            step.arrived.synchronize()
        for row in range(len(step.request_ids)):
            self._add_rows(step, row)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Their files are whole; of requests without rows there is none."""
        for request_id in sorted(set(request_ids) & self._rows.keys()):
            rows = self._rows[request_id]
            rows.file.finish(self._find_place(request_id), rows.count, torch.cat(rows.token_ids).int())
            del self._rows[request_id]
            self.num_sequences += 1
            self.num_tokens += rows.count

    def finish_all(self) -> None:
        """An engine tells of its last requests only in a step that may never come."""
        self.finish(list(self._rows))

    def discard(self) -> None:
        """Removes the files of requests that still run."""
        for rows in self._rows.values():
            rows.file.discard()
        self._rows.clear()

    def _add_rows(self, step: StepTaps, row: int) -> None:
        start = int(step.starts[row])
        valid = int(step.starts[row + 1]) - start - int(step.num_rejected[row])
        first, request_id = int(step.positions[start]), step.request_ids[row]
        if request_id not in self._rows:
            if first > 0:
                return  # under way before the capture began, or flushed and computing one more token
            self._rows[request_id] = _Rows(self._open(step, row))
        rows = self._rows[request_id]
        assert first <= rows.count, f"{request_id}: rows {rows.count}..{first - 1} were never computed"
        rows.cut_to_text(first, step.token_ids[start : start + valid])
        skip = rows.count - first
        if skip >= valid:
            return
        fresh = slice(start + skip, start + valid)
        rows.file.write_rows(rows.count, step.states[fresh])
        rows.token_ids.append(step.token_ids[fresh].clone())
        rows.count = first + valid

    def _open(self, step: StepTaps, row: int) -> GrowingFile:
        request_id = step.request_ids[row]
        path = spool_path(self._directory, request_id)  # the engine's own id: no other request's
        one_row = {
            "hidden": TensorParts(step.states.dtype, (1, step.states.shape[1]), ()),
            "token_ids": TensorParts(torch.int32, (1,), ()),
        }
        metadata = {
            "request_id": external_id(request_id),
            _PROMPT_TOKENS: str(int(step.prompt_lengths[row])),
        }
        return GrowingFile(path.with_name(path.name + TEMPORARY_SUFFIX), one_row, metadata)

    def _find_place(self, request_id: str) -> Path:
        """Under the engine's own id where a client has given the same id twice."""
        path = spool_path(self._directory, external_id(request_id))
        return path if self._overwrites or not path.exists() else spool_path(self._directory, request_id)


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

    def flush(self) -> None:
        """Finishes every request."""
        self._give(self._spool.finish_all)
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


def external_id(request_id: str) -> str:
    """The caller's id of a request; the engine's own adds `-` and eight random digits."""
    return request_id.rpartition("-")[0]


def spool_path(directory: Path, request_id: str) -> Path:
    """A server's clients may choose ids: none leads out of the directory or is too long for a name."""
    name = quote(request_id, safe="")
    if len(name) > _LONGEST_NAME:
        name = hashlib.sha256(request_id.encode()).hexdigest()
    return directory / f"{name}.safetensors"


def read_spooled(directory: Path, request_id: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden [rows, W], token_ids int32 [rows]): row j is the state of the request's token j.

    rows is the text's length, or one less, or some more: the last token may not have been computed, and
    the engine may have run past the end of the text.  The caller knows the text and cuts.
    """
    path = spool_path(directory, request_id)
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("hidden"), file.get_tensor("token_ids")


def read_prompt_length(path: Path) -> int:
    """How many of a captured file's first tokens are the prompt's: those that a loss leaves out."""
    with safe_open(path, framework="pt") as file:
        return int(file.metadata()[_PROMPT_TOKENS])
