"""`serve/pairwise.py`'s table and chain in Triton: two launches after one small matrix product.

For the drafter's CUDA graph, where each of torch's thirty kernels would take longer than its work.  Grids
depend on shapes alone; nothing asks for more than sm_80.
"""
# ruff: noqa: PLR0913, PLR0917  (a kernel takes pointers and strides one by one)

# B=requests  L=drafted slots  C=candidates of a slot  D=hidden  r=rank

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from serve.pairwise import LEAST_REST, PairwiseTables

_LEAST_SIZE = 16  # of a tile that tl.dot takes
_RANK_STEP = 32
_LEAST_REST = tl.constexpr(LEAST_REST)


def fill_table(
    tables: PairwiseTables,
    hidden_BLD: torch.Tensor,
    anchors_B: torch.Tensor,
    tokens_BLC: torch.Tensor,
    log_probs_BLC: torch.Tensor,
) -> torch.Tensor:
    """`serve.pairwise.fill_table`, for a GPU. [B, L, C, C] fp32

    anchors_B: of any stride.  Tables, tokens and log-probabilities are dense.
    """
    batch, num_slots, count = tokens_BLC.shape
    for dense in (*vars(tables).values(), tokens_BLC, log_probs_BLC):
        assert dense.is_contiguous(), f"strides {dense.stride()}"
    gates_BLr = F.linear(hidden_BLD.to(tables.gate_rD.dtype), tables.gate_rD)
    scores_BLCC = log_probs_BLC.new_empty(batch, num_slots, count, count)
    _fill_kernel[batch, num_slots](
        tables.parents_Vr,
        tables.children_Vr,
        gates_BLr,
        tables.rest_r,
        anchors_B,
        tokens_BLC,
        log_probs_BLC,
        scores_BLCC,
        count,
        tables.rank,
        anchors_B.stride(0),
        COUNT=max(_LEAST_SIZE, triton.next_power_of_2(count)),
        STEP=_RANK_STEP,
        num_warps=4,
    )
    return scores_BLCC


def walk_chain(scores_BLCC: torch.Tensor) -> torch.Tensor:
    """`serve.pairwise.walk_chain`, for a GPU. [B, L] int64"""
    batch, num_slots, count, _ = scores_BLCC.shape
    assert scores_BLCC.is_contiguous(), f"strides {scores_BLCC.stride()}"
    chain_BL = torch.empty(batch, num_slots, dtype=torch.int64, device=scores_BLCC.device)
    _walk_kernel[(batch,)](
        scores_BLCC, chain_BL, num_slots, count, COUNT=triton.next_power_of_2(count), num_warps=1
    )
    return chain_BL


@triton.jit
def _fill_kernel(
    parent_table: tl.tensor,
    child_table: tl.tensor,
    gates: tl.tensor,
    rest: tl.tensor,
    anchors: tl.tensor,
    tokens: tl.tensor,
    log_probs: tl.tensor,
    scores: tl.tensor,
    count: int,
    rank: int,
    anchor_stride: int,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """One program a slot: all its candidates after all candidates of the slot before."""
    request, slot = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = request * tl.num_programs(1) + slot
    candidate = tl.arange(0, COUNT)
    inside = candidate < count
    child = tl.load(tokens + place * count + candidate, mask=inside, other=0)
    place_before = place - tl.minimum(slot, 1)
    before = tl.load(tokens + place_before * count + candidate, mask=inside, other=0)
    anchor = tl.load(anchors + request * anchor_stride).to(tl.int64)
    parent = tl.where(slot > 0, before, anchor)
    bias, rest_bias = _mix(
        parent_table, child_table, gates + place * rank, rest, parent, child, rank, COUNT, STEP
    )
    log_q = tl.load(log_probs + place * count + candidate, mask=inside, other=float("-inf"))
    log_rest = tl.log(tl.maximum(1.0 - tl.sum(tl.exp(log_q), axis=0), _LEAST_REST)) + rest_bias
    x = log_q[None, :] + bias
    greatest = tl.maximum(tl.max(x, axis=1), log_rest)
    total = tl.sum(tl.exp(x - greatest[:, None]), axis=1) + tl.exp(log_rest - greatest)
    score = x - (greatest + tl.log(total))[:, None]
    at = (place * count + candidate[:, None]) * count + candidate[None, :]
    tl.store(scores + at, tl.minimum(score, 0.0), mask=inside[:, None] & inside[None, :])


@triton.jit
def _mix(
    parent_table: tl.tensor,
    child_table: tl.tensor,
    gates: tl.tensor,
    rest: tl.tensor,
    parent: tl.tensor,
    child: tl.tensor,
    rank: int,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What each parent adds to each child's score, and to that of the rest."""
    bias = tl.zeros([COUNT, COUNT], tl.float32)
    rest_bias = tl.zeros([COUNT], tl.float32)
    for first in range(0, rank, STEP):
        at = first + tl.arange(0, STEP)
        known = at < rank
        gate = tl.load(gates + at, mask=known, other=0.0).to(tl.float32)
        of_parent = tl.load(
            parent_table + parent[:, None] * rank + at[None, :], mask=known[None, :], other=0.0
        )
        mixed = of_parent.to(tl.float32) * (1.0 + gate)[None, :]
        of_child = tl.load(child_table + child[None, :] * rank + at[:, None], mask=known[:, None], other=0.0)
        bias = tl.dot(mixed, of_child.to(tl.float32), bias, input_precision="ieee")
        of_rest = tl.load(rest + at, mask=known, other=0.0).to(tl.float32)
        rest_bias += tl.sum(mixed * of_rest[None, :], axis=1)
    return bias, rest_bias


@triton.jit
def _walk_kernel(
    scores: tl.tensor, chain: tl.tensor, num_slots: int, count: int, COUNT: tl.constexpr
) -> None:
    """One program a request."""
    request = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, COUNT)
    at = tl.zeros([], tl.int32)
    for slot in range(num_slots):
        row = ((request * num_slots + slot) * count + at) * count
        score = tl.load(scores + row + candidate, mask=candidate < count, other=float("-inf"))
        at = tl.argmax(score, axis=0)
        tl.store(chain + request * num_slots + slot, at.to(tl.int64))
