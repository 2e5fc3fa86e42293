"""Attention of target and drafter on a CPU when trees are drafted: plain torch over a plainly laid out cache.

Stands in for `vllm.v1.attention.backends.cpu_attn`, whose kernels know no tree and lay keys out as they like.
The cache is [blocks, heads, block size, 2 x head dim], a slot's key and then its value.  Slow and obvious; a
GPU has its own.
"""

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from serve.tree_attention import attend_masked, gather_paged


def register_cpu_backend() -> None:
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{TreeAttentionBackend.__name__}")


class TreeAttention(CPUAttentionBackendImpl):
    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Keys and values [T, heads, head dim] into their slots; a negative slot takes nothing."""
        rows = (slot_mapping >= 0).nonzero().flatten()
        slots, size = slot_mapping[rows], kv_cache.shape[2]
        kv_cache[slots // size, :, slots % size] = torch.cat([key[rows], value[rows]], dim=-1)

    def forward(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # profiling
            return output
        starts = attn_metadata.query_start_loc.tolist()
        for request, length in enumerate(attn_metadata.seq_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            cached = gather_paged(kv_cache.transpose(1, 2), attn_metadata.block_table[request], length)
            keys, values = cached.chunk(2, dim=-1)
            mask = self._sees(attn_metadata, request, rows, length)
            attended = attend_masked(query[rows], keys, values, mask, self.scale)
            output[rows].view(attended.shape).copy_(attended)
        return output

    def _sees(self, metadata: Any, request: int, rows: slice, length: int) -> torch.Tensor:
        """Which of its `length` tokens each row of a request sees. [rows, length] bool"""
        num_rows = rows.stop - rows.start
        positions = torch.arange(length - num_rows, length)[:, None]
        distance = positions - torch.arange(length)
        sees = torch.ones_like(distance, dtype=torch.bool) if not metadata.causal else distance >= 0
        if self.sliding_window > 0:
            sees &= distance < self.sliding_window
        trees = getattr(metadata, "trees", None)  # the drafter's metadata has none
        if trees is not None:
            own = rows.stop - int(trees.first_row_B[request])  # the committed token and the drafts
            sees[-own:, -own:] = trees.sees_BRR[request, :own, :own]
        return sees


class TreeAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeAttention]:
        return TreeAttention
