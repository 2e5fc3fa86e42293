"""data/suspects.py: zero states and those of other text are found, wherever they stand, and no right ones."""

import pytest
import torch

from data.check_taps import NamedSequence
from data.shards import Sequence
from data.suspects import find_suspects
from recipes.errors import MachineError

LAYERS, HIDDEN = [2, 4], 48


def states_of(tokens: list[int]) -> torch.Tensor:
    """[tokens - 1, taps x HIDDEN]: each row depends on all tokens up to its own, and on nothing else."""
    rows = []
    for end in range(1, len(tokens)):
        generator = torch.Generator().manual_seed(hash(tuple(tokens[:end])) % 2**31)
        rows.append(torch.randn(len(LAYERS) * HIDDEN, generator=generator))
    return torch.stack(rows).bfloat16()


def name(*texts: list[int]) -> list[NamedSequence]:
    return [
        NamedSequence(
            f"p{number}", Sequence(torch.tensor(text).int(), torch.ones(len(text)), states_of(text))
        )
        for number, text in enumerate(texts)
    ]


def test_right_states_are_not_suspected_though_texts_begin_alike_or_are_the_same():
    assert find_suspects(name([1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 4, 5], [1, 2]), LAYERS) == {}


@pytest.mark.parametrize("tap", [0, 1])
@pytest.mark.parametrize("position", [0, 2, 3])
def test_a_row_that_is_zero_in_one_tap_is_found(tap, position):
    sequences = name([1, 2, 3], [4, 5, 6, 7, 8])
    sequences[1].sequence.hidden[position, tap * HIDDEN : (tap + 1) * HIDDEN] = 0
    assert find_suspects(sequences, LAYERS) == {
        1: f"position {position} is zero at the tap after layer {LAYERS[tap]}"
    }


def test_a_row_of_another_text_is_found_in_both():
    sequences = name([1, 2, 3], [4, 5, 6, 7, 8], [6, 7])
    sequences[1].sequence.hidden[3] = sequences[0].sequence.hidden[1]
    assert find_suspects(sequences, LAYERS) == {
        0: "position 1 is that of p1, position 3",
        1: "position 3 is that of p0, position 1",
    }


def test_a_row_that_stands_twice_in_a_text_is_found():
    sequences = name([1, 2, 3], [4, 5, 6, 7, 8])
    sequences[1].sequence.hidden[2:] = sequences[1].sequence.hidden[1].clone()
    assert list(find_suspects(sequences, LAYERS)) == [1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_state_that_is_not_finite_fails_and_is_named(value):
    sequences = name([1, 2, 3], [4, 5, 6, 7, 8])
    sequences[1].sequence.hidden[3, 9] = value
    with pytest.raises(
        MachineError, match=r"not finite: sequence p1, position 3; this shard was not written"
    ):
        find_suspects(sequences, LAYERS)


def test_large_states_are_finite():
    sequences = name([1, 2, 3])
    sequences[0].sequence.hidden[1, 5] = 1e6
    assert find_suspects(sequences, LAYERS) == {}
