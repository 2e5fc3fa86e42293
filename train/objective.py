"""What a drafter is trained for, and how well it would draft.

An objective is a loss of each supervised row with a weight of its slot (`recipes.schema.Objective` names them
and their sources).  The sums here are not divided: `train.step` divides by the normaliser of a whole
optimizer step, over all micro-batches and ranks.  A normaliser is known before the forward pass and adds up
over blocks, and no block is ever split: so the way a step is split changes nothing.
"""

# A=blocks  K=slots of a block  Q=block rows (A x K)  R=supervised rows  L=tokens  D=hidden  V=vocabulary
#
# y = label, q = drafter's distribution, p = target's
#
# cross_entropy    -log q[y]                                   weight exp(-(k - 1) / decay) of slot k
# d_pace           -log q[y]                                   weight of `d_pace_weights`
# kl               sum p (log p - log q)                       weight as of cross_entropy, and so below
# total_variation  sum |p - q| / 2
# lk               share x KL + (1 - share) x variation        share = exp(-eta x sum min(p, q)), a constant

from dataclasses import dataclass

import torch

from recipes.errors import UserError
from recipes.schema import Objective as Settings
from train.blocks import block_positions
from train.head import Rows, Scored, arithmetic_on, score_rows


@dataclass(frozen=True)
class Drafted:
    loss_sum: torch.Tensor
    """Scalar, fp32: sum over rows of weight x loss (nats; total variation has no unit)."""
    tokens_R: torch.Tensor
    """The head's greedy choice at each row."""


