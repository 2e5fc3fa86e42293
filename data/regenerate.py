"""The data phase of a recipe: prompts -> the target's own answers and tap states -> shards.

    python data/regenerate.py RECIPE [section.field=value ...]

Only reads aloud.  Run again after an interruption, it goes on after the last complete shard.
"""

from pathlib import Path
from typing import Annotated

import typer

from data.filling import fill_shards
from data.outcome import show_outcome, show_skips
from data.shard_plan import make_plan
from recipes.errors import run_command
from recipes.load import check_against_target, load_recipe, write_resolved
from serve.engine import enter_environment


def main(
    recipe_path: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.field=value")] = None,
) -> None:
    """Have the target answer a recipe's prompts, and keep its text and its hidden states."""
    recipe = load_recipe(recipe_path, overrides or [])
    check_against_target(recipe)
    enter_environment()
    write_resolved(recipe, recipe.output_dir)
    plan = make_plan(recipe)
    show_skips(plan)
    tally = fill_shards(plan)
    show_outcome(plan, tally)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
