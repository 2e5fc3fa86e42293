"""The capture sink: the target's tap states of every request, row by row, spooled to one file per request.

The runner (serve/seam/) feeds it after every step.  Making data, the driver (serve/generation.py) starts it,
reads the files and cuts them to the text that was returned; a server keeps the files of what it serves
(serve/admin_capture.py).  A request is captured from its first token or not at all.
Shapes: T=tokens of the step  R=requests of the step  H=hidden size  W=taps x H (the final states are one)
"""

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from safetensors import safe_open

from serve.engine import SECTION
from serve.tensor_file import TensorParts, write_tensors

_LOG = logging.getLogger(__name__)
_LONGEST_NAME = 200
_MOST_WAITING = 64  # files: where the disk is slower than the engine, memory must not be the buffer
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
    starts: np.ndarray
    """[R + 1]: rows starts[r] .. starts[r + 1] - 1 belong to request r."""
    prompt_lengths: np.ndarray
    """[R]"""
    taps: Sequence[torch.Tensor]
    """One [T, H] per tap, ascending; the final states last, where they are asked for."""
    positions: torch.Tensor
    """[T]"""
    token_ids: torch.Tensor
    """[T], as the request's text has them."""
    num_rejected: torch.Tensor
    """[R]: so many of a request's last rows were drafts that the target refused."""
    arrived: torch.cuda.Event | None
    """None where nothing is copied asynchronously."""


@dataclass
class _Rows:
    """A request's rows so far: `count` of them, contiguous from position 0."""

    prompt_length: int
    hidden: list[torch.Tensor] = field(default_factory=list)
    token_ids: list[torch.Tensor] = field(default_factory=list)
    count: int = 0

    def cut(self, count: int) -> None:
        self.hidden, self.token_ids = [torch.cat(self.hidden)[:count]], [torch.cat(self.token_ids)[:count]]
        self.count = count


class CaptureSink:
    """Holds the rows of running requests; those of a finished one go to its file, beside the next steps.

    A preempted request computes its rows again: the first copy of a position is kept (they are equal), up to
    the first token that is another one.
    """

    is_open = True
    """Takes steps."""
    error: str | None = None
    """What closed it, where nobody did."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._num_sequences = self._num_tokens = 0
        self._under_way: list[StepTaps] = []
        self._rows: dict[str, _Rows] = {}
        self._writer = ThreadPoolExecutor(1, "capture")
        self._writing: deque[tuple[Future[None], int]] = deque()

    def add_step(self, step: StepTaps) -> None:
        """Takes the step in, and cuts up those before it: their copies had a whole step's time to arrive."""
        self._settle()
        self._under_way.append(step)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Their files will be there after `wait`.  Raises OSError where one that came before cannot be."""
        self._settle()
        for request_id in sorted(set(request_ids) & self._rows.keys()):
            rows = self._rows.pop(request_id)
            self._writing.append((self._writer.submit(self._write, request_id, rows), rows.count))
        self.wait(_MOST_WAITING)

    def flush(self) -> None:
        """Finishes every request: an engine tells of the last ones only in a step that may never come."""
        self._settle()
        self.finish(list(self._rows))
        self.wait()

    def wait(self, most: int = 0) -> None:
        """Until no more than so many files are still to be written.  Raises OSError where one cannot be."""
        while self._writing and (len(self._writing) > most or self._writing[0][0].done()):
            written, count = self._writing.popleft()
            written.result()
            self._num_sequences += 1
            self._num_tokens += count

    def close(self) -> None:
        """Finishes every request, those still running as far as they are."""
        self.flush()
        self.is_open = False
        self._writer.shutdown()

    def status(self) -> dict[str, Any]:
        """As JSON: where it captures to, if it does, and what it has written."""
        self.wait()
        folder = str(self._directory) if self.is_open else None
        written = {"folder": folder, "sequences": self._num_sequences, "tokens": self._num_tokens}
        return written | ({"error": self.error} if self.error else {})

    def _settle(self) -> None:
        for step in self._under_way:
            if step.arrived is not None:
                step.arrived.synchronize()
            for row in range(len(step.request_ids)):
                self._add_rows(step, row)
        self._under_way.clear()

    def _add_rows(self, step: StepTaps, row: int) -> None:
        start = int(step.starts[row])
        valid = int(step.starts[row + 1]) - start - int(step.num_rejected[row])
        first, request_id = int(step.positions[start]), step.request_ids[row]
        if request_id not in self._rows and first > 0:
            return  # under way before the capture began, or flushed and computing one more token
        rows = self._rows.setdefault(request_id, _Rows(int(step.prompt_lengths[row])))
        assert first <= rows.count, f"{request_id}: rows {rows.count}..{first - 1} were never computed"
        _cut_to_text(rows, first, step.token_ids[start : start + valid])
        skip = rows.count - first
        if skip >= valid:
            return
        fresh = slice(start + skip, start + valid)
        rows.hidden.append(torch.cat([tap[fresh] for tap in step.taps], dim=-1))
        rows.token_ids.append(step.token_ids[fresh].clone())
        rows.count = first + valid

    def _write(self, request_id: str, rows: _Rows) -> None:
        width = rows.hidden[0].shape[1]
        parts = {
            "hidden": TensorParts(rows.hidden[0].dtype, (rows.count, width), rows.hidden),
            "token_ids": TensorParts(torch.int32, (rows.count,), rows.token_ids),
        }
        metadata = {"request_id": external_id(request_id), _PROMPT_TOKENS: str(rows.prompt_length)}
        path = self._find_place(request_id)
        # a driver reads it within seconds
        write_tensors(path, parts, metadata, survives_power_cut=False)

    def _find_place(self, request_id: str) -> Path:
        return spool_path(self._directory, external_id(request_id))


class TrafficSink(CaptureSink):
    """Of what a server serves: a disk that fills ends the capture, not the server; no file is overwritten."""

    def wait(self, most: int = 0) -> None:
        try:
            super().wait(most)
        except OSError as fault:
            self._give_up(f"capture stopped, requests go on: {fault}")

    def _give_up(self, error: str) -> None:
        _LOG.error(error)
        self.error, self.is_open = error, False
        self._rows.clear()
        self._writing.clear()
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _find_place(self, request_id: str) -> Path:
        """Under the engine's own id where a client has given the same id twice."""
        path = super()._find_place(request_id)
        return spool_path(self._directory, request_id) if path.exists() else path


def _cut_to_text(rows: _Rows, first: int, token_ids: torch.Tensor) -> None:
    """Forgets rows whose tokens are not the text's: a swap has running requests sample their last ones anew.

    token_ids: the text from position `first` on, as far as it is computed again.
    """
    if first == rows.count:
        return
    held = torch.cat(rows.token_ids)[first : first + len(token_ids)]
    others = torch.nonzero(held != token_ids[: len(held)])
    if len(others):
        rows.cut(first + int(others[0]))


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
