"""The whole loop of a recipe: regenerate and capture, distil, measure; in as many rounds as it says.

    deepspeed train/distill.py recipes/tiny_cpu.yaml [section.field=value ...]

Data and training that are already there are passed over, so the same command goes on after an interruption.
The engine runs in child processes, whose environment knows nothing of the launcher's ranks.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from data.rounds import read_round
from recipes.errors import MISTAKE, MachineError, UserError, run_command
from recipes.load import check_against_target, load_recipe, write_resolved
from recipes.manifest import ShardManifest, read_manifest
from recipes.plan import check_plan
from recipes.schema import Recipe
from serve.baselines import read_baselines
from serve.engine import child_environment
from train.card import add_measurement
from train.loop import Distillation, Distilled, check_split, drafter_config
from train.pairwise_companion import check_companion
from train.pulse import check_gap, draw_round, is_drawn, show_round
from train.ranks import Ranks, joined_ranks
from train.recipe_page import end_session, show_recipe
from train.resume import RunFolders, remove_leftovers
from train.rounds import DataPhase, Round, check_devices, plan_rounds
from train.warm_start import check_init

REPOSITORY = Path(__file__).resolve().parent.parent
_CHILD = Path(__file__).with_name("child.py")


def main() -> None:
    arguments = parse_arguments()
    with joined_ranks() as ranks:
        ranks.on_main(lambda: check(arguments, ranks))
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        ranks.on_main(lambda: remove_leftovers(RunFolders(recipe.output_dir)))
        ranks.on_main(lambda: show(recipe))
        distilled = take_rounds(recipe, arguments, ranks)
        is_main = ranks.is_main
    if is_main:
        measure(recipe, distilled)
        end_session(recipe)
        show_results(recipe, distilled)


def take_rounds(recipe: Recipe, arguments: argparse.Namespace, ranks: Ranks) -> Distilled:
    """Each round: the engine measures the newest drafter and makes data with it; training goes on.

    They take turns on the same devices; or, `rounds.ahead`, the next round's data is made meanwhile, with the
    drafter that this round begins with.
    """
    ahead, training = recipe.rounds.ahead, Distillation(recipe, ranks)
    drafter: Distilled | None = None
    newest: Distilled | None = None
    with DataPhase(recipe, [str(arguments.recipe), *arguments.overrides]) as data:
        for each in plan_rounds(recipe):
            ranks.on_main(partial(regenerate, recipe, arguments, data, each, drafter))
            if ahead:
                drafter = newest
                ranks.on_main(partial(order_next, recipe, data, each, drafter))
            newest = training.take(each)
            if not ahead:
                drafter = newest
                if ranks.is_on_gpu:
                    training.leave_device()
    training.leave_device()  # which the engine that measures wants
    assert newest is not None, "a recipe has at least one round"
    return newest


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Regenerate, capture, distil and measure, as a recipe says.")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument(
        "--local_rank", help=argparse.SUPPRESS
    )  # the launcher's; it also sets the environment
    return parser.parse_args()


def check(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """Everything that can be wrong with a recipe, before a model is loaded."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    check_against_target(recipe)
    drafter_config(recipe)
    check_split(recipe, ranks.world_size)
    check_init(recipe)
    check_companion(recipe)
    read_baselines(recipe.eval.baselines, recipe.target, recipe.drafter.block_size - 1)
    check_devices(recipe.rounds, ranks.gpus_here)
    check_plan(arguments.recipe, recipe)


def show(recipe: Recipe) -> None:
    """The recipe as it was resolved, for people: beside the results, and in TensorBoard."""
    write_resolved(recipe, recipe.output_dir)
    show_recipe(recipe)


def regenerate(
    recipe: Recipe,
    arguments: argparse.Namespace,
    data: DataPhase,
    which: Round,
    drafter: Distilled | None,
) -> None:
    """The data of a round, and what the engine says of the drafter that it begins with."""
    if recipe.rounds.count == 1:
        if not has_shards(recipe):
            run_child("data/regenerate.py", [str(arguments.recipe), *arguments.overrides], recipe)
        report = read_round(recipe.output_dir, which.number)
        if report is not None and not is_drawn(recipe.output_dir):  # it may have been made before
            draw_round(report, which, drafter, recipe)
        return
    if read_round(recipe.output_dir, which.number) is not None:
        return  # an earlier run made it, and showed it
    report = data.make(which.number, None if drafter is None else drafter.checkpoint)
    show_round(report, which, drafter, recipe)
    if drafter is not None:
        check_gap(report, drafter.simulated_acceptance, recipe.rounds.most_gap)


def order_next(recipe: Recipe, data: DataPhase, which: Round, drafter: Distilled | None) -> None:
    """The data of the round after this one, if there is one."""
    if which.number + 1 < recipe.rounds.count:
        data.begin(which.number + 1, None if drafter is None else drafter.checkpoint)


def has_shards(recipe: Recipe) -> bool:
    """Whether the data phase has nothing left to do or to refuse: it ended, and was asked for the same."""
    path = recipe.output_dir / "shards" / "manifest.json"
    if not path.exists():
        return False
    manifest = read_manifest(path, ShardManifest)
    asked = recipe.model_dump(mode="json")
    same = all(manifest.recipe[section] == asked[section] for section in ("target", "data"))
    return manifest.complete and same and manifest.target_layer_ids == recipe.drafter.target_layer_ids


def measure(recipe: Recipe, distilled: Distilled) -> None:
    """Leaves report.json, and its numbers on the checkpoint's card."""
    out = recipe.output_dir
    options = {
        "--ckpt": distilled.checkpoint,
        "--recipe": out / "recipe.yaml",
        "--suite": recipe.eval.suite,
        "--out": out / "report.json",
        "--tensorboard": out / "tensorboard",
        "--step": distilled.step,
        "--simulated": distilled.simulated_acceptance,
    }
    run_child("eval/measure.py", [str(word) for option in options.items() for word in option], recipe)
    add_measurement(distilled.checkpoint, out / "report.json")


def run_child(script: str, arguments: Sequence[str], recipe: Recipe) -> None:
    """Runs one of our scripts, which ends with us; its failure becomes ours, a user's mistake staying one."""
    command = [sys.executable, str(_CHILD), str(os.getpid()), str(REPOSITORY / script), *arguments]
    code = subprocess.run(command, env=child_environment(), check=False).returncode
    if code == MISTAKE:
        raise UserError(f"{script} refused, as it says above")
    if code:
        raise MachineError(f"{script} ended with code {code}, as it says above")


def show_results(recipe: Recipe, distilled: Distilled) -> None:
    out = recipe.output_dir
    report, curves = out / "report.json", out / "tensorboard"
    Console(soft_wrap=True, highlight=False).print(
        f"drafter {distilled.checkpoint}  report {report}  curves: tensorboard --logdir {curves}"
    )


if __name__ == "__main__":
    run_command(main)
