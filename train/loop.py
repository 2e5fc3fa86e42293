"""The distillation: from shards on the disk to published checkpoints, in `train.steps` optimizer steps.

DeepSpeed's keys live in `train.zero`, ranks in `train.ranks`, a step's arithmetic in `train.step`; here they
are put together, timed and shown.  Called by `train/distill.py`, on every rank.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data.shards import open_shards
from recipes.errors import MachineError, UserError
from recipes.load import resolve_model
from recipes.manifest import ShardManifest, identify_target, read_manifest
from recipes.schema import Recipe, Train
from serve.checkpoint import load_target_config, published_config
from train.batches import worst_case_batch
from train.drafter import DFlashDrafter
from train.feed import Feed, MicroBatch, read_ahead
from train.ranks import Ranks
from train.reporting import Reading, Reporter, reporting
from train.resume import Progress, RunFolders
from train.saving import Saver
from train.schedule import learning_rate_at
from train.step import Learner, Totals
from train.target_parts import load_target_parts
from train.zero import TORCH_DTYPES, start_engine


@dataclass(frozen=True)
class Distilled:
    """What a finished training leaves."""

    checkpoint: Path
    step: int
    simulated_acceptance: float
    """Of the chain, on training blocks of the last steps."""


def distil(recipe: Recipe, ranks: Ranks) -> Distilled:
    """Trains to the recipe's last step, going on where an earlier run stopped.

    Raises UserError when the shards or an earlier state do not belong to this recipe.
    """
    folders = RunFolders(recipe.output_dir)
    data = read_manifest(folders.shards / "manifest.json", ShardManifest)
    ranks.on_main(lambda: check_shards(recipe, data))
    shards = open_shards(folders.shards)
    saver = Saver(recipe, folders, drafter_config(recipe), data, ranks)
    learner = start_learner(recipe, ranks)
    progress = saver.go_on(learner.engine)
    first_step = progress.step(recipe.train.sequences_per_step)
    if first_step < recipe.train.steps:
        rehearse_largest_batch(recipe, learner, data.hidden_size)
        feed = Feed(shards, recipe.train, recipe.drafter, ranks.rank, ranks.world_size)
        with _reporter(folders.output_dir, first_step, recipe.train.steps, ranks) as reporter:
            progress = _take_steps(recipe.train, learner, feed, saver, progress, reporter)
    step = progress.step(recipe.train.sequences_per_step)
    return Distilled(folders.checkpoint(step), step, progress.simulated_acceptance)


def _take_steps(
    train: Train, learner: Learner, feed: Feed, saver: Saver, progress: Progress, reporter: Reporter | None
) -> Progress:
    window = Window()
    steps = range(progress.step(train.sequences_per_step), train.steps)
    for step, micro_batches in zip(steps, window.timed(read_ahead(feed.read_step, steps)), strict=True):
        learning_rate = learning_rate_at(step, train.steps, train.optimizer)
        totals = learner.learn(micro_batches, learning_rate)
        window.add(totals)
        progress = progress.after(train.sequences_per_step, totals.num_tokens)
        taken = step + 1
        is_saved = taken % train.save_every_steps == 0 or taken == train.steps
        # no window straddles a save, so that none differs after resuming
        if taken % train.log_every_steps == 0 or is_saved:
            reading = window.read(taken, learning_rate)
            progress = replace(progress, simulated_acceptance=reading.acceptance)
            if reporter is not None:
                reporter.show(reading)
        if is_saved:
            saver.save(learner.engine, progress)
            window.restart_clock()
    return progress


class Window:
    """The steps since the last reading, and the time they took; saving is not counted."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.totals: Totals | None = None
        self.steps = 0
        self.seconds = self.wait_seconds = 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        self.since = time.perf_counter()

    def timed(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """The same items; the time each takes to come is counted as waiting."""
        asked = time.perf_counter()
        for micro_batches in steps:
            self.wait_seconds += time.perf_counter() - asked
            yield micro_batches
            asked = time.perf_counter()

    def add(self, totals: Totals) -> None:
        now = time.perf_counter()
        self.seconds, self.since = self.seconds + now - self.since, now
        self.steps += 1
        self.totals = totals if self.totals is None else self.totals.then(totals)

    def read(self, step: int, learning_rate: float) -> Reading:
        """What the window holds, which is then empty."""
        totals = self.totals
        assert totals is not None, f"no step was taken before the reading at step {step}"
        reading = Reading(
            step=step,
            loss=totals.loss,
            acceptance=totals.acceptance,
            share_by_depth=totals.share_by_depth,
            learning_rate=learning_rate,
            gradient_norm=totals.gradient_norm,
            step_seconds=self.seconds / self.steps,
            wait_seconds=self.wait_seconds / self.steps,
            tokens_per_second=totals.num_tokens / self.seconds,
        )
        self._clear()
        return reading


def start_learner(recipe: Recipe, ranks: Ranks) -> Learner:
    """A freshly initialised drafter in its engine, between the target's frozen embedding and head."""
    parts = load_target_parts(recipe.target).to(ranks.device, TORCH_DTYPES[recipe.train.precision])
    torch.manual_seed(recipe.train.seed)
    drafter = DFlashDrafter(recipe.drafter, hidden_size=parts.embedding_VD.shape[1])
    drafter.recompute_layers = recipe.train.activation_checkpointing
    return Learner(start_engine(drafter, recipe.train, ranks), parts, recipe.train, ranks)


def rehearse_largest_batch(recipe: Recipe, learner: Learner, hidden_size: int) -> None:
    """So that memory fails now and not hours later: MachineError."""
    train, longest = recipe.train, recipe.data.max_prompt_tokens + recipe.data.sampling.max_tokens
    size = train.micro_batch_sequences
    try:
        learner.rehearse(worst_case_batch(size, longest, train.num_anchors, recipe.drafter, hidden_size))
    except torch.OutOfMemoryError as error:
        raise MachineError(
            f"{size} sequences of {longest} tokens with {train.num_anchors} anchors do not fit the memory:"
            " lower train.micro_batch_sequences or train.num_anchors, or set train.activation_checkpointing"
            " or train.offload_optimizer"
        ) from error


def drafter_config(recipe: Recipe) -> dict[str, Any]:
    """The drafter's config.json; UserError when recipe and target do not fit."""
    target = recipe.target
    return published_config(recipe.drafter, load_target_config(resolve_model(target.model), target.revision))


def check_split(recipe: Recipe, world_size: int) -> None:
    """Raises UserError unless ranks and micro-batches divide a step evenly."""
    train = recipe.train
    if train.sequences_per_step % (world_size * train.micro_batch_sequences):
        raise UserError(
            f"train.sequences_per_step is {train.sequences_per_step}, no multiple of {world_size} ranks x "
            f"train.micro_batch_sequences {train.micro_batch_sequences}: change one of them"
        )


def check_shards(recipe: Recipe, data: ShardManifest) -> None:
    """Raises UserError unless the shards are complete and hold this target's states at the recipe's taps."""
    where, target = recipe.output_dir / "shards", identify_target(recipe.target)
    if not data.complete:
        raise UserError(f"{where} is not complete: run data/regenerate.py on the recipe again")
    if (data.target.fingerprint, data.target.dtype) != (target.fingerprint, target.dtype):
        raise UserError(
            f"{where} holds the text of {data.target.model} ({data.target.dtype}), not of the recipe's target"
            f" {target.model} ({target.dtype}) as it is now: give the recipe another output_dir,"
            " or remove the shards"
        )
    if data.target_layer_ids != recipe.drafter.target_layer_ids:
        raise UserError(
            f"{where} was captured at layers {data.target_layer_ids}, drafter.target_layer_ids is "
            f"{recipe.drafter.target_layer_ids}: set it back, or give the recipe another output_dir"
        )


def _reporter(
    output_dir: Path, first_step: int, steps: int, ranks: Ranks
) -> AbstractContextManager[Reporter | None]:
    return reporting(output_dir / "tensorboard", first_step, steps) if ranks.is_main else nullcontext()
