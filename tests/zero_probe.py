"""Bytes that DeepSpeed holds of a parameter, one line of JSON for each setting; a process of its own.

    python tests/zero_probe.py FOLDER < SETTINGS

A setting is a line {"zero_stage": 2, ...} of recipe fields under train.  One rank, so nothing is divided.
"""

import gc
import json
import sys
from pathlib import Path

import torch

from recipes.schema import Recipe
from recipes.train_footprint import BUCKET_ELEMENTS
from tests.small_training import HIDDEN, small_recipe
from train.batches import worst_case_batch
from train.loop import start_learner
from train.ranks import Ranks, joined_ranks
from train.zero import take_step

WIDE = {"intermediate_size": 4000}
"""So that nothing but parameters counts."""
BUCKETS = {BUCKET_ELEMENTS * size for size in (2, 4)}


def measure(recipe: Recipe, ranks: Ranks) -> float:
    """Between a backward pass and its step, and with everything that earlier steps made."""
    gc.collect()
    before = find_storages().keys()
    learner = start_learner(recipe, ranks)
    batch = learner.sender.send(worst_case_batch(1, 12, 3, recipe.drafter, HIDDEN)).receive()
    learner.engine.backward(learner._score(batch).loss_sum)
    take_step(learner.engine, 1e-4)
    learner.engine.backward(learner._score(batch).loss_sum)
    gc.collect()
    held = sum(size for key, size in find_storages().items() if key not in before and size not in BUCKETS)
    parameters = sum(getattr(each, "ds_numel", each.numel()) for each in learner.engine.module.parameters())
    parts = learner.parts.embedding_VD, learner.parts.head_VD
    return (held - sum(part.nbytes for part in parts)) / parameters


def find_storages() -> dict[int, int]:
    """Of all tensors on the CPU: key -> bytes."""
    sizes = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.device.type == "cpu":
            for tensor in (each, each.grad):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    sizes[storage._cdata] = storage.nbytes()
    return sizes


def main() -> None:
    folder = Path(sys.argv[1])
    with joined_ranks() as ranks:
        for line in sys.stdin:
            recipe = small_recipe(folder, folder / "target", **json.loads(line))
            drafter = recipe.drafter.model_copy(update=WIDE)
            print(json.dumps(measure(recipe.model_copy(update={"drafter": drafter}), ranks)), flush=True)


if __name__ == "__main__":
    main()
