"""AdamW for large flat fp32 tensors: on a GPU one kernel for each reads and writes everything once.

torch.optim.AdamW without its variants: the same formula, and the same state under the same names, so that
either goes on with what the other saved.  Gradients may be scaled on their way in by a number that is never
read back to the host: `train.zero` clips so.
"""
# ruff: noqa: PLR0913, PLR0917  (a kernel takes pointers and numbers one by one)

# N=elements of a tensor  B=those of a program

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

KERNEL_ON = {"cuda"}

_BLOCK = 2048  # of each tensor two loads of 16 bytes for each of 256 threads
_WARPS = 8

Scale = Callable[[], torch.Tensor]
"""Gives what gradients are multiplied by in this step: 0-dim, where the parameters are."""


@dataclass(frozen=True)
class Flat:
    """A parameter and what belongs to it: fp32, one shape, each without gaps."""

    weight_N: torch.Tensor
    gradient_N: torch.Tensor
    mean_N: torch.Tensor
    square_N: torch.Tensor


# Of a weight w with gradient g in step t, with b for the betas (Loshchilov and Hutter, arXiv:1711.05101):
#     m <- m + (1 - b1) (g - m)
#     v <- b2 v + (1 - b2) g²
#     w <- (1 - lr decay) w - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)


@dataclass(frozen=True)
class Rule:
    """The numbers of a step."""

    keep: float
    """Of a weight: 1 - lr decay."""
    rate: float
    """lr / (1 - b1^t)."""
    mean_pull: float
    """1 - b1."""
    square_keep: float
    """b2."""
    square_pull: float
    """1 - b2."""
    root: float
    """sqrt(1 - b2^t)."""
    eps: float


def rule_of(group: dict[str, Any], step: float) -> Rule:
    """For a group of parameters in a step, the first is 1."""
    first, second = group["betas"]
    return Rule(
        keep=1 - group["lr"] * group["weight_decay"],
        rate=group["lr"] / (1 - first**step),
        mean_pull=1 - first,
        square_keep=second,
        square_pull=1 - second,
        root=math.sqrt(1 - second**step),
        eps=group["eps"],
    )


def update_plainly_(flat: Flat, rule: Rule, scale: torch.Tensor | None) -> None:
    """`update_by_kernel_` as torch's operators say it, wherever the tensors are."""
    gradient_N = flat.gradient_N if scale is None else flat.gradient_N * scale
    flat.mean_N.lerp_(gradient_N, rule.mean_pull)
    flat.square_N.mul_(rule.square_keep).addcmul_(gradient_N, gradient_N, value=rule.square_pull)
    spread_N = flat.square_N.sqrt() / rule.root + rule.eps
    flat.weight_N.mul_(rule.keep).addcdiv_(flat.mean_N, spread_N, value=-rule.rate)


def update_by_kernel_(flat: Flat, rule: Rule, scale: torch.Tensor | None) -> None:
    """Weight and moments in place; the gradient stays, a 0-dim `scale` multiplies what is read of it."""
    for each in (flat.weight_N, flat.gradient_N, flat.mean_N, flat.square_N):
        assert each.dtype == torch.float32, f"a tensor of the optimizer's is {each.dtype}"
        assert each.is_contiguous(), f"a tensor of the optimizer's has strides {each.stride()}"
    size = flat.weight_N.numel()
    _update_kernel[(triton.cdiv(size, _BLOCK),)](
        flat.weight_N,
        flat.gradient_N,
        flat.mean_N,
        flat.square_N,
        scale,
        size,
        rule.keep,
        rule.rate,
        rule.mean_pull,
        rule.square_keep,
        rule.square_pull,
        rule.root,
        rule.eps,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit
def _update_kernel(
    weights: tl.tensor,
    gradients: tl.tensor,
    means: tl.tensor,
    squares: tl.tensor,
    scale: tl.tensor | None,
    size: tl.int64,  # Triton takes int for 32 bits
    keep: float,
    rate: float,
    mean_pull: float,
    square_keep: float,
    square_pull: float,
    root: float,
    eps: float,
    BLOCK: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * BLOCK
    weights += first
    gradients += first
    means += first
    squares += first
    factor = 1.0 if scale is None else tl.load(scale).to(tl.float32)
    numbers = (keep, rate, mean_pull, square_keep, square_pull, root, eps)
    at_B = tl.arange(0, BLOCK)
    if first + BLOCK <= size:  # apart, as what is masked one by one is loaded one by one
        _update_block(weights, gradients, means, squares, factor, numbers, at_B, None)
    else:
        _update_block(weights, gradients, means, squares, factor, numbers, at_B, first + at_B < size)


@triton.jit
def _update_block(
    weights: tl.tensor,
    gradients: tl.tensor,
    means: tl.tensor,
    squares: tl.tensor,
    factor: tl.tensor,
    numbers: tl.tuple,
    at_B: tl.tensor,
    is_in_B: tl.tensor | None,
) -> None:
    keep, rate, mean_pull, square_keep, square_pull, root, eps = numbers
    gradient_B = tl.load(gradients + at_B, is_in_B) * factor
    mean_B = tl.load(means + at_B, is_in_B)
    square_B = tl.load(squares + at_B, is_in_B)
    weight_B = tl.load(weights + at_B, is_in_B)
    mean_B += mean_pull * (gradient_B - mean_B)
    square_B = square_keep * square_B + square_pull * gradient_B * gradient_B
    weight_B = keep * weight_B - rate * mean_B / (tl.sqrt(square_B) / root + eps)
    tl.store(means + at_B, mean_B, is_in_B)
    tl.store(squares + at_B, square_B, is_in_B)
    tl.store(weights + at_B, weight_B, is_in_B)


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW, neither amsgrad nor maximize, for dense fp32 parameters."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        scale: Scale | None = None,
    ) -> None:
        self.scale = scale
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for each in self.state.values():  # torch's fused one counts on the GPU
            each["step"] = torch.as_tensor(each["step"], dtype=torch.float32, device="cpu")

    @torch.no_grad()
    def step(self) -> None:
        scale = None if self.scale is None else self.scale()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, scale)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], scale: torch.Tensor | None) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
        state["step"] += 1
        flat = Flat(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        update_ = update_by_kernel_ if parameter.device.type in KERNEL_ON else update_plainly_
        update_(flat, rule_of(group, float(state["step"])), scale)
