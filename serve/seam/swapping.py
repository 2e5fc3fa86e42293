"""Swaps the weights of a running engine's drafter, at addresses that its CUDA graphs hold.

`collective_rpc("swap_drafter", args=(folder,))` answers {"loaded": folder}, or {"refused": why} with nothing
written.  Then the caller has vLLM forget what the old drafter left in the caches, those of running requests
too: `reset_prefix_cache(reset_running_requests=True)`.
"""
# ruff: noqa: PLC0415  (vLLM's modules are imported once vLLM calls: on a CPU its worker has to come first)

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from recipes.errors import UserError
from serve.drafter_config import PAIRWISE_NAME
from serve.pairwise import PairwiseTables
from serve.seam.checks import SWAP_SIGNATURES, SeamError, check_signatures
from serve.served import Served
from serve.swap import read_replacement


def attach_swap(worker: Any, served: Served) -> None:
    """Makes the worker answer `swap_drafter`; called before its model is loaded."""
    check_signatures(SWAP_SIGNATURES)
    speculative = worker.vllm_config.speculative_config
    if speculative is None or speculative.method != "dflash":
        raise SeamError(f"swapping needs a dflash drafter, found {speculative and speculative.method}")
    if speculative.draft_model_config.quantization is not None:
        raise SeamError("swapping: quantised drafters are not in this version")
    is_cpu = worker.vllm_config.device_config.device_type == "cpu"
    if is_cpu and worker.vllm_config.parallel_config.tensor_parallel_size != 1:
        raise SeamError("swapping on a CPU needs tensor_parallel_size 1")

    def swap_drafter(folder: str) -> dict[str, str]:
        speculator = worker.model_runner.speculator
        try:
            tensors = read_replacement(Path(folder), served)
            head = read_head(speculator, Path(folder))
        except UserError as refusal:
            return {"refused": str(refusal)}
        speculative.draft_model_config.model = (
            folder  # vLLM looks for further files there; the old may be gone
        )
        load_drafter(worker.model_runner, tensors, was_packed=is_cpu)
        if getattr(speculator, "pairwise", None) is not None:
            speculator.pairwise.copy_(head)
        runtime = getattr(speculator, "runtime", None)
        if runtime is not None:
            runtime.begin_anew()
        return {"loaded": folder}

    worker.swap_drafter = swap_drafter


def read_head(speculator: Any, ckpt: Path) -> PairwiseTables | None:
    """The pairwise head that comes with a checkpoint.  UserError for one that the engine has no room for."""
    if not (ckpt / PAIRWISE_NAME).exists():
        return None
    room = getattr(speculator, "pairwise", None)
    if room is None:
        raise UserError(f"{ckpt} has a pairwise head, the engine was started without: start another server")
    head = speculator.read_pairwise(ckpt)
    if head.rank > room.rank:
        raise UserError(
            f"{ckpt} has a pairwise head of rank {head.rank}, the engine was started for at most"
            f" {room.rank}: start another server"
        )
    return head


@torch.no_grad()
def load_drafter(runner: Any, tensors: Mapping[str, torch.Tensor], *, was_packed: bool) -> None:
    """Writes a checkpoint's tensors, which fit, over the drafter's own.

    was_packed: vLLM's CPU build keeps matrices in a packed form only, so they are loaded and packed anew.
    """
    from vllm.config import set_current_vllm_config

    model = runner.speculator.model
    with set_current_vllm_config(runner.vllm_config), _without_shared_modules(model):
        if was_packed:
            _load_packed(runner.vllm_config, model, tensors)
        else:
            _load_plain(model, tensors)


@contextmanager
def _without_shared_modules(model: Any) -> Iterator[None]:
    """In it the model has no embedding and no head: they are the target's."""
    inner = model.model
    embedding, head = inner.embed_tokens, model.lm_head
    del inner.embed_tokens, model.lm_head
    try:
        yield
    finally:
        inner.embed_tokens, model.lm_head = embedding, head


def _load_plain(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """In place; what vLLM fuses of the weights it would put elsewhere, where no graph looks."""
    inner = model.model
    kept = {name: getattr(inner, name) for name in ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights")}
    model.load_weights(iter(tensors.items()))
    with torch.inference_mode():  # in which vLLM made them, where it did so at its first forward
        for name, tensor in kept.items():
            if tensor is not None:
                tensor.copy_(getattr(inner, name))
                setattr(inner, name, tensor)


def _load_packed(vllm_config: Any, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Layer by layer, while which vLLM's builder of fused weights finds none to fuse."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    inner = model.model
    inner._build_fused_kv_buffers = lambda: None
    try:
        reload_weights(vllm_config, model, iter(tensors.items()), None, True)
    finally:
        del inner._build_fused_kv_buffers
    layers = range(len(inner.layers))
    names = [f"layers.{layer}.self_attn.{part}_proj.weight" for layer in layers for part in "kv"]
    inner._fused_kv_weight.copy_(torch.cat([tensors[name] for name in names]))
    inner._k_norm_weights.copy_(torch.stack([layer.self_attn.k_norm.weight for layer in inner.layers]))
