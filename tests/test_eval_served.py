"""One pass of prompts through a served engine, against a stub whose answers are known."""

import itertools
import random

import pytest
from stub_engine import Answer, Stub, serve_stub, tokens_in_chunks

from data.prompts import Prompt
from eval.served import identify_server, run_pass, run_reference, run_tree_pass, warm_up
from recipes.errors import UserError
from recipes.schema import Eval

K = 7


def prompts(count):
    return [Prompt(id=f"p{i}", messages=({"role": "user", "content": f"prompt {i}"},)) for i in range(count)]


def settings(**changes):
    return Eval(suite="none", concurrency=4, max_tokens=64, **changes)


def pass_over(stub, count=None, temperature=0.0, **changes):
    with serve_stub(stub) as url:
        asked = prompts(count or len(stub.answers))
        return run_pass(url, asked, settings(**changes), temperature, on_done=lambda: None)


def tree_pass_over(answers, num_nodes):
    with serve_stub(Stub(answers, num_nodes)) as url:
        return run_tree_pass(url, prompts(len(answers)), settings(), K, 0.0, on_done=lambda: None)


def answer(*sizes, **changes):
    return Answer(tokens_in_chunks([1, *sizes]), **changes)


def oracle_answer(p, num_steps, generator):
    """Each draft is right with probability p, whatever the others; a step accepts the run of right ones."""
    draws = ([generator.random() < p for _ in range(K)] for _ in range(num_steps))
    return answer(*(1 + sum(itertools.takewhile(bool, drafts)) for drafts in draws))


def theory(p):
    """Mean and standard deviation of one step's committed tokens: E = 1 + sum of p^k over k = 1..K."""
    at_least = [p**k for k in range(1, K + 1)]
    mean = sum(at_least)
    second = sum((2 * k - 1) * share for k, share in enumerate(at_least, start=1))
    return 1 + mean, (second - mean**2) ** 0.5


