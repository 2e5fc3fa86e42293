"""Greedy chain against greedy plain decoding: where they part, and by how little."""

import pytest

from eval.lossless import NEAR_TIE_NATS, find_divergences
from serve.client import Completion


def completion(token_ids, top_logprobs=None):
    return Completion((1,), tuple(token_ids), (len(token_ids),), (0.5,), "", "stop", top_logprobs, 1.0)


def plain_and_chain(gap, bound=NEAR_TIE_NATS["bfloat16"]):
    """One prompt; at position 2 the chain takes 9, which the plain run liked `gap` nats less than its 7."""
    tops = ({5: 0.0}, {6: 0.0}, {7: -0.5, 9: -0.5 - gap}, {8: 0.0})
    return find_divergences([completion([5, 6, 7, 8], tops)], [completion([5, 6, 9, 4])], bound)


def test_equal_responses_do_not_diverge():
    assert find_divergences([completion([5, 6], ({}, {}))], [completion([5, 6])], 0.25) == []


def test_the_first_differing_token_is_named_with_its_gap():
    (found,) = plain_and_chain(gap=0.125)
    assert (found.prompt, found.position, found.gap, found.is_near_tie) == (0, 2, 0.125, True)


def test_a_gap_at_the_bound_is_a_near_tie_and_one_above_is_not():
    assert plain_and_chain(gap=0.25)[0].is_near_tie
    assert not plain_and_chain(gap=0.3125)[0].is_near_tie


def test_fp32_allows_no_gap_that_bf16_would():
    assert not plain_and_chain(gap=0.0625, bound=NEAR_TIE_NATS["float32"])[0].is_near_tie


def test_a_token_outside_the_top_k_is_no_near_tie():
    plain, chain = completion([5], ({5: 0.0, 6: -0.01},)), completion([7])
    (found,) = find_divergences([plain], [chain], 0.25)
    assert (found.gap, found.is_near_tie) == ("outside the top k", False)


@pytest.mark.parametrize(("plain", "chain"), [([5, 6], [5]), ([5], [5, 6])])
def test_a_response_that_merely_stops_is_no_near_tie(plain, chain):
    tops = tuple({token: 0.0} for token in plain)
    (found,) = find_divergences([completion(plain, tops)], [completion(chain)], 0.25)
    assert (found.position, found.gap, found.is_near_tie) == (1, "ended early", False)


def test_only_diverging_prompts_are_listed_by_their_index():
    tops = ({5: 0.0, 6: -0.1},)
    plain = [completion([5], tops), completion([5], tops), completion([5], tops)]
    chain = [completion([5]), completion([6]), completion([5])]
    assert [found.prompt for found in find_divergences(plain, chain, 0.25)] == [1]
