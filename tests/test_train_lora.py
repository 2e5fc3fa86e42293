"""Adapters: they alone are trained, what is published is the merged weights, and a state goes on exactly."""

import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from small_drafters import write_drafter
from small_training import DRAFTER, HIDDEN, VOCAB, make_sequence, small_recipe, write_shards, write_target

from recipes.manifest import CheckpointManifest, read_manifest
from recipes.schema import Lora, Train
from train.batches import Batch
from train.checkpoint import load_published
from train.drafter import DFlashDrafter
from train.feed import Feed
from train.loop import distil
from train.lora import adapt, published_weights
from train.ranks import Ranks
from train.step import Learner
from train.target_parts import TargetParts
from train.zero import TORCH_DTYPES, gather_weights, load_state, save_state, start_engine

SEQUENCES = [make_sequence(index) for index in range(8)]
LORA = {"rank": 4, "alpha": 8}
SETTINGS = [(0, "float32"), (0, "bfloat16"), (2, "float32"), (2, "bfloat16")]


@pytest.fixture(scope="module")
def ranks(only_rank):
    return only_rank


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("base") / "drafter")


def train_settings(**changes) -> Train:
    settings = {
        "steps": 9,
        "sequences_per_step": 4,
        "micro_batch_sequences": 2,
        "num_anchors": 4,
        "init_from": "base",
        "lora": LORA,
    }
    return Train.model_validate(settings | changes)


def start(ranks: Ranks, train: Train, drafter: DFlashDrafter) -> tuple[Learner, Feed]:
    generator = torch.Generator().manual_seed(0)
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    parts = TargetParts(embedding, 0.2 * head).to(ranks.device, TORCH_DTYPES[train.precision])
    torch.manual_seed(0)
    adapt(drafter, train.lora)
    return Learner(start_engine(drafter, train, ranks), parts, train, ranks), Feed(
        SEQUENCES, train, DRAFTER, 0, 1
    )


def take_steps(learner: Learner, feed: Feed, steps: range) -> list[float]:
    return [learner.learn(feed.read_step(step), 2e-2).loss for step in steps]


def parameters_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in learner.engine.module.named_parameters()}


def forward(drafter: torch.nn.Module, batch: Batch, learner: Learner) -> torch.Tensor:
    with torch.no_grad():
        return drafter(
            batch.taps_SE,
            batch.context_positions_S,
            learner.parts.embedding_VD[batch.input_ids_Q],
            batch.block_positions_Q,
            batch.views,
        ).float()


def test_only_adapters_can_be_trained(ckpt):
    drafter = load_published(ckpt)
    adapt(drafter, Lora(rank=4))
    trained = {name: each for name, each in drafter.named_parameters() if each.requires_grad}
    assert all(".lora_" in name for name in trained)
    assert len(trained) == 3 * 7 * 2  # layers, projections, factors
    assert {min(each.shape) for each in trained.values()} == {4}


def test_only_the_named_projections_get_adapters(ckpt):
    drafter = load_published(ckpt)
    adapt(drafter, Lora(targets=["q_proj", "down_proj"]))
    adapted = {
        name.split(".lora_")[0].split(".")[-1] for name, _ in drafter.named_parameters() if ".lora_" in name
    }
    assert adapted == {"q_proj", "down_proj"}


def test_new_adapters_change_nothing(ckpt):
    base, drafter = load_published(ckpt).state_dict(), load_published(ckpt)
    adapt(drafter, Lora())
    published = {weight.name: weight.read() for weight in published_weights(drafter)}
    assert list(published) == list(dict(load_published(ckpt).named_parameters()))
    assert all(torch.equal(published[name], base[name]) for name in base)


def test_a_drafter_without_adapters_is_published_as_it_is(ckpt):
    drafter = load_published(ckpt)
    for weight in published_weights(drafter):
        assert torch.equal(weight.read(), drafter.get_parameter(weight.name))


@pytest.mark.parametrize(("stage", "precision"), SETTINGS)
def test_training_moves_every_adapter_and_nothing_else(stage, precision, ranks, ckpt):
    train = train_settings(zero_stage=stage, precision=precision)
    learner, feed = start(ranks, train, load_published(ckpt))
    before = parameters_of(learner)
    losses = take_steps(learner, feed, range(4))
    after = parameters_of(learner)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".lora_" in name}
    base = load_file(ckpt / "model.safetensors")
    frozen = {name.replace(".base_layer", ""): each for name, each in after.items() if ".lora_" not in name}
    assert all(torch.equal(frozen[name].bfloat16(), base[name]) for name in base)
    assert losses[3] < losses[0]


