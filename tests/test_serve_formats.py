"""Drafters in other formats: the same config and tensors come out, or a refusal that names what is wrong."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel
from drafter_formats import (
    IDS,
    IDS_FROM_1,
    Json,
    Weights,
    convert,
    copies_of_the_target,
    listed,
    nested_config,
    old_config,
    open_spec_config,
    refusal,
    speculators_config,
    what_it_says,
)
from drafters import EMBEDDED_TARGET, random_weights, tiny_config, write_checkpoint
from safetensors.torch import load_file
from transformers import Qwen3Config

from recipes.errors import UserError
from serve.checkpoint import check_checkpoint
from serve.format_config import Format
from serve.formats import read_checkpoint, recognise, write_published


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(tiny_config())


# The same drafter in every format

FORMATS: list[tuple[Format, Callable[[], Json], Callable[[], Weights]]] = [
    (Format.PUBLISHED, tiny_config, dict),
    (Format.PUBLISHED, nested_config, dict),
    (Format.PUBLISHED_OLD, old_config, dict),
    (Format.SPECULATORS, speculators_config, copies_of_the_target),
    (Format.OPEN_SPEC, open_spec_config, dict),
]
every_format = pytest.mark.parametrize(
    ("layout", "make_config", "make_more"), FORMATS, ids=["ours", "nested", "old", "speculators", "open-spec"]
)


@every_format
def test_every_format_gives_the_original_config_and_tensors(
    tmp_path, weights, layout, make_config, make_more
):
    folder = write_checkpoint(tmp_path / "theirs", make_config(), weights | make_more())
    assert recognise(folder) == layout
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config == what_it_says(tiny_config(), layout)
    assert list(checkpoint.tensors) == list(weights)
    for name, weight in weights.items():
        assert (checkpoint.tensors[name].shape, checkpoint.tensors[name].dtype) == (weight.shape, "BF16")
        assert torch.equal(checkpoint.load(name), weight)


@every_format
def test_what_is_written_is_published_bit_for_bit_and_fits_the_target(
    tmp_path, weights, layout, make_config, make_more
):
    theirs = write_checkpoint(tmp_path / "theirs", make_config(), weights | make_more())
    write_published(read_checkpoint(theirs), tmp_path / "ours")
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    assert check_checkpoint(tmp_path / "ours", str(EMBEDDED_TARGET)).target_layer_ids == tuple(IDS)
    again = read_checkpoint(tmp_path / "ours")
    assert again.config == what_it_says(tiny_config(), layout)
    assert [note for note in again.notes if "num_target_layers" not in note] == []


def test_our_own_checkpoint_needs_no_note(tmp_path, weights):
    assert read_checkpoint(write_checkpoint(tmp_path, tiny_config(), weights)).notes == ()


def test_every_conversion_is_told(tmp_path, weights):
    folder = write_checkpoint(tmp_path, speculators_config(), weights | copies_of_the_target())
    assert read_checkpoint(folder).notes == (
        "the file names its target: some/target",
        f"layer ids {listed(IDS_FROM_1)} (aux_hidden_state_layer_ids) counted from 1: read as {listed(IDS)}",
        "full layers see a block both ways, sliding ones causally, as trained",
        "num_target_layers is not said: this project and vLLM do without, z-lab's own code does not",
        "embed_tokens.weight, lm_head.weight, verifier_lm_head.weight, verifier_norm.weight left out:"
        " frozen copies of the target's, by the format",
    )


# What others read in the same files


def read_by_zlab(config: Json) -> list[object]:
    model = DFlashDraftModel(Qwen3Config.from_dict(config))
    layers = [(layer.self_attn.is_causal, layer.self_attn.sliding_window) for layer in model.layers]
    return [model.target_layer_ids, model.block_size, model.mask_token_id, layers]


@pytest.mark.parametrize("make_config", [tiny_config, nested_config, old_config])
@pytest.mark.parametrize("is_causal", [None, True, False])
def test_zlabs_own_reader_sees_no_difference(tmp_path, weights, make_config, is_causal):
    theirs = make_config() | {"is_causal": is_causal}
    ours = read_checkpoint(write_checkpoint(tmp_path, theirs, weights)).config
    assert read_by_zlab(theirs) == read_by_zlab(ours)


@pytest.fixture(scope="module")
def vllm_dflash() -> Any:
    """vLLM's module, told that it runs in the runner that takes layers of both kinds."""
    module = pytest.importorskip("vllm.model_executor.models.qwen3_dflash")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "get_current_vllm_config", lambda: SimpleNamespace(use_v2_model_runner=True))
        yield module


def attention_in_vllm(vllm_dflash: Any, config: Json) -> list[tuple[int | None, bool]]:
    parsed = Qwen3Config.from_dict(config)
    layers = range(parsed.num_hidden_layers)
    return [vllm_dflash._resolve_layer_attention(parsed, layer) for layer in layers]


