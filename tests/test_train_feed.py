"""The order of the data, the anchors and the learning rate are functions of the step."""

import math
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import reduce
from itertools import pairwise

import pytest
import torch
from small_training import DRAFTER, make_sequence, small_recipe, write_shards, write_target

from data.shards import Sequence, open_shards
from recipes.errors import UserError
from recipes.schema import Optimizer, Train
from train.feed import Coverage, Feed, choose_sequences, read_ahead, visit_at
from train.schedule import learning_rate_at

SEQUENCES = [make_sequence(index) for index in range(7)]


def feed(rank: int = 0, world_size: int = 1, sequences: Many = SEQUENCES, **changes) -> Feed:
    settings = {"sequences_per_step": 4, "num_anchors": 3, "micro_batch_sequences": 1} | changes
    train = Train(steps=9, **settings)
    return Feed(sequences, train, DRAFTER, rank, world_size)


def visits_and_anchors(micro_batches) -> list:
    return [
        (visit, micro.batch.block_positions_Q.tolist()) for micro in micro_batches for visit in micro.visits
    ]


def test_every_epoch_sees_every_sequence_once_in_its_own_order():
    epochs = [[visit_at(epoch * 7 + place, 7, seed=0) for place in range(7)] for epoch in range(3)]
    for number, visits in enumerate(epochs):
        assert {visit.epoch for visit in visits} == {number}
        assert {visit.index for visit in visits} == set(range(7))
    assert len({tuple(visit.index for visit in visits) for visits in epochs}) == 3


def test_another_seed_is_another_order():
    orders = {tuple(visit_at(n, 7, seed).index for n in range(7)) for seed in range(5)}
    assert len(orders) > 1


def test_steps_follow_one_another_without_gap_or_overlap():
    visits = [visit for step in range(7) for micro in feed().read_step(step) for visit in micro.visits]
    assert visits == [visit_at(number, 7, seed=0) for number in range(28)]


def test_two_ranks_see_what_one_sees():
    for step in range(4):
        alone = visits_and_anchors(feed().read_step(step))
        together = [visits_and_anchors(feed(rank, 2).read_step(step)) for rank in range(2)]
        assert together[0] + together[1] == alone


def test_micro_batches_change_neither_order_nor_anchors():
    rows = [
        torch.cat([micro.batch.block_positions_Q for micro in feed(micro_batch_sequences=size).read_step(3)])
        for size in (1, 2, 4)
    ]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_anchors_are_drawn_afresh_at_each_visit_and_the_same_at_each_reading():
    long = [make_sequence(0, 36)]
    anchors = [
        feed(sequences=long).read_step(step)[0].batch.block_positions_Q.tolist() for step in (0, 0, 1, 2)
    ]
    assert anchors[0] == anchors[1]
    assert len({tuple(drawn) for drawn in anchors}) == 3


def test_a_sequence_without_a_supervised_token_is_named():
    bare = make_sequence(0)
    bare.loss_mask[:] = False
    with pytest.raises(UserError, match="sequence 0 of the shards has no supervised token"):
        feed(sequences=[bare]).read_step(0)


def masked(supervised: int, index: int = 0) -> Sequence:
    """36 tokens, of which the last `supervised` are."""
    sequence = make_sequence(index, 36)
    sequence.loss_mask[:] = False
    sequence.loss_mask[36 - supervised :] = True
    return sequence


SUPERVISED = [5, 1, 9, 2, 3, 12]


class Masked(list):
    """Shards of one sequence for each number of supervised tokens."""

    def __init__(self) -> None:
        super().__init__(masked(supervised, index) for index, supervised in enumerate(SUPERVISED))

    def read_loss_masks(self) -> Iterator[torch.Tensor]:
        return (sequence.loss_mask for sequence in self)


def test_sequences_with_too_few_candidates_are_left_out_and_told():
    choice = choose_sequences(Masked(), least_anchors=3)
    assert choice.kept.tolist() == [0, 2, 4, 5]
    assert str(choice) == (
        "train.least_anchors 3 leaves out 2 of 6 sequences, with 3 of 32 supervised tokens"
    )


def test_a_floor_of_one_keeps_all():
    assert choose_sequences(Masked(), least_anchors=1).kept.tolist() == [0, 1, 2, 3, 4, 5]


def test_every_epoch_sees_every_kept_sequence_once():
    kept = choose_sequences(Masked(), least_anchors=3).kept
    chosen = replace(feed(sequences=Masked()), kept=kept)
    visits = [visit for step in range(2) for micro in chosen.read_step(step) for visit in micro.visits]
    assert [sorted(visit.index for visit in visits[at : at + 4]) for at in (0, 4)] == [[0, 2, 4, 5]] * 2


def test_keeping_every_sequence_changes_nothing():
    every = replace(feed(), kept=range(7))
    for step in range(3):
        assert visits_and_anchors(every.read_step(step)) == visits_and_anchors(feed().read_step(step))


