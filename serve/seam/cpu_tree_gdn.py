"""Gated DeltaNet on a CPU when trees are drafted: verified from the one state a request has, which is kept.

Stands in for `vllm.model_executor.layers.mamba.ops.cpu.gdn_attention`, whose kernels know chains, bf16 and a
state slot for each draft.  All rows are computed here, trees and ordinary ones, in any precision, by
`serve.tree_gdn`.  Slow and obvious; a GPU has its own.
"""

# B=requests with a tree  R=rows of one, padded  T=rows of the step  C=convolved channels  H=value heads
# K=key dim  V=value dim  X=conv state columns

from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _unpacked_conv_weight
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder

from serve.seam.gdn_slots import OneStateSlot
from serve.tree_batch import WalkBatch
from serve.tree_gdn import (
    GdnRows,
    VerifiedTrees,
    commit_conv,
    commit_paths,
    compute_gates,
    convolve_chain,
    convolve_trees,
    run_chain,
    verify_trees,
)


@dataclass(frozen=True)
class _Pending:
    """A verified step, whose walk is not known yet."""

    requests_B: torch.Tensor
    """Their places in the step."""
    slots_B: torch.Tensor
    verified: VerifiedTrees
    conv_inputs_BRC: torch.Tensor


class TreeGatedDeltaNet(OneStateSlot, QwenGatedDeltaNetAttention):
    """One state slot a request, whatever the tree's size."""

    _pending: _Pending | None = None

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        projected, _ = self.in_proj_qkvz(hidden_states)
        gates, _ = self.in_proj_ba(hidden_states)
        z_size = self.value_dim // self.tp_size
        mixed_TC, z = projected.split([projected.shape[-1] - z_size, z_size], dim=-1)
        b_TH, a_TH = gates.chunk(2, dim=-1)
        out_THV = mixed_TC.new_zeros(len(mixed_TC), self.num_v_heads // self.tp_size, self.head_v_dim)
        metadata = get_forward_context().attn_metadata
        if metadata is not None:  # None while profiling
            self._mix(metadata[self.prefix], mixed_TC, a_TH, b_TH, out_THV)
        return self._output_projection(out_THV, z.reshape(out_THV.shape))

    def _mix(
        self,
        metadata: Any,
        mixed_TC: torch.Tensor,
        a_TH: torch.Tensor,
        b_TH: torch.Tensor,
        out_THV: torch.Tensor,
    ) -> None:
        self._pending = None
        trees = getattr(metadata, "trees", None)
        ends = torch.tensor(metadata.bounds[1:])
        drafts = [0] * len(ends) if trees is None else (ends - 1 - trees.first_row_B).tolist()
        gates = compute_gates(a_TH, b_TH, self.A_log, self.dt_bias)
        for request, rows in enumerate(starmap(slice, pairwise(metadata.bounds))):
            if drafts[request] == 0:
                self._run_chain(metadata, request, rows, mixed_TC, gates, out_THV)
        with_tree = [request for request, count in enumerate(drafts) if count]
        if with_tree:
            self._verify(metadata, torch.tensor(with_tree), trees, mixed_TC, gates, out_THV)

    def _run_chain(
        self,
        metadata: Any,
        request: int,
        rows: slice,
        mixed_TC: torch.Tensor,
        gates: Any,
        out_THV: torch.Tensor,
    ) -> None:
        """A prefill, a part of one, or one token: the state is written at once."""
        conv_SCX, state_SHKV = self._states()
        slot = int(metadata.slots[request])
        self._clear_fresh(metadata, torch.tensor([request]))
        convolved = convolve_chain(mixed_TC[rows], conv_SCX[slot], self._conv_weight(), None, use_silu=True)
        chain = run_chain(
            self._split(convolved.outputs_TC, gates.log_decay[rows], gates.beta[rows]),
            state_SHKV[slot],
            self.head_k_dim**-0.5,
            normalise=True,
        )
        out_THV[rows] = chain.outputs_THV.to(out_THV.dtype)
        conv_SCX[slot], state_SHKV[slot] = convolved.conv_state_CX, chain.state_HKV

    def _verify(
        self,
        metadata: Any,
        requests_B: torch.Tensor,
        trees: Any,
        mixed_TC: torch.Tensor,
        gates: Any,
        out_THV: torch.Tensor,
    ) -> None:
        """All trees at once; writes no state."""
        conv_SCX, state_SHKV = self._states()
        slots_B = metadata.slots[requests_B]
        self._clear_fresh(metadata, requests_B)
        rows_BR, is_row_BR = trees.rows_of(requests_B)
        conv_inputs_BRC = mixed_TC[rows_BR]
        convolved_BRC = convolve_trees(
            conv_inputs_BRC,
            conv_SCX[slots_B],
            self._conv_weight(),
            None,
            trees.topology.parents_BN[requests_B],
            use_silu=True,
        )
        verified = verify_trees(
            self._split(convolved_BRC, gates.log_decay[rows_BR], gates.beta[rows_BR]),
            state_SHKV[slots_B],
            trees.sees_BRR[requests_B],
            self.head_k_dim**-0.5,
            normalise=True,
        )
        out_THV[rows_BR[is_row_BR]] = verified.outputs_BRHV[is_row_BR].to(out_THV.dtype)
        self._pending = _Pending(requests_B, slots_B, verified, conv_inputs_BRC)

    def _clear_fresh(self, metadata: Any, requests_B: torch.Tensor) -> None:
        """A slot holds what its last request left.  New ones may have drafts: `tree_state.run_as_trees`."""
        fresh_B = requests_B[metadata.is_fresh[requests_B]]
        for part in self._states():
            part[metadata.slots[fresh_B]] = 0

    def commit(self, walk: WalkBatch) -> None:
        """The states after the accepted paths."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        conv_SCX, state_SHKV = self._states()
        path_BL, num_accepted_B = (part[pending.requests_B] for part in (walk.path_BL, walk.num_accepted_B))
        slots_B = pending.slots_B
        conv_SCX[slots_B] = commit_conv(pending.conv_inputs_BRC, conv_SCX[slots_B], path_BL, num_accepted_B)
        state_SHKV[slots_B] = commit_paths(state_SHKV[slots_B], pending.verified, path_BL, num_accepted_B)

    def _states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the caches: [slots, C, X], and [slots, H, K, V] as vLLM's CPU build reads that memory."""
        conv_SXC, state = self.kv_cache
        return conv_SXC.transpose(1, 2), state.view(*state.shape[:2], self.head_k_dim, self.head_v_dim)

    def _conv_weight(self) -> torch.Tensor:
        return _unpacked_conv_weight(self).float()

    def _split(self, convolved: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor) -> GdnRows:
        """Query, key and value heads of [*, C]."""
        key_size = self.key_dim // self.tp_size
        query, key, value = convolved.split([key_size, key_size, self.value_dim // self.tp_size], dim=-1)
        return GdnRows(
            query.unflatten(-1, (-1, self.head_k_dim)),
            key.unflatten(-1, (-1, self.head_k_dim)),
            value.unflatten(-1, (-1, self.head_v_dim)),
            log_decay,
            beta,
        )


class TreeGdnMetadataBuilder(GDNAttentionMetadataBuilder):
    """Stock metadata of a step without drafts, and where each request's rows and state are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_spec_decode, self.num_spec = False, 0

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build=fast_build)
        num_reqs = common_attn_metadata.num_reqs
        bounds = common_attn_metadata.query_start_loc[: num_reqs + 1].clone()
        metadata.bounds = bounds.tolist()
        metadata.is_fresh = common_attn_metadata.seq_lens[:num_reqs] == bounds.diff()
        metadata.slots = common_attn_metadata.block_table_tensor[:num_reqs, 0].long()
        return metadata


class TreeGdnBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[TreeGdnMetadataBuilder]:
        return TreeGdnMetadataBuilder
