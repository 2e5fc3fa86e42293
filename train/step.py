"""One optimizer step: forward, loss and backward of each micro-batch, then the engine's step.

Losses are divided by the normaliser of the whole step, over all micro-batches and ranks, so that the way a
step is split changes nothing.  No clocks, files or curves here.
"""

# A=blocks  K=slots of a block  Q=block rows (A x K)  D=hidden

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NoReturn

import deepspeed
import torch
from torch.nn import functional as F

from recipes.errors import MachineError, UserError
from recipes.schema import Train
from train.batches import Batch
from train.feed import MicroBatch
from train.objective import (
    Objective,
    accepted_per_block,
    blocks_by_depth,
    lacks_final_states,
    simulated_acceptance,
)
from train.pairwise_companion import Companion, KeptBlocks, Taught, keep_blocks
from train.ranks import Ranks
from train.sending import Sender
from train.target_parts import TargetParts
from train.zero import TORCH_DTYPES, take_step


@dataclass(frozen=True)
class Totals:
    """Sums over the batches of one step or several, over all ranks."""

    loss_sum: float
    """Weight x loss of the objective."""
    weight_sum: float
    """The objective's normaliser: the sum of the weights, or the number of blocks."""
    num_tokens: int
    blocks_by_depth_K: torch.Tensor
    """Blocks that accept at least 0, 1, ... drafts."""
    gradient_norm: float | None
    """Of the last step, before clipping."""
    taught: Taught | None = None
    """Of the pairwise head that learns beside the drafter."""

    @property
    def loss(self) -> float:
        return self.loss_sum / self.weight_sum

    @property
    def acceptance(self) -> float:
        return simulated_acceptance(self.blocks_by_depth_K)

    @property
    def share_by_depth(self) -> list[float]:
        return (self.blocks_by_depth_K[1:] / self.blocks_by_depth_K[0]).tolist()

    def then(self, later: "Totals") -> "Totals":
        return Totals(
            self.loss_sum + later.loss_sum,
            self.weight_sum + later.weight_sum,
            self.num_tokens + later.num_tokens,
            self.blocks_by_depth_K + later.blocks_by_depth_K,
            later.gradient_norm,
            None if self.taught is None or later.taught is None else self.taught.then(later.taught),
        )


@dataclass(frozen=True)
class Scored:
    """What the drafter made of one batch."""

    loss_sum: torch.Tensor
    blocks_by_depth_K: torch.Tensor
    kept: KeptBlocks | None
    """For the pairwise head."""


