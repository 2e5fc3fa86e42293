"""Published checkpoints: whole or absent, in the published format; and which state a run may go on from."""

import json
from pathlib import Path

import pytest
import torch
from drafters import EMBEDDED_TARGET, tiny_config, tiny_recipe, write_random_drafter

from recipes.errors import UserError
from recipes.manifest import CheckpointManifest, TargetIdentity, read_manifest
from serve.checkpoint import check_checkpoint
from train.checkpoint import load_published, prune, publish, published_steps
from train.drafter import DFlashDrafter
from train.resume import RunFolders, StateManifest, check_same_run, find_last_pair

IDENTITY = TargetIdentity(
    model="t", fingerprint="0" * 64, dtype="bfloat16", hidden_size=256, vocab_size=4096, num_hidden_layers=8
)


def manifest_at(step: int) -> CheckpointManifest:
    return CheckpointManifest(
        target=IDENTITY,
        recipe=tiny_recipe().model_dump(mode="json"),
        provenance={},
        step=step,
        sequences_seen=8 * step,
        tokens_seen=1000 * step,
    )


def drafter_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    drafter = DFlashDrafter(tiny_recipe().drafter, hidden_size=256)
    return {name: weight.bfloat16() for name, weight in drafter.state_dict().items()}


def test_a_published_checkpoint_is_in_the_published_format(tmp_path):
    ckpt = publish(tmp_path, drafter_weights(), tiny_config(), manifest_at(3))
    assert ckpt == tmp_path / "checkpoint-3"
    summary = check_checkpoint(ckpt, str(EMBEDDED_TARGET))
    assert (summary.block_size, summary.dtype) == (8, "bfloat16")
    assert read_manifest(ckpt / "draftsmith.json", CheckpointManifest).step == 3
    assert "7 tokens at a time from the target's layers\n2, 4, 6" in (ckpt / "README.md").read_text()


def test_a_published_checkpoint_loads_as_it_was(tmp_path):
    weights = drafter_weights()
    loaded = load_published(publish(tmp_path, weights, tiny_config(), manifest_at(3)))
    assert loaded.shape == tiny_recipe().drafter
    state = loaded.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name].float()) for name in weights)


def test_a_checkpoint_written_elsewhere_loads(tmp_path):
    assert load_published(write_random_drafter(tmp_path / "drafter")).shape == tiny_recipe().drafter


def test_tensors_of_another_shape_are_named(tmp_path):
    weights = drafter_weights()
    weights["fc.weight"] = weights["fc.weight"][:, :512].contiguous()
    ckpt = publish(tmp_path, weights, tiny_config(), manifest_at(1))
    with pytest.raises(UserError, match=r"fc\.weight \(256, 768\), found \(256, 512\)"):
        load_published(ckpt)


def test_latest_follows_and_old_checkpoints_go(tmp_path):
    for step in (2, 4, 10):
        publish(tmp_path, drafter_weights(), tiny_config(), manifest_at(step))
        assert (tmp_path / "latest").readlink() == Path(f"checkpoint-{step}")
    prune(tmp_path, keep=2)
    assert published_steps(tmp_path) == [4, 10]
    assert (tmp_path / "latest" / "config.json").is_file()


def test_a_checkpoint_that_drafts_stays(tmp_path):
    for step in (2, 4, 10, 12):
        publish(tmp_path, drafter_weights(), tiny_config(), manifest_at(step))
    prune(tmp_path, keep=1, spared_step=4)
    assert published_steps(tmp_path) == [4, 12]


@pytest.mark.parametrize("broken_step", ["save_file", "write_json", "settle", "write_text"])
def test_an_interrupted_publication_leaves_the_last_checkpoint_in_place(broken_step, tmp_path, monkeypatch):
    publish(tmp_path, drafter_weights(), tiny_config(), manifest_at(1))

    def fail(*_arguments, **_settings):
        raise OSError("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(f"train.checkpoint.{broken_step}", fail)
        with pytest.raises(OSError, match="interrupted"):
            publish(tmp_path, drafter_weights(), tiny_config(), manifest_at(2))
    assert published_steps(tmp_path) == [1]
    assert (tmp_path / "latest").readlink() == Path("checkpoint-1")
    assert check_checkpoint(tmp_path / "latest", str(EMBEDDED_TARGET)).block_size == 8
    publish(tmp_path, drafter_weights(1), tiny_config(), manifest_at(2))
    prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "latest"]


