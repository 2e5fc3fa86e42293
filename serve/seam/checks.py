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
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator"
_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler"
_STATE = "vllm.v1.worker.gpu.model_states.interface:ModelState"
TREE_SIGNATURES: Mapping[str, Parameters] = {
    "vllm.v1.worker.gpu.model_runner:init_speculator": ("vllm_config", "device", "req_states"),
    "vllm.v1.worker.gpu.model_runner:init_model_state": ("vllm_config", "model", "encoder_cache", "device"),
    f"{_SPECULATOR}.__init__": ("self", "vllm_config", "device"),
    f"{_SPECULATOR}.load_draft_model": ("self", "target_model", "target_attn_layer_names"),
    f"{_SPECULATOR}.propose": (
        *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states"),
        *("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds"),
        *("dp_sync_state", "dummy_run", "skip_attn_for_dummy_run", "mm_inputs", "is_profile"),
        "num_speculative_tokens",
    ),
    f"{_SPECULATOR}.sample_draft": (
        *("self", "hidden_states", "sample_src_positions", "idx_mapping", "temperature", "seeds"),
        *("draft_step", "draft_logits", "spec_step_idx"),
    ),
    f"{_SAMPLER}.__init__": ("self", "sampler", "spec_config", "device", "watermark_key"),
    f"{_SAMPLER}._verify": (
        *("self", "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping"),
        *("idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos", "seq_lens_upper_bound_np"),
        "verify_draft_sampled",
    ),
    "vllm.v1.worker.gpu.sample.sampler:Sampler.sample": (
        *("self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids"),
        *("expanded_local_pos", "seq_lens_upper_bound_np", "return_logprobs"),
    ),
    f"{_STATE}.add_request": ("self", "req_index", "new_req_data"),
    f"{_STATE}.initialize_kv_cache": ("self", "kv_cache_config", "block_tables"),
    f"{_STATE}.preprocess_state": (
        *("self", "input_batch", "block_tables", "kv_cache_config", "num_computed_tokens"),
    ),
    f"{_STATE}.postprocess_state": ("self", "idx_mapping", "num_sampled", "num_computed_tokens"),
    f"{_STATE}.prepare_inputs": ("self", "input_batch", "req_states"),
    f"{_STATE}.prepare_attn": (
        *("self", "input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups"),
        *("kv_cache_config", "for_capture", "ubatch_idx"),
    ),
    f"{_STATE}.custom_sampler": ("self", "sampler"),
}
_BUDGETS = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
BUDGET_SIGNATURES: Mapping[str, Parameters] = {
    "vllm.v1.worker.gpu.model_runner:maybe_create_adaptive_verification_manager": (
        *("enable_adaptive_verification", "attn_groups", "req_states", "query_start_loc", "num_bonus_tokens"),
        *("max_total_logits", "vllm_config", "target_layer_names", "additional_attn_cg_support"),
    ),
    "vllm.v1.worker.gpu.model_runner:resolve_adaptive_cudagraph_mode": (
        *("mode", "piecewise_capture_available"),
    ),
    f"{_BUDGETS}:AdaptiveVerificationManager.__init__": (
        *("self", "req_states", "query_start_loc", "num_bonus_tokens", "max_total_logits"),
    ),
    f"{_BUDGETS}:AdaptiveVerificationManager.batches_to_profile": ("self", "capture_sizes"),
    f"{_BUDGETS}:AdaptiveVerificationManager.set_initial_cost_curves": ("self", "samples"),
    f"{_BUDGETS}:AdaptiveVerificationManager.set_cost_curves": ("self", "draft_curve", "verify_curve"),
    f"{_BUDGETS}:AdaptiveVerificationManager.get_num_tokens": ("self", "num_tokens_per_req", "draft_tokens"),
    f"{_BUDGETS}:_assign_draft_token_budget": (
        *("confidence_probs", "idx_mapping", "capacities", "draft_budget", "num_steps"),
    ),
    f"{_SPECULATOR}.observe_verification": ("self", "idx_mapping", "num_sampled", "num_rejected"),
}
BUDGET_FIELDS: Mapping[str, Parameters] = {
    "vllm.v1.worker.gpu.input_batch:InputBatch": (
        *("cu_num_logits", "num_draft_tokens", "num_draft_tokens_per_req", "num_scheduled_tokens"),
        *("decode_graph_eligible", "query_start_loc_np"),
    ),
}
_SELECTOR_DRAFTER = "vllm.model_executor.models.qwen3_dflash2"
SELECTOR_SIGNATURES: Mapping[str, Parameters] = {
    f"{_SELECTOR_DRAFTER}:DFlash2Qwen3ForCausalLM.compute_candidates": ("self", "hidden_states"),
    f"{_SELECTOR_DRAFTER}:CandidateSelector.forward": (
        *("self", "candidate_ids", "unary_logits", "hidden_states", "anchor_token_ids"),
    ),
}
_GDN_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"
_LAYER_SIGNATURES: dict[str, Parameters] = {
    f"{_GDN_LAYER}.get_state_shape": ("self",),
    "vllm.model_executor.layers.mamba.abstract:MambaBase.get_kv_cache_spec": ("self", "vllm_config"),
    "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build": (
        *("self", "common_prefix_len", "common_attn_metadata", "num_accepted_tokens"),
        *("num_decode_draft_tokens_cpu", "fast_build"),
    ),
    "vllm.model_executor.custom_op:PluggableLayer.register_oot": ("_decorated_layer_cls", "name"),
    "vllm.v1.attention.backends.registry:register_backend": ("backend", "class_path", "is_mamba"),
}
_FORWARD = (
    *("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale"),
    "output_block_scale",
)
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl"
CPU_TREE_SIGNATURES: Mapping[str, Parameters] = _LAYER_SIGNATURES | {
    f"{_CPU_ATTENTION}.forward": _FORWARD,
    f"{_CPU_ATTENTION}.do_kv_cache_update": (*("self", "layer", "key", "value", "kv_cache", "slot_mapping"),),
    f"{_GDN_LAYER}.forward_cpu": ("self", "hidden_states"),
    f"{_GDN_LAYER}._output_projection": ("self", "core_attn_out", "z"),
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_unpacked_conv_weight": ("layer",),
}
CUDA_TREE_SIGNATURES: Mapping[str, Parameters] = _LAYER_SIGNATURES | {
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward": _FORWARD,
    f"{_GDN_LAYER}._forward_core": ("self", "mixed_qkv", "b", "a", "core_attn_out"),
    f"{_SPECULATOR}._num_graph_context_tokens": ("self", "num_reqs"),
    f"{_STATE}.prepare_dummy_inputs": ("self", "num_reqs", "num_tokens"),
    # requests with drafts come first
    "vllm.v1.worker.gpu.model_runner:sort_batch_req_ids": (
        *("num_tokens_per_req", "draft_tokens", "decode_query_len"),
    ),
}
_DRAFTER = "vllm.model_executor.models.qwen3_dflash"
SWAP_SIGNATURES: Mapping[str, Parameters] = {
    f"{_DRAFTER}:DFlashQwen3ForCausalLM.load_weights": ("self", "weights"),
    f"{_DRAFTER}:DFlashQwen3Model._build_fused_kv_buffers": ("self",),
    "vllm.model_executor.model_loader.reload.inplace:reload_weights": (
        *("vllm_config", "model", "weights_iterator", "weights_path", "is_checkpoint_format"),
    ),
}
METRICS_SIGNATURES: Mapping[str, Parameters] = {
    "vllm.v1.engine.async_llm:load_stat_logger_plugin_factories": (),
    "vllm.v1.metrics.loggers:StatLoggerBase.__init__": ("self", "vllm_config", "engine_index"),
    "vllm.v1.metrics.loggers:StatLoggerBase.record": (
        *("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    ),
}
METRICS_FIELDS: Mapping[str, Parameters] = {
    "vllm.v1.metrics.stats:SchedulerStats": ("spec_decoding_stats", "cudagraph_stats"),
    "vllm.compilation.cuda_graph:CUDAGraphStat": ("num_unpadded_tokens",),
    "vllm.v1.spec_decode.metrics:SpecDecodingStats": (
        *("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos"),
    ),
}
# Read, never called: a missing one would otherwise fail in the middle of a step.
CAPTURE_FIELDS: Mapping[str, Parameters] = {
    "vllm.v1.worker.gpu.model_runner:ExecuteModelState": (
        "input_batch",
        "hidden_states",
        "aux_hidden_states",
    ),
    "vllm.v1.worker.gpu.input_batch:InputBatch": (
        *("req_ids", "num_tokens", "query_start_loc", "idx_mapping", "positions"),
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
