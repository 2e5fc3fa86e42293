"""`serve.tree` for a batch of requests, on the device: fixed shapes, no value read back to the host.

Every function has its slow twin there and gives the same, ties included.  Instead of a heap a level is grown
at a time: a child is never before its parent, so the N best nodes of a depth have their parents among the N
best of the depth before.
"""

# B=requests  L=slots  C=candidates of a slot  N=nodes, padded  P=kept nodes of a depth  M=kept nodes in all
# R=rows: the committed token, then the nodes  K=nodes with reserved rows  Q=children of a depth's kept nodes

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from serve.tree import ROOT

_RESERVED = -1
"""The rank of a node that has its row reserved: before those of all scores."""
_FORBIDDEN = 0x7F800000
"""That of a score of -inf; NaN's is beyond it."""


@dataclass(frozen=True)
class Topology:
    """Who hangs on whom; from num_nodes_B on comes padding: parent ROOT, depth 0."""

    parents_BN: torch.Tensor
    depths_BN: torch.Tensor
    num_nodes_B: torch.Tensor


@dataclass(frozen=True)
class TreeBatch(Topology):
    """As `serve.tree.Tree`; padding has candidate 0."""

    candidates_BN: torch.Tensor
    scores_BN: torch.Tensor
    """fp32, -inf for padding."""


@dataclass(frozen=True)
class WalkBatch:
    """As `serve.tree.Walk`."""

    path_BL: torch.Tensor
    """Accepted nodes; ROOT from num_accepted_B on."""
    num_accepted_B: torch.Tensor
    bonus_B: torch.Tensor


def grow_trees(scores_BLCC: torch.Tensor, budget: int, reserved_BK: torch.Tensor | None = None) -> TreeBatch:
    """A tree of at most `budget` nodes for each request; scores as `serve.tree.grow_tree` takes them.

    reserved_BK: int64, candidates of the chain's nodes that have rows reserved; None: no node has.
    """
    batch, num_slots, _, num_candidates = scores_BLCC.shape
    score_BP = scores_BLCC.new_zeros(batch, 1)
    candidate_BP = torch.zeros_like(score_BP, dtype=torch.int64)
    rank_BP = torch.full_like(candidate_BP, _RESERVED)
    levels: list[tuple[torch.Tensor, ...]] = []  # ranks, scores, parents in M, candidates
    first_of_parents = first = 0
    for slot in range(num_slots):
        of_parents = candidate_BP[:, :, None].expand(-1, -1, num_candidates)
        total_BQ = (score_BP[:, :, None] + scores_BLCC[:, slot].gather(1, of_parents)).flatten(1)
        rank_BQ = _rank(total_BQ)
        if reserved_BK is not None and slot < reserved_BK.shape[1]:
            rank_BQ = _reserve(rank_BQ, reserved_BK[:, slot, None], rank_BP[:, :1])
        place_BP = _first(rank_BQ, budget)
        rank_BP, score_BP = rank_BQ.gather(1, place_BP), total_BQ.gather(1, place_BP)
        candidate_BP = place_BP % num_candidates
        parent_BP = place_BP // num_candidates + first_of_parents
        levels.append((rank_BP, score_BP, parent_BP, candidate_BP))
        first_of_parents, first = first, first + place_BP.shape[1]
    rank_BM, score_BM, parent_BM, candidate_BM = (
        torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)
    )
    depths = [torch.full_like(level[0], depth) for depth, level in enumerate(levels, start=1)]
    return _best(rank_BM, score_BM, parent_BM, torch.cat(depths, dim=1), candidate_BM, budget)


def _reserve(rank_BQ: torch.Tensor, candidate_B1: torch.Tensor, parent_rank_B1: torch.Tensor) -> torch.Tensor:
    """Puts the chain's node before all others of its depth, unless it is forbidden or its parent had been.

    parent_rank_B1: of the first node of the depth before.  If that is the chain's, its children come first
    here, and the place of each is its candidate.
    """
    rank_B1 = rank_BQ.gather(1, candidate_B1)
    is_reserved_B1 = (parent_rank_B1 == _RESERVED) & (rank_B1 < _FORBIDDEN)
    return rank_BQ.scatter(1, candidate_B1, rank_B1.masked_fill(is_reserved_B1, _RESERVED))