# Which state a run may go on from


def state_of(recipe=None, **changes) -> StateManifest:
    values = {
        "target": IDENTITY,
        "recipe": (recipe or tiny_recipe()).model_dump(mode="json"),
        "provenance": {},
        "step": 1,
        "sequences_seen": 8,
        "tokens_seen": 9,
        "simulated_acceptance": 1.5,
        "world_size": 2,
        "shards": "a",
    }
    return StateManifest.model_validate(values | changes)


@pytest.mark.parametrize(
    "override",
    ["train.steps=9", "train.save_every_steps=1", "train.micro_batch_sequences=4", "eval.max_tokens=9"],
)
def test_a_run_goes_on_under_a_recipe_that_learns_the_same(override):
    check_same_run(state_of(), state_of(tiny_recipe(override)), Path("state/step-1"))


def test_a_run_goes_on_with_another_number_of_ranks():
    check_same_run(state_of(world_size=2), state_of(world_size=3), Path("state/step-1"))


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (state_of(shards="b"), "its shards were others"),
        (state_of(tiny_recipe("train.seed=5")), r"train\.seed was 0, the recipe says 5"),
        (
            state_of(tiny_recipe("drafter.sliding_window=9")),
            r"drafter\.sliding_window was 64, the recipe says 9",
        ),
        (state_of(tiny_recipe("train.optimizer.learning_rate=1")), r"train\.optimizer was .*learning_rate"),
        (state_of(tiny_recipe("train.optimizer.schedule=wsd")), r"train\.optimizer was .*cosine.*wsd"),
        (state_of(tiny_recipe("train.least_anchors=3")), r"train\.least_anchors was 1, the recipe says 3"),
        (state_of(tiny_recipe("train.init_from=a/b")), r"train\.init_from was None, the recipe says a/b"),
        (state_of(tiny_recipe("train.init_from=a", "train.lora={rank: 2}")), r"train\.lora was None"),
        (state_of(target=IDENTITY.model_copy(update={"fingerprint": "1" * 64})), "its target is t "),
    ],
)
def test_a_run_that_would_learn_something_else_is_refused_by_name(expected, message):
    with pytest.raises(UserError, match=f"(?s)state/step-1 belongs to another run.*{message}"):
        check_same_run(state_of(), expected, Path("state/step-1"))


def test_a_state_whose_recipe_cannot_be_read_is_told():
    state = state_of()
    state.recipe["train"]["forgotten"] = 1
    with pytest.raises(UserError, match=r"not one of this version.*\n.*train\.forgotten: unknown key"):
        check_same_run(state, state_of(), Path("state/step-1"))


def make_pair(folders: RunFolders, step: int, *, state: bool = True, published: bool = True) -> None:
    if state:
        folders.state(step).mkdir(parents=True)
        (folders.state(step) / "draftsmith_state.json").write_text(json.dumps({}))
    if published:
        folders.checkpoint(step).mkdir(parents=True)


def test_a_run_goes_on_from_the_newest_complete_pair(tmp_path):
    folders = RunFolders(tmp_path)
    assert find_last_pair(folders) is None
    make_pair(folders, 9)
    make_pair(folders, 10)
    make_pair(folders, 11, published=False)
    assert find_last_pair(folders) == 10


def test_checkpoints_without_their_state_are_not_silently_overwritten(tmp_path):
    folders = RunFolders(tmp_path)
    make_pair(folders, 5, state=False)
    with pytest.raises(UserError, match="checkpoints up to step 5, but no state"):
        find_last_pair(folders)
