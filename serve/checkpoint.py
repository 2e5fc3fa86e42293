"""Drafter checkpoints: the config.json that the trainer writes, and the check that a folder fits a target.

Reads JSON and safetensors headers, never a weight; needs neither torch nor an engine.  Called by the trainer
(`published_config`, `expected_tensors`) and by the server (`check_checkpoint`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import UserError
from recipes.schema import Drafter, LayerType
from recipes.target_config import find_config
from serve.drafter_config import (
    ARCHITECTURE,
    CONFIG_NAME,
    PAIRWISE_NAME,
    SLIDING,
    PublishedConfig,
    Shapes,
    expected_tensors,
    pairwise_tensors,
    parse_config,
)
from serve.drafter_fit import STORED_DTYPES, config_differences, refuse, tensor_differences
from serve.headers import read_file_headers, read_headers, read_json

__all__ = ["DrafterSummary", "check_checkpoint", "expected_tensors", "load_target_config", "published_config"]


@dataclass(frozen=True)
class DrafterSummary:
    """What a checked drafter is; everything that a server or a report says about it."""

    block_size: int
    """The anchor and block_size - 1 drafts."""
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None
    mask_token_id: int
    hidden_size: int
    num_parameters: int
    dtype: str
    pairwise_rank: int | None
    """Of its pairwise head, if it has one (`serve.pairwise`)."""


def load_target_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """The target's language-model config: `text_config` where a vision wrapper has one.

    `model` is a folder or a hub name.  Raises UserError when there is no config.json.
    """
    return text_config(read_json(find_config(model, revision)))


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(config.get("text_config", config))


def published_config(drafter: Drafter, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a drafter for this target.  Raises UserError when the two do not fit."""
    target = text_config(target_config)
    config = _shape_keys(drafter, target) | _attention_keys(drafter) | _token_keys(drafter, target)
    refuse("drafter", config_differences(parse_config(config, "drafter"), target))
    return config


def _shape_keys(drafter: Drafter, target: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": drafter.block_size,
        "hidden_size": target["hidden_size"],
        "intermediate_size": drafter.intermediate_size,
        "num_hidden_layers": drafter.num_hidden_layers,
        "num_target_layers": target["num_hidden_layers"],
        "hidden_act": "silu",
        "rms_norm_eps": drafter.rms_norm_eps,
        "initializer_range": drafter.initializer_range,
    }


def _attention_keys(drafter: Drafter) -> dict[str, Any]:
    return {
        "num_attention_heads": drafter.num_attention_heads,
        "num_key_value_heads": drafter.num_key_value_heads,
        "head_dim": drafter.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": list(drafter.layer_types),
        "sliding_window": drafter.sliding_window,
        "use_sliding_window": SLIDING in drafter.layer_types,
        "max_window_layers": drafter.num_hidden_layers,
        "max_position_embeddings": drafter.max_position_embeddings,
        # both, as transformers 4 reads the first and 5 the second; vLLM assumes 1e6 where it finds neither
        "rope_theta": drafter.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": drafter.rope_theta},
    }


def _token_keys(drafter: Drafter, target: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": target["vocab_size"],
        "bos_token_id": None,
        "eos_token_id": target.get("eos_token_id"),
        "pad_token_id": target.get("pad_token_id"),
        "tie_word_embeddings": False,
        "dflash_config": {
            "mask_token_id": drafter.mask_token_id,
            "target_layer_ids": list(drafter.target_layer_ids),
        },
    }


def check_checkpoint(ckpt: Path, target_model: str, revision: str | None = None) -> DrafterSummary:
    """Compares a drafter's config and every tensor's name, shape and dtype with what its target needs.

    `target_model` is a folder or a hub name.  Raises UserError that names the first differences.
    """
    raw = read_drafter_config(ckpt)
    config = parse_config(raw, str(ckpt))
    refuse(str(ckpt), config_differences(config, load_target_config(target_model, revision)))
    found, expected = read_headers(ckpt), expected_tensors(raw)
    refuse(str(ckpt), tensor_differences(found, expected, STORED_DTYPES[config.dtype]))
    return _summarize(config, expected, _find_pairwise_rank(ckpt, config))


def read_drafter_config(ckpt: Path) -> dict[str, Any]:
    if not (ckpt / CONFIG_NAME).is_file():
        hint = f"; did you mean {ckpt / 'latest'}?" if (ckpt / "latest" / CONFIG_NAME).is_file() else ""
        raise UserError(f"{ckpt} is no drafter checkpoint: it has no {CONFIG_NAME}{hint}")
    return read_json(ckpt / CONFIG_NAME)


def _find_pairwise_rank(ckpt: Path, config: PublishedConfig) -> int | None:
    """None without a head; UserError for one of another drafter, or of one that needs none."""
    path = ckpt / PAIRWISE_NAME
    if not path.is_file():
        return None
    if config.has_selector:
        raise UserError(
            f"{path}: a DFlash2 drafter scores tokens after their parents itself; remove the head"
        )
    found = read_file_headers(path)
    rank = found["rest_r"].shape[0] if "rest_r" in found else 0
    expected = pairwise_tensors(config.vocab_size, config.hidden_size, rank)
    refuse(str(path), tensor_differences(found, expected, STORED_DTYPES["bfloat16"]))
    return rank


def _summarize(c: PublishedConfig, expected: Shapes, pairwise_rank: int | None) -> DrafterSummary:
    return DrafterSummary(
        block_size=c.block_size,
        target_layer_ids=tuple(c.target_layer_ids),
        layer_types=tuple(c.resolved_layer_types()),
        sliding_window=c.sliding_window,
        mask_token_id=c.mask_token_id,
        hidden_size=c.hidden_size,
        num_parameters=sum(math.prod(shape) for shape in expected.values()),
        dtype=c.dtype,
        pairwise_rank=pairwise_rank,
    )
