"""Capture on the V2 model runner: its class gains the few lines that feed a CaptureSink after every step.

`collective_rpc` drives it.  Making data: start_capture(directory) before the first request, and
flush_capture(names) of those that ended.  A server: start_capture(directory, True), capture_status() and
stop_capture() at any time.
"""
# ruff: noqa: PLC0415  (vLLM's modules are imported once vLLM calls: on a CPU its worker has to come first)

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from serve.capture import CaptureSink, TrafficSink
from serve.seam.checks import CAPTURE_FIELDS, CAPTURE_SIGNATURES, SeamError, check_fields, check_signatures
from serve.spool import StepTaps

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as _Runner
else:
    _Runner = object


def attach_capture(worker: Any, target_layer_ids: tuple[int, ...], *, final_states: bool = False) -> None:
    """Makes the worker's runner a capturing one, and the worker answer what drives it."""
    check_signatures(CAPTURE_SIGNATURES)
    check_fields(CAPTURE_FIELDS)
    _check_config(worker.vllm_config, worker.model_runner, target_layer_ids)
    runner = worker.model_runner
    runner.__class__ = type(f"Capturing{type(runner).__name__}", (CapturingRunner, type(runner)), {})
    runner.target_layer_ids, runner.captures_final_states = target_layer_ids, final_states
    for name in ("start_capture", "flush_capture", "stop_capture", "capture_status"):
        setattr(worker, name, getattr(runner, name))


def _check_config(vllm_config: Any, runner: Any, target_layer_ids: tuple[int, ...]) -> None:
    """What capture cannot do yet is refused at start, by name."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    if not isinstance(runner, GPUModelRunner):
        raise SeamError(f"capture needs vLLM's V2 model runner, found {type(runner).__name__}")
    for name in ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise SeamError(f"capture needs {name}=1, found {getattr(parallel, name)}")
    if vllm_config.cache_config.enable_prefix_caching:
        raise SeamError("capture needs enable_prefix_caching=False: a cached prefix has no states to take")
    tapped = get_eagle3_aux_layers_from_config(speculative) if speculative else _aux_layers(target_layer_ids)
    if tapped != _aux_layers(target_layer_ids):
        raise SeamError(f"capture asks for the taps {target_layer_ids}, the drafter for {tapped} minus one")


def _aux_layers(target_layer_ids: tuple[int, ...]) -> tuple[int, ...]:
    """vLLM's auxiliary state k is the input of layer k, so the output of layer k - 1."""
    return tuple(layer + 1 for layer in target_layer_ids)


