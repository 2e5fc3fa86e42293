"""Engines that choose in each step how much of their trees they verify: what they choose; text stays.

In fp32 on a CPU, with costs that are made up so that the best choice is known: the embedded target and its
reference drafter by the CPU's runtime, and small models by a GPU's, whose kernels take seconds interpreted.
"""

import json
from pathlib import Path

import pytest
import torch
from drafters import EMBEDDED_TARGET
from oracle_runs import KINDS, NUM_REQUESTS, Ran, run_oracle
from test_serve_trees import hold_equal_states, hold_right_paths
from transformers import AutoTokenizer
from tree_probe import run_engines
from tree_rounds import Round, Spec, Told, Verified

from data.groups import render
from data.prompts import load_prompts

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="fp32, which FlashAttention does not know"),
]

NUM_PROMPTS, NUM_TOKENS, BUDGET, DEPTH = 8, 20, 15, 7
SERVE = {"max_num_seqs": 6, "max_num_batched_tokens": 512}
REFERENCE = EMBEDDED_TARGET.parent / "drafter"
MOST_ROWS = 24
COSTS = {
    "free": [[512, 1.0]],
    "a row is a step": [[rows, float(rows)] for rows in range(1, 200)],
    "to a cliff": [[MOST_ROWS, 1.0], [512, 1000.0]],
}
CHAIN = {"extra_args": {"draftsmith_chain": True}}
SMALL_ROWS, SMALL_TOKENS = 11, 5
SMALL_COSTS = [[1, 1.0], [SMALL_ROWS, 1e3], [512, 1e9]]
"""One request alone is best off without drafts; more of them share those that stay below the cliff."""


def write_costs(folder: Path, name: str, verify: list[list[float]]) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"draft": [[64, 0.5]], "verify": verify}))
    return path


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str | None, Told]:
    """By costs; None: trees are verified whole.  One request wants a chain."""
    folder = tmp_path_factory.mktemp("budgets")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    prompts = [each.token_ids for each in render(load_prompts("stdlib:heldout", NUM_PROMPTS), tokenizer)]
    given = {"text": Round(prompts, NUM_TOKENS, sampling=[{}, CHAIN, *[{}] * (NUM_PROMPTS - 2)])}
    models = str(EMBEDDED_TARGET), str(REFERENCE), BUDGET
    specs = {"whole": Spec(*models, given, SERVE)}
    for name, verify in COSTS.items():
        serve = SERVE | {"step_costs": write_costs(folder, name, verify)}
        specs[name] = Spec(*models, given, serve, adapts=True)
    done = run_engines(specs, folder)
    return {None: done["whole"]["text"]} | {name: done[name]["text"] for name in COSTS}


@pytest.mark.parametrize("costs", COSTS)
def test_text_is_that_of_whole_trees(costs, told):
    assert told[costs].texts == told[None].texts


def test_free_rows_are_all_verified(told):
    """But those past the end of a chain, which hold nothing."""
    left_out = [offered - chosen for _, offered, chosen in told["free"].chosen]
    assert set(left_out) == {0, BUDGET - DEPTH}


def test_a_step_stays_below_a_cliff(told):
    steps = [step for step in told["to a cliff"].chosen if step[0] < MOST_ROWS]  # or it is beyond it anyway
    assert all(others + chosen <= MOST_ROWS for others, _, chosen in steps)
    assert sum(others + chosen == MOST_ROWS for others, _, chosen in steps) > len(steps) / 3
    assert any(offered > chosen for _, offered, chosen in steps)


def test_rows_that_cost_what_a_step_does_are_hardly_taken(told):
    steps = told["a row is a step"].chosen
    offered, chosen = (sum(step[place] for step in steps) for place in (1, 2))
    assert any(chosen == 0 for _, _, chosen in steps), "a step without drafts, which stock code samples"
    assert 0 < chosen < 0.2 * offered


def test_the_likeliest_nodes_of_all_requests_are_taken(told):
    """Not as many of each: what is taken is accepted more often than what whole trees hold."""
    cut, whole = (
        [each for each in told[costs].verified if not each.is_placeholder] for costs in ("to a cliff", None)
    )
    assert len({each.num_drafts for each in cut}) > 3
    assert share_accepted(cut) > 1.5 * share_accepted(whole)


def share_accepted(verified: list[Verified]) -> float:
    return sum(len(each.path) for each in verified) / sum(each.num_drafts for each in verified)


@pytest.fixture(scope="module", params=KINDS)
def ran(request, tmp_path_factory) -> Ran:
    """A GPU's runtime.  An oracle's trees are planted; the drafter says how much of them is verified."""
    folder = tmp_path_factory.mktemp(request.param)
    serve = {"step_costs": write_costs(folder, "small", SMALL_COSTS)}
    return run_oracle(request.param, folder, SMALL_TOKENS, serve=serve, adapts=True)


def test_greedy_text_is_the_targets_own_on_a_gpus_runtime(ran):
    assert ran.told.texts == ran.answers


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_caches_are_those_of_a_prefill_of_the_committed_tokens(part, ran):
    hold_equal_states(ran.told, part, NUM_REQUESTS)


def test_a_gpus_runtime_verifies_some_of_its_trees_and_accepts_from_them(ran):
    hold_right_paths(ran.told, ran.texts)
    assert any(0 < chosen < offered for _, offered, chosen in ran.told.chosen)
    assert sum(len(each.path) for each in ran.told.verified) > 0


def test_steps_without_any_draft_were_among_them(ran):
    alone = [chosen for others, _, chosen in ran.told.chosen if others == 1]
    assert alone == [0] * len(alone) != []
