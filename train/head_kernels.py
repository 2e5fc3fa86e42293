"""`train.head_rows` in Triton, with the same signatures, for a GPU: no fp32 copy of the logits exists.

A program has a row of its own and goes over it in steps.  For cross-entropy a row is read twice and written
once, for the objectives with a teacher both rows are read three times.  Nothing asks for more than sm_80.
"""
# ruff: noqa: PLR0913, PLR0917  (a kernel takes pointers and strides one by one)

# R=rows  V=vocabulary  S=columns of a step

import torch
import triton
import triton.language as tl

from train.head_rows import Gap, Read

_STEP = 4096  # two loads of 16 bytes for each of 256 threads, if logits are bf16
_WARPS = 8


def read_rows(logits_RV: torch.Tensor, labels_R: torch.Tensor) -> Read:
    num_rows, num_tokens = _check(logits_RV)
    lse_R, label_logits_R = (_new_column(logits_RV) for _ in range(2))
    tokens_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    _read_kernel[(num_rows,)](
        logits_RV,
        labels_R,
        lse_R,
        tokens_R,
        label_logits_R,
        num_tokens,
        logits_RV.stride(0),
        STEP=_STEP,
        num_warps=_WARPS,
    )
    return Read(lse_R, tokens_R, label_logits_R)


def compare_rows(
    logits_RV: torch.Tensor, lse_R: torch.Tensor, teacher_RV: torch.Tensor, teacher_lse_R: torch.Tensor
) -> Gap:
    num_rows, num_tokens = _check(logits_RV, teacher_RV)
    gap = Gap(*(_new_column(logits_RV) for _ in range(3)))
    _compare_kernel[(num_rows,)](
        logits_RV,
        lse_R,
        teacher_RV,
        teacher_lse_R,
        gap.kl_R,
        gap.variation_R,
        gap.pull_R,
        num_tokens,
        logits_RV.stride(0),
        teacher_RV.stride(0),
        STEP=_STEP,
        num_warps=_WARPS,
    )
    return gap


def slope_to_labels_(
    logits_RV: torch.Tensor, lse_R: torch.Tensor, labels_R: torch.Tensor, weights_R: torch.Tensor
) -> None:
    num_rows, num_tokens = _check(logits_RV)
    _label_slope_kernel[(num_rows,)](
        logits_RV,
        lse_R,
        labels_R,
        weights_R,
        num_tokens,
        logits_RV.stride(0),
        STEP=_STEP,
        num_warps=_WARPS,
    )


def slope_to_teacher_(
    logits_RV: torch.Tensor,
    lse_R: torch.Tensor,
    teacher_RV: torch.Tensor,
    teacher_lse_R: torch.Tensor,
    pull_R: torch.Tensor,
    kl_weights_R: torch.Tensor,
    variation_weights_R: torch.Tensor,
) -> None:
    num_rows, num_tokens = _check(logits_RV, teacher_RV)
    _teacher_slope_kernel[(num_rows,)](
        logits_RV,
        lse_R,
        teacher_RV,
        teacher_lse_R,
        pull_R,
        kl_weights_R,
        variation_weights_R,
        num_tokens,
        logits_RV.stride(0),
        teacher_RV.stride(0),
        STEP=_STEP,
        num_warps=_WARPS,
    )


def _new_column(logits_RV: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(logits_RV), dtype=torch.float32, device=logits_RV.device)


def _check(*logits: torch.Tensor) -> torch.Size:
    shape = logits[0].shape
    for each in logits:
        assert each.shape == shape, f"logits are {tuple(each.shape)} beside {tuple(shape)}"
        assert each.stride(1) == 1, f"logits have strides {each.stride()}, expected neighbours in a row"
    return shape


@triton.jit
def _read_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    lses: tl.tensor,
    tokens: tl.tensor,
    label_logits: tl.tensor,
    num_tokens: int,
    row_stride: int,
    STEP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    top, total, token = -float("inf"), 0.0, 0
    for start in range(0, num_tokens, STEP):
        columns_S = start + tl.arange(0, STEP)
        x_S = tl.load(logits + columns_S, columns_S < num_tokens, -1e30).to(tl.float32)
        step_top = tl.max(x_S, 0)
        first = tl.min(tl.where(x_S == step_top, columns_S, num_tokens), 0)
        token = tl.where(step_top > top, first, token)
        new_top = tl.maximum(top, step_top)
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x_S - new_top), 0)
        top = new_top
    tl.store(lses + row, top + tl.log(total))
    tl.store(tokens + row, token)
    tl.store(label_logits + row, tl.load(logits + tl.load(labels + row)).to(tl.float32))


