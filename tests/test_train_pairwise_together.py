"""A pairwise head that learns beside the drafter: what it leaves alone, what leaves it alone, its worth."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drafters import tiny_config
from rank_processes import run_ranks
from safetensors.torch import load_file
from small_training import (
    DRAFTER,
    HIDDEN,
    VOCAB,
    make_sequence,
    manifest_of,
    small_recipe,
    write_shards,
    write_target,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_train_card import manifest as card_manifest

from recipes.errors import MachineError, UserError
from recipes.schema import Recipe
from serve.checkpoint import load_target_config, published_config
from serve.drafter_config import PAIRWISE_NAME, expected_tensors
from serve.pairwise import PairwiseTables, read_pairwise
from train.batches import worst_case_batch
from train.card import model_card
from train.checkpoint import load_published
from train.feed import Feed
from train.loop import distil, start_learner
from train.pairwise import PairwiseHead
from train.pairwise_companion import check_companion
from train.pairwise_held_out import draft_held_out
from train.pairwise_inputs import Split, decoding_anchors
from train.pairwise_learner import FrozenDrafter, begin_head
from train.resume import RunFolders
from train.saving import PAIR_BYTES, Saver
from train.step import Learner, Totals
from train.target_parts import load_target_parts
from train.zero import gather_weights

SEQUENCES = [make_sequence(index) for index in range(8)]
HEAD = {"rank": 5, "candidates": 7, "num_anchors": 3, "objective": {"decay": 2.5}, "seed": 3}
EVERY_BLOCK = HEAD | {"num_anchors": 99}
PAIRWISE_STATE = "pairwise.pt"
RATE, HEAD_RATE = 5e-3, 2e-2


@pytest.fixture(scope="module")
def ranks(only_rank):
    return only_rank


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def recipe_for(tmp_path, target):
    """A small recipe with its shards."""

    def make(folder: str = "run", *, with_head: dict | None = HEAD, **train) -> Recipe:
        settings = {"pairwise": with_head, "save_every_steps": 3, "steps": 8} | train
        recipe = small_recipe(tmp_path / folder, target, **settings)
        if not (recipe.output_dir / "shards").exists():
            write_shards(recipe, 9)
        return recipe

    return make


class Bench:
    """A learner, and what it learns from."""

    def __init__(self, recipe: Recipe, ranks) -> None:
        self.recipe, self.ranks = recipe, ranks
        self.learner: Learner = start_learner(recipe, ranks)
        self.feed = Feed(SEQUENCES, recipe.train, recipe.drafter, 0, 1)

    def take_steps(self, steps: Sequence[int] = range(3)) -> list[Totals]:
        rate = None if self.learner.companion is None else HEAD_RATE
        return [self.learner.learn(self.feed.read_step(step), RATE, rate) for step in steps]

    @property
    def head(self) -> PairwiseHead:
        return self.learner.companion.learner.head

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in self.head.named_parameters()}

    def drafter(self) -> dict[str, torch.Tensor]:
        return {
            name: weight.detach().clone() for name, weight in self.learner.engine.module.state_dict().items()
        }


@pytest.fixture
def bench_for(recipe_for, ranks):
    def make(**changes) -> Bench:
        return Bench(recipe_for(**changes), ranks)

    return make


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, weight in expected.items() if not torch.equal(found[name], weight)] == []


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


# What it must not change


@pytest.mark.parametrize(
    ("stage", "precision", "kind"),
    [(1, "float32", "cross_entropy"), (2, "bfloat16", "d_pace"), (3, "float32", "d_pace")],
)
def test_the_drafter_learns_the_same_bits_with_a_head_and_without(bench_for, stage, precision, kind):
    settings = {"zero_stage": stage, "precision": precision, "objective": {"kind": kind}}
    alone, beside = bench_for(with_head=None, **settings), bench_for(**settings)
    without, with_head = alone.take_steps(), beside.take_steps()
    assert [each.loss for each in with_head] == [each.loss for each in without]
    assert [each.gradient_norm for each in with_head] == [each.gradient_norm for each in without]
    assert_equal(beside.drafter(), alone.drafter())
    assert_equal(*(gather_weights(bench.learner.engine, bench.ranks) for bench in (beside, alone)))
    assert (without[0].taught, with_head[0].taught is None) == (None, False)


def test_adapters_begin_with_the_same_draws_beside_a_head(recipe_for, ranks, tmp_path):
    base = distil(recipe_for("base", with_head=None, steps=1), ranks).checkpoint
    settings = {"init_from": base, "lora": {"rank": 2, "alpha": 4}}
    alone, beside = (
        Bench(recipe_for(name, with_head=head, **settings), ranks)
        for name, head in (("alone", None), ("beside", HEAD))
    )
    assert_equal(beside.drafter(), alone.drafter())


def test_without_a_head_nothing_of_one_is_left(recipe_for, ranks):
    recipe = recipe_for(with_head=None)
    ckpt = distil(recipe, ranks).checkpoint
    assert not (ckpt / PAIRWISE_NAME.parent).exists()
    assert "Pairwise head" not in (ckpt / "README.md").read_text()
    assert not list(recipe.output_dir.rglob(PAIRWISE_STATE))
    assert not [tag for tag in curves(recipe) if tag.startswith("head/")]


def test_rehearsing_the_worst_case_teaches_nothing(bench_for):
    rehearsed, straight = bench_for(), bench_for()
    rehearsed.learner.rehearse(worst_case_batch(2, 40, 5, DRAFTER, HIDDEN))
    for bench in (rehearsed, straight):
        bench.take_steps()
    assert_equal(rehearsed.weights(), straight.weights())


# What must not change it


@pytest.mark.parametrize("kind", ["cross_entropy", "d_pace"])
def test_it_learns_what_a_head_alone_would_of_the_same_blocks(bench_for, kind):
    bench = bench_for(with_head=EVERY_BLOCK | {"objective": {"kind": kind}})
    parts, settings = bench.learner.parts, bench.recipe.train.pairwise
    alone = begin_head(parts, settings)
    for step in range(3):
        frozen = FrozenDrafter(bench.learner.engine.module, parts, settings.candidates)
        drafted = [frozen.draft(micro.batch) for micro in bench.feed.read_step(step)]
        learnt = alone.learn(drafted, HEAD_RATE)
        (totals,) = bench.take_steps([step])
        assert totals.taught.loss == pytest.approx(learnt.loss, rel=1e-5)
        assert totals.taught.gradient_norm == pytest.approx(learnt.gradient_norm, rel=1e-4)
    assert_close(bench.weights(), dict(alone.head.named_parameters()))


@pytest.mark.parametrize("kind", ["cross_entropy", "d_pace"])
def test_one_micro_batch_teaches_what_four_do(bench_for, kind):
    head = HEAD | {"objective": {"kind": kind}}
    whole, split = (bench_for(with_head=head, micro_batch_sequences=size) for size in (4, 1))
    first, second = whole.take_steps(), split.take_steps()
    for found, expected in zip(second, first, strict=True):
        assert found.taught.num_blocks == expected.taught.num_blocks
        assert found.taught.loss == pytest.approx(expected.taught.loss, rel=1e-5)
    assert_close(split.weights(), whole.weights())


def test_it_learns_from_so_many_blocks_of_each_sequence_drawn_afresh_at_each_visit(bench_for):
    bench, drawn = bench_for(with_head=HEAD | {"num_anchors": 2}), {}
    companion = bench.learner.companion
    for step in range(6):
        for micro in bench.feed.read_step(step):
            chosen = companion.choose(micro)
            assert torch.equal(chosen, companion.choose(micro))
            numbers = micro.batch.blocks.document[:: DRAFTER.block_size][chosen]
            for place, visit in enumerate(micro.visits):
                of_visit = chosen[numbers == place]
                assert len(of_visit.unique()) == len(of_visit) == 2
                drawn[visit] = micro.batch.blocks.anchor[:: DRAFTER.block_size][of_visit].tolist()
    assert len({visit.epoch for visit in drawn}) == 3
    places = [[drawn[visit] for visit in drawn if visit.index == index] for index in range(8)]
    assert all(len({tuple(each) for each in of_sequence}) > 1 for of_sequence in places)


def run_on(recipe: Recipe, num_ranks: int) -> dict[str, torch.Tensor]:
    """The head's weights after a training in processes of its own."""
    path = recipe.output_dir / "recipe.json"
    path.write_text(recipe.model_dump_json())
    run_ranks(str(Path(__file__).with_name("train_only.py")), num_ranks, path)
    return state_of(recipe)["head"]


