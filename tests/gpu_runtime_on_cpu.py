"""What a GPU runs, in a CPU's engine: kernels in Triton's interpreter, FlashAttention in torch.

All of `serve/seam/cuda_*.py` runs but what stock CUDA layers do themselves: prefills, FlashAttention, graphs.
"""

# T=rows of trees  H=query heads  G=key/value heads  d=head size  C=convolved channels

from itertools import pairwise, starmap
from typing import Any

import torch
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from serve.seam import cpu_tree_gdn, cuda_runtime, cuda_tree_gdn, trees
from serve.seam.cpu_tree_attention import TreeAttention
from serve.seam.cuda_tree_attention import TreeFlashAttention
from serve.seam.cuda_verifier import CudaTreeVerifier
from serve.seam.gdn_slots import register_gdn
from serve.tree_attention import attend_context, gather_paged
from serve.tree_gdn import compute_gates


def install() -> None:
    """For the engines of this process that draft trees."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{FlashOnCpuBackend.__name__}")
    register_gdn(GdnOnCpu, cpu_tree_gdn.TreeGdnBackend)
    flash_attn.flash_attn_varlen_func = attend_contexts
    cuda_runtime.TreeGatedDeltaNet = GdnOnCpu
    cuda_runtime.TreeFlashAttention = FlashOnCpu
    trees._use_cpu_layers = lambda: (cuda_runtime.CudaTreeRuntime, CudaTreeVerifier)


class FlashOnCpu(TreeAttention):
    """Rows after the trees' as on a CPU; the trees' in two parts, merged."""

    vllm_flash_attn_version = 2
    logits_soft_cap = 0.0
    attend_trees = TreeFlashAttention.attend_trees

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        of_step = getattr(attn_metadata, "trees", None)
        if of_step is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        if not of_step.extent.is_all_of_batch:
            attn_metadata.trees = None
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
            attn_metadata.trees = of_step
        rows = slice(of_step.extent.num_rows)
        attn_metadata.max_num_splits = 0
        heads = output.view(len(output), -1, self.head_size)
        self.attend_trees(query[rows], key[rows], value[rows], kv_cache, attn_metadata, of_step, heads[rows])
        return output


class FlashOnCpuBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[FlashOnCpu]:
        return FlashOnCpu


def attend_contexts(  # noqa: PLR0913 - as vLLM calls it
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What FlashAttention gives queries that see all of `seqused_k` keys: output [T, H, d], lse [H, T]."""
    assert not causal, "trees attend to their context without a mask"
    lse_TH = q.new_zeros(q.shape[:2], dtype=torch.float32)
    for request, (first, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        length = int(seqused_k[request])
        keys, values = (gather_paged(cache, block_table[request], length) for cache in (k, v))
        out[first:end], lse_TH[first:end] = attend_context(q[first:end], keys, values, softmax_scale)
    return out, lse_TH.T


class GdnOnCpu(cpu_tree_gdn.TreeGatedDeltaNet):
    """Rows after the trees' as on a CPU; the trees' by the kernels."""

    verify = cuda_tree_gdn.TreeGatedDeltaNet.verify
    commit = None  # the runtime commits all layers at once

    def _mix(
        self,
        metadata: Any,
        mixed_TC: torch.Tensor,
        a_TH: torch.Tensor,
        b_TH: torch.Tensor,
        out_THV: torch.Tensor,
    ) -> None:
        of_step = getattr(metadata, "trees", None)
        num_requests = 0 if of_step is None else of_step.extent.num_requests
        gates = compute_gates(a_TH, b_TH, self.A_log, self.dt_bias)
        for request, rows in enumerate(starmap(slice, pairwise(metadata.bounds))):
            if request >= num_requests:
                self._run_chain(metadata, request, rows, mixed_TC, gates, out_THV)
        if of_step is not None:
            rows = slice(of_step.extent.num_rows)
            self.verify(of_step, mixed_TC[rows], a_TH[rows], b_TH[rows], out_THV[rows])

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        conv_SCX, state_SHKV = self._states()
        return conv_SCX, state_SHKV.mT
