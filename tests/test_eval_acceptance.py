"""The one definition of acceptance, and the share of looping text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.acceptance import (
    bootstrap_interval,
    count_acceptance,
    count_requests,
    cut_to_depth,
    repeated_ngram_share,
)
from recipes.errors import UserError
from serve.client import SpecCounters

NUM_DRAFTS = 7
request_chunks = st.lists(st.integers(1, NUM_DRAFTS + 1), max_size=12).map(lambda steps: [1, *steps])
requests_of_chunks = st.lists(request_chunks, min_size=1, max_size=6).filter(
    lambda requests: any(len(chunks) > 1 for chunks in requests)
)


def counters_of(requests, num_drafts=NUM_DRAFTS, cut=0):
    """What the engine counts for these requests; `cut`: accepted tokens beyond each response's end."""
    accepted = []
    for chunks in requests:
        accepted += [size - 1 for size in chunks[1:-1]]
        accepted += [chunks[-1] - 1 + cut] if len(chunks) > 1 else []
    per_position = tuple(sum(a >= k for a in accepted) for k in range(1, num_drafts + 1))
    return SpecCounters(len(accepted), len(accepted) * num_drafts, sum(accepted), per_position)


def merge_pairs(chunks):
    steps = chunks[1:]
    return [chunks[0], *(sum(steps[i : i + 2]) for i in range(0, len(steps), 2))]


@given(requests_of_chunks)
def test_depths_and_the_bonus_sum_to_the_acceptance_length(requests):
    found = count_acceptance(requests, counters_of(requests))
    assert found.steps + sum(found.reached) == found.committed_tokens  # in whole numbers
    assert 1 + sum(found.accepted_by_depth) == pytest.approx(found.acceptance_length, rel=1e-12)


@given(requests_of_chunks)
def test_depths_never_rise(requests):
    reached = count_acceptance(requests, counters_of(requests)).reached
    assert len(reached) == NUM_DRAFTS
    assert list(reached) == sorted(reached, reverse=True)


@given(requests_of_chunks)
def test_uncut_chunks_agree_with_the_engines_own_counters(requests):
    counters = counters_of(requests)
    found = count_acceptance(requests, counters)
    assert not found.coalesced
    assert (found.steps, found.reached) == (counters.drafts, counters.accepted_per_position)


def test_the_prefills_token_is_no_step():
    assert count_acceptance([[1, 3, 5]], counters_of([[1, 3, 5]])).acceptance_length == 4.0


def test_correlated_blocks_count_as_runs_not_as_a_product_of_marginals():
    """Half the blocks all right, half all wrong, four drafts: 3.0, where marginals would say 1.94."""
    requests = [[1, 5, 1, 5, 1], [1, 1, 5, 1, 5]]
    found = count_acceptance(requests, counters_of(requests, num_drafts=4))
    assert found.acceptance_length == 3.0
    assert found.accepted_by_depth == (0.5, 0.5, 0.5, 0.5)


def test_the_length_is_pooled_over_steps_and_the_mean_of_means_stands_beside_it():
    requests = [[1, 4, 4, 4], [1, 1]]
    found = count_acceptance(requests, counters_of(requests))
    assert found.acceptance_length == 13 / 4
    assert found.mean_of_request_means == (4 + 1) / 2


def test_the_last_step_counts_only_what_the_response_kept():
    requests = [[1, 8, 2]]
    found = count_acceptance(requests, counters_of(requests, cut=5))
    assert not found.coalesced
    assert (found.acceptance_length, found.reached) == (5.0, (2, 1, 1, 1, 1, 1, 1))


def test_a_response_of_one_token_has_no_step_and_changes_nothing():
    with_it, without = [[1, 3, 2], [1]], [[1, 3, 2]]
    assert count_acceptance(with_it, counters_of(with_it)) == count_acceptance(without, counters_of(without))


def test_merged_chunks_are_told_and_counted_by_the_engine():
    true = [[1, 2, 3, 1, 4], [1, 1, 1, 2]]
    found = count_acceptance([merge_pairs(chunks) for chunks in true], counters_of(true))
    assert found.coalesced
    assert (found.steps, found.committed_tokens, found.acceptance_length) == (7, 14, 2.0)
    assert found.reached == counters_of(true).accepted_per_position
    assert found.mean_of_request_means is None


def test_a_chunk_longer_than_a_block_is_merged_even_where_the_counts_agree():
    """A merged pair and an undrafted step hide each other from the mere number of chunks."""
    counters = SpecCounters(2, 14, 8, (2, 1, 1, 1, 1, 1, 1))
    assert count_acceptance([[1, 9, 1]], counters).coalesced


def test_a_prefill_merged_with_the_first_step_is_told_even_where_the_counts_agree():
    """In truth [1, 3, 2, 1], the last step undrafted."""
    assert count_acceptance([[4, 2, 1]], counters_of([[1, 3, 2]])).coalesced


def test_a_step_without_drafts_is_a_step_and_is_reported():
    requests = [[1, 3, 1, 3]]
    found = count_acceptance(requests, counters_of([[1, 3, 3]]))
    assert not found.coalesced
    assert (found.acceptance_length, found.undrafted_steps) == (7 / 3, 1)


