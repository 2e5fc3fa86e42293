"""The entry script around the training: its children, what it hands them and how their failures end it."""

import json
import sys

import pytest
from drafters import tiny_config, tiny_recipe
from small_training import small_recipe, write_shards, write_target
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_eval_report import report
from test_train_checkpoint import drafter_weights, manifest_at

from data.rounds import round_path, write_round
from eval.report import write_report
from recipes.errors import MachineError, UserError
from recipes.manifest import RoundManifest, ShardManifest, read_manifest, write_json
from train import distill
from train.checkpoint import publish
from train.loop import Distilled, check_shards, check_split
from train.rounds import Round


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Stands in for the repository; `scripts(name, body)` writes one of its scripts."""
    monkeypatch.setattr(distill, "REPOSITORY", tmp_path)

    def write(name: str, body: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)

    return write


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("raise SystemExit(2)", UserError, "data/child.py refused"),
        ("raise SystemExit(1)", MachineError, "ended with code 1"),
        ("import os; os.kill(os.getpid(), 9)", MachineError, "ended with code -9"),
    ],
)
def test_a_childs_failure_keeps_its_meaning(body, error, message, scripts):
    scripts("data/child.py", body)
    with pytest.raises(error, match=message):
        distill.run_child("data/child.py", [], tiny_recipe())


def test_a_child_knows_nothing_of_the_launchers_ranks(scripts, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    scripts("data/child.py", "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))")
    distill.run_child("data/child.py", [str(tmp_path / "seen.json")], tiny_recipe())
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert not {"RANK", "MASTER_PORT"} & seen.keys()
    assert "PATH" in seen


def test_the_launchers_own_argument_is_passed_over(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["distill.py", "--local_rank=1", "r.yaml", "train.steps=3", "name=x"])
    arguments = distill.parse_arguments()
    assert (str(arguments.recipe), arguments.overrides) == ("r.yaml", ["train.steps=3", "name=x"])


def test_measuring_is_told_where_everything_is(scripts, tmp_path, monkeypatch):
    scripts("eval/measure.py", "import json, sys; json.dump(sys.argv[1:], open('argv.json', 'w'))")
    recipe = tiny_recipe(f"output_dir={tmp_path}")
    monkeypatch.setattr(distill, "add_measurement", lambda *paths: carded.append(paths))
    carded: list[tuple] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path)
        distill.measure(recipe, Distilled(tmp_path / "checkpoints" / "checkpoint-7", 7, 2.5))
    words = json.loads((tmp_path / "argv.json").read_text())
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options == {
        "--ckpt": f"{tmp_path}/checkpoints/checkpoint-7",
        "--recipe": f"{tmp_path}/recipe.yaml",
        "--suite": "stdlib:heldout",
        "--out": f"{tmp_path}/report.json",
        "--tensorboard": f"{tmp_path}/tensorboard",
        "--step": "7",
        "--simulated": "2.5",
    }
    assert carded == [(tmp_path / "checkpoints" / "checkpoint-7", tmp_path / "report.json")]


def test_a_measured_checkpoint_has_the_numbers_on_its_card(scripts, tmp_path):
    ckpt = publish(tmp_path / "checkpoints", drafter_weights(), tiny_config(), manifest_at(7))
    assert "Not measured yet." in (ckpt / "README.md").read_text()
    write_report(tmp_path / "measured.json", report(provenance={"argv": ["eval/measure.py", "--seed", "0"]}))
    scripts(
        "eval/measure.py",
        "import shutil, sys; shutil.copy('measured.json', sys.argv[sys.argv.index('--out') + 1])",
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path)
        distill.measure(tiny_recipe(f"output_dir={tmp_path}"), Distilled(ckpt, 7, 2.5))
    card = (ckpt / "README.md").read_text()
    assert "| chain | 0 | 2.50 |" in card
    assert "python eval/measure.py --seed 0" in card


def test_only_complete_shards_of_the_same_wishes_need_no_data_phase(tmp_path):
    recipe = small_recipe(tmp_path / "run", write_target(tmp_path / "target"))
    assert not distill.has_shards(recipe)
    write_shards(recipe, num_sequences=4)
    assert distill.has_shards(recipe)
    more = recipe.data.model_copy(update={"num_prompts": 2})
    assert not distill.has_shards(recipe.model_copy(update={"data": more}))
    path = recipe.output_dir / "shards" / "manifest.json"
    write_json(path, read_manifest(path, ShardManifest).model_copy(update={"complete": False}))
    assert not distill.has_shards(recipe)


def test_a_round_that_an_earlier_run_made_is_neither_made_nor_judged_again(tmp_path, monkeypatch):
    recipe = tiny_recipe(f"output_dir={tmp_path}", "rounds.count=2", "rounds.most_gap=0.1")
    report = RoundManifest(
        round=1, checkpoint="c", pulses=[], emitted_tokens=0, request_steps=0, engine_seconds=0, num_engines=0
    )
    round_path(tmp_path, 1).parent.mkdir()
    write_json(round_path(tmp_path, 1), report)
    monkeypatch.setattr(distill, "check_gap", None)
    distill.regenerate(recipe, None, None, Round(1, range(3, 5)), Distilled(tmp_path, 9, 5.0))


def test_the_only_round_is_drawn_once_whoever_made_its_shards(tmp_path):
    recipe = small_recipe(tmp_path / "run", write_target(tmp_path / "target"))
    write_shards(recipe, num_sequences=4)
    report = RoundManifest(
        round=0,
        checkpoint=None,
        pulses=[],
        emitted_tokens=8,
        request_steps=4,
        engine_seconds=2,
        num_engines=1,
    )
    write_round(recipe.output_dir, report)
    for _ in range(2):
        distill.regenerate(recipe, None, None, Round(0, range(12)), None)
    events = EventAccumulator(str(recipe.output_dir / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in events.Scalars("time/generate_s")] == [(0, 2.0)]


def test_the_recipe_is_shown_beside_the_results_and_in_tensorboard(tmp_path):
    recipe = tiny_recipe(f"output_dir={tmp_path}")
    distill.show(recipe)
    assert (tmp_path / "recipe.yaml").exists()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert "recipe/text_summary" in events.Tags()["tensors"]


def shards_of(tmp_path) -> tuple:
    recipe = small_recipe(tmp_path / "run", write_target(tmp_path / "target"))
    write_shards(recipe, num_sequences=4)
    return recipe, read_manifest(recipe.output_dir / "shards" / "manifest.json", ShardManifest)


def test_shards_of_the_recipes_own_target_and_taps_are_taken(tmp_path):
    check_shards(*shards_of(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"complete": False}, "is not complete: run data/regenerate.py"),
        ({"target_layer_ids": [1, 3]}, r"captured at layers \[1, 3\], drafter.target_layer_ids is \[0, 2\]"),
    ],
)
def test_shards_that_do_not_fit_the_recipe_are_refused(change, message, tmp_path):
    recipe, manifest = shards_of(tmp_path)
    with pytest.raises(UserError, match=message):
        check_shards(recipe, manifest.model_copy(update=change))


def test_shards_of_a_target_that_has_changed_since_are_refused(tmp_path):
    recipe, manifest = shards_of(tmp_path)
    write_target(tmp_path / "target", seed=1)
    with pytest.raises(UserError, match="not of the recipe's target"):
        check_shards(recipe, manifest)


def test_a_step_that_ranks_and_micro_batches_do_not_divide_is_refused():
    recipe = tiny_recipe("train.sequences_per_step=12", "train.micro_batch_sequences=3")
    check_split(recipe, world_size=2)
    with pytest.raises(UserError, match="sequences_per_step is 12, no multiple of 8 ranks"):
        check_split(recipe, world_size=8)
