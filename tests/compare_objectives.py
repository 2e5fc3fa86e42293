"""Objectives compared at equal tokens by what the engine accepts of their drafters, chains and trees.

    python tests/compare_objectives.py --out FOLDER [--steps N] [--jobs N] [section.field=value ...]

One set of shards; a drafter for each objective and seed, trained on the same blocks in the same order; then
an engine for each tree budget, in which the drafters take turns on the same held-out prompts.  What is done
is not done again: the same command goes on after an interruption.  Runs on a CPU and on CUDA.
"""

# N=prompts  S=seeds

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from objective_scores import (
    BUDGETS,
    Counts,
    Trained,
    Way,
    count,
    estimate,
    estimate_gain,
    read_accepted,
    read_trained,
    settings_of,
    tell_counts,
    ways_of,
    write_accepted,
)
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from typer import Option

from data.groups import render
from eval.suite import load_suite
from recipes.errors import MISTAKE, MachineError, UserError, run_command
from recipes.load import check_against_target, load_recipe, resolve_model
from recipes.manifest import provenance, write_json, write_text
from recipes.schema import Recipe, Sampling
from serve.engine import child_environment, is_cuda
from serve.generation import CapturingEngine, Drafting, Request
from train.resume import RunFolders, find_last_pair

REPOSITORY = Path(__file__).resolve().parent.parent
TINY_RECIPE = REPOSITORY / "recipes" / "tiny_cpu.yaml"
OBJECTIVES = "cross_entropy,d_pace,kl,total_variation,lk"
OWN_SETTINGS = ("rounds.count=1", "rounds.first_share=null", "data.final_states=true")
IN_ENGINE = "--in-engine"
WIDTH = 200


# Who is compared


@dataclass(frozen=True)
class Entrant:
    """A drafter to be trained."""

    objective: str
    """A kind and, after colons, settings that are not the recipe's: lk:eta=10."""
    seed: int

    @property
    def name(self) -> str:
        return f"{self.objective.replace(':', '-')}-seed{self.seed}"

    @property
    def overrides(self) -> list[str]:
        kind, *settings = self.objective.split(":")
        fields = [f"kind={kind}", *settings]
        return [f"train.seed={self.seed}", *(f"train.objective.{field}" for field in fields)]


@dataclass(frozen=True)
class Comparison:
    """A folder, and the recipes of everything in it."""

    out: Path
    overrides: Sequence[str]
    objectives: Sequence[str]
    """The others are compared with the first."""
    seeds: Sequence[int]

    @property
    def entrants(self) -> list[Entrant]:
        return [Entrant(objective, seed) for seed in self.seeds for objective in self.objectives]

    def data_recipe(self) -> Recipe:
        return load_recipe(TINY_RECIPE, self.data_overrides)

    @property
    def data_overrides(self) -> list[str]:
        return [*OWN_SETTINGS, *self.overrides, f"output_dir={self.out / 'data'}"]

    def recipe_of(self, entrant: Entrant) -> Recipe:
        own = [*entrant.overrides, f"output_dir={self.out / entrant.name}"]
        return load_recipe(TINY_RECIPE, [*OWN_SETTINGS, *self.overrides, *own])


def claim(recipe: Recipe, shards: Path) -> None:
    """Its folder, with the shards that all have.  UserError where another training's recipe lies there."""
    path = recipe_path(recipe.output_dir)
    if path.is_file():
        found = read_recipe(recipe.output_dir)
        sections = ("target", "drafter", "train")
        differing = [name for name in sections if getattr(found, name) != getattr(recipe, name)]
        if differing:
            raise UserError(
                f"{path} has other settings in {', '.join(differing)}: set them back, name another --out, or"
                " remove the folder"
            )
    recipe.output_dir.mkdir(parents=True, exist_ok=True)
    write_text(path, recipe.model_dump_json(indent=1) + "\n")
    link = RunFolders(recipe.output_dir).shards
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(shards, link.parent))


def recipe_path(folder: Path) -> Path:
    return folder / "recipe.json"


def read_recipe(folder: Path) -> Recipe:
    return Recipe.model_validate_json(recipe_path(folder).read_text())


