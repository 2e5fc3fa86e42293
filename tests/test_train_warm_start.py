"""A training begins with a checkpoint's weights: with exactly these, if they fit, and only when it begins."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drafters import TINY_RECIPE, random_weights, tiny_config, tiny_recipe, write_checkpoint
from safetensors.torch import load_file, save_file
from small_drafters import write_drafter
from small_training import DRAFTER, small_recipe, write_shards
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_serve_formats import nested_config, old_config, open_spec_config, speculators_config

from data.shards import open_shards
from recipes.errors import UserError
from recipes.manifest import CheckpointManifest, read_manifest
from recipes.schema import Recipe
from train import distill
from train.checkpoint import load_published
from train.drafter import DFlashDrafter
from train.feed import Feed
from train.loop import Distilled, distil
from train.ranks import Ranks
from train.step import Learner
from train.target_parts import load_target_parts
from train.warm_start import check_init, read_init
from train.zero import start_engine

CONTROL = {"learning_rate": 0.0, "warmup_share": 0.0}


@pytest.fixture(scope="module")
def ranks(only_rank):
    return only_rank


def recipe_from(ckpt: Path, target: Path, folder: str = "run", **train) -> Recipe:
    return small_recipe(target.parent / folder, target, init_from=ckpt, **train)


# Whether it fits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": [1, 2]}, r"target_layer_ids is \[1, 2\], drafter.target_layer_ids is \[0, 2\]"),
        ({"mask_token_id": 7}, r"mask_token_id is 7, drafter.mask_token_id is 95"),
        ({"sliding_window": 8}, r"sliding_window is 8, drafter.sliding_window is 6"),
        (
            {"layer_types": ["full_attention"] * 3},
            r"layer_types is \['full_attention', .* drafter.layer_types",
        ),
        ({"block_size": 8}, r"block_size is 8, drafter.block_size is 4"),
        ({"rope_theta": 1e6}, r"rope_theta is 1000000.0, drafter.rope_theta is 10000.0"),
        ({"rms_norm_eps": 1e-5}, r"rms_norm_eps is 1e-05, drafter.rms_norm_eps is 1e-06"),
        ({"intermediate_size": 64}, r"intermediate_size is 64, drafter.intermediate_size is 48"),
    ],
)
def test_a_drafter_of_another_shape_is_refused_by_field(changes, message, target, tmp_path):
    ckpt = write_drafter(tmp_path / "drafter", DRAFTER.model_copy(update=changes))
    with pytest.raises(
        UserError, match=f"(?s)train.init_from .* another drafter than the recipe's:.*{message}"
    ):
        check_init(recipe_from(ckpt, target))


def test_every_difference_is_named_at_once(target, tmp_path):
    other = DRAFTER.model_copy(update={"target_layer_ids": [1, 2], "mask_token_id": 7, "sliding_window": 9})
    with pytest.raises(UserError) as refused:
        check_init(recipe_from(write_drafter(tmp_path / "drafter", other), target))
    assert [line.split()[0] for line in str(refused.value).splitlines()[1:]] == [
        *("sliding_window", "target_layer_ids", "mask_token_id")
    ]


def test_a_drafter_for_a_target_of_another_width_is_refused(target, tmp_path):
    ckpt = write_drafter(tmp_path / "drafter", hidden_size=64)
    with pytest.raises(UserError, match="hidden_size is 64, the target's is 32"):
        check_init(recipe_from(ckpt, target))


def test_rotary_positions_that_are_stretched_are_refused(target, tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    ckpt = write_drafter(tmp_path / "drafter", rope_parameters=rope)
    with pytest.raises(UserError, match="rope_type is 'yarn', only plain rotary positions are trained"):
        check_init(recipe_from(ckpt, target))


def test_what_changes_nothing_may_differ(target, tmp_path):
    other = DRAFTER.model_copy(update={"initializer_range": 0.5, "max_position_embeddings": 99})
    check_init(recipe_from(write_drafter(tmp_path / "drafter", other), target))


def test_a_window_without_sliding_layers_may_differ(target, tmp_path):
    full = DRAFTER.model_copy(update={"layer_types": ["full_attention"] * 3})
    wider = full.model_copy(update={"sliding_window": 999})
    recipe = recipe_from(write_drafter(tmp_path / "drafter", wider), target)
    check_init(recipe.model_copy(update={"drafter": full}))


def test_weights_that_are_not_finite_are_refused(ckpt, target):
    weights = load_file(ckpt / "model.safetensors")
    weights["norm.weight"][3] = torch.nan
    save_file(weights, ckpt / "model.safetensors")
    with pytest.raises(UserError, match=r"norm\.weight has 1 values that are not finite"):
        check_init(recipe_from(ckpt, target))


def test_a_folder_that_is_no_drafter_is_refused_before_anything_starts(tmp_path):
    overrides = ["rounds.count=1", "rounds.first_share=null", f"output_dir={tmp_path / 'run'}"]
    arguments = Namespace(
        recipe=TINY_RECIPE, overrides=[*overrides, f"train.init_from={tmp_path / 'absent'}"]
    )
    with pytest.raises(UserError, match="absent: found no such folder"):
        distill.check(arguments, SimpleNamespace(world_size=1, gpus_here=0))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "make_config", [tiny_config, nested_config, old_config, speculators_config, open_spec_config]
)
def test_every_format_begins_with_the_same_weights(make_config: Callable, tmp_path):
    weights = random_weights(tiny_config())
    ckpt = write_checkpoint(tmp_path / "drafter", make_config(), weights)
    recipe = tiny_recipe(f"train.init_from={ckpt}", f"output_dir={tmp_path / 'run'}")
    check_init(recipe)
    drafter = DFlashDrafter(recipe.drafter, hidden_size=256)
    read_init(recipe).load_into(drafter)
    state = drafter.state_dict()
    assert state.keys() == weights.keys()
    assert all(state[name].dtype == torch.float32 for name in state)
    assert all(torch.equal(state[name], weights[name].float()) for name in weights)


def test_masters_get_what_fp32_weights_hold(target, tmp_path):
    ckpt = write_drafter(tmp_path / "drafter", dtype="float32")
    weights = {name: weight.float() * 1.001 for name, weight in load_file(ckpt / "model.safetensors").items()}
    save_file(weights, ckpt / "model.safetensors")
    drafter = DFlashDrafter(DRAFTER, hidden_size=32)
    read_init(recipe_from(ckpt, target)).load_into(drafter)
    assert all(torch.equal(drafter.state_dict()[name], weights[name]) for name in weights)


# What a training makes of it


def run(recipe: Recipe, ranks: Ranks) -> Distilled:
    if not (recipe.output_dir / "shards").exists():
        write_shards(recipe, num_sequences=7)
    return distil(recipe, ranks)


def weights_of(distilled: Distilled) -> dict[str, torch.Tensor]:
    return load_file(distilled.checkpoint / "model.safetensors")


def hold_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def losses(recipe: Recipe) -> list[float]:
    events = EventAccumulator(str(recipe.output_dir / "tensorboard")).Reload()
    return [point.value for point in events.Scalars("loss/train")]


def loss_of(ckpt: Path, recipe: Recipe, ranks: Ranks) -> float:
    """Of a checkpoint on the first step's data, without the loop."""
    parts = load_target_parts(recipe.target).to(ranks.device, torch.float32)
    learner = Learner(start_engine(load_published(ckpt), recipe.train, ranks), parts, recipe.train, ranks)
    feed = Feed(open_shards(recipe.output_dir / "shards"), recipe.train, recipe.drafter, 0, 1)
    return learner.learn(feed.read_step(0), 0.0).loss


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_at_a_rate_of_zero_the_checkpoint_comes_out_bit_for_bit(precision, ckpt, target, ranks):
    recipe = recipe_from(ckpt, target, steps=3, precision=precision, optimizer=CONTROL)
    hold_equal(weights_of(run(recipe, ranks)), load_file(ckpt / "model.safetensors"))