def state_of(recipe: Recipe) -> dict:
    (path,) = (recipe.output_dir / "state").rglob(PAIRWISE_STATE)
    return torch.load(path)


def test_one_rank_teaches_what_two_do_and_goes_on_from_their_state(recipe_for, ranks):
    straight, two = recipe_for("one"), recipe_for("two")
    distil(straight, ranks)
    assert_close(run_on(two, 2), state_of(straight)["head"])
    longer = {"steps": 11, "optimizer": {"schedule": "constant"}}
    head = HEAD | {"optimizer": {"schedule": "constant"}}
    straight, two = (recipe_for(name, with_head=head, **longer) for name in ("straight", "resumed"))
    distil(straight, ranks)
    run_on(two.model_copy(update={"train": two.train.model_copy(update={"steps": 5})}), 2)
    distil(two, ranks)
    assert_close(state_of(two)["head"], state_of(straight)["head"])


# Stopping and going on


@pytest.mark.parametrize("last_step", [1, 3, 4, 7])
def test_a_run_that_went_on_ends_with_the_bits_of_one_that_was_not_stopped(
    recipe_for, ranks, monkeypatch, last_step
):
    straight, recipe = recipe_for("straight"), recipe_for("stopped")
    expected = distil(straight, ranks).checkpoint
    learn, taken = Learner.learn, []

    def learn_or_die(self, *arguments):
        if len(taken) == last_step:
            raise KeyboardInterrupt
        taken.append(arguments)
        return learn(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "learn", learn_or_die)
        with pytest.raises(KeyboardInterrupt):
            distil(recipe, ranks)
    found = distil(recipe, ranks).checkpoint
    for name in (PAIRWISE_NAME, "model.safetensors"):
        assert (found / name).read_bytes() == (expected / name).read_bytes()
    assert_equal(*(state_of(each)["head"] for each in (recipe, straight)))
    assert curves(recipe) == curves(straight)


