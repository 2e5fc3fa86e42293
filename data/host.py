"""Keeps the data phase's engines over the rounds of a loop: swaps drafters, takes pulses, makes shards.

On a GPU, which the trainer needs between the rounds, they are started again for each.

    python data/host.py RECIPE [section.field=value ...] --parent PID < ORDERS

An order is a line {"round": 1, "checkpoint": FOLDER or null}.  It is done once rounds/round-N.json is there;
what was done before an interruption is not done again.  Ends with its input.  Called by `train/rounds.py`.
"""

import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from transformers import AutoTokenizer

from data.engines import Engine, Measurement, Swap, running_engines, share_out, tell_all
from data.filling import Tally, make_shards, report_round
from data.groups import Rendered, render
from data.prompts import load_prompts
from data.rounds import check_shares, read_round, share_shards, write_round
from data.shard_plan import ShardPlan, make_plan
from recipes.errors import run_command
from recipes.load import load_recipe, resolve_model
from recipes.manifest import Pulse
from recipes.schema import Recipe, Sampling
from serve.engine import enter_environment, is_cuda
from serve.generation import Drafting
from serve.lifetime import follow_parent


class Order(BaseModel):
    round: int
    checkpoint: str | None


def main(
    recipe_path: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.field=value")] = None,
    parent: Annotated[int | None, typer.Option(help="The process whose end ends this one.")] = None,
) -> None:
    """Do the data phase of one round after the other, as they are ordered."""
    if parent is not None:
        follow_parent(parent)
    enter_environment()
    plan = make_plan(load_recipe(recipe_path, overrides or []))
    check_shares(len(plan.groups), plan.recipe.rounds)
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(plan))
        for line in sys.stdin:
            take_round(plan, fleet, Order.model_validate_json(line))


def take_round(plan: ShardPlan, fleet: "Fleet", order: Order) -> None:
    recipe = plan.recipe
    if read_round(recipe.output_dir, order.round) is not None:
        return
    if recipe.data.policy == "rolling":
        plan.writer.consume_before(order.round)  # which were trained on, or this round would not be ordered
    shares = share_shards(len(plan.groups), recipe.rounds)
    missing = [number for number in plan.find_missing() if number in shares[order.round]]
    pulses: list[Pulse] = []
    pulse_seconds = None
    tally = Tally()
    if missing or order.checkpoint is not None:
        engines = fleet.drafting_with(order.checkpoint)
        if order.checkpoint is not None:
            start = time.monotonic()
            pulses = take_pulses(recipe, engines)
            pulse_seconds = time.monotonic() - start
        make_shards(plan, engines, missing, tally, order.round)
    if order.round == recipe.rounds.count - 1:
        plan.finish()
    if is_cuda():
        fleet.stop()  # before the report: with it the GPUs are the trainer's
    report = report_round(plan, order.round, tally, num_made=len(missing))
    of_drafter = {
        "checkpoint": order.checkpoint,
        "pulses": pulses,
        "swap_seconds": fleet.swap_seconds,
        "pulse_seconds": pulse_seconds,
    }
    write_round(recipe.output_dir, report.model_copy(update=of_drafter))


def take_pulses(recipe: Recipe, engines: list[Engine]) -> list[Pulse]:
    """Chain and trees at each of eval's temperatures, on the first held-out prompts."""
    prompts = _pulse_prompts(recipe)
    jobs = [
        Measurement(prompts, Sampling(temperature=temperature, max_tokens=recipe.eval.max_tokens), is_chain)
        for temperature in recipe.eval.temperatures
        for is_chain in (True, False)
    ]
    done = [event for event in share_out(engines, jobs) if isinstance(event, Pulse)]
    return sorted(
        done, key=lambda pulse: (recipe.eval.temperatures.index(pulse.temperature), not pulse.is_chain)
    )


def _pulse_prompts(recipe: Recipe) -> list[Rendered]:
    target = recipe.target
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(target.model), revision=target.revision)
    return render(load_prompts(recipe.eval.suite, recipe.rounds.pulse_prompts), tokenizer)


class Fleet:
    """The engines: none at first, plain ones in the first round, drafting ones from then on."""

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan
        self._engines: list[Engine] = []
        self._stack = ExitStack()
        self._are_drafting = False
        self.swap_seconds: float | None = None
        """Of the newest round's swap; None where its engines were started instead."""

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)
        shutil.rmtree(self._plan.spool, ignore_errors=True)

    def drafting_with(self, checkpoint: str | None) -> list[Engine]:
        """Engines that draft with this checkpoint, or plain ones; those there are, where that can be."""
        self.swap_seconds = None
        if self._are_drafting and checkpoint is not None:
            start = time.monotonic()
            tell_all(self._engines, Swap(Path(checkpoint)))
            self.swap_seconds = time.monotonic() - start
        elif not self._engines or checkpoint is not None:
            self._restart(checkpoint)
        return self._engines

    def stop(self) -> None:
        self._stack.close()
        self._engines, self._are_drafting = [], False

    def _restart(self, checkpoint: str | None) -> None:
        """A plain engine has no place for a drafter: other graphs, other caches."""
        self.stop()
        recipe = self._plan.recipe
        drafting = None if checkpoint is None else Drafting(Path(checkpoint), recipe.rounds.budget)
        running = running_engines(recipe, self._plan.folder, self._plan.spool, recipe.data.engines, drafting)
        self._engines = self._stack.enter_context(running)
        self._are_drafting = drafting is not None


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
