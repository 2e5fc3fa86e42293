"""Another drafter for an engine that runs: what it may differ in from the one that is served.

The engine's graphs, cache layout and taps were made for the drafter it started with, so a replacement has its
config; only weights change.  All of it is read and checked before the first weight is written.  Called in the
workers (`serve.seam.swapping`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from recipes.manifest import CheckpointManifest, read_manifest
from serve.checkpoint import check_checkpoint, read_drafter_config
from serve.drafter_config import PublishedConfig, parse_config
from serve.drafter_fit import refuse
from serve.format_tensors import MASK_EMBEDDING_NAME
from serve.plan import MANIFEST_NAME
from serve.served import Served

_FREE_KEYS = {"architectures", "dtype", "num_target_layers", "layer_types", "rope_theta", "rope_parameters"}


def read_replacement(ckpt: Path, served: Served) -> dict[str, torch.Tensor]:
    """Name -> tensor of a checkpoint that the engine can take, in host memory.

    Raises UserError, with all that speaks against it, otherwise.
    """
    check_checkpoint(ckpt, served.target, served.revision)
    refuse(str(ckpt), _differences(ckpt, served))
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(ckpt.glob("*.safetensors")):
        tensors |= load_file(path)
    refuse(str(ckpt), _not_finite(tensors))
    return tensors


def _differences(ckpt: Path, served: Served) -> Iterator[str]:
    manifest = ckpt / MANIFEST_NAME
    if served.fingerprint is not None and manifest.is_file():
        made_for = read_manifest(manifest, CheckpointManifest).target
        if made_for.fingerprint != served.fingerprint:
            yield f"it was made for {made_for.model} ({made_for.fingerprint[:12]}), another target"
    if (ckpt / MASK_EMBEDDING_NAME).exists():
        yield f"it brings a {MASK_EMBEDDING_NAME}, which a running engine does not read"
    ours = _shape_of(parse_config(served.config, "the drafter in use"))
    for key, theirs in _shape_of(parse_config(read_drafter_config(ckpt), str(ckpt))).items():
        if theirs != ours[key]:
            yield f"{key} is {theirs}, the engine was started for {ours[key]}: start another server"


def _shape_of(config: PublishedConfig) -> dict[str, Any]:
    """What an engine builds on: every key but those of which a file may say the same in other words."""
    theta = config.rope_theta or (config.rope_parameters or {}).get("rope_theta")
    fixed = config.model_dump(exclude=_FREE_KEYS)
    return fixed | {"layer_types": config.resolved_layer_types(), "rope_theta": theta}


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        count = int((~tensor.isfinite()).sum())
        if count:
            yield f"{name} has {count} values that are not finite"
