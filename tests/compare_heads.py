"""What a pairwise head adds: chains and trees of one drafter with its head and without, in the same engines.

    python tests/compare_heads.py CKPT [--recipe RECIPE] [--budget 15] [--budget 31] [--out REPORT.json]
        [--jobs N] [section.field=value ...]

An engine for each tree budget answers the recipe's held-out prompts (eval.*), first with the head, then with
the same drafter without it, swapped in.  Runs on a CPU and on CUDA.  `eval/rows.py` draws the report.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from compare_objectives import TINY_RECIPE, begin_drafting, engine_environment, make_requests, measure
from objective_scores import Counts, Way, estimate, estimate_gain, read_counts, settings_of, tell_counts
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from typer import Option

from eval.rows import HeadsReport, MeasuredWay, PromptCounts
from recipes.errors import UserError, run_command
from recipes.load import load_recipe
from recipes.manifest import write_json
from recipes.schema import Recipe
from serve.checkpoint import read_drafter_config
from serve.drafter_config import PAIRWISE_NAME, parse_config
from serve.generation import Drafting

IN_ENGINE = "--engine"
WITH, WITHOUT = "with the head", "without"
Counted = dict[Way, dict[str, Counts]]
"""By way of decoding, then by drafter."""
Told = list[dict[str, dict[str, list[int]]]]
"""The same as JSON, in the order of `ways`."""


def main(
    ckpt: Annotated[Path, typer.Argument(help="A drafter's folder, with a head.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.field=value")] = None,
    recipe: Annotated[Path, Option(help="Whose target, engine and prompts.")] = TINY_RECIPE,
    budget: Annotated[list[int] | None, Option(help="Nodes of a tree; may be repeated.")] = None,
    out: Annotated[Path | None, Option(help="A JSON report, for eval/rows.py.")] = None,
    jobs: Annotated[
        int,
        Option(
            min=1,
            help="Engines at a time; on a GPU they share it: serve.gpu_memory_utilization must leave room.",
        ),
    ] = 1,
) -> None:
    """Measure a drafter with its pairwise head and without."""
    if not (ckpt / PAIRWISE_NAME).is_file():
        raise UserError(f"{ckpt} has no {PAIRWISE_NAME}: train one with train/pairwise_head.py")
    of_ckpt = own_recipe(load_recipe(recipe, overrides or []), ckpt)
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare"
        shutil.copytree(ckpt.resolve(), bare, ignore=shutil.ignore_patterns(PAIRWISE_NAME.parent.name))
        arguments = [str(recipe), str(ckpt.resolve()), str(bare), *(overrides or [])]
        counted = measure_all(of_ckpt, list(dict.fromkeys(budget or [15, 31, 63])), arguments, jobs)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, make_report(counted, of_ckpt, ckpt))
    Console(width=150).print(make_table(counted))


def measure_all(recipe: Recipe, budgets: Sequence[int], arguments: Sequence[str], jobs: int) -> Counted:
    """The chain in the first budget's engine.  After a failure no other engine begins."""
    environment = engine_environment(min(jobs, len(budgets)))
    pool = ThreadPoolExecutor(jobs)
    try:
        waiting = [
            pool.submit(measure_apart, [str(int(budget == budgets[0])), str(budget), *arguments], environment)
            for budget in budgets
        ]
        told = [each for done in waiting for each in done.result()]
    finally:
        pool.shutdown(cancel_futures=True)
    all_ways = [way for each in budgets for way in ways(recipe, each, with_chain=each == budgets[0])]
    return {
        way: {name: read_counts(each) for name, each in of_way.items()}
        for way, of_way in zip(all_ways, told, strict=True)
    }


def measure_apart(arguments: Sequence[str], environment: dict[str, str]) -> Told:
    """In a process with the engine's environment."""
    command = [sys.executable, __file__, IN_ENGINE, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    told: Told = json.loads(done.stdout.strip().splitlines()[-1])
    return told


def measure_in_turn(budget: int, recipe: Recipe, ckpts: Sequence[Path], *, with_chain: bool) -> Told:
    requests = make_requests(recipe)
    own_ways = list(ways(recipe, budget, with_chain=with_chain))
    told: Told = [{} for _ in own_ways]
    with tempfile.TemporaryDirectory() as spool:
        engine = None
        for name, ckpt in zip((WITH, WITHOUT), ckpts, strict=True):
            engine = begin_drafting(engine, recipe, Path(spool), Drafting(ckpt, budget))
            for way, of_way in zip(own_ways, told, strict=True):
                of_way[name] = tell_counts(measure(engine, requests, recipe, way))
    return told


def own_recipe(recipe: Recipe, ckpt: Path) -> Recipe:
    """At the drafter's own taps, whatever the recipe's are."""
    taps = parse_config(read_drafter_config(ckpt), str(ckpt)).target_layer_ids
    return recipe.model_copy(update={"drafter": recipe.drafter.model_copy(update={"target_layer_ids": taps})})


def ways(recipe: Recipe, budget: int, *, with_chain: bool) -> Iterator[Way]:
    for temperature in recipe.eval.temperatures:
        yield from [Way(temperature, None)] * with_chain
        yield Way(temperature, budget)


def make_report(counted: Counted, recipe: Recipe, ckpt: Path) -> HeadsReport:
    measured = [
        MeasuredWay(
            temperature=way.temperature,
            budget=way.budget,
            without_head=PromptCounts.model_validate(tell_counts(of_way[WITHOUT])),
            with_head=PromptCounts.model_validate(tell_counts(of_way[WITH])),
        )
        for way, of_way in counted.items()
    ]
    return HeadsReport(
        checkpoint=str(ckpt),
        recipe=recipe.name,
        target=recipe.target.model,
        settings=settings_of(recipe),
        num_prompts=len(measured[0].with_head.steps),
        chain_length=parse_config(read_drafter_config(ckpt), str(ckpt)).block_size - 1,
        ways=measured,
    )


def make_table(counted: Counted) -> Table:
    table = Table("tokens a step", WITHOUT, WITH, "gain", box=MARKDOWN)
    for way, of_way in counted.items():
        with_head, without = [of_way[WITH]], [of_way[WITHOUT]]
        gain = estimate_gain(with_head, without)
        table.add_row(str(way), estimate(without).show(), estimate(with_head).show(), gain.show("+"))
    return table


if __name__ == "__main__":
    if sys.argv[1:2] == [IN_ENGINE]:
        chain, nodes, path, head, bare, *rest = sys.argv[2:]
        of_ckpt = own_recipe(load_recipe(Path(path), rest), Path(head))
        ckpts = [Path(head), Path(bare)]
        print(json.dumps(measure_in_turn(int(nodes), of_ckpt, ckpts, with_chain=chain == "1")))
    else:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(main)
        run_command(app)
