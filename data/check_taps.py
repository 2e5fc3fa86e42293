"""Whether captured tap states are those that were computed again, token by token; pure.

Who computed them again, transformers or the engine itself, is data/shard_check.py's business.
Shapes: L=tokens of a sequence  P=taps  H=hidden size  W=P x H; a sequence's `hidden` here holds all taps
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from data import shards
from recipes.errors import MachineError

FINAL = -1
"""In the place of a layer's number: what the target's head reads, after the last layer and its norm."""


@dataclass(frozen=True)
class NamedSequence:
    """A sequence and how to call it in a message."""

    name: str
    sequence: shards.Sequence
    source: str = ""
    """The name of where its prompt comes from."""


def check_taps(
    sequences: Sequence[NamedSequence],
    computed_again: Iterable[torch.Tensor],
    whose: str,
    target_layer_ids: Sequence[int],
    least_cosine: float,
) -> dict[int, float]:
    """Layer -> the least cosine found there, with states [L - 1, W] of the same sequences.

    Raises MachineError for the first sequence whose states are not those; `whose` they are ends "the captured
    states are not".  No user's mistake: the recipe names the layers for both sides.
    """
    least = dict.fromkeys(target_layer_ids, 1.0)
    for each, expected in zip(sequences, computed_again, strict=True):
        for layer, cosine_L in zip(target_layer_ids, _compare(each, expected, len(least)), strict=True):
            position = int(cosine_L.argmin())
            cosine = float(cosine_L[position])
            least[layer] = min(least[layer], cosine)
            if not cosine >= least_cosine:
                raise MachineError(
                    f"the captured states are not {whose}: cosine {cosine:.6f} at the tap after"
                    f" {name_tap(layer)}, sequence {each.name}, position {position}; data.check_cosine asks"
                    f" for {least_cosine}; this shard was not written"
                )
    return least


def name_tap(layer: int) -> str:
    return "the final norm" if layer == FINAL else f"layer {layer}"


def _compare(each: NamedSequence, expected: torch.Tensor, num_taps: int) -> torch.Tensor:
    """[P, L - 1] cosines; two zero states agree (a text may begin with padding, whose embedding is zero)."""
    found = each.sequence.hidden
    assert found.shape == expected.shape, f"{each.name}: {found.shape} states, expected {expected.shape}"
    found_LPH, expected_LPH = (x.float().unflatten(-1, (num_taps, -1)) for x in (found, expected))
    cosine_LP = torch.cosine_similarity(found_LPH, expected_LPH, dim=-1)
    both_zero_LP = ~(found_LPH.any(dim=-1) | expected_LPH.any(dim=-1))
    return cosine_LP.masked_fill(both_zero_LP, 1.0).T