def test_the_first_steps_loss_is_the_checkpoints_and_not_that_of_chance(ckpt, target, ranks):
    recipe = recipe_from(ckpt, target, steps=2)
    run(recipe, ranks)
    chance = small_recipe(target.parent / "chance", target, steps=2)
    run(chance, ranks)
    assert losses(recipe)[0] == pytest.approx(loss_of(ckpt, recipe, ranks), rel=1e-6)
    assert abs(losses(recipe)[0] - losses(chance)[0]) > 0.05


def test_the_seed_of_chance_has_no_part_in_it(ckpt, target, ranks):
    found = []
    for number in range(2):
        torch.manual_seed(number)
        recipe = recipe_from(ckpt, target, f"run-{number}", steps=1, optimizer=CONTROL)
        found.append(weights_of(run(recipe, ranks)))
    hold_equal(*found)


def test_the_manifest_and_the_card_say_what_it_began_with(ckpt, target, ranks):
    done = run(recipe_from(ckpt, target, steps=1), ranks)
    origin = read_manifest(done.checkpoint / "draftsmith.json", CheckpointManifest).init_from
    assert (origin.checkpoint, origin.format) == (str(ckpt.resolve()), "published")
    assert "begun: with `drafter` (published format)" in (done.checkpoint / "README.md").read_text()
    chance = run(small_recipe(target.parent / "chance", target, steps=1), ranks)
    assert read_manifest(chance.checkpoint / "draftsmith.json", CheckpointManifest).init_from is None
    assert "begun: at random" in (chance.checkpoint / "README.md").read_text()


