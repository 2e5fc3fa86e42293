"""The published checkpoint format, and what `check_checkpoint` lets through."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drafters import (
    EMBEDDED_TARGET,
    REPOSITORY,
    random_weights,
    tiny_config,
    tiny_recipe,
    write_checkpoint,
    write_random_drafter,
)
from safetensors.torch import save_file
from transformers import AutoConfig

from recipes.errors import UserError
from recipes.load import load_recipe
from serve.checkpoint import check_checkpoint, expected_tensors, load_target_config, published_config
from serve.drafter_config import pairwise_tensors
from serve.pairwise import PairwiseTables, write_pairwise

TARGET = str(EMBEDDED_TARGET)
FLAGSHIP_TARGET = {
    "model_type": "qwen3_5",
    "text_config": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "vocab_size": 248320,
        "eos_token_id": 248044,
    },
}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return random_weights(tiny_config())


def refusal(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> str:
    with pytest.raises(UserError) as refused:
        check_checkpoint(write_checkpoint(folder, config, weights), TARGET)
    return str(refused.value)


def test_a_fitting_checkpoint_is_described(tmp_path):
    summary = check_checkpoint(write_random_drafter(tmp_path), TARGET)
    drafter = tiny_recipe().drafter
    assert summary.block_size == drafter.block_size
    assert summary.target_layer_ids == tuple(drafter.target_layer_ids)
    assert summary.layer_types == tuple(drafter.layer_types)
    assert (summary.sliding_window, summary.mask_token_id) == (64, 7)
    assert summary.num_parameters == sum(weight.numel() for weight in random_weights(tiny_config()).values())


def test_the_flagship_recipe_gives_the_published_config_and_tensors():
    config = published_config(
        load_recipe(REPOSITORY / "recipes" / "qwen36_dflash.yaml").drafter, FLAGSHIP_TARGET
    )
    assert config["dflash_config"] == {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]}
    assert config["layer_types"] == ["sliding_attention"] * 4 + ["full_attention"]
    assert (config["sliding_window"], config["use_sliding_window"], config["max_window_layers"]) == (
        2048,
        True,
        5,
    )
    assert (config["block_size"], config["num_target_layers"], config["vocab_size"]) == (16, 64, 248320)
    shapes = expected_tensors(config)
    assert len(shapes) == 58
    assert shapes["fc.weight"] == (5120, 25600)
    assert shapes["layers.4.self_attn.k_proj.weight"] == (1024, 5120)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == pytest.approx(1.730e9, rel=1e-3)


def test_transformers_reads_the_rotary_base_and_the_window_back(tmp_path):
    config = AutoConfig.from_pretrained(write_random_drafter(tmp_path))
    assert config.rope_parameters["rope_theta"] == tiny_recipe().drafter.rope_theta
    assert config.sliding_window == 64
    assert config.layer_types == tiny_recipe().drafter.layer_types


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("architectures", ["Qwen3ForCausalLM"], "architectures"),
        ("hidden_size", 128, "hidden_size is 128, the target's is 256"),
        ("vocab_size", 4095, "vocab_size is 4095, the target's is 4096"),
        ("num_target_layers", 9, "num_target_layers is 9, the target has 8"),
        ("num_key_value_heads", 3, "num_key_value_heads 3"),
        ("head_dim", 63, "head_dim is 63"),
        ("layer_types", ["full_attention"] * 2, "layer_types has 2 entries"),
        ("layer_types", ["linear_attention"] * 3, "layer_types"),
        ("sliding_window", None, "sliding_window is None"),
        ("rope_theta", 1e6, "rope_theta is 1000000.0, rope_parameters says 10000000.0"),
        ("block_size", 1, "block_size"),
        ("head_dim", None, "head_dim"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_key(tmp_path, weights, key, value, named):
    assert named in refusal(tmp_path, tiny_config() | {key: value}, weights)


@pytest.mark.parametrize(
    ("ids", "mask", "named"),
    [
        ([1, 3, 7], 7, "target_layer_ids has [7]"),  # the last of 8 layers
        ([3, 1, 5], 7, "ids must ascend"),
        ([1, 3, 5], 4096, "mask_token_id is 4096"),
        ([1, 3, 5], -1, "mask_token_id is -1"),
    ],
)
def test_taps_and_mask_outside_the_target_are_refused(tmp_path, weights, ids, mask, named):
    config = tiny_config() | {"dflash_config": {"target_layer_ids": ids, "mask_token_id": mask}}
    assert named in refusal(tmp_path, config, weights)


def test_the_last_layer_but_one_and_the_last_token_id_are_allowed(tmp_path, weights):
    config = tiny_config() | {"dflash_config": {"target_layer_ids": [0, 3, 6], "mask_token_id": 4095}}
    summary = check_checkpoint(write_checkpoint(tmp_path, config, weights), TARGET)
    assert (summary.target_layer_ids, summary.mask_token_id) == ((0, 3, 6), 4095)


def test_a_missing_rotary_base_is_refused(tmp_path, weights):
    config = {k: v for k, v in tiny_config().items() if k not in ("rope_theta", "rope_parameters")}
    assert "rope_theta is missing" in refusal(tmp_path, config, weights)


def test_a_block_size_inside_dflash_config_is_read(tmp_path, weights):
    config = tiny_config()
    config["dflash_config"]["block_size"] = config.pop("block_size")
    assert check_checkpoint(write_checkpoint(tmp_path, config, weights), TARGET).block_size == 8


def test_two_block_sizes_are_refused(tmp_path, weights):
    config = tiny_config()
    config["dflash_config"]["block_size"] = 16
    assert "block_size" in refusal(tmp_path, config, weights)


def test_a_tap_more_needs_a_wider_fc(tmp_path, weights):
    config = tiny_config() | {"dflash_config": {"target_layer_ids": [1, 2, 3, 5], "mask_token_id": 7}}
    assert "fc.weight has shape [256, 768], expected [256, 1024]" in refusal(tmp_path, config, weights)


def test_a_missing_tensor_is_named(tmp_path, weights):
    fewer = {name: weight for name, weight in weights.items() if name != "layers.1.mlp.up_proj.weight"}
    assert "layers.1.mlp.up_proj.weight [640, 256] is missing" in refusal(tmp_path, tiny_config(), fewer)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_a_tensor_that_would_overwrite_the_targets_is_refused(tmp_path, weights, name):
    more = weights | {name: torch.zeros(4096, 256, dtype=torch.bfloat16)}
    message = refusal(tmp_path, tiny_config(), more)
    assert name in message
    assert "overwrite the target's own" in message


def test_weights_of_another_precision_are_refused(tmp_path, weights):
    float32 = {name: weight.float() for name, weight in weights.items()}
    assert "stored as F32" in refusal(tmp_path, tiny_config(), float32)


def test_many_differences_are_cut_short(tmp_path):
    message = refusal(tmp_path, tiny_config(), {"norm.weight": torch.ones(256, dtype=torch.bfloat16)})
    assert len(message.splitlines()) == 7
    assert message.endswith("and 30 more")


def test_a_truncated_weight_file_is_refused(tmp_path):
    path = write_random_drafter(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match="damaged or cut short"):
        check_checkpoint(tmp_path, TARGET)


def test_a_file_that_the_index_names_must_be_there(tmp_path, weights):
    write_checkpoint(tmp_path, tiny_config(), weights)
    index = {"weight_map": dict.fromkeys(weights, "model-00002-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors is not there"):
        check_checkpoint(tmp_path, TARGET)


def test_an_indexed_checkpoint_is_read_over_its_files(tmp_path, weights):
    names = list(weights)
    files = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert check_checkpoint(tmp_path, TARGET).num_parameters == sum(w.numel() for w in weights.values())


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        check_checkpoint(tmp_path, TARGET)


def test_a_folder_of_checkpoints_points_to_its_latest(tmp_path):
    write_random_drafter(tmp_path / "checkpoint-1")
    (tmp_path / "latest").symlink_to("checkpoint-1")
    with pytest.raises(UserError, match=r"did you mean .*latest"):
        check_checkpoint(tmp_path, TARGET)


def test_a_vision_wrapped_target_is_its_text_model(tmp_path):
    wrapped = tmp_path / "target"
    wrapped.mkdir()
    text = load_target_config(TARGET)
    (wrapped / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    checkpoint = write_random_drafter(tmp_path / "drafter")
    assert check_checkpoint(checkpoint, str(wrapped)) == check_checkpoint(checkpoint, TARGET)


def test_a_recipe_that_does_not_fit_its_target_gives_no_config():
    drafter = tiny_recipe("drafter.target_layer_ids=[1, 3, 7]").drafter
    with pytest.raises(UserError, match=r"target_layer_ids has \[7\]"):
        published_config(drafter, load_target_config(TARGET))


def test_the_check_needs_no_torch():
    code = "import sys, serve.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# A pairwise head


def write_head(ckpt: Path, rank: int, vocab_size: int) -> None:
    hidden_size = tiny_config()["hidden_size"]
    shapes = pairwise_tensors(vocab_size, hidden_size, rank)
    write_pairwise(ckpt, PairwiseTables(**{name: torch.zeros(shape) for name, shape in shapes.items()}))


def test_a_pairwise_head_is_found_and_none_is_none(tmp_path):
    assert check_checkpoint(write_random_drafter(tmp_path), TARGET).pairwise_rank is None
    write_head(tmp_path, 6, tiny_config()["vocab_size"])
    assert check_checkpoint(tmp_path, TARGET).pairwise_rank == 6


def test_a_pairwise_head_of_another_vocabulary_is_refused_before_an_engine_starts(tmp_path):
    write_head(write_random_drafter(tmp_path), 6, tiny_config()["vocab_size"] + 1)
    with pytest.raises(UserError, match=r"pairwise/head\.safetensors.*\n?.*parents_Vr has shape"):
        check_checkpoint(tmp_path, TARGET)


# A DFlash2 drafter

SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}


def selector_config(**changes: object) -> dict:
    """`changes` of its dflash_config."""
    config = tiny_config() | {"architectures": ["DFlash2DraftModel"]}
    return config | {"dflash_config": config["dflash_config"] | SELECTOR | changes}


@pytest.fixture(scope="module")
def selector_weights() -> dict[str, torch.Tensor]:
    return random_weights(selector_config())


def test_a_fitting_dflash2_has_convolutions_and_a_selector(tmp_path, selector_weights):
    ckpt = write_checkpoint(tmp_path, selector_config(), selector_weights)
    found = check_checkpoint(ckpt, TARGET).num_parameters
    plain = sum(weight.numel() for weight in random_weights(tiny_config()).values())
    # 3 layers with 2 convolutions, of 2 sides and 2 taps, whose kernels have 256 / 16 groups
    assert found - plain == 3 * 2 * (2 * 2 * 256 + 2 * 2 * 16 * 256) + 2 * 4096 * 8 + 8 * 256


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"selector_rank": None}, "selector_rank is None, a DFlash2 drafter has at least 1"),
        ({"conv_kernel_size": 0}, "conv_kernel_size is 0, a DFlash2 drafter has at least 1"),
        ({"selector_top_k": -1}, "selector_top_k is -1, a DFlash2 drafter has at least 1"),
        ({"selector_top_k": 257}, "selector_top_k is 257, trees grow on 256 candidates"),
        ({"selector_top_k": "16"}, "selector_top_k"),
        ({"conv_group_size": 48}, "conv_group_size is 48, no divisor of hidden_size 256"),
        ({"output_multiplier": 0.0}, "output_multiplier is 0.0"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True"),
    ],
)
def test_a_dflash2_that_cannot_be_served_is_refused_by_key(tmp_path, selector_weights, changes, named):
    assert named in refusal(tmp_path, selector_config(**changes), selector_weights)


def test_a_selectors_keys_count_where_vllm_reads_them(tmp_path, selector_weights):
    config = selector_config()
    config["selector_rank"] = config["dflash_config"].pop("selector_rank")
    message = refusal(tmp_path, config, selector_weights)
    assert "['selector_rank'] stand beside dflash_config" in message


def test_a_selector_in_what_calls_itself_dflash_is_refused(tmp_path, selector_weights):
    config = selector_config() | {"architectures": ["DFlashDraftModel"]}
    assert "only a DFlash2 drafter has it (DFlash2DraftModel)" in refusal(tmp_path, config, selector_weights)


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        ("candidate_selector.successor_codebook", None, "successor_codebook [4096, 8] is missing"),
        ("candidate_selector.predecessor_codebook", (4095, 8), "has shape [4095, 8], expected [4096, 8]"),
        ("candidate_selector.hidden_projection.weight", (9, 256), "expected [8, 256]"),
        ("layers.2.mlp_conv.base_kernel", (2, 3, 256), "has shape [2, 3, 256], expected [2, 2, 256]"),
        ("layers.0.attention_conv.kernel_projection.weight", (4, 256), "expected [64, 256]"),
        ("markov_head.weight", (4, 4), "markov_head.weight does not belong in a drafter checkpoint"),
    ],
)
def test_a_dflash2s_tensors_are_refused_by_name(tmp_path, selector_weights, name, shape, named):
    changed = {key: weight for key, weight in selector_weights.items() if key != name}
    if shape is not None:
        changed[name] = torch.zeros(shape, dtype=torch.bfloat16)
    assert named in refusal(tmp_path, selector_config(), changed)


def test_a_selectors_tensors_do_not_belong_in_a_dflash(tmp_path, selector_weights):
    assert "does not belong in a drafter checkpoint" in refusal(tmp_path, tiny_config(), selector_weights)


def test_a_pairwise_head_beside_a_selector_is_refused(tmp_path, selector_weights):
    ckpt = write_checkpoint(tmp_path, selector_config(), selector_weights)
    write_head(ckpt, 6, tiny_config()["vocab_size"])
    with pytest.raises(UserError, match=r"head\.safetensors: a DFlash2 drafter scores tokens .* itself"):
        check_checkpoint(ckpt, TARGET)
