"""What is in a folder of shards, by source, read without a hidden state; pure but for the files.

A shard that is consumed (data.policy rolling) is in the manifest's counts alone.  Called by data/summary.py.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from data.shards import Shard, Text
from recipes.errors import UserError
from recipes.manifest import ShardEntry, ShardManifest

UNNAMED = "unnamed"
"""In the place of a source's name where the shards have none."""


@dataclass
class SourceTexts:
    """Of one source; the lists are of the sequences that are there, in order."""

    sequences: int = 0
    """Those of consumed shards too, as are the tokens."""
    tokens: int = 0
    supervised_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    """Tokens."""
    supervised: list[int] = field(default_factory=list)
    """Tokens."""
    answers: list[int] = field(default_factory=list)
    """Turns of the assistant's that are supervised."""

    @property
    def coverage(self) -> float:
        """The share of supervised tokens."""
        return self.supervised_tokens / self.tokens if self.tokens else 0.0

    def add(self, text: Text) -> None:
        self.lengths.append(len(text.token_ids))
        self.supervised.append(int(text.loss_mask.sum()))
        self.answers.append(count_answers(text.loss_mask))

    def count(self, sequences: int, tokens: int, supervised_tokens: int) -> None:
        self.sequences += sequences
        self.tokens += tokens
        self.supervised_tokens += supervised_tokens


@dataclass(frozen=True)
class Placed:
    """A sequence and where it lies."""

    file: str
    text: Text


@dataclass
class Counted:
    """What a folder of shards holds."""

    sources: dict[str, SourceTexts]
    """By name, in the order in which they first come."""
    examples: list[Placed]
    """The chosen sequences, in order."""

    @property
    def together(self) -> SourceTexts:
        total = SourceTexts()
        for each in self.sources.values():
            total.count(each.sequences, each.tokens, each.supervised_tokens)
            total.lengths += each.lengths
            total.supervised += each.supervised
            total.answers += each.answers
        return total


def count_shards(folder: Path, manifest: ShardManifest, chosen: Sequence[int] = ()) -> Counted:
    """chosen: numbers of sequences among those that are there.

    Raises UserError for a shard that is missing or not whole.
    """
    counted, wanted, number = Counted({}, []), set(chosen), 0
    for entry in manifest.shards:
        _count_entry(entry, counted.sources)
        for text in _read_texts(folder, entry):
            counted.sources[text.source or UNNAMED].add(text)
            if number in wanted:
                counted.examples.append(Placed(entry.file, text))
            number += 1
    return counted


def _count_entry(entry: ShardEntry, sources: dict[str, SourceTexts]) -> None:
    if not entry.sources:
        unnamed = sources.setdefault(UNNAMED, SourceTexts())
        unnamed.count(entry.sequences, entry.tokens, entry.supervised_tokens)
    for name, count in entry.sources.items():
        named = sources.setdefault(name or UNNAMED, SourceTexts())
        named.count(count.sequences, count.tokens, count.supervised_tokens)


def _read_texts(folder: Path, entry: ShardEntry) -> Iterator[Text]:
    if entry.is_consumed:
        return
    path, count = folder / entry.file, 0
    for text in Shard(path).read_texts(list(entry.sources)):
        yield text
        count += 1
    if count != entry.sequences:
        raise UserError(f"{path}: the manifest says {entry.sequences} sequences, found {count}")


def count_there(manifest: ShardManifest) -> int:
    """Sequences whose shards are not consumed."""
    return sum(entry.sequences for entry in manifest.shards if not entry.is_consumed)


def count_answers(loss_mask: torch.Tensor) -> int:
    """[L] bool -> stretches of supervised tokens: between two turns there is always a turn's head."""
    before = torch.nn.functional.pad(loss_mask[:-1], (1, 0))
    return int((loss_mask & ~before).sum())


def count_dropped(manifest: ShardManifest) -> Mapping[str, int]:
    """Reason -> conversations and rows without a sequence; until the end, what the shards say of theirs."""
    if manifest.complete:
        return manifest.dropped
    found: Counter[str] = Counter()
    for entry in manifest.shards:
        found.update({"incomplete": entry.incomplete} | entry.dropped)
    return found


def find_quantile(values: Sequence[int], share: float) -> int:
    """The least value that at least this share of them does not exceed; of one at least."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
