"""One small drafter in every format that is read, for tests."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import tiny_config, write_checkpoint
from transformers import Qwen3Config

from recipes.errors import UserError
from serve.format_config import Format
from serve.formats import read_checkpoint

Json = dict[str, Any]
Weights = dict[str, torch.Tensor]

VOCAB, HIDDEN = 4096, 256
IDS = tiny_config()["dflash_config"]["target_layer_ids"]
IDS_FROM_1 = [i + 1 for i in IDS]
SETTINGS = ("block_size", "dflash_config", "num_target_layers")


def qwen3_keys() -> Json:
    """A drafter's layers as transformers writes them, which is what speculators saves."""
    keys = {key: value for key, value in tiny_config().items() if key not in SETTINGS}
    return Qwen3Config(**keys).to_diff_dict() | {"architectures": ["Qwen3ForCausalLM"]}


def nested_config() -> Json:
    """z-lab's newer drafters: block_size in dflash_config; transformers 4's dtype and rotary keys."""
    config = tiny_config()
    config["dflash_config"]["block_size"] = config.pop("block_size")
    config["torch_dtype"] = config.pop("dtype")
    del config["rope_parameters"]
    return config | {"rope_scaling": None, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}


def old_config() -> Json:
    config = tiny_config()
    return config | config.pop("dflash_config")


def speculators_config(**changes: object) -> Json:
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "block_size": 8,
        "mask_token_id": 7,
        "draft_vocab_size": VOCAB,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": IDS_FROM_1,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "transformer_layer_config": qwen3_keys(),
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"name_or_path": "some/target"},
        },
    } | changes


def open_spec_config(**changes: object) -> Json:
    settings = {
        "method": "dflash",
        "speculative_tokens": 7,
        "verifier": "some/target",
        "target_layer_ids": IDS_FROM_1,
        "target_layer_start_idx": 1,
        "draft_vocab_size": VOCAB,
        "sample_from_anchor": False,
        "mask_token_id": 7,
        "sliding_window_non_causal": False,
    }
    return qwen3_keys() | {
        "architectures": ["DflashDraftModel"],
        "open_spec_config_version": "0.0.0",
        "speculative_config": settings | changes,
        "target_hidden_size": HIDDEN,
        "speculators_metadata": {"speculators_version": "0.10.0"},
    }


def copies_of_the_target() -> Weights:
    table = torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)
    names = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
    return {name: table.clone() for name in names} | {"verifier_norm.weight": torch.ones(HIDDEN)}


def listed(ids: list[int]) -> str:
    return ", ".join(map(str, ids))


def what_it_says(config: Json, layout: Format) -> Json:
    """Of the original config, what the other format can say: speculators does not know the target's depth."""
    unsaid = () if layout in (Format.PUBLISHED, Format.PUBLISHED_OLD) else ("num_target_layers",)
    return {key: value for key, value in config.items() if key not in unsaid}


def convert(folder: Path, config: Json, weights: Weights) -> tuple[Json, str]:
    checkpoint = read_checkpoint(write_checkpoint(folder, config, weights))
    return checkpoint.config, "\n".join(checkpoint.notes)


def refusal(folder: Path, config: Json, weights: Weights) -> str:
    with pytest.raises(UserError) as refused:
        read_checkpoint(write_checkpoint(folder, config, weights))
    return str(refused.value)
