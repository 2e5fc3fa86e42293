"""A target of the flagship's widths with made-up weights: to run its recipe where the real one is not.

    python tests/dummy_flagship.py FOLDER [--layers 64] [--tiny]
    deepspeed train/distill.py recipes/qwen36_dflash.yaml $(cat FOLDER/overrides) [section.field=value ...]

FOLDER holds a config, the embedded target's tokenizer with a word for every other id, and the two tensors
that a trainer reads, embedding and head; an engine makes all weights up (vLLM's load format "dummy").  Times,
memory and disk are the flagship's, texts and acceptance are nobody's.  --tiny: the embedded target's widths.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from step_time import flagship_config

from recipes.load import load_recipe

RECIPES = Path(__file__).parent.parent / "recipes"
FLAGSHIP, EMBEDDED = RECIPES / "qwen36_dflash.yaml", RECIPES / "embedded" / "target"
TOKENIZER_FILES = ("tokenizer_config.json", "chat_template.jinja")
TEMPLATE_TOKENS = 4096
"""Rows of random numbers, repeated: as good as more, and there at once."""


def write_target(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, config["vocab_size"])
    write_parts(folder, config["vocab_size"], config["hidden_size"])


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Texts are cut as the embedded target's; ids beyond it are words that no text has."""
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED / name, folder / name)
    tokenizer = json.loads((EMBEDDED / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"<{number}>": number for number in range(len(words), vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def write_parts(folder: Path, vocab_size: int, hidden_size: int) -> None:
    torch.manual_seed(0)
    rows = 0.02 * torch.randn(min(TEMPLATE_TOKENS, vocab_size), hidden_size)
    repeats = -(-vocab_size // len(rows))
    parts = {
        name: rows.roll(shift, 0).bfloat16().repeat(repeats, 1)[:vocab_size].contiguous()
        for shift, name in enumerate(("model.embed_tokens.weight", "lm_head.weight"))
    }
    save_file(parts, folder / "model.safetensors", metadata={"format": "pt"})


def list_overrides(folder: Path, num_layers: int) -> list[str]:
    """Of the flagship's recipe: the target, taps that it has, prompts at hand; and no comparison with
    a transformers model, which would need the weights."""
    taps = load_recipe(FLAGSHIP).drafter.target_layer_ids
    moved = [min(num_layers * tap // 64, num_layers - 2) for tap in taps]
    settings = {
        "target.model": folder,
        "target.load_format": "dummy",
        "drafter.target_layer_ids": json.dumps(moved, separators=(",", ":")),
        "output_dir": folder / "run",
        "data.prompts": "stdlib:train",
        "data.check_sequences": 0,
        "data.check_cosine": 0.9,
        "eval.suite": "stdlib:heldout",
    }
    return [f"{name}={value}" for name, value in settings.items()]


def main(
    folder: Path,
    layers: int = 64,
    tiny: Annotated[bool, typer.Option("--tiny", help="The embedded target's widths.")] = False,
) -> None:
    """Write the folder, and what to add to the flagship's command."""
    config = json.loads((EMBEDDED / "config.json").read_text()) if tiny else flagship_config(layers)
    write_target(folder, config | {"tie_word_embeddings": False})
    overrides = list_overrides(folder.resolve(), config["num_hidden_layers"])
    (folder / "overrides").write_text(" ".join(overrides) + "\n")
    print(*overrides, sep="\n")


if __name__ == "__main__":
    typer.run(main)
