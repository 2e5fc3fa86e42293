"""What draft trees must not change: the text, the log-probabilities and the caches, in fp32 on a CPU.

The texts that trees are held against are the target's own: plain decoding's in vLLM for the dense target,
transformers' for the hybrid one, whose stock layers know no fp32 on a CPU.  Each engine answers several
rounds of five requests in four slots (tests/tree_probe.py), since a start costs more than a round.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tree_probe import run_engines
from tree_rounds import Control, Round, Spec, Told, Verified
from tree_targets import NUM_SLOTS, Case, greedy_texts, write_dense_case, write_hybrid_case

from serve.tree import ROOT

pytestmark = pytest.mark.engine

MAX_TOKENS = 48
FURTHER_TOKENS = 16
SPOILT_TOKENS = 16  # by then a text has gone another way
MODEL_LENGTH = 96
TEXT_TOKENS = MODEL_LENGTH  # beyond MAX_TOKENS: the last trees reach past what was asked for
BUDGETS = [1, 7, 15, 63]
SAMPLED = [
    {"temperature": 0.8, "seed": 11 + request, "logprobs": 2, "top_k": top_k, "top_p": top_p}
    for request, (top_k, top_p) in enumerate([(0, 1.0), (20, 1.0), (0, 0.9), (40, 0.95), (0, 1.0)])
]
PENALISED = (1, 3)
PENALTIES = [{"repetition_penalty": 1.3} if request in PENALISED else {} for request in range(5)]
TEXT_CHANGING: list[Control] = ["no compaction", "no depth positions", "no tree mask"]
TOLERANCE = 1e-4
SHORT_PROMPTS = [[17], [204], [91]]
SHORT_TOKENS = 24


@dataclass(frozen=True)
class Ran:
    """The engines of one target."""

    prompts: list[list[int]]
    plain: dict[str, Told]
    """What plain decoding answers in each kind of round, TEXT_TOKENS long."""
    engines: dict[str, dict[str, Told]]

    def texts(self, kind: str = "greedy") -> list[list[int]]:
        """Prompts and answers."""
        return [[*prompt, *text] for prompt, text in zip(self.prompts, self.plain[kind].texts, strict=True)]

    def answers(self, kind: str = "greedy") -> list[list[int]]:
        return [text[:MAX_TOKENS] for text in self.plain[kind].texts]

    @property
    def stops(self) -> list[int]:
        """A token in the middle of each text."""
        return [text[20 + request] for request, text in enumerate(self.answers())]


def oracle_round(case: Case, texts: list[list[int]], **settings: Any) -> Round:
    usual = {"prompts": case.prompts, "max_tokens": MAX_TOKENS, "texts": texts, "drafts": "oracle"}
    return Round(**usual | settings)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Ran:
    folder = tmp_path_factory.mktemp("dense")
    case = write_dense_case(folder)
    plain = run_engines({"plain": Spec(case.target, case.ckpt, 0, plain_rounds(case))}, folder)["plain"]
    ran = Ran(case.prompts, plain, {})
    return Ran(case.prompts, plain, run_engines(dense_engines(case, ran), folder))


def plain_rounds(case: Case) -> dict[str, Round]:
    return {
        "greedy": Round(case.prompts, TEXT_TOKENS),
        "sampled": Round(case.prompts, TEXT_TOKENS, sampling=SAMPLED),
        "penalised": Round(case.prompts, TEXT_TOKENS, sampling=PENALTIES),
    }


def dense_engines(case: Case, plain: Ran) -> dict[str, Spec]:
    greedy = oracle_round(case, plain.texts())
    chain = oracle_round(case, plain.texts(), drafts="lifted", is_chain_only=True)
    to_the_end = [{"max_tokens": MODEL_LENGTH - len(prompt)} for prompt in case.prompts]
    ending = oracle_round(case, plain.texts(), sampling=to_the_end)
    # a cache too small for four requests; no room for a prompt beside three trees; for a whole fourth tree
    few_blocks = {"block_size": 16, "num_gpu_blocks_override": 30}
    chunks = {"max_num_batched_tokens": 64}
    cuts = {"max_num_batched_tokens": 200, "max_model_len": MODEL_LENGTH}
    rounds = middle_rounds(case, plain) | {"chain": chain}
    return {
        "1": Spec(case.target, case.ckpt, 1, {"greedy": greedy}),
        "7": Spec(case.target, case.ckpt, 7, {"greedy": greedy}, {"max_model_len": MODEL_LENGTH}, few_blocks),
        "15": Spec(case.target, case.ckpt, 15, rounds, chunks, {"block_size": 16}),
        "63": Spec(case.target, case.ckpt, 63, {"greedy": greedy, "ending": ending}, cuts),
        "cached": Spec(
            case.target,
            case.ckpt,
            15,
            {
                "first": further_round(greedy),
                "again": replace(further_round(greedy), keeps_states="of the end"),
            },
            engine={"block_size": 16, "enable_prefix_caching": True},
        ),
        "stock": Spec(case.target, case.ckpt, None, {"chain": chain}),
    }


def further_round(asked: Round) -> Round:
    """Asks for what follows a round's answers: prompts of several cache blocks."""
    prompts = [
        text[: len(prompt) + MAX_TOKENS] for prompt, text in zip(asked.prompts, asked.texts, strict=True)
    ]
    return replace(asked, prompts=prompts, max_tokens=FURTHER_TOKENS)


