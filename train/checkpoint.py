"""Published checkpoints: a folder that stock engines load, whole or not there at all.

`checkpoints/checkpoint-N/` holds config.json, model.safetensors (bf16), draftsmith.json, README.md and, where
a pairwise head learnt beside the drafter, `pairwise/head.safetensors`; `checkpoints/latest` points at the
newest.  What resuming needs besides is `train.resume`'s.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from recipes.errors import UserError
from recipes.manifest import CheckpointManifest, write_json, write_text
from recipes.schema import Drafter
from serve.checkpoint import read_drafter_config
from serve.drafter_config import CONFIG_NAME, expected_tensors, parse_config
from serve.pairwise import PairwiseTables, write_pairwise
from serve.plan import MANIFEST_NAME
from serve.tensor_file import sync_path
from train.card import CARD_NAME, model_card
from train.drafter import DFlashDrafter

PREFIX = "checkpoint-"
LATEST = "latest"
WEIGHTS_NAME = "model.safetensors"


def publish(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    manifest: CheckpointManifest,
    head: PairwiseTables | None = None,
) -> Path:
    """`folder`/checkpoint-STEP, complete and on the disk, and `latest` on it. Returns its path."""
    final = folder / f"{PREFIX}{manifest.step}"
    temporary = folder / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_json(temporary / CONFIG_NAME, config)
    save_file(dict(weights), temporary / WEIGHTS_NAME, metadata={"format": "pt"})
    if head is not None:
        write_pairwise(temporary, head)
    write_json(temporary / MANIFEST_NAME, manifest)
    write_text(temporary / CARD_NAME, model_card(config, manifest))
    settle(temporary, final)
    point_latest_at(final)
    return final


def settle(temporary: Path, final: Path) -> None:
    """Renames a folder once everything in it is on the disk; a folder already called `final` gives way."""
    for path in temporary.rglob("*"):
        if path.is_file():
            sync_path(path)
    sync_path(temporary)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    sync_path(final.parent)


def point_latest_at(checkpoint: Path) -> None:
    link = checkpoint.with_name(f".{LATEST}.tmp")
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint.name)
    link.replace(checkpoint.with_name(LATEST))
    sync_path(checkpoint.parent)


def published_steps(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in `folder`, ascending."""
    names = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*")]
    return sorted(int(name) for name in names if name.isdecimal())


def prune(folder: Path, keep: int, spared_step: int | None = None) -> None:
    """Removes all but the newest `keep` checkpoints and the spared one, and what an interrupted `publish` or
    `prune` left."""
    for path in folder.glob(f".{PREFIX}*.tmp"):
        shutil.rmtree(path)
    for step in set(published_steps(folder)[:-keep]) - {spared_step}:
        nameless = folder / f".{PREFIX}{step}.tmp"
        (folder / f"{PREFIX}{step}").rename(nameless)  # or half of it might be taken for a checkpoint
        shutil.rmtree(nameless)


def load_published(ckpt: Path) -> DFlashDrafter:
    """The drafter of a published checkpoint, in fp32 on the CPU.

    Raises UserError when the folder is no drafter checkpoint or its tensors are not what its config says.
    """
    config = read_drafter_config(ckpt)
    weights = load_file(ckpt / WEIGHTS_NAME)
    expected = expected_tensors(config)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise UserError(f"{ckpt}: expected {name} {expected.get(name)}, found {found.get(name)}")
    drafter = DFlashDrafter(shape_of(config, str(ckpt)), config["hidden_size"])
    drafter.load_state_dict(weights)
    return drafter


def shape_of(config: Mapping[str, Any], source: str) -> Drafter:
    """As a recipe would say it.  Raises UserError for a config.json that is none or cannot be trained."""
    parsed = parse_config(config, source)
    if parsed.is_causal is not None:
        raise UserError(
            f"{source}: is_causal is {parsed.is_causal}, which cannot be trained: its layers' kinds say it"
        )
    defaults = {
        name: field.default for name, field in Drafter.model_fields.items() if not field.is_required()
    }
    theta = parsed.rope_theta or (parsed.rope_parameters or {}).get("rope_theta")
    return Drafter(
        num_hidden_layers=parsed.num_hidden_layers,
        layer_types=parsed.resolved_layer_types(),
        sliding_window=parsed.sliding_window or defaults["max_position_embeddings"],
        block_size=parsed.block_size,
        target_layer_ids=parsed.target_layer_ids,
        mask_token_id=parsed.mask_token_id,
        intermediate_size=parsed.intermediate_size,
        num_attention_heads=parsed.num_attention_heads,
        num_key_value_heads=parsed.num_key_value_heads,
        head_dim=parsed.head_dim,
        rope_theta=theta,
        **{name: config.get(name, defaults[name]) for name in defaults if name != "rope_theta"},
    )