@pytest.mark.parametrize("p", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_an_oracle_drafter_accepts_what_theory_says(p):
    generator = random.Random(0)
    found = pass_over(Stub([oracle_answer(p, 40, generator) for _ in range(30)], K)).decoding
    mean, deviation = theory(p)
    assert found.acceptance_length == pytest.approx(mean, abs=3.3 * deviation / found.steps**0.5)
    for k, share in enumerate(found.accepted_by_depth, start=1):
        spread = (p**k * (1 - p**k) / found.steps) ** 0.5
        assert share == pytest.approx(p**k, abs=4 * spread)


def test_a_stated_error_covers_the_truth_as_often_as_it_should():
    """About 95 of 100 measurements lie within two standard errors of theory."""
    generator = random.Random(1)
    mean, _ = theory(0.6)
    stubs = [Stub([oracle_answer(0.6, 10, generator) for _ in range(16)], K) for _ in range(12)]
    found = [pass_over(stub).decoding for stub in stubs]
    assert sum(abs(each.acceptance_length - mean) <= 2 * each.standard_error for each in found) >= 10


def test_merged_streams_are_told_and_measured_by_the_counters():
    answers = [answer(3, 1, 8, 2), answer(1, 1, 5)]
    plainly, merged = (pass_over(Stub(answers, K, merge=merge)).decoding for merge in (1, 3))
    assert (plainly.coalesced, merged.coalesced) == (False, True)
    assert merged.acceptance_length == plainly.acceptance_length == 21 / 7
    assert merged.accepted_by_depth == plainly.accepted_by_depth
    assert merged.mean_of_request_means is None


def test_what_the_end_cut_off_is_not_committed_merged_or_not():
    answers = [answer(3, 2, num_cut=4)]
    for merge in (1, 2):
        found = pass_over(Stub(answers, K, merge=merge)).decoding
        assert (found.acceptance_length, found.committed_tokens) == (2.5, 5)


def test_what_was_counted_before_the_pass_is_left_out():
    stub = Stub([answer(2, 2), answer(8, 8)], K)
    with serve_stub(stub) as url:
        warm_up(url)
        assert stub.drafts == 2
        found = run_pass(url, prompts(2), settings(), 0.0, lambda: None).decoding
    assert not found.coalesced
    assert (found.steps, found.acceptance_length) == (4, 5.0)


def test_other_peoples_requests_are_refused():
    with pytest.raises(UserError, match="somebody else"):
        pass_over(Stub([answer(2, 2)], K, foreign_steps=5))


def test_undrafted_steps_are_reported():
    found = pass_over(Stub([answer(3, 1, 3, undrafted=frozenset({2}))], K)).decoding
    assert (found.undrafted_steps, found.coalesced, found.acceptance_length) == (1, False, 7 / 3)


def test_a_plain_engine_takes_a_step_per_token():
    found = pass_over(Stub([answer(1, 1, 1)], num_drafts=0)).decoding
    assert (found.acceptance_length, found.steps, found.accepted_by_depth) == (1.0, 3, [])


def test_a_tree_is_counted_by_depth_as_a_chain_is():
    answers = [answer(3, 1, 8, 2, num_cut=3), answer(1, 1, 5)]
    chain, tree = pass_over(Stub(answers, K)).decoding, tree_pass_over(answers, num_nodes=15).decoding
    speed = {"tokens_per_second", "latency"}
    assert tree.model_dump(exclude={"nodes_per_step", *speed}) == chain.model_dump(exclude=speed)
    assert len(tree.accepted_by_depth) == K


def test_a_step_verifies_the_nodes_that_the_engine_counted():
    """None where it had no draft."""
    assert tree_pass_over([answer(3, 2)], num_nodes=15).decoding.nodes_per_step == 15.0
    undrafted = answer(3, 1, 3, undrafted=frozenset({2}))
    assert tree_pass_over([undrafted], num_nodes=15).decoding.nodes_per_step == 10.0


def test_a_tree_of_few_nodes_has_every_depth_all_the_same():
    found = tree_pass_over([answer(3, 4)], num_nodes=3).decoding
    assert found.accepted_by_depth == [1.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert found.nodes_per_step == 3.0


def test_speed_counts_every_generated_token():
    done = pass_over(Stub([answer(2, 3), answer(1)], K))
    assert done.decoding.tokens_per_second == pytest.approx(8 / done.seconds)


def test_a_pass_is_clocked_chunk_by_chunk():
    latency = pass_over(Stub([answer(2, 3), answer(4)], K, pause_s=0.02)).decoding.latency
    assert latency.between_chunks.p50 >= 20
    assert latency.step_ms == pytest.approx(latency.between_chunks.p50, rel=0.5)
    assert 20 / 4 <= latency.per_token.p50 < latency.between_chunks.p50  # a chunk has 2 to 4 tokens


def test_log_probabilities_never_slow_a_clocked_run():
    stub = Stub([answer(2)], K)
    with serve_stub(stub) as url:
        run_pass(url, prompts(1), settings(), 0.0, lambda: None)
        (reference,) = run_reference(url, prompts(1), settings(), lambda: None)
    assert [body["logprobs"] for body in stub.requests] == [False, True]
    assert reference.top_logprobs is not None
    assert len(reference.top_logprobs) == len(reference.token_ids)


def test_each_prompt_has_a_seed_of_its_own():
    stub = Stub([answer(2)] * 3, K, seed=40)
    pass_over(stub, seed=40)
    assert sorted(body["seed"] for body in stub.requests) == [40, 41, 42]


def test_a_server_says_its_version_model_and_drafts():
    with serve_stub(Stub([answer(2)], K)) as url:
        found = identify_server(url)
    assert (found.vllm, found.model, found.num_drafts) == ("0.32.0", "stub-target", K)


def test_a_url_without_a_server_is_the_users_mistake():
    with pytest.raises(UserError, match="no server answers at http"):
        identify_server("http://127.0.0.1:9")
