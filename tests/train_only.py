"""Distils on shards that are there already, without an engine: the middle of train/distill.py, for tests.

python train_only.py RECIPE.json
"""

import sys
from pathlib import Path

from recipes.errors import run_command
from recipes.schema import Recipe
from train.loop import distil
from train.ranks import joined_ranks


def main() -> None:
    recipe = Recipe.model_validate_json(Path(sys.argv[1]).read_text())
    with joined_ranks() as ranks:
        print("published", distil(recipe, ranks).checkpoint)


if __name__ == "__main__":
    run_command(main)