def test_a_floor_that_no_sequence_reaches_is_refused():
    with pytest.raises(UserError, match=r"least_anchors is 13, but no .* more than 12 supervised tokens"):
        choose_sequences(Masked(), least_anchors=13)


def test_a_sequence_without_a_supervised_token_is_named_before_any_is_left_out():
    shards = Masked()
    shards[3].loss_mask[:] = False
    with pytest.raises(UserError, match="sequence 3 of the shards has no supervised token"):
        choose_sequences(shards, least_anchors=3)


def test_coverage_is_the_share_of_candidates_that_are_anchors():
    """At most 3 anchors of 5, 1, 9, 2, 3 and 12 candidates."""
    micro_batches = [
        micro
        for step in range(3)
        for micro in feed(sequences=Masked(), sequences_per_step=2, micro_batch_sequences=2).read_step(step)
    ]
    coverage = reduce(Coverage.then, (micro.coverage for micro in micro_batches))
    assert coverage.mean == pytest.approx((3 / 5 + 1 + 3 / 9 + 1 + 1 + 3 / 12) / 6)
    assert coverage.least == 3 / 12


def test_the_loss_masks_of_shards_are_those_of_their_sequences(tmp_path):
    recipe = small_recipe(tmp_path, write_target(tmp_path / "target"))
    write_shards(recipe, num_sequences=5)
    shards = open_shards(tmp_path / "shards")
    masks = list(shards.read_loss_masks())
    assert len(masks) == len(shards) == 5
    assert all(torch.equal(mask, shards[index].loss_mask) for index, mask in enumerate(masks))


def test_reading_ahead_gives_every_step_in_order_and_is_at_most_one_ahead():
    read, consumed = [], []
    arrived = threading.Semaphore(0)

    def note(step: int) -> int:
        read.append(step)
        arrived.release()
        return step

    for step in read_ahead(note, range(5)):
        consumed.append(step)
        arrived.acquire()
        assert len(read) <= len(consumed) + 1
    assert consumed == [0, 1, 2, 3, 4]


def test_a_failure_while_reading_ahead_reaches_the_reader():
    def fail_at_two(step: int) -> int:
        if step == 2:
            raise UserError("two")
        return step

    steps = read_ahead(fail_at_two, range(5))
    assert [next(steps), next(steps)] == [0, 1]
    with pytest.raises(UserError, match="two"):
        next(steps)


def test_the_learning_rate_warms_up_peaks_and_ends_where_it_should():
    optimizer = Optimizer(learning_rate=1.0, warmup_share=0.1, final_learning_rate_share=0.2)
    rates = [learning_rate_at(step, 100, optimizer) for step in range(100)]
    assert rates[:3] == [0.1, 0.2, pytest.approx(0.3)]
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.2 + 0.8 * 0.5)
    assert rates[99] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 89 / 90)))
    assert all(later <= earlier for earlier, later in pairwise(rates[10:]))


def wsd(steps: int = 100, **changes) -> list[float]:
    settings = {"learning_rate": 1.0, "schedule": "wsd", "warmup_share": 0.1} | changes
    optimizer = Optimizer(**settings)
    return [learning_rate_at(step, steps, optimizer) for step in range(steps)]


def test_a_stable_rate_stays_at_its_peak_until_the_last_steps():
    rates = wsd(decay_share=0.2)
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert set(rates[9:81]) == {1.0}
    assert all(later < earlier for earlier, later in pairwise(rates[80:]))


def test_the_decay_is_one_less_the_root_of_the_way_gone_and_ends_after_the_last_step():
    rates = wsd(decay_share=0.16, final_learning_rate_share=0.2)
    assert rates[84:] == pytest.approx([0.2 + 0.8 * (1 - math.sqrt(way / 16)) for way in range(16)])


def test_a_decay_may_follow_the_warm_up_at_once():
    rates = wsd(steps=10, warmup_share=0.5, decay_share=0.5)
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[6:] == pytest.approx([1 - math.sqrt(way / 5) for way in range(1, 5)])


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_so_few_steps_that_none_is_left_to_decay_stay_at_the_peak(steps):
    assert wsd(steps, warmup_share=0.0, decay_share=0.01) == [1.0] * steps


def test_more_steps_leave_those_before_the_decay_as_they_were():
    assert wsd(200, warmup_share=0.0, decay_share=0.1)[:90] == wsd(100, warmup_share=0.0)[:80] + [1.0] * 10


def test_a_warm_up_that_runs_into_the_decay_is_refused():
    with pytest.raises(ValueError, match=r"warmup_share 0.3 \+ decay_share 0.8 is more than 1"):
        wsd(warmup_share=0.3, decay_share=0.8)


def test_a_constant_rate_stays_and_no_warm_up_starts_at_the_peak():
    optimizer = Optimizer(learning_rate=0.5, schedule="constant", warmup_share=0.0)
    assert {learning_rate_at(step, 10, optimizer) for step in range(10)} == {0.5}
