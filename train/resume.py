"""Stopping and going on: what a training's state says of itself, and which state a run may continue.

A pair is complete when both `state/step-N/` and `checkpoints/checkpoint-N/` are there; each appears whole,
the state first.  Only the newest pair's state is kept.  `train.saving` writes and loads them.
"""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data.shards import SPOOL_NAME
from recipes.errors import UserError
from recipes.manifest import Count, Manifest, Origin, ShardManifest
from recipes.problems import describe_problem
from recipes.schema import Recipe
from train.checkpoint import PREFIX, published_steps

STATE_PREFIX = "step-"
STATE_MANIFEST_NAME = "draftsmith_state.json"
HEAD_STATE_NAME = "pairwise.pt"
"""Of the pairwise head that learns beside the drafter, where one does."""
FREE_TRAIN_FIELDS = frozenset(
    {"steps", "save_every_steps", "keep_checkpoints", "log_every_steps", "micro_batch_sequences"}
    | {"activation_checkpointing", "compile"}
)
"""What of `train` may change when a run goes on. Only `steps` changes what is learnt: the rates to come.

Not `init_from`, though it has had its effect: whoever names another checkpoint expects to begin with it.
"""


@dataclass(frozen=True)
class Progress:
    """How far a training is: what it began with, the one counter, and what came of it."""

    sequences_seen: int = 0
    tokens_seen: int = 0
    simulated_acceptance: float = 1.0
    """Of the chain that would be served, as last read."""
    init_from: Origin | None = None

    def step(self, sequences_per_step: int) -> int:
        """Optimizer steps taken."""
        return self.sequences_seen // sequences_per_step

    def after(self, sequences: int, tokens: int) -> "Progress":
        return replace(
            self, sequences_seen=self.sequences_seen + sequences, tokens_seen=self.tokens_seen + tokens
        )


class StateManifest(Manifest):
    """draftsmith_state.json in a state's folder."""

    step: Count
    sequences_seen: Count
    tokens_seen: Count
    simulated_acceptance: float
    """Of the chain, over the steps before this one."""
    world_size: Count
    shards: str
    """`shards_digest` of the data."""
    init_from: Origin | None = None

    @property
    def progress(self) -> Progress:
        return Progress(self.sequences_seen, self.tokens_seen, self.simulated_acceptance, self.init_from)


@dataclass(frozen=True)
class RunFolders:
    """Where a run keeps its checkpoints and states."""

    output_dir: Path

    @property
    def shards(self) -> Path:
        return self.output_dir / "shards"

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / "checkpoints"

    @property
    def states(self) -> Path:
        return self.output_dir / "state"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"{PREFIX}{step}"

    def state(self, step: int) -> Path:
        return self.states / f"{STATE_PREFIX}{step}"

    def unfinished_state(self, step: int) -> Path:
        return self.states / f".{STATE_PREFIX}{step}.tmp"


def shards_digest(manifest: ShardManifest) -> str:
    """Says which data: every shard's checksum, in order."""
    return hashlib.sha256("".join(entry.sha256 for entry in manifest.shards).encode()).hexdigest()


def find_last_pair(folders: RunFolders) -> int | None:
    """The step of the newest complete pair; None for a run that has published nothing.

    Raises UserError when there are checkpoints but no state to go on from.
    """
    published = published_steps(folders.checkpoints)
    pairs = [step for step in published if (folders.state(step) / STATE_MANIFEST_NAME).is_file()]
    if published and not pairs:
        raise UserError(
            f"{folders.output_dir} has checkpoints up to step {published[-1]}, but no state to go on from:"
            " give the new run another output_dir, or move the checkpoints away to start again"
        )
    return pairs[-1] if pairs else None


def remove_leftovers(folders: RunFolders) -> None:
    """Of a run that was killed: files that had no name yet, and states on their way into a shard.

    What a killed save left goes when the training goes on; half a shard when the data phase does.
    """
    out = folders.output_dir
    for folder in (out, out / "rounds", out / "logs"):
        for path in folder.glob(".*.tmp"):
            path.unlink()
    shutil.rmtree(folders.shards / SPOOL_NAME, ignore_errors=True)


def keep_only_state(folders: RunFolders, step: int | None) -> None:
    """Removes every other state, and what an interrupted save left."""
    for path in folders.states.glob("*"):
        if path.is_dir() and (step is None or path != folders.state(step)):
            shutil.rmtree(path)


def check_same_run(state: StateManifest, expected: StateManifest, folder: Path) -> None:
    """Raises UserError unless a run that would write `expected` may go on from `state`."""
    differences = list(_differences(state, expected, read_written_recipe(state.recipe, folder)))
    if differences:
        first = f"{folder} belongs to another run, it cannot be continued as asked:"
        last = "set it back to go on, or give the new run another output_dir"
        raise UserError("\n  ".join([first, *differences, last]))


def read_written_recipe(written: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """A state's, with the defaults of fields that the version which wrote it did not have.

    Raises UserError that names `source`, where the state lies, for a recipe that is none any more.
    """
    try:
        return Recipe.model_validate(written).model_dump(mode="json")
    except ValidationError as invalid:
        lines = [describe_problem(details) for details in invalid.errors()]
        first = f"{source}: its recipe is not one of this version, go on with the one that wrote it"
        raise UserError("\n  ".join([first, *lines])) from invalid


def _differences(state: StateManifest, expected: StateManifest, recipe: Mapping[str, Any]) -> Iterator[str]:
    if (state.target.fingerprint, state.target.dtype) != (expected.target.fingerprint, expected.target.dtype):
        yield f"its target is {state.target.model} ({state.target.dtype}) with other files or precision"
    if state.shards != expected.shards:
        yield "its shards were others"
    for path, was, now in _changed(recipe, expected.recipe):
        yield f"{path} was {was}, the recipe says {now}"


def _changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for section, free in (("drafter", frozenset()), ("train", FREE_TRAIN_FIELDS)):
        for field in sorted(now[section].keys() - free):
            if was[section][field] != now[section][field]:
                yield f"{section}.{field}", was[section][field], now[section][field]