def check_equal_tokens(trained: dict[Entrant, Trained]) -> None:
    """Raises MachineError unless all of a seed's drafters saw the same."""
    for seed in {entrant.seed for entrant in trained}:
        seen = {name.name: (it.tokens, it.shards) for name, it in trained.items() if name.seed == seed}
        if len(set(seen.values())) > 1:
            raise MachineError(
                f"these drafters did not see the same tokens, so they are not compared: {seen}"
            )


# The work, in child processes


@dataclass(frozen=True)
class Task:
    """A script of ours that ends with this process."""

    name: str
    script: Path
    arguments: Sequence[str]
    environment: dict[str, str]
    log: Path

    def run(self) -> str:
        """Says how long it took.  Raises UserError or MachineError, as it ended."""
        since = time.monotonic()
        begin = [sys.executable, str(REPOSITORY / "train" / "child.py"), str(os.getpid())]
        with self.log.open("ab") as log:
            command = [*begin, str(self.script), *self.arguments]
            code = subprocess.run(
                command, env=self.environment, stdout=log, stderr=log, check=False
            ).returncode
        if code:
            last = (self.log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
            failure = UserError if code == MISTAKE else MachineError
            raise failure(f"{self.name} ended with code {code}; {self.log} ends with: {last}")
        return f"{self.name}: {time.monotonic() - since:.0f} s"


def run_all(tasks: Sequence[Task], jobs: int, say: Callable[[str], None]) -> None:
    """At most `jobs` at a time.  After a failure no other begins."""
    pool = ThreadPoolExecutor(jobs)
    try:
        for done in as_completed([pool.submit(task.run) for task in tasks]):
            say(done.result())
    finally:
        pool.shutdown(cancel_futures=True)


def data_task(comparison: Comparison) -> Task:
    """It passes over shards that are there, and refuses those of another making."""
    folder = comparison.data_recipe().output_dir
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [str(TINY_RECIPE), *comparison.data_overrides]
    script = REPOSITORY / "data" / "regenerate.py"
    return Task("shards", script, arguments, child_environment(), folder / "log")


def training_tasks(comparison: Comparison, jobs: int) -> Iterator[Task]:
    shards = RunFolders(comparison.data_recipe().output_dir).shards
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
    for entrant in comparison.entrants:
        recipe = comparison.recipe_of(entrant)
        claim(recipe, shards)
        if find_last_pair(RunFolders(recipe.output_dir)) != recipe.train.steps:
            # distill.py would start three servers after each
            script, arguments = (
                Path(__file__).with_name("train_only.py"),
                [str(recipe_path(recipe.output_dir))],
            )
            log = recipe.output_dir / "log"
            yield Task(f"{entrant.name}, training", script, arguments, environment, log)


def engine_environment(at_once: int) -> dict[str, str]:
    """Of one of so many, which share a CPU's threads."""
    environment = child_environment()
    if not is_cuda():
        environment["OMP_NUM_THREADS"] = str(max(1, int(environment["OMP_NUM_THREADS"]) // at_once))
    return environment


def measuring_tasks(comparison: Comparison, jobs: int) -> Iterator[Task]:
    """One for each budget: an engine's start takes longer than its measuring."""
    environment = engine_environment(min(jobs, len(BUDGETS)))
    for budget in BUDGETS:
        recipes = [comparison.recipe_of(entrant) for entrant in comparison.entrants]
        folders = [
            str(recipe.output_dir)
            for recipe in recipes
            if read_accepted(recipe.output_dir, budget, settings_of(recipe)) is None
        ]
        if folders:
            log, arguments = comparison.out / f"engine-{budget}.log", [IN_ENGINE, str(budget), *folders]
            yield Task(f"engine of budget {budget}", Path(__file__), arguments, environment, log)


# An engine's process


def measure_in_turn(budget: int, folders: Sequence[Path]) -> None:
    recipe = read_recipe(folders[0])
    requests, settings = make_requests(recipe), settings_of(recipe)
    ways = [way for way in ways_of(recipe.eval.temperatures) if way.engine == budget]
    with tempfile.TemporaryDirectory() as spool:
        engine: CapturingEngine | None = None
        for folder in folders:
            checkpoint = RunFolders(folder).checkpoint(recipe.train.steps)
            engine = begin_drafting(engine, recipe, Path(spool), Drafting(checkpoint, budget))
            counts = {way: measure(engine, requests, recipe, way) for way in ways}
            write_accepted(folder, budget, settings, counts)
            print(
                folder.name,
                *(f"{way}: {each.length:.3f}" for way, each in counts.items()),
                sep="  ",
                flush=True,
            )


def make_requests(recipe: Recipe) -> list[Request]:
    """With the seeds that `eval/measure.py` gives the same prompts."""
    tokenizer = AutoTokenizer.from_pretrained(
        resolve_model(recipe.target.model), revision=recipe.target.revision
    )
    prompts = render(load_suite(recipe.eval.suite, recipe.eval.num_prompts, None), tokenizer)
    return [Request(prompt.token_ids, recipe.eval.seed + number) for number, prompt in enumerate(prompts)]


def begin_drafting(
    engine: CapturingEngine | None, recipe: Recipe, spool: Path, drafting: Drafting
) -> CapturingEngine:
    """A new engine, or this one with another drafter."""
    if engine is None:
        return CapturingEngine(recipe.target, recipe.serve, recipe.drafter.target_layer_ids, spool, drafting)
    engine.swap(drafting.ckpt)
    return engine


def measure(engine: CapturingEngine, requests: Sequence[Request], recipe: Recipe, way: Way) -> Counts:
    sampling = Sampling(temperature=way.temperature, max_tokens=recipe.eval.max_tokens)
    return count(engine.answer(requests, sampling, is_chain=way.budget is None))


# The result


@dataclass(frozen=True)
class Result:
    """Of an objective; a list has an item for each seed."""

    trained: list[Trained]
    counts: dict[Way, list[Counts]]

    @property
    def seconds(self) -> float:
        return float(np.mean([each.seconds for each in self.trained]))


def read_results(comparison: Comparison) -> dict[str, Result]:
    """By objective, as they were named."""
    recipes = {entrant: comparison.recipe_of(entrant) for entrant in comparison.entrants}
    trained = {entrant: read_trained(recipe) for entrant, recipe in recipes.items()}
    check_equal_tokens(trained)
    accepted = {entrant: read_all_accepted(recipe) for entrant, recipe in recipes.items()}
    results = {}
    for objective in comparison.objectives:
        own = [entrant for entrant in recipes if entrant.objective == objective]
        ways = ways_of(recipes[own[0]].eval.temperatures)
        counts = {way: [accepted[entrant][way] for entrant in own] for way in ways}
        results[objective] = Result([trained[entrant] for entrant in own], counts)
    return results


def read_all_accepted(recipe: Recipe) -> dict[Way, Counts]:
    found: dict[Way, Counts] = {}
    for budget in BUDGETS:
        of_engine = read_accepted(recipe.output_dir, budget, settings_of(recipe))
        assert of_engine is not None, f"{recipe.output_dir} was not measured at budget {budget}"
        found |= of_engine
    return found


def make_table(results: dict[str, Result]) -> Table:
    """The largest length of a column is bold; below, what the others gain over the first."""
    (first, base), *others = results.items()
    ways = list(base.counts)
    lengths = {name: [estimate(result.counts[way]) for way in ways] for name, result in results.items()}
    most = [max(each[column].value for each in lengths.values()) for column in range(len(ways))]
    table = Table("objective", *map(str, ways), "training", box=MARKDOWN)
    for name, result in results.items():
        cells = [
            f"**{each.show()}**" if each.value == best else each.show()
            for each, best in zip(lengths[name], most, strict=True)
        ]
        table.add_row(name, *cells, f"{result.seconds:,.0f} s")
    for name, result in others:
        gains = [estimate_gain(result.counts[way], base.counts[way]).show("+") for way in ways]
        table.add_row(f"{name} - {first}", *gains, "")
    return table


def tell(results: dict[str, Result], comparison: Comparison) -> dict[str, Any]:
    """For JSON: the table and all that it was made from."""
    base = results[comparison.objectives[0]]
    objectives = {
        name: {
            "trained": [asdict(each) for each in result.trained],
            "accepted": {str(way): asdict(estimate(runs)) for way, runs in result.counts.items()},
            "gained": {
                str(way): asdict(estimate_gain(runs, base.counts[way])) for way, runs in result.counts.items()
            },
            "prompts": {str(way): list(map(tell_counts, runs)) for way, runs in result.counts.items()},
        }
        for name, result in results.items()
    }
    recipe = comparison.data_recipe()
    return {
        "device": describe_device(),
        "compared_with": comparison.objectives[0],
        "seeds": list(comparison.seeds),
        "objectives": objectives,
        "recipe": recipe.model_dump(mode="json"),
        "provenance": provenance(),
    }


def describe_device() -> str:
    return (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{len(os.sched_getaffinity(0))} cores"
    )


def describe(results: dict[str, Result], comparison: Comparison, jobs: int) -> str:
    recipe, any_result = comparison.data_recipe(), next(iter(results.values()))
    num_prompts = len(next(iter(any_result.counts.values()))[0].steps_N)
    tokens = ", ".join(f"{trained.tokens:,}" for trained in any_result.trained)
    of_seeds = "" if len(comparison.seeds) == 1 else " (in brackets: over seeds)"
    seeds = ", ".join(map(str, comparison.seeds))
    return (
        f"{describe_device()}; seeds {seeds}; {recipe.train.steps:,} steps, {tokens} tokens each, {jobs}"
        f" trainings at a time; acceptance length ± standard error over {num_prompts} held-out"
        f" prompts{of_seeds}, answers of at most {recipe.eval.max_tokens} tokens"
    )


def main(
    out: Annotated[Path, Option(help="Everything goes there, and is found there again.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.field=value")] = None,
    steps: Annotated[int | None, Option(help="Of each training; left out: the recipe's.")] = None,
    prompts: Annotated[
        int | None, Option(help="That the shards are made of; left out: the recipe's.")
    ] = None,
    eval_prompts: Annotated[int, Option(help="Held-out prompts.")] = 256,
    objectives: Annotated[
        str, Option(help="The others are compared with the first; lk:eta=10 sets.")
    ] = OBJECTIVES,
    seeds: Annotated[str, Option(help="Of training, as 0,1,2; the table shows means.")] = "0",
    jobs: Annotated[int, Option(min=1, help="Trainings or engines at a time.")] = 1,
) -> None:
    """Train a drafter for each objective, and compare what the engine accepts of them."""
    sizes = {"train.steps": steps, "data.num_prompts": prompts, "eval.num_prompts": eval_prompts}
    given = [f"{field}={value}" for field, value in sizes.items() if value is not None]
    comparison = Comparison(
        out.resolve(),
        [*(overrides or []), *given],
        split(objectives),
        [read_seed(seed) for seed in split(seeds)],
    )
    console, progress = Console(width=WIDTH, highlight=False), Console(stderr=True, highlight=False)
    say = clocked(progress.print)
    check(comparison)
    run_all([data_task(comparison)], 1, say)
    run_all(list(training_tasks(comparison, jobs)), jobs, say)
    run_all(list(measuring_tasks(comparison, jobs)), jobs, say)
    results = read_results(comparison)
    write_json(comparison.out / "comparison.json", tell(results, comparison))
    console.print(describe(results, comparison, jobs), soft_wrap=True)
    console.print(make_table(results))
    progress.print(f"all of it: {comparison.out / 'comparison.json'}", soft_wrap=True)


def split(text: str) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def read_seed(text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"--seeds: expected numbers as 0,1,2, found {text!r}")
    return int(text)


def check(comparison: Comparison) -> None:
    """Raises UserError for every mistake that can be seen before anything starts."""
    if not comparison.entrants:
        raise UserError("expected an objective and a seed at least")
    for entrant in comparison.entrants:
        recipe = comparison.recipe_of(entrant)
    check_against_target(recipe)
    load_suite(recipe.eval.suite, recipe.eval.num_prompts, recipe.data)  # held out indeed


def clocked(say: Callable[[str], None]) -> Callable[[str], None]:
    since = time.monotonic()
    return lambda line: say(f"{time.monotonic() - since:6.0f} s  {line}")


if __name__ == "__main__":
    if sys.argv[1:2] == [IN_ENGINE]:
        run_command(lambda: measure_in_turn(int(sys.argv[2]), [Path(name) for name in sys.argv[3:]]))
    else:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(main)
        run_command(app)
