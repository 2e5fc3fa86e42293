"""What is done with rows of logits, in plain torch: on a CPU, and as the slow twin of `train.head_kernels`.

Logits are in the model's precision, all arithmetic in fp32.  Gradients with respect to logits take the place
of the drafter's logits.
"""

# R=rows  V=vocabulary
#
# q = softmax of the drafter's logits, p = of the teacher's, x = the drafter's logits
#
# cross-entropy    L = log sum exp x - x[label]     dL/dx = q - one_hot(label)
# KL               L = sum p (log p - log q)        dL/dx = q - p
# total variation  L = sum |q - p| / 2              dL/dx = q (s - sum q s)   with s = sign(q - p) / 2

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Read:
    """All fp32 but the tokens."""

    lse_R: torch.Tensor
    """log sum exp."""
    tokens_R: torch.Tensor
    """Of the largest logit, the first of several."""
    label_logits_R: torch.Tensor


@dataclass(frozen=True)
class Gap:
    """Between drafter and teacher, fp32."""

    kl_R: torch.Tensor
    """Nats."""
    variation_R: torch.Tensor
    """1 - the acceptance of speculative sampling, sum min(p, q)."""
    pull_R: torch.Tensor
    """sum q s."""


def read_rows(logits_RV: torch.Tensor, labels_R: torch.Tensor) -> Read:
    top_R, tokens_R = logits_RV.max(-1)
    top_R = top_R.float()
    sums_R = (logits_RV - top_R[:, None]).exp_().sum(-1)  # fp32, as top_R is
    label_logits_R = logits_RV.gather(1, labels_R[:, None])[:, 0].float()
    return Read(top_R + sums_R.log(), tokens_R, label_logits_R)


def compare_rows(
    logits_RV: torch.Tensor, lse_R: torch.Tensor, teacher_RV: torch.Tensor, teacher_lse_R: torch.Tensor
) -> Gap:
    log_q_RV = logits_RV - lse_R[:, None]
    log_p_RV = teacher_RV - teacher_lse_R[:, None]
    p_RV = log_p_RV.exp()
    kl_R = log_p_RV.sub_(log_q_RV).mul_(p_RV).sum(-1)
    q_RV = log_q_RV.exp_()
    gap_RV = torch.sub(q_RV, p_RV, out=p_RV)
    variation_R = torch.linalg.vector_norm(gap_RV, 1, -1) / 2  # no copy, as abs would make
    return Gap(kl_R, variation_R, gap_RV.sign_().mul_(q_RV).sum(-1) / 2)


def slope_to_labels_(
    logits_RV: torch.Tensor, lse_R: torch.Tensor, labels_R: torch.Tensor, weights_R: torch.Tensor
) -> None:
    """The gradient of weight x cross-entropy, in place of the logits."""
    slope_RV = logits_RV.float()  # the logits themselves, if they are fp32
    slope_RV.sub_(lse_R[:, None]).exp_().mul_(weights_R[:, None])
    logits_RV.copy_(slope_RV.scatter_add_(1, labels_R[:, None], -weights_R[:, None]))


def slope_to_teacher_(
    logits_RV: torch.Tensor,
    lse_R: torch.Tensor,
    teacher_RV: torch.Tensor,
    teacher_lse_R: torch.Tensor,
    pull_R: torch.Tensor,
    kl_weights_R: torch.Tensor,
    variation_weights_R: torch.Tensor,
) -> None:
    """The gradient of both losses, each with its weight, in place of the drafter's logits."""
    q_RV = (logits_RV - lse_R[:, None]).exp_()
    gap_RV = (teacher_RV - teacher_lse_R[:, None]).exp_().neg_().add_(q_RV)
    q_RV *= gap_RV.sign().div_(2).sub_(pull_R[:, None]).mul_(variation_weights_R[:, None])
    logits_RV.copy_(gap_RV.mul_(kl_weights_R[:, None]).add_(q_RV))