def curves(recipe: Recipe) -> dict[str, dict[int, float]]:
    """Of what is learnt, by tag, then step; one that was taken again counts as it was then.

    File by file: TensorBoard sorts those of one second by name, where 10 comes before 9.
    """
    drawn: dict[str, dict[int, float]] = {}
    files = (path for path in (recipe.output_dir / "tensorboard").iterdir() if path.is_file())
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            if tag.startswith(("head/", "loss/", "accept_sim/")):
                drawn.setdefault(tag, {}).update({each.step: each.value for each in events.Scalars(tag)})
    return drawn


@pytest.mark.parametrize("killed_at", ["the state", "the checkpoint"])
def test_a_save_that_is_killed_leaves_the_pair_before_it(recipe_for, ranks, monkeypatch, killed_at):
    expected = distil(recipe_for("straight"), ranks).checkpoint
    recipe, saves = recipe_for(), []
    owner, name = (
        ("train.saving", "settle") if killed_at == "the state" else ("train.checkpoint", "write_pairwise")
    )

    def die_the_second_time(*arguments):
        saves.append(arguments)
        if len(saves) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    original = getattr(__import__(owner, fromlist=[name]), name)
    with monkeypatch.context() as patched:
        patched.setattr(f"{owner}.{name}", die_the_second_time)
        with pytest.raises(KeyboardInterrupt):
            distil(recipe, ranks)
    checkpoints = sorted(path.name for path in (recipe.output_dir / "checkpoints").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-3"]
    found = distil(recipe, ranks).checkpoint
    assert (found / PAIRWISE_NAME).read_bytes() == (expected / PAIRWISE_NAME).read_bytes()


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (HEAD, HEAD | {"rank": 6}, r"train\.pairwise was .*'rank': 5.* the recipe says .*'rank': 6"),
        (HEAD, HEAD | {"num_anchors": 4}, r"train\.pairwise was .*'num_anchors': 3"),
        (HEAD, None, r"train\.pairwise was \{.*\}, the recipe says None"),
        (None, HEAD, r"train\.pairwise was None, the recipe says \{"),
    ],
)
def test_a_recipe_whose_head_changed_does_not_go_on(recipe_for, ranks, was, now, said):
    distil(recipe_for(with_head=was, steps=3), ranks)
    with pytest.raises(UserError, match=said):
        distil(recipe_for(with_head=now), ranks)


