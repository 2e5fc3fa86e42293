"""The runtime of a GPU: a step's trees lie in buffers that CUDA graphs read, and each task is one launch.

`serve.seam.runtime` is its slow twin, and what a CPU runs.
"""

# B=requests  L=slots  N=nodes  T=rows of the step or of its logits  Y=layers  G=KV cache groups

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from serve.pairwise_kernels import fill_table, walk_chain
from serve.seam.checks import SeamError
from serve.seam.cuda_tree_attention import TreeFlashAttention
from serve.seam.cuda_tree_gdn import TreeGatedDeltaNet
from serve.seam.runtime import Step, TreeRuntime
from serve.tree import ROOT
from serve.tree_batch import Topology, TreeBatch, WalkBatch
from serve.tree_batch_kernels import (
    Committed,
    allocate_step,
    lay_out_step,
    walk_and_commit,
)
from serve.tree_cache_kernels import (
    StackedCaches,
    compact_layers_,
    stack_caches,
    tidy_stacked_,
    tidy_states_,
)
from serve.tree_candidates_kernels import rank_candidates
from serve.tree_gdn_commit_kernels import KeptLayers, allocate_kept, commit_layers_
from serve.tree_grow_kernels import grow_trees, plant_trees
from serve.tree_step import Extent, view_trees


@dataclass(frozen=True)
class _Recurrent:
    """The Gated-DeltaNet layers, together."""

    kept: KeptLayers
    group_of_layer_Y: torch.Tensor
    states: StackedCaches
    conv_states: StackedCaches


