"""A pairwise head that learns the target's distribution: what it learns, alone and beside the drafter."""

import math
from dataclasses import replace

import pytest
import torch
from pairwise_bench import Workbench, head_bytes, recipe_for, run
from small_training import DRAFTER, make_sequence, small_recipe, write_shards
from test_train_pairwise import (
    BY_DEPTH,
    COUNT,
    HIDDEN,
    SLOTS,
    gradients,
    known_slots,
    make_blocks,
    make_head,
    make_parts,
    mean_loss,
    scores_by_hand,
    weighted_mean,
)
from test_train_pairwise_head import gradient_of

from recipes.errors import UserError
from recipes.schema import Objective as Settings
from recipes.schema import Recipe
from serve.tree_candidates import rank_candidates
from train import pairwise, pairwise_inputs
from train.blocks import draw_anchors
from train.feed import Feed, visit_generator
from train.loop import start_learner
from train.objective import Objective
from train.pairwise import DraftedBlocks, add_target, divergence_sum, label_among_candidates
from train.pairwise_held_out import draft_held_out
from train.pairwise_learner import FrozenDrafter, begin_head, join
from train.pairwise_training import load_frozen
from train.step import Learner

KL = Settings(kind="kl", decay=2.5)
TO_KL = {"objective": KL.model_dump()}


def make_final(num_blocks: int = 9) -> torch.Tensor:
    """[A, L, D]"""
    return torch.randn(num_blocks, SLOTS, HIDDEN, generator=torch.Generator().manual_seed(5))


def mean_divergence(head, blocks: DraftedBlocks) -> torch.Tensor:
    return divergence_sum(head, blocks, KL) / Objective(KL).normaliser(blocks.known_by_slot).float()


# What is learnt


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("most_logits", [1, 1 << 20])
def test_the_target_is_its_softmax_at_a_temperature(monkeypatch, temperature, most_logits):
    monkeypatch.setattr(pairwise, "_RANKING", {"cpu": (rank_candidates, most_logits)})
    blocks, final_ALD, head_VD = make_blocks(), make_final(), make_parts().head_VD
    found = add_target(blocks, final_ALD, head_VD, temperature)
    for block, slot in [(0, 0), (3, 2), (8, 1)]:
        logits_V = head_VD @ final_ALD[block, slot]
        expected_V = torch.zeros_like(logits_V)
        if temperature:
            expected_V = (logits_V / temperature).softmax(-1)
        else:
            expected_V[logits_V.argmax()] = 1
        expected_C = expected_V[blocks.tokens_ALC[block, slot]]
        torch.testing.assert_close(found.target_ALC[block, slot], expected_C, rtol=1e-4, atol=1e-6)
    assert found.tokens_ALC is blocks.tokens_ALC


def test_of_equally_likely_tokens_the_lowest_is_the_greedy_one():
    head_VD = make_parts().head_VD.clone()
    head_VD[[4, 9]] = 50 * torch.ones(HIDDEN)
    blocks = replace(make_blocks(2, count=3), tokens_ALC=torch.tensor([9, 4, 1]).expand(2, SLOTS, 3))
    found = add_target(blocks, torch.ones(2, SLOTS, HIDDEN), head_VD, 0.0)
    assert found.target_ALC.tolist() == [[[0, 1, 0]] * SLOTS] * 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_loss_and_its_gradient_are_their_definition(temperature):
    head, final_ALD, head_VD = make_head(), make_final(), make_parts().head_VD
    blocks = add_target(make_blocks(), final_ALD, head_VD, temperature)
    terms = []
    for block, slot, parent, _ in known_slots(blocks):
        target_C = blocks.target_ALC[block, slot]
        target = torch.cat([target_C, 1 - target_C.sum()[None]])
        probs = scores_by_hand(head, blocks, block, slot, parent)
        nats = [p * (p.log() - q.log()) for p, q in zip(target, probs, strict=True) if p > 0]
        terms.append((math.exp(-slot / 2.5), sum(nats)))
    found, expected = mean_divergence(head, blocks), weighted_mean(terms)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradients(head, found), gradients(head, expected), rtol=1e-3, atol=1e-6)


