"""Untrained drafters for `small_training`'s target."""

from pathlib import Path

from drafters import random_weights, write_checkpoint
from small_training import DRAFTER, HIDDEN, TARGET_LAYERS, VOCAB

from recipes.schema import Drafter
from serve.checkpoint import published_config


def write_drafter(
    folder: Path, drafter: Drafter = DRAFTER, seed: int = 0, hidden_size: int = HIDDEN, **changes: object
) -> Path:
    """In the published format; `changes` of its config.json."""
    target = {"hidden_size": hidden_size, "vocab_size": VOCAB, "num_hidden_layers": TARGET_LAYERS}
    config = published_config(drafter, target)
    return write_checkpoint(folder, config | changes, random_weights(config, seed))