def test_other_weights_are_another_origin(target, tmp_path):
    first, second = (write_drafter(tmp_path / f"drafter-{seed}", seed=seed) for seed in range(2))
    origins = [read_init(recipe_from(ckpt, target)).origin for ckpt in (first, second)]
    assert origins[0].fingerprint != origins[1].fingerprint


def test_a_training_that_goes_on_does_not_look_at_it(ckpt, target, ranks):
    kept = shutil.copytree(ckpt, ckpt.with_name("kept"))
    constant = {"learning_rate": 3e-3, "schedule": "constant", "warmup_share": 0.0}
    straight = run(recipe_from(kept, target, "straight", steps=4, optimizer=constant), ranks)
    run(recipe_from(ckpt, target, steps=2, optimizer=constant), ranks)
    shutil.rmtree(ckpt)
    longer = recipe_from(ckpt, target, steps=4, optimizer=constant)
    check_init(longer)
    resumed = run(longer, ranks)
    hold_equal(weights_of(resumed), weights_of(straight))
    origin = read_manifest(resumed.checkpoint / "draftsmith.json", CheckpointManifest).init_from
    assert origin.checkpoint == str(ckpt)


def test_a_training_that_goes_on_cannot_be_given_another(ckpt, target, ranks):
    run(recipe_from(ckpt, target, steps=1), ranks)
    other = write_drafter(target.parent / "other", seed=1)
    with pytest.raises(UserError, match=r"train\.init_from was .*drafter, the recipe says .*other"):
        run(recipe_from(other, target, steps=2), ranks)


def test_a_run_of_an_earlier_version_goes_on(ckpt, target, ranks):
    """Its state knows none of the fields that came later."""
    recipe = small_recipe(target.parent / "run", target, steps=1)
    run(recipe, ranks)
    path = recipe.output_dir / "state" / "step-1" / "draftsmith_state.json"
    state = json.loads(path.read_text())
    for field in ("init_from", "lora", "least_anchors"):
        del state["recipe"]["train"][field]
    del state["recipe"]["train"]["optimizer"]["decay_share"]
    del state["init_from"]
    path.write_text(json.dumps(state))
    assert run(small_recipe(target.parent / "run", target, steps=2), ranks).step == 2
