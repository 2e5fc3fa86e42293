"""The target's frozen head over a batch's rows, a chunk at a time: logits of all rows never exist at once.

The head gets no gradient and a loss is a scalar, so a row's gradient is known up to a factor while its logits
are at hand: it is kept, one more [R, D], and nothing is computed again in the backward pass.  How a chunk is
scored is `train.objective`'s business; what is done with a row, on a CPU or a GPU, that of `train.head_rows`
and `train.head_kernels`.
"""

# A=blocks  K=slots of a block  Q=block rows (A x K)  R=supervised rows  D=hidden  V=vocabulary

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType

import torch

from train import head_kernels, head_rows

CHUNK_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 29}
"""Logits in one chunk: 32 MiB in fp32 on a CPU, 1 GiB in bf16 on a GPU.

A chunk reads the whole head twice: of 248,320 tokens, one of 2,160 rows does 2,160 FLOPs for a byte
that it reads, one of 30 rows would do 30, and a GPU waits for its memory below some hundreds.
"""


@dataclass(frozen=True)
class Rows:
    """The supervised rows of a batch's blocks, block after block; the other rows need no logits."""

    supervised_AK: torch.Tensor
    places_R: torch.Tensor
    """Of each row among the Q block rows, ascending."""
    labels_R: torch.Tensor
    first_rows: list[int]
    """Of each block, then R."""
    final_QD: torch.Tensor | None = None
    """What the target's head read when it predicted each slot's token (`train.objective.final_states`)."""

    def cut(self, most_rows: int) -> Iterator[tuple[slice, "Rows"]]:
        """Runs of whole blocks, of at most `most_rows` rows or one block, and where their rows lie in R."""
        num_blocks, block_size = self.supervised_AK.shape
        step = max(1, most_rows // (block_size - 1))
        for first in range(0, num_blocks, step):
            blocks = slice(first, min(first + step, num_blocks))
            where = slice(self.first_rows[blocks.start], self.first_rows[blocks.stop])
            if where.start < where.stop:
                yield where, self._take(blocks, where)

    def _take(self, blocks: slice, where: slice) -> "Rows":
        block_size = self.supervised_AK.shape[1]
        first_place = blocks.start * block_size
        return Rows(
            self.supervised_AK[blocks],
            self.places_R[where] - first_place,
            self.labels_R[where],
            [row - where.start for row in self.first_rows[blocks.start : blocks.stop + 1]],
            None if self.final_QD is None else self.final_QD[first_place : blocks.stop * block_size],
        )


def find_rows(
    labels_AK: torch.Tensor, supervised_AK: torch.Tensor, final_QD: torch.Tensor | None = None
) -> Rows:
    """Waits for the device."""
    places_R = supervised_AK.flatten().nonzero().flatten()
    first_rows = [0, *accumulate(supervised_AK.sum(1).tolist())]
    return Rows(supervised_AK, places_R, labels_AK.flatten()[places_R], first_rows, final_QD)


@dataclass(frozen=True)
class Scored:
    losses_R: torch.Tensor
    """fp32, weighted."""
    tokens_R: torch.Tensor
    """The head's greedy choice."""


Score = Callable[[torch.Tensor, torch.Tensor | None, Rows], Scored]
"""Of logits [R, V], the teacher's [R, V] if there are final states, and the rows that they belong to.  Leaves
the gradient with respect to the logits in their place."""


def score_rows(
    hidden_RD: torch.Tensor, head_VD: torch.Tensor, rows: Rows, score: Score
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses, fp32, and the tokens [R]; `hidden_RD` alone gets a gradient."""
    loss_sum, tokens_R = _FrozenHead.apply(hidden_RD, head_VD, rows, score)
    return loss_sum, tokens_R


def arithmetic_on(device: torch.device) -> ModuleType:
    """What is done with rows of logits there."""
    return head_kernels if device.type == "cuda" else head_rows


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_RD, head_VD, rows, score):
        gradient_RD = torch.empty_like(hidden_RD)
        tokens_R = torch.empty_like(rows.labels_R)
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden_RD.device)
        most_rows = CHUNK_LOGITS[hidden_RD.device.type] // head_VD.shape[0]
        for where, chunk in rows.cut(most_rows):
            scored, gradient_RD[where] = _score_chunk(hidden_RD[where], head_VD, chunk, score)
            loss_sum += scored.losses_R.sum()
            tokens_R[where] = scored.tokens_R
        ctx.save_for_backward(gradient_RD)
        ctx.mark_non_differentiable(tokens_R)
        return loss_sum, tokens_R

    @staticmethod
    def backward(ctx, loss_gradient, _tokens_gradient):
        (gradient_RD,) = ctx.saved_tensors
        return gradient_RD * loss_gradient.to(gradient_RD.dtype), None, None, None


def _score_chunk(
    hidden_RD: torch.Tensor, head_VD: torch.Tensor, rows: Rows, score: Score
) -> tuple[Scored, torch.Tensor]:
    """Also the gradient [R, D]; a function of its own, so that no two chunks of logits are alive at once."""
    logits_RV = hidden_RD @ head_VD.T
    teacher_RV = None if rows.final_QD is None else rows.final_QD[rows.places_R] @ head_VD.T
    scored = score(logits_RV, teacher_RV, rows)
    return scored, logits_RV @ head_VD