# What is left


def test_every_checkpoint_has_the_head_of_its_step_and_says_so(recipe_for, ranks, monkeypatch):
    recipe, heads = recipe_for(), {}
    save = Saver.save

    def save_and_tell(self, engine, progress):
        tables = vars(self.companion.learner.head.make_tables())
        heads[progress.step(4)] = {name: table.detach().bfloat16() for name, table in tables.items()}
        save(self, engine, progress)

    monkeypatch.setattr(Saver, "save", save_and_tell)
    distil(recipe, ranks)
    assert list(heads) == [3, 6, 8]
    for step in (6, 8):
        ckpt = RunFolders(recipe.output_dir).checkpoint(step)
        found = read_pairwise(ckpt, HIDDEN, VOCAB)
        assert_equal(vars(found), heads[step])
        assert f"Rank 5, trained in {step} steps" in (ckpt / "README.md").read_text()
    assert float(found.children_Vr.abs().max()) > 0


def test_the_published_head_and_drafter_are_of_one_step(recipe_for, ranks):
    """Nobody serves a drafter with the head of another: both lie in one folder, which appears whole."""
    ckpt = distil(recipe_for(), ranks).checkpoint
    assert {str(path.relative_to(ckpt)) for path in ckpt.rglob("*") if path.is_file()} == {
        *("config.json", "model.safetensors", "draftsmith.json", "README.md", str(PAIRWISE_NAME))
    }
    assert (
        load_file(ckpt / PAIRWISE_NAME).keys() == vars(PairwiseTables.without_effect(VOCAB, HIDDEN, 5)).keys()
    )


def test_the_card_has_one_section_on_it_below_what_was_measured():
    text = model_card(tiny_config(), card_manifest("t/t", "train.pairwise={rank: 9}"))
    assert text.startswith(model_card(tiny_config(), card_manifest("t/t")))
    assert text.count("## Pairwise head") == 1
    assert text.endswith("together with the drafter, which is the same without it.\n")
    assert "Rank 9, trained in 1,300 steps" in text


def test_a_disk_without_room_for_the_head_is_told(bench_for, monkeypatch):
    bench = bench_for()
    config = published_config(DRAFTER, load_target_config(bench.recipe.target.model))
    folders, companion = RunFolders(bench.recipe.output_dir), bench.learner.companion
    saver = Saver(bench.recipe, folders, config, manifest_of(bench.recipe), bench.ranks, None, companion)
    tables = 2 * (2 * VOCAB * 5 + HIDDEN * 5 + 5)
    of_head = tables + 12 * (3 * HIDDEN * 5 + 5)  # weights and two moments in fp32
    of_drafter = PAIR_BYTES * sum(math.prod(shape) for shape in expected_tensors(config).values())
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=of_drafter + of_head))
    saver._make_room(1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=of_drafter + of_head - 1))
    with pytest.raises(MachineError, match="a checkpoint and its state take"):
        saver._make_room(1)


