"""Scores of a slot's tokens given the token before: what makes a draft tree's branches worth having.

A block-diffusion drafter scores each slot without knowing which token the slot before took.  This head adds
to its scores a low-rank term of the two tokens, mixed with the slot's hidden state; drafter and target stay
as they are, and an untrained head changes nothing.  Neither files nor optimizers here: the losses are for a
training loop, `PairwiseHead.score` is what fills the table that `serve.tree.grow_tree` takes.
"""

# A=blocks  L=drafted slots of a block (its size - 1)  P=parents of a slot  C=candidates of a slot
# D=hidden  V=vocabulary  r=rank
#
# q = the drafter's distribution at a slot, h its state there, p the parent: the token of the slot before
#
# A = embedding P_a   B = head P_b                                       [V, r], of the target's frozen rows
# m(h, p)        = A[p] * (1 + G h)                                      G: [r, D]   b: [r]
# x(c)           = log q(c) + m B[c]                                     c among the slot's C candidates
# x(rest)        = log (1 - sum of q over the candidates) + m b          all other tokens
# s(p, c)        = x(c) - log (sum of exp x over candidates and rest)    a log-probability, so a tree's score
#
# The whole vocabulary instead of candidates and rest: log-softmax of log q + m B.

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recipes.schema import Objective as Settings
from serve.tree_candidates import rank_candidates
from train.objective import d_pace_weights, slot_weights
from train.target_parts import TargetParts

_LEAST_REST = 1e-6  # about what fp32 leaves of 1 - 1
_RANKED_LOGITS = 1 << 23


@dataclass(frozen=True)
class DraftedBlocks:
    """What a frozen drafter made of recorded text: all that training and judging a head needs."""

    hidden_ALD: torch.Tensor
    """After the drafter's final norm, slots 1..L."""
    anchors_A: torch.Tensor
    """The committed token before slot 1."""
    labels_AL: torch.Tensor
    """int64; 0 where it is not known."""
    known_AL: torch.Tensor
    """bool: this label and those of all slots before it are the target's own."""
    tokens_ALC: torch.Tensor
    """The drafter's candidates, best first."""
    log_probs_ALC: torch.Tensor
    """fp32: log q of them."""

    @property
    def recorded_parents(self) -> torch.Tensor:
        """The token before each slot. [A, L]"""
        return torch.cat([self.anchors_A[:, None], self.labels_AL[:, :-1]], dim=1)

    @property
    def known_by_slot(self) -> torch.Tensor:
        """`known_AL` after slot 0, which has no label. [A, K]"""
        return F.pad(self.known_AL, (1, 0))

    def __getitem__(self, blocks: slice | torch.Tensor) -> "DraftedBlocks":
        return DraftedBlocks(*(part[blocks] for part in vars(self).values()))

    def keep(self, count: int) -> "DraftedBlocks":
        """With the first `count` candidates."""
        parts = vars(self) | {name: vars(self)[name][..., :count] for name in ("tokens_ALC", "log_probs_ALC")}
        return DraftedBlocks(**parts)


