"""tests/compare_head_training.py: steps of equally many blocks, scaled scores, drawn parents."""

from collections import Counter
from itertools import islice

import pytest
import torch
from compare_head_training import Text, Way, count, draw_steps, scale
from head_losses import Lesson, draw_parents, label_after, right_path
from test_train_pairwise import make_blocks, make_head, make_parts, scores_by_hand

from recipes.errors import UserError
from recipes.schema import Pairwise
from train.pairwise import fill_tables

SETTINGS = Pairwise(sequences_per_step=4, num_anchors=3, seed=2)


def lesson() -> Lesson:
    return Lesson(make_head(), make_blocks(), SETTINGS, make_parts().head_VD)


def test_each_step_has_as_many_blocks_and_an_epoch_some_of_each_sequence():
    sizes = [1, 5, 2, 9, 3, 4]
    steps = list(islice(draw_steps(sizes, SETTINGS), 5))
    assert {len(step) for step in steps} == {12}
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    an_epoch = torch.cat(steps)[: sum(min(size, 3) for size in sizes)].tolist()
    assert len(set(an_epoch)) == len(an_epoch)
    assert Counter(owners[block] for block in an_epoch) == {0: 1, 1: 3, 2: 2, 3: 3, 4: 3, 5: 3}
    assert not torch.equal(steps[0], next(draw_steps(sizes, SETTINGS.model_copy(update={"seed": 3}))))


def test_of_three_texts_each_prompt_is_of_one():
    sizes = [2, 1, 3, 4, 2]
    blocks = make_blocks(sum(sizes))
    text = Text(blocks, sizes, blocks.hidden_ALD)
    parts = [text.take(part, 3) for part in range(3)]
    assert [part.blocks_by_sequence for part in parts] == [[2, 4], [1, 2], [3]]
    assert torch.equal(parts[1].final_ALD, blocks.hidden_ALD[[2, 10, 11]])
    assert text.begin(6).blocks_by_sequence == [2, 1, 3]
    assert text.begin(5).num_blocks == 3


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_scaled_scores_are_powers_that_sum_to_one_with_the_rest(tau):
    head, blocks = make_head(), make_blocks()
    table_ALCC = fill_tables(head.make_tables(), blocks).detach()
    parent = int(blocks.tokens_ALC[4, 0, 2])
    mass = scores_by_hand(head, blocks, 4, 1, parent) ** (1 / tau)
    expected = (mass / mass.sum())[:-1]
    torch.testing.assert_close(scale(table_ALCC, tau)[4, 1, 2].exp(), expected, rtol=1e-3, atol=1e-6)


def test_drawn_parents_are_candidates_of_the_slot_before_and_the_first_is_the_committed_token():
    blocks = make_blocks(400)
    drawn_AL = draw_parents(blocks)
    assert torch.equal(drawn_AL[:, 0], blocks.anchors_A)
    place_ALC = blocks.tokens_ALC[:, :-1] == drawn_AL[:, 1:, None]
    assert (place_ALC.sum(-1) == 1).all()
    expected = blocks.log_probs_ALC[:, :-1, 0].exp() / blocks.log_probs_ALC[:, :-1].exp().sum(-1)
    assert place_ALC[..., 0].float().mean() == pytest.approx(float(expected.mean()), abs=0.05)


def test_after_the_recorded_parents_labels_are_as_likely_as_in_the_product():
    given = lesson()
    torch.testing.assert_close(
        label_after(given, given.blocks.recorded_parents), given.labelled().log_probs_AL
    )


def test_the_right_path_is_as_long_as_trees_can_hold_it():
    given = lesson()
    path_AL, last_A1 = right_path(given)
    held_AL = given.labelled().is_candidate_AL & given.blocks.known_AL
    assert torch.equal(path_AL > -torch.inf, held_AL.long().cumprod(1).bool())
    assert 0 < int((path_AL > -torch.inf).sum()) < path_AL.numel()
    assert last_A1.shape == (9, 1)


def test_a_way_is_told_with_what_it_may_be():
    way = Way.parse("kl@0+1,rank=8,target_temperature=0,tau=0.8", SETTINGS)
    assert (way.loss, list(way.texts), way.tau, way.settings.rank) == ("kl", ["0", "1"], 0.8, 8)
    assert (way.settings.learnt_temperature, way.seeded(5).settings.seed) == (0, 5)
    for name in ("kl", "luck@0"):
        with pytest.raises(UserError, match="write LOSS@TEXT"):
            Way.parse(name, SETTINGS)


def test_a_sequence_counts_as_decoding_would():
    counts = count([torch.tensor([2, 0, 7, 0, 1, 3, 0]), torch.tensor([0, 0])])
    assert (counts.steps_N.tolist(), counts.tokens_N.tolist()) == ([4, 2], [7, 2])
