"""The runtime of a GPU in a CPU's engine (gpu_runtime_on_cpu.py): the same text, and the same caches.

Small, because Triton's interpreter takes seconds a step.
"""

from dataclasses import dataclass

import pytest
from test_serve_trees import hold_equal_states, hold_right_paths, num_off_spine
from tree_probe import run_engines
from tree_rounds import Round, Spec, Told
from tree_targets import Case, greedy_texts, write_dense_case, write_hybrid_case

pytestmark = pytest.mark.engine

BUDGET = 7
# a prompt is computed in chunks, beside the trees of the requests before it
SERVE = {"max_num_batched_tokens": 64, "max_num_seqs": 3}
NUM_REQUESTS = 3
LENGTHS = {"dense": 16, "hybrid": 6}


@dataclass(frozen=True)
class Ran:
    texts: list[list[int]]
    """Prompts with the target's own continuation, longer than the answers."""
    answers: list[list[int]]
    """The target's own, as long as was asked for."""
    told: Told


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def ran(request, tmp_path_factory) -> Ran:
    folder = tmp_path_factory.mktemp(request.param)
    full = write_dense_case(folder) if request.param == "dense" else write_hybrid_case(folder)
    case, length = Case(full.target, full.ckpt, full.prompts[:NUM_REQUESTS]), LENGTHS[request.param]
    texts = greedy_texts(case, length + 20)
    oracle = Round(case.prompts, length, texts=texts, drafts="oracle", keeps_states="of the end")
    spec = Spec(case.target, case.ckpt, BUDGET, {"oracle": oracle}, SERVE, has_gpu_runtime=True)
    told = run_engines({"gpu": spec}, folder)["gpu"]["oracle"]
    answers = [
        text[len(prompt) : len(prompt) + length] for prompt, text in zip(case.prompts, texts, strict=True)
    ]
    return Ran(texts, answers, told)


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
