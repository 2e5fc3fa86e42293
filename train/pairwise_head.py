"""A pairwise head for a published drafter: trains it on the target's text and puts it beside the drafter.

    python train/pairwise_head.py RECIPE [section.field=value ...]

The drafter stays as it is, bit for bit; the head scores tokens given the one before, for draft trees.  Only
reads aloud.  Run again after an interruption, it goes on from its last saved step.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recipes.errors import run_command
from recipes.load import check_against_target, load_recipe, write_resolved
from recipes.schema import Recipe
from train.pairwise_home import find_home, make_folder, publish_head
from train.pairwise_inputs import find_shards, read_source
from train.pairwise_report import acceptance_table
from train.pairwise_training import TrainedHead, train_head


def main(
    recipe_path: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.field=value")] = None,
) -> None:
    """Train a pairwise head for a drafter that stays as it is."""
    recipe = load_recipe(recipe_path, overrides or [])
    check_against_target(recipe)
    source = read_source(recipe)
    shards = find_shards(recipe, source)
    folder = recipe.output_dir / "pairwise"
    make_folder(folder)
    home = find_home(source, recipe.output_dir)
    write_resolved(recipe, folder)
    trained = train_head(recipe, source, shards, folder)
    head = publish_head(home, trained.tables, trained.manifest, folder)
    show(recipe, trained, home, head)


def show(recipe: Recipe, trained: TrainedHead, home: Path, head: Path) -> None:
    console = Console(soft_wrap=True, highlight=False)
    said = trained.manifest
    console.print(acceptance_table(said.before, said.after, recipe.pairwise.budgets))
    console.print(
        f"head {head}  serve it: python serve/run.py --ckpt {home}"
        f"  curves: tensorboard --logdir {recipe.output_dir / 'tensorboard'}"
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
