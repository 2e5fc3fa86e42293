"""kill -9 of the loop at named and at random moments: gone on with, it ends as if it had never been killed.

No engine runs here; the processes of a real one are killed by tests/kills.py.
"""

import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drafters import tiny_recipe
from loop_lives import (
    Lives,
    Run,
    find_differences,
    find_leftovers,
    optimizer_tensors,
    prepare_run,
    whole_shards,
)

from data.rounds import read_round
from recipes.errors import UserError
from train import distill
from train.rounds import DataPhase

KINDS = {
    "keep": {"data.policy": "keep"},
    "rolling": {"data.policy": "rolling"},
    "ahead": {"data.policy": "rolling", "rounds.ahead": True},
}
CHECKPOINT_FILES = {"config.json", "model.safetensors", "draftsmith.json", "README.md"}
NUM_RANDOM, MOST_CHANGES = 8, 60  # kills of a run, and changes before each; it takes 374 in all
POINTS = [  # before the change of a path: which, for the n-th time
    ("the first shard is whole but has no name", "shards/shard-00000.safetensors", 1),
    ("a shard has its name, the manifest does not know it", "shards/manifest.json", 2),
    ("all shards of a round are there, its report is not", "rounds/round-1.json", 1),
    ("all shards are there, the manifest does not say that it is complete", "shards/manifest.json", 7),
    ("the first state is whole but has no name", "state/step-2", 1),
    ("a state is there without its checkpoint", "checkpoints/.checkpoint-4.tmp", 1),
    ("a checkpoint is whole but has no name", "checkpoints/checkpoint-4", 1),
    ("a checkpoint has its name, `latest` is at the one before", "checkpoints/latest", 2),
    ("the last checkpoint has its name, `latest` is at the one before", "checkpoints/latest", 6),
    ("`latest` follows, the former state is still there", "state/step-8/draftsmith_state.json", 1),
    ("half of an old checkpoint is removed", "checkpoints/.checkpoint-6.tmp/README.md", 2),
    ("the report is whole but has no name", "report.json", 1),
    ("the report is there, the card does not know it", "checkpoints/checkpoint-9/README.md", 1),
]


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    with Lives() as running:
        yield running


@pytest.fixture(scope="module")
def straight(lives, tmp_path_factory) -> dict[str, Run]:
    """Kind -> a run that nobody disturbed."""
    runs = {}
    for kind, settings in KINDS.items():
        runs[kind] = prepare_run(tmp_path_factory.mktemp(kind), settings)
        assert lives.live(runs[kind]) == 0, runs[kind].said
    return runs


def live(lives: Lives, run: Run, changed: str | None = None, number: int = 0) -> int:
    """The exit code of a life that makes no whole shard again, and leaves no half a checkpoint."""
    before = whole_shards(run.output_dir)
    code = lives.live(run, changed, number)
    after = whole_shards(run.output_dir)
    kept = [path for path in before if path in after]  # the others are consumed
    assert [after[path] for path in kept] == [before[path] for path in kept]
    for path in (run.output_dir / "checkpoints").glob("*"):
        if not path.name.startswith("."):
            assert {file.name for file in path.iterdir()} == CHECKPOINT_FILES, path
    return code


def check_same_end(run: Run, expected: Run) -> None:
    assert find_leftovers(run.output_dir) == []
    assert list(find_differences(run.output_dir, expected.output_dir)) == []


@pytest.mark.parametrize(
    ("changed", "number"), [point[1:] for point in POINTS], ids=[point[0] for point in POINTS]
)
def test_killed_when(changed, number, lives, straight, tmp_path):
    run = prepare_run(tmp_path, KINDS["keep"])
    assert live(lives, run, changed, number) == -signal.SIGKILL, run.said
    assert live(lives, run) == 0, run.said
    check_same_end(run, straight["keep"])


@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again_at_random_moments(kind, lives, straight, tmp_path):
    run, random_of = prepare_run(tmp_path, KINDS[kind]), random.Random(kind)
    codes = [live(lives, run, None, random_of.randint(1, MOST_CHANGES)) for _ in range(NUM_RANDOM)]
    assert set(codes) == {-signal.SIGKILL}
    assert live(lives, run) == 0, run.said
    check_same_end(run, straight[kind])


@pytest.mark.parametrize("kind", ["keep", "rolling"])
def test_what_is_learnt_in_turns_on_one_device_is_the_same(kind, lives, straight, tmp_path):
    run = prepare_run(tmp_path, KINDS[kind], takes_turns=True)
    assert live(lives, run) == 0, run.said
    check_same_end(run, straight[kind])


def test_a_drafter_that_made_data_while_another_was_trained_learns_the_same(straight):
    made = straight["ahead"].output_dir
    checkpoints = [read_round(made, number).checkpoint for number in range(3)]
    assert [each and Path(each).name for each in checkpoints] == [None, None, "checkpoint-3"]
    masters = (list(optimizer_tensors(each.output_dir)) for each in (straight["ahead"], straight["rolling"]))
    assert all(torch.equal(*pair) for pair in zip(*masters, strict=True))  # stub answers know no drafter


@pytest.mark.parametrize("changed", ["shards/manifest.json", "shards/shard-00001.safetensors"])
def test_killed_when_shards_are_consumed(changed, lives, straight, tmp_path):
    run = prepare_run(tmp_path, KINDS["rolling"])
    number = 4 if changed.endswith("json") else 2  # the manifest's first word of it; the file's removal
    assert live(lives, run, changed, number) == -signal.SIGKILL, run.said
    assert live(lives, run) == 0, run.said
    check_same_end(run, straight["rolling"])


# Processes


def test_a_script_that_the_training_runs_ends_with_it(tmp_path, monkeypatch):
    get_death_signal = 2  # PR_GET_PDEATHSIG, <linux/prctl.h>
    asks = f"ctypes.CDLL(None).prctl({get_death_signal}, ctypes.byref(found))"
    told = "raise SystemExit(2 if found.value == 9 else 0)"
    (tmp_path / "script.py").write_text(f"import ctypes; found = ctypes.c_int(); {asks}; {told}")
    monkeypatch.setattr(distill, "REPOSITORY", tmp_path)
    with pytest.raises(UserError, match="refused"):
        distill.run_child("script.py", [], tiny_recipe())


def test_an_order_to_a_host_that_just_died_is_no_crash(tmp_path):
    data = DataPhase(tiny_recipe(f"output_dir={tmp_path}"), [])
    with data:
        data._child = subprocess.Popen(["true"], stdin=subprocess.PIPE, text=True)
        data._child.wait()
        said = iter([None, -signal.SIGKILL])  # alive when it is asked first
        data._child.poll = lambda: next(said)
        data._order(0, None)
        assert data._wait(0) == -signal.SIGKILL
