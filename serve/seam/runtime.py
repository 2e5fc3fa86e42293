"""What the parts of a tree step share inside one worker: the planted trees, and the step under way.

One for each worker; speculator, model state and sampler hold it.  One batch is known at a time: what belongs
to another (a dummy run's, say) is not ours.
"""

# B=requests  N=nodes  L=slots

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from serve.tree_batch import Topology, WalkBatch
from serve.tree_slots import PathRows, StepTrees, TreeSlots, begin_step, path_rows, tidy_rows


@runtime_checkable
class RecurrentLayer(Protocol):
    """A layer that verifies without writing its state."""

    def commit(self, walk: WalkBatch) -> None:
        """Brings the state to after the accepted paths."""


@dataclass
class _Step:
    input_batch: Any
    trees: StepTrees | None
    """None where no draft was scheduled."""
    slot_mappings: torch.Tensor | None = None
    walk: WalkBatch | None = None
    paths: PathRows | None = None
    is_committed: bool = False
    are_states_tidy: bool = False


class TreeRuntime:
    """The draft trees of one worker."""

    def __init__(self, budget: int, num_slots: int, max_num_reqs: int, device: torch.device) -> None:
        """`num_slots` is the depth the drafter works at: its block less the anchor, at most `budget`."""
        self.budget, self.num_slots = budget, num_slots
        self._slots = TreeSlots(max_num_reqs, budget, device)
        self._chain_only = torch.zeros(max_num_reqs, dtype=torch.bool, device=device)
        self._step: _Step | None = None

    def admit(self, slot: int, *, chain_only: bool) -> None:
        """A new request took this slot; a chain is all that its sampling settings allow, or any tree."""
        self._chain_only[slot] = chain_only

    def begin(self, input_batch: Any) -> None:
        """A real step begins."""
        self._step = _Step(input_batch, self._read_trees(input_batch))

    def _read_trees(self, input_batch: Any) -> StepTrees | None:
        drafts = input_batch.num_draft_tokens_per_req
        if drafts is None or not drafts.any():
            return None
        device = input_batch.idx_mapping.device
        num_drafts_B = torch.from_numpy(drafts).to(device, torch.int64)
        ends_B = input_batch.query_start_loc[1 : 1 + input_batch.num_reqs].long()
        topology = self._slots.read(input_batch.idx_mapping, num_drafts_B)
        return begin_step(topology, ends_B - 1 - num_drafts_B, self.num_slots)

    def step_of(self, input_batch: Any) -> _Step | None:
        """The step under way, if it has trees and this is its batch."""
        step = self._step
        is_ours = step is not None and step.input_batch is input_batch and step.trees is not None
        return step if is_ours else None

    def trees_at(self, slots_B: torch.Tensor, num_drafts_B: torch.Tensor) -> Topology:
        """What is planted in these request slots, cut to so many drafts."""
        return self._slots.read(slots_B, num_drafts_B)

    def accept(self, walk: WalkBatch) -> None:
        """How far the target went along each tree of the step."""
        step = self._step
        assert step is not None and step.trees is not None, "a tree was verified outside a step"
        step.walk, step.paths = walk, path_rows(walk, step.trees.first_row_B)

    def commit(
        self, layer_caches: Sequence[Sequence[torch.Tensor]], recurrent_layers: Sequence[RecurrentLayer]
    ) -> None:
        """Keeps of the step under way what the target accepted; once."""
        step = self._step
        if step is None or step.walk is None or step.is_committed:
            return
        step.is_committed = True
        self.tidy_caches(layer_caches)
        for layer in recurrent_layers:
            layer.commit(step.walk)

    def tidy_states(self, input_batch: Any, tap_states: Sequence[torch.Tensor]) -> None:
        """Brings the tap states [T, H] of the accepted paths to where a chain's would be, in place; once."""
        step = self.step_of(input_batch)
        if step is None or step.paths is None or step.are_states_tidy:
            return
        for states in tap_states:
            tidy_rows(states, step.paths)
        step.are_states_tidy = True

    def plant(
        self, input_batch: Any, trees: Topology, tokens_BN: torch.Tensor, chain_BL: torch.Tensor
    ) -> torch.Tensor:
        """Keeps what was drafted for the next step; the tokens that the engine is to see. [B, N]"""
        is_chain_B = self._chain_only[input_batch.idx_mapping]
        is_chain_B1 = is_chain_B[:, None]
        numbers_N = torch.arange(self.budget, device=tokens_BN.device)
        planted = Topology(
            trees.parents_BN.where(~is_chain_B1, numbers_N - 1),
            trees.depths_BN.where(~is_chain_B1, numbers_N + 1),
            trees.num_nodes_B.where(~is_chain_B, self.num_slots),
        )
        self._slots.plant(input_batch.idx_mapping, planted)
        padded_BN = torch.nn.functional.pad(chain_BL, (0, self.budget - self.num_slots))
        return tokens_BN.where(~is_chain_B1, padded_BN)

    def tidy_caches(self, layer_caches: Sequence[Sequence[torch.Tensor]]) -> None:
        """Moves the keys and values of the accepted paths to the slots that a chain's would have.

        layer_caches: for each KV cache group, its layers' caches, [blocks, heads, block size, 2 x head dim].
        """
        step = self._step
        assert step is not None and step.paths is not None, "nothing was verified"
        assert step.slot_mappings is not None, "a step with trees had no attention metadata"
        source_rows, target_rows = step.paths.source_BL.flatten(), step.paths.target_BL.flatten()
        for slots_T, caches in zip(step.slot_mappings, layer_caches, strict=True):
            source, target = slots_T[source_rows], slots_T[target_rows]
            for cache in caches:
                size = cache.shape[2]
                cache[target // size, :, target % size] = cache[source // size, :, source % size]
