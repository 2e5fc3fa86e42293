"""`serve/tree_candidates.py` in Triton: the logits are read once, by two launches for any number of rows.

For a drafter on a GPU, whose head has a quarter of a million tokens: torch's topk and logsumexp make fp32 of
them and read them several times.  Results are those of the twin, log-probabilities up to rounding.  Grids
depend on shapes alone, so a CUDA graph can hold the launches; nothing asks for more than sm_80.
"""
# ruff: noqa: PLR0913, PLR0917  (a kernel takes pointers and strides one by one)

# T=rows of logits  V=vocabulary  C=candidates of a row  G=groups of neighbouring tokens
# P=parts of a row, each of some groups: what a program of the first launch reads
#
# The first launch finds the first token of every group.  The second has those of a row in its registers and
# takes the first of them C times; each time, the next token of the same group steps in for the one taken.

import torch
import triton
import triton.language as tl

from serve.tree_candidates import LAST_TOKEN, Candidates, check_logits

_MOST_GROUPS = 2048  # whose keys are 32 registers of each of 128 threads
_LEAST_GROUP = 32  # tokens
_PART_TOKENS = 4096  # four loads of 16 bytes for each of 128 threads, if these are bf16

_LAST_TOKEN = tl.constexpr(LAST_TOKEN)
_NEVER = tl.constexpr(-(1 << 63))  # before every key of a token, NaN's too


def rank_candidates(logits_TV: torch.Tensor, count: int) -> Candidates:
    """`serve.tree_candidates.rank_candidates`, for a GPU."""
    check_logits(logits_TV, count)
    num_rows, num_tokens = logits_TV.shape
    group = max(_LEAST_GROUP, triton.next_power_of_2(triton.cdiv(num_tokens, _MOST_GROUPS)))
    num_groups = triton.cdiv(num_tokens, group)
    groups_of_part = triton.cdiv(_PART_TOKENS, group)
    num_parts = triton.cdiv(num_groups, groups_of_part)
    new = {"device": logits_TV.device}
    keys_TG = torch.empty(num_rows, num_groups, dtype=torch.int64, **new)
    logsumexps_TP = torch.empty(num_rows, num_parts, dtype=torch.float32, **new)
    tokens_TC = torch.empty(num_rows, count, dtype=torch.int64, **new)
    log_probs_TC = torch.empty(num_rows, count, dtype=torch.float32, **new)
    row_stride = logits_TV.stride(0)
    _survey_kernel[num_rows, num_parts](
        logits_TV,
        keys_TG,
        logsumexps_TP,
        num_tokens,
        row_stride,
        GROUPS=groups_of_part,
        GROUP=group,
        num_warps=4,
    )
    _take_kernel[(num_rows,)](
        logits_TV,
        keys_TG,
        logsumexps_TP,
        tokens_TC,
        log_probs_TC,
        num_tokens,
        num_parts,
        count,
        row_stride,
        GROUPS=triton.next_power_of_2(num_groups),
        GROUP=group,
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=4,
    )
    return Candidates(tokens_TC, log_probs_TC)


@triton.jit
def _survey_kernel(
    logits: tl.tensor,
    keys: tl.tensor,
    logsumexps: tl.tensor,
    num_tokens: int,
    row_stride: int,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One program a part of a row: the first key of each of its groups, and its logsumexp."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_groups = tl.cdiv(num_tokens, GROUP)
    group = part * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value, key = _load_group(logits + row * row_stride, token, num_tokens)
    first = tl.max(key, axis=1)
    tl.store(keys + row * num_groups + group, first, mask=group < num_groups)
    greatest = _value_of(tl.max(first, axis=0))
    logsumexp = _logsumexp(tl.reshape(value, [GROUPS * GROUP]), greatest)
    tl.store(logsumexps + row * tl.num_programs(1) + part, logsumexp)


@triton.jit
def _take_kernel(
    logits: tl.tensor,
    keys: tl.tensor,
    logsumexps: tl.tensor,
    tokens: tl.tensor,
    log_probs: tl.tensor,
    num_tokens: int,
    num_parts: int,
    count: int,
    row_stride: int,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    part = tl.arange(0, PARTS)
    of_parts = tl.load(logsumexps + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    logsumexp = _logsumexp(of_parts, tl.max(of_parts, axis=0))

    num_groups = tl.cdiv(num_tokens, GROUP)
    group = tl.arange(0, GROUPS)
    firsts = tl.load(keys + row * num_groups + group, mask=group < num_groups, other=_NEVER)
    for place in range(count):
        taken = tl.max(firsts, axis=0)
        token = (taken.to(tl.int32) & _LAST_TOKEN) ^ _LAST_TOKEN
        of_group = token // GROUP
        _, others = _load_group(logits, of_group * GROUP + tl.arange(0, GROUP), num_tokens)
        next_one = tl.max(tl.where(others < taken, others, _NEVER), axis=0)
        firsts = tl.where(group == of_group, next_one, firsts)
        value = _value_of(taken)
        log_prob = tl.where(value == float("-inf"), value, value - logsumexp)
        tl.store(tokens + row * count + place, token.to(tl.int64))
        tl.store(log_probs + row * count + place, log_prob)


@triton.jit
def _load_group(logits: tl.tensor, token: tl.tensor, num_tokens: int) -> tuple[tl.tensor, tl.tensor]:
    """Values and keys of a row's tokens; beyond the vocabulary -inf and _NEVER."""
    inside = token < num_tokens
    value = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    sign = bits >> 31
    order = ((bits & _LAST_TOKEN) ^ sign) - sign  # as in the twin
    key = (order.to(tl.int64) << 32) | (token ^ _LAST_TOKEN).to(tl.int64)
    return value, tl.where(inside, key, _NEVER)


@triton.jit
def _value_of(key: tl.tensor) -> tl.tensor:
    order = (key >> 32).to(tl.int32)
    magnitude = tl.abs(order).to(tl.float32, bitcast=True)
    return tl.where(order < 0, -magnitude, magnitude)


@triton.jit
def _logsumexp(values: tl.tensor, greatest: tl.tensor) -> tl.tensor:
    """Of a vector; greatest: its greatest value, which may be infinite."""
    shift = tl.where(tl.abs(greatest) < float("inf"), greatest, 0.0)
    return tl.log(tl.sum(tl.exp(values - shift), axis=0)) + shift
