"""Untrained drafter checkpoints in the published format, for tests that need one to serve or to break."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from recipes.load import load_recipe
from recipes.schema import Recipe
from serve.checkpoint import expected_tensors, load_target_config, published_config

REPOSITORY = Path(__file__).parent.parent
TINY_RECIPE = REPOSITORY / "recipes" / "tiny_cpu.yaml"
EMBEDDED_TARGET = REPOSITORY / "recipes" / "embedded" / "target"


def tiny_recipe(*overrides: str) -> Recipe:
    """The demo's, in one round unless an override says otherwise."""
    return load_recipe(TINY_RECIPE, ["rounds.count=1", "rounds.first_share=null", *overrides])


def tiny_config() -> dict[str, Any]:
    return published_config(tiny_recipe().drafter, load_target_config(str(EMBEDDED_TARGET)))


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Norms near 1, matrices scaled so that activations keep their size; bf16."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        value = 1 + 0.1 * noise if len(shape) == 1 else noise * shape[1] ** -0.5
        weights[name] = value.to(torch.bfloat16)
    return weights


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def write_random_drafter(folder: Path, seed: int = 0) -> Path:
    """A drafter of the demo's shape for the embedded target, with seeded random weights."""
    config = tiny_config()
    return write_checkpoint(folder, config, random_weights(config, seed))
