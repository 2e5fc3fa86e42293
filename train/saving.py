"""Writes a run's pairs of checkpoint and state, and goes on from the newest; all ranks take part."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
from rich.console import Console
from safetensors import SafetensorError

from recipes.errors import MachineError
from recipes.manifest import CheckpointManifest, ShardManifest, provenance, read_manifest, write_json
from recipes.schema import Recipe
from serve.drafter_config import expected_tensors
from train.checkpoint import point_latest_at, prune, publish, published_steps, settle
from train.pairwise_companion import Companion
from train.ranks import Ranks
from train.reshard import take_over_state
from train.resume import (
    HEAD_STATE_NAME,
    STATE_MANIFEST_NAME,
    Progress,
    RunFolders,
    StateManifest,
    check_same_run,
    find_last_pair,
    keep_only_state,
    shards_digest,
)
from train.zero import gather_weights, load_state, save_state

PAIR_BYTES = 18
"""Of a pair, per parameter: published bf16, weights in up to fp32, and fp32 masters and two moments."""


@dataclass(frozen=True)
class Saver:
    recipe: Recipe
    folders: RunFolders
    config: Mapping[str, Any]
    """The drafter's published config.json."""
    data: ShardManifest
    ranks: Ranks
    drafting_step: int | None
    """Of a checkpoint that engines may be drafting with, which is not removed; None: of none."""
    companion: Companion | None = None
    """The pairwise head that learns beside the drafter, and comes with its checkpoints."""

    def go_on(self, engine: deepspeed.DeepSpeedEngine, beginning: Progress) -> Progress:
        """Loads the newest pair into `engine`; where there is none, this is the beginning.

        Raises UserError when it is another run's.
        """
        step = find_last_pair(self.folders)
        progress = beginning if step is None else self._load(engine, self.folders.state(step))
        self.ranks.on_main(lambda: self._finish_killed_save(step))
        return progress

    def _load(self, engine: deepspeed.DeepSpeedEngine, folder: Path) -> Progress:
        state = read_manifest(folder / STATE_MANIFEST_NAME, StateManifest)
        check_same_run(state, self._describe(state.progress), folder)
        if state.world_size == self.ranks.world_size:
            load_state(engine, folder)
        else:
            take_over_state(engine, folder, state.world_size, self.ranks)
            self._say_taken_over(folder, state.world_size)
        if self.companion is not None:
            self.companion.load(folder / HEAD_STATE_NAME)
        return state.progress

    def _say_taken_over(self, folder: Path, num_writers: int) -> None:
        if self.ranks.is_main:
            was, now = (f"{count} rank" + "s" * (count > 1) for count in (num_writers, self.ranks.world_size))
            console = Console(soft_wrap=True, highlight=False, markup=False)
            console.print(f"{folder}: state of {was} taken over by {now}")

    def _finish_killed_save(self, step: int | None) -> None:
        """What it did not come to, once its pair was there; or what it left of a pair that was not."""
        published = published_steps(self.folders.checkpoints)
        if published:
            point_latest_at(self.folders.checkpoint(published[-1]))
        self._keep_only(step)

    def save(self, engine: deepspeed.DeepSpeedEngine, progress: Progress) -> None:
        """The pair of this step; older ones go only once it is complete."""
        step = progress.step(self.recipe.train.sequences_per_step)
        self.ranks.on_main(lambda: self._make_room(step))
        try:
            save_state(engine, self.folders.unfinished_state(step))
            weights = gather_weights(engine, self.ranks)
            self.ranks.on_main(lambda: self._complete_pair(step, progress, weights))
        except (RuntimeError, SafetensorError):  # torch's and safetensors' words for a failed write
            self._check_room()
            raise

    def _make_room(self, step: int) -> None:
        """Raises MachineError when the disk cannot hold the pair, before anything is written."""
        shutil.rmtree(self.folders.unfinished_state(step), ignore_errors=True)
        self.folders.states.mkdir(parents=True, exist_ok=True)
        self._check_room()

    def _check_room(self) -> None:
        num_parameters = sum(math.prod(shape) for shape in expected_tensors(self.config).values())
        head_bytes = 0 if self.companion is None else self.companion.pair_bytes
        needed = num_parameters * PAIR_BYTES + head_bytes
        free = shutil.disk_usage(self.folders.states).free
        if free < needed:
            raise MachineError(
                f"{self.folders.output_dir}: a checkpoint and its state take {needed / 2**30:.2f} GiB,"
                f" the disk has {free / 2**30:.2f} GiB left: free some, then run the same command again"
            )

    def _complete_pair(self, step: int, progress: Progress, weights: Mapping[str, Any]) -> None:
        unfinished = self.folders.unfinished_state(step)
        state, head = self._describe(progress), None
        if self.companion is not None:
            self.companion.save(unfinished / HEAD_STATE_NAME)
            head = self.companion.make_tables()
        write_json(unfinished / STATE_MANIFEST_NAME, state)
        settle(unfinished, self.folders.state(step))
        common = state.model_dump(include=set(CheckpointManifest.model_fields))
        manifest = CheckpointManifest.model_validate(common)
        publish(self.folders.checkpoints, weights, self.config, manifest, head)
        self._keep_only(step)

    def _keep_only(self, step: int | None) -> None:
        """This state, and the newest checkpoints."""
        keep_only_state(self.folders, step)
        prune(self.folders.checkpoints, self.recipe.train.keep_checkpoints, self.drafting_step)

    def _describe(self, progress: Progress) -> StateManifest:
        return StateManifest(
            target=self.data.target,
            recipe=self.recipe.model_dump(mode="json"),
            provenance=provenance(),
            step=progress.step(self.recipe.train.sequences_per_step),
            sequences_seen=progress.sequences_seen,
            tokens_seen=progress.tokens_seen,
            simulated_acceptance=progress.simulated_acceptance,
            init_from=progress.init_from,
            world_size=self.ranks.world_size,
            shards=shards_digest(self.data),
        )
