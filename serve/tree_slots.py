"""Draft trees on their way through the engine: planted when drafted, read when verified, walked, tidied up.

Pure torch in fixed shapes; the seam calls it at the points of a step where vLLM lets it.  In a step a request
has a row for its committed token and, right after it, one for each scheduled draft, in the tree's order.
"""

# S=request slots of the engine  B=requests of a step  N=nodes (padded)  L=slots of a block  T=rows of a step
# R=rows of a request: the committed token, then the nodes

from dataclasses import dataclass

import torch

from serve.tree_batch import Topology, TreeBatch, WalkBatch, see_ancestors


class TreeSlots:
    """The tree that waits for its verification in every request slot; none is planted at first.

    Where none is, or beyond its last node, masks and positions are a chain's, and nothing is accepted.
    """

    def __init__(self, num_slots: int, budget: int, device: torch.device) -> None:
        chain_N = torch.arange(budget, device=device)
        with_spare = num_slots + 1  # what is planted in slot -1, a graph's padding, is nobody's
        self.planted = Topology(
            (chain_N - 1).repeat(with_spare, 1),
            (chain_N + 1).repeat(with_spare, 1),
            torch.zeros(with_spare, dtype=torch.int64, device=device),
        )
        """By request slot."""

    def plant(self, slots_B: torch.Tensor, trees: Topology) -> None:
        self.planted.parents_BN[slots_B] = trees.parents_BN
        self.planted.depths_BN[slots_B] = trees.depths_BN
        self.planted.num_nodes_B[slots_B] = trees.num_nodes_B

    def read(self, slots_B: torch.Tensor, num_drafts_B: torch.Tensor) -> Topology:
        """Cut to the drafts that were scheduled: any prefix of a tree is one."""
        return Topology(
            self.planted.parents_BN[slots_B],
            self.planted.depths_BN[slots_B],
            torch.minimum(self.planted.num_nodes_B[slots_B], num_drafts_B),
        )


def tokens_of(trees: TreeBatch, candidates_BLC: torch.Tensor) -> torch.Tensor:
    """The nodes' tokens, of those that the trees' candidates stand for. [B, N]"""
    slots_BN = (trees.depths_BN - 1).clamp(min=0)
    of_slot_BNC = candidates_BLC.gather(1, slots_BN[:, :, None].expand(-1, -1, candidates_BLC.shape[2]))
    return of_slot_BNC.gather(2, trees.candidates_BN[:, :, None])[:, :, 0]


@dataclass(frozen=True)
class StepTrees:
    """The trees of one step and where their rows lie among the step's rows."""

    topology: Topology
    first_row_B: torch.Tensor
    """Of the committed token; the nodes' rows follow."""
    sees_BRR: torch.Tensor

    def move_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """A copy of [T] or [3, T] positions, each node at its depth after the committed token."""
        rows_BN, is_node_BN = self._node_rows()
        depths_BN = self.topology.depths_BN.where(is_node_BN, 0)
        moved = positions.clone()
        moved[..., rows_BN] = positions[..., self.first_row_B, None] + depths_BN.to(positions.dtype)
        return moved

    def rows_of(self, requests: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of some of the requests, the committed token's where there is none. Both [*, R]"""
        rows_BN, is_node_BN = self._node_rows()
        rows_BR = torch.cat([self.first_row_B[:, None], rows_BN], dim=1)
        return rows_BR[requests], torch.nn.functional.pad(is_node_BN, (1, 0), value=True)[requests]

    def _node_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the nodes, the committed token's where there is none; and where there is one."""
        numbers_N = torch.arange(self.topology.parents_BN.shape[1], device=self.first_row_B.device)
        is_node_BN = numbers_N < self.topology.num_nodes_B[:, None]
        return self.first_row_B[:, None] + (numbers_N + 1).where(is_node_BN, 0), is_node_BN


def begin_step(topology: Topology, first_row_B: torch.Tensor, num_slots: int) -> StepTrees:
    return StepTrees(topology, first_row_B, see_ancestors(topology.parents_BN, num_slots))


@dataclass(frozen=True)
class PathRows:
    """Which rows hold the accepted path, and where they belong: right after the committed token, in order.

    Both [B, L]; past the end of a path both name the committed token's row.
    """

    source_BL: torch.Tensor
    target_BL: torch.Tensor


def path_rows(walk: WalkBatch, first_row_B: torch.Tensor) -> PathRows:
    places_L = torch.arange(walk.path_BL.shape[1], device=first_row_B.device)
    is_on_path_BL = places_L < walk.num_accepted_B[:, None]
    return PathRows(
        first_row_B[:, None] + (walk.path_BL + 1).where(is_on_path_BL, 0),
        first_row_B[:, None] + (places_L + 1).where(is_on_path_BL, 0),
    )


def tidy_rows(rows: torch.Tensor, paths: PathRows) -> None:
    """Moves the path's rows of [T, ...] to where they belong, in place."""
    taken = rows.index_select(0, paths.source_BL.flatten())
    rows.index_copy_(0, paths.target_BL.flatten(), taken)


def commit_tokens(
    walk: WalkBatch, node_tokens_BN: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step emits: the path's tokens, then the target's own. ([B, num_tokens], how many of them [B])

    Tokens past the count are 0.
    """
    batch, num_slots = walk.path_BL.shape
    emitted = node_tokens_BN.new_zeros(batch, max(num_tokens, num_slots + 1))
    emitted[:, :num_slots] = node_tokens_BN.gather(1, walk.path_BL.clamp(min=0)).where(walk.path_BL >= 0, 0)
    emitted.scatter_(1, walk.num_accepted_B[:, None], walk.bonus_B[:, None].to(emitted.dtype))
    return emitted[:, :num_tokens].contiguous(), walk.num_accepted_B + 1
