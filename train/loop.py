"""The distillation: from shards on the disk to published checkpoints, in `train.steps` optimizer steps.

DeepSpeed's keys live in `train.zero`, ranks in `train.ranks`, a step's arithmetic in `train.step`; here they
are put together, timed and shown.  Called by `train/distill.py`, on every rank.
"""

import gc
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data.rounds import of_round, read_round
from data.shards import Shards, open_shards
from recipes.errors import MachineError, UserError
from recipes.load import resolve_model
from recipes.manifest import CheckpointManifest, ShardManifest, identify_target, read_manifest
from recipes.schema import Recipe, Train
from serve.checkpoint import load_target_config, published_config
from serve.plan import MANIFEST_NAME
from train.batches import worst_case_batch
from train.drafter import DFlashDrafter
from train.feed import Choice, Feed, choose_sequences, read_ahead
from train.lora import adapt
from train.objective import lacks_final_states
from train.pairwise_companion import begin_companion
from train.ranks import Ranks
from train.reporting import Reporter, reporting
from train.resume import Progress, RunFolders, find_last_pair
from train.rounds import Round, plan_rounds
from train.saving import Saver
from train.schedule import learning_rate_at
from train.step import Learner
from train.target_parts import load_target_parts
from train.warm_start import Init, read_init
from train.window import Window
from train.zero import TORCH_DTYPES, start_engine

_ROUND_SEEDS = 1_000_003  # apart: rounds draw other orders and anchors


@dataclass(frozen=True)
class Distilled:
    """What a finished training leaves."""

    checkpoint: Path
    step: int
    simulated_acceptance: float
    """Of the chain that would be served, on training blocks of the last steps."""


class Distillation:
    """A training, taken round after round; goes on where an earlier run stopped."""

    def __init__(self, recipe: Recipe, ranks: Ranks) -> None:
        self._recipe, self._ranks = recipe, ranks
        self._folders = RunFolders(recipe.output_dir)
        self._rounds = plan_rounds(recipe)
        self._progress = Progress()
        self._learner: Learner | None = None

    def take(self, which: Round) -> Distilled:
        """The steps of a round whose shards are there.

        Raises UserError when the shards or an earlier state do not belong to this recipe.
        """
        data = self._read_data(which)
        learner = self._begin(data.hidden_size)
        first_step = self._steps_taken
        if first_step < which.steps.stop:
            steps, train = range(first_step, which.steps.stop), self._recipe.train
            needs_final = train.objective.needs_final_states
            shards = open_shards(self._folders.shards, data, with_final=needs_final)
            choice = choose_sequences(shards, train.least_anchors) if train.least_anchors > 1 else None
            feed = self._feed(which, shards, choice)
            saver = self._saver(which, data)
            with _reporter(self._folders.output_dir, first_step, train.steps, self._ranks) as reporter:
                if reporter is not None and choice is not None:
                    reporter.say(str(choice))
                start = time.perf_counter()
                self._progress = _take_steps(steps, train, learner, feed, saver, self._progress, reporter)
                if reporter is not None:  # of the steps that this run took; saving is counted
                    reporter.draw("time/train_s", time.perf_counter() - start, which.steps.stop)
        return self._find_distilled(which)

    def leave_device(self) -> None:
        """To the engine: what was learnt is on the disk, from which the next round takes it up again."""
        if self._learner is not None:
            self._learner.engine.destroy()
            self._learner = None
            gc.collect()
            if self._ranks.device.type == "cuda":
                torch.cuda.empty_cache()

    def _find_distilled(self, which: Round) -> Distilled:
        """The checkpoint that a round ended with, or the newest where an earlier run went on from there."""
        step = which.steps.stop
        if not self._folders.checkpoint(step).is_dir():
            step = max(self._steps_taken, step)
        path = self._folders.checkpoint(step)
        manifest = read_manifest(path / MANIFEST_NAME, CheckpointManifest)
        simulated = manifest.simulated_acceptance
        return Distilled(path, step, self._progress.simulated_acceptance if simulated is None else simulated)

    @property
    def _steps_taken(self) -> int:
        return self._progress.step(self._recipe.train.sequences_per_step)

    def _begin(self, hidden_size: int) -> Learner:
        """The learner, as an earlier run left it; once."""
        if self._learner is None:
            last = find_last_pair(self._folders)
            init = read_init(self._recipe) if last is None else None
            self._learner = start_learner(self._recipe, self._ranks, init)
            stopped_in = self._find_round(last or 0)
            saver = self._saver(stopped_in, self._read_data(stopped_in))
            beginning = Progress(init_from=None if init is None else init.origin)
            self._progress = saver.go_on(self._learner.engine, beginning)
            if self._steps_taken < self._recipe.train.steps:
                rehearse_largest_batch(self._recipe, self._learner, hidden_size)
        return self._learner

    def _find_round(self, step: int) -> Round:
        """In which a state of so many steps was written: the last, where steps were lowered since."""
        return next((each for each in self._rounds if step <= each.steps.stop), self._rounds[-1])

    def _read_data(self, which: Round) -> ShardManifest:
        manifest = read_manifest(self._folders.shards / "manifest.json", ShardManifest)
        self._ranks.on_main(lambda: check_shards(self._recipe, manifest, which.number))
        return of_round(manifest, which.number, self._recipe.data.policy)

    def _feed(self, which: Round, shards: Shards, choice: Choice | None) -> Feed:
        recipe, ranks = self._recipe, self._ranks
        seed = recipe.train.seed + _ROUND_SEEDS * which.number
        train = recipe.train.model_copy(update={"seed": seed})
        kept = None if choice is None else choice.kept
        return Feed(
            shards,
            train,
            recipe.drafter,
            ranks.rank,
            ranks.world_size,
            first_step=which.steps.start,
            kept=kept,
            pins=ranks.device.type == "cuda",
        )

    def _saver(self, which: Round, data: ShardManifest) -> Saver:
        recipe = self._recipe
        is_drafting = recipe.rounds.ahead and which != self._rounds[-1]
        drafting_step = which.steps.start if is_drafting else None
        companion = None if self._learner is None else self._learner.companion
        return Saver(
            recipe, self._folders, drafter_config(recipe), data, self._ranks, drafting_step, companion
        )