def middle_rounds(case: Case, plain: Ran) -> dict[str, Round]:
    greedy = oracle_round(case, plain.texts())
    penalised = oracle_round(case, plain.texts("penalised"), sampling=PENALTIES)
    stopping = [{"stop_token_ids": [token]} for token in plain.stops]
    spoilt = replace(greedy, max_tokens=SPOILT_TOKENS)
    return {
        "greedy": replace(greedy, keeps_states="of the end"),
        "sampled": oracle_round(case, plain.texts("sampled"), sampling=SAMPLED),
        "penalised": penalised,
        "stopping": replace(greedy, sampling=stopping),
        "own": replace(greedy, drafts="lifted"),
        **{control: replace(spoilt, control=control) for control in TEXT_CHANGING},
        "no permutation of tap states": replace(
            greedy, control="no permutation of tap states", keeps_states="of the end"
        ),
        "no chain for penalties": replace(penalised, control="no chain for penalties"),
    }


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Ran:
    folder = tmp_path_factory.mktemp("hybrid")
    case = write_hybrid_case(folder)
    texts = greedy_texts(case, TEXT_TOKENS)
    plain = answers_of(case, texts)
    with_short = replace(case, prompts=[*case.prompts, *SHORT_PROMPTS])
    short_texts = [*texts, *greedy_texts(replace(case, prompts=SHORT_PROMPTS), TEXT_TOKENS)]
    greedy = oracle_round(case, texts, keeps_states="of the end")
    rounds = {
        "greedy": greedy,
        "own": replace(greedy, drafts="lifted"),
        "preempted": replace(greedy, preempted_every=5),
        "short": oracle_round(with_short, short_texts, keeps_states="of the end", max_tokens=SHORT_TOKENS),
        "no recurrent commit": oracle_round(
            case, texts, control="no recurrent commit", max_tokens=SPOILT_TOKENS
        ),
    }
    # no room for a whole fourth tree; blocks for five requests, so that states' slots are taken over
    spec = Spec(
        case.target,
        case.ckpt,
        15,
        rounds,
        {"max_num_batched_tokens": 116},
        {"num_gpu_blocks_override": 36},
    )
    plain_of = {"greedy": plain, "short": answers_of(with_short, short_texts)}
    return Ran(case.prompts, plain_of, run_engines({"15": spec}, folder))


def answers_of(case: Case, texts: list[list[int]]) -> Told:
    return Told(texts=[text[len(prompt) :] for text, prompt in zip(texts, case.prompts, strict=True)])


def right_path(verified: Verified, text: list[int]) -> list[int]:
    """The nodes that go on as the text does, as far as the tree was scheduled."""
    path, at = [], ROOT
    for token in text[verified.length :]:
        scheduled = range(min(verified.num_drafts, len(verified.parents)))
        children = [node for node in scheduled if verified.parents[node] == at]
        at = next((node for node in children if verified.tokens[node] == token), ROOT)
        if at == ROOT:
            break
        path.append(at)
    return path


def hold_right_paths(told: Told, texts: list[list[int]]) -> None:
    assert told.verified
    for verified in told.verified:
        right = [] if verified.is_placeholder else right_path(verified, texts[verified.request])
        assert verified.path == right, verified


def mean_accepted(told: Told) -> float:
    return sum(len(verified.path) for verified in told.verified) / len(told.verified)


def num_off_spine(told: Told) -> int:
    """Accepted paths that are not the first nodes in their order."""
    return sum(verified.path != list(range(len(verified.path))) for verified in told.verified)


def num_cut(told: Told) -> int:
    return sum(verified.num_drafts < len(verified.parents) for verified in told.verified)


# The text


