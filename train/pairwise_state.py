"""Stopping and going on: a head's training in one small file, whole or not there, and whose it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.errors import UserError
from recipes.manifest import provenance
from serve.tensor_file import sync_path
from train.pairwise_learner import HeadLearner
from train.pairwise_manifest import HeadOrigin
from train.resume import read_written_recipe

FREE_FIELDS = frozenset(
    {"ckpt", "shards", "steps", "save_every_steps", "log_every_steps", "micro_batch_sequences", "budgets"}
)
"""What of `pairwise` may change when a training goes on: paths, since fingerprints say what lies there, and
what changes nothing of what is learnt, but for the rates to come."""


@dataclass(frozen=True)
class StateFile:
    path: Path
    origin: HeadOrigin
    """Of this training, as it begins."""

    def save(self, learner: HeadLearner, step: int) -> None:
        """In place of the last."""
        manifest = self.origin.model_copy(update={"step": step, "provenance": provenance()})
        content = {
            "manifest": manifest.model_dump_json(),
            "head": learner.head.state_dict(),
            "optimizer": learner.optimizer.state_dict(),
        }
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        torch.save(content, temporary)
        sync_path(temporary)
        temporary.replace(self.path)
        sync_path(self.path.parent)

    def load_into(self, learner: HeadLearner) -> int:
        """The steps taken so far.  Raises UserError for the state of another training."""
        if not self.path.exists():
            return 0
        content = torch.load(self.path, map_location="cpu", weights_only=True)
        state = HeadOrigin.model_validate_json(content["manifest"])
        self._check_same(state)
        learner.head.load_state_dict(content["head"])
        learner.optimizer.load_state_dict(content["optimizer"])
        return state.step

    def _check_same(self, state: HeadOrigin) -> None:
        differences = list(_differences(state, self.origin, read_written_recipe(state.recipe, self.path)))
        if differences:
            first = f"{self.path} is the state of another training of a head:"
            last = "set it back to go on, name another output_dir, or remove the file to begin again"
            raise UserError("\n  ".join([first, *differences, last]))


def _differences(was: HeadOrigin, now: HeadOrigin, recipe: dict[str, Any]) -> Iterator[str]:
    if (was.target.fingerprint, was.target.dtype) != (now.target.fingerprint, now.target.dtype):
        yield f"its target is {was.target.model} ({was.target.dtype}) with other files or precision"
    if was.drafter.fingerprint != now.drafter.fingerprint:
        yield f"its drafter was {was.drafter.checkpoint}, now it is {now.drafter.checkpoint}"
    if was.shards != now.shards:
        yield "its shards were others"
    settings = recipe["pairwise"], now.recipe["pairwise"]
    for field in sorted(settings[1].keys() - FREE_FIELDS):
        if settings[0][field] != settings[1][field]:
            yield f"pairwise.{field} was {settings[0][field]}, the recipe says {settings[1][field]}"
    precisions = recipe["train"]["precision"], now.recipe["train"]["precision"]
    if precisions[0] != precisions[1]:
        yield f"train.precision was {precisions[0]}, the recipe says {precisions[1]}"
