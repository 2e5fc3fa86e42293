"""Scores of a slot's tokens given the token before: what makes a draft tree's branches worth having.

A block-diffusion drafter scores each slot without knowing which token the slot before took.  This head adds
to its scores a low-rank term of the two tokens, mixed with the slot's hidden state; drafter and target stay
as they are, and an untrained head changes nothing.  The scores and the file are `serve/pairwise.py`'s; here
are the head as it is trained, from projections of the target's rows, and its losses.
"""

# A=blocks  L=drafted slots of a block (its size - 1)  P=parents of a slot  C=candidates of a slot
# T=rows of logits  D=hidden  V=vocabulary  r=rank
#
# In `serve.pairwise`'s scores parents = embedding P_a and children = head P_b [V, r]: of the target's rows.
# Over the whole vocabulary instead of candidates and rest: log-softmax of log q + m children.

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recipes.schema import Objective as Settings
from serve.pairwise import PairwiseTables, Scores, fill_table, mix, score_after
from serve.tree_candidates import rank_candidates
from serve.tree_candidates_kernels import rank_candidates as rank_on_gpu
from train.objective import d_pace_weights, slot_weights
from train.target_parts import TargetParts

_RANKING = {"cpu": (rank_candidates, 1 << 23), "cuda": (rank_on_gpu, 1 << 28)}
"""By device: of equal results, and how many logits at a time."""
_TARGET_SHARE = 8
"""Of so many logits, one at a time where the target's are read: in fp32, and scaled."""
ROW_NUMBERS = 1 << 26
"""How many numbers of the target's rows are fp32 at a time: 256 MiB."""


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
    target_ALC: torch.Tensor | None = None
    """fp32: how likely the target finds them after the recorded tokens; None where nobody asks."""

    @property
    def recorded_parents(self) -> torch.Tensor:
        """The token before each slot. [A, L]"""
        return torch.cat([self.anchors_A[:, None], self.labels_AL[:, :-1]], dim=1)

    @property
    def known_by_slot(self) -> torch.Tensor:
        """`known_AL` after slot 0, which has no label. [A, K]"""
        return F.pad(self.known_AL, (1, 0))

    def __getitem__(self, blocks: slice | torch.Tensor) -> "DraftedBlocks":
        return self.map(lambda part: part[blocks])

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "DraftedBlocks":
        """With all that is there changed."""
        return DraftedBlocks(*(part if part is None else change(part) for part in vars(self).values()))

    def keep(self, count: int) -> "DraftedBlocks":
        """With the first `count` candidates."""
        return replace(
            self,
            tokens_ALC=self.tokens_ALC[..., :count],
            log_probs_ALC=self.log_probs_ALC[..., :count],
            target_ALC=None if self.target_ALC is None else self.target_ALC[..., :count],
        )


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
    rank, most_logits = _RANKING["cuda" if hidden_AKD.is_cuda else "cpu"]
    chunks = hidden_ALD.flatten(0, 1).split(max(1, most_logits // len(head_VD)))
    ranked = [rank(chunk_TD @ head_VD.T, count) for chunk_TD in chunks]
    return DraftedBlocks(
        hidden_ALD,
        input_ids_AK[:, 0],
        labels_AK[:, 1:].where(known_AL, 0),
        known_AL,
        torch.cat([part.tokens_TC for part in ranked]).view(*known_AL.shape, count),
        torch.cat([part.log_probs_TC for part in ranked]).view(*known_AL.shape, count),
    )


def add_target(
    blocks: DraftedBlocks, final_ALD: torch.Tensor, head_VD: torch.Tensor, temperature: float
) -> DraftedBlocks:
    """With what the target finds likely at a temperature; 0: its greedy token alone, the lowest of equals.

    final_ALD: what its head reads when it predicts the tokens of slots 1..L (`train.objective.final_states`).
    """
    most_logits = _RANKING["cuda" if final_ALD.is_cuda else "cpu"][1] // _TARGET_SHARE
    rows = max(1, most_logits // len(head_VD))
    chunks = zip(
        final_ALD.flatten(0, 1).split(rows), blocks.tokens_ALC.flatten(0, 1).split(rows), strict=True
    )
    probs = [_likely(final_TD @ head_VD.T, tokens_TC, temperature) for final_TD, tokens_TC in chunks]
    return replace(blocks, target_ALC=torch.cat(probs).view_as(blocks.tokens_ALC))


def _likely(logits_TV: torch.Tensor, tokens_TC: torch.Tensor, temperature: float) -> torch.Tensor:
    """Probabilities of the tokens. [T, C] fp32"""
    if temperature == 0:
        return (tokens_TC == logits_TV.argmax(-1, keepdim=True)).float()
    scaled_TV = logits_TV.float() / temperature
    return (scaled_TV.gather(1, tokens_TC) - scaled_TV.logsumexp(1, keepdim=True)).exp()


class ProjectedTable(nn.Module):
    """The target's frozen rows in fewer dimensions: rare tokens learn from like ones."""

    rows_VD: torch.Tensor
    """No copy."""
    length: torch.Tensor

    def __init__(self, rows_VD: torch.Tensor, rank: int):
        super().__init__()
        squares_V = torch.cat([chunk.float().square().sum(1) for chunk in _cut_rows(rows_VD)])
        self.register_buffer("rows_VD", rows_VD, persistent=False)
        self.register_buffer("length", squares_V.mean().sqrt(), persistent=False)
        self.weight = nn.Parameter(torch.zeros(rows_VD.shape[1], rank))

    def forward(self) -> torch.Tensor:
        return _Projection.apply(self.weight, self.rows_VD, self.length)


class _Projection(torch.autograd.Function):
    """Rows that are 1 long on average, whatever the target's, times a weight; fp32 a chunk at a time."""

    @staticmethod
    def forward(ctx, weight_Dr, rows_VD, length):
        ctx.save_for_backward(rows_VD, length)
        table_Vr = weight_Dr.new_empty(len(rows_VD), weight_Dr.shape[1])
        parts = table_Vr.split(_rows_at_once(rows_VD))
        for chunk, part in zip(_unit_rows(rows_VD, length), parts, strict=True):
            torch.mm(chunk, weight_Dr, out=part)
        return table_Vr

    @staticmethod
    def backward(ctx, slope_Vr):
        rows_VD, length = ctx.saved_tensors
        slope_Dr = slope_Vr.new_zeros(rows_VD.shape[1], slope_Vr.shape[1])
        slopes = slope_Vr.split(_rows_at_once(rows_VD))
        for chunk, slope in zip(_unit_rows(rows_VD, length), slopes, strict=True):
            slope_Dr += chunk.T @ slope
        return slope_Dr, None, None


def _unit_rows(rows_VD: torch.Tensor, length: torch.Tensor) -> Iterator[torch.Tensor]:
    """A chunk after another, each in the place of the last."""
    chunks = _cut_rows(rows_VD)
    unit_rows = torch.empty_like(chunks[0], dtype=torch.float32)
    for chunk in chunks:
        yield unit_rows[: len(chunk)].copy_(chunk).div_(length)


def _cut_rows(rows_VD: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rows_VD.split(_rows_at_once(rows_VD))


def _rows_at_once(rows_VD: torch.Tensor) -> int:
    return max(1, ROW_NUMBERS // rows_VD.shape[1])


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

    def make_tables(self) -> PairwiseTables:
        """With gradients; what a server makes no more, since its file holds them."""
        return PairwiseTables(self.parent_table(), self.child_table(), self.gate.weight, self.rest_r)


def score(tables: PairwiseTables, blocks: DraftedBlocks, parents_ALP: torch.Tensor) -> Scores:
    """s of each slot's candidates after each of `parents_ALP`."""
    return score_after(tables, blocks.hidden_ALD, parents_ALP, blocks.tokens_ALC, blocks.log_probs_ALC)


def fill_tables(tables: PairwiseTables, blocks: DraftedBlocks) -> torch.Tensor:
    """What `serve.tree.grow_tree` takes for each block. [A, L, C, C] fp32"""
    return fill_table(tables, blocks.hidden_ALD, blocks.anchors_A, blocks.tokens_ALC, blocks.log_probs_ALC)


def fill_marginals(blocks: DraftedBlocks) -> torch.Tensor:
    """The same where there is no head: a token's score, whatever its parent. [A, L, C, C] fp32"""
    count = blocks.tokens_ALC.shape[-1]
    return blocks.log_probs_ALC.clamp(max=0)[:, :, None].expand(-1, -1, count, -1)


# Losses
#
# Parents are the recorded tokens.  What the target would say after another one is not in the text, and nodes
# below a wrong parent are worth nothing: they score low because their parent does.  So a score is wanted for
# the case that its parent is right, and nothing is missing where only right ones are learnt from.
#
# cross_entropy, d_pace   -log s of the recorded token
# kl                      sum of p (log p - log s) over candidates and rest, p the target's, at a temperature


@dataclass(frozen=True)
class Labelled:
    """How likely the recorded tokens are, each after the recorded token before it."""

    log_probs_AL: torch.Tensor
    """Of the label, or of the rest where it is not a candidate."""
    is_candidate_AL: torch.Tensor
    """bool: a tree could have held it."""


def label_among_candidates(head: PairwiseHead, blocks: DraftedBlocks) -> Labelled:
    """Over the drafter's candidates and the rest, as the server does: no product with the vocabulary."""
    scores = score(head.make_tables(), blocks, blocks.recorded_parents[:, :, None])
    hit_ALC = blocks.tokens_ALC == blocks.labels_AL[:, :, None]
    is_candidate_AL = hit_ALC.any(-1)
    place_AL1 = hit_ALC.long().argmax(-1, keepdim=True)
    of_label_AL = scores.candidates_BLPC[:, :, 0].gather(-1, place_AL1)[..., 0]
    return Labelled(of_label_AL.where(is_candidate_AL, scores.rest_BLP[:, :, 0]), is_candidate_AL)


def label_in_vocabulary(
    head: PairwiseHead, blocks: DraftedBlocks, head_VD: torch.Tensor, most_logits: int = 1 << 23
) -> Labelled:
    """Over the whole vocabulary, where every label is as good as a candidate.

    head_VD: the target's.  About `most_logits` logits exist at a time; the backward pass makes them again.
    """
    tables = head.make_tables()
    mixed_ALr = mix(tables, blocks.hidden_ALD, blocks.recorded_parents[:, :, None])[:, :, 0]
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


def divergence_sum(head: PairwiseHead, blocks: DraftedBlocks, settings: Settings) -> torch.Tensor:
    """Of kl: weight x nats, as `loss_sum`. Scalar"""
    assert blocks.target_ALC is not None, "nobody asked what the target finds likely"
    scores = score(head.make_tables(), blocks, blocks.recorded_parents[:, :, None])
    log_probs_ALC = torch.cat([scores.candidates_BLPC[:, :, 0], scores.rest_BLP], dim=-1)
    rest_AL1 = (1 - blocks.target_ALC.sum(-1, keepdim=True)).clamp_min(0)
    target_ALC = torch.cat([blocks.target_ALC, rest_AL1], dim=-1)
    kl_AL = F.kl_div(log_probs_ALC, target_ALC, reduction="none").sum(-1)
    return (slot_weights(blocks.known_by_slot, settings.decay)[:, 1:] * kl_AL).sum()


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