def _best(
    rank_BM: torch.Tensor,
    score_BM: torch.Tensor,
    parent_BM: torch.Tensor,
    depth_BM: torch.Tensor,
    candidate_BM: torch.Tensor,
    budget: int,
) -> TreeBatch:
    """The first nodes over all depths; their parents are among them."""
    place_BN = _first(rank_BM, budget)
    score_BN, depth_BN = score_BM.gather(1, place_BN), depth_BM.gather(1, place_BN)
    number_BM = torch.zeros_like(parent_BM).scatter_(1, place_BN, _counting_like(place_BN))
    parent_BN = number_BM.gather(1, parent_BM.gather(1, place_BN))
    is_node_BN = score_BN > -torch.inf
    padding = (0, budget - place_BN.shape[1])
    return TreeBatch(
        parents_BN=F.pad(parent_BN.where(is_node_BN & (depth_BN > 1), ROOT), padding, value=ROOT),
        depths_BN=F.pad(depth_BN.where(is_node_BN, 0), padding),
        candidates_BN=F.pad(candidate_BM.gather(1, place_BN).where(is_node_BN, 0), padding),
        scores_BN=F.pad(score_BN, padding, value=-torch.inf),
        num_nodes_B=is_node_BN.sum(1),
    )


def _rank(scores: torch.Tensor) -> torch.Tensor:
    """Ascends as scores descend, from 0 on: for x <= 0, |x| ascends as its bits do. int64, below 2 ** 31"""
    return scores.abs().view(torch.int32).long()


def _first(ranks: torch.Tensor, most: int) -> torch.Tensor:
    """Places of the lowest ranks of each row, of equal ones the earlier. [B, up to `most`]"""
    keys = (ranks << 32) | _counting_like(ranks)  # one integer that sorts as (rank, place)
    smallest = keys.topk(min(most, ranks.shape[1]), dim=1, largest=False, sorted=True).values
    return smallest & 0xFFFFFFFF


def _counting_like(rows: torch.Tensor) -> torch.Tensor:
    """0, 1, ... in every row. int64"""
    return torch.arange(rows.shape[1], device=rows.device).expand(rows.shape)


def see_ancestors(parents_BN: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Who sees whom among the rows of each request: itself and its ancestors. [B, R, R] bool

    Padding sees itself and the committed token.
    """
    up_BR = F.pad(parents_BN + 1, (1, 0))  # the row above a row; the committed token's is its own
    at_BR = _counting_like(up_BR)
    sees_BRR = torch.zeros(*up_BR.shape, up_BR.shape[1], dtype=torch.bool, device=up_BR.device)
    for _ in range(num_slots + 1):
        sees_BRR.scatter_(2, at_BR[:, :, None], value=True)
        at_BR = up_BR.gather(1, at_BR)
    return sees_BRR


def follow_trees(
    trees: Topology, node_tokens_BN: torch.Tensor, target_tokens_BR: torch.Tensor, num_slots: int
) -> WalkBatch:
    """Descends in every tree as `serve.tree.follow_tree` does."""
    is_node_BN = _counting_like(trees.parents_BN) < trees.num_nodes_B[:, None]
    at_B1 = trees.parents_BN.new_full((len(trees.parents_BN), 1), ROOT)
    alive_B1 = torch.ones_like(at_B1, dtype=torch.bool)
    steps = []
    for _ in range(num_slots):
        token_B1 = target_tokens_BR.gather(1, at_B1 + 1)
        fits_BN = is_node_BN & (trees.parents_BN == at_B1) & (node_tokens_BN == token_B1) & alive_B1
        alive_B1 = fits_BN.any(1, keepdim=True)
        at_B1 = fits_BN.int().argmax(1, keepdim=True).where(alive_B1, at_B1)
        steps.append(at_B1.where(alive_B1, ROOT))
    path_BL = torch.cat(steps, dim=1)
    return WalkBatch(path_BL, (path_BL != ROOT).sum(1), target_tokens_BR.gather(1, at_B1 + 1)[:, 0])
