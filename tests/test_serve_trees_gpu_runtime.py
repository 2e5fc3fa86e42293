"""The runtime of a GPU in a CPU's engine (gpu_runtime_on_cpu.py): the same text, and the same caches.

Small, because Triton's interpreter takes seconds a step.
"""

import pytest
from oracle_runs import NUM_REQUESTS, Ran, run_oracle
from test_serve_trees import hold_equal_states, hold_right_paths, num_off_spine

pytestmark = pytest.mark.engine

LENGTHS = {"dense": 16, "hybrid": 6}


@pytest.fixture(scope="module", params=LENGTHS)
def ran(request, tmp_path_factory) -> Ran:
    return run_oracle(request.param, tmp_path_factory.mktemp(request.param), LENGTHS[request.param], serve={})


def test_greedy_text_is_the_targets_own(ran):
    assert ran.told.texts == ran.answers


def test_what_is_accepted_is_the_right_path_often_off_the_spine(ran):
    hold_right_paths(ran.told, ran.texts)
    assert num_off_spine(ran.told) > len(ran.told.verified) / 3


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_caches_are_those_of_a_prefill_of_the_committed_tokens(ran, part):
    hold_equal_states(ran.told, part, NUM_REQUESTS)


def test_a_prompt_was_computed_beside_trees(ran):
    assert ran.told.num_mixed_steps > 0
