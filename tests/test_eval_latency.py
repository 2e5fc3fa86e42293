"""eval/latency.py: what a client waited for, by the definitions of `vllm bench serve`."""

import pytest

from eval.latency import find_latency
from serve.client import Completion


def completion(chunks, arrivals):
    count = sum(chunks)
    return Completion(
        (1,), tuple(range(count)), tuple(chunks), tuple(arrivals), "", "stop", None, arrivals[-1]
    )


LONG = completion([1, 4, 1, 5], [0.5, 0.75, 1.0, 2.0])
SHORT = completion([1, 2], [0.25, 0.375])
ENDED = completion([1], [0.125])  # with the prefill's token


def test_each_time_is_measured_as_it_is_defined():
    found = find_latency([LONG], steps=3)
    assert found.first_token.p50 == found.first_token.p99 == 500
    assert found.between_chunks.p50 == 250  # of 250, 250 and 1000
    assert found.between_chunks.p99 == pytest.approx(985)
    assert found.per_token.p50 == pytest.approx(1500 / 10)
    assert found.step_ms == 500


def test_gaps_are_pooled_and_the_other_times_are_one_a_request():
    found = find_latency([LONG, SHORT], steps=4)
    assert found.between_chunks.p50 == 250  # of 125, 250, 250 and 1000
    assert found.first_token.p50 == 375
    assert found.per_token.p50 == pytest.approx((150 + 62.5) / 2)
    assert found.step_ms == pytest.approx((1500 + 125) / 4)


def test_an_answer_of_one_token_has_a_first_token_alone():
    found = find_latency([SHORT, ENDED], steps=1)
    assert found.first_token.p50 == pytest.approx((250 + 125) / 2)
    assert (found.between_chunks.p99, found.step_ms) == (125, 125)
    assert find_latency([ENDED], steps=1) is None


def test_merged_chunks_leave_the_time_of_a_step_and_of_a_token_as_they_are():
    merged = completion([1, 5, 5], [0.5, 1.0, 2.0])
    found, whole = find_latency([merged], steps=3), find_latency([LONG], steps=3)
    assert (found.step_ms, found.per_token) == (whole.step_ms, whole.per_token)
    assert found.between_chunks.p50 > whole.between_chunks.p50
