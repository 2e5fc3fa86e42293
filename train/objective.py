"""What a drafter is trained for, and how well it would draft.

Loss: cross-entropy of slots 1..K-1 against the target's own tokens, slot k weighing exp(-(k - 1) / decay).
The sums here are not divided: `train.step` divides by the weights of a whole optimizer step, over all
micro-batches and ranks, so that the way a step is split changes nothing.
The frozen head is applied to a chunk of rows at a time; logits of all rows never exist at once.
"""

# A=blocks  K=slots of a block  R=rows  D=hidden  V=vocabulary

from dataclasses import dataclass

import torch
from torch.nn import functional as F

CHUNK_LOGITS = 1 << 23
"""Logits in one chunk: 32 MiB in fp32."""


@dataclass(frozen=True)
class Drafted:
    loss_sum: torch.Tensor
    """Scalar, fp32: sum over rows of weight x cross-entropy (nats)."""
    tokens_R: torch.Tensor
    """The head's greedy choice at each row."""


def slot_weights(supervised_AK: torch.Tensor, decay: float) -> torch.Tensor:
    """exp(-(k - 1) / decay) where supervised, 0 elsewhere. [A, K] fp32"""
    slots_K = torch.arange(supervised_AK.shape[1], device=supervised_AK.device)
    return torch.exp(-(slots_K - 1) / decay) * supervised_AK


def weighted_cross_entropy(
    hidden_RD: torch.Tensor, head_VD: torch.Tensor, labels_R: torch.Tensor, weights_R: torch.Tensor
) -> Drafted:
    """The loss under a frozen head, chunk by chunk; `hidden_RD` alone gets a gradient."""
    return Drafted(*_FrozenHeadLoss.apply(hidden_RD, head_VD, labels_R, weights_R))


def weighted_cross_entropy_at_once(
    hidden_RD: torch.Tensor, head_VD: torch.Tensor, labels_R: torch.Tensor, weights_R: torch.Tensor
) -> Drafted:
    """The slow twin of `weighted_cross_entropy`: all logits at once, autograd's own gradient."""
    logits_RV = (hidden_RD @ head_VD.T).float()
    losses_R = F.cross_entropy(logits_RV, labels_R, reduction="none")
    return Drafted((losses_R * weights_R).sum(), logits_RV.argmax(-1))


class _FrozenHeadLoss(torch.autograd.Function):
    """The head is frozen and the loss a scalar, so the gradient is known up to a factor while a chunk's
    logits are at hand: it is kept, for one more [R, D], instead of recomputing them in the backward pass."""

    @staticmethod
    def forward(ctx, hidden_RD, head_VD, labels_R, weights_R):
        gradient_RD = torch.empty_like(hidden_RD)
        tokens_R = torch.empty_like(labels_R)
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden_RD.device)
        rows = max(1, CHUNK_LOGITS // head_VD.shape[0])
        for start in range(0, len(hidden_RD), rows):
            chunk = slice(start, start + rows)
            logits_RV = (hidden_RD[chunk] @ head_VD.T).float()
            tokens_R[chunk] = logits_RV.argmax(-1)
            log_probs_RV = logits_RV.log_softmax(-1)
            labels, weights = labels_R[chunk, None], weights_R[chunk, None]
            loss_sum -= (log_probs_RV.gather(1, labels) * weights).sum()
            # d loss / d logits = weight x (softmax - one_hot(label))
            slope_RV = log_probs_RV.exp_().mul_(weights).scatter_add_(1, labels, -weights)
            gradient_RD[chunk] = slope_RV.to(head_VD.dtype) @ head_VD
        ctx.save_for_backward(gradient_RD)
        ctx.mark_non_differentiable(tokens_R)
        return loss_sum, tokens_R

    @staticmethod
    def backward(ctx, loss_gradient, _tokens_gradient):
        (gradient_RD,) = ctx.saved_tensors
        return gradient_RD * loss_gradient.to(gradient_RD.dtype), None, None, None


def accepted_per_block(
    tokens_AK: torch.Tensor, labels_AK: torch.Tensor, supervised_AK: torch.Tensor
) -> torch.Tensor:
    """Drafts that greedy verification would accept: the run of right slots from slot 1, ended by the first
    wrong or unsupervised one. [A]"""
    right = (tokens_AK == labels_AK) & supervised_AK
    return right[:, 1:].long().cumprod(1).sum(1)


def blocks_by_depth(accepted_A: torch.Tensor, block_size: int) -> torch.Tensor:
    """How many blocks accept at least k drafts, for k = 0..K-1. [K] int64"""
    return (accepted_A[:, None] >= torch.arange(block_size, device=accepted_A.device)).sum(0)


def simulated_acceptance(blocks_by_depth_K: torch.Tensor) -> float:
    """Mean accepted drafts per block + the bonus token = 1 + sum over k >= 1 of the share that accepts k."""
    return 1.0 + float(blocks_by_depth_K[1:].sum() / blocks_by_depth_K[0])
