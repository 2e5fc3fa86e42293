"""The training of a pairwise head: steps on what a frozen drafter makes of its target's text.

Batches, masks and anchors are those of a drafter's training (`train.feed`); one process, one device.  Called
by `train/pairwise_head.py`, which has checked everything.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data.shards import Shards
from recipes.errors import MachineError, UserError
from recipes.manifest import identify_target, provenance
from recipes.schema import Pairwise, Recipe
from serve.pairwise import PairwiseTables
from train.drafter import DFlashDrafter
from train.feed import Feed, MicroBatch, read_ahead
from train.pairwise_held_out import HeldOut, draft_held_out
from train.pairwise_inputs import Source, Split, split_sequences
from train.pairwise_learner import FrozenDrafter, HeadLearner, Learnt, begin_head, tables_to_serve
from train.pairwise_manifest import HeadManifest, HeadOrigin, Simulated
from train.pairwise_report import HeadReading, HeadReporter, reporting_head
from train.pairwise_state import StateFile
from train.resume import shards_digest
from train.schedule import learning_rate_at
from train.target_parts import TargetParts, load_target_parts

STATE_NAME = "state.pt"


@dataclass(frozen=True)
class TrainedHead:
    tables: PairwiseTables
    manifest: HeadManifest


def train_head(recipe: Recipe, source: Source, shards: Shards, folder: Path) -> TrainedHead:
    """Goes on where an earlier run stopped; its state lies in `folder`.

    Raises UserError when that is another training's, and where the loss is no number; MachineError when
    memory does not suffice.
    """
    settings, origin = recipe.pairwise, _describe(recipe, source, shards)
    parts = load_target_parts(recipe.target)
    parts = parts.to(find_device(), parts.head_VD.dtype)
    learner, state = begin_head(parts, settings), StateFile(folder / STATE_NAME, origin)
    first_step = state.load_into(learner)
    frozen, split = load_frozen(recipe, source, parts), split_sequences(shards, settings)
    curves = recipe.output_dir / "tensorboard" / "pairwise"
    with reporting_head(curves, first_step, settings.steps, settings.budgets) as reporter:
        reporter.say(f"{len(split.held_out):,} of {len(shards):,} sequences are held out")
        try:
            held_out = draft_held_out(frozen, shards, split)
            training = HeadTraining(settings, frozen, learner, state, held_out, reporter)
            before, after = training.take(first_step, feed_of(recipe, source, shards, split))
        except torch.OutOfMemoryError as error:
            raise MachineError(
                "the device's memory does not suffice: lower pairwise.micro_batch_sequences or"
                " pairwise.num_anchors"
            ) from error
    manifest = HeadManifest(
        **dict(origin) | {"step": max(first_step, settings.steps)},
        held_out_sequences=len(split.held_out),
        held_out_blocks=held_out.num_blocks,
        before=before,
        after=after,
    )
    return TrainedHead(tables_to_serve(learner.head), manifest)


def find_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_frozen(recipe: Recipe, source: Source, parts: TargetParts) -> FrozenDrafter:
    """On the parts' device, in the precision of training."""
    device, dtype = parts.head_VD.device, getattr(torch, recipe.train.precision)
    drafter = DFlashDrafter(source.shape, hidden_size=parts.head_VD.shape[1])
    source.init.load_into(drafter)
    drafter.fuse(recipe.train.compile)
    drafter = drafter.to(device, dtype).eval().requires_grad_(False)
    settings = recipe.pairwise
    return FrozenDrafter(drafter, parts.to(device, dtype), settings.candidates, settings.learnt_temperature)


def feed_of(recipe: Recipe, source: Source, shards: Shards, split: Split) -> Feed:
    """The sequences that are learnt from, as a drafter's training would read them."""
    fields = ("sequences_per_step", "micro_batch_sequences", "num_anchors", "seed")
    train = recipe.train.model_copy(update={name: getattr(recipe.pairwise, name) for name in fields})
    pins = find_device().type == "cuda"
    return Feed(shards, train, source.shape, rank=0, world_size=1, kept=split.learnt, pins=pins)


def _describe(recipe: Recipe, source: Source, shards: Shards) -> HeadOrigin:
    return HeadOrigin(
        target=identify_target(recipe.target),
        recipe=recipe.model_dump(mode="json"),
        provenance=provenance(),
        drafter=source.init.origin,
        shards=shards_digest(shards.manifest),
        step=0,
    )


@dataclass(frozen=True)
class HeadTraining:
    settings: Pairwise
    frozen: FrozenDrafter
    learner: HeadLearner
    state: StateFile
    held_out: HeldOut
    reporter: HeadReporter

    def take(self, first_step: int, feed: Feed) -> tuple[Simulated, Simulated]:
        """The steps that are left.  What held-out text says without the head, and with it."""
        before, after = self.held_out.simulate(None, self.settings.budgets), None
        steps, losses, since = range(first_step, self.settings.steps), [], time.perf_counter()
        for step, micro_batches in zip(steps, read_ahead(feed.read_step, steps), strict=True):
            learning_rate = learning_rate_at(step, self.settings.steps, self.settings.optimizer)
            learnt = self._learn(step, micro_batches, learning_rate)
            losses.append(learnt.loss)
            taken = step + 1
            is_saved = taken % self.settings.save_every_steps == 0 or taken == steps.stop
            # no reading straddles a save, so that none differs after resuming
            if is_saved or taken % self.settings.log_every_steps == 0:
                seconds = (time.perf_counter() - since) / len(losses)
                loss = math.fsum(losses) / len(losses)
                after = self._judge(taken, before) if is_saved else after
                self.reporter.show(HeadReading(taken, loss, learning_rate, learnt.gradient_norm, seconds))
                if is_saved:
                    self.state.save(self.learner, taken)
                losses, since = [], time.perf_counter()
        return before, after or self._judge(first_step, before)

    def _learn(self, step: int, micro_batches: Sequence[MicroBatch], learning_rate: float) -> Learnt:
        drafted = [self.frozen.draft(micro.batch) for micro in micro_batches]
        learnt = self.learner.learn(drafted, learning_rate)
        if not math.isfinite(learnt.loss + learnt.gradient_norm):
            sick = sorted(visit.index for micro in micro_batches for visit in micro.sick_visits())
            if sick:
                raise MachineError(
                    f"the tap states of sequence {', '.join(map(str, sick))} of the shards are not finite:"
                    " make them again"
                )
            raise UserError(
                f"the loss or its gradient is not finite at step {step}: lower"
                " pairwise.optimizer.learning_rate, and run the same command again"
            )
        return learnt

    def _judge(self, step: int, before: Simulated) -> Simulated:
        now = self.held_out.simulate(tables_to_serve(self.learner.head), self.settings.budgets)
        self.reporter.judge(step, before, now)
        return now