class CapturingRunner(_Runner):
    """Mixed in before a V2 GPUModelRunner: feeds a CaptureSink with each step's tap states.

    Without a drafter the target runs as in plain decoding and only returns its taps as well; with one that
    taps it anyway (dflash), what the drafter sees is what is captured, rejected rows left out.
    """

    target_layer_ids: tuple[int, ...]
    captures_final_states: bool
    _sink: CaptureSink | None = None
    _landing: "Landing | None" = None

    def start_capture(self, directory: str, is_traffic: bool = False) -> None:
        """Captures requests that begin from now on into `directory`; all ranks have the same states."""
        from vllm.distributed import get_tensor_model_parallel_rank

        self._landing = None
        if get_tensor_model_parallel_rank() == 0:
            self._sink = TrafficSink(Path(directory)) if is_traffic else CaptureSink(Path(directory))

    def flush_capture(self, names: Collection[str] | None = None) -> None:
        """Writes out requests that ended, by the ids they were given, or every one where none is running."""
        if self._sink is not None:
            self._sink.flush(names)

    def stop_capture(self) -> dict[str, Any] | None:
        """Writes out every request, running ones as far as they are, and captures no more: its status."""
        if (sink := self._open_sink) is not None:
            sink.close()
        self._landing = None
        return self.capture_status()

    def capture_status(self) -> dict[str, Any] | None:
        """`CaptureSink.status` of this capture, or of the last; None where there was none."""
        return None if self._sink is None else self._sink.status()

    @property
    def _open_sink(self) -> CaptureSink | None:
        return self._sink if self._sink is not None and self._sink.is_open else None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.speculative_config is None:
            self._tap_target()

    def _tap_target(self) -> None:
        """Has the target return its taps; before its first forward, which compiles and graphs record."""
        from vllm.model_executor.models.interfaces import supports_eagle3

        if not supports_eagle3(self.model):
            raise SeamError(f"{type(self.model).__name__}: vLLM cannot tap this model (SupportsEagle3)")
        self.model.set_aux_hidden_state_layers(_aux_layers(self.target_layer_ids))
        self.use_aux_hidden_state_outputs = True

    def finish_requests(self, scheduler_output: Any) -> None:
        if (sink := self._open_sink) is not None:  # preempted requests come back and keep their rows
            sink.finish(scheduler_output.finished_req_ids)
        super().finish_requests(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._step = self.execute_model_state  # cleared inside
        return super().sample_tokens(grammar_output)

    @torch.inference_mode()
    def postprocess_sampled(
        self,
        idx_mapping: torch.Tensor,
        sampled_tokens: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        query_start_loc: torch.Tensor | None = None,
    ) -> None:
        """After vLLM's own: by then the accepted tokens are in the request's token ids."""
        super().postprocess_sampled(idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc)
        if (sink := self._open_sink) is not None:
            sink.add_step(self._copy_step(num_rejected))
        self._step = None

    def _copy_step(self, num_rejected: torch.Tensor) -> StepTaps:
        batch, taps = self._step.input_batch, list(self._step.aux_hidden_states)
        runtime = getattr(self.speculator, "runtime", None)
        if runtime is not None:  # trees: the accepted path, in its order
            runtime.tidy_states(batch, taps)
        if self.captures_final_states:
            taps.append(self._step.hidden_states)
            if runtime is not None:
                runtime.tidy_rows_of(batch, self._step.hidden_states)
        # the device's starts: the host's are untrue where a step chose how many drafts it verifies
        count, starts = batch.num_tokens, batch.query_start_loc[: batch.num_reqs + 1]
        positions_T = batch.positions[:count]
        slot_T = torch.repeat_interleave(batch.idx_mapping, starts.diff(), output_size=count)
        states, release = self._land(torch.cat([tap[:count] for tap in taps], dim=-1))
        return StepTaps(
            request_ids=list(batch.req_ids),
            starts=_to_host(starts),
            prompt_lengths=self._prompt_lengths(batch.req_ids),
            states=states,
            positions=_to_host(positions_T),
            token_ids=_to_host(self.req_states.all_token_ids.gpu[slot_T, positions_T]),
            num_rejected=_to_host(num_rejected),
            arrived=_record_event(self.device),
            release=release,
        )

    def _land(self, states: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """In host memory, or on their way; and what gives the place back."""
        on_cuda = self.device.type == "cuda"
        if self._landing is None:
            size = 2 * self.max_num_tokens, states.shape[1]
            self._landing = Landing(*size, states.dtype, pinned=on_cuda)
        return self._landing.take(len(states)).copy_(states, non_blocking=on_cuda), self._landing.release

    def _prompt_lengths(self, request_ids: Sequence[str]) -> np.ndarray:
        states = self.req_states
        return states.prompt_len.np[[states.req_id_to_index[request_id] for request_id in request_ids]]


class Landing:
    """Where steps' states arrive: a ring of rows in host memory, so many that a sink's backlog is bounded.

    Pinned for CUDA, or no copy would be asynchronous.
    """

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self._rows = torch.empty((num_rows, width), dtype=dtype, pin_memory=pinned)
        self._taken: deque[range] = deque()
        self._changed = threading.Condition()

    def take(self, count: int) -> torch.Tensor:
        """So many rows, at most half of all, once nobody holds them any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(count) is not None)
            place = self._find(count)
            assert place is not None
            self._taken.append(place)
        return self._rows[place.start : place.stop]

    def release(self) -> None:
        """Of what is held, the rows that were taken first."""
        with self._changed:
            self._taken.popleft()
            self._changed.notify()

    def _find(self, count: int) -> range | None:
        """Behind the rows that were taken last, or at the beginning again."""
        if not self._taken:
            return range(count)
        first, last = self._taken[0], self._taken[-1]
        has_turned = last.start < first.start
        if not has_turned and last.stop + count <= len(self._rows):
            return range(last.stop, last.stop + count)
        start = last.stop if has_turned else 0
        return range(start, start + count) if start + count <= first.start else None


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, still under way on CUDA: the step's own tensors are overwritten by the next."""
    on_cuda = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_cuda)
    return host.copy_(tensor, non_blocking=on_cuda)


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # the thread that waits for it leaves the core to others
    event.record()
    return event
