"""Beginning with a drafter's weights instead of chance: whether they fit the recipe, and putting them in.

Any format that `serve/formats.py` reads, with its layer ids brought to one convention there.  Only a training
that begins looks at `train.init_from`; one that goes on has its own weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from recipes.errors import UserError
from recipes.load import resolve_model
from recipes.manifest import Origin, fingerprint_files
from recipes.schema import Drafter, Recipe
from serve.checkpoint import load_target_config
from serve.drafter_config import CONFIG_NAME, SLIDING, parse_config
from serve.drafter_fit import config_differences
from serve.formats import PublishedCheckpoint, check_finite, read_checkpoint, recognise
from train.checkpoint import shape_of
from train.resume import RunFolders, find_last_pair

_WITHOUT_EFFECT = frozenset({"initializer_range", "max_position_embeddings"})
"""Fields of a drafter that change nothing in what given weights compute here."""


@dataclass(frozen=True)
class Init:
    """The weights that a training begins with."""

    origin: Origin
    checkpoint: PublishedCheckpoint

    def load_into(self, drafter: nn.Module) -> None:
        """Every parameter, one at a time, in the drafter's own precision."""
        parameters = dict(drafter.named_parameters())
        names = set(self.checkpoint.tensors)
        assert parameters.keys() == names, f"other tensors: {sorted(parameters.keys() ^ names)}"
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.checkpoint.load(name))


def check_init(recipe: Recipe) -> None:
    """Raises UserError unless a training that is about to begin can begin with `train.init_from`."""
    if find_last_pair(RunFolders(recipe.output_dir)) is None:
        init = read_init(recipe)
        if init is not None:
            check_finite(init.checkpoint)


def read_init(recipe: Recipe) -> Init | None:
    """None where the recipe names none.  No weights are loaded yet.

    Raises UserError for a folder that cannot be read as a drafter, or a drafter that is not the recipe's.
    """
    if recipe.train.init_from is None:
        return None
    folder = recipe.train.init_from.expanduser().resolve()
    checkpoint = read_checkpoint(folder)
    differences = list(_differences(checkpoint, recipe))
    if differences:
        first = f"train.init_from {folder} is another drafter than the recipe's:"
        raise UserError("\n  ".join([first, *differences]))
    files = [folder / CONFIG_NAME, *sorted(set(checkpoint.files.values()))]
    origin = Origin(
        checkpoint=str(folder), format=str(recognise(folder)), fingerprint=fingerprint_files(files)
    )
    return Init(origin, checkpoint)


def _differences(checkpoint: PublishedCheckpoint, recipe: Recipe) -> Iterator[str]:
    """One sentence for each field of the checkpoint that is not the recipe's or its target's."""
    target = load_target_config(resolve_model(recipe.target.model), recipe.target.revision)
    config = parse_config(checkpoint.config, "train.init_from")
    yield from config_differences(config, target)
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind != "default":
        yield f"rope_type is {kind!r}, only plain rotary positions are trained"
    theirs, ours = shape_of(checkpoint.config, "train.init_from"), recipe.drafter
    for name in Drafter.model_fields:
        found, asked = getattr(theirs, name), getattr(ours, name)
        if found != asked and _counts(name, ours):
            yield f"{name} is {found}, drafter.{name} is {asked}"


def _counts(name: str, drafter: Drafter) -> bool:
    has_window = name != "sliding_window" or SLIDING in drafter.layer_types
    return name not in _WITHOUT_EFFECT and has_window
