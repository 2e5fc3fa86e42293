"""What draft trees must not change on a GPU, CUDA graphs and all: the text and the caches.

The targets and the oracle are those of tests/test_serve_trees.py, but FlashAttention knows no fp32: text may
part from plain decoding's at near-ties, and caches are a fresh prefill's up to rounding.  What the controls
break is far beyond it.  The dense target is random and has near-ties everywhere in bf16: it runs in fp16.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from test_serve_trees import SHORT_PROMPTS, SHORT_TOKENS, mean_accepted, num_cut, num_off_spine, right_path
from test_serve_trees_bf16 import GRAPHS, gaps
from tree_probe import run_engines
from tree_rounds import Control, Round, Spec, Told, Verified
from tree_targets import Case, write_dense_case, write_hybrid_case

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

NUM_LONG, MAX_TOKENS, TEXT_TOKENS, SPOILT_TOKENS = 5, 48, 80, 16
DTYPE = {"dense": "float16", "hybrid": "bfloat16"}
NEAR_TIE = {"dense": 0.01, "hybrid": 0.25}  # nats
ROUNDING = {"dense": 0.01, "hybrid": 0.06}  # of a layer's cache as a whole
CONTROLS: dict[str, list[Control]] = {
    "dense": ["no compaction", "no depth positions", "no tree mask"],
    "hybrid": ["no compaction", "no depth positions", "no tree mask", "no recurrent commit"],
}
NO_TAPS: Control = "no permutation of tap states"
ENGINES = ["graphs", "eager", "63"]
LOGPROBS = {"logprobs": 2}


@dataclass(frozen=True)
class Ran:
    kind: str
    prompts: list[list[int]]
    plain: Told
    engines: dict[str, dict[str, Told]]

    def on_the_way(self, told: Told) -> list[Verified]:
        """Verifications before a text parted from plain decoding's, after which the oracle knows nothing."""
        texts = [[*prompt, *text] for prompt, text in zip(self.prompts, self.plain.texts, strict=True)]
        own = [[*prompt, *text] for prompt, text in zip(self.prompts, told.texts, strict=False)]
        return [
            each
            for each in told.verified
            if own[each.request][: each.length] == texts[each.request][: each.length]
        ]

    def gaps(self, told: Told, num_tokens: int = MAX_TOKENS) -> list[float]:
        """Of plain decoding's first two tokens, where texts part from it."""
        texts = [text[:num_tokens] for text in self.plain.texts[: len(told.texts)]]
        logprobs = self.plain.logprobs[: len(told.texts)]
        return gaps(replace(self.plain, texts=texts, logprobs=logprobs), told)


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def ran(request, tmp_path_factory) -> Ran:
    folder = tmp_path_factory.mktemp(request.param)
    case = write_dense_case(folder) if request.param == "dense" else write_hybrid_case(folder)
    prompts = [*case.prompts, *SHORT_PROMPTS]
    plain = {"text": Round(prompts, TEXT_TOKENS, sampling=[LOGPROBS] * len(prompts))}
    of_kind = {"dtype": DTYPE[request.param]}
    specs = {"plain": Spec(case.target, case.ckpt, 0, plain, engine=GRAPHS | of_kind)}
    told = run_engines(specs, folder)["plain"]["text"]
    ran = run_engines(engines(replace(case, prompts=prompts), told, request.param), folder)
    return Ran(request.param, prompts, told, ran)


def engines(case: Case, plain: Told, kind: str) -> dict[str, Spec]:
    texts = [[*prompt, *text] for prompt, text in zip(case.prompts, plain.texts, strict=True)]
    longer = {"texts": texts, "drafts": "oracle", "keeps_states": "of the end"}
    greedy = Round(case.prompts[:NUM_LONG], MAX_TOKENS, **longer)
    spoilt = replace(greedy, max_tokens=SPOILT_TOKENS)
    rounds = {
        "greedy": greedy,
        "preempted": replace(greedy, preempted_every=5),
        "short": Round(case.prompts, SHORT_TOKENS, **longer),
        NO_TAPS: replace(greedy, control=NO_TAPS),
        **{control: replace(spoilt, control=control) for control in CONTROLS[kind]},
    }
    # no room for a whole fourth tree of 15, of 63
    chunks, cuts = {"max_num_batched_tokens": 116}, {"max_num_batched_tokens": 200}
    eager = {"greedy": greedy, "own": replace(greedy, drafts="lifted")}

    def spec(budget: int, rounds: dict[str, Round], serve: dict[str, int], *, graphs: bool) -> Spec:
        settings = serve | {"enforce_eager": not graphs, "kv_cache_gib": 1}
        arguments = {"dtype": DTYPE[kind]} | (GRAPHS if graphs else {})
        return Spec(case.target, case.ckpt, budget, rounds, settings, arguments)

    return {
        "graphs": spec(15, rounds, chunks, graphs=True),
        "eager": spec(15, eager, chunks, graphs=False),
        "63": spec(63, {"greedy": greedy}, cuts, graphs=True),
    }


