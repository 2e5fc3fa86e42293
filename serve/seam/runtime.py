"""What the parts of a tree step share inside one worker: the planted trees, and the step under way.

One for each worker; speculator, model state and sampler hold it.  One batch is known at a time: what belongs
to another (a dummy run's, say) is not ours.
"""

# B=requests  N=nodes  L=slots

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from serve.pairwise import fill_table, walk_chain
from serve.tree_batch import Topology, TreeBatch, WalkBatch, grow_trees
from serve.tree_candidates import rank_candidates
from serve.tree_confidence import NodeConfidence, score_chains
from serve.tree_slots import PathRows, TreeSlots, begin_step, path_rows, tidy_rows, tokens_of


@runtime_checkable
class RecurrentLayer(Protocol):
    """A layer that verifies without writing its state."""

    def commit(self, walk: WalkBatch) -> None:
        """Brings the state to after the accepted paths."""


@dataclass
class Step:
    """One of the engine's, from its beginning to its commit."""

    input_batch: Any
    trees: Any
    """As the device's layers read them (`StepTrees` on a CPU); None where no draft was scheduled."""
    slot_mappings: torch.Tensor | None = None
    walk: WalkBatch | None = None
    paths: PathRows | None = None
    is_committed: bool = False
    are_states_tidy: bool = False
    is_replayed: bool = False
    """By a CUDA graph."""


@dataclass(frozen=True)
class StepLimits:
    """Of any step of an engine."""

    budget: int
    """Nodes of a tree."""
    num_slots: int
    """Depth the drafter works at: its block less the anchor, at most the budget."""
    requests: int
    rows: int
    chains: bool = False
    """No request has another tree than a chain."""
    adapts: bool = False
    """How much of the trees a step verifies is chosen in each, on the device (`serve.seam.budgets`)."""
    reserved: int = 0
    """The greedy chain's nodes that come first in every tree, if it is as long."""


