"""Whole trainings in processes of their own: killed and resumed, on two ranks, through the launcher."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drafters import REPOSITORY
from small_training import small_recipe, write_shards, write_target
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.manifest import CheckpointManifest, read_manifest
from recipes.schema import Recipe
from train.checkpoint import load_published

STEPS = 100
LIMIT_S = 300


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def make_run(folder: Path, target: Path, **train) -> Recipe:
    recipe = small_recipe(folder, target, **({"steps": STEPS, "save_every_steps": 50} | train))
    write_shards(recipe, num_sequences=13)
    return recipe


def spawn(recipe: Recipe, rank: int = 0, world_size: int = 1, port: int = 0) -> subprocess.Popen:
    path = recipe.output_dir / "recipe.json"
    path.write_text(recipe.model_dump_json())
    launched = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    if world_size > 1:
        environment |= {name: str(value) for name, value in launched.items()}
    command = [sys.executable, str(Path(__file__).with_name("train_only.py")), str(path)]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(*processes: subprocess.Popen) -> list[str]:
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


def curve(recipe: Recipe, tag: str) -> dict[int, float]:
    """Step -> value; the run that went on replaces what the killed one wrote beyond its checkpoint."""
    events = EventAccumulator(str(recipe.output_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {point.step: point.value for point in events.Scalars(tag)}


def final_weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_published(recipe.output_dir / "checkpoints" / "latest").state_dict()


@pytest.fixture(scope="module")
def straight(tmp_path_factory, target) -> Recipe:
    recipe = make_run(tmp_path_factory.mktemp("straight"), target)
    finish(spawn(recipe))
    return recipe


def kill_after_step(process: subprocess.Popen, step: int) -> None:
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            break
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_run_killed_and_resumed_equals_one_that_was_not(straight, target, tmp_path):
    recipe = make_run(tmp_path, target)
    kill_after_step(spawn(recipe), 63)
    assert (tmp_path / "checkpoints" / "latest").readlink() == Path("checkpoint-50")
    (output,) = finish(spawn(recipe))
    assert "step 51/100" in output
    assert "step 50/100" not in output
    for tag, tolerance in (("loss/train", 1e-6), ("train/learning_rate", 0), ("train/grad_norm", 1e-5)):
        resumed, expected = curve(recipe, tag), curve(straight, tag)
        assert list(resumed) == list(expected) == list(range(1, STEPS + 1))
        assert resumed == pytest.approx(expected, rel=0, abs=tolerance)
    assert all(
        torch.equal(final_weights(recipe)[name], weight) for name, weight in final_weights(straight).items()
    )
    manifests = [
        read_manifest(run.output_dir / "checkpoints" / "latest" / "draftsmith.json", CheckpointManifest)
        for run in (recipe, straight)
    ]
    assert manifests[0].tokens_seen == manifests[1].tokens_seen > 0
    assert manifests[0].sequences_seen == STEPS * recipe.train.sequences_per_step


def test_the_run_learns(straight):
    losses = curve(straight, "loss/train")
    assert losses[STEPS] < 0.8 * losses[1]
    assert curve(straight, "accept_sim/chain")[STEPS] > 1.2


def test_every_curve_is_there(straight):
    events = EventAccumulator(str(straight.output_dir / "tensorboard"))
    events.Reload()
    depths = [f"accept_sim/depth_{depth}" for depth in (1, 2, 3)]
    assert set(events.Tags()["scalars"]) == {
        *("loss/train", "accept_sim/chain", *depths, "train/learning_rate", "train/grad_norm"),
        *("time/step_s", "time/train_s", "data/wait_s"),
        *("data/anchor_coverage", "data/anchor_coverage_least"),
    }
    (whole,) = events.Scalars("time/train_s")
    assert whole.step == STEPS
    assert whole.value > sum(point.value for point in events.Scalars("time/step_s"))


def test_a_finished_run_is_left_as_it_is(straight):
    before = (straight.output_dir / "checkpoints" / "latest" / "draftsmith.json").read_text()
    (output,) = finish(spawn(straight))
    assert "checkpoint-100" in output
    assert (straight.output_dir / "checkpoints" / "latest" / "draftsmith.json").read_text() == before


def test_only_the_checkpoints_asked_for_and_the_newest_state_are_kept(straight):
    names = sorted(path.name for path in (straight.output_dir / "checkpoints").iterdir())
    assert names == ["checkpoint-100", "checkpoint-50", "latest"]
    assert [path.name for path in (straight.output_dir / "state").iterdir() if path.is_dir()] == ["step-100"]


def test_a_truncated_shard_is_told_before_anything_is_trained(target, tmp_path):
    recipe = make_run(tmp_path, target)
    shard = tmp_path / "shards" / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    process = spawn(recipe)
    output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 2, output
    assert "shard-00001.safetensors: truncated or altered" in " ".join(output.split())
    assert not (tmp_path / "checkpoints").exists()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def spawn_two(recipe: Recipe) -> list[subprocess.Popen]:
    port = free_port()
    return [spawn(recipe, rank, world_size=2, port=port) for rank in range(2)]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory, target) -> Recipe:
    recipe = make_run(tmp_path_factory.mktemp("two"), target, steps=STEPS, save_every_steps=STEPS)
    finish(*spawn_two(recipe))
    return recipe


def test_two_ranks_give_the_losses_of_one(on_two_ranks, straight):
    for tag in ("loss/train", "train/learning_rate", "train/grad_norm", "accept_sim/chain"):
        assert curve(on_two_ranks, tag) == pytest.approx(curve(straight, tag), rel=1e-5)


def test_a_state_of_two_ranks_is_taken_over_by_one(on_two_ranks, tmp_path):
    """The bits are test_train_ranks_change.py's."""
    shutil.copytree(on_two_ranks.output_dir, tmp_path / "longer", symlinks=True)
    longer = on_two_ranks.train.model_copy(update={"steps": STEPS + 1})
    (output,) = finish(
        spawn(on_two_ranks.model_copy(update={"output_dir": tmp_path / "longer", "train": longer}))
    )
    assert f"state/step-{STEPS}: state of 2 ranks taken over by 1 rank" in output
    assert f"step {STEPS}/" not in output
    assert f"step {STEPS + 1}/{STEPS + 1}" in output


def test_a_mistake_under_the_launcher_ends_all_ranks_with_exit_code_2(tmp_path):
    launcher = [
        str(Path(sys.executable).with_name("deepspeed")),
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
    ]
    recipe = [
        str(REPOSITORY / "recipes" / "tiny_cpu.yaml"),
        "train.sequences_per_step=3",
        f"output_dir={tmp_path}",
    ]
    ended = subprocess.run(
        [*launcher, str(REPOSITORY / "train" / "distill.py"), *recipe],
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("train.sequences_per_step is 3, no multiple of 2 ranks x") == 1
    assert list(tmp_path.iterdir()) == []
