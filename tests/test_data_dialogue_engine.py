"""Conversations of several turns through data/regenerate.py on the embedded target."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from data.outcome import count_cut
from data.prompts import load_prompts
from data.render import ChatTemplate
from data.shards import MANIFEST_NAME, SPOOL_NAME, Sequence, Shards, open_shards
from recipes.manifest import ShardManifest, read_manifest
from tests.drafters import EMBEDDED_TARGET, TINY_RECIPE
from tests.near_ties import count_near_ties
from tests.true_states import check_states

REPOSITORY = Path(__file__).parent.parent
pytestmark = pytest.mark.engine
TURNS = [1, 2, 3, 3, 2, 3]
AGAIN = {"role": "user", "content": "And now with a comment."}
GIVEN = {"role": "assistant", "content": "This is not the target's."}
END_OF_TURN = 2
MOST_NEAR_TIES = 1  # of six texts; none was seen
LIMIT_S = 400
SETTINGS = {
    "rounds.count": 1,
    "rounds.first_share": "null",
    "data.num_prompts": len(TURNS),
    "data.max_prompt_tokens": 900,
    "data.shard_tokens": 600,  # a conversation or two
    "data.sampling.max_tokens": 120,
    "data.check_sequences": 99,  # every sequence of the first shard, with transformers
    "data.check_again": 99,  # every sequence, with a prefill
    "data.keep_truncated": "false",
    "serve.max_model_len": 1024,
    "serve.max_num_batched_tokens": 128,  # a history is read in several steps
    "serve.max_num_seqs": 4,
    "serve.kv_cache_gib": 0.5,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    lines = []
    for prompt, turns in zip(load_prompts("stdlib:heldout", len(TURNS)), TURNS, strict=True):
        messages = [*map(dict, prompt.messages), *[GIVEN, AGAIN] * (turns - 1)]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    finish(command(folder, folder / "chats.jsonl"))
    return folder


def command(output_dir: Path, prompts: Path, **changes: object) -> list[str]:
    settings = {"output_dir": output_dir, "data.prompts": prompts} | SETTINGS | changes
    script = str(REPOSITORY / "data" / "regenerate.py")
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return [sys.executable, script, str(TINY_RECIPE), *overrides]


def finish(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def shards(run: Path) -> Shards:
    return open_shards(run / "shards")


@pytest.fixture(scope="module")
def sequences(shards: Shards) -> list[Sequence]:
    return [shards[index] for index in range(len(shards))]


def spans_of(sequence: Sequence) -> list[list[int]]:
    """The ids of each stretch of supervised tokens."""
    edges = torch.nonzero(torch.diff(torch.nn.functional.pad(sequence.loss_mask.int(), (1, 1)))).flatten()
    pairs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [sequence.token_ids[start:end].tolist() for start, end in pairs]


def test_every_conversation_has_one_sequence_or_is_counted(shards):
    assert sum(entry.further for entry in shards.manifest.shards) == 0
    assert len(shards) + sum(shards.manifest.dropped.values()) == len(TURNS)
    whole = len(shards) - count_cut(shards.manifest).total()
    assert whole > 1


def test_every_answer_is_supervised_to_its_end_and_the_given_ones_are_gone(sequences):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    spans = [spans_of(sequence) for sequence in sequences]
    assert max(map(len, spans)) == max(TURNS)
    for sequence, found in zip(sequences, spans, strict=True):
        text = tokenizer.decode(sequence.token_ids)
        parts = [part.partition("\n") for part in text.split("<|im_start|>")]
        answers = [said.rstrip("\n") for role, _, said in parts if role == "assistant"]
        assert [tokenizer.decode(ids) for ids in found] == answers
        assert all(ids[-1] == END_OF_TURN for ids in found)
        assert GIVEN["content"] not in text


def test_the_prompt_of_every_answer_is_what_the_endpoint_renders(sequences):
    template = ChatTemplate(AutoTokenizer.from_pretrained(EMBEDDED_TARGET))
    for sequence in sequences:
        ids = sequence.token_ids.tolist()
        parts = template.tokenizer.decode(ids).split("<|im_start|>")[1:]
        said = [part.partition("<|im_end|>")[0].partition("\n") for part in parts]
        messages = [{"role": role, "content": content} for role, _, content in said]
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt_ids = template.render(messages[:number])
                assert ids[: len(prompt_ids)] == prompt_ids
                assert sequence.loss_mask[len(prompt_ids) - 1 : len(prompt_ids) + 1].tolist() == [False, True]


def test_all_states_were_compared_and_are_the_transformers_models(run, sequences):
    report = json.loads((run / "rounds" / "round-0.json").read_text())
    assert report["captured"]["least_cosine"] > 0.999
    check_states(sequences)


def test_killed_between_two_turns_and_gone_on_with_it_makes_the_same_but_for_near_ties(
    run, shards, sequences, tmp_path
):
    # an engine opens the third shard once one of the first two is whole
    unchecked = {"data.check_sequences": 0, "data.check_again": 0, "data.engines": 1}
    again = command(tmp_path, run / "chats.jsonl", **unchecked)
    process = subprocess.Popen(again, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    manifest, spool = tmp_path / "shards" / MANIFEST_NAME, tmp_path / "shards" / SPOOL_NAME
    deadline = time.monotonic() + LIMIT_S
    # a shard is whole, and something of another is captured
    while not (manifest.exists() and '"file"' in manifest.read_text() and any(spool.glob("*/*"))):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    begun = read_manifest(manifest, ShardManifest)
    assert 0 < len(begun.shards) < len(shards.manifest.shards)
    first = tmp_path / "shards" / begun.shards[0].file
    kept = first.stat().st_mtime_ns
    finish(again)
    ended = read_manifest(manifest, ShardManifest)
    counted = [
        [(entry.file, entry.sequences, entry.cut, entry.dropped) for entry in manifest.shards]
        for manifest in (ended, shards.manifest)
    ]
    assert counted[0] == counted[1]
    assert ended.dropped == shards.manifest.dropped
    again = open_shards(tmp_path / "shards")
    assert count_near_ties([again[index] for index in range(len(again))], sequences) <= MOST_NEAR_TIES
    assert first.stat().st_mtime_ns == kept
    assert not spool.exists()