def worst_of(told: Told, part: str) -> float:
    """How far, as a share of its size, the worst layer's cache of any request is from a fresh prefill's."""
    assert set(told.states) == set(told.fresh_states) == set(range(len(told.texts)))
    worst = 0.0
    for request, kept in told.states.items():
        fresh = told.fresh_states[request]
        assert kept.token_ids == fresh.token_ids
        found, expected = getattr(kept, part), getattr(fresh, part)
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert found[name].shape == tensor.shape
            difference = (found[name].float() - tensor.float()).norm() / tensor.float().norm()
            worst = max(worst, float(difference))
    return worst


def rounds_of(told: dict[str, Told]) -> dict[str, Told]:
    """Those in which nothing is broken."""
    return {name: told[name] for name in ("greedy", "own", "preempted", "short") if name in told}


@pytest.mark.parametrize("engine", ENGINES)
def test_text_parts_from_plain_decodings_at_near_ties_alone(ran, engine):
    for name, told in rounds_of(ran.engines[engine]).items():
        found = ran.gaps(told)
        print(f"{ran.kind}, {engine}, {name}: {len(found)} of {len(told.texts)} part, gaps {sorted(found)}")
        assert max(found, default=0) <= NEAR_TIE[ran.kind]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_accepted_is_the_path_of_the_text(ran, engine):
    for told in rounds_of(ran.engines[engine]).values():
        texts = [[*prompt, *text] for prompt, text in zip(ran.prompts, told.texts, strict=False)]
        assert len(told.verified) > 20
        for verified in told.verified:
            right = [] if verified.is_placeholder else right_path(verified, texts[verified.request])
            assert verified.path[: len(right)] == right, verified
            beyond = verified.length + len(verified.path) + 1 - len(texts[verified.request])
            assert verified.path == right or beyond > 0, verified  # the text was cut within the path


@pytest.mark.parametrize("engine", ENGINES)
def test_side_branches_are_accepted(ran, engine):
    told = ran.engines[engine]["greedy"]
    known = Told(verified=ran.on_the_way(told))
    print(f"{ran.kind}, {engine}: {mean_accepted(known):.2f} accepted in {len(known.verified)} verifications")
    assert mean_accepted(known) > 2
    assert num_off_spine(known) > len(known.verified) / 3


def test_prompts_were_computed_in_chunks_beside_trees_and_trees_were_cut(ran):
    assert ran.engines["graphs"]["greedy"].num_mixed_steps > 1
    assert num_cut(ran.engines["63"]["greedy"]) > 5


@pytest.mark.parametrize("part", ["target", "drafter"])
@pytest.mark.parametrize("engine", ENGINES)
def test_caches_are_those_of_a_prefill_of_the_committed_tokens(ran, engine, part):
    for name, told in rounds_of(ran.engines[engine]).items():
        worst = worst_of(told, part)
        print(f"{ran.kind}, {engine}, {name}: the {part}'s caches are off by {worst:.4f}")
        assert worst < ROUNDING[ran.kind]


def test_leaving_out_the_permutation_of_tap_states_spoils_the_drafters_cache_alone(ran):
    told = ran.engines["graphs"][NO_TAPS]
    of_drafter = worst_of(told, "drafter")
    print(f"{ran.kind}: without the permutation the drafter's caches are off by {of_drafter:.4f}")
    assert worst_of(told, "target") < ROUNDING[ran.kind]
    assert of_drafter > 5 * ROUNDING[ran.kind]


def test_leaving_a_part_out_spoils_the_caches_and_changes_the_text(ran):
    unbroken = worst_of(ran.engines["graphs"]["greedy"], "target")
    for control in CONTROLS[ran.kind]:
        told = ran.engines["graphs"][control]
        found, worst = ran.gaps(told, SPOILT_TOKENS), worst_of(told, "target")
        print(f"{ran.kind}, {control}: the target's caches are off by {worst:.4f}, gaps {sorted(found)}")
        assert worst > 5 * unbroken
        assert found


def test_prompts_of_one_token_were_computed_with_placeholders_for_drafts(ran):
    """Their text and caches are among those above."""
    first = [each for each in ran.engines["graphs"]["short"].verified if each.length == 1]
    assert first
    assert all(each.is_placeholder for each in first)


def test_preemption_took_place(ran):
    assert ran.engines["graphs"]["preempted"].num_preempted > 5