def test_where_the_text_is_greedy_temperature_zero_is_cross_entropy():
    head, final_ALD, head_VD = make_head(), make_final(), make_parts().head_VD
    blocks = make_blocks()
    greedy_AL = (final_ALD @ head_VD.T).argmax(-1)
    blocks = replace(blocks, labels_AL=greedy_AL.where(blocks.known_AL, 0))
    assert not (blocks.tokens_ALC == greedy_AL[..., None]).any(-1).all()  # some are of the rest
    found = mean_divergence(head, add_target(blocks, final_ALD, head_VD, 0.0))
    expected = mean_loss(blocks, label_among_candidates(head, blocks), BY_DEPTH)
    torch.testing.assert_close(found, expected)


def test_a_head_that_says_what_the_target_says_has_nothing_to_learn():
    head, blocks = make_head(), make_blocks()
    parents_ALP = blocks.recorded_parents[:, :, None]
    own = pairwise.score(head.make_tables(), blocks, parents_ALP).candidates_BLPC[:, :, 0].exp().detach()
    value = mean_divergence(head, replace(blocks, target_ALC=own))
    assert float(value.detach()) == pytest.approx(0, abs=1e-5)
    assert all(float(slope.abs().max()) < 1e-4 for slope in gradients(head, value).values())


def test_blocks_are_cut_joined_and_kept_with_what_the_target_finds():
    blocks = add_target(make_blocks(), make_final(), make_parts().head_VD, 0.7)
    assert torch.equal(join([blocks[:4], blocks[4:]]).target_ALC, blocks.target_ALC)
    assert torch.equal(blocks.keep(3).target_ALC, blocks.target_ALC[..., :3])
    assert make_blocks().keep(3).target_ALC is None
    assert blocks.target_ALC.shape[-1] == COUNT


# Alone


@pytest.fixture
def bench(target, ckpt) -> Workbench:
    return Workbench(recipe_for(target, ckpt, **TO_KL, target_temperature=0.7))


def test_a_slots_distribution_is_that_of_the_state_before_its_token(bench):
    """The state of token a + k - 1 predicts slot k of a block at a."""
    head_VD, settings = bench.parts.head_VD.float(), bench.recipe.pairwise
    (micro, *_), (drafted, *_) = bench.feed.read_step(1), bench.draft_step(1)
    row, found = 0, drafted.target_ALC
    for visit in micro.visits:
        sequence = bench.shards[visit.index]
        generator = visit_generator(settings.seed, visit)
        for anchor in draw_anchors(sequence.loss_mask, settings.num_anchors, generator).tolist():
            for slot in range(1, min(DRAFTER.block_size, len(sequence.token_ids) - anchor)):
                probs_V = (head_VD @ sequence.final[anchor + slot - 1].float() / 0.7).softmax(-1)
                expected = probs_V[drafted.tokens_ALC[row, slot - 1]]
                torch.testing.assert_close(found[row, slot - 1], expected, rtol=1e-3, atol=1e-5)
            row += 1
    assert row == len(found)


def test_no_split_of_a_step_changes_its_loss_or_gradient(bench):
    head, drafted = bench.scatter_head(), bench.draft_step(0)
    in_two = [drafted[0][:3], join([drafted[0][3:], *drafted[1:]])]
    splits = [(blocks, most) for blocks in (drafted, in_two) for most in (512, 3, 1)]
    found = [gradient_of(head, blocks, KL, most) for blocks, most in splits]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-7)


def test_held_out_blocks_hold_nothing_that_no_tree_needs(bench):
    assert bench.frozen.temperature == 0.7
    assert draft_held_out(bench.frozen, bench.shards, bench.split).drafted.target_ALC is None