@triton.jit
def _log_probs(logits: tl.tensor, columns_S: tl.tensor, num_tokens: int, lse: tl.tensor) -> tl.tensor:
    """Past the end of the row so low that its exp is 0, but a number."""
    x_S = tl.load(logits + columns_S, columns_S < num_tokens, -1e30)
    return x_S.to(tl.float32) - lse


@triton.jit
def _half_sign(gap_S: tl.tensor) -> tl.tensor:
    return tl.where(gap_S > 0, 0.5, tl.where(gap_S < 0, -0.5, 0.0))


@triton.jit
def _compare_kernel(
    logits: tl.tensor,
    lses: tl.tensor,
    teacher: tl.tensor,
    teacher_lses: tl.tensor,
    kls: tl.tensor,
    variations: tl.tensor,
    pulls: tl.tensor,
    num_tokens: int,
    row_stride: int,
    teacher_stride: int,
    STEP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    teacher += row * teacher_stride
    lse, teacher_lse = tl.load(lses + row), tl.load(teacher_lses + row)
    kl_S = tl.zeros([STEP], tl.float32)
    variation_S = tl.zeros([STEP], tl.float32)
    pull_S = tl.zeros([STEP], tl.float32)
    for start in range(0, num_tokens, STEP):
        columns_S = start + tl.arange(0, STEP)
        log_q_S = _log_probs(logits, columns_S, num_tokens, lse)
        log_p_S = _log_probs(teacher, columns_S, num_tokens, teacher_lse)
        q_S, p_S = tl.exp(log_q_S), tl.exp(log_p_S)
        kl_S += p_S * (log_p_S - log_q_S)
        variation_S += tl.abs(q_S - p_S)
        pull_S += q_S * _half_sign(q_S - p_S)
    tl.store(kls + row, tl.sum(kl_S, 0))
    tl.store(variations + row, tl.sum(variation_S, 0) / 2)
    tl.store(pulls + row, tl.sum(pull_S, 0))


@triton.jit
def _label_slope_kernel(
    logits: tl.tensor,
    lses: tl.tensor,
    labels: tl.tensor,
    weights: tl.tensor,
    num_tokens: int,
    row_stride: int,
    STEP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    lse, label, weight = tl.load(lses + row), tl.load(labels + row), tl.load(weights + row)
    for start in range(0, num_tokens, STEP):
        columns_S = start + tl.arange(0, STEP)
        q_S = tl.exp(_log_probs(logits, columns_S, num_tokens, lse))
        slope_S = weight * q_S - tl.where(columns_S == label, weight, 0.0)
        tl.store(logits + columns_S, slope_S.to(logits.dtype.element_ty), columns_S < num_tokens)


@triton.jit
def _teacher_slope_kernel(
    logits: tl.tensor,
    lses: tl.tensor,
    teacher: tl.tensor,
    teacher_lses: tl.tensor,
    pulls: tl.tensor,
    kl_weights: tl.tensor,
    variation_weights: tl.tensor,
    num_tokens: int,
    row_stride: int,
    teacher_stride: int,
    STEP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    teacher += row * teacher_stride
    lse, teacher_lse, pull = tl.load(lses + row), tl.load(teacher_lses + row), tl.load(pulls + row)
    kl_weight, variation_weight = tl.load(kl_weights + row), tl.load(variation_weights + row)
    for start in range(0, num_tokens, STEP):
        columns_S = start + tl.arange(0, STEP)
        q_S = tl.exp(_log_probs(logits, columns_S, num_tokens, lse))
        gap_S = q_S - tl.exp(_log_probs(teacher, columns_S, num_tokens, teacher_lse))
        slope_S = kl_weight * gap_S + variation_weight * q_S * (_half_sign(gap_S) - pull)
        tl.store(logits + columns_S, slope_S.to(logits.dtype.element_ty), columns_S < num_tokens)
