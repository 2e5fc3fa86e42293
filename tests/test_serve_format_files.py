"""Tensors and files of drafters in other formats: what is read, refused, left out and written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drafter_formats import (
    HIDDEN,
    IDS,
    VOCAB,
    Json,
    Weights,
    convert,
    copies_of_the_target,
    listed,
    refusal,
    speculators_config,
    what_it_says,
)
from drafters import EMBEDDED_TARGET, REPOSITORY, random_weights, tiny_config, write_checkpoint
from safetensors.torch import load_file, save_file

from recipes.errors import UserError
from serve.checkpoint import check_checkpoint
from serve.format_config import Format
from serve.formats import check_finite, read_checkpoint, write_published


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(tiny_config())


# Tensors


def test_a_missing_an_extra_and_a_misshapen_tensor_are_named(tmp_path, weights):
    fewer = {name: weight for name, weight in weights.items() if name != "norm.weight"}
    changed = fewer | {"fc.weight": torch.zeros(256, 512), "layers.0.self_attn.q_proj.bias": torch.zeros(256)}
    message = refusal(tmp_path, tiny_config(), changed)
    assert "norm.weight [256] is missing" in message
    assert "q_proj.bias does not belong" in message
    assert "fc.weight has shape [256, 512], expected [256, 768]" in message


def test_a_published_drafter_with_a_head_of_its_own_is_refused(tmp_path, weights):
    message = refusal(tmp_path, tiny_config(), weights | copies_of_the_target())
    assert "lm_head.weight does not belong" in message


def test_a_copy_of_another_shape_is_no_copy(tmp_path, weights):
    head = {"lm_head.weight": torch.zeros(1000, HIDDEN, dtype=torch.bfloat16)}
    assert "lm_head.weight does not belong" in refusal(tmp_path, speculators_config(), weights | head)


def test_a_vocabulary_map_is_left_out_only_if_it_maps_each_id_to_itself(tmp_path, weights):
    maps = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    config, notes = convert(tmp_path, speculators_config(), weights | maps)
    assert config == what_it_says(tiny_config(), Format.SPECULATORS)
    assert "d2t, t2d left out: the draft vocabulary is the target's" in notes
    maps["d2t"][:2] = torch.tensor([1, -1])  # as many ids, two of them swapped
    assert "d2t makes draft ids other than the target's" in refusal(
        tmp_path, speculators_config(), weights | maps
    )


def test_rotary_buffers_are_left_out(tmp_path, weights):
    buffers = {"rotary_emb.inv_freq": torch.ones(32)}
    assert "rotary_emb.inv_freq left out" in convert(tmp_path, tiny_config(), weights | buffers)[1]


def test_the_weights_decide_the_precision(tmp_path, weights):
    floats = {name: weight.float() for name, weight in weights.items()}
    config, notes = convert(tmp_path, tiny_config(), floats)
    assert config == tiny_config() | {"dtype": "float32"}
    assert "dtype bfloat16 written as float32" in notes
    mixed = weights | {"norm.weight": weights["norm.weight"].float()}
    assert "norm.weight is stored as F32" in refusal(tmp_path, tiny_config(), mixed)
    bytes_only = {name: weight.to(torch.float8_e4m3fn) for name, weight in weights.items()}
    assert "stored as F8_E4M3" in refusal(tmp_path, tiny_config(), bytes_only)


def write_shards(folder: Path, config: Json, weights: Weights) -> Path:
    """Two files and an index, as transformers writes large models."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names, weight_map = list(weights), {}
    for i, part in enumerate((names[:10], names[10:])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_are_read_over_their_index_and_written_as_one_file(tmp_path, weights):
    folder = write_shards(tmp_path / "theirs", tiny_config(), weights)
    save_file({"norm.weight": torch.zeros(HIDDEN)}, folder / "consolidated.safetensors")  # not in the index
    checkpoint = read_checkpoint(folder)
    assert {path.name[:11] for path in checkpoint.files.values()} == {"model-00001", "model-00002"}
    write_published(checkpoint, tmp_path / "ours")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(written[name], weights[name]) for name in weights)


