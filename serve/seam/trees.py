"""Puts draft trees into a worker of vLLM: its speculator, model state, sampler and attention know trees then.

Patched names, as `vllm.v1.worker.gpu.model_runner` imports them: init_speculator and init_model_state, since
neither has a registry.  The patches go when vLLM lets a plugin name them.
"""

from typing import Any

import torch
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

from serve.seam.checks import CPU_TREE_SIGNATURES, TREE_SIGNATURES, SeamError, check_signatures
from serve.seam.cpu_tree_attention import register_cpu_backend
from serve.seam.cpu_tree_gdn import register_cpu_layer
from serve.seam.runtime import TreeRuntime
from serve.seam.speculator import TreeSpeculator
from serve.seam.tree_state import TreeState


def install_trees(vllm_config: Any, num_slots: int) -> None:
    """For this process, whose engines all draft trees then: vLLM's registries are the process's own.

    Raises SeamError for what trees cannot do yet, by name.
    """
    check_signatures(TREE_SIGNATURES)
    check_tree_config(vllm_config)
    check_signatures(CPU_TREE_SIGNATURES)
    budget = vllm_config.speculative_config.num_speculative_tokens
    max_num_reqs = vllm_config.scheduler_config.max_num_seqs
    built: list[TreeSpeculator] = []

    def init_speculator(config: Any, device: torch.device, _req_states: Any) -> TreeSpeculator:
        runtime = TreeRuntime(budget, min(num_slots, budget), max_num_reqs, device)
        built.append(TreeSpeculator(config, device, runtime))
        return built[-1]

    def init_model_state(config: Any, model: Any, encoder_cache: Any, device: torch.device) -> Any:
        state_class = resolve_model_state_cls(config, model)
        tree_class = type(f"Tree{state_class.__name__}", (TreeState, state_class), {})
        state = tree_class(config, model, encoder_cache, device)
        state.speculator, state.runtime = built[-1], built[-1].runtime
        return state

    model_runner.init_speculator = init_speculator
    model_runner.init_model_state = init_model_state
    register_cpu_backend()
    register_cpu_layer()


def check_tree_config(vllm_config: Any) -> None:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "dflash":
        raise SeamError(f"draft trees need a dflash drafter, found {speculative and speculative.method}")
    if vllm_config.device_config.device_type != "cpu":
        raise SeamError("draft trees run on a CPU only in this version")
    if vllm_config.model_config.get_sliding_window() is not None:
        raise SeamError("draft trees: targets with sliding windows are not in this version")
    if vllm_config.model_config.logits_processors:
        raise SeamError("draft trees: logits processors of your own are not in this version")
    if vllm_config.lora_config is not None:
        raise SeamError("draft trees: LoRA is not in this version")
    if vllm_config.parallel_config.pipeline_parallel_size != 1:
        raise SeamError("draft trees need pipeline_parallel_size 1")
    if vllm_config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise SeamError(
            f"draft trees: kv cache dtype {vllm_config.cache_config.cache_dtype} is not supported"
        )
    if speculative.draft_sample_method != "greedy":
        raise SeamError("draft trees need draft_sample_method greedy: their drafts are no samples")
