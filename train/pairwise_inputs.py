"""What a pairwise head is trained on: a drafter as it was published, and text of its target in shards.

Whatever can be wrong with them is said before a weight is loaded.  Called by `train/pairwise_head.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.shards import MANIFEST_NAME, Shards, open_shards
from recipes.errors import UserError
from recipes.load import resolve_model
from recipes.manifest import Origin, ShardManifest, fingerprint_files, identify_target, read_manifest
from recipes.schema import Drafter, Pairwise, PairwiseSettings, Recipe
from serve.checkpoint import load_target_config
from serve.drafter_config import CONFIG_NAME, PublishedConfig, parse_config
from serve.drafter_fit import config_differences, refuse
from serve.formats import check_finite, read_checkpoint, recognise
from train.checkpoint import LATEST, shape_of
from train.resume import RunFolders
from train.warm_start import Init

_MOST_HELD_OUT = 0.1  # of the sequences
_HELD_OUT_STREAM = 2**31  # the same seed draws the epochs' orders, and no epoch has this number


@dataclass(frozen=True)
class Source:
    """The drafter that is upgraded."""

    folder: Path
    """Links resolved."""
    init: Init
    """Its weights, and whose they are."""
    shape: Drafter


def read_source(recipe: Recipe) -> Source:
    """Raises UserError for a folder without a drafter, and for a drafter that is another target's, sick, or
    unlike what is trained here."""
    folder = _find_drafter(recipe)
    checkpoint, layout = read_checkpoint(folder), recognise(folder)
    config = parse_config(checkpoint.config, str(folder))
    target = load_target_config(resolve_model(recipe.target.model), recipe.target.revision)
    refuse(str(folder), chain(config_differences(config, target), _untrained_positions(config)))
    check_candidates("pairwise", recipe.pairwise, target)
    check_finite(checkpoint)
    fingerprint = fingerprint_files([folder / CONFIG_NAME, *sorted(set(checkpoint.files.values()))])
    origin = Origin(checkpoint=str(folder), format=str(layout), fingerprint=fingerprint)
    return Source(folder, Init(origin, checkpoint), shape_of(checkpoint.config, str(folder)))


def _find_drafter(recipe: Recipe) -> Path:
    if recipe.pairwise.ckpt is not None:
        return recipe.pairwise.ckpt.expanduser().resolve()
    latest = RunFolders(recipe.output_dir).checkpoints / LATEST
    if not latest.is_dir():
        raise UserError(
            f"{latest}: found no drafter there: distil one with train/distill.py, or write"
            " pairwise.ckpt=FOLDER with a published drafter's"
        )
    return latest.resolve()


def _untrained_positions(config: PublishedConfig) -> Iterator[str]:
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind != "default":
        yield f"rope_type is {kind!r}, only plain rotary positions are computed in training"


def check_candidates(section: str, settings: PairwiseSettings, target: dict[str, Any]) -> None:
    """Raises UserError where the target has fewer tokens."""
    if settings.candidates > target["vocab_size"]:
        raise UserError(
            f"{section}.candidates is {settings.candidates}, the target's vocabulary has"
            f" {target['vocab_size']} tokens: lower it"
        )


def find_shards(recipe: Recipe, source: Source) -> Shards:
    """Those that are still on the disk, if rounds consumed some.

    Raises UserError where there are none, or not all yet, or of another target or other layers, or without
    the final states that the objective needs.
    """
    named = recipe.pairwise.shards
    folder = RunFolders(recipe.output_dir).shards if named is None else named.expanduser()
    if not (folder / MANIFEST_NAME).exists():
        raise UserError(
            f"{folder}: found no shards there: make them with data/regenerate.py, or write"
            " pairwise.shards=FOLDER with those of another run"
        )
    manifest = read_manifest(folder / MANIFEST_NAME, ShardManifest)
    _check_shards(recipe, source, manifest, folder)
    kept = [entry for entry in manifest.shards if not entry.is_consumed]
    with_final = recipe.pairwise.objective.needs_final_states
    return open_shards(folder, manifest.model_copy(update={"shards": kept}), with_final=with_final)


def _check_shards(recipe: Recipe, source: Source, data: ShardManifest, folder: Path) -> None:
    target = identify_target(recipe.target)
    if not data.complete:
        raise UserError(f"{folder} is not complete: run data/regenerate.py on its recipe again")
    if (data.target.fingerprint, data.target.dtype) != (target.fingerprint, target.dtype):
        raise UserError(
            f"{folder} holds the text of {data.target.model} ({data.target.dtype}), not of the recipe's"
            f" target {target.model} ({target.dtype}) as it is now: make shards with this target"
        )
    taps = source.shape.target_layer_ids
    if data.target_layer_ids != taps:
        raise UserError(
            f"{folder} was captured at layers {data.target_layer_ids}, the drafter {source.folder} reads"
            f" {taps}: make shards with drafter.target_layer_ids {taps}"
        )


@dataclass(frozen=True)
class Split:
    """Which sequences are learnt from, and which are held out.  Their numbers in the shards, ascending."""

    learnt: np.ndarray
    held_out: np.ndarray
    held_out_blocks: np.ndarray
    """Of each held-out sequence: `decoding_anchors`."""


def split_sequences(shards: Shards, settings: Pairwise) -> Split:
    """Drawn by lot.  Raises UserError where too few sequences are long enough."""
    blocks = np.array([len(decoding_anchors(loss_mask_L)) for loss_mask_L in shards.read_loss_masks()])
    drafted = blocks.nonzero()[0]
    if len(drafted) < 2:
        raise UserError(
            f"the shards hold {len(drafted)} sequences whose answer is longer than a token: make more, as one"
            " at least is held out"
        )
    drawn = np.random.default_rng([settings.seed, _HELD_OUT_STREAM]).permutation(drafted)
    enough = int(np.searchsorted(blocks[drawn].cumsum(), settings.held_out_blocks)) + 1
    held_out = np.sort(drawn[: max(1, min(enough, int(len(drafted) * _MOST_HELD_OUT)))])
    return Split(np.setdiff1d(np.arange(len(shards)), held_out), held_out, blocks[held_out])


def decoding_anchors(loss_mask_L: torch.Tensor) -> torch.Tensor:
    """Where decoding would draft: every token of an answer, which the prefill begins, but its last. int64"""
    return (loss_mask_L[:-1] & loss_mask_L[1:]).nonzero().flatten()
