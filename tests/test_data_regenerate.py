"""data/regenerate.py on the embedded target: true states, true text, and after a kill -9 the same, but for
near-ties: a shard made again has other company in the batch."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from data.filling import fill_shards
from data.prompts import load_prompts
from data.rounds import read_round
from data.shard_plan import make_plan
from data.shards import MANIFEST_NAME, Sequence, Shards, open_shards, shard_name
from recipes.errors import UserError
from recipes.load import load_recipe
from recipes.manifest import ShardManifest, read_manifest
from recipes.schema import Recipe
from tests.drafters import EMBEDDED_TARGET, TINY_RECIPE
from tests.near_ties import count_near_ties
from tests.true_states import check_states

REPOSITORY = Path(__file__).parent.parent
pytestmark = pytest.mark.engine
SETTINGS: dict[str, Any] = {
    "rounds.count": 1,
    "rounds.first_share": "null",
    "data.num_prompts": 12,
    "data.shard_tokens": 200,
    "data.max_prompt_tokens": 60,
    "data.sampling.max_tokens": 20,
    "data.check_sequences": 2,
    "serve.max_num_seqs": 4,
    "serve.kv_cache_gib": 0.5,
}
END_OF_TURN = 2
MOST_NEAR_TIES = 3  # of a dozen texts; one was seen
LIMIT_S = 240  # on cores that others use too
ENGINE_PAGES = 20_000  # resident, of 4 KiB; nothing but an engine has so many
TAPS = load_recipe(TINY_RECIPE).drafter.target_layer_ids


def overrides(output_dir: Path, **changes: object) -> list[str]:
    settings = SETTINGS | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"output_dir={output_dir}", *(f"{name}={value}" for name, value in settings.items())]


def recipe_of(output_dir: Path, **changes: object) -> Recipe:
    return load_recipe(TINY_RECIPE, overrides(output_dir, **changes))


def command(output_dir: Path, engines: int) -> list[str]:
    script = str(REPOSITORY / "data" / "regenerate.py")
    return [sys.executable, script, str(TINY_RECIPE), *overrides(output_dir, data__engines=engines)]


def regenerate(output_dir: Path, engines: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(output_dir, engines), capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data phase from start to end."""
    output_dir = tmp_path_factory.mktemp("run")
    result = regenerate(output_dir)
    assert result.returncode == 0, result.stderr
    return output_dir


@pytest.fixture(scope="module")
def shards(run: Path) -> Shards:
    return open_shards(run / "shards")


@pytest.fixture(scope="module")
def sequences(shards: Shards) -> list[Sequence]:
    return [shards[index] for index in range(len(shards))]


def test_every_prompt_has_a_sequence_or_is_counted(shards):
    assert shards.manifest.complete
    assert len(shards.manifest.shards) > 2
    assert len(shards) + sum(shards.manifest.dropped.values()) == SETTINGS["data.num_prompts"]


def test_nothing_but_shards_is_left(run, shards):
    expected = [MANIFEST_NAME, *(entry.file for entry in shards.manifest.shards)]
    assert sorted(path.name for path in (run / "shards").iterdir()) == sorted(expected)


def test_the_mask_begins_after_the_rendered_prompt_and_only_the_last_token_ends_the_turn(run, sequences):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    prompts = {prompt.id: prompt for prompt in load_prompts("stdlib:train", SETTINGS["data.num_prompts"])}
    for sequence, prompt_id in zip(sequences, prompt_ids(run), strict=True):
        messages = [dict(message) for message in prompts[prompt_id].messages]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        emitted = sequence.token_ids[sequence.loss_mask].tolist()
        assert tokenizer.decode(sequence.token_ids[~sequence.loss_mask]) == text
        assert sequence.loss_mask.tolist() == sorted(sequence.loss_mask.tolist())
        assert END_OF_TURN not in emitted[:-1]
        assert emitted[-1] == END_OF_TURN or len(emitted) == SETTINGS["data.sampling.max_tokens"]


