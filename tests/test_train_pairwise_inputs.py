"""A head trained on a frozen drafter: what becomes of the drafter, and what is refused."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from drafters import REPOSITORY
from pairwise_bench import NUM_SEQUENCES, Workbench, contents, head_bytes, recipe_for, run
from safetensors.torch import load_file, save_file
from small_drafters import write_drafter
from small_training import DRAFTER, VOCAB, make_sequence, manifest_of, write_shards, write_target

from data.shards import MANIFEST_NAME, ShardWriter, write_shard_file
from recipes.errors import MachineError, UserError
from recipes.load import check_against_target, load_recipe
from recipes.manifest import ShardManifest, read_manifest
from recipes.schema import Recipe
from serve.drafter_config import PAIRWISE_NAME
from train.pairwise_inputs import find_shards, read_source
from train.pairwise_learner import HeadLearner
from train.pairwise_manifest import HeadManifest, head_manifest_path
from train.pairwise_training import HeadTraining


@pytest.fixture
def bench(target, ckpt) -> Workbench:
    return Workbench(recipe_for(target, ckpt))


# The drafter


def test_a_drafter_from_elsewhere_is_copied_bit_for_bit_and_left_alone(target, ckpt):
    (ckpt / "README.md").write_text("# Somebody's drafter\n\nWords.\n")
    before = contents(ckpt)
    home = run(recipe_for(target, ckpt))
    after = contents(home)
    assert contents(ckpt) == before
    assert {name: after[name] for name in ("config.json", "model.safetensors")} == {
        name: before[name] for name in ("config.json", "model.safetensors")
    }
    assert after.keys() == before.keys() | {str(PAIRWISE_NAME), "pairwise/draftsmith.json"}


def test_links_as_in_the_hubs_cache_are_followed(target, ckpt, tmp_path):
    blobs = ckpt.rename(tmp_path / "blobs")
    ckpt.mkdir()
    for path in blobs.iterdir():
        (ckpt / path.name).symlink_to(path)
    home = run(recipe_for(target, ckpt))
    assert not any(path.is_symlink() for path in home.rglob("*"))
    assert contents(home)["model.safetensors"] == (blobs / "model.safetensors").read_bytes()


def test_a_drafter_in_output_dir_gets_its_head_in_place(target, ckpt):
    recipe = recipe_for(target, ckpt)
    ours = shutil.copytree(ckpt, recipe.output_dir / "checkpoints" / "checkpoint-3")
    (recipe.output_dir / "checkpoints" / "latest").symlink_to("checkpoint-3")
    before = contents(ours)
    run(recipe, "pairwise.ckpt=null")
    assert not (recipe.output_dir / "drafter").exists()
    assert contents(ours).items() >= before.items()
    assert head_bytes(ours) == head_bytes(run(recipe_for(target, ckpt, "copied")))


def as_newer(config: dict) -> dict:
    """z-lab's newer drafters."""
    nested = config["dflash_config"] | {"block_size": config["block_size"]}
    return {key: value for key, value in config.items() if key != "block_size"} | {"dflash_config": nested}


def as_older(config: dict) -> dict:
    nested = config["dflash_config"]
    return {key: value for key, value in config.items() if key != "dflash_config"} | nested


@pytest.mark.parametrize("rewrite", [as_newer, as_older])
def test_a_drafter_in_another_format_is_converted_and_its_weights_are_kept(target, ckpt, rewrite):
    config = json.loads((ckpt / "config.json").read_text())
    foreign = write_drafter(ckpt.with_name("foreign"))
    (foreign / "config.json").write_text(json.dumps(rewrite(config)))
    home = run(recipe_for(target, foreign))
    written = json.loads((home / "config.json").read_text())
    assert (written["dflash_config"], written["block_size"]) == (
        config["dflash_config"],
        config["block_size"],
    )
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (home, ckpt))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs | ours)
    assert head_bytes(home) == head_bytes(run(recipe_for(target, ckpt, "published")))


def with_another_weight(ckpt: Path) -> Path:
    weights = load_file(ckpt / "model.safetensors")
    weights["norm.weight"][3] += 1
    save_file(weights, ckpt / "model.safetensors")
    return ckpt


def with_another_window(ckpt: Path) -> Path:
    config = json.loads((ckpt / "config.json").read_text())
    (ckpt / "config.json").write_text(json.dumps(config | {"sliding_window": 7}))
    return ckpt