@pytest.mark.parametrize("stage", [0, 2])
def test_the_optimizer_sees_adapters_alone(stage, ranks, ckpt):
    learner, _ = start(ranks, train_settings(zero_stage=stage), load_published(ckpt))
    seen = sum(each.numel() for group in learner.engine.optimizer.param_groups for each in group["params"])
    trained = sum(each.numel() for each in learner.engine.module.parameters() if each.requires_grad)
    assert trained <= seen < trained + 64  # padded


@pytest.mark.parametrize(("stage", "precision"), [*SETTINGS, (3, "float32")])
def test_what_is_published_computes_what_was_trained(stage, precision, ranks, ckpt, tmp_path):
    """Within the rounding to bf16, of which the adapters' own part is far above."""
    train = train_settings(zero_stage=stage, precision=precision)
    learner, feed = start(ranks, train, load_published(ckpt))
    take_steps(learner, feed, range(6))
    folder = shutil.copytree(ckpt, tmp_path / "merged")
    save_file(gather_weights(learner.engine, ranks), folder / "model.safetensors")
    dtype = TORCH_DTYPES[precision]
    batch = feed.read_step(7)[0].batch.to(ranks.device, dtype)
    adapted = forward(learner.engine, batch, learner)
    merged, base = (forward(load_published(each).to(dtype), batch, learner) for each in (folder, ckpt))
    error, change = (adapted - merged).norm() / adapted.norm(), (adapted - base).norm() / adapted.norm()
    assert error < 0.02
    assert change > 10 * error


@pytest.mark.parametrize(("stage", "precision"), SETTINGS)
def test_a_state_goes_on_exactly_even_on_another_base(stage, precision, ranks, ckpt, tmp_path):
    """It holds the frozen weights too, so nobody needs the checkpoint that it began with."""
    train = train_settings(zero_stage=stage, precision=precision)
    learner, feed = start(ranks, train, load_published(ckpt))
    take_steps(learner, feed, range(3))
    save_state(learner.engine, tmp_path / "state")
    straight = take_steps(learner, feed, range(3, 6))
    fresh, feed = start(ranks, train, DFlashDrafter(DRAFTER, HIDDEN))
    load_state(fresh.engine, tmp_path / "state")
    assert take_steps(fresh, feed, range(3, 6)) == straight
    found, expected = parameters_of(fresh), parameters_of(learner)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# A whole training


def weights_of(ckpt: Path) -> dict[str, torch.Tensor]:
    return load_file(ckpt / "model.safetensors")


def test_a_training_with_adapters_publishes_goes_on_and_says_so(ranks, tmp_path):
    target, ckpt = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    constant = {"learning_rate": 2e-2, "schedule": "constant", "warmup_share": 0.0}
    settings = {"init_from": ckpt, "lora": LORA, "optimizer": constant, "zero_stage": 2}
    straight, resumed = (
        small_recipe(tmp_path / name, target, **settings) for name in ("straight", "resumed")
    )
    for recipe in (straight, resumed):
        write_shards(recipe, num_sequences=7)
    whole = distil(with_steps(straight, 4), ranks).checkpoint
    distil(with_steps(resumed, 2), ranks)
    base = shutil.move(ckpt, tmp_path / "moved")
    halves = distil(with_steps(resumed, 4), ranks).checkpoint
    found, expected, began = weights_of(halves), weights_of(whole), weights_of(base)
    assert found.keys() == expected.keys() == began.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    changed = {name for name in began if not torch.equal(began[name], found[name])}
    assert changed == {name for name in began if "_proj" in name}
    manifest = read_manifest(halves / "draftsmith.json", CheckpointManifest)
    assert manifest.recipe["train"]["lora"]["rank"] == 4
    assert "adapters (LoRA) of rank 4, alpha 8, on q_proj, k_proj" in (halves / "README.md").read_text()


def with_steps(recipe, steps: int):
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_from": None}, "lora without init_from: name the checkpoint whose weights it adapts"),
        ({"lora": {"targets": ["fc"]}}, "targets"),
        ({"lora": {"targets": []}}, "targets"),
        ({"lora": {"rank": 0}}, "rank"),
    ],
)
def test_adapters_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        train_settings(**changes)