def test_the_targets_do_not_repeat_themselves(dense, hybrid):
    assert all(len(set(text)) > 30 for text in dense.answers())
    assert all(len(set(text)) > 15 for text in hybrid.answers())


@pytest.mark.parametrize("budget", BUDGETS)
def test_greedy_text_with_trees_is_the_targets_own(dense, budget):
    assert dense.engines[f"{budget}"]["greedy"].texts == dense.answers()


def test_greedy_text_with_trees_is_a_hybrid_targets_own(hybrid):
    assert hybrid.engines["15"]["greedy"].texts == hybrid.answers()


def test_greedy_text_with_the_drafters_own_trees_is_the_targets_own(dense, hybrid):
    for ran in (dense, hybrid):
        told = ran.engines["15"]["own"]
        assert told.texts == ran.answers()
        assert num_off_spine(told) > 20


# What is accepted


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_is_accepted_is_the_right_path_of_the_tree(dense, budget):
    hold_right_paths(dense.engines[f"{budget}"]["greedy"], dense.texts())


def test_what_a_hybrid_target_accepts_is_the_right_path_of_the_tree(hybrid):
    hold_right_paths(hybrid.engines["15"]["greedy"], hybrid.texts())


@pytest.mark.parametrize(("kind", "texts"), [("sampled",) * 2, ("penalised",) * 2, ("own", "greedy")])
def test_what_is_accepted_is_the_right_path_whatever_is_asked_for(dense, kind, texts):
    hold_right_paths(dense.engines["15"][kind], dense.texts(texts))


def test_the_drafters_own_trees_are_accepted_along_the_right_path(hybrid):
    hold_right_paths(hybrid.engines["15"]["own"], hybrid.texts())


@pytest.mark.parametrize(("budget", "accepted"), [(7, 1.5), (15, 3), (63, 4)])
def test_side_branches_are_accepted(dense, budget, accepted):
    told = dense.engines[f"{budget}"]["greedy"]
    assert mean_accepted(told) > accepted
    assert num_off_spine(told) > len(told.verified) / 2


def test_a_hybrid_target_accepts_side_branches(hybrid):
    told = hybrid.engines["15"]["greedy"]
    assert mean_accepted(told) > 3
    assert num_off_spine(told) > len(told.verified) / 2


def test_prompts_were_computed_in_chunks_beside_trees_and_trees_were_cut(dense, hybrid):
    assert dense.engines["15"]["greedy"].num_mixed_steps > 1
    assert hybrid.engines["15"]["greedy"].num_mixed_steps > 1
    assert num_cut(dense.engines["63"]["greedy"]) > 5
    assert num_cut(hybrid.engines["15"]["greedy"]) > 5


# The caches


def hold_equal_states(told: Told, part: str, num_requests: int = 5) -> None:
    assert set(told.states) == set(told.fresh_states) == set(range(num_requests))
    for request, kept in told.states.items():
        fresh = told.fresh_states[request]
        assert kept.token_ids == fresh.token_ids
        found, expected = getattr(kept, part), getattr(fresh, part)
        assert min(float(tensor.abs().max()) for tensor in expected.values()) > 0.1
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_caches_are_those_of_a_prefill_of_the_committed_tokens(dense, part):
    hold_equal_states(dense.engines["15"]["greedy"], part)


@pytest.mark.parametrize("part", ["target", "drafter"])
@pytest.mark.parametrize("kind", ["greedy", "own", "preempted"])
def test_a_hybrids_caches_are_those_of_a_prefill_of_the_committed_tokens(hybrid, kind, part):
    hold_equal_states(hybrid.engines["15"][kind], part)


def test_the_caches_of_every_layer_were_compared(dense, hybrid):
    kept = {
        name: ran.engines["15"]["greedy"].states[0] for name, ran in [("dense", dense), ("hybrid", hybrid)]
    }
    assert {name: len(states.target) for name, states in kept.items()} == {"dense": 4, "hybrid": 8}
    assert {name: len(states.drafter) for name, states in kept.items()} == {"dense": 3, "hybrid": 3}


# Each part of the work is needed


def hold_other_texts(told: Told, ran: Ran) -> None:
    for text, expected in zip(told.texts, ran.answers(), strict=True):
        assert text != expected[:SPOILT_TOKENS]


@pytest.mark.parametrize("control", TEXT_CHANGING)
def test_leaving_it_out_changes_the_text(dense, control):
    hold_other_texts(dense.engines["15"][control], dense)


def test_leaving_out_the_commit_of_recurrent_states_changes_the_text(hybrid):
    hold_other_texts(hybrid.engines["15"]["no recurrent commit"], hybrid)