@pytest.mark.parametrize("change", [with_another_weight, with_another_window])
def test_a_copy_of_another_drafter_is_not_taken_for_this_ones(target, ckpt, change):
    recipe = recipe_for(target, ckpt)
    run(recipe)
    (recipe.output_dir / "pairwise" / "state.pt").unlink()
    other = change(write_drafter(ckpt.with_name("other")))
    with pytest.raises(UserError, match=r"holds another drafter than .*other: name"):
        run(recipe, f"pairwise.ckpt={other}")


# Cards


def test_a_card_says_what_a_head_is_worth(target, ckpt):
    (ckpt / "README.md").write_text("# Somebody's drafter\n\n## Licence\n\nTheirs.\n")
    home = run(recipe_for(target, ckpt))
    manifest = read_manifest(head_manifest_path(home), HeadManifest)
    text = (home / "README.md").read_text()
    assert text.startswith("# Somebody's drafter\n\n## Licence\n\nTheirs.\n\n## Pairwise head\n")
    assert "Rank 5, trained in 4 steps" in text
    was, now = manifest.before.trees[1], manifest.after.trees[1]
    assert text.endswith(f"| trees of 9 | {was:.2f} | {now:.2f} |\n")


# Refusals


def refusal(recipe: Recipe, *overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        run(recipe, *overrides)
    return str(refused.value)


def test_a_drafter_whose_taps_are_not_the_shards_is_refused(target, ckpt):
    other = write_drafter(ckpt.with_name("other"), DRAFTER.model_copy(update={"target_layer_ids": [1, 2]}))
    said = refusal(recipe_for(target, other))
    assert "was captured at layers [0, 2]" in said
    assert "reads [1, 2]: make shards with drafter.target_layer_ids [1, 2]" in said


def test_no_drafter_is_refused(target, ckpt, tmp_path):
    recipe = recipe_for(target, ckpt)
    assert "found no such folder" in refusal(recipe, f"pairwise.ckpt={tmp_path / 'none'}")
    assert "write pairwise.ckpt=FOLDER" in refusal(recipe, "pairwise.ckpt=null")
    assert "config.json" in refusal(recipe, f"pairwise.ckpt={tmp_path}")
    assert "is no DFlash drafter in a known format" in refusal(recipe, f"pairwise.ckpt={target}")


def test_a_drafter_of_another_target_is_refused(target, ckpt):
    wide = write_drafter(ckpt.with_name("wide"), hidden_size=64)
    assert "hidden_size is 64, the target's is 32" in refusal(recipe_for(target, wide))


def test_a_drafter_with_stretched_positions_or_sick_weights_is_refused(target, ckpt):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    stretched = write_drafter(ckpt.with_name("stretched"), rope_parameters=rope)
    assert "only plain rotary positions" in refusal(recipe_for(target, stretched))
    weights = load_file(ckpt / "model.safetensors")
    weights["norm.weight"][3] = torch.nan
    save_file(weights, ckpt / "model.safetensors")
    assert "norm.weight has 1 values that are not finite" in refusal(recipe_for(target, ckpt))


def test_no_shards_are_refused(target, ckpt):
    recipe = recipe_for(target, ckpt)
    shutil.rmtree(recipe.output_dir / "shards")
    assert "write pairwise.shards=FOLDER" in refusal(recipe)
    write_unfinished(recipe)
    assert "is not complete: run data/regenerate.py" in refusal(recipe)


def write_unfinished(recipe: Recipe) -> None:
    ShardWriter(recipe.output_dir / "shards", manifest_of(recipe)).consume_before(0)
    (recipe.output_dir / "shards" / MANIFEST_NAME).write_text(manifest_of(recipe).model_dump_json())


def test_shards_of_another_target_are_refused(target, ckpt):
    other = write_target(target.with_name("other"), seed=1)
    recipe = recipe_for(target, ckpt)
    recipe_for(other, ckpt, "others")
    said = refusal(recipe, f"pairwise.shards={target.with_name('others') / 'shards'}")
    assert f"holds the text of {other} (bfloat16), not of the recipe's target {target}" in said


def test_too_few_sequences_are_refused(target, ckpt):
    recipe = recipe_for(target, ckpt)
    shutil.rmtree(recipe.output_dir / "shards")
    write_shards(recipe, 1)
    assert "the shards hold 1 sequences" in refusal(recipe)


def test_a_folder_that_cannot_be_written_is_refused(target, ckpt, tmp_path):
    (tmp_path / "file").touch()
    said = refusal(recipe_for(target, ckpt), f"output_dir={tmp_path / 'file' / 'run'}", shards_of(target))
    assert "cannot write there (Not a directory)" in said


def shards_of(target: Path) -> str:
    return f"pairwise.shards={target.parent / 'run' / 'shards'}"


def test_more_candidates_than_tokens_are_refused(target, ckpt):
    said = refusal(recipe_for(target, ckpt, candidates=VOCAB + 1))
    assert "pairwise.candidates is 97, the target's vocabulary has 96 tokens" in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("pairwise.objective.kind=lk", "a head learns for cross_entropy, d_pace or kl"),
        (
            "pairwise.micro_batch_sequences=3",
            "sequences_per_step 4 is no multiple of micro_batch_sequences 3",
        ),
        ("pairwise.raank=3", "the nearest valid path is pairwise.rank"),
    ],
)
def test_settings_that_make_no_sense_are_refused(override, said, target, ckpt):
    recipe = recipe_for(target, ckpt)
    assert said in refusal(recipe, "data.final_states=true", override)


