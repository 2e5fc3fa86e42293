"""A head that learns from what a drafter drafts: one optimizer step, and no files or clocks.

The drafter is frozen here, or learns besides (`train.pairwise_companion`).
The loss of a step is a mean over all its blocks, so that no split into batches or chunks changes anything.
"""

# A=blocks  K=slots of a block  Q=block rows (A x K)  D=hidden

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from recipes.schema import Objective as ObjectiveSettings
from recipes.schema import PairwiseSettings
from serve.pairwise import PairwiseTables
from train.batches import Batch
from train.drafter import DFlashDrafter
from train.objective import Objective
from train.pairwise import (
    DraftedBlocks,
    PairwiseHead,
    add_target,
    divergence_sum,
    gather_blocks,
    label_among_candidates,
    loss_sum,
)
from train.target_parts import TargetParts

BLOCKS_AT_ONCE = 512
"""That are scored, or that a drafter is given in one pass where nothing else bounds them."""


@dataclass(frozen=True)
class FrozenDrafter:
    """Between the target's embedding and head, in one precision, on one device."""

    drafter: DFlashDrafter
    parts: TargetParts
    num_candidates: int
    temperature: float | None = None
    """Of the target's distribution that its blocks tell; None: nobody asks for that."""

    @property
    def device(self) -> torch.device:
        return self.parts.head_VD.device

    @torch.no_grad()
    def draft(self, batch: Batch) -> DraftedBlocks:
        """On its device."""
        batch = batch.to(self.device, self.parts.head_VD.dtype)
        hidden_QD = self.drafter(
            batch.taps_SE,
            batch.context_positions_S,
            F.embedding(batch.input_ids_Q, self.parts.embedding_VD),
            batch.block_positions_Q,
            batch.views,
        )
        shape_AK = batch.labels_AK.shape
        blocks = gather_blocks(
            hidden_QD.view(*shape_AK, -1),
            batch.input_ids_Q.view(shape_AK),
            batch.labels_AK,
            batch.supervised_AK,
            self.parts.head_VD,
            self.num_candidates,
        )
        if self.temperature is None:
            return blocks
        assert batch.final_QD is not None, "the batch has no final states"
        final_ALD = batch.final_QD.view(*shape_AK, -1)[:, 1:]
        return add_target(blocks, final_ALD, self.parts.head_VD, self.temperature)


@dataclass(frozen=True)
class Learnt:
    """Of one step."""

    loss: float
    gradient_norm: float
    """Before clipping; nothing was learnt where either number is not finite."""


@dataclass(frozen=True)
class HeadLearner:
    head: PairwiseHead
    optimizer: torch.optim.AdamW
    settings: PairwiseSettings

    def learn(self, drafted: Sequence[DraftedBlocks], learning_rate: float) -> Learnt:
        """One optimizer step."""
        self.optimizer.zero_grad()
        loss = backward(self.head, drafted, self.settings.objective)
        norm = self.clip()
        if loss.isfinite() and norm.isfinite():
            self.take_step(learning_rate)
        return Learnt(float(loss), float(norm))

    def clip(self) -> torch.Tensor:
        """The gradient, where it is too long.  Returns its norm before. Scalar"""
        most = self.settings.optimizer.gradient_clipping
        return torch.nn.utils.clip_grad_norm_(self.head.parameters(), most)

    def take_step(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()


def begin_head(parts: TargetParts, settings: PairwiseSettings) -> HeadLearner:
    """Untrained, on the parts' device.  The seed alone decides."""
    torch.manual_seed(settings.seed)
    head = PairwiseHead(parts, settings.rank).to(parts.head_VD.device)
    given = settings.optimizer
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=given.learning_rate, betas=given.betas, weight_decay=given.weight_decay
    )
    return HeadLearner(head, optimizer, settings)


def backward(
    head: PairwiseHead,
    drafted: Sequence[DraftedBlocks],
    settings: ObjectiveSettings,
    blocks_at_once: int = BLOCKS_AT_ONCE,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adds the gradient of the mean loss over all blocks to the head's; returns that loss. Scalar, fp64

    weight: a normaliser, where the mean is over more blocks than these.
    """
    whole = join(drafted)
    weight = Objective(settings).normaliser(whole.known_by_slot) if weight is None else weight
    total = torch.zeros_like(weight)
    for blocks in cut(whole, blocks_at_once):  # as few as may be: each makes the tables of all tokens
        loss = _loss_sum(head, blocks, settings) / weight.float()
        loss.backward()
        total += loss.detach()
    return total


def _loss_sum(head: PairwiseHead, blocks: DraftedBlocks, settings: ObjectiveSettings) -> torch.Tensor:
    if settings.needs_final_states:
        return divergence_sum(head, blocks, settings)
    return loss_sum(blocks, label_among_candidates(head, blocks), settings)


def join(drafted: Sequence[DraftedBlocks]) -> DraftedBlocks:
    if len(drafted) == 1:
        return drafted[0]
    parts = zip(*(vars(blocks).values() for blocks in drafted), strict=True)
    return DraftedBlocks(*(None if of_all[0] is None else torch.cat(of_all) for of_all in parts))


def cut(blocks: DraftedBlocks, blocks_at_once: int = BLOCKS_AT_ONCE) -> Iterator[DraftedBlocks]:
    """The same, so many at a time at most."""
    for start in range(0, len(blocks.anchors_A), blocks_at_once):
        yield blocks[start : start + blocks_at_once]


def tables_to_serve(head: PairwiseHead) -> PairwiseTables:
    """As a server reads them from the file, in bf16."""
    with torch.no_grad():
        return PairwiseTables(*(each.bfloat16() for each in vars(head.make_tables()).values()))
