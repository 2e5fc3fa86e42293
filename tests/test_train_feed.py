"""The order of the data, the anchors and the learning rate are functions of the step."""

import math
import threading
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from small_training import DRAFTER, make_sequence

from recipes.errors import UserError
from recipes.schema import Optimizer, Train
from train.feed import Feed, read_ahead, visit_at
from train.schedule import learning_rate_at

SEQUENCES = [make_sequence(index) for index in range(7)]


def feed(rank: int = 0, world_size: int = 1, sequences: Sequence = SEQUENCES, **changes) -> Feed:
    train = Train(steps=9, sequences_per_step=4, num_anchors=3, **({"micro_batch_sequences": 1} | changes))
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


def test_a_constant_rate_stays_and_no_warm_up_starts_at_the_peak():
    optimizer = Optimizer(learning_rate=0.5, schedule="constant", warmup_share=0.0)
    assert {learning_rate_at(step, 10, optimizer) for step in range(10)} == {0.5}