@pytest.mark.parametrize("kinds", ["SSS", "FFF", "SSF"])
@pytest.mark.parametrize("flag", [{}, {"causal": True}, {"causal": False}])
@pytest.mark.parametrize("swa", [{}, {"use_swa": True, "swa_window_size": 64}, {"use_swa": False}])
def test_vllm_masks_a_published_drafter_as_before(tmp_path, weights, vllm_dflash, kinds, flag, swa):
    theirs = tiny_config() | {"layer_types": [layer_kind(kind) for kind in kinds]}
    theirs["dflash_config"] |= flag | swa
    ours = read_checkpoint(write_checkpoint(tmp_path, theirs, weights)).config
    assert attention_in_vllm(vllm_dflash, theirs) == attention_in_vllm(vllm_dflash, ours)


def layer_kind(letter: str) -> str:
    return {"S": "sliding_attention", "F": "full_attention"}[letter]


@pytest.mark.parametrize("non_causal", [True, False])
def test_vllm_translates_a_speculators_config_to_the_same_ids_and_mask(
    tmp_path, weights, vllm_dflash, non_causal
):
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig  # noqa: PLC0415

    theirs = speculators_config(sliding_window_non_causal=non_causal)
    theirs["transformer_layer_config"]["layer_types"] = [layer_kind("S")] * 3  # mixed: vLLM 0.32 is wrong
    ours = read_checkpoint(write_checkpoint(tmp_path, theirs, weights)).config
    translated = SpeculatorsConfig.extract_transformers_pre_trained_config(theirs)
    for key in ("target_layer_ids", "mask_token_id"):
        assert translated["dflash_config"][key] == ours["dflash_config"][key]
    assert attention_in_vllm(vllm_dflash, translated) == attention_in_vllm(vllm_dflash, ours)


# Layers


@pytest.mark.parametrize(("first", "ids"), [(0, IDS), (1, IDS_FROM_1)])
def test_open_spec_says_itself_where_it_starts_to_count(tmp_path, weights, first, ids):
    config = open_spec_config(target_layer_ids=ids, target_layer_start_idx=first)
    assert convert(tmp_path, config, weights)[0]["dflash_config"]["target_layer_ids"] == IDS


def test_ids_said_twice_in_two_conventions_must_agree(tmp_path, weights):
    right = tiny_config() | {"eagle_aux_hidden_state_layer_ids": IDS_FROM_1}
    config, notes = convert(tmp_path, right, weights)
    assert config == tiny_config()
    assert "counted from 1" in notes
    wrong = tiny_config() | {"eagle_aux_hidden_state_layer_ids": IDS}
    one_lower = [i - 1 for i in IDS]
    assert f"{IDS} means {one_lower} counted from 0; keep the right" in refusal(tmp_path, wrong, weights)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (speculators_config(aux_hidden_state_layer_ids=[0, 2, 4]), "0 is the embedding, not a layer"),
        (speculators_config(aux_hidden_state_layer_ids=[-1, 2, 4]), "-1 is no layer"),
        (speculators_config(aux_hidden_state_layer_ids=[4, 2, 6]), "ids must ascend"),
        (speculators_config(aux_hidden_state_layer_ids="2,4,6"), "expected a list of layer ids"),
        (speculators_config(aux_hidden_state_layer_ids=None), "does not say which target layers are tapped"),
        (
            tiny_config() | {"dflash_config": {"target_layer_ids": [2, 5, 8], "mask_token_id": 7}},
            "num_target_layers is 8; if they are counted from 1, write [1, 4, 7]",
        ),
        (
            tiny_config() | {"dflash_config": {"target_layer_ids": [1, 3, 7], "mask_token_id": 7}},
            "can be tapped at 0 to 6",
        ),
        (open_spec_config(target_layer_start_idx=2), "target_layer_start_idx 2"),
        (open_spec_config(target_layer_start_idx=None), "lacks target_layer_start_idx"),
    ],
)
def test_doubtful_layer_ids_are_refused_with_what_to_write(tmp_path, weights, config, named):
    assert named in refusal(tmp_path, config, weights)


def test_missing_layer_ids_are_not_guessed(tmp_path, weights):
    config = {key: value for key, value in tiny_config().items() if key != "dflash_config"}
    assert "write dflash_config.target_layer_ids" in refusal(tmp_path, config, weights)


