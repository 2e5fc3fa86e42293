"""What `tests/compare_objectives.py` counts of drafters and says of them: acceptance lengths, and errors."""

# N=prompts

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eval.acceptance import Counts, count_requests, find_standard_error
from recipes.manifest import CheckpointManifest, read_manifest, write_json
from recipes.schema import Recipe
from serve.generation import Answer
from serve.plan import MANIFEST_NAME
from train.resume import STATE_MANIFEST_NAME, RunFolders, StateManifest

BUDGETS = (15, 31)
"""Of the engines in which drafters take turns."""


# How a drafter is measured


@dataclass(frozen=True)
class Way:
    """Of decoding."""

    temperature: float
    budget: int | None
    """Nodes of a tree; None: the chain."""

    @property
    def engine(self) -> int:
        """The budget of the engine that decodes so: one with trees answers chain requests too."""
        return BUDGETS[0] if self.budget is None else self.budget

    def __str__(self) -> str:
        drafts = "chain" if self.budget is None else f"tree of {self.budget}"
        return f"{drafts}, T = {self.temperature:g}"


def ways_of(temperatures: Iterable[float]) -> list[Way]:
    return [Way(temperature, budget) for temperature in temperatures for budget in (None, *BUDGETS)]


def count(answers: Sequence[Answer]) -> Counts:
    return count_requests([answer.chunks for answer in answers])


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """All that a measurement depends on besides the checkpoint."""
    return recipe.eval.model_dump(mode="json", exclude={"concurrency", "tree_budget"})


def write_accepted(folder: Path, budget: int, settings: dict[str, Any], counts: dict[Way, Counts]) -> None:
    told = {str(way): tell_counts(each) for way, each in counts.items()}
    write_json(accepted_path(folder, budget), {"settings": settings, "counts": told})


def read_accepted(folder: Path, budget: int, settings: dict[str, Any]) -> dict[Way, Counts] | None:
    """None where this was not measured yet, or other settings were."""
    path = accepted_path(folder, budget)
    if not path.is_file():
        return None
    told = json.loads(path.read_text())
    if told["settings"] != settings:
        return None
    ways = [way for way in ways_of(settings["temperatures"]) if way.engine == budget]
    return {way: read_counts(told["counts"][str(way)]) for way in ways}


def read_counts(told: dict[str, list[int]]) -> Counts:
    return Counts(np.array(told["steps"]), np.array(told["tokens"]))


def tell_counts(counts: Counts) -> dict[str, list[int]]:
    return {"steps": counts.steps_N.tolist(), "tokens": counts.tokens_N.tolist()}


def accepted_path(folder: Path, budget: int) -> Path:
    return folder / f"accepted-{budget}.json"


# What it says


@dataclass(frozen=True)
class Estimate:
    value: float
    """Mean over seeds."""
    standard_error: float
    """Over prompts, of drafters as they are."""
    seed_error: float | None
    """Standard error over seeds; None of one."""

    def show(self, sign: str = "") -> str:
        of_seeds = "" if self.seed_error is None else f" ({self.seed_error:.2f})"
        return f"{self.value:{sign}.2f} ± {self.standard_error:.2f}{of_seeds}"


def estimate(runs: Sequence[Counts]) -> Estimate:
    """Acceptance length of an objective's drafters, one of each seed."""
    return _estimate([run.length for run in runs], [run.residuals for run in runs], _is_decoded(runs))


def estimate_gain(runs: Sequence[Counts], base: Sequence[Counts]) -> Estimate:
    """Of acceptance length over the base's, seed by seed and prompt by prompt."""
    pairs = list(zip(runs, base, strict=True))
    return _estimate(
        [run.length - other.length for run, other in pairs],
        [run.residuals - other.residuals for run, other in pairs],
        _is_decoded([*runs, *base]),
    )


def _estimate(values: list[float], residuals: list[np.ndarray], is_decoded_N: np.ndarray) -> Estimate:
    """Prompts, not steps, are what is independent (`eval.acceptance`); and seeds, apart from them."""
    of_prompts = find_standard_error(np.mean(residuals, axis=0), is_decoded_N)
    num_seeds = len(values)
    of_seeds = None if num_seeds < 2 else float(np.std(values, ddof=1)) / num_seeds**0.5
    return Estimate(float(np.mean(values)), of_prompts, of_seeds)


def _is_decoded(runs: Sequence[Counts]) -> np.ndarray:
    """Prompts whose answers are longer than the prefill's token."""
    return np.any([run.is_decoded for run in runs], axis=0)


@dataclass(frozen=True)
class Trained:
    """What a training left beside its checkpoint."""

    seconds: float
    """Of its steps; starting and saving are not counted."""
    simulated: float | None
    """Acceptance length of the chain, on training blocks of the last steps."""
    tokens: int
    """Of the sequences that it saw, each as often as it was seen."""
    shards: str
    """Digest."""


def read_trained(recipe: Recipe) -> Trained:
    folders, steps = RunFolders(recipe.output_dir), recipe.train.steps
    checkpoint = read_manifest(folders.checkpoint(steps) / MANIFEST_NAME, CheckpointManifest)
    state = read_manifest(folders.state(steps) / STATE_MANIFEST_NAME, StateManifest)
    events = EventAccumulator(str(recipe.output_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    seconds = sum_seconds((point.step, point.value) for point in events.Scalars("time/step_s"))
    return Trained(seconds, checkpoint.simulated_acceptance, checkpoint.tokens_seen, state.shards)


def sum_seconds(points: Iterable[tuple[int, float]]) -> float:
    """Of a whole training: a point is a step, and the mean of a step's seconds since the point before."""
    curve = sorted(dict(points).items())
    starts = [0, *(step for step, _ in curve)]
    return sum((step - start) * seconds for start, (step, seconds) in zip(starts, curve, strict=False))