def test_other_objectives_ask_for_no_distribution(target, ckpt):
    bench = Workbench(recipe_for(target, ckpt))
    assert load_frozen(bench.recipe, source_of(bench), bench.parts).temperature is None
    assert bench.draft_step(0)[0].target_ALC is None


def source_of(bench: Workbench):
    return pairwise_inputs.read_source(bench.recipe)


def test_the_temperature_decides_what_is_learnt_and_does_not_change_on_the_way(target, ckpt):
    recipe = recipe_for(target, ckpt, **TO_KL, target_temperature=0.7)
    first = head_bytes(run(recipe))
    with pytest.raises(UserError, match=r"pairwise\.target_temperature was 0\.7, the recipe says 0\.0"):
        run(recipe, "pairwise.target_temperature=0")
    other = recipe_for(target, ckpt, "other", **TO_KL, target_temperature=0.0)
    assert head_bytes(run(other)) != first


def test_shards_without_final_states_are_refused(target, ckpt):
    recipe = recipe_for(target, ckpt)
    with pytest.raises(UserError, match=r"holds no final states of the target: write data\.final_states"):
        run(recipe, "pairwise.objective.kind=kl")


# Beside the drafter

SEQUENCES = [make_sequence(index, with_final=True) for index in range(8)]
HEAD = {"rank": 5, "candidates": 7, "num_anchors": 99, "seed": 3, "target_temperature": 0.7} | TO_KL


@pytest.fixture(scope="module")
def ranks(only_rank):
    return only_rank


@pytest.fixture
def learner_for(tmp_path, target, ranks):
    def make(head: dict | None = HEAD, **train) -> Learner:
        recipe = small_recipe(tmp_path / "run", target).model_dump(mode="json")
        recipe["data"]["final_states"] = True
        recipe["train"] |= {"pairwise": head, "objective": {"kind": "kl"}} | train
        recipe = Recipe.model_validate(recipe)
        if not (recipe.output_dir / "shards").exists():
            write_shards(recipe, 9)
        return start_learner(recipe, ranks)

    return make


def take_steps(learner: Learner, steps=range(3)):
    rate = None if learner.companion is None else 2e-2
    feed = Feed(SEQUENCES, learner.train, DRAFTER, 0, 1)
    return [learner.learn(feed.read_step(step), 5e-3, rate) for step in steps]


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in learner.companion.learner.head.named_parameters()}


def test_beside_a_drafter_it_learns_what_it_would_alone(learner_for):
    learner = learner_for()
    settings = learner.companion.settings
    alone = begin_head(learner.parts, settings)
    feed = Feed(SEQUENCES, learner.train, DRAFTER, 0, 1)
    for step in range(3):
        frozen = FrozenDrafter(learner.engine.module, learner.parts, settings.candidates, temperature=0.7)
        learnt = alone.learn([frozen.draft(micro.batch) for micro in feed.read_step(step)], 2e-2)
        (totals,) = take_steps(learner, [step])
        assert totals.taught.loss == pytest.approx(learnt.loss, rel=1e-5)
    torch.testing.assert_close(weights_of(learner), dict(alone.head.named_parameters()), rtol=1e-3, atol=1e-5)


def test_one_micro_batch_teaches_what_four_do(learner_for):
    head = HEAD | {"num_anchors": 3}
    whole, split = (learner_for(head, micro_batch_sequences=size) for size in (4, 1))
    for found, expected in zip(take_steps(split), take_steps(whole), strict=True):
        assert found.taught.loss == pytest.approx(expected.taught.loss, rel=1e-5)
    torch.testing.assert_close(weights_of(split), weights_of(whole), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["kl", "cross_entropy"])
def test_the_drafter_learns_the_same_bits_with_a_head_and_without(learner_for, kind):
    beside, alone = learner_for(HEAD | {"objective": {"kind": kind}}), learner_for(None)
    assert [each.loss for each in take_steps(beside)] == [each.loss for each in take_steps(alone)]
    for found, expected in zip(*(each.engine.module.parameters() for each in (beside, alone)), strict=True):
        assert torch.equal(found, expected)
