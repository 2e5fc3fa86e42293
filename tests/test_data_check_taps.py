"""data/check_taps.py: right states pass; a tap off by one, a row off by one or a zero row does not."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from data.check_taps import NamedSequence, check_taps
from data.hooked_target import HookedTarget
from data.shards import Sequence
from recipes.errors import MachineError
from recipes.schema import Target
from tests.drafters import EMBEDDED_TARGET

LAYERS = [1, 3, 5]
HIDDEN = 256
TARGET = Target(model=str(EMBEDDED_TARGET))


@pytest.fixture(scope="module")
def reference() -> HookedTarget:
    return HookedTarget(TARGET, LAYERS)


@pytest.fixture(scope="module")
def right(reference: HookedTarget) -> NamedSequence:
    """Text whose states are the reference's own."""
    token_ids = torch.randint(300, 4000, (23,), generator=torch.Generator().manual_seed(0)).int()
    hidden = reference.compute_taps(token_ids)[:-1]
    return NamedSequence("p7", Sequence(token_ids, torch.ones(23, dtype=torch.bool), hidden))


def with_hidden(named: NamedSequence, hidden: torch.Tensor) -> NamedSequence:
    return NamedSequence(named.name, replace(named.sequence, hidden=hidden))


def check(named: NamedSequence, expected: torch.Tensor) -> dict[int, float]:
    return check_taps([named], [expected], "the reference's", LAYERS, 0.999)


def test_the_hooks_see_the_layers_outputs(right):
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.bfloat16)
    with torch.inference_mode():
        states = model(right.sequence.token_ids.long()[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1][0, :-1] for layer in LAYERS], dim=-1)
    assert torch.equal(right.sequence.hidden, expected)


def test_right_states_pass_and_their_cosines_are_told(right):
    least = check(right, right.sequence.hidden)
    assert list(least) == LAYERS
    assert min(least.values()) > 0.99999


@pytest.mark.parametrize("shift", [1, -1])
def test_taps_of_a_neighbouring_layer_fail(right, shift):
    shifted = HookedTarget(TARGET, [LAYERS[0], LAYERS[1] + shift, LAYERS[2]])
    wrong = with_hidden(right, shifted.compute_taps(right.sequence.token_ids)[:-1])
    with pytest.raises(
        MachineError, match=r"not the reference's: .* after layer 3, sequence p7, position \d+"
    ):
        check(wrong, right.sequence.hidden)


@pytest.mark.parametrize("shift", [1, -1])
def test_rows_shifted_by_one_fail(right, shift):
    states = right.sequence.hidden
    with pytest.raises(MachineError, match="after layer 1, sequence p7"):
        check(with_hidden(right, states.roll(shift, dims=0)), states)


def test_swapped_taps_fail(right):
    states = right.sequence.hidden
    swapped = states.unflatten(-1, (3, HIDDEN))[:, [1, 0, 2]].flatten(1)
    with pytest.raises(MachineError, match="after layer 1"):
        check(with_hidden(right, swapped), states)


def test_one_zero_row_of_one_tap_fails_and_is_named(right):
    hidden = right.sequence.hidden.clone()
    hidden[17, 2 * HIDDEN :] = 0
    with pytest.raises(
        MachineError, match=r"cosine 0\.000000 at the tap after layer 5, sequence p7, position 17"
    ):
        check(with_hidden(right, hidden), right.sequence.hidden)


def test_a_row_that_is_zero_in_both_passes(right):
    hidden = right.sequence.hidden.clone()
    hidden[:2] = 0
    assert min(check(with_hidden(right, hidden), hidden).values()) > 0.99999


def test_states_of_the_last_token_are_one_row_too_many(right, reference):
    with pytest.raises(AssertionError, match="p7"):
        check(right, reference.compute_taps(right.sequence.token_ids))
