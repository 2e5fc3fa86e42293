"""A training small enough for tests: what it reads of a target, a drafter, and sequences that fit them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from data.shards import Sequence, ShardWriter, write_shard_file
from recipes.manifest import ShardManifest, identify_target, provenance
from recipes.schema import Drafter, Recipe
from train.tiles import Stack, Tiling

HIDDEN, VOCAB, TARGET_LAYERS, MASK_ID = 32, 96, 4, 95
DRAFTER = Drafter(
    num_hidden_layers=3,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    sliding_window=6,
    block_size=4,
    target_layer_ids=[0, 2],
    mask_token_id=MASK_ID,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=1e4,
    max_position_embeddings=8192,
    initializer_range=0.1,
)
TAPS_SIZE = len(DRAFTER.target_layer_ids) * HIDDEN


def write_target(folder: Path, seed: int = 0) -> Path:
    """config.json, an embedding and a head: all that training reads of a target."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    config = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": TARGET_LAYERS,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = ("model.embed_tokens.weight", "lm_head.weight")
    weights = {name: torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16() for name in names}
    save_file(weights, folder / "model.safetensors")
    return folder


def small_recipe(output_dir: Path, target: Path, **train: object) -> Recipe:
    settings = {
        "steps": 12,
        "sequences_per_step": 4,
        "micro_batch_sequences": 2,
        "num_anchors": 5,
        "precision": "float32",
        "optimizer": {"learning_rate": 3e-3},
        "log_every_steps": 1,
    }
    return Recipe.model_validate(
        {
            "name": "small",
            "output_dir": output_dir,
            "target": {"model": str(target)},
            "drafter": DRAFTER.model_dump(),
            "data": {
                "prompts": "stdlib:train",
                "num_prompts": 1,
                "max_prompt_tokens": 16,
                "sampling": {"max_tokens": 24},
            },
            "train": settings | train,
            "eval": {"suite": "stdlib:heldout"},
        }
    )


def make_sequence(index: int, num_tokens: int = 0, *, with_final: bool = False) -> Sequence:
    """A prompt and a response whose next token mostly follows from the last; seeded by `index`.

    with_final: with final states, which know nothing of that.
    """
    generator = torch.Generator().manual_seed(1000 + index)
    length = num_tokens or int(torch.randint(12, 37, (1,), generator=generator))
    jumps = torch.randint(0, 8, (length,), generator=generator)
    tokens = [int(jumps[0]) + 2]
    for jump in jumps[1:].tolist():
        tokens.append((tokens[-1] * 5 + (jump == 0)) % 90 + 2)
    loss_mask = torch.zeros(length, dtype=torch.bool)
    loss_mask[length // 3 :] = True
    taps = torch.randn(length - 1, TAPS_SIZE, generator=generator).bfloat16()
    final = torch.randn(length - 1, HIDDEN, generator=generator).bfloat16() if with_final else None
    return Sequence(torch.tensor(tokens, dtype=torch.int32), loss_mask, taps, final)


def manifest_of(recipe: Recipe) -> ShardManifest:
    """Of shards that are to come."""
    return ShardManifest(
        target=identify_target(recipe.target),
        recipe=recipe.model_dump(mode="json"),
        provenance=provenance(),
        target_layer_ids=recipe.drafter.target_layer_ids,
        hidden_size=HIDDEN,
        dtype="bfloat16",
        final_states=recipe.data.final_states,
        shards=[],
        dropped={},
        complete=False,
    )


def write_shards(recipe: Recipe, num_sequences: int) -> None:
    """Two shards, as the data phase would leave them."""
    writer = ShardWriter(recipe.output_dir / "shards", manifest_of(recipe))
    with_final = recipe.data.final_states
    sequences = [make_sequence(index, with_final=with_final) for index in range(num_sequences)]
    halves = sequences[: num_sequences // 2], sequences[num_sequences // 2 :]
    for number, half in enumerate(halves):
        prompt_ids = [f"prompt-{index}" for index in range(len(half))]
        writer.add(write_shard_file(recipe.output_dir / "shards", number, half, prompt_ids))
    writer.finish(dropped={})


def untiled(mask: torch.Tensor) -> Tiling:
    """One dense tile that covers everything: `mask` is [Q, S + Q]."""
    rows, keys = (torch.arange(size) for size in mask.shape)
    return Tiling([Stack(rows[None], keys[None], mask[None])], rows)