def test_absent_layer_types_are_what_transformers_makes_of_them(tmp_path, weights):
    keys = {"layer_types": None, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    config, notes = convert(tmp_path, tiny_config() | keys, weights)
    assert config["layer_types"] == Qwen3Config(num_hidden_layers=3, **keys).layer_types
    assert "no layer_types" in notes


def test_a_flag_for_all_layers_survives_where_their_kinds_say_otherwise(tmp_path, weights):
    config, notes = convert(tmp_path, speculators_config(sliding_window_non_causal=True), weights)
    assert config["is_causal"] is False
    assert "is_causal False for every layer" in notes


def test_speculators_flag_may_be_absent_only_where_it_says_nothing(tmp_path, weights):
    config = speculators_config()
    del config["sliding_window_non_causal"]
    assert "speculators takes for false and vLLM for true" in refusal(tmp_path, config, weights)
    config["transformer_layer_config"]["layer_types"] = [layer_kind("F")] * 3
    assert "is_causal" not in convert(tmp_path, config, weights)[0]


# Rotary positions


def with_rope(**keys: object) -> Json:
    return {key: value for key, value in tiny_config().items() if not key.startswith("rope")} | keys


def test_rope_scaling_is_written_as_rope_parameters(tmp_path, weights):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config, notes = convert(tmp_path, with_rope(rope_theta=10000000, rope_scaling=scaling), weights)
    rope = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, "original_max_position_embeddings": 4096}
    assert (config["rope_theta"], config["rope_parameters"]) == (1e7, rope)
    assert "rope_scaling written" in notes


def test_a_multimodal_targets_position_rows_are_left_out(tmp_path, weights):
    rope = tiny_config()["rope_parameters"] | {"partial_rotary_factor": 1.0, "mrope_interleaved": True}
    theirs = with_rope(rope_parameters=rope | {"mrope_section": [44, 44, 40]})
    config, notes = convert(tmp_path, theirs, weights)
    assert config == tiny_config()
    assert "mrope_interleaved, mrope_section left out" in notes


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({}, "rope_parameters.rope_theta are None and None"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "are 10000.0 and 1000000.0"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}, "partial_rotary_factor is"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e7}}}, "differ between kinds of layers"),
        (
            {"rope_parameters": {"rope_theta": 1e7}, "rope_scaling": {"rope_theta": 1e6}},
            "both say rope_theta",
        ),
    ],
)
def test_doubtful_rotary_positions_are_refused(tmp_path, weights, rope, named):
    assert named in refusal(tmp_path, with_rope(**rope), weights)


# What cannot be served


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "an EAGLE head"),
        (speculators_config(speculators_model_type="eagle3"), "an EAGLE head"),
        (speculators_config(speculators_model_type="dspark"), "a DSpark drafter"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}, "a whole model"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "a whole language model"),
        (tiny_config() | {"architectures": ["DFlash2DraftModel"]}, "a DFlash2 drafter"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "a Laguna drafter"),
        ({}, "no architectures: something unknown"),
        (open_spec_config() | {"open_spec_config_version": "1.0.0"}, "open_spec_config_version '1.0.0'"),
    ],
)
def test_another_model_is_refused_as_what_it_is(tmp_path, config, kind):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no DFlash drafter in a known format") as refused:
        recognise(tmp_path)
    assert kind in str(refused.value)


def test_a_folder_that_is_not_there_or_empty_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        recognise(tmp_path / "absent")
    with pytest.raises(UserError, match=r"config\.json is not there"):
        recognise(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not read"),
        ({"draft_vocab_size": 1000}, "draft_vocab_size is 1000 of 4096: a reduced vocabulary (d2t"),
        ({"target_hidden_size": 512}, "target_hidden_size is 512, hidden_size 256"),
        ({"has_own_lm_head": True}, "the head must be the target's"),
        ({"markov_rank": 256}, "markov_rank is 256"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"head_dim": None}, "head_dim"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"swa_window_size": 32}, "keep the right one"),
        ({"block_size": 16, "dflash_config": {"block_size": 8}}, "both say block_size"),
        ({"is_causal": True, "causal": False}, "contradict each other"),
        ({"sample_from_anchor": True}, "its anchor drafts as well"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_key(tmp_path, weights, changes, named):
    config = tiny_config()
    nested = config.pop("dflash_config") | changes.pop("dflash_config", {})
    assert named in refusal(tmp_path, config | {"dflash_config": nested} | changes, weights)


def test_a_block_that_proposes_as_many_tokens_as_it_has_slots_is_refused(tmp_path, weights):
    assert "blocks of 7 that propose 7" in refusal(tmp_path, speculators_config(block_size=7), weights)


def test_keys_that_change_nothing_are_dropped_and_unknown_ones_told(tmp_path, weights):
    config, notes = convert(
        tmp_path,
        tiny_config() | {"use_cache": True, "conv_kernel_size": 0, "emb_dim": 9, "output_multiplier": 0.5},
        weights,
    )
    assert config == tiny_config()
    assert "left out: emb_dim" in notes
    assert "output_multiplier 0.5 left out" in notes
