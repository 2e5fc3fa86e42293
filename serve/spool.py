"""Rows of tap states on their way from steps to files, one for each request.

A step has a row or some for each of many requests, and a file takes rows of one.  Where steps are small their
rows are held until there are some for each file: a write for every request in every step would take longer
than a small target's steps do.
Shapes: T=tokens of the step  R=requests of the step  H=hidden size  W=taps x H (the final states are one)
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from safetensors import safe_open

from serve.tensor_file import TEMPORARY_SUFFIX, GrowingFile, TensorParts

MOST_HELD_STEPS = 32
MOST_HELD_BYTES = 64 * 2**20
"""Of states; a step of a quarter of it is written at once."""
_LONGEST_NAME = 200
_PROMPT_TOKENS = "prompt_tokens"


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


@dataclass(frozen=True)
class _HostStep:
    """A step that has arrived, as numbers; the fields are those of `StepTaps`."""

    request_ids: Sequence[str]
    starts: Sequence[int]
    prompt_lengths: np.ndarray
    states: torch.Tensor
    positions: Sequence[int]
    token_ids: Sequence[int]
    num_rejected: Sequence[int]


@dataclass
class _Rows:
    """A request's rows so far: `count` of them, from position 0, with no gap."""

    file: GrowingFile
    token_ids: list[int] = field(default_factory=list)
    count: int = 0
    held: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(First position, states) of what is not in the file yet, in the order in which it came."""

    def cut_to_text(self, first: int, token_ids: Sequence[int]) -> None:
        """Forgets rows whose tokens are not the text's: a swap has requests sample their last ones anew.

        token_ids: the text from position `first` on, as far as it is computed again.
        """
        again = zip(self.token_ids[first:], token_ids, strict=False)
        for position, (held, of_text) in enumerate(again, start=first):
            if held != of_text:
                self.count = position
                del self.token_ids[position:]
                return

    def add(self, first: int, states: torch.Tensor, token_ids: Sequence[int]) -> None:
        """Rows from `first` on, some of which may be there already: those stay."""
        skip = self.count - first
        if skip < len(token_ids):
            self.held.append((self.count, states[skip:]))
            self.token_ids += token_ids[skip:]
            self.count = first + len(token_ids)

    def write_held(self) -> None:
        """Runs of rows that follow one another are one write; a row that came later is written over."""
        run: list[torch.Tensor] = []
        start = end = 0
        for first, states in self.held:
            if first != end:
                self._write(start, run)
                run, start = [], first
            run.append(states)
            end = first + len(states)
        self._write(start, run)
        self.held.clear()

    def _write(self, first: int, run: Sequence[torch.Tensor]) -> None:
        if run:
            self.file.write_rows(first, run[0] if len(run) == 1 else torch.cat(list(run)))


class Spool:
    """Writes each request's rows to its file, as steps bring them or some steps later.

    A preempted request computes its rows again: the first copy of a position is kept (they are equal), up to
    the first token that is another one.
    """

    def __init__(self, directory: Path, *, overwrites: bool = True) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._overwrites = directory, overwrites
        self._rows: dict[str, _Rows] = {}
        self._held_steps = self._held_bytes = 0
        self.num_sequences = self.num_tokens = 0

    def add_step(self, step: StepTaps) -> None:
        """Waits until the step's copies are there.  Afterwards nobody reads the step's tensors any more."""
        if step.arrived is not None:
            step.arrived.synchronize()
        is_small = step.states.nbytes <= MOST_HELD_BYTES // 4
        on_host = _HostStep(
            step.request_ids,
            step.starts.tolist(),
            step.prompt_lengths,
            step.states.clone() if is_small else step.states,
            step.positions.tolist(),
            step.token_ids.tolist(),
            step.num_rejected.tolist(),
        )
        for row in range(len(step.request_ids)):
            self._add_rows(on_host, row)
        self._held_steps += 1
        self._held_bytes += step.states.nbytes
        if not is_small or self._held_steps >= MOST_HELD_STEPS or self._held_bytes >= MOST_HELD_BYTES:
            self._write_held()

    def finish(self, request_ids: Iterable[str]) -> None:
        """Their files are whole; of requests without rows there is none."""
        for request_id in sorted(set(request_ids) & self._rows.keys()):
            rows = self._rows[request_id]
            rows.write_held()
            token_ids = torch.tensor(rows.token_ids, dtype=torch.int32)
            rows.file.finish(self._find_place(request_id), rows.count, token_ids)
            del self._rows[request_id]
            self.num_sequences += 1
            self.num_tokens += rows.count

    def finish_named(self, names: Collection[str] | None) -> None:
        """By their external ids; None: all.  The engine tells of it a step later, which may never come."""
        self.finish([each for each in self._rows if names is None or external_id(each) in names])

    def discard(self) -> None:
        """Removes the files of requests that still run."""
        for rows in self._rows.values():
            rows.file.discard()
        self._rows.clear()

    def _write_held(self) -> None:
        for rows in self._rows.values():
            rows.write_held()
        self._held_steps = self._held_bytes = 0

    def _add_rows(self, step: _HostStep, row: int) -> None:
        start, request_id = step.starts[row], step.request_ids[row]
        end = step.starts[row + 1] - step.num_rejected[row]
        first = step.positions[start]
        if request_id not in self._rows:
            if first > 0:
                return  # under way before the capture began, or flushed and computing one more token
            self._rows[request_id] = _Rows(self._open(step, row))
        rows, token_ids = self._rows[request_id], step.token_ids[start:end]
        assert first <= rows.count, f"{request_id}: rows {rows.count}..{first - 1} were never computed"
        if first < rows.count:
            rows.cut_to_text(first, token_ids)
        rows.add(first, step.states[start:end], token_ids)

    def _open(self, step: _HostStep, row: int) -> GrowingFile:
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


# Names, and what is in the files


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