@dataclass(frozen=True)
class Objective:
    settings: Settings

    def normaliser(self, supervised_AK: torch.Tensor) -> torch.Tensor:
        """What a step's loss is divided by, for these blocks: a scalar, fp64, that adds up over blocks.

        The sum of the slots' weights.  Those of d_pace are not known before the forward pass: it counts the
        blocks with a supervised slot, for a mean over blocks.
        """
        if self.settings.kind == "d_pace":
            return supervised_AK.any(1).double().sum()
        return slot_weights(supervised_AK, self.settings.decay).double().sum()

    def loss(self, hidden_RD: torch.Tensor, head_VD: torch.Tensor, rows: Rows) -> Drafted:
        """Under a frozen head, chunk by chunk; `hidden_RD` alone gets a gradient.

        `rows` has final states where the objective needs them, and none where it does not.
        """
        assert (rows.final_QD is not None) == self.settings.needs_final_states, self.settings.kind
        return Drafted(*score_rows(hidden_RD, head_VD, rows, self._score))

    def loss_at_once(self, hidden_RD: torch.Tensor, head_VD: torch.Tensor, rows: Rows) -> Drafted:
        """The slow twin of `loss`: all logits at once, autograd's own gradient."""
        logits_RV = (hidden_RD @ head_VD.T).float()
        log_q_RV = logits_RV.log_softmax(-1)
        label_log_q_R = log_q_RV.gather(1, rows.labels_R[:, None])[:, 0]
        losses_R = -label_log_q_R
        if rows.final_QD is not None:
            log_p_RV = (rows.final_QD[rows.places_R] @ head_VD.T).float().log_softmax(-1)
            p_RV, q_RV = log_p_RV.exp(), log_q_RV.exp()
            kl_R = (p_RV * (log_p_RV - log_q_RV)).sum(-1)
            share_R = self._kl_share(torch.minimum(p_RV, q_RV).sum(-1).detach())
            losses_R = share_R * kl_R + (1 - share_R) * (p_RV - q_RV).abs().sum(-1) / 2
        weights_R = self._weights(label_log_q_R.exp().detach(), rows)
        return Drafted((weights_R * losses_R).sum(), logits_RV.argmax(-1))

    def _score(self, logits_RV: torch.Tensor, teacher_RV: torch.Tensor | None, rows: Rows) -> Scored:
        """`train.head.Score`."""
        on = arithmetic_on(logits_RV.device)
        read = on.read_rows(logits_RV, rows.labels_R)
        losses_R = read.lse_R - read.label_logits_R
        weights_R = self._weights((-losses_R).exp(), rows)
        if teacher_RV is None:
            on.slope_to_labels_(logits_RV, read.lse_R, rows.labels_R, weights_R)
            return Scored(weights_R * losses_R, read.tokens_R)
        teacher_lse_R = on.read_rows(teacher_RV, rows.labels_R).lse_R
        gap = on.compare_rows(logits_RV, read.lse_R, teacher_RV, teacher_lse_R)
        kl_weights_R = weights_R * self._kl_share(1 - gap.variation_R)
        variation_weights_R = weights_R - kl_weights_R
        on.slope_to_teacher_(
            logits_RV, read.lse_R, teacher_RV, teacher_lse_R, gap.pull_R, kl_weights_R, variation_weights_R
        )
        return Scored(kl_weights_R * gap.kl_R + variation_weights_R * gap.variation_R, read.tokens_R)

    def _weights(self, label_probs_R: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Of whole blocks' rows, given the drafter's probabilities of the labels. fp32"""
        if self.settings.kind != "d_pace":
            slots_R = rows.places_R % rows.supervised_AK.shape[1]
            return torch.exp(-(slots_R - 1) / self.settings.decay)
        flat_Q = torch.zeros(rows.supervised_AK.numel(), device=label_probs_R.device)
        probs_AK = flat_Q.index_copy_(0, rows.places_R, label_probs_R).view_as(rows.supervised_AK)
        weights_AK = d_pace_weights(probs_AK, rows.supervised_AK, self.settings.alpha)
        return weights_AK.flatten()[rows.places_R]

    def _kl_share(self, acceptance_R: torch.Tensor) -> torch.Tensor:
        if self.settings.kind == "lk":
            return torch.exp(-self.settings.eta * acceptance_R)
        return torch.full_like(acceptance_R, float(self.settings.kind == "kl"))


def slot_weights(supervised_AK: torch.Tensor, decay: float) -> torch.Tensor:
    """exp(-(k - 1) / decay) where supervised, 0 elsewhere. [A, K] fp32"""
    slots_K = torch.arange(supervised_AK.shape[1], device=supervised_AK.device)
    return torch.exp(-(slots_K - 1) / decay) * supervised_AK


def d_pace_weights(label_probs_AK: torch.Tensor, supervised_AK: torch.Tensor, alpha: float) -> torch.Tensor:
    """w_j = sum over m >= j of the product over i <= m of (1 - alpha) q_i + alpha (arXiv 2605.18810).

    The drafts that would be accepted, as far as slot j has a part in them.  An unsupervised slot is a factor
    1 and a term 0, and weighs 0. [A, K] fp32
    """
    smooth_AK = torch.where(supervised_AK, (1 - alpha) * label_probs_AK + alpha, 1.0)
    reached_AK = smooth_AK.cumprod(1) * supervised_AK
    return reached_AK.flip(1).cumsum(1).flip(1) * supervised_AK


def final_states(final_LD: torch.Tensor, anchors_A: torch.Tensor, block_size: int) -> torch.Tensor:
    """What the target's head read when it predicted the token of each slot of a sequence's blocks. [Q, D]

    `final_LD` are its states after its final norm, by token: that of token a + k - 1 predicts token a + k,
    the label of slot k.  Slots without such a state are not supervised; they get the nearest.
    """
    before_AK = block_positions(anchors_A, block_size) - 1
    return final_LD[before_AK.clamp(0, len(final_LD) - 1).flatten()]


def lacks_final_states(settings: Settings) -> UserError:
    """For data without the final states that the objective needs."""
    return UserError(
        f"train.objective.kind {settings.kind} learns from the target's final hidden states, and the shards"
        " hold none: write data.final_states=true and make them again, or choose cross_entropy or d_pace"
    )


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
