"""Faults of capture, put for a while into an engine of this process: what must never reach a shard."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from serve.engine import is_cuda
from serve.generation import CapturingEngine
from serve.spool import Spool
from serve.tensor_file import GrowingFile

Fault = Callable[[], AbstractContextManager[Any]]


@contextmanager
def zero_rows(after: int) -> Iterator[None]:
    """Every request's, once it has so many."""
    write = GrowingFile.write_rows

    def write_zeros(file, first, rows):
        is_late = torch.arange(first, first + len(rows)) >= after
        write(file, first, rows.masked_fill(is_late[:, None], 0))

    with patch.object(GrowingFile, "write_rows", write_zeros):
        yield


@contextmanager
def rows_of_another() -> Iterator[None]:
    """A request of a step gets the next one's, as if the step's rows began where its second request's do."""
    add_rows = Spool._add_rows

    def add_others(spool, step, row):
        of_first = int(step.starts[1])
        add_rows(spool, replace(step, states=step.states.roll(-of_first, 0)), row)

    with patch.object(Spool, "_add_rows", add_others):
        yield


@contextmanager
def lost_rows(request: str, count: int) -> Iterator[None]:
    """The last ones of a request."""
    finish = Spool.finish

    def finish_with_fewer(spool, request_ids):
        for request_id in request_ids:
            if request_id.startswith(f"{request}-"):
                rows = spool._rows[request_id]
                rows.count -= count
                del rows.token_ids[-count:]
        finish(spool, request_ids)

    with patch.object(Spool, "finish", finish_with_fewer):
        yield


def lost_request(request: str) -> AbstractContextManager[Any]:
    """It is never written."""
    finish = Spool.finish

    def finish_others(spool, request_ids):
        finish(spool, [each for each in request_ids if not each.startswith(f"{request}-")])

    return patch.object(Spool, "finish", finish_others)


def untidy_paths() -> AbstractContextManager[Any]:
    """Accepted nodes keep their states where the tree had them."""
    return patch.object(_runtime_class(), "tidy_states", lambda *_: None)


@contextmanager
def other_taps(engine: CapturingEngine, layers: Sequence[int], shift: int) -> Iterator[None]:
    """The target is tapped so many layers later."""

    def tap(worker: Any, ids: tuple[int, ...]) -> None:
        worker.model_runner.model.set_aux_hidden_state_layers(ids)

    right = tuple(layer + 1 for layer in layers)
    engine._engine.collective_rpc(tap, args=(tuple(layer + shift for layer in right),))
    try:
        yield
    finally:
        engine._engine.collective_rpc(tap, args=(right,))


@contextmanager
def counted_moves() -> Iterator[list[int]]:
    """No fault: of each step the requests whose accepted path was no chain, so that states had to move."""
    runtime_class = _runtime_class()
    tidy, moves = runtime_class.tidy_states, []

    def tidy_and_count(runtime, input_batch, tap_states):
        step = runtime.step_of(input_batch)
        if step is not None and step.walk is not None and not step.are_states_tidy:
            path_BL = step.walk.path_BL  # a chain's is 0, 1, 2, ...
            places_L = torch.arange(path_BL.shape[1], device=path_BL.device)
            is_accepted_BL = places_L < step.walk.num_accepted_B[:, None]
            moves.append(int((is_accepted_BL & (path_BL != places_L)).any(dim=1).sum()))
        tidy(runtime, input_batch, tap_states)

    with patch.object(runtime_class, "tidy_states", tidy_and_count):
        yield moves


def _runtime_class() -> Any:
    # vllm's environment comes first
    from serve.seam import cuda_runtime, runtime  # noqa: PLC0415

    return cuda_runtime.CudaTreeRuntime if is_cuda() else runtime.TreeRuntime
