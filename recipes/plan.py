"""What a recipe will need, before anything starts: disk, host memory, GPU memory by phase, and hours.

    python recipes/plan.py RECIPE [section.field=value ...]

Prints a table for each phase, its arithmetic beside it.  A recipe that cannot fit the machine of its hardware
section ends with exit code 2 and, for each lack, what would make it fit.  Reads configs only, no weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from huggingface_hub import try_to_load_from_cache
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from recipes.errors import UserError, run_command
from recipes.footprint import read_target
from recipes.job import Job, Phase
from recipes.load import check_against_target, load_recipe, resolve_model
from recipes.needs import Duration, count_misfits, durations, plan_phases
from recipes.remedies import propose
from recipes.schema import Recipe
from recipes.schema import Target as TargetSection
from recipes.target_config import CONFIG_NAME, find_config, find_folder

PUBLISHED_WIDTHS = Path(__file__).with_name("published_widths.json")
WIDTH = 132


def main(
    recipe_path: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.field=value")] = None,
) -> None:
    """Say what a recipe needs of its machine, and whether it fits."""
    recipe = load_recipe(recipe_path, overrides or [])
    check_against_target(recipe)
    known = find_target(recipe.target)
    job = make_job(recipe, known)
    phases = plan_phases(job)
    show(job, phases, known)
    refuse_what_cannot_fit(recipe_path, job, phases)


def check_plan(recipe_path: Path, recipe: Recipe) -> None:
    """Raises UserError for a recipe that cannot fit the machine of its hardware section."""
    job = make_job(recipe, find_target(recipe.target))
    refuse_what_cannot_fit(recipe_path, job, plan_phases(job))


def make_job(recipe: Recipe, known: "KnownTarget") -> Job:
    return Job(recipe, read_target(known.config, known.source), known.is_fetched)


@dataclass(frozen=True)
class KnownTarget:
    """A target's config.json, or what is known of it."""

    config: dict[str, Any]
    source: str
    is_fetched: bool
    """From the hub, so that it lies in the cache on this disk."""


def find_target(target: TargetSection) -> KnownTarget:
    """Its own config.json, in a folder or in the hub's cache; else published widths, else from the hub.

    Raises UserError where there is none of these.
    """
    model = resolve_model(target.model)
    is_fetched = find_folder(model) is None
    cached = try_to_load_from_cache(model, CONFIG_NAME, revision=target.revision) if is_fetched else None
    widths = _read_json(PUBLISHED_WIDTHS)
    if is_fetched and not isinstance(cached, str) and model in widths:  # no need to ask the hub
        source = f"not fetched yet; widths from {PUBLISHED_WIDTHS.name}, after {widths[model]['source']}"
        return KnownTarget(widths[model]["config"], source, is_fetched)
    path = Path(cached) if isinstance(cached, str) else find_config(model, target.revision)
    return KnownTarget(_read_json(path), str(path), is_fetched)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def refuse_what_cannot_fit(recipe_path: Path, job: Job, phases: list[Phase]) -> None:
    """Raises UserError with a line for each lack."""
    lacks = [f"{phase.name}: {_describe_lack(job, phase)}" for phase in phases if not phase.fits]
    lacks += count_misfits(job.recipe)
    if lacks:
        raise UserError("\n  ".join([f"{recipe_path} does not fit its hardware:", *lacks]))


def _describe_lack(job: Job, phase: Phase) -> str:
    remedies = "  |  ".join(propose(job, phase)) or "nothing that a plan knows of"
    return f"{phase.need_gib:,.1f} GiB needed, {phase.room} is {phase.room_gib:,.1f}; would do: {remedies}"


def show(job: Job, phases: list[Phase], known: KnownTarget) -> None:
    console = Console(width=WIDTH, highlight=False, markup=False)
    console.print(f"target {job.recipe.target.model}: {known.source}")
    console.print(_describe_machine(job.recipe))
    for phase in phases:
        console.print(_phase_table(phase))
        for note in phase.notes:
            console.print(f"  {note}")
    console.print(_hours_table(durations(job)))


def _describe_machine(recipe: Recipe) -> str:
    gpus = recipe.hardware.gpus
    machine = f"{gpus} GPUs" if gpus else "a CPU"
    if gpus and recipe.rounds.engine_gpus is not None:
        machine += f", {len(recipe.rounds.engine_gpus)} of them the engines' own"
    return f"hardware: {machine}; sequences are counted as long as they may be"


def _phase_table(phase: Phase) -> Table:
    table = Table(
        title=phase.name, title_justify="left", box=SIMPLE_HEAD, show_edge=False, title_style="bold"
    )
    table.add_column("what")
    table.add_column("formula")
    table.add_column("GiB", justify="right")
    for row in phase.rows:
        table.add_row(row.what, row.formula, f"{row.gib:,.2f}")
    table.add_section()
    table.add_row("needed", "", f"{phase.need_gib:,.2f}")
    if phase.room_gib is not None:
        verdict = "fits" if phase.fits else "does not fit"
        table.add_row(f"there is: {verdict}", phase.room, f"{phase.room_gib:,.2f}")
    return table


def _hours_table(expected: list[Duration]) -> Table:
    table = Table(
        title="hours, at most", title_justify="left", box=SIMPLE_HEAD, show_edge=False, title_style="bold"
    )
    table.add_column("phase")
    table.add_column("formula")
    table.add_column("hours", justify="right")
    for each in expected:
        table.add_row(each.phase, each.formula, "?" if each.hours is None else f"{each.hours:,.2f}")
    return table


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
