"""Growing draft trees and planting them, in Triton: `serve/tree_batch.grow_trees` and `TreeSlots.plant`.

As `serve/tree_batch_kernels.py`: results are those of the twins, ties included; grids depend on shapes alone,
so a CUDA graph can hold the launches; nothing asks for more than sm_80.
"""
# ruff: noqa: PLR0913, PLR0917  (a kernel takes pointers and strides one by one)

# B=requests  L=slots  C=candidates of a slot  N=nodes, padded  S=request slots of the engine
# K=nodes with reserved rows

import torch
import triton
import triton.language as tl

from serve.tree import ROOT
from serve.tree_attention import MOST_ROWS
from serve.tree_batch import Topology, TreeBatch

_ROOT = tl.constexpr(ROOT)
_ROWS = tl.constexpr(MOST_ROWS)

# A node as an integer that sorts as nodes do: the bits of |score|, then 8 bits for its depth, 8 for its
# parent's row and 16 for the candidate.  For x <= 0, |x| ascends as its bits do.
_NEVER = tl.constexpr(0x7F800000 << 32)  # a score of -inf; NaN is beyond it
_MOST_CANDIDATES = 256  # for the sake of registers
_KEYS_OF_WARP = 512


def grow_trees(scores_BLCC: torch.Tensor, budget: int, reserved_BK: torch.Tensor | None = None) -> TreeBatch:
    """`serve.tree_batch.grow_trees`, of at most 63 nodes from at most 256 candidates a slot, in any order.

    scores_BLCC, reserved_BK: any strides; a view that is expanded over the parents is as good as a dense one.
    """
    batch, num_slots, _, num_candidates = scores_BLCC.shape
    assert 0 < budget < MOST_ROWS, f"budget is {budget}, a request has at most {MOST_ROWS} rows"
    assert num_slots < MOST_ROWS, f"{num_slots} slots, a request has at most {MOST_ROWS} rows"
    assert num_candidates <= _MOST_CANDIDATES, f"{num_candidates} candidates, at most {_MOST_CANDIDATES}"
    assert scores_BLCC.dtype == torch.float32, f"scores are {scores_BLCC.dtype}, expected float32"
    tile_parents, tile_candidates = triton.next_power_of_2(budget), triton.next_power_of_2(num_candidates)
    num_reserved = 0 if reserved_BK is None else reserved_BK.shape[1]
    reserved_strides = (0, 0) if reserved_BK is None else reserved_BK.stride()
    integers = {"dtype": torch.int64, "device": scores_BLCC.device}
    trees = TreeBatch(
        parents_BN=torch.empty(batch, budget, **integers),
        depths_BN=torch.empty(batch, budget, **integers),
        num_nodes_B=torch.empty(batch, **integers),
        candidates_BN=torch.empty(batch, budget, **integers),
        scores_BN=scores_BLCC.new_empty(batch, budget),
    )
    _grow_kernel[(batch,)](
        scores_BLCC,
        reserved_BK,
        trees.parents_BN,
        trees.depths_BN,
        trees.num_nodes_B,
        trees.candidates_BN,
        trees.scores_BN,
        num_slots,
        num_candidates,
        budget,
        num_reserved,
        *scores_BLCC.stride(),
        *reserved_strides,
        TILE_PARENTS=tile_parents,
        TILE_CANDIDATES=tile_candidates,
        num_warps=max(1, min(16, tile_parents * tile_candidates // _KEYS_OF_WARP)),
    )
    return trees


def plant_trees(
    trees: TreeBatch,
    candidates_BLC: torch.Tensor,
    is_chain_S: torch.Tensor,
    slots_B: torch.Tensor,
    planted: Topology,
    chain_BL: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plants grown trees, as `serve.tree_slots.TreeSlots.plant`; the nodes' tokens. int64 [B, N]

    candidates_BLC: the tokens that the trees' candidates stand for.  is_chain_S: bool, the request slots that
    are to have a chain instead; past its end tokens are 0.  slots_B: of any stride; negative for a graph's
    padding, which is planted nowhere.  planted: by request slot, [S, N], [S, N] and [S], written in place.
    chain_BL: dense, int64, the chain's candidates; None: each slot's first.
    """
    batch, budget = trees.parents_BN.shape
    assert candidates_BLC.shape[0] == batch, f"{candidates_BLC.shape} for {batch} trees"
    assert budget < MOST_ROWS, f"{budget} nodes, a request has at most {MOST_ROWS} rows"
    for dense in (trees.parents_BN, trees.depths_BN, trees.candidates_BN):
        assert dense.is_contiguous(), f"trees have strides {dense.stride()}"
    for dense in (planted.parents_BN, planted.depths_BN):
        assert dense.is_contiguous(), f"planted trees have strides {dense.stride()}"
    assert chain_BL is None or chain_BL.is_contiguous(), "chains lie apart"
    tokens_BN = torch.empty(batch, budget, dtype=torch.int64, device=candidates_BLC.device)
    _plant_kernel[(batch,)](
        trees.parents_BN,
        trees.depths_BN,
        trees.num_nodes_B,
        trees.candidates_BN,
        chain_BL,
        candidates_BLC,
        is_chain_S,
        slots_B,
        planted.parents_BN,
        planted.depths_BN,
        planted.num_nodes_B,
        tokens_BN,
        budget,
        candidates_BLC.shape[1],
        slots_B.stride(0),
        *candidates_BLC.stride(),
        num_warps=1,
    )
    return tokens_BN


@triton.jit
def _grow_kernel(
    scores: tl.tensor,
    reserved: tl.tensor | None,
    parents: tl.tensor,
    depths: tl.tensor,
    node_counts: tl.tensor,
    candidates: tl.tensor,
    node_scores: tl.tensor,
    num_slots: int,
    num_candidates: int,
    budget: int,
    num_reserved: int,
    request_stride: int,
    slot_stride: int,
    parent_stride: int,
    candidate_stride: int,
    reserved_request_stride: int,
    reserved_slot_stride: int,
    TILE_PARENTS: tl.constexpr,
    TILE_CANDIDATES: tl.constexpr,
) -> None:
    """One program a request.  The heap of `serve.tree.grow_tree` is a tile: a row of keys for each parent."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, TILE_PARENTS)
    of_parent = tl.arange(0, TILE_CANDIDATES)
    scores += request * request_stride + of_parent * candidate_stride
    heap = tl.full([TILE_PARENTS, TILE_CANDIDATES], _NEVER, tl.int64)
    grown = tl.full([TILE_PARENTS], _NEVER, tl.int64)
    score, depth, candidate, width = 0.0, 0, 0, num_candidates  # the committed token's
    on_chain = 1  # whether the node before this one is the chain's, and its row reserved
    for node in range(budget):
        # the children of the node before this one, whose row has this one's number
        is_child = of_parent < width
        own = tl.load(
            scores + depth * slot_stride + candidate * parent_stride, mask=is_child, other=float("-inf")
        )
        bits = tl.abs(score + own).to(tl.int32, bitcast=True).to(tl.int64)
        place = (depth + 1 << 24) + (node << 16) + of_parent
        keys = tl.where(is_child, bits << 32 | place, _NEVER)
        is_row = row == node
        heap = tl.where(is_row[:, None], keys[None, :], heap)
        first = tl.min(heap)
        if reserved is not None:
            of_chain = reserved + request * reserved_request_stride + node * reserved_slot_stride
            chosen = tl.load(of_chain, mask=node < num_reserved, other=0)
            key = tl.min(tl.where(of_parent == chosen, keys, _NEVER))
            is_reserved = (on_chain > 0) & (node < num_reserved) & (key < _NEVER)
            first = tl.where(is_reserved, key, first)
            on_chain = is_reserved.to(tl.int32)
        heap = tl.where(heap == first, _NEVER, heap)
        grown = tl.where(is_row, first, grown)
        score, depth, _, candidate = _unpack_key(first)
        width = tl.where((first < _NEVER) & (depth < num_slots), num_candidates, 0)

    inside = row < budget
    is_grown = grown < _NEVER
    score_of, depth_of, parent_row_of, candidate_of = _unpack_key(grown)
    at = request * budget + row
    tl.store(parents + at, tl.where(is_grown, parent_row_of - 1, _ROOT), mask=inside)
    tl.store(depths + at, tl.where(is_grown, depth_of, 0), mask=inside)
    tl.store(candidates + at, tl.where(is_grown, candidate_of, 0), mask=inside)
    tl.store(node_scores + at, tl.where(is_grown, score_of, float("-inf")), mask=inside)
    tl.store(node_counts + request, tl.sum(is_grown.to(tl.int32)))


@triton.jit
def _unpack_key(key: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Score, depth, parent's row and candidate."""
    score = -(key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    place = key.to(tl.int32)
    return score, place >> 24 & 0xFF, place >> 16 & 0xFF, place & 0xFFFF


@triton.jit
def _plant_kernel(
    parents: tl.tensor,
    depths: tl.tensor,
    node_counts: tl.tensor,
    candidates: tl.tensor,
    chain: tl.tensor | None,
    candidate_tokens: tl.tensor,
    chain_flags: tl.tensor,
    slots: tl.tensor,
    planted_parents: tl.tensor,
    planted_depths: tl.tensor,
    planted_counts: tl.tensor,
    tokens: tl.tensor,
    most_nodes: int,
    num_slots: int,
    slots_stride: int,
    token_request_stride: int,
    token_slot_stride: int,
    token_candidate_stride: int,
) -> None:
    """One program a request."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request * slots_stride).to(tl.int64)
    is_tree = tl.load(chain_flags + tl.maximum(slot, 0)).to(tl.int32) == 0
    number = tl.arange(0, _ROWS)
    inside = number < most_nodes
    at = request * most_nodes + number
    parent = tl.where(is_tree, tl.load(parents + at, mask=inside, other=0), number - 1)
    depth = tl.where(is_tree, tl.load(depths + at, mask=inside, other=0), number + 1)
    place = tl.maximum(depth - 1, 0)  # padding has depth 0
    of_chain = tl.zeros_like(parent)
    if chain is not None:
        of_chain = tl.load(chain + request * num_slots + place, mask=inside & (place < num_slots), other=0)
    candidate = tl.where(is_tree, tl.load(candidates + at, mask=inside, other=0), of_chain)
    token = tl.load(
        candidate_tokens
        + request * token_request_stride
        + place * token_slot_stride
        + candidate * token_candidate_stride,
        mask=inside & (place < num_slots),
        other=0,
    )
    tl.store(tokens + at, token, mask=inside)
    if slot < 0:
        return
    tl.store(planted_parents + slot * most_nodes + number, parent, mask=inside)
    tl.store(planted_depths + slot * most_nodes + number, depth, mask=inside)
    tl.store(planted_counts + slot, tl.where(is_tree, tl.load(node_counts + request), num_slots))
