"""Embedding and head come out of a target's files, however those are laid out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.errors import UserError
from recipes.schema import Target
from train.target_parts import load_target_parts

EMBEDDING, HEAD = torch.randn(6, 4), torch.randn(6, 4)
OTHER = {"model.norm.weight": torch.ones(4)}


def write(folder: Path, config: dict, *files: dict[str, torch.Tensor]) -> Target:
    """One file, or several behind an index."""
    (folder / "config.json").write_text(json.dumps(config))
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors")
    else:
        names = [f"model-{number}.safetensors" for number in range(len(files))]
        for name, tensors in zip(names, files, strict=True):
            save_file(tensors, folder / name)
        weight_map = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return Target(model=str(folder))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("shards", [1, 2])
def test_parts_are_found_in_text_models_and_in_wrappers(prefix, shards, tmp_path):
    embedding, head = {f"{prefix}embed_tokens.weight": EMBEDDING}, {"lm_head.weight": HEAD}
    files = [embedding | head | OTHER] if shards == 1 else [embedding | OTHER, head]
    parts = load_target_parts(write(tmp_path, {}, *files))
    assert torch.equal(parts.embedding_VD, EMBEDDING)
    assert torch.equal(parts.head_VD, HEAD)


@pytest.mark.parametrize(
    "config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}]
)
def test_the_head_of_a_tied_target_is_its_embedding(config, tmp_path):
    parts = load_target_parts(write(tmp_path, config, {"model.embed_tokens.weight": EMBEDDING}))
    assert parts.head_VD is parts.embedding_VD
    moved = parts.to(torch.device("cpu"), torch.bfloat16)
    assert moved.head_VD is moved.embedding_VD


@pytest.mark.parametrize("shards", [1, 2])
def test_an_untied_target_without_a_head_is_refused(shards, tmp_path):
    files = [{"model.embed_tokens.weight": EMBEDDING}, OTHER]
    target = write(tmp_path, {}, *([files[0] | files[1]] if shards == 1 else files))
    with pytest.raises(UserError, match=r"its head under one of lm_head\.weight.*found model\.embed_tokens"):
        load_target_parts(target)


def test_a_damaged_file_is_named(tmp_path):
    target = write(tmp_path, {}, {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged or cut short"):
        load_target_parts(target)


def test_parts_of_the_embedded_target_are_its_own(embedded_target):
    parts = load_target_parts(Target(model=str(embedded_target)))
    tensors = {}
    for path in embedded_target.glob("*.safetensors"):
        tensors |= load_file(path)
    assert torch.equal(parts.head_VD, tensors["lm_head.weight"])
    assert torch.equal(parts.embedding_VD, tensors["model.embed_tokens.weight"])