@dataclass(frozen=True)
class Learner:
    """The drafter in its engine, and the frozen parts of the target around it."""

    engine: deepspeed.DeepSpeedEngine
    parts: TargetParts
    train: Train
    ranks: Ranks
    companion: Companion | None = None
    """The pairwise head that learns beside the drafter."""

    @property
    def objective(self) -> Objective:
        return Objective(self.train.objective)

    @cached_property
    def sender(self) -> Sender:
        return Sender(self.ranks.device, TORCH_DTYPES[self.train.precision])

    def send_first(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """With the first of a step on its way, before the step before is done."""
        first, *rest = micro_batches
        return [replace(first, sent=self.sender.send(first.batch)), *rest]

    def rehearse(self, batch: Batch) -> None:
        """Forward and backward of `batch` with its loss counted for nothing: all the memory, no gradient."""
        chosen_A = None if self.companion is None else self.companion.choose_first(batch)
        scored = self._score(self.sender.send(batch).receive(), chosen_A)
        self.engine.backward(scored.loss_sum * 0.0)
        share = self.train.sequences_per_step // self.ranks.world_size
        self._teach([scored] * (share // self.train.micro_batch_sequences))

    def learn(
        self,
        micro_batches: Sequence[MicroBatch],
        learning_rate: float,
        head_learning_rate: float | None = None,
    ) -> Totals:
        """One optimizer step, of the pairwise head too where there is one, at a rate of its own.

        A loss that is not finite raises MachineError or UserError that names the sequences; the weights are
        then still those of the step before.
        """
        assert (head_learning_rate is None) == (self.companion is None), head_learning_rate
        weight_sum = float(self.ranks.sum(self._weight_of(micro_batches)))
        share = self.ranks.world_size / weight_sum
        batches = self.sender.send_ahead(micro.sent or micro.batch for micro in micro_batches)
        scored = [self._backward(next(batches), share, self._choose(micro)) for micro in micro_batches]
        sums = self._add_up(micro_batches, scored)
        if not math.isfinite(sums[0]):
            self._stop_naming(micro_batches, scored)
        taught = self._teach(scored)
        norm = take_step(self.engine, learning_rate)
        if norm is not None and not math.isfinite(norm):
            raise MachineError(
                f"the gradient's norm is {norm} though the loss is finite: go on from the last checkpoint"
            )
        if self.companion is not None and head_learning_rate is not None:
            self.companion.take_step(head_learning_rate)
        return Totals(float(sums[0]), weight_sum, int(sums[1]), sums[2:], norm, taught)

    def _choose(self, micro: MicroBatch) -> torch.Tensor | None:
        return None if self.companion is None else self.companion.choose(micro)

    def _teach(self, scored: Sequence[Scored]) -> Taught | None:
        """The pairwise head's gradient is there then; it takes its step when the drafter has."""
        kept = [part.kept for part in scored if part.kept is not None]
        return None if self.companion is None else self.companion.find_gradient(kept)

    def _score(self, batch: Batch, chosen_A: torch.Tensor | None = None) -> Scored:
        """batch: on the device; chosen_A: numbers of the blocks that the pairwise head learns from."""
        labels_AK, supervised_AK = batch.labels_AK, batch.supervised_AK
        rows = replace(batch.rows, final_QD=self._final_states_of(batch))
        hidden_QD = self.engine(
            batch.taps_SE,
            batch.context_positions_S,
            F.embedding(batch.input_ids_Q, self.parts.embedding_VD),
            batch.block_positions_Q,
            batch.views,
        )
        drafted = self.objective.loss(hidden_QD[rows.places_R], self.parts.head_VD, rows)
        tokens_Q = labels_AK.new_zeros(labels_AK.numel()).index_copy_(0, rows.places_R, drafted.tokens_R)
        accepted_A = accepted_per_block(tokens_Q.view_as(labels_AK), labels_AK, supervised_AK)
        kept = None if chosen_A is None else keep_blocks(batch, hidden_QD, chosen_A)
        return Scored(drafted.loss_sum, blocks_by_depth(accepted_A, labels_AK.shape[1]), kept)

    def _final_states_of(self, batch: Batch) -> torch.Tensor | None:
        """None where the objective has no use for them.  UserError where there are none."""
        if not self.train.objective.needs_final_states:
            return None
        if batch.final_QD is None:
            raise lacks_final_states(self.train.objective)
        return batch.final_QD

    def _backward(self, batch: Batch, share: float, chosen_A: torch.Tensor | None = None) -> Scored:
        scored = self._score(batch, chosen_A)
        # DeepSpeed takes the mean over ranks, so `share` holds their number
        self.engine.backward(scored.loss_sum * share)
        return replace(scored, loss_sum=scored.loss_sum.detach())

    def _weight_of(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        weights = [self.objective.normaliser(micro.batch.supervised_AK) for micro in micro_batches]
        return torch.stack(weights).sum()

    def _add_up(self, micro_batches: Sequence[MicroBatch], scored: Sequence[Scored]) -> torch.Tensor:
        """[loss sum, tokens, blocks by depth ...] over all ranks. [2 + K] fp64"""
        loss_sum = torch.stack([part.loss_sum.double() for part in scored]).sum()
        by_depth_K = torch.stack([part.blocks_by_depth_K for part in scored]).sum(0)
        num_tokens = loss_sum.new_tensor(sum(micro.batch.num_tokens for micro in micro_batches))
        return self.ranks.sum(torch.cat([torch.stack([loss_sum, num_tokens]), by_depth_K.double()]))

    def _stop_naming(self, micro_batches: Sequence[MicroBatch], scored: Sequence[Scored]) -> NoReturn:
        suspects = [
            micro
            for micro, part in zip(micro_batches, scored, strict=True)
            if not math.isfinite(float(part.loss_sum))
        ]
        sick = [visit.index for micro in suspects for visit in micro.sick_visits()]
        seen = [visit.index for micro in suspects for visit in micro.visits]
        sick, seen = (sorted(chain(*lists)) for lists in zip(*self.ranks.gather((sick, seen)), strict=True))
        if sick:
            raise MachineError(
                f"the tap states of sequence {_listed(sick)} of the shards are not finite: make them again"
            )
        raise UserError(
            f"the loss is not finite on sequences {_listed(seen)} of the shards, whose tap states are: "
            "the training diverged; lower train.optimizer.learning_rate and go on from the last checkpoint"
        )


def _listed(numbers: Sequence[int], most: int = 8) -> str:
    more = len(numbers) - most
    return ", ".join(map(str, numbers[:most])) + (f" and {more} more" if more > 0 else "")
