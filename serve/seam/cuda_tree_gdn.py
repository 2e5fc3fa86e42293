"""Gated DeltaNet on CUDA when trees are drafted: verified from the one state a request has, which is kept.

Stands in for the multi-token branch of `QwenGatedDeltaNetAttention._forward_core`, which runs chains and
writes a state for every draft.  A batch's tree rows come first, as vLLM sorts it (`sort_batch_req_ids`); the
rest is stock: prefills, and rows without drafts.
"""

# T=rows of the trees  C=convolved channels  J=key heads  H=value heads  K=key dim  V=value dim

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)

from serve.seam.gdn_slots import OneStateSlot
from serve.tree_gdn_kernels import GateWeights, Kept, Projected, convolve_trees_, verify_trees_
from serve.tree_step import GroupTrees


class TreeGatedDeltaNet(OneStateSlot, QwenGatedDeltaNetAttention):
    """What a tree's verification leaves for the commit goes to `kept`, which the runtime gives."""

    kept: Kept

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enable_fused_gdn_spec_decode = False  # a chain's kernel, which writes a state for every draft

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        metadata = (get_forward_context().attn_metadata or {}).get(self.prefix)
        trees: GroupTrees | None = getattr(metadata, "trees", None)
        if trees is None:
            assert not isinstance(metadata, TreesAlone), f"{self.prefix}: the step's trees were not attached"
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        if not trees.extent.is_all_of_batch:
            rest = slice(trees.extent.num_rows, None)
            with self._without_trees(metadata, trees):
                super()._forward_core(mixed_qkv[rest], b[rest], a[rest], core_attn_out[rest])
        rows = slice(trees.extent.num_rows)
        self.verify(trees, mixed_qkv[rows], a[rows], b[rows], core_attn_out[rows])

    @contextmanager
    def _without_trees(self, metadata: Any, trees: GroupTrees) -> Iterator[None]:
        """In it, stock code finds metadata of the rows after the trees'."""
        if not hasattr(metadata, "rest"):
            metadata.rest = _rest_of(metadata, trees)  # for all layers of the group
        by_layer = get_forward_context().attn_metadata
        by_layer[self.prefix] = metadata.rest
        try:
            yield
        finally:
            by_layer[self.prefix] = metadata

    def verify(
        self,
        trees: GroupTrees,
        mixed_TC: torch.Tensor,
        a_TH: torch.Tensor,
        b_TH: torch.Tensor,
        out_THV: torch.Tensor,
    ) -> None:
        """Writes no state."""
        conv_SCX, state_SHVK = self.states()
        kept = self.kept.of_batch(trees.extent.num_requests)
        convolved_TC = torch.empty_like(mixed_TC, memory_format=torch.contiguous_format)
        convolve_trees_(
            mixed_TC,
            conv_SCX,
            self._conv_weight(),
            self.conv1d.bias,
            trees.parents_BN,
            trees.placement,
            convolved_TC,
            kept,
            use_silu=self.activation in ("silu", "swish"),
        )
        key_size = self.key_dim // self.tp_size
        query, key, value = convolved_TC.split([key_size, key_size, self.value_dim // self.tp_size], dim=-1)
        verify_trees_(
            Projected(
                query.unflatten(-1, (-1, self.head_k_dim)),
                key.unflatten(-1, (-1, self.head_k_dim)),
                value.unflatten(-1, (-1, self.head_v_dim)),
                a_TH,
                b_TH,
            ),
            GateWeights(self.A_log, self.dt_bias),
            state_SHVK,
            trees.words_BR,
            trees.placement,
            self.head_k_dim**-0.5,
            out_THV,
            kept,
        )

    def _conv_weight(self) -> torch.Tensor:
        return self.conv1d.weight.flatten(1)

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the caches: [slots, C, X] and [slots, H, V, K]."""
        conv, state = self.kv_cache
        return (conv if is_conv_state_dim_first() else conv.transpose(-1, -2)), state


def _rest_of(metadata: Any, trees: GroupTrees) -> Any:
    """Stock metadata of the rows after the trees': a step that drafts nothing."""
    counted = metadata.num_spec_decodes
    assert counted == trees.extent.num_requests, f"{counted} requests with drafts, {trees.extent} with trees"
    return replace(
        metadata,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=metadata.num_actual_tokens - trees.extent.num_rows,
        spec_query_start_loc=None,
        spec_state_indices_tensor=None,
        spec_sequence_masks=None,
        spec_sequence_masks_cpu=None,
        spec_token_indx=None,
        non_spec_token_indx=None,
        num_accepted_tokens=None,
        uniform_spec_sequence_length=None,
    )


class TreesAlone(GDNAttentionMetadata):
    """Of a batch whose rows are all trees': stock code has nothing to do."""


class TreeGdnMetadataBuilder(GDNAttentionMetadataBuilder):
    """Stock metadata, where rows with drafts alone are a tree's; a request has one state slot."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec = 0
        self.spec_state_indices_tensor: torch.Tensor = self.spec_state_indices_tensor[:, :1].contiguous()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> Any:
        drafts = num_decode_draft_tokens_cpu
        if drafts is not None:
            if _are_trees_alone(common_attn_metadata, drafts):
                # a group's metadata takes stock code some twenty launches, a hybrid has a dozen groups
                return TreesAlone(0, 0, 0, 0, 0, 0, common_attn_metadata.num_actual_tokens)
            # stock code keeps a decoding request without drafts among those with, since its state lies in a
            # slot that depends on what was accepted; ours has one slot
            drafts = drafts.where(drafts > 0, -1)
        return super().build(common_prefix_len, common_attn_metadata, num_accepted_tokens, drafts, fast_build)


def _are_trees_alone(metadata: Any, drafts_B: torch.Tensor) -> bool:
    """Whether each request that has rows has drafts; a graph's padding has no rows."""
    starts_B1 = metadata.query_start_loc_cpu.numpy()
    return bool(((drafts_B.numpy() > 0) | (starts_B1[1:] == starts_B1[:-1])).all())


class TreeGdnBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[TreeGdnMetadataBuilder]:
        return TreeGdnMetadataBuilder