def prompt_ids(run: Path) -> list[str]:
    ids = []
    for file in sorted((run / "shards").glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            ids += json.loads(shard.metadata()["prompt_ids"])
    return ids


def test_the_states_are_the_transformers_models(sequences):
    check_states(sequences)


def test_the_only_round_is_reported(run, shards):
    report, entries = read_round(run, 0), shards.manifest.shards
    assert report.tokens_per_step == 1
    assert report.captured.sequences == len(shards)
    assert report.captured.tokens == sum(entry.tokens for entry in entries)
    assert report.captured.shard_bytes == sum(
        (run / "shards" / entry.file).stat().st_size for entry in entries
    )
    assert report.captured.dropped == shards.manifest.dropped
    assert report.captured.least_cosine > 0.999


def test_a_finished_run_has_nothing_to_do(run):
    path = run / "shards" / MANIFEST_NAME
    before = path.stat().st_mtime_ns
    plan = make_plan(recipe_of(run))
    assert plan.missing == []
    assert fill_shards(plan).engine_seconds == 0
    assert path.stat().st_mtime_ns == before


def test_two_engines_killed_in_the_middle_and_gone_on_with_make_what_one_makes(run, sequences, tmp_path):
    output_dir = tmp_path / "killed"
    folder = output_dir / "shards"
    process = subprocess.Popen(command(output_dir, 2), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(folder / MANIFEST_NAME, shard_name(1), process)
    children = child_pids(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(children) >= 2
    assert not read_manifest(folder / MANIFEST_NAME, ShardManifest).complete
    (folder / shard_name(0)).unlink(missing_ok=True)  # a shard that is gone is made again, too
    kept = (folder / shard_name(1)).stat().st_mtime_ns
    assert regenerate(output_dir, engines=2).returncode == 0
    assert prompt_ids(output_dir) == prompt_ids(run)
    again = open_shards(folder)
    assert [entry.file for entry in again.manifest.shards] == [
        entry.file for entry in open_shards(run / "shards").manifest.shards
    ]
    found = [again[index] for index in range(len(again))]
    check_states(found)
    assert count_near_ties(found, sequences) <= MOST_NEAR_TIES
    assert (folder / shard_name(1)).stat().st_mtime_ns == kept
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()], "an engine outlived its parent"


def child_pids(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def resident_pages(pid: str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def wait_for(manifest: Path, shard: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if manifest.exists() and shard in manifest.read_text():
            return
        assert process.poll() is None, f"ended before {shard}"
        time.sleep(0.02)
    raise AssertionError(f"no {shard} within {LIMIT_S} s")


def test_shards_of_other_settings_are_not_added_to(run):
    recipe = recipe_of(run, data__sampling__temperature=0.1, drafter__target_layer_ids=[1, 3, 5])
    with pytest.raises(UserError, match=r"data\.sampling: found") as caught:
        make_plan(recipe)
    expected = f"drafter.target_layer_ids: found {TAPS}, the recipe says [1, 3, 5]"
    assert expected in str(caught.value)
    with pytest.raises(UserError, match=r"data\.sampling: found .* the recipe says .*\[0\.0, 0\.7\]"):
        make_plan(recipe_of(run, data__sampling__temperature=[0, 0.7]))


def test_a_mode_of_thinking_that_the_template_does_not_know_is_refused(run, tmp_path):
    with pytest.raises(UserError, match=r"data\.thinking on: the chat template of .* has no enable_thinking"):
        make_plan(recipe_of(tmp_path, data__thinking="on"))
    with pytest.raises(UserError, match=r"data\.keep_truncated: found True, the recipe says False"):
        make_plan(recipe_of(run, data__keep_truncated="false"))


def test_shards_are_not_given_to_other_rounds(run):
    with pytest.raises(UserError, match=r"rounds\.count: found 1, the recipe says 3"):
        make_plan(recipe_of(run, rounds__count=3))


def test_shards_of_another_target_are_not_added_to(run, tmp_path):
    target = shutil.copytree(EMBEDDED_TARGET, tmp_path / "target")
    config = target / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(UserError, match="target: found"):
        make_plan(recipe_of(run, target__model=target))


def test_settings_that_change_no_shard_may_change(run):
    changes = {"data__check_sequences": 0, "data__engines": 3, "serve__max_num_seqs": 2}
    assert make_plan(recipe_of(run, **changes)).missing == []


def test_an_engine_that_dies_ends_the_run(tmp_path):
    process = subprocess.Popen(command(tmp_path, 2), stderr=subprocess.PIPE, text=True)
    # children are multiprocessing's small resource tracker and two engines
    while max(map(resident_pages, children := child_pids(process.pid)), default=0) < ENGINE_PAGES:
        assert process.poll() is None
        time.sleep(0.1)
    os.kill(int(max(children, key=resident_pages)), signal.SIGKILL)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "an engine of the data phase ended with code -9" in said
    assert "Traceback" not in said


def test_a_damaged_shard_stops_the_run_and_is_named(run):
    path = run / "shards" / shard_name(0)
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    result = regenerate(run)
    path.write_bytes(content)
    assert result.returncode == 2
    assert shard_name(0) in result.stderr
    assert "Traceback" not in result.stderr
