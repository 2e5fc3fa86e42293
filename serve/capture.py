"""The capture sink: the target's tap states of every request, row by row, spooled to one file per request.

The runner (serve/seam/) feeds it after every step; the driver (serve/generation.py) starts it, reads the
files and cuts them to the text that was returned.  A request is captured from its first token or not at all.
Shapes: T=tokens of the step  R=requests of the step  H=hidden size  W=taps x H
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from serve.engine import SECTION
from serve.tensor_file import TensorParts, write_tensors


def capture_options(target_layer_ids: Sequence[int]) -> dict[str, Any]:
    """additional_config of an engine that can capture the outputs of these layers."""
    return {SECTION: {"capture": {"target_layer_ids": list(target_layer_ids)}}}


@dataclass(frozen=True)
class StepTaps:
    """One step of the runner, copied to host memory (or on its way there until `arrived` says so)."""

    request_ids: Sequence[str]
    """[R], the engine's internal ids."""
    starts: np.ndarray
    """[R + 1]: rows starts[r] .. starts[r + 1] - 1 belong to request r."""
    taps: Sequence[torch.Tensor]
    """One [T, H] per tap, ascending."""
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

    hidden: list[torch.Tensor] = field(default_factory=list)
    token_ids: list[torch.Tensor] = field(default_factory=list)
    count: int = 0


class CaptureSink:
    """Holds the rows of running requests only; a finished request goes to its file.

    A preempted request computes its rows again: the first copy of a position is kept (they are equal).
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._under_way: list[StepTaps] = []
        self._rows: dict[str, _Rows] = {}

    def add_step(self, step: StepTaps) -> None:
        """Takes the step in, and cuts up those before it: their copies had a whole step's time to arrive."""
        self._settle()
        self._under_way.append(step)

    def finish(self, request_ids: Iterable[str]) -> None:
        self._settle()
        for request_id in sorted(set(request_ids) & self._rows.keys()):
            self._write(request_id, self._rows.pop(request_id))

    def flush(self) -> None:
        """Finishes every request: an engine tells of the last ones only in a step that may never come."""
        self._settle()
        self.finish(list(self._rows))

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
        rows = self._rows.setdefault(request_id, _Rows())
        assert first <= rows.count, f"{request_id}: rows {rows.count}..{first - 1} were never computed"
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
        path = spool_path(self._directory, external_id(request_id))
        write_tensors(path, parts, survives_power_cut=False)  # the driver reads it within seconds


def external_id(request_id: str) -> str:
    """The caller's id of a request; the engine's own adds `-` and eight random digits."""
    return request_id.rpartition("-")[0]


def spool_path(directory: Path, request_id: str) -> Path:
    return directory / f"{request_id}.safetensors"


def read_spooled(directory: Path, request_id: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden [rows, W], token_ids int32 [rows]): row j is the state of the request's token j.

    rows is the text's length, or one less, or some more: the last token may not have been computed, and
    the engine may have run past the end of the text.  The caller knows the text and cuts.
    """
    path = spool_path(directory, request_id)
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("hidden"), file.get_tensor("token_ids")
