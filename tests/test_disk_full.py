"""A disk that fills stops the loop with a line that says so; with room again, the same command goes on.

No engine runs here.  The disk is a small tmpfs, which takes root to mount.
"""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from loop_lives import Lives, Run, find_differences, find_leftovers, prepare_run, whole_shards
from safetensors import safe_open

from data.shards import MANIFEST_NAME, open_shards
from train.checkpoint import load_published

ROOMY_KIB = 64 * 1024
SETTINGS = {"rounds.first_share": 0.85}  # five of six shards, 80 KiB each, before the first checkpoint


@dataclass(frozen=True)
class Disk:
    path: Path

    @property
    def filler(self) -> Path:
        """Somebody else's."""
        return self.path / "filler"

    def resize(self, kib: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kib}k", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOMY_KIB}k", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield Disk(path)
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    with Lives() as running:
        yield running


@pytest.fixture(scope="module")
def straight(lives, tmp_path_factory) -> Run:
    """A run that nobody disturbed."""
    run = prepare_run(tmp_path_factory.mktemp("straight"), SETTINGS)
    assert lives.live(run) == 0, run.said
    return run


def check_stopped(code: int, run: Run, said: str) -> None:
    """By one line, the last."""
    assert code == 1, run.said
    *_, last = run.said.strip().splitlines()
    assert last.startswith("error: ")
    assert said in last


def check_shards_are_whole(run: Run) -> None:
    """Nothing else has a shard's name; the manifest may not know the last."""
    folder = run.output_dir / "shards"
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            assert len(json.loads(shard.metadata()["prompt_ids"])) == len(shard.get_tensor("lengths"))
    if (folder / MANIFEST_NAME).exists():
        open_shards(folder)
    assert find_leftovers(folder) == []


def check_goes_on(lives: Lives, run: Run, straight: Run) -> None:
    """To where it would have ended, and makes no whole shard again."""
    before = whole_shards(run.output_dir)
    assert lives.live(run) == 0, run.said
    after = whole_shards(run.output_dir)
    assert {path: after[path] for path in before} == before
    assert find_leftovers(run.output_dir) == []
    assert list(find_differences(run.output_dir, straight.output_dir)) == []


@pytest.mark.parametrize("kib", [100, 200, 300])
def test_a_disk_too_small_for_the_shards(kib, disk, lives, straight, tmp_path):
    run = prepare_run(tmp_path, SETTINGS, disk.path)
    disk.resize(kib)
    check_stopped(lives.live(run), run, f"no space left on the disk while writing {run.output_dir}/shards/")
    assert "Traceback" not in run.said
    check_shards_are_whole(run)
    disk.resize(ROOMY_KIB)
    check_goes_on(lives, run, straight)


@pytest.mark.parametrize(
    ("changed", "num_shards"),
    [
        ("shards/spool/0/0.safetensors.tmp", 0),
        ("shards/shard-00001.safetensors.tmp", 1),
        ("shards/shard-00001.safetensors", 2),
    ],
    ids=["while states are captured", "while a shard is written", "before the manifest is written"],
)
def test_somebody_fills_the_disk(changed, num_shards, disk, lives, straight, tmp_path):
    run = prepare_run(tmp_path, SETTINGS, disk.path)
    code = lives.live(run, changed, 1, disk.filler)
    check_stopped(code, run, "no space left on the disk while writing")
    check_shards_are_whole(run)
    assert len(list((run.output_dir / "shards").glob("*.safetensors"))) == num_shards
    disk.filler.unlink()
    check_goes_on(lives, run, straight)


def test_a_disk_too_small_for_another_checkpoint_is_told_before_it_is_written(
    disk, lives, straight, tmp_path
):
    run = prepare_run(tmp_path, SETTINGS, disk.path)
    disk.resize(8 * 1024)
    check_stopped(lives.live(run), run, "a checkpoint and its state take")
    check_latest_is_whole(run, "checkpoint-2")
    assert find_leftovers(run.output_dir) == []
    disk.resize(ROOMY_KIB)
    check_goes_on(lives, run, straight)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("state/.step-4.tmp", "a checkpoint and its state take"),
        ("checkpoints/.checkpoint-4.tmp", "no space left on the disk"),
        ("checkpoints/.checkpoint-4.tmp/config.json", "a checkpoint and its state take"),
    ],
    ids=["DeepSpeed's state", "the checkpoint", "the checkpoint's weights"],
)
def test_a_checkpoint_that_cannot_be_written(changed, said, disk, lives, straight, tmp_path):
    run = prepare_run(tmp_path, SETTINGS, disk.path)
    check_stopped(lives.live(run, changed, 1, disk.filler), run, said)
    check_latest_is_whole(run, "checkpoint-3")
    disk.filler.unlink()
    check_goes_on(lives, run, straight)


def check_latest_is_whole(run: Run, name: str) -> None:
    latest = run.output_dir / "checkpoints" / "latest"
    assert latest.readlink() == Path(name)
    load_published(latest)
