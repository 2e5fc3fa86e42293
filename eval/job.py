"""What is about to be measured: every mistake a user can make is found here, before an engine starts."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data.prompts import Prompt
from eval.suite import load_suite
from recipes.errors import UserError
from recipes.load import load_recipe
from recipes.manifest import CheckpointManifest, read_manifest
from recipes.problems import describe_problem
from recipes.schema import Eval, Recipe
from serve.baselines import Baseline, read_baselines
from serve.plan import MANIFEST_NAME, Plan, Request, make_plan


@dataclass(frozen=True)
class Options:
    """The command line, unchecked."""

    url: str | None
    ckpt: Path | None
    recipe: Path | None
    out: Path
    overrides: dict[str, Any]
    """Fields of the recipe's eval section -> value, None where not given."""
    tensorboard: Path | None
    step: int | None
    simulated: float | None


@dataclass(frozen=True)
class Job:
    """A measurement, checked.  Exactly one of `url` and `plan` is given."""

    url: str | None
    plan: Plan | None
    recipe: Recipe | None
    settings: Eval
    prompts: list[Prompt]
    baselines: list[Baseline]
    """None at a URL."""
    out: Path
    tensorboard: Path | None
    step: int | None
    simulated: float | None


def make_job(options: Options) -> Job:
    """Raises UserError for whatever cannot be measured."""
    if (options.url is None) == (options.ckpt is None):
        raise UserError("give either --ckpt, the checkpoint to measure, or --url, the server to measure")
    for name in ("tree_budget", "baselines"):
        if options.url is not None and options.overrides.get(name):
            flag = f"--{name.replace('_', '-').removesuffix('s')}"
            raise UserError(f"{flag} needs --ckpt: a server at --url is measured with whatever it drafts")
    _require_writable(options.out)
    manifest = _read_manifest(options.ckpt) if options.ckpt else None
    recipe = _choose_recipe(options.recipe, manifest)
    plan = make_plan(Request(options.ckpt, options.recipe, None, None, None)) if options.ckpt else None
    settings = _choose_settings(recipe, options.overrides)
    return Job(
        url=options.url.rstrip("/") if options.url else None,
        plan=plan,
        recipe=recipe,
        settings=settings,
        prompts=load_suite(settings.suite, settings.num_prompts, recipe.data if recipe else None),
        baselines=_choose_baselines(plan, settings) if plan else [],
        out=options.out,
        tensorboard=options.tensorboard,
        step=_choose_step(options, manifest),
        simulated=options.simulated,
    )


def _require_writable(out: Path) -> None:
    """Makes the folder; a measurement of minutes must not end at a path that cannot be written."""
    if out.is_dir():
        raise UserError(f"--out {out} is a folder: write the path of a file in it, as {out / 'report.json'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as refused:
        reason = f"{refused.strerror}: {refused.filename}"
        raise UserError(f"--out {out}: its folder cannot be made ({reason})") from refused
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {out}: no permission to write in {out.parent}")


def _read_manifest(ckpt: Path) -> CheckpointManifest | None:
    """None for a checkpoint that somebody else published, or for no checkpoint; `make_plan` tells which."""
    path = ckpt / MANIFEST_NAME
    return read_manifest(path, CheckpointManifest) if path.is_file() else None


def _choose_recipe(path: Path | None, manifest: CheckpointManifest | None) -> Recipe | None:
    """The recipe named, else the one that made the checkpoint, else none."""
    if path is not None:
        return load_recipe(path)
    if manifest is None:
        return None
    try:
        return Recipe.model_validate(manifest.recipe)
    except ValidationError as invalid:
        lines = [describe_problem(details) for details in invalid.errors()]
        raise UserError(
            "\n  ".join([f"the recipe in {MANIFEST_NAME} does not load; add --recipe RECIPE", *lines])
        ) from invalid


def _choose_settings(recipe: Recipe | None, overrides: dict[str, Any]) -> Eval:
    """The recipe's eval section under the command line's options."""
    given = {name: value for name, value in overrides.items() if value is not None}
    if recipe is None and "suite" not in given:
        raise UserError("which prompts? give --suite, or --recipe with an eval section")
    section = recipe.eval.model_dump() if recipe else {}
    try:
        settings = Eval.model_validate(section | given)
    except ValidationError as invalid:
        lines = [describe_problem(details) for details in invalid.errors()]
        raise UserError("\n  ".join(["cannot measure so", *lines])) from invalid
    _refuse_repeats(settings)
    return settings


def _choose_baselines(plan: Plan, settings: Eval) -> list[Baseline]:
    assert plan.drafter is not None, "a checkpoint is measured"
    return read_baselines(settings.baselines, plan.target, plan.drafter.block_size - 1)


def _refuse_repeats(settings: Eval) -> None:
    if not settings.temperatures:
        raise UserError("eval.temperatures is empty: write at least one, as [0.0]")
    if len(set(settings.temperatures)) < len(settings.temperatures):
        raise UserError(f"temperatures {settings.temperatures}: write each once")


def _choose_step(options: Options, manifest: CheckpointManifest | None) -> int | None:
    step = manifest.step if options.step is None and manifest else options.step
    if options.tensorboard is not None and step is None:
        raise UserError(
            "--tensorboard needs --step N, the training step of the drafter: no manifest here says it"
        )
    return step