class TreeRuntime:
    """The draft trees of one worker.  Methods in the order in which an engine's life calls them."""

    rank_candidates = staticmethod(rank_candidates)
    grow_trees = staticmethod(grow_trees)
    fill_table = staticmethod(fill_table)
    walk_chain = staticmethod(walk_chain)

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        self.limits, self.device = limits, device
        self.budget, self.num_slots = limits.budget, limits.num_slots
        self._slots = TreeSlots(limits.requests, limits.budget, device)
        # one more: slot -1, a graph's padding
        self._chain_only = torch.zeros(limits.requests + 1, dtype=torch.bool, device=device)
        self._step: Step | None = None
        self.confidence = NodeConfidence(limits.requests, limits.budget, device) if limits.adapts else None

    def reserve(self, layers: Mapping[str, Any], num_axes: int) -> None:
        """Takes what memory a step needs, before vLLM measures what is left.

        layers: by name; num_axes: of positions [axes, T], 0 if they are [T].
        """

    def bind(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """The target's layers by KV cache group and name, whose caches are there now."""
        layers = [layer for group in groups for layer in group.values()]
        self.recurrent_layers = [layer for layer in layers if isinstance(layer, RecurrentLayer)]
        self._layer_caches = [
            [layer.kv_cache for layer in group.values() if not isinstance(layer, RecurrentLayer)]
            for group in groups
        ]

    def dummy_inputs(self, inputs: Mapping[str, Any], num_tokens: int) -> Mapping[str, Any]:
        """What a CUDA graph is to be captured with, besides these inputs."""
        return {}

    def admit(self, slot: int, *, chain_only: bool) -> None:
        """A new request took this slot; a chain is all that its sampling settings allow, or any tree."""
        self._chain_only[slot] = chain_only or self.limits.chains
        if self.confidence is not None:
            self.confidence.forget(slot)

    def begin(self, input_batch: Any) -> None:
        """A real step begins."""
        self._step = Step(input_batch, self._read_trees(input_batch))

    def _read_trees(self, input_batch: Any) -> Any:
        if input_batch.num_draft_tokens == 0:
            return None
        num_drafts_B = input_batch.cu_num_logits.diff().long() - 1  # only these know what was chosen
        ends_B = input_batch.query_start_loc[1 : 1 + input_batch.num_reqs].long()
        topology = self._slots.read(input_batch.idx_mapping, num_drafts_B)
        return begin_step(topology, ends_B - 1 - num_drafts_B, self.num_slots)

    def step_of(self, input_batch: Any) -> Step | None:
        """The step under way, if it has trees and this is its batch."""
        step = self._step
        is_ours = step is not None and step.input_batch is input_batch and step.trees is not None
        return step if is_ours else None

    def trees_at(self, slots_B: torch.Tensor, num_drafts_B: torch.Tensor) -> Topology:
        """What is planted in these request slots, cut to so many drafts."""
        return self._slots.read(slots_B, num_drafts_B)

    def attach(
        self,
        metadata: Mapping[str, Any],
        input_batch: Any,
        _block_tables: Sequence[torch.Tensor],
        slot_mappings: torch.Tensor,
        *,
        for_capture: bool,
        is_full_graph: bool,
    ) -> None:
        """Tells the layers' attention metadata of the step's trees, if it has any.

        block_tables: by KV cache group, [B, blocks]; slot_mappings: [groups, T].
        """
        assert not for_capture and not is_full_graph, "a CPU has no graphs"
        step = self.step_of(input_batch)
        if step is not None:
            step.slot_mappings = slot_mappings
            for each in metadata.values():
                each.trees = step.trees

    def move_positions(self, input_batch: Any, positions: torch.Tensor) -> torch.Tensor:
        """Positions of the step's rows, [T] or [3, T], each node at its depth after the committed token.

        Not in place: the runner reads the linear positions again, for drafts and for the drafter.
        """
        step = self.step_of(input_batch)
        if step is None:
            return positions
        assert step.trees is not None
        return step.trees.move_positions(positions)

    def accept(self, walk: WalkBatch) -> None:
        """How far the target went along each tree of the step."""
        step = self._step
        assert step is not None and step.trees is not None, "a tree was verified outside a step"
        step.walk, step.paths = walk, path_rows(walk, step.trees.first_row_B)

    def observe(self) -> None:
        """What the step under way showed of the trees that it verified; before others are planted."""
        step = self._step
        if self.confidence is None or step is None or step.walk is None:
            return
        slots_B = step.input_batch.idx_mapping
        self.confidence.observe(slots_B, self._num_verified(step), step.walk.path_BL)

    def begin_anew(self) -> None:
        """Another drafter was loaded: what was seen of the one before says nothing of it."""
        if self.confidence is not None:
            self.confidence.calibration.restart()

    def _num_verified(self, step: Step) -> torch.Tensor:
        """Nodes of each request's tree. [B]"""
        assert step.trees is not None
        return step.trees.topology.num_nodes_B

    def commit(self) -> None:
        """Keeps of the step under way what the target accepted; once."""
        step = self._step
        if step is None or step.walk is None or step.is_committed:
            return
        step.is_committed = True
        self._commit(step, step.walk)

    def _commit(self, step: Step, walk: WalkBatch) -> None:
        self.tidy_caches(step)
        for layer in self.recurrent_layers:
            layer.commit(walk)

    def tidy_caches(self, step: Step) -> None:
        """Moves the keys and values of the accepted paths to the slots that a chain's would have."""
        assert step.paths is not None, "nothing was verified"
        assert step.slot_mappings is not None, "a step with trees had no attention metadata"
        source_rows, target_rows = step.paths.source_BL.flatten(), step.paths.target_BL.flatten()
        for slots_T, caches in zip(step.slot_mappings, self._layer_caches, strict=True):
            source, target = slots_T[source_rows], slots_T[target_rows]
            for cache in caches:  # [blocks, heads, block size, 2 x head dim]
                size = cache.shape[2]
                cache[target // size, :, target % size] = cache[source // size, :, source % size]

    def tidy_states(self, input_batch: Any, tap_states: Sequence[torch.Tensor]) -> None:
        """Brings the tap states [T, H] of the accepted paths to where a chain's would be, in place; once."""
        step = self.step_of(input_batch)
        if step is None or step.paths is None or step.are_states_tidy:
            return
        for states in tap_states:
            tidy_rows(states, step.paths)
        step.are_states_tidy = True

    def tidy_rows_of(self, input_batch: Any, states: torch.Tensor) -> None:
        """The same for other states [T, H] of the step; each time."""
        step = self.step_of(input_batch)
        if step is not None and step.paths is not None:
            tidy_rows(states, step.paths)

    def judge(
        self,
        slots_B: torch.Tensor,
        trees: TreeBatch,
        scores_BLCC: torch.Tensor,
        chain_BL: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """How likely the nodes planted there are to be accepted, as `tree_confidence.steps_of`. [B, N]

        scores_BLCC: what the trees grew on; all else as `plant`.
        """
        assert self.confidence is not None, "nobody asked for this engine's confidence"
        if chain_BL is None:
            chain_BL = torch.zeros_like(scores_BLCC[:, :, 0, 0], dtype=torch.int64)
        of_chain_BN = score_chains(scores_BLCC, chain_BL, self.budget)
        is_chain_B1 = self._chain_only[slots_B][:, None]
        return self.confidence.plant(slots_B, of_chain_BN.where(is_chain_B1, trees.scores_BN))

    def plant(
        self,
        slots_B: torch.Tensor,
        trees: TreeBatch,
        candidates_BLC: torch.Tensor,
        chain_BL: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Keeps what was drafted for the next step; the tokens that the engine is to see. [B, N]

        slots_B: of the requests, negative for a graph's padding.  candidates_BLC: the tokens that candidates
        stand for.  chain_BL: the chain's candidates, for requests that have one; None: each slot's first.
        """
        is_chain_B = self._chain_only[slots_B]
        is_chain_B1 = is_chain_B[:, None]
        numbers_N = torch.arange(self.budget, device=candidates_BLC.device)
        planted = Topology(
            trees.parents_BN.where(~is_chain_B1, numbers_N - 1),
            trees.depths_BN.where(~is_chain_B1, numbers_N + 1),
            trees.num_nodes_B.where(~is_chain_B, self.num_slots),
        )
        self._slots.plant(slots_B, planted)
        if chain_BL is None:
            chain_BL = torch.zeros_like(candidates_BLC[:, :, 0])
        tokens_BL = candidates_BLC.gather(2, chain_BL[:, :, None])[:, :, 0]
        chain_BN = torch.nn.functional.pad(tokens_BL, (0, self.budget - self.num_slots))
        return tokens_of(trees, candidates_BLC).where(~is_chain_B1, chain_BN)
