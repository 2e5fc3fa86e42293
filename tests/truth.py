"""What a user of a GPU would get: a target, its text, a drafter with a head, and what they are worth.

    python tests/truth.py recipes/hybrid_code_dflash.yaml [--minutes 25] [section.field=value ...]

Each stage is a command of this project, told as it begins; its output goes to a log.  What is there already
is not made again, so the same command goes on after an interruption.  Results: OUTPUT_DIR/truth.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from data.shards import MANIFEST_NAME
from recipes.errors import MISTAKE, MachineError, UserError, run_command
from recipes.load import load_recipe
from recipes.manifest import ShardManifest, read_manifest, write_text
from recipes.schema import Recipe
from train.resume import RunFolders

TARGETS = {
    "hybrid_code_dflash": (
        "train/code_target.py {target} --size code --steps 400 --rows 64 --chat-share 0.5"
        " --learning-rate 1.5e-3 --answer-lines 24 --files 4500 --no-tells"
    ),
    "smollm2_dflash": "train/gguf_target.py {target}",
}
"""By recipe: the command that makes its target."""
BUDGETS = 15, 31, 63
RATES = "plain", "stock", "chain", "7", "15", "31", "auto"
SHARED_GPU = ("serve.gpu_memory_utilization=0.12", "serve.kv_cache_gib=4")
LAST_LINES = 12


@dataclass(frozen=True)
class Stage:
    name: str
    command: Sequence[str]
    """A script of ours and its arguments."""
    is_done: Callable[[], bool]


def stages(path: Path, recipe: Recipe, overrides: Sequence[str]) -> Iterator[Stage]:
    """In their order."""
    out, target = recipe.output_dir / "truth", Path(recipe.target.model)
    if recipe.name in TARGETS:
        made = TARGETS[recipe.name].format(target=target).split()
        yield Stage("target", made, (target / "config.json").exists)
    given = [str(path), *overrides]
    folders = RunFolders(recipe.output_dir)
    yield Stage("text", ["data/regenerate.py", *given], partial(are_complete, folders.shards))
    ckpt = folders.checkpoint(recipe.train.steps)
    yield Stage("drafter", ["tests/train_only.py", str(resolved_path(recipe))], ckpt.exists)
    measured = [str(ckpt), "--recipe", str(path)]
    budgets = [each for budget in BUDGETS for each in ("--budget", str(budget))]
    heads = ["tests/compare_heads.py", *measured, *budgets, "--jobs", "3", "--out", str(out / "rows.json")]
    yield Stage("heads", [*heads, *overrides, *SHARED_GPU], (out / "rows.json").exists)
    drawn = ["eval/rows.py", str(out / "rows.json"), "--out", str(out / "rows.svg")]
    yield Stage("picture", drawn, (out / "rows.svg").exists)
    yield Stage("rates", rates_command(recipe, measured, overrides, out), (out / "rates.json").exists)


def rates_command(recipe: Recipe, measured: Sequence[str], overrides: Sequence[str], out: Path) -> list[str]:
    budgets = [each for budget in RATES for each in ("--budget", budget)]
    degrees = [
        each for temperature in recipe.eval.temperatures for each in ("--temperature", str(temperature))
    ]
    settings = [*budgets, *degrees, "--prompts", "16", "--repeats", "1"]
    places = ["--out", str(out / "rates.json"), f"serve.step_costs={out / 'step_costs.json'}"]
    return ["tests/budget_rates.py", *measured, *settings, *overrides, *SHARED_GPU, *places]


def resolved_path(recipe: Recipe) -> Path:
    return recipe.output_dir / "truth" / "recipe.json"


def are_complete(shards: Path) -> bool:
    path = shards / MANIFEST_NAME
    return path.exists() and read_manifest(path, ShardManifest).complete


def main(
    recipe_path: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.field=value")] = None,
    minutes: Annotated[
        float, Option(help="After as many no other stage begins, and a running one ends.")
    ] = 25,
) -> None:
    """Make a target and a drafter for it, and measure what they are worth."""
    given = overrides or []
    recipe = load_recipe(recipe_path, given)
    resolved_path(recipe).parent.mkdir(parents=True, exist_ok=True)
    write_text(resolved_path(recipe), recipe.model_dump_json() + "\n")
    end = time.monotonic() + minutes * 60
    console = Console(soft_wrap=True, highlight=False)
    for stage in stages(recipe_path, recipe, given):
        if stage.is_done():
            console.print(f"{stage.name}: there already")
        else:
            take(stage, recipe, end, console)
    console.print(f"results {resolved_path(recipe).parent}")


def take(stage: Stage, recipe: Recipe, end: float, console: Console) -> None:
    """Raises UserError or MachineError, as the stage does, and where the time is over."""
    log = resolved_path(recipe).with_name(f"{stage.name}.log")
    console.print(f"{stage.name}: python {' '.join(stage.command)}")
    began = time.monotonic()
    if began >= end:
        raise MachineError(f"the time is over before {stage.name}: raise --minutes, and run this again")
    code = run(stage.command, log, end - began)
    console.print(*log.read_text(errors="replace").splitlines()[-LAST_LINES:], sep="\n")
    if code is None:
        raise MachineError(f"{stage.name} was not done in time ({log}): raise --minutes, and run this again")
    if code:
        failure = UserError if code == MISTAKE else MachineError
        raise failure(f"{stage.name} ended with code {code}: {log}")
    console.print(f"{stage.name}: {time.monotonic() - began:.0f} s")


def run(command: Sequence[str], log: Path, seconds: float) -> int | None:
    """The exit code; None where it took longer.  In a group of its own, so that all of it ends."""
    repository = Path(__file__).parent.parent
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=out, stderr=out, cwd=repository, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