class CudaTreeRuntime(TreeRuntime):
    """What is patched, and when, stands in `serve.seam.tree_state`."""

    rank_candidates = staticmethod(rank_candidates)
    grow_trees = staticmethod(grow_trees)
    fill_table = staticmethod(fill_table)
    walk_chain = staticmethod(walk_chain)

    def reserve(self, layers: Mapping[str, Any], num_axes: int) -> None:
        limits = self.limits
        # as vLLM's own (`RopeState`): rows of several axes must not be contiguous for torch.compile
        shape = (num_axes, limits.rows + 1) if num_axes else (limits.rows,)
        positions = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._buffers = allocate_step(limits.requests, limits.budget, positions)
        self._linear_positions = positions  # of the step under way
        self._stacked_states: dict[tuple[tuple[int, int], ...], StackedCaches] = {}
        self._gdn_layers = {
            name: layer for name, layer in layers.items() if isinstance(layer, TreeGatedDeltaNet)
        }
        if self._gdn_layers:
            self._kept = _reserve_kept(list(self._gdn_layers.values()), limits.requests, limits.budget + 1)

    def bind(self, groups: Sequence[Mapping[str, Any]]) -> None:
        layers = {name: layer for group in groups for name, layer in group.items()}
        _check_backends(layers)
        self._group_of = {name: number for number, group in enumerate(groups) for name in group}
        self._state_slots_GB = torch.zeros(
            len(groups), self.limits.requests, dtype=torch.int32, device=self.device
        )
        attention = [name for name in layers if name not in self._gdn_layers]
        self._attention_groups_Y = self._groups_of(attention)
        self._attention_caches = stack_caches([layers[name].kv_cache for name in attention])
        self._recurrent: _Recurrent | None = None
        if self._gdn_layers:
            conv_states, states = zip(*(layer.states() for layer in self._gdn_layers.values()), strict=True)
            self._recurrent = _Recurrent(
                self._kept,
                self._groups_of(self._gdn_layers),
                stack_caches(states),
                stack_caches(conv_states),
            )

    def _groups_of(self, names: Sequence[str] | Mapping[str, Any]) -> torch.Tensor:
        return torch.tensor([self._group_of[name] for name in names], device=self.device)

    def _read_trees(self, input_batch: Any) -> Extent | None:
        """On the host alone: what is planted is read when the step is laid out."""
        drafts = input_batch.num_draft_tokens_per_req
        if self.limits.adapts and is_alike(input_batch):
            return Extent(input_batch.num_reqs, input_batch.num_tokens, is_all_of_batch=True)
        if drafts is None or not drafts.any():
            return None
        num_requests = int(np.count_nonzero(drafts))
        own, scheduled = drafts[:num_requests], input_batch.num_scheduled_tokens[:num_requests]
        assert (own > 0).all(), f"requests with drafts are not the first of the batch: {drafts}"
        assert (scheduled == own + 1).all(), f"requests with {own} drafts have {scheduled} rows"
        num_rows = int(input_batch.query_start_loc_np[num_requests])
        return Extent(num_requests, num_rows, num_requests == input_batch.num_reqs)

    def attach(
        self,
        metadata: Mapping[str, Any],
        input_batch: Any,
        block_tables: Sequence[torch.Tensor],
        slot_mappings: torch.Tensor,
        *,
        for_capture: bool,
        is_full_graph: bool,
    ) -> None:
        step = self.step_of(input_batch)
        if for_capture:  # also a graph's rehearsal: its requests are nobody's
            self._clear()
            extent = Extent(input_batch.num_reqs, input_batch.num_tokens, is_all_of_batch=True)
        elif step is None:
            assert not is_full_graph, "a full graph was captured with trees, and this step has none"
            return
        else:
            extent = step.trees
            step.slot_mappings, step.is_replayed = slot_mappings, is_full_graph
            self._read_state_slots(input_batch.num_reqs, block_tables)
            self._clear_fresh(input_batch)
            if is_full_graph:  # it was told when it was captured
                return
        self._tell_layers(metadata, extent, input_batch.query_start_loc)

    def _tell_layers(
        self, metadata: Mapping[str, Any], extent: Extent, query_starts_B1: torch.Tensor
    ) -> None:
        views = [
            view_trees(self._buffers, extent, query_starts_B1, slots_B) for slots_B in self._state_slots_GB
        ]
        for name, group in self._group_of.items():
            metadata[name].trees = views[group]

    def _read_state_slots(self, num_reqs: int, block_tables: Sequence[torch.Tensor]) -> None:
        if self._gdn_layers:  # of attention's groups too, where nobody reads them: it is one launch
            slots_GB = self._state_slots_GB[:, :num_reqs]
            torch.stack([table[:num_reqs, 0] for table in block_tables], out=slots_GB)

    def _clear_fresh(self, input_batch: Any) -> None:
        """The states of new requests with drafts (`tree_state.run_as_trees`), whose slots a former one left.

        So rare that it may take a launch a cache.
        """
        if input_batch.num_draft_tokens_per_req is None:
            return
        has_context = input_batch.num_computed_prefill_tokens_np > 0
        is_fresh = (input_batch.num_draft_tokens_per_req > 0) & ~has_context
        if not self._gdn_layers or not is_fresh.any():
            return
        fresh_F = torch.from_numpy(is_fresh.nonzero()[0]).to(self.device)
        for name, layer in self._gdn_layers.items():
            slots_F = self._state_slots_GB[self._group_of[name], fresh_F].long()
            for states in layer.states():
                states.index_fill_(0, slots_F, 0)

    def _clear(self) -> None:
        """Nothing is verified: kernels find no rows."""
        step = self._buffers
        for tensor in (step.num_rows_P, step.context_lens_P, step.words_T, step.trees.num_nodes_B):
            tensor.zero_()

    def move_positions(self, input_batch: Any, positions: torch.Tensor) -> torch.Tensor:
        """Lays the step out.  The result is always in one place, where graphs read it."""
        laid_out = self._buffers.cut(positions.shape[-1])
        self._linear_positions = positions
        step = self.step_of(input_batch)
        if step is None:
            laid_out.positions.copy_(positions)
            return laid_out.positions
        lay_out_step(
            self._slots.planted,
            input_batch.idx_mapping,
            input_batch.cu_num_logits.diff() - 1,
            input_batch.query_start_loc,
            input_batch.seq_lens,
            positions,
            laid_out,
            step.trees.num_requests,
        )
        return laid_out.positions

    def dummy_inputs(self, inputs: Mapping[str, Any], num_tokens: int) -> Mapping[str, Any]:
        return {"positions": self._buffers.cut(num_tokens).positions}

    def plant(
        self,
        slots_B: torch.Tensor,
        trees: TreeBatch,
        candidates_BLC: torch.Tensor,
        chain_BL: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return plant_trees(trees, candidates_BLC, self._chain_only, slots_B, self._slots.planted, chain_BL)

    def shifts_of_rows(self, rows_T: torch.Tensor) -> torch.Tensor:
        """How much further than its row the node of each of these rows stands. [T]"""
        moved, linear = (torch.atleast_2d(x)[0] for x in (self._buffers.positions, self._linear_positions))
        return moved[rows_T] - linear[rows_T]

    def walk(
        self,
        first_request: int,
        draft_tokens_T: torch.Tensor,
        target_tokens_T: torch.Tensor,
        logit_starts_B1: torch.Tensor,
        num_tokens: int,
    ) -> Committed:
        """What the target's tokens accept of the step's trees from `first_request` on."""
        requests = slice(first_request, first_request + len(logit_starts_B1) - 1)
        step = self._buffers
        return walk_and_commit(
            Topology(*(part[requests] for part in vars(step.trees).values())),
            draft_tokens_T.contiguous(),
            target_tokens_T.contiguous(),
            logit_starts_B1,
            self.num_slots,
            num_tokens,
        )

    def accept(self, walk: WalkBatch) -> None:
        step = self._step
        assert step is not None and step.trees is not None, "a tree was verified outside a step"
        step.walk = walk

    def commit(self) -> None:
        step = self._step
        if step is not None and step.trees is not None and step.input_batch.num_draft_tokens == 0:
            # every draft was left out, so stock code sampled; the committed tokens' rows are trees' still
            step.walk = self._nothing_accepted(step.input_batch.num_reqs)
        super().commit()

    def _nothing_accepted(self, batch: int) -> WalkBatch:
        integers = {"dtype": torch.int64, "device": self.device}
        path_BL = torch.full((batch, self.num_slots), ROOT, **integers)
        return WalkBatch(path_BL, torch.zeros(batch, **integers), torch.zeros(batch, **integers))

    def _num_verified(self, step: Step) -> torch.Tensor:
        return self._buffers.trees.num_nodes_B[: step.input_batch.num_reqs]

    def _commit(self, step: Step, walk: WalkBatch) -> None:
        batch = len(walk.path_BL)
        accepted = walk.path_BL, walk.num_accepted_B
        compact_layers_(
            step.slot_mappings,
            self._buffers.first_row_P[:batch],
            *accepted,
            self._attention_groups_Y,
            self._attention_caches,
        )
        if self._recurrent is not None:
            commit_layers_(
                *accepted,
                self._buffers.num_rows_P[:batch],
                self._state_slots_GB[:, :batch],
                self._recurrent.group_of_layer_Y,
                self._recurrent.kept,
                self._recurrent.states,
                self._recurrent.conv_states,
            )

    def tidy_states(self, input_batch: Any, tap_states: Sequence[torch.Tensor]) -> None:
        step = self.step_of(input_batch)
        if step is None or step.walk is None or step.are_states_tidy:
            return
        step.are_states_tidy = True
        if step.is_replayed:
            tidy_stacked_(self._stack_states(tap_states), *self._where(step.walk))
        else:
            tidy_states_(tap_states, *self._where(step.walk))

    def tidy_rows_of(self, input_batch: Any, states: torch.Tensor) -> None:
        step = self.step_of(input_batch)
        if step is not None and step.walk is not None:
            tidy_states_([states], *self._where(step.walk))

    def _where(self, walk: WalkBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each request's first row, its accepted path and how long that is."""
        return self._buffers.first_row_P[: len(walk.path_BL)], walk.path_BL, walk.num_accepted_B

    def _stack_states(self, tap_states: Sequence[torch.Tensor]) -> StackedCaches:
        """Of what graphs write, which stays where it is: one table for each of their sizes."""
        key = tuple((states.data_ptr(), states.shape[0]) for states in tap_states)
        if key not in self._stacked_states:
            self._stacked_states[key] = stack_caches(tap_states)
        return self._stacked_states[key]


def is_alike(input_batch: Any) -> bool:
    """Whether every request of a step has its committed token's row and its drafts', and no other.

    Graphs of steps that adapt take such a batch, and hold trees: also of one in which nothing was drafted.
    """
    drafts = input_batch.num_draft_tokens_per_req
    own = input_batch.num_scheduled_tokens - (0 if drafts is None else drafts)
    return bool(input_batch.decode_graph_eligible and (own == 1).all())


def _reserve_kept(layers: Sequence[TreeGatedDeltaNet], max_requests: int, max_rows: int) -> KeptLayers:
    like = layers[0]
    kept = allocate_kept(
        len(layers),
        max_requests,
        max_rows,
        like.conv1d.weight.shape[0],
        like.num_k_heads // like.tp_size,
        like.num_v_heads // like.tp_size,
        like.head_k_dim,
        like.head_v_dim,
        like.conv1d.weight,
    )
    for number, layer in enumerate(layers):
        layer.kept = kept.of_layer(number)
    return kept


def _check_backends(layers: Mapping[str, Any]) -> None:
    """Raises SeamError for a layer that knows no trees: no kernel of it would say so."""
    for name, layer in layers.items():
        implementation = getattr(layer, "impl", layer)
        if not isinstance(implementation, TreeFlashAttention | TreeGatedDeltaNet):
            raise SeamError(
                f"draft trees on CUDA need FlashAttention and Gated DeltaNet layers, {name} is"
                f" {type(implementation).__name__}: choose attention_backend FLASH_ATTN"
            )
