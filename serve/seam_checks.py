"""What the seam demands of the installed vLLM before it touches anything: its version and its signatures.

A symbol is written `module:Class.method`; a mismatch raises SeamError naming it, so that a vLLM the seam was
not written for is refused at start.
"""

import importlib
import inspect
from collections.abc import Mapping
from functools import reduce
from typing import Any

VLLM_VERSION = "0.32."  # any 0.32.x; signatures below were read in 0.32.0

Parameters = tuple[str, ...]

_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
WORKER_SIGNATURES: Mapping[str, Parameters] = {
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device": ("self",),
}
CPU_SIGNATURES: Mapping[str, Parameters] = {
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model._normalize_context_k": ("self", "all_k"),
}
CAPTURE_SIGNATURES: Mapping[str, Parameters] = {
    f"{_RUNNER}.load_model": ("self", "load_dummy_weights", "args", "model", "kwargs"),
    f"{_RUNNER}.finish_requests": ("self", "scheduler_output"),
    f"{_RUNNER}.sample_tokens": ("self", "grammar_output"),
    f"{_RUNNER}.postprocess_sampled": (
        *("self", "idx_mapping", "sampled_tokens", "num_sampled", "num_rejected"),
        "query_start_loc",
    ),
    "vllm.model_executor.models.interfaces:SupportsEagle3.set_aux_hidden_state_layers": ("self", "layers"),
    "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils:get_eagle3_aux_layers_from_config": ("spec_config",),
}
# Read, never called: a missing one would otherwise fail in the middle of a step.
CAPTURE_FIELDS: Mapping[str, Parameters] = {
    "vllm.v1.worker.gpu.model_runner:ExecuteModelState": ("input_batch", "aux_hidden_states"),
    "vllm.v1.worker.gpu.input_batch:InputBatch": (
        *("req_ids", "num_tokens", "query_start_loc_np", "idx_mapping", "positions"),
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": ("finished_req_ids", "preempted_req_ids"),
}


class SeamError(RuntimeError):
    """This vLLM is not the one that the seam was written for; the message names the symbol."""


def check_version(found: str) -> None:
    if not found.startswith(VLLM_VERSION):
        raise SeamError(f"vllm {found}: draftsmith's seam was written for vllm {VLLM_VERSION}x; install that")


def check_signatures(expected: Mapping[str, Parameters]) -> None:
    for symbol, parameters in expected.items():
        _check(symbol, parameters, tuple(inspect.signature(find_symbol(symbol)).parameters))


def check_fields(expected: Mapping[str, Parameters]) -> None:
    for symbol, names in expected.items():
        found = _field_names(find_symbol(symbol))
        _check(symbol, names, tuple(name for name in names if name in found))


def _field_names(record: Any) -> Parameters:
    fields = getattr(record, "_fields", None) or record.__dataclass_fields__  # a NamedTuple or a dataclass
    return tuple(fields)


def _check(symbol: str, expected: Parameters, found: Parameters) -> None:
    if expected != found:
        raise SeamError(f"{symbol}: expected {expected}, found {found}; this vLLM is not the one we know")


def find_symbol(symbol: str) -> Any:
    module, path = symbol.split(":")
    try:
        return reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise SeamError(f"{symbol}: this vLLM has no such symbol ({error})") from error
