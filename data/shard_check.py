"""What must hold of a shard's states before it is written: each is the target's own, of its token.

- Some sequences of each shard are read again, one at a time, by a prefill in the same engine, beside what it
  answers then: had generating in company, in steps or by drafts given a token another's states, they would
  differ.
- The first sequences that an engine makes, at its start and after a swap, are compared with the transformers
  model: an engine that taps another layer does so each time.
- All states are looked through for zeros and for another text's; transformers says whether these are right.

The first needs the engine; the others are made while it goes on. Called by data/shard_maker.py.
"""

import random
from collections.abc import Callable, Iterator, Sequence

import torch

from data.check_taps import FINAL, NamedSequence, check_taps
from data.hooked_target import HookedTarget
from data.suspects import find_suspects
from recipes.errors import MachineError
from recipes.schema import Recipe

Read = Callable[[Sequence[Sequence[int]]], Sequence[torch.Tensor | None]]
"""As `data.batch.Batch.read`."""


class ShardCheck:
    """Of the shards of one engine; knows whether that was compared with the transformers model."""

    def __init__(self, recipe: Recipe, read: Read) -> None:
        self._data, self._target = recipe.data, recipe.target
        self._layers = [*recipe.drafter.target_layer_ids, *([FINAL] if recipe.data.final_states else [])]
        self._read = read
        self._is_compared = False

    def begin_anew(self) -> None:
        """After a swap: what was compared before it does not vouch for what comes."""
        self._is_compared = False

    def compare_again(
        self, number: int, sequences: Sequence[NamedSequence], accepted: Sequence[int]
    ) -> dict[int, float]:
        """With the engine's own prefill.  Layer -> the least cosine; empty where nothing was compared.

        number: the shard's.  accepted: drafts in each sequence.  Raises MachineError, as the other does, for
        states that are not the target's, and then the shard must not be written.
        """
        chosen = choose(accepted, self._data.check_again, seed=number)
        whose = "those of a prefill of the same tokens alone"
        return self._compare(sequences, chosen, self._read_again, whose)

    def compare_with_target(self, sequences: Sequence[NamedSequence]) -> dict[int, float]:
        """With the transformers model, as above; the engine may be at work, in another thread."""
        chosen = self._choose_for_target(sequences)
        found = self._compare(sequences, chosen, self._compute_in_transformers, "the transformers model's")
        self._is_compared = self._is_compared or bool(sequences)
        return found

    def _choose_for_target(self, sequences: Sequence[NamedSequence]) -> list[int]:
        suspects = find_suspects(sequences, self._layers)
        if suspects and not self._data.check_sequences:
            index, doubt = min(suspects.items())
            raise MachineError(
                f"captured states look wrong in {len(suspects)} sequences, first in {sequences[index].name}:"
                f" {doubt}; this shard was not written; the transformers model would say whether they are,"
                " but is not asked where data.check_sequences is 0"
            )
        first = [] if self._is_compared else range(min(self._data.check_sequences, len(sequences)))
        return sorted({*suspects, *first})

    def _compare(
        self,
        sequences: Sequence[NamedSequence],
        chosen: Sequence[int],
        compute: Callable[[Sequence[torch.Tensor]], Iterator[torch.Tensor]],
        whose: str,
    ) -> dict[int, float]:
        if not chosen:
            return {}
        compared = [sequences[index] for index in chosen]
        computed = compute([each.sequence.token_ids for each in compared])
        return check_taps(compared, computed, whose, self._layers, self._data.check_cosine)

    def _compute_in_transformers(self, texts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        reference = HookedTarget(self._target, self._layers)
        return (reference.compute_taps(text)[:-1] for text in texts)

    def _read_again(self, texts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """One at a time, in other company: what went wrong in company cannot go wrong in the same way."""
        for text in texts:
            (hidden,) = self._read([text.tolist()])
            if hidden is None:
                raise MachineError("the engine gave a prefill up; this shard was not written")
            yield hidden


def choose(accepted: Sequence[int], count: int, seed: int) -> list[int]:
    """Numbers of the sequences to read again: a draw in which each accepted draft is a lot.

    A tree's side branches are among the drafts.  Those without a draft come after all others.
    """
    generator = random.Random(seed)
    # the largest of n uniform draws is distributed as one draw to the power 1 / n
    keys = [(drafts > 0, generator.random() ** (1 / max(1, drafts))) for drafts in accepted]
    return sorted(range(len(accepted)), key=keys.__getitem__, reverse=True)[:count]
