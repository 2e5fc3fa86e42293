"""Attention of the target on CUDA when trees are drafted: stock over the context, ours over the tree.

Stands in for `vllm.v1.attention.backends.flash_attn`.  A batch's tree rows come first, as vLLM sorts it
(`sort_batch_req_ids`); what follows, and the drafter, whose metadata names no trees, stock attends to.
"""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from serve.tree_kernels import attend_ragged, merge_states
from serve.tree_step import GroupTrees


def register_cuda_backend() -> None:
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{TreeFlashBackend.__name__}")


class TreeFlashAttention(FlashAttentionImpl):
    def forward(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        trees: GroupTrees | None = getattr(attn_metadata, "trees", None)
        if trees is None or not trees.extent.is_all_of_batch:
            # rows of trees among them are computed too, for nothing: a step with a prefill is long anyway
            output = super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if trees is not None:
            rows = slice(trees.extent.num_rows)
            self.attend_trees(
                query[rows], key[rows], value[rows], kv_cache, attn_metadata, trees, output[rows]
            )
        return output

    def attend_trees(
        self,
        query_THd: torch.Tensor,
        key_TGd: torch.Tensor,
        value_TGd: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        trees: GroupTrees,
        output_THd: torch.Tensor,
    ) -> None:
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        _, lse_HT = flash_attn.flash_attn_varlen_func(
            q=query_THd,
            k=key_cache,
            v=value_cache,
            out=output_THd,
            cu_seqlens_q=trees.query_starts_B1,
            max_seqlen_q=trees.max_rows,
            seqused_k=trees.context_lengths_B,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=False,
            block_table=metadata.block_table[: trees.extent.num_requests],
            softcap=self.logits_soft_cap,
            return_softmax_lse=True,
            fa_version=self.vllm_flash_attn_version,
            # an upper bound under CUDA graphs, chosen by the metadata's builder
            num_splits=metadata.max_num_splits,
        )
        rows_THd, lse_rows_TH = attend_ragged(
            query_THd,
            key_TGd,
            value_TGd,
            trees.words_T,
            trees.query_starts_B1,
            self.scale,
            trees.max_rows,
        )
        merge_states(output_THd, lse_HT, rows_THd, lse_rows_TH, trees.words_T)


class TreeFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """A graph holds trees, so a step of prompts alone cannot use it: none is captured for mixed batches."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH


class TreeFlashBackend(FlashAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[TreeFlashMetadataBuilder]:
        return TreeFlashMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttention]:
        return TreeFlashAttention