def test_counters_that_hold_other_requests_are_refused():
    requests = [[1, 2, 2]]
    with pytest.raises(UserError, match="somebody else used it"):
        count_acceptance(requests, counters_of([*requests, [1, 8, 8, 8]]))


def test_responses_without_a_step_are_refused():
    with pytest.raises(UserError, match="--max-tokens"):
        count_acceptance([[1], [1]], counters_of([[1], [1]]))


def test_plain_decoding_commits_one_token_a_step_however_it_was_chunked():
    for chunks, coalesced in ([[1, 1, 1, 1]], False), ([[1, 2, 1]], True):
        found = count_acceptance(chunks, None)
        assert (found.acceptance_length, found.steps, found.reached) == (1.0, 3, ())
        assert found.coalesced is coalesced


def test_the_standard_error_is_between_requests():
    equal, unequal = [[1, 1, 5], [1, 5, 1]], [[1, 1, 1], [1, 5, 5]]
    assert count_acceptance(equal, counters_of(equal)).standard_error == 0.0
    assert count_acceptance(unequal, counters_of(unequal)).standard_error == pytest.approx(2.0)
    assert count_acceptance([[1, 2]], counters_of([[1, 2]])).standard_error is None


@given(requests_of_chunks, st.integers(NUM_DRAFTS, 63))
def test_a_trees_path_counts_as_a_chains_however_many_nodes_hang_beside_it(requests, num_nodes):
    tree = cut_to_depth(counters_of(requests, num_drafts=num_nodes), NUM_DRAFTS)
    assert count_acceptance(requests, tree) == count_acceptance(requests, counters_of(requests))


def test_a_chunk_longer_than_a_trees_path_is_merged_even_where_its_nodes_would_suffice():
    counters = SpecCounters(2, 30, 8, (2, 1, 1, 1, 1, 1, 1, *[0] * 8))
    assert count_acceptance([[1, 9, 1]], cut_to_depth(counters, NUM_DRAFTS)).coalesced
    assert not count_acceptance([[1, 9, 1]], counters).coalesced


def test_no_step_accepts_more_than_the_drafters_depth():
    with pytest.raises(AssertionError, match="beyond depth 3"):
        cut_to_depth(counters_of([[1, 5]], num_drafts=15), 3)


def test_a_tree_of_fewer_nodes_than_the_depth_keeps_its_positions():
    counters = counters_of([[1, 3]], num_drafts=3)
    assert cut_to_depth(counters, NUM_DRAFTS) == counters


@pytest.mark.parametrize(
    ("token_ids", "repeated"),
    [
        (list(range(40)), 0),
        ([5] * 8, 0),  # one 8-gram, once
        ([5] * 9, 9),  # the same 8-gram twice, one token on
        ([*range(8), 99, *range(8)], 16),
        ([*range(7), 99, *range(7)], 0),
        ([], 0),
    ],
)
def test_tokens_inside_repeated_8grams_are_counted_once_each(token_ids, repeated):
    assert repeated_ngram_share([token_ids]) == (repeated / len(token_ids) if token_ids else 0.0)


def test_an_8gram_shared_by_two_responses_is_no_repetition():
    assert repeated_ngram_share([range(20), range(20)]) == 0.0


def test_the_repeated_share_is_pooled_over_tokens():
    assert repeated_ngram_share([[5] * 9, range(100, 191)]) == 9 / 100


def draw_requests(seed, number=40):
    """Of requests that differ in length and in how well they are drafted."""
    generator = np.random.default_rng(seed)
    return [
        [1, *generator.integers(1, 2 + generator.integers(1, NUM_DRAFTS + 1), size=generator.integers(1, 30))]
        for _ in range(number)
    ]


def test_an_interval_is_as_wide_as_its_standard_error_says():
    counts = count_requests(draw_requests(seed=3))
    low, high = bootstrap_interval(counts)
    assert low < counts.length < high
    assert (high - low) / (2 * 1.96 * counts.standard_error) == pytest.approx(1, abs=0.1)


def test_an_interval_holds_the_truth_as_often_as_it_should():
    truth = count_requests(draw_requests(seed=0, number=4000)).length
    intervals = [bootstrap_interval(count_requests(draw_requests(seed))) for seed in range(1, 101)]
    assert 88 <= sum(low <= truth <= high for low, high in intervals) <= 100


def test_an_interval_is_the_same_each_time_and_leaves_out_what_took_no_step():
    requests = draw_requests(seed=5)
    interval = bootstrap_interval(count_requests(requests))
    assert bootstrap_interval(count_requests([[1], *requests])) == interval
    assert count_acceptance(requests, counters_of(requests)).interval == interval


def test_one_request_has_no_interval_and_plain_decoding_none_to_speak_of():
    one = [[1, 3, 4], [1]]
    assert count_acceptance(one, counters_of(one)).interval is None
    assert count_acceptance([[1, 1, 1]], None).interval == (1.0, 1.0)
