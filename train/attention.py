"""The attention of blocks over the context before them and over themselves, for the device at hand.

Query rows are the slots of all blocks; who sees whom is `train.blocks.visible`.  A GPU takes the kernels of
`train.attention_kernels`, which read a `Layout` of a few integers; a CPU takes stock attention on the tiles
of `train.tiles`.  `attend_densely` is what both compute, spelt out.
"""

# Q=query rows (blocks x slots)  S=context rows  N=S+Q  H=heads  G=key-value heads  d=head dim

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from train import tiles
from train.attention_launch import Pair, attend_backward, attend_forward
from train.layout import Layout
from train.tiles import Tiling

View = Layout | Tiling
"""What the blocks of a batch see in the layers of one kind: a Layout for the kernels, a Tiling for a CPU."""


def attend(query_QHd: torch.Tensor, context: Pair, blocks: Pair, view: View) -> torch.Tensor:
    """softmax(q k / sqrt(d)) v of every block row over what it sees. [Q, H, d]

    context and blocks: keys and values, [S, G, d] and [Q, G, d]; query head h reads head h // (H // G).
    With a Layout, tensors are on a GPU, or on a CPU where Triton's interpreter is on (tests), and all of one
    type: bf16, fp16 or fp32.
    """
    if isinstance(view, Tiling):
        return tiles.attend(query_QHd, context, blocks, view)
    return _KernelAttention.apply(view, query_QHd, *context, *blocks)


class _KernelAttention(Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, *tensors: torch.Tensor) -> torch.Tensor:
        query_QHd, *pairs = (each.contiguous() for each in tensors)
        outcome = attend_forward(
            query_QHd, (pairs[0], pairs[1]), (pairs[2], pairs[3]), layout, _scale(query_QHd)
        )
        ctx.layout = layout
        ctx.save_for_backward(query_QHd, *pairs, *outcome)
        return outcome[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output_QHd: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_QHd, *pairs, output_QHd, lse_QH = ctx.saved_tensors
        d_query_QHd, d_context, d_blocks = attend_backward(
            d_output_QHd.contiguous(),
            query_QHd,
            (pairs[0], pairs[1]),
            (pairs[2], pairs[3]),
            (output_QHd, lse_QH),
            ctx.layout,
            _scale(query_QHd),
        )
        return None, d_query_QHd, *d_context, *d_blocks


def _scale(query_QHd: torch.Tensor) -> float:
    return query_QHd.shape[-1] ** -0.5


def attend_densely(
    query_QHd: torch.Tensor, context: Pair, blocks: Pair, visible_QN: torch.Tensor
) -> torch.Tensor:
    """The slow twin of `attend`, in fp32. [Q, H, d]

    visible_QN: of `train.blocks.visibility`, over [context, blocks].
    """
    keys, values = (torch.cat(pair).float() for pair in zip(context, blocks, strict=True))
    query_QGhd = query_QHd.float().unflatten(1, (keys.shape[1], -1))
    score_QGhN = torch.einsum("qghd,ngd->qghn", query_QGhd, keys) * _scale(query_QHd)
    weight_QGhN = score_QGhN.masked_fill(~visible_QN[:, None, None], -torch.inf).softmax(dim=-1)
    output_QGhd = torch.einsum("qghn,ngd->qghd", weight_QGhN, values)
    return output_QGhd.flatten(1, 2).to(query_QHd.dtype)
