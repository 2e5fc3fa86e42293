"""Keeps the data phase's engines over the rounds of a loop: swaps drafters, takes pulses, makes shards.

GPUs that the trainer needs between the rounds are left to it: drafting engines sleep, plain ones end.

    python data/host.py RECIPE [section.field=value ...] --parent PID < ORDERS

An order is a line {"round": 1, "checkpoint": FOLDER or null}.  It is done once rounds/round-N.json is there;
what was done before an interruption is not done again.  Ends with its input.  Called by `train/rounds.py`.
"""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from data.engines import Command, Engine, Measurement, Swap, running_engines, share_out, tell_all
from data.filling import Tally, make_shards, report_round
from data.groups import Rendered
from data.outcome import show_skips
from data.prompts import load_suite_prompts
from data.render import load_chat_template
from data.rounds import check_shares, read_round, share_shards, write_round
from data.shard_plan import ShardPlan, make_plan
from recipes.errors import run_command
from recipes.load import load_recipe
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
    show_skips(plan)
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
        plan.writer.consume_before(order.round - 1 if recipe.rounds.ahead else order.round)
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
    is_last = order.round == recipe.rounds.count - 1
    if is_last:
        plan.finish()
    fleet.leave_gpus(for_good=is_last)  # before the report: with it they are the trainer's
    report = report_round(plan, order.round, tally, num_made=len(missing))
    of_drafter = {"checkpoint": order.checkpoint, "pulses": pulses, "pulse_seconds": pulse_seconds}
    write_round(recipe.output_dir, report.model_copy(update=of_drafter | fleet.tell_seconds()))


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
    """As the measured server is asked them."""
    template, thinking = load_chat_template(recipe.target), recipe.eval.thinking
    prompts = load_suite_prompts(recipe.eval.suite, recipe.rounds.pulse_prompts, recipe.data)
    return [Rendered(each.id, template.render(each.messages, each.tools, thinking)) for each in prompts]


class Fleet:
    """The engines: none at first, plain ones in the first round, drafting ones from then on."""

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan
        self._engines: list[Engine] = []
        self._stack = ExitStack()
        self._are_drafting = self._are_asleep = False
        self._seconds: dict[str, float] = {}

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)
        shutil.rmtree(self._plan.spool, ignore_errors=True)

    def tell_seconds(self) -> dict[str, float]:
        """Since it was last asked: "start_seconds", "wake_seconds", "swap_seconds" and "sleep_seconds"."""
        told, self._seconds = self._seconds, {}
        return told

    def drafting_with(self, checkpoint: str | None) -> list[Engine]:
        """Engines that draft with this checkpoint, or plain ones; those there are, where that can be."""
        if self._are_drafting and checkpoint is not None:
            if self._are_asleep:
                self._tell_all("wake", Command.WAKE)
                self._are_asleep = False
            self._tell_all("swap", Swap(Path(checkpoint)))
        elif not self._engines or checkpoint is not None:
            self._restart(checkpoint)
        return self._engines

    def leave_gpus(self, *, for_good: bool) -> None:
        """To the trainer, where it shares them."""
        rounds = self._plan.recipe.rounds
        if not is_cuda() or (rounds.ahead and not for_good):
            return
        if self._are_drafting and rounds.engines_sleep and not for_good:
            self._tell_all("sleep", Command.SLEEP)
            self._are_asleep = True
        else:
            self._stop()

    def _stop(self) -> None:
        self._stack.close()
        self._engines, self._are_drafting, self._are_asleep = [], False, False

    def _restart(self, checkpoint: str | None) -> None:
        """A plain engine has no place for a drafter: other graphs, other caches."""
        self._stop()
        recipe = self._plan.recipe
        drafting = None if checkpoint is None else Drafting(Path(checkpoint), recipe.rounds.budget)
        with self._timed("start"):
            running = running_engines(
                recipe, self._plan.folder, self._plan.spool, recipe.data.engines, drafting
            )
            self._engines = self._stack.enter_context(running)
            tell_all(self._engines, Command.GREET)
        self._are_drafting = drafting is not None

    def _tell_all(self, what: str, job: Swap | Command) -> None:
        with self._timed(what):
            tell_all(self._engines, job)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._seconds[f"{what}_seconds"] = time.monotonic() - start


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