def test_the_state_of_another_training_is_refused_by_what_differs(target, ckpt):
    recipe = recipe_for(target, ckpt)
    run(recipe)
    said = refusal(recipe, "pairwise.rank=6", "pairwise.seed=4", "pairwise.steps=9")
    assert [line.strip() for line in said.splitlines()[1:-1]] == [
        "pairwise.rank was 5, the recipe says 6",
        "pairwise.seed was 3, the recipe says 4",
    ]


def test_states_that_are_not_finite_are_named(target, ckpt):
    recipe = recipe_for(target, ckpt)
    number = Workbench(recipe).feed.read_step(2)[1].visits[0].index
    shutil.rmtree(recipe.output_dir / "shards")
    writer = ShardWriter(recipe.output_dir / "shards", manifest_of(recipe))
    sequences = [make_sequence(index) for index in range(NUM_SEQUENCES)]
    sequences[number].hidden[0] = torch.nan
    prompt_ids = [str(index) for index in range(NUM_SEQUENCES)]
    writer.add(write_shard_file(recipe.output_dir / "shards", 0, sequences, prompt_ids))
    writer.finish(dropped={})
    with pytest.raises(MachineError, match=f"the tap states of sequence {number} of the shards are not fin"):
        run(recipe)


def test_memory_that_does_not_suffice_is_told_with_what_to_lower(target, ckpt, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(HeadTraining, "_learn", fail)
    with pytest.raises(MachineError, match=r"lower pairwise\.micro_batch_sequences or pairwise\.num_anchors"):
        run(recipe_for(target, ckpt))


def test_a_loss_that_is_not_finite_teaches_nothing(bench):
    head = bench.scatter_head()
    head.rest_r.data[0] = torch.inf
    before = [parameter.clone() for parameter in head.parameters()]
    learner = HeadLearner(head, torch.optim.AdamW(head.parameters()), bench.recipe.pairwise)
    assert not math.isfinite(learner.learn(bench.draft_step(0), 1e-3).loss)
    assert all(map(torch.equal, before, head.parameters()))


# Shards of rounds; the shipped recipe


def test_shards_that_a_later_round_consumed_are_not_missed(target, ckpt):
    recipe = recipe_for(target, ckpt)
    folder = recipe.output_dir / "shards"
    manifest = read_manifest(folder / MANIFEST_NAME, ShardManifest)
    first, second = manifest.shards
    gone = manifest.model_copy(update={"shards": [first.model_copy(update={"is_consumed": True}), second]})
    (folder / MANIFEST_NAME).write_text(gone.model_dump_json())
    (folder / first.file).unlink()
    assert len(find_shards(recipe, read_source(recipe))) == second.sequences
    assert (run(recipe) / PAIRWISE_NAME).exists()


def test_the_shipped_recipe_is_for_the_demos_drafter():
    ours, demo = (
        load_recipe(REPOSITORY / "recipes" / name) for name in ("tiny_pairwise.yaml", "tiny_cpu.yaml")
    )
    check_against_target(ours)
    assert ours.target == demo.target
    assert ours.drafter == demo.drafter
    assert ours.pairwise.ckpt == demo.output_dir / "checkpoints" / "latest"
    assert ours.pairwise.shards == demo.output_dir / "shards"
    assert ours.output_dir != demo.output_dir