def test_a_shard_that_is_missing_or_repeats_a_tensor_is_refused(tmp_path, weights):
    folder = write_shards(tmp_path, tiny_config(), weights)
    (folder / "model.safetensors.index.json").unlink()
    save_file({"norm.weight": weights["norm.weight"]}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"norm\.weight is in 2 files"):
        read_checkpoint(folder)
    write_shards(tmp_path, tiny_config(), weights)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors is not there"):
        read_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="has no weight_map"):
        read_checkpoint(folder)


@pytest.mark.parametrize("cut", [2, 3_000_000])
def test_a_truncated_file_is_refused(tmp_path, weights, cut):
    path = write_checkpoint(tmp_path, tiny_config(), weights) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(UserError, match="damaged or cut short"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "drafter.gguf"])
def test_pickles_are_not_opened(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=rf"weights in {name}, which is not opened"):
        read_checkpoint(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    with pytest.raises(UserError, match="lacks its weights"):
        read_checkpoint(tmp_path)


def test_a_trained_mask_vector_is_refused(tmp_path, weights):
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    assert "trained mask vector" in refusal(tmp_path, tiny_config(), weights)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_is_not_finite_is_refused_by_name(tmp_path, weights, value):
    broken = weights["layers.1.mlp.up_proj.weight"].clone()
    broken[3, 4:6] = value
    changed = weights | {"layers.1.mlp.up_proj.weight": broken}
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, tiny_config(), changed))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight has 2 values that are not finite"):
        check_finite(checkpoint)


def test_finite_weights_pass_and_copies_left_out_may_be_anything(tmp_path, weights):
    more = copies_of_the_target()
    more["lm_head.weight"][0, 0] = float("nan")
    check_finite(read_checkpoint(write_checkpoint(tmp_path, speculators_config(), weights | more)))


# Writing


def test_an_existing_folder_is_left_alone(tmp_path, weights):
    checkpoint = read_checkpoint(write_checkpoint(tmp_path / "theirs", tiny_config(), weights))
    (tmp_path / "ours").mkdir()
    with pytest.raises(UserError, match="is already there"):
        write_published(checkpoint, tmp_path / "ours")
    assert not list((tmp_path / "ours").iterdir())


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, weights):
    checkpoint = read_checkpoint(write_checkpoint(tmp_path / "theirs", tiny_config(), weights))
    (tmp_path / "theirs" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        write_published(checkpoint, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_float16_is_read_but_not_written(tmp_path, weights):
    halves = {name: weight.half() for name, weight in weights.items()}
    checkpoint = read_checkpoint(write_checkpoint(tmp_path / "theirs", tiny_config(), halves))
    assert checkpoint.config["dtype"] == "float16"
    with pytest.raises(UserError, match="float16"):
        write_published(checkpoint, tmp_path / "ours")


# The command


def run_convert(*arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "serve" / "convert.py"), *map(str, arguments)]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_command_converts_and_says_what_it_did(tmp_path, weights):
    theirs = write_checkpoint(tmp_path / "theirs", speculators_config(), weights | copies_of_the_target())
    run = run_convert(theirs, tmp_path / "ours")
    assert run.returncode == 0, run.stderr
    assert f"{theirs}: speculators format" in run.stdout
    assert f"counted from 1: read as {listed(IDS)}" in run.stdout
    assert f"{tmp_path / 'ours'}: 36 tensors, bfloat16, blocks of 8" in run.stdout
    check_checkpoint(tmp_path / "ours", str(EMBEDDED_TARGET))


def test_the_command_refuses_without_a_traceback(tmp_path, weights):
    config = tiny_config() | {"architectures": ["LlamaForCausalLMEagle3"]}
    run = run_convert(write_checkpoint(tmp_path / "theirs", config, weights), tmp_path / "ours")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: ")
    assert "an EAGLE head" in run.stderr
    assert not (tmp_path / "ours").exists()


def test_reading_needs_neither_torch_nor_vllm(tmp_path, weights):
    folder = write_checkpoint(tmp_path, speculators_config(), weights)
    code = (
        "import sys, pathlib; from serve.formats import read_checkpoint;"
        "read_checkpoint(pathlib.Path(sys.argv[1])); sys.exit(bool({'torch', 'vllm'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0
