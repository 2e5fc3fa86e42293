"""Puts draft trees into a worker of vLLM: its speculator, model state, sampler and attention know trees then.

Patched names, as `vllm.v1.worker.gpu.model_runner` imports them: init_speculator and init_model_state, since
neither has a registry.  The patches go when vLLM lets a plugin name them.
"""
# ruff: noqa: PLC0415  (the layers of a CPU import what CUDA's vLLM lacks, and the other way round)

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

from serve.drafter_config import ARCHITECTURE, SELECTOR_ARCHITECTURE
from serve.seam.budgets import CostOptions, install_budgets
from serve.seam.checks import (
    CPU_TREE_SIGNATURES,
    CUDA_TREE_SIGNATURES,
    SELECTOR_SIGNATURES,
    TREE_SIGNATURES,
    SeamError,
    check_signatures,
)
from serve.seam.runtime import StepLimits, TreeRuntime
from serve.seam.selector_speculator import SelectorSpeculator
from serve.seam.speculator import TreeSpeculator
from serve.seam.tree_state import TreeState
from serve.seam.verifier import TreeVerifier

_logger = init_logger("vllm.draftsmith")  # below vllm's own, whose settings it shares


def install_trees(
    vllm_config: Any, num_slots: int, *, chains: bool, costs: CostOptions | None, reserved: int
) -> None:
    """For this process, whose engines all draft trees then: vLLM's registries are the process's own.

    chains: every request's tree is a chain.  costs: None verifies trees whole.  reserved: nodes of the greedy
    chain that come first in every tree.

    Raises SeamError for what trees cannot do yet, by name.
    """
    check_signatures(TREE_SIGNATURES)
    check_tree_config(vllm_config)
    is_cuda = vllm_config.device_config.device_type == "cuda"
    check_signatures(CUDA_TREE_SIGNATURES if is_cuda else CPU_TREE_SIGNATURES)
    speculator_class = choose_speculator(vllm_config.speculative_config.draft_model_config.architectures)
    if costs is not None:
        install_budgets(vllm_config.device_config.device_type, costs)
    runtime_class, verifier_class = _use_cuda_layers() if is_cuda else _use_cpu_layers()
    budget = vllm_config.speculative_config.num_speculative_tokens
    sizes = vllm_config.scheduler_config
    built: list[TreeSpeculator] = []

    def init_speculator(config: Any, device: torch.device, _req_states: Any) -> TreeSpeculator:
        most_rows = sizes.max_num_batched_tokens
        depth, adapts = min(num_slots, budget), costs is not None
        limits = StepLimits(budget, depth, sizes.max_num_seqs, most_rows, chains, adapts, reserved)
        built.append(speculator_class(config, device, runtime_class(limits, device)))
        return built[-1]

    def init_model_state(config: Any, model: Any, encoder_cache: Any, device: torch.device) -> Any:
        state_class = resolve_model_state_cls(config, model)
        tree_class = type(f"Tree{state_class.__name__}", (TreeState, state_class), {})
        state = tree_class(config, model, encoder_cache, device)
        state.speculator, state.runtime = built[-1], built[-1].runtime
        state.verifier_class = verifier_class
        rope = getattr(state, "rope_state", None)
        num_axes = 0 if rope is None else rope.num_dims
        state.runtime.reserve(config.compilation_config.static_forward_context, num_axes)
        return state

    model_runner.init_speculator = init_speculator
    model_runner.init_model_state = init_model_state


def confirm_trees(runner: Any) -> None:
    """Raises SeamError if the worker's runner took another speculator than ours; else says what it is."""
    speculator = runner.speculator
    if not isinstance(speculator, TreeSpeculator):
        raise SeamError(f"draft trees were asked for, the speculator in use is {type(speculator).__name__}")
    limits = speculator.runtime.limits
    _logger.info(
        "draft trees of %d nodes, %d deep at most: %s, %s",
        limits.budget,
        limits.num_slots,
        type(speculator).__name__,
        type(speculator.runtime).__name__,
    )


def choose_speculator(architectures: list[str]) -> type[TreeSpeculator]:
    """By the drafter's kind, as vLLM's `init_speculator` does.  Raises SeamError for another."""
    if SELECTOR_ARCHITECTURE in architectures:
        check_signatures(SELECTOR_SIGNATURES)
        return SelectorSpeculator
    if ARCHITECTURE in architectures:
        return TreeSpeculator
    raise SeamError(f"draft trees: drafters of architectures {architectures} are not in this version")


def _use_cpu_layers() -> tuple[type[TreeRuntime], type[TreeVerifier]]:
    from serve.seam.cpu_tree_attention import register_cpu_backend
    from serve.seam.cpu_tree_gdn import TreeGatedDeltaNet, TreeGdnBackend
    from serve.seam.gdn_slots import register_gdn

    register_cpu_backend()
    register_gdn(TreeGatedDeltaNet, TreeGdnBackend)
    return TreeRuntime, TreeVerifier


def _use_cuda_layers() -> tuple[type[TreeRuntime], type[TreeVerifier]]:
    from serve.seam.cuda_runtime import CudaTreeRuntime
    from serve.seam.cuda_tree_attention import register_cuda_backend
    from serve.seam.cuda_tree_gdn import TreeGatedDeltaNet, TreeGdnBackend
    from serve.seam.cuda_verifier import CudaTreeVerifier
    from serve.seam.gdn_slots import register_gdn

    register_cuda_backend()
    register_gdn(TreeGatedDeltaNet, TreeGdnBackend)
    return CudaTreeRuntime, CudaTreeVerifier


def check_tree_config(vllm_config: Any) -> None:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "dflash":
        raise SeamError(f"draft trees need a dflash drafter, found {speculative and speculative.method}")
    if vllm_config.device_config.device_type not in ("cpu", "cuda"):
        raise SeamError(f"draft trees run on a CPU or CUDA, not on {vllm_config.device_config.device_type}")
    if vllm_config.model_config.get_sliding_window() is not None:
        raise SeamError(
            "draft trees: targets with sliding windows are not in this version; --budget chain serves them"
        )
    if vllm_config.model_config.logits_processors:
        raise SeamError("draft trees: logits processors of your own are not in this version")
    if vllm_config.lora_config is not None:
        raise SeamError("draft trees: LoRA is not in this version")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(vllm_config.parallel_config, name) != 1:
            raise SeamError(f"draft trees need {name} 1")
    if speculative.enable_adaptive_verification:
        raise SeamError("draft trees: leave out enable_adaptive_verification, --budget auto is what does it")
    if vllm_config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise SeamError(
            f"draft trees: kv cache dtype {vllm_config.cache_config.cache_dtype} is not supported"
        )
    if vllm_config.cache_config.mamba_cache_mode != "none":
        raise SeamError("draft trees: prefix caching of hybrid targets is not in this version")
    if speculative.draft_sample_method != "greedy":
        raise SeamError("draft trees need draft_sample_method greedy: their drafts are no samples")
