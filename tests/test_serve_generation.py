"""Capture while drafts are verified: the states are those of a prefill, side branches and all."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_probe import TAPS, TARGET, WAYS

from data.check_taps import HookedTarget

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="fp32, which FlashAttention does not know"),
]

TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("generation") / "told.pt"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("generation_probe.py")), str(out)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="module")
def target() -> HookedTarget:
    return HookedTarget(TARGET, TAPS)


@pytest.mark.parametrize("way", WAYS)
def test_captured_states_are_the_transformers_models_at_every_tap_and_position(told, target, way):
    for prompt, answer in zip(told["prompts"], told[way], strict=True):
        text = torch.tensor([*prompt, *answer.token_ids])
        expected = target.compute_taps(text)[:-1]
        assert answer.hidden.shape == expected.shape
        torch.testing.assert_close(answer.hidden.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_state_of_another_row_would_show(told, target):
    prompt, answer = told["prompts"][0], told["greedy"][0]
    expected = target.compute_taps(torch.tensor([*prompt, *answer.token_ids]))
    shifted = (answer.hidden[:-1] - expected[1:-1]).abs().amax()
    assert shifted > 100 * TOLERANCE


def test_trees_give_the_text_of_chains_in_fewer_steps(told):
    assert [answer.token_ids for answer in told["greedy"]] == [answer.token_ids for answer in told["chain"]]
    trees, chains = (sum(len(answer.chunks) for answer in told[way]) for way in ("greedy", "chain"))
    assert trees < chains < sum(len(answer.token_ids) for answer in told["chain"]) / 2


def test_chunks_are_the_text_in_steps(told):
    for way in WAYS:
        for answer in told[way]:
            assert answer.chunks[0] == 1
            assert sum(answer.chunks) == len(answer.token_ids)


def test_a_drafter_that_does_not_fit_is_refused_and_another_may_come(told):
    assert "target_layer_ids is [2, 4, 6], the engine was started for [1, 3, 5, 6]" in told["refusal"]
    assert [answer.token_ids for answer in told["after"]] == [answer.token_ids for answer in told["greedy"]]
    assert [answer.chunks for answer in told["after"]] == [answer.chunks for answer in told["greedy"]]
