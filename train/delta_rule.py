"""Gated-DeltaNet layers of a target in training: the parts that transformers leaves to slow torch.

Without the packages that hold kernels for them, transformers solves a triangular system for every chunk and
convolves channel by channel in cuDNN; these do the same by matrix products and by additions.  For training:
no state goes in or comes out.  The chunked form is that of arXiv 2412.06464.
"""

# B=rows  T=tokens  H=heads  D=width of a head  N=chunks  C=tokens of a chunk  W=channels  K=kernel size

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5

CHUNK = 64
_BLOCK = 16
"""Of a chunk's triangle: what is inverted by itself."""


@contextmanager
def quick_delta_layers() -> Iterator[None]:
    """Qwen3.5's layers take these meanwhile, where they keep no state."""
    names = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
    before = {name: getattr(modeling_qwen3_5, name) for name in names}

    def rule(
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        output_final_state: bool,
        **named: Any,
    ) -> Any:
        if output_final_state or named["initial_state"] is not None:
            return before[names[0]](queries, keys, values, output_final_state=output_final_state, **named)
        return gated_delta_rule(queries, keys, values, named["g"], named["beta"]), None

    modeling_qwen3_5.torch_chunk_gated_delta_rule = rule
    modeling_qwen3_5.causal_conv1d_fn = causal_convolution
    try:
        yield
    finally:
        for name, each in before.items():
            setattr(modeling_qwen3_5, name, each)


def causal_convolution(
    states_BWT: torch.Tensor,
    weight_WK: torch.Tensor,
    bias: None = None,
    activation: str = "silu",
    **_: Any,
) -> torch.Tensor:
    """Each channel with its own kernel, whose last weight is the token's own, then SiLU."""
    assert bias is None and activation == "silu", (bias, activation)
    weight_WK = weight_WK.to(states_BWT.dtype)
    total_BWT = states_BWT * weight_WK[:, -1, None]
    for back in range(1, weight_WK.shape[1]):
        earlier_BWT = F.pad(states_BWT, (back, 0))[:, :, : states_BWT.shape[2]]
        total_BWT = total_BWT + earlier_BWT * weight_WK[:, -1 - back, None]
    return F.silu(total_BWT)


def gated_delta_rule(
    queries_BTHD: torch.Tensor,
    keys_BTHD: torch.Tensor,
    values_BTHD: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    strength_BTH: torch.Tensor,
) -> torch.Tensor:
    """What is read of the state S, for each token: S = exp(decay) S, S += strength k (v - k S)^T, q S.

    Queries and keys are brought to length 1, queries divided by the root of D.  In fp32; the queries' dtype.
    """
    tokens, dtype = queries_BTHD.shape[1], queries_BTHD.dtype
    with torch.autocast(queries_BTHD.device.type, enabled=False):
        queries, keys, values = map(_cut, (queries_BTHD, keys_BTHD, values_BTHD))
        queries, keys = _unit(queries) * queries.shape[-1] ** -0.5, _unit(keys)
        strength, decay = _cut(strength_BTH[..., None]), _cut(log_decay_BTH[..., None]).cumsum(3)
        between = (decay - decay.mT).tril().exp().tril()  # from the column's token to the row's
        strong = keys * strength
        inverse = InvertUnitLower.apply(strong @ keys.mT * between)
        own, read = inverse @ (values * strength), inverse @ (strong * decay.exp())
        end = decay[:, :, :, -1:]
        states, new = _scan(own, read, keys * (end - decay).exp(), end.exp())
        out = (queries * decay.exp()) @ states + (queries @ keys.mT * between) @ new
    return out.flatten(2, 3).transpose(1, 2)[:, :tokens].to(dtype)


def _cut(states_BTHD: torch.Tensor) -> torch.Tensor:
    """Into chunks, filled up with zeros, fp32. [B, H, N, C, D]"""
    tokens = states_BTHD.shape[1]
    padded = F.pad(states_BTHD.float(), (0, 0, 0, 0, 0, -tokens % CHUNK))
    return padded.transpose(1, 2).unflatten(2, (-1, CHUNK)).contiguous()


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


def _scan(
    own: torch.Tensor, read: torch.Tensor, keys: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunk after chunk: states that they begin with [B, H, N, D, D], and what they add [B, H, N, C, D]."""
    state = own.new_zeros(*own.shape[:2], keys.shape[-1], own.shape[-1])
    states, new = [], []
    of_chunks = (each.unbind(2) for each in (own, read, keys, decay))  # a slice's gradient is a whole tensor
    for own_here, read_here, keys_here, decay_here in zip(*of_chunks, strict=True):
        states.append(state)
        new.append(own_here - read_here @ state)
        state = state * decay_here + keys_here.mT @ new[-1]
    return torch.stack(states, 2), torch.stack(new, 2)


class InvertUnitLower(torch.autograd.Function):
    """The inverse of I + the strict lower triangle of what is given, of CHUNK x CHUNK matrices."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        inverse = invert_unit_lower(given)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ gradient @ inverse.mT).tril(-1)


def invert_unit_lower(given: torch.Tensor) -> torch.Tensor:
    """Blocks on the diagonal by themselves, then pairs of them joined until one is left."""
    blocks = given.unflatten(-1, (-1, _BLOCK)).unflatten(-3, (-1, _BLOCK)).transpose(-3, -2)
    inverse = _invert_blocks(blocks.diagonal(dim1=-4, dim2=-3).movedim(-1, -3).tril(-1))
    while inverse.shape[-3] > 1:
        size = inverse.shape[-1]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        starts = range(0, given.shape[-1], 2 * size)
        below = torch.stack([given[..., at + size : at + 2 * size, at : at + size] for at in starts], -3)
        corner = -(second @ below @ first)
        upper = torch.cat([first, torch.zeros_like(first)], -1)
        inverse = torch.cat([upper, torch.cat([corner, second], -1)], -2)
    return inverse.squeeze(-3)


def _invert_blocks(strict: torch.Tensor) -> torch.Tensor:
    """(I - P)(I + P^2)(I + P^4)... of a strict triangle P, whose power of its own size is zero."""
    power = -strict
    inverse = torch.eye(_BLOCK, device=power.device) + power
    reach = 2
    while reach < _BLOCK:
        power = power @ power
        inverse = inverse + inverse @ power
        reach *= 2
    return inverse
