"""A look at every captured state of a shard: which sequences hold one that cannot be trusted unseen.

No verdict but on what is not finite.  A state may be zero (a text that begins with padding, whose embedding
is), and the same after different texts (a loop, seen through a window); far more often either is a fault.
Pure; called by data/shard_check.py.
Shapes: L=tokens of a sequence  P=taps  H=hidden size
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from data.check_taps import NamedSequence, name_tap
from recipes.errors import MachineError

_TOLD_APART_BY = 64
"""Values of a row, its last: those of the deepest tap, on which the most layers worked."""


def find_suspects(sequences: Sequence[NamedSequence], target_layer_ids: Sequence[int]) -> dict[int, str]:
    """Index of a sequence -> what is doubtful in it.  Raises MachineError for a state that is not finite."""
    doubts: dict[int, str] = {}
    for index, each in enumerate(sequences):
        norms_LP = _norms(each, len(target_layer_ids))
        zeros = (norms_LP == 0).nonzero().tolist()
        if zeros:
            position, tap = zeros[0]
            doubts[index] = f"position {position} is zero at the tap after {name_tap(target_layer_ids[tap])}"
    for index, doubt in _find_twins(sequences):
        doubts.setdefault(index, doubt)
    return doubts


def _norms(each: NamedSequence, num_taps: int) -> torch.Tensor:
    """[L - 1, P], finite: one pass over the states."""
    norms_LP = torch.linalg.vector_norm(each.sequence.hidden.unflatten(-1, (num_taps, -1)), dim=-1)
    infinite = (~norms_LP.isfinite()).nonzero().tolist()
    if infinite:
        raise MachineError(
            f"a captured state is not finite: sequence {each.name}, position {infinite[0][0]};"
            " this shard was not written"
        )
    return norms_LP


def _find_twins(sequences: Sequence[NamedSequence]) -> Iterator[tuple[int, str]]:
    """Sequences with a state that also stands after other text."""
    seen: dict[bytes, tuple[int, int, int]] = {}
    for index, each in enumerate(sequences):
        for position, (state, text) in enumerate(zip(_states(each), _texts(each), strict=True)):
            of_text, first, at = seen.setdefault(state, (text, index, position))
            if of_text != text:
                yield index, f"position {position} is that of {sequences[first].name}, position {at}"
                yield first, f"position {at} is that of {each.name}, position {position}"


def _states(each: NamedSequence) -> list[bytes]:
    """[L - 1]: what tells a row from others."""
    told_apart = each.sequence.hidden[:, -_TOLD_APART_BY:].contiguous()
    return [row.tobytes() for row in told_apart.view(torch.uint8).numpy()]


def _texts(each: NamedSequence) -> list[int]:
    """[L - 1]: hashes of the tokens up to and with a row's."""
    tokens = each.sequence.token_ids[:-1].tolist()
    return list(accumulate(tokens, lambda text, token: hash((text, token)), initial=0))[1:]