def distil(recipe: Recipe, ranks: Ranks) -> Distilled:
    """Takes every round; their shards are there already."""
    training = Distillation(recipe, ranks)
    return [training.take(each) for each in plan_rounds(recipe)][-1]


def _take_steps(
    steps: range,
    train: Train,
    learner: Learner,
    feed: Feed,
    saver: Saver,
    progress: Progress,
    reporter: Reporter | None,
) -> Progress:
    window = Window()
    coming = read_ahead(lambda step: learner.send_first(feed.read_step(step)), steps)
    for step, micro_batches in zip(steps, window.timed(coming), strict=True):
        learning_rate = learning_rate_at(step, train.steps, train.optimizer)
        totals = learner.learn(micro_batches, learning_rate, _head_learning_rate_at(step, train))
        window.add(totals, micro_batches)
        progress = progress.after(train.sequences_per_step, totals.num_tokens)
        taken = step + 1
        is_saved = taken % train.save_every_steps == 0 or taken == steps.stop
        # no window straddles a save, so that none differs after resuming
        if taken % train.log_every_steps == 0 or is_saved:
            reading = window.read(taken, learning_rate, learner.ranks)
            progress = replace(progress, simulated_acceptance=reading.served_acceptance)
            if reporter is not None:
                reporter.show(reading)
        if is_saved:
            saver.save(learner.engine, progress)
            window.restart_clock()
    return progress


def _head_learning_rate_at(step: int, train: Train) -> float | None:
    """None where no pairwise head learns beside the drafter."""
    return None if train.pairwise is None else learning_rate_at(step, train.steps, train.pairwise.optimizer)


def start_learner(recipe: Recipe, ranks: Ranks, init: Init | None = None) -> Learner:
    """The drafter in its engine, between the target's frozen embedding and head; without `init` at random."""
    parts = load_target_parts(recipe.target).to(ranks.device, TORCH_DTYPES[recipe.train.precision])
    torch.manual_seed(recipe.train.seed)
    drafter = DFlashDrafter(recipe.drafter, hidden_size=parts.embedding_VD.shape[1])
    drafter.recompute_layers = recipe.train.activation_checkpointing
    drafter.fuse(recipe.train.compile)
    if init is not None:
        init.load_into(drafter)
    if recipe.train.lora is not None:
        adapt(drafter, recipe.train.lora)
    engine = start_engine(drafter, recipe.train, ranks)
    return Learner(engine, parts, recipe.train, ranks, begin_companion(recipe, parts, ranks))


def rehearse_largest_batch(recipe: Recipe, learner: Learner, hidden_size: int) -> None:
    """So that memory fails now and not hours later: MachineError."""
    train, longest = recipe.train, recipe.data.longest
    size = train.micro_batch_sequences
    try:
        sizes = (size, longest, train.num_anchors, recipe.drafter, hidden_size)
        learner.rehearse(worst_case_batch(*sizes, with_final=train.objective.needs_final_states))
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


def check_shards(recipe: Recipe, data: ShardManifest, number: int = 0) -> None:
    """Raises UserError unless a round's shards are there, with this target's states at the recipe's taps."""
    where, target = recipe.output_dir / "shards", identify_target(recipe.target)
    if not (data.complete or read_round(recipe.output_dir, number)):
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
    if recipe.train.objective.needs_final_states and not data.final_states:
        raise lacks_final_states(recipe.train.objective)


def _reporter(
    output_dir: Path, first_step: int, steps: int, ranks: Ranks
) -> AbstractContextManager[Reporter | None]:
    return reporting(output_dir / "tensorboard", first_step, steps) if ranks.is_main else nullcontext()
