"""What tests of a head trained on a frozen drafter run and look into; no test."""

from pathlib import Path

import torch
from small_training import small_recipe, write_shards

from recipes.load import write_resolved
from recipes.schema import Recipe
from serve.drafter_config import PAIRWISE_NAME
from train import pairwise_head
from train.pairwise import DraftedBlocks, PairwiseHead
from train.pairwise_inputs import find_shards, read_source, split_sequences
from train.pairwise_learner import HeadLearner, begin_head
from train.pairwise_training import feed_of, load_frozen
from train.target_parts import load_target_parts

NUM_SEQUENCES = 24
SETTINGS = {
    "rank": 5,
    "candidates": 7,
    "steps": 4,
    "sequences_per_step": 4,
    "micro_batch_sequences": 2,
    "num_anchors": 5,
    "budgets": [3, 9],
    "save_every_steps": 2,
    "log_every_steps": 1,
    "objective": {"kind": "cross_entropy", "decay": 2.5},
    "seed": 3,  # not that of `train`
}


def recipe_for(target: Path, ckpt: Path, folder: str = "run", **pairwise) -> Recipe:
    """Its shards are there, with final states where the objective needs them."""
    given = small_recipe(target.parent / folder, target).model_dump(mode="json")
    settings = SETTINGS | {"ckpt": str(ckpt)} | pairwise
    given["data"]["final_states"] = settings["objective"]["kind"] == "kl"
    recipe = Recipe.model_validate(given | {"pairwise": settings})
    if not (recipe.output_dir / "shards").exists():
        write_shards(recipe, NUM_SEQUENCES)
    return recipe


def run(recipe: Recipe, *overrides: str) -> Path:
    """The whole command.  The drafter's folder, with its head."""
    write_resolved(recipe, recipe.output_dir.with_name("recipes") / recipe.output_dir.name)
    path = recipe.output_dir.with_name("recipes") / recipe.output_dir.name / "recipe.yaml"
    pairwise_head.main(path, list(overrides))
    return recipe.output_dir / "drafter"


def head_bytes(home: Path) -> bytes:
    return (home / PAIRWISE_NAME).read_bytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Workbench:
    """What the command puts together, for a look inside."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        source = read_source(recipe)
        self.shards = find_shards(recipe, source)
        self.parts = load_target_parts(recipe.target)
        self.frozen = load_frozen(recipe, source, self.parts)
        self.split = split_sequences(self.shards, recipe.pairwise)
        self.feed = feed_of(recipe, source, self.shards, self.split)
        self.head = begin_head(self.parts, recipe.pairwise).head

    def scatter_head(self) -> PairwiseHead:
        """As if it had learnt something."""
        for parameter in self.head.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        return self.head

    def train_head(self, steps: int = 40) -> PairwiseHead:
        learner = HeadLearner(self.head, torch.optim.AdamW(self.head.parameters()), self.recipe.pairwise)
        for step in range(steps):
            learner.learn(self.draft_step(step), 2e-2)
        return self.head

    def draft_step(self, step: int) -> list[DraftedBlocks]:
        return [self.frozen.draft(micro.batch) for micro in self.feed.read_step(step)]
