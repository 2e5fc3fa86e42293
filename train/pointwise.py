"""The drafter's elementwise work as plain functions: norms, rotary angles, the MLP's gate.

On a GPU torch.compile makes a kernel or two of each, instead of one for every operator, with fp32 in between;
a CPU, and whoever compares, runs them as they stand.  `products_made_again` keeps the gate's product out of
what is held for the backward pass.  `train.drafter` calls all this from the modules that own the weights.
"""

# R=rows  H=heads  d=head dim  D=hidden  F=intermediate

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each [R, d]; a sine's first half is negated."""

COMPILED_ON = {"cuda"}

P = ParamSpec("P")
T = TypeVar("T")


def choose(function: Callable[P, T], fuses: bool, rows: torch.Tensor) -> Callable[P, T]:
    """`function`, compiled if it fuses where `rows` are.  One row, or none, would be compiled apart."""
    is_compiled = fuses and rows.device.type in COMPILED_ON and len(rows) > 1
    return _compile(function) if is_compiled else function


@cache
def _compile(function: Callable[P, T]) -> Callable[P, T]:
    """Once, at its first call, for any number of rows; as constants the other sizes make faster kernels."""
    # nothing is chosen by timing it: a run repeats bit for bit, wherever it goes on
    compiled = torch.compile(function, dynamic=False, options={"deterministic": True})

    def call(*given: P.args, **named: P.kwargs) -> T:
        for each in given:
            if isinstance(each, torch.Tensor) and each.ndim > 1:
                torch._dynamo.maybe_mark_dynamic(each, 0)
        return compiled(*given, **named)

    return call


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_and_norm(
    x_RD: torch.Tensor, change_RD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, and its RMSNorm."""
    sum_RD = x_RD + change_RD
    return sum_RD, norm(sum_RD, weight_D, eps)


def norm_and_rotate(
    x_RHd: torch.Tensor, weight_d: torch.Tensor, eps: float, cos_Rd: torch.Tensor, sin_Rd: torch.Tensor
) -> torch.Tensor:
    """RMSNorm of each head; then dimensions i and i + d/2 are rotated, by the angles of a `Rotation`."""
    normed_RHd = norm(x_RHd, weight_d, eps)
    # a roll is an index to the compiler, where halves that are put together would be stored first
    other_RHd = normed_RHd.roll(normed_RHd.shape[-1] // 2, -1)
    return normed_RHd * cos_Rd[:, None] + other_RHd * sin_Rd[:, None]


def swiglu(gate_RF: torch.Tensor, up_RF: torch.Tensor) -> torch.Tensor:
    return F.silu(gate_RF) * up_RF


def swiglu_slopes(
    d_product_RF: torch.Tensor, gate_RF: torch.Tensor, up_RF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up: autograd's of `swiglu`."""
    d_gate_RF = torch.ops.aten.silu_backward(d_product_RF * up_RF, gate_RF)
    return d_gate_RF, d_product_RF * F.silu(gate_RF)


def multiply_gated(gate_RF: torch.Tensor, up_RF: torch.Tensor, fuses: bool) -> torch.Tensor:
    """`swiglu`, of which the backward pass keeps gate and up alone."""
    return _SwiGLU.apply(gate_RF, up_RF, fuses)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_RF: torch.Tensor, up_RF: torch.Tensor, fuses: bool) -> torch.Tensor:
        ctx.save_for_backward(gate_RF, up_RF)
        ctx.fuses = fuses
        return choose(swiglu, fuses, gate_RF)(gate_RF, up_RF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_product_RF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate_RF, up_RF = ctx.saved_tensors
        return *choose(swiglu_slopes, ctx.fuses, gate_RF)(d_product_RF, gate_RF, up_RF), None


@contextmanager
def products_made_again() -> Iterator[None]:
    """What is saved in here for the backward pass, by any module: no product of `multiply_gated`, but how to
    make it again."""
    with saved_tensors_hooks(_keep, _restore):
        yield


def _keep(saved: torch.Tensor) -> Any:
    """The tensor, or the node of the graph that has its gate and up."""
    return saved.grad_fn if isinstance(saved.grad_fn, _SwiGLU._backward_cls) else saved


def _restore(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    gate_RF, up_RF = kept.saved_tensors
    return choose(swiglu, kept.fuses, gate_RF)(gate_RF, up_RF)