# What it is worth


def test_with_all_blocks_the_chain_without_it_is_the_drafters(bench_for):
    totals = bench_for(with_head=EVERY_BLOCK).take_steps(range(4))
    whole = totals[0].then(totals[1]).then(totals[2]).then(totals[3])
    assert whole.taught.num_blocks == int(whole.blocks_by_depth_K[0])
    assert whole.taught.acceptance["chain_without"] == pytest.approx(whole.acceptance, rel=1e-12)
    assert whole.taught.weight_sum == sum(each.taught.weight_sum for each in totals)


def test_curves_stand_beside_the_drafters_and_the_served_chain_is_the_one_that_counts(recipe_for, ranks):
    recipe = recipe_for()
    distilled = distil(recipe, ranks)
    drawn = curves(recipe)
    ways = ("chain", "tree", "chain_without", "tree_without")
    assert {f"head/{name}" for name in ("loss", "grad_norm", *ways)} <= drawn.keys()
    assert all(list(points) == list(range(1, 9)) for points in drawn.values())
    assert distilled.simulated_acceptance == pytest.approx(drawn["head/chain"][8], rel=1e-6)
    assert all(drawn["head/tree"][step] >= drawn["head/chain"][step] for step in range(1, 9))


def test_trained_beside_a_drafter_it_has_trees_accept_more_of_text_that_neither_saw(recipe_for, ranks):
    head = HEAD | {
        "rank": 24,
        "candidates": VOCAB - 6,
        "num_anchors": 12,
        "optimizer": {"learning_rate": 2e-2},
    }
    settings = {"steps": 60, "save_every_steps": 60, "num_anchors": 12}
    recipe = recipe_for(with_head=head, **settings)
    ckpt = distil(recipe, ranks).checkpoint
    unseen = [make_sequence(index, 40) for index in range(500, 530)]
    blocks = np.array([len(decoding_anchors(sequence.loss_mask)) for sequence in unseen])
    numbers, parts = np.arange(len(unseen)), load_target_parts(recipe.target)
    frozen = FrozenDrafter(load_published(ckpt), parts.to(ranks.device, torch.float32), VOCAB - 6)
    held_out = draft_held_out(frozen, unseen, Split(numbers[:0], numbers, blocks))
    without, with_head = (
        held_out.simulate(tables, [9, 31]) for tables in (None, read_pairwise(ckpt, HIDDEN, VOCAB))
    )
    assert with_head.trees[0] > 1.1 * without.trees[0] > 1.1
    assert with_head.trees[1] > 1.1 * without.trees[1]
    assert with_head.chain > without.chain


# Refusals


@pytest.mark.parametrize("sick", ["rest_r", "gate.weight"])
def test_a_loss_that_is_not_finite_stops_by_name_before_any_weight_changes(bench_for, sick):
    bench = bench_for()
    bench.take_steps([0])
    dict(bench.head.named_parameters())[sick].data.flatten()[0] = torch.nan
    drafter, head = bench.drafter(), bench.weights()
    with pytest.raises(UserError, match=r"head diverged; lower train\.pairwise\.optimizer\.learning_rate"):
        bench.take_steps([1])
    assert_equal(bench.drafter(), drafter)
    for name, weight in bench.weights().items():
        torch.testing.assert_close(weight, head[name], rtol=0, atol=0, equal_nan=True)


def test_more_candidates_than_tokens_are_refused(recipe_for):
    check_companion(recipe_for(with_head=HEAD | {"candidates": VOCAB}))
    with pytest.raises(UserError, match=r"train\.pairwise\.candidates is 97, the target's vocabulary has 96"):
        check_companion(recipe_for(with_head=HEAD | {"candidates": VOCAB + 1}))


def test_a_learner_with_a_head_wants_its_rate(bench_for):
    bench = bench_for()
    with pytest.raises(AssertionError):
        bench.learner.learn(bench.feed.read_step(0), RATE)
