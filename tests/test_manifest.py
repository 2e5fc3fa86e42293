"""Manifests: whole or absent, strict when read, and tied to the very weights they were made from."""

import json
import shutil
import subprocess

import pytest
from pydantic import ValidationError

from recipes import manifest, schema, target_config
from recipes.errors import UserError
from recipes.manifest import (
    CheckpointManifest,
    ShardEntry,
    ShardManifest,
    TargetIdentity,
    identify_target,
    provenance,
    read_manifest,
    write_json,
)

IDENTITY = TargetIdentity(
    model="a/b", fingerprint="0" * 64, dtype="bfloat16", hidden_size=8, vocab_size=32, num_hidden_layers=4
)
CHECKPOINT = CheckpointManifest(
    target=IDENTITY, step=3, recipe={"name": "x"}, provenance={}, sequences_seen=24, tokens_seen=100
)
SHARDS = ShardManifest(
    target=IDENTITY,
    target_layer_ids=[1, 2],
    hidden_size=8,
    dtype="bfloat16",
    recipe={},
    provenance={},
    shards=[
        ShardEntry(
            file="shard-00000.safetensors", sha256="1" * 64, sequences=2, tokens=9, supervised_tokens=4
        )
    ],
    dropped={"too long": 1},
    complete=False,
)


@pytest.fixture
def target_copy(tmp_path, embedded_target):
    """A copy of the embedded target that a test may change."""
    return shutil.copytree(embedded_target, tmp_path / "target")


def fingerprint(folder, **fields) -> str:
    return identify_target(schema.Target(model=str(folder), **fields)).fingerprint


# Files


@pytest.mark.parametrize("content", [CHECKPOINT, SHARDS])
def test_a_manifest_reads_back_as_it_was_written(content, tmp_path):
    write_json(tmp_path / "m.json", content)
    assert read_manifest(tmp_path / "m.json", type(content)) == content


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "m.json"
    write_json(path, {"old": 1})

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_the_name_appears_only_after_the_bytes_are_on_the_disk(tmp_path, monkeypatch):
    path = tmp_path / "m.json"
    seen = []
    monkeypatch.setattr(manifest.os, "fsync", lambda descriptor: seen.append(path.exists()))
    write_json(path, {"a": 1})
    assert seen == [False]
    assert path.exists()


def test_nan_is_not_written_as_json(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "m.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_missing_manifest_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.json: expected a ShardManifest, found no such file"):
        read_manifest(tmp_path / "none.json", ShardManifest)


def test_a_truncated_manifest_is_refused(tmp_path):
    path = tmp_path / "m.json"
    write_json(path, SHARDS)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match="damaged"):
        read_manifest(path, ShardManifest)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema_version_is_refused_before_anything_else(version, tmp_path):
    path = tmp_path / "m.json"
    write_json(path, {"schema_version": version, "unheard_of": 1})
    with pytest.raises(UserError, match=f"expected schema_version 1, found {version};") as caught:
        read_manifest(path, CheckpointManifest)
    assert "unheard_of" not in str(caught.value)


def test_a_manifest_without_a_version_is_refused(tmp_path):
    path = tmp_path / "m.json"
    write_json(
        path, {key: value for key, value in CHECKPOINT.model_dump().items() if key != "schema_version"}
    )
    with pytest.raises(UserError, match="expected schema_version 1, found None"):
        read_manifest(path, CheckpointManifest)


def test_every_problem_of_a_manifest_is_told(tmp_path):
    path = tmp_path / "m.json"
    write_json(path, CHECKPOINT.model_dump() | {"step": "3", "tokens_seen": -1, "extra": 0})
    with pytest.raises(UserError) as caught:
        read_manifest(path, CheckpointManifest)
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "step",
        "tokens_seen",
        "extra",
    ]


def test_one_kind_of_manifest_is_not_taken_for_another(tmp_path):
    write_json(tmp_path / "m.json", CHECKPOINT)
    with pytest.raises(UserError, match="not a ShardManifest"):
        read_manifest(tmp_path / "m.json", ShardManifest)


def test_a_manifest_cannot_be_changed_after_it_is_made():
    with pytest.raises(ValidationError):
        CHECKPOINT.step = 4


# Provenance


def git(folder, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit, taken for the one this code stands in."""
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.setattr(manifest, "REPOSITORY", tmp_path)
    return tmp_path


def test_provenance_names_the_commit(repository):
    found = provenance()
    assert found["git_commit"] == git(repository, "rev-parse", "HEAD")
    assert found["git_dirty"] is False


def test_provenance_tells_a_changed_tree(repository):
    (repository / "a").write_text("2")
    assert provenance()["git_dirty"] is True


def test_there_is_no_commit_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "REPOSITORY", tmp_path)
    assert provenance()["git_commit"] is None
    assert provenance()["git_dirty"] is None


def test_the_commit_of_a_surrounding_repository_is_not_taken_for_ours(repository, monkeypatch):
    (repository / "site-packages").mkdir()
    monkeypatch.setattr(manifest, "REPOSITORY", repository / "site-packages")
    assert provenance()["git_commit"] is None


def test_provenance_is_json_and_tells_versions(tmp_path):
    write_json(tmp_path / "provenance.json", provenance())
    packages = json.loads((tmp_path / "provenance.json").read_text())["packages"]
    assert {"draftsmith", "torch", "transformers", "deepspeed"} <= set(packages)


# The target


def test_a_target_is_identified_by_shape_and_precision(embedded_target):
    found = identify_target(schema.Target(model=str(embedded_target), dtype="float32"))
    config = json.loads((embedded_target / "config.json").read_text())
    assert (found.hidden_size, found.vocab_size) == (config["hidden_size"], config["vocab_size"])
    assert found.num_hidden_layers == config["num_hidden_layers"]
    assert found.dtype == "float32"


def test_the_same_weights_elsewhere_are_the_same_target(embedded_target, target_copy):
    (target_copy / "README.md").write_text("not part of the model")
    assert fingerprint(target_copy) == fingerprint(embedded_target)


@pytest.mark.parametrize("pattern", ["config.json", "*.safetensors"])
def test_one_changed_byte_is_another_target(pattern, embedded_target, target_copy):
    path = sorted(target_copy.glob(pattern))[-1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1 if pattern != "config.json" else ord("\n") ^ ord(" ")
    path.write_bytes(content)
    assert fingerprint(target_copy) != fingerprint(embedded_target)


def test_a_folder_without_weights_is_refused_unless_they_are_dummies(target_copy):
    for path in target_copy.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(UserError, match=r"found no \*\.safetensors"):
        fingerprint(target_copy)
    assert fingerprint(target_copy, load_format="dummy")


def test_a_hub_model_is_identified_by_its_commit(tmp_path, monkeypatch, embedded_target):
    def cached(name, file, revision):
        snapshot = tmp_path / name / "snapshots" / (revision or "c0ffee")
        snapshot.mkdir(parents=True, exist_ok=True)
        return shutil.copy(embedded_target / file, snapshot / file)

    monkeypatch.setattr(target_config, "hf_hub_download", cached)
    floating = fingerprint("some/model")
    assert fingerprint("some/model", revision="c0ffee") == floating
    assert fingerprint("some/model", revision="decaf") != floating
    assert fingerprint("other/model") != floating


def test_a_hub_model_that_cannot_be_reached_is_a_users_mistake():
    with pytest.raises(UserError, match="found neither a folder of that name nor a model on the hub"):
        identify_target(schema.Target(model="no-such-org/no-such-model"))