def gather_blocks(
    hidden_AKD: torch.Tensor,
    input_ids_AK: torch.Tensor,
    labels_AK: torch.Tensor,
    supervised_AK: torch.Tensor,
    head_VD: torch.Tensor,
    count: int,
) -> DraftedBlocks:
    """Of a batch's whole blocks (`train.blocks`), slot 0 included, with `count` candidates of each slot."""
    hidden_ALD = hidden_AKD[:, 1:]
    known_AL = supervised_AK[:, 1:].long().cumprod(1).bool()
    chunks = hidden_ALD.flatten(0, 1).split(max(1, _RANKED_LOGITS // len(head_VD)))
    ranked = [rank_candidates(chunk_TD @ head_VD.T, count) for chunk_TD in chunks]
    return DraftedBlocks(
        hidden_ALD,
        input_ids_AK[:, 0],
        labels_AK[:, 1:].where(known_AL, 0),
        known_AL,
        torch.cat([part.tokens_TC for part in ranked]).view(*known_AL.shape, count),
        torch.cat([part.log_probs_TC for part in ranked]).view(*known_AL.shape, count),
    )


class ProjectedTable(nn.Module):
    """The target's frozen rows in fewer dimensions: rare tokens learn from like ones."""

    rows_VD: torch.Tensor

    def __init__(self, rows_VD: torch.Tensor, rank: int):
        super().__init__()
        rows_VD = rows_VD.float()
        unit_VD = rows_VD / rows_VD.square().sum(1).mean().sqrt()  # 1 long on average, whatever the target's
        self.register_buffer("rows_VD", unit_VD, persistent=False)
        self.weight = nn.Parameter(torch.zeros(rows_VD.shape[1], rank))

    def forward(self) -> torch.Tensor:
        return self.rows_VD @ self.weight


@dataclass(frozen=True)
class Tables:
    """What a server makes once, at load."""

    parents_Vr: torch.Tensor
    children_Vr: torch.Tensor


@dataclass(frozen=True)
class Scores:
    """Log-probabilities given a parent, fp32; over candidates and rest they sum to one."""

    candidates_ALPC: torch.Tensor
    rest_ALP: torch.Tensor


class PairwiseHead(nn.Module):
    def __init__(self, parts: TargetParts, rank: int):
        """Changes nothing until it is trained: the children's table is zero."""
        super().__init__()
        self.parent_table = ProjectedTable(parts.embedding_VD, rank)
        self.child_table = ProjectedTable(parts.head_VD, rank)
        self.gate = nn.Linear(parts.embedding_VD.shape[1], rank, bias=False)
        self.rest_r = nn.Parameter(torch.zeros(rank))
        nn.init.normal_(self.parent_table.weight, std=rank**-0.5)
        nn.init.zeros_(self.gate.weight)

    def make_tables(self) -> Tables:
        return Tables(self.parent_table(), self.child_table())

    def mix(self, tables: Tables, hidden_ALD: torch.Tensor, parents_ALP: torch.Tensor) -> torch.Tensor:
        """m of every parent of every slot. [A, L, P, r]"""
        gate_ALr = self.gate(hidden_ALD.to(self.gate.weight.dtype))
        return F.embedding(parents_ALP, tables.parents_Vr) * (1 + gate_ALr[:, :, None])

    def score(self, tables: Tables, blocks: DraftedBlocks, parents_ALP: torch.Tensor) -> Scores:
        """s of each slot's candidates after each of `parents_ALP`."""
        mixed_ALPr = self.mix(tables, blocks.hidden_ALD, parents_ALP)
        children_ALCr = F.embedding(blocks.tokens_ALC, tables.children_Vr)
        x_ALPC = blocks.log_probs_ALC[:, :, None] + mixed_ALPr @ children_ALCr.transpose(-1, -2)
        rest_AL = (1 - blocks.log_probs_ALC.exp().sum(-1)).clamp_min(_LEAST_REST).log()
        rest_ALP = rest_AL[:, :, None] + mixed_ALPr @ self.rest_r
        scores_ALPC = torch.cat([x_ALPC, rest_ALP[..., None]], dim=-1).log_softmax(-1)
        return Scores(scores_ALPC[..., :-1], scores_ALPC[..., -1])


def fill_table(head: PairwiseHead, tables: Tables, blocks: DraftedBlocks) -> torch.Tensor:
    """What `serve.tree.grow_tree` takes for each block. [A, L, C, C] fp32

    A slot's parents are the candidates of the slot before; those of slot 1 are the anchor, in every row.
    """
    count = blocks.tokens_ALC.shape[-1]
    first_A1C = blocks.anchors_A[:, None, None].expand(-1, 1, count)
    parents_ALC = torch.cat([first_A1C, blocks.tokens_ALC[:, :-1]], dim=1)
    return head.score(tables, blocks, parents_ALC).candidates_ALPC


# Losses
#
# Parents are the recorded tokens.  What the target would say after another one is not in the text, and nodes
# below a wrong parent are worth nothing: they score low because their parent does.


@dataclass(frozen=True)
class Labelled:
    """How likely the recorded tokens are, each after the recorded token before it."""

    log_probs_AL: torch.Tensor
    """Of the label, or of the rest where it is not a candidate."""
    is_candidate_AL: torch.Tensor
    """bool: a tree could have held it."""


def label_among_candidates(head: PairwiseHead, blocks: DraftedBlocks) -> Labelled:
    """Over the drafter's candidates and the rest, as the server does: no product with the vocabulary."""
    scores = head.score(head.make_tables(), blocks, blocks.recorded_parents[:, :, None])
    hit_ALC = blocks.tokens_ALC == blocks.labels_AL[:, :, None]
    is_candidate_AL = hit_ALC.any(-1)
    place_AL1 = hit_ALC.long().argmax(-1, keepdim=True)
    of_label_AL = scores.candidates_ALPC[:, :, 0].gather(-1, place_AL1)[..., 0]
    return Labelled(of_label_AL.where(is_candidate_AL, scores.rest_ALP[:, :, 0]), is_candidate_AL)


def label_in_vocabulary(
    head: PairwiseHead, blocks: DraftedBlocks, head_VD: torch.Tensor, most_logits: int = 1 << 23
) -> Labelled:
    """Over the whole vocabulary, where every label is as good as a candidate.

    head_VD: the target's.  About `most_logits` logits exist at a time; the backward pass makes them again.
    """
    tables = head.make_tables()
    mixed_ALr = head.mix(tables, blocks.hidden_ALD, blocks.recorded_parents[:, :, None])[:, :, 0]
    step = max(1, most_logits // (len(head_VD) * blocks.labels_AL.shape[1]))
    chunks = zip(
        blocks.hidden_ALD.split(step), mixed_ALr.split(step), blocks.labels_AL.split(step), strict=True
    )
    log_probs = [
        checkpoint(_label_log_probs, *chunk, head_VD, tables.children_Vr, use_reentrant=False)
        for chunk in chunks
    ]
    return Labelled(torch.cat(log_probs), torch.ones_like(blocks.known_AL))


def _label_log_probs(
    hidden_ALD: torch.Tensor,
    mixed_ALr: torch.Tensor,
    labels_AL: torch.Tensor,
    head_VD: torch.Tensor,
    children_Vr: torch.Tensor,
) -> torch.Tensor:
    logits_ALV = hidden_ALD.to(head_VD.dtype) @ head_VD.T + mixed_ALr @ children_Vr.T
    return -F.cross_entropy(logits_ALV.flatten(0, 1), labels_AL.flatten(), reduction="none").view_as(
        labels_AL
    )


def loss_sum(blocks: DraftedBlocks, labelled: Labelled, settings: Settings) -> torch.Tensor:
    """Weight x nats, summed over the known slots. Scalar

    `Objective.normaliser` of the blocks' `known_by_slot` makes it a mean.
    """
    return -(_weigh(blocks, labelled, settings) * labelled.log_probs_AL).sum()


def _weigh(blocks: DraftedBlocks, labelled: Labelled, settings: Settings) -> torch.Tensor:
    """Of each slot's loss, without gradient. [A, L]

    d_pace: the accepted drafts that a slot has a part in.  With alpha 0 the loss has the gradient of minus
    the expected accepted drafts of a chain drawn from the scores, the sum over depths of the product of the
    labels' probabilities so far; a label that is no candidate ends them.
    """
    if settings.kind == "cross_entropy":
        return slot_weights(blocks.known_by_slot, settings.decay)[:, 1:]
    assert settings.kind == "d_pace", f"no loss of a pairwise head: {settings.kind}"
    probs_AL = labelled.log_probs_AL.detach().exp() * labelled.is_candidate_AL
    return d_pace_weights(probs_AL, blocks.known_AL, settings.alpha)