def test_leaving_out_the_permutation_of_tap_states_spoils_the_drafters_cache_alone(dense):
    told = dense.engines["15"]["no permutation of tap states"]
    assert told.texts == dense.answers()
    hold_equal_states(told, "target")
    with pytest.raises(AssertionError, match="not close"):
        hold_equal_states(told, "drafter")


# Sampling


def test_sampled_text_with_seeds_is_that_of_plain_decoding(dense):
    assert dense.engines["15"]["sampled"].texts == dense.answers("sampled")
    assert dense.answers("sampled") != dense.answers()


def test_logprobs_are_those_of_plain_decoding(dense):
    told, plain = dense.engines["15"]["sampled"], dense.plain["sampled"]
    for text, found, expected in zip(told.texts, told.logprobs, plain.logprobs, strict=True):
        for token, of_step, of_plain in zip(text, found, expected[:MAX_TOKENS], strict=True):
            assert token in of_step
            assert of_step == pytest.approx(of_plain, abs=5e-5)


def test_a_penalised_request_among_others_gets_plain_decodings_text(dense):
    assert dense.engines["15"]["penalised"].texts == dense.answers("penalised")
    for request, (text, greedy) in enumerate(zip(dense.answers("penalised"), dense.answers(), strict=True)):
        assert (text != greedy) == (request in PENALISED)


def test_a_penalised_request_has_chains_and_the_others_trees(dense):
    verified = dense.engines["15"]["penalised"].verified
    chain = [node - 1 for node in range(NUM_SLOTS)]
    assert all((each.parents == chain) == (each.request in PENALISED) for each in verified)


def test_a_penalised_request_needs_its_chain(dense):
    found, expected = dense.engines["15"]["no chain for penalties"].texts, dense.answers("penalised")
    differs = [request for request in range(5) if found[request] != expected[request]]
    assert differs
    assert set(differs) <= set(PENALISED)


# Scheduling


def test_preemption_changes_nothing(dense):
    told = dense.engines["7"]["greedy"]
    assert told.num_preempted > 1
    assert told.texts == dense.answers()


def test_preemption_of_a_hybrid_changes_nothing(hybrid):
    told = hybrid.engines["15"]["preempted"]
    assert told.num_preempted > 5
    assert told.texts == hybrid.answers()


def test_a_prompt_of_one_token_beside_running_requests_gets_no_former_requests_states(hybrid):
    """vLLM pads it with placeholders for drafts, of which nothing was planted in its slot."""
    told = hybrid.engines["15"]["short"]
    first = [verified for verified in told.verified if verified.length == 1]
    assert first
    assert all(verified.is_placeholder and verified.num_drafts == 15 for verified in first)
    assert told.texts == [text[:SHORT_TOKENS] for text in hybrid.plain["short"].texts]
    for part in ("target", "drafter"):
        hold_equal_states(told, part, 5 + len(SHORT_PROMPTS))


def test_cached_prefixes_change_nothing(dense):
    first, again = dense.engines["cached"]["first"], dense.engines["cached"]["again"]
    assert (first.num_cached_tokens, again.num_cached_tokens >= 64) == (0, True)
    expected = [text[MAX_TOKENS : MAX_TOKENS + FURTHER_TOKENS] for text in dense.plain["greedy"].texts]
    assert first.texts == again.texts == expected
    for part in ("target", "drafter"):
        hold_equal_states(again, part)


def test_text_may_run_to_the_models_length(dense):
    told = dense.engines["63"]["ending"]
    room = [MODEL_LENGTH - len(prompt) for prompt in dense.prompts]
    assert told.texts == [text[:most] for text, most in zip(dense.plain["greedy"].texts, room, strict=True)]
    hold_right_paths(told, dense.texts())


def test_a_stop_token_on_a_path_ends_the_text(dense):
    stopped = [text[: text.index(stop) + 1] for text, stop in zip(dense.answers(), dense.stops, strict=True)]
    assert dense.engines["15"]["stopping"].texts == stopped


# Chains


def test_trees_that_are_chains_are_vllms_own_chains(dense):
    """Step by step: how many tokens each gave, and what was drafted after it."""
    told, stock = dense.engines["15"]["chain"], dense.engines["stock"]["chain"]
    assert told.texts == stock.texts == dense.answers()
    assert told.emitted == stock.emitted
    assert max(map(max, stock.emitted.values())) > 4
    for request, drafted in stock.drafted.items():
        assert [drafts[:NUM_SLOTS] for drafts in told.drafted[request]] == drafted
