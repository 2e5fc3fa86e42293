"""kill -9 of regeneration over conversations of several turns: gone on with, each is there once.

No engine runs here; tests/test_data_dialogue_engine.py kills a real one.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loop_lives import find_leftovers, prompt_ids, whole_shards

from data.mixture import load_source
from data.outcome import count_cut
from data.shards import MANIFEST_NAME
from recipes.manifest import ShardManifest, read_manifest

NUM_CHATS, NUM_RANDOM, MOST_CHANGES = 24, 6, 120
SETTINGS = {
    "data.num_prompts": NUM_CHATS,
    "data.max_prompt_tokens": 400,
    "data.sampling.max_tokens": 16,
    "data.shard_tokens": 500,
    "data.check_sequences": 0,  # no weights answer
    "rounds.count": 1,
}
POINTS = [  # before the change of a path: which, for the n-th time
    ("the first shard is whole but has no name", "shards/shard-00000.safetensors", 1),
    ("a shard has its name, the manifest does not know it", "shards/manifest.json", 2),
    ("all shards are there, the manifest does not say that it is complete", "shards/manifest.json", -1),
    ("all shards are there, the round has no report", "rounds/round-0.json", 1),
]
Live = Callable[..., int]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """The exit code of one life that makes data in a folder, and ends before a change."""
    script = str(Path(__file__).with_name("killable_turns.py"))
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def order(folder: Path, changed: str | None = None, number: int = 0) -> int:
        write_chats(folder / "chats.jsonl")
        own = {"output_dir": folder / "run", "data.prompts": folder / "chats.jsonl"}
        overrides = [f"{name}={value}" for name, value in (SETTINGS | own).items()]
        told = {"overrides": overrides, "log": str(folder / "log"), "changed": changed, "number": number}
        print(json.dumps(told), file=process.stdin, flush=True)
        return int(process.stdout.readline())

    yield order
    process.kill()
    process.wait()


def write_chats(path: Path) -> None:
    """One to four turns each."""
    rows = []
    for number in range(NUM_CHATS):
        users = [{"role": "user", "content": f"What is f{number} {turn}?"} for turn in range(1 + number % 4)]
        between = [{"role": "assistant", "content": "given"} for _ in users]
        messages = [each for pair in zip(users, between, strict=True) for each in pair][:-1]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows))


def read(folder: Path) -> ShardManifest:
    return read_manifest(folder / "run" / "shards" / MANIFEST_NAME, ShardManifest)


@pytest.fixture(scope="module")
def straight(live, tmp_path_factory) -> Path:
    """A folder in which nobody disturbed the data phase."""
    folder = tmp_path_factory.mktemp("straight")
    assert live(folder) == 0, (folder / "log").read_text()
    return folder


def check_same_end(folder: Path, straight: Path) -> None:
    found, expected = read(folder), read(straight)
    unnamed = [
        [entry.model_copy(update={"sources": list(entry.sources.values())}) for entry in manifest.shards]
        for manifest in (found, expected)
    ]  # another folder, another name
    assert unnamed[0] == unnamed[1]
    assert (found.dropped, found.complete) == (expected.dropped, True)
    assert find_leftovers(folder / "run") == []


def test_every_conversation_is_there_once_or_counted(straight):
    manifest, ids = read(straight), prompt_ids(straight / "run")
    asked = [each.id for each in load_source(str(straight / "chats.jsonl"), NUM_CHATS).conversations]
    assert len(manifest.shards) > 4
    assert len(ids) == len(set(ids)) == len(asked) - sum(manifest.dropped.values())
    assert [id for id in asked if id in ids] == ids
    assert 0 < count_cut(manifest).total() < NUM_CHATS / 2


@pytest.mark.parametrize(
    ("changed", "number"), [point[1:] for point in POINTS], ids=[point[0] for point in POINTS]
)
def test_killed_when(changed, number, live, straight, tmp_path):
    number = number if number > 0 else len(read(straight).shards) + 1
    assert live(tmp_path, changed, number) == -signal.SIGKILL, (tmp_path / "log").read_text()
    before = whole_shards(tmp_path / "run")
    assert live(tmp_path) == 0, (tmp_path / "log").read_text()
    assert whole_shards(tmp_path / "run") == before | whole_shards(tmp_path / "run")
    check_same_end(tmp_path, straight)


def test_killed_again_and_again_at_random_moments(live, straight, tmp_path):
    draws, kept = random.Random("turns"), {}
    for _ in range(NUM_RANDOM):
        assert live(tmp_path, None, draws.randint(1, MOST_CHANGES)) == -signal.SIGKILL
        now = whole_shards(tmp_path / "run")
        assert now == kept | now
        kept = now
    assert live(tmp_path) == 0, (tmp_path / "log").read_text()
    assert 0 < len(kept) < len(read(straight).shards)
    check_same_end(tmp_path, straight)
