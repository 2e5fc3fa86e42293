"""Shards: the target's own text with its tapped states, in safetensors files under one checked manifest.

`data/regenerate.py` writes them in order, `train/` reads them at random.  A shard exists once the manifest
names it; whatever else lies in the folder is the rest of an interrupted run.
"""

# L=tokens of a sequence  W=taps x hidden size

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from recipes.errors import UserError
from recipes.manifest import ShardEntry, ShardManifest, SourceCount, read_manifest, write_json
from serve.tensor_file import TEMPORARY_SUFFIX, TensorParts, write_tensors

MANIFEST_NAME = "manifest.json"
_REMEDY = "remove this file and run data/regenerate.py on its recipe again, which makes it anew"
SPOOL_NAME = "spool"
"""Where states are on their way into a shard, below its folder; gone when a run ends."""


@dataclass(frozen=True)
class Sequence:
    """One conversation: its prompt and the target's response."""

    token_ids: torch.Tensor
    """[L] int32"""
    loss_mask: torch.Tensor
    """[L] bool: the target emitted this token, its end-of-turn included."""
    hidden: torch.Tensor
    """[L - 1, W]: row j is the tapped state of token j; the last token's may never have been computed."""
    final: torch.Tensor | None = None
    """[L - 1, hidden size]: what the target's head reads at token j; None where nobody captured or asked."""


@dataclass(frozen=True)
class Text:
    """A sequence without its states."""

    name: str
    source: str
    """The name of where its prompt comes from; "" in the shards of earlier versions."""
    token_ids: torch.Tensor
    """[L] int32"""
    loss_mask: torch.Tensor
    """[L] bool, as a Sequence's."""


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


class ShardWriter:
    """Adds shards to a folder; each is on the disk before the manifest names it."""

    def __init__(self, directory: Path, manifest: ShardManifest) -> None:
        """`manifest` is an empty one for a new folder, or the one read from a folder that goes on.

        Removes what an interrupted run left: temporary files, and shards that were consumed.
        """
        directory.mkdir(parents=True, exist_ok=True)
        consumed = [directory / entry.file for entry in manifest.shards if entry.is_consumed]
        for leftover in [*directory.glob(f"*{TEMPORARY_SUFFIX}"), *consumed]:
            leftover.unlink(missing_ok=True)
        self._directory = directory
        self.manifest = manifest

    def add(self, entry: ShardEntry) -> None:
        """Names a shard that is on the disk, or names it anew."""
        others = [other for other in self.manifest.shards if other.file != entry.file]
        self._update(shards=sorted([*others, entry], key=lambda shard: shard.file))

    def consume_before(self, number: int) -> None:
        """Deletes the files of rounds before this one; the manifest says so first."""
        old = [entry for entry in self.manifest.shards if entry.round < number and not entry.is_consumed]
        if not old:
            return
        consumed = {entry.file: entry.model_copy(update={"is_consumed": True}) for entry in old}
        self._update(shards=[consumed.get(entry.file, entry) for entry in self.manifest.shards])
        for name in consumed:
            (self._directory / name).unlink(missing_ok=True)

    def finish(self, dropped: Mapping[str, int]) -> None:
        """Says that no shard will follow, and how many prompts were left out, by reason."""
        self._update(dropped=dict(dropped), complete=True)

    def _update(self, **changes: object) -> None:
        self.manifest = self.manifest.model_copy(update=changes)
        write_json(self._directory / MANIFEST_NAME, self.manifest)


def write_shard_file(
    directory: Path, number: int, sequences: Many[Sequence], prompt_ids: Many[str], sources: Many[str] = ()
) -> ShardEntry:
    """Writes or replaces shard `number`'s file.  Raises OSError if the disk is full; no other changes.

    sources: the name of each sequence's; none, or none but "", where nobody knows them.
    """
    name, digest = shard_name(number), hashlib.sha256()
    metadata = {"prompt_ids": json.dumps(prompt_ids)}
    counts = _count_sources(sequences, sources) if any(sources) else {}
    if len(counts) > 1:  # by number: a name may be a path, and the same shard has the same bytes anywhere
        numbers = {source: number for number, source in enumerate(counts)}
        metadata["sources"] = json.dumps([numbers[source] for source in sources])
    write_tensors(directory / name, _tensors(sequences), metadata, digest=digest)
    return ShardEntry(
        file=name,
        sha256=digest.hexdigest(),
        sequences=len(sequences),
        tokens=sum(len(each.token_ids) for each in sequences),
        supervised_tokens=sum(int(each.loss_mask.sum()) for each in sequences),
        sources=counts,
    )


def _count_sources(sequences: Many[Sequence], sources: Many[str]) -> dict[str, SourceCount]:
    """In the order in which they first come."""
    counted, tokens, supervised = Counter(sources), Counter[str](), Counter[str]()
    for each, source in zip(sequences, sources, strict=True):
        tokens[source] += len(each.token_ids)
        supervised[source] += int(each.loss_mask.sum())
    return {
        source: SourceCount(sequences=count, tokens=tokens[source], supervised_tokens=supervised[source])
        for source, count in counted.items()
    }


def _tensors(sequences: Many[Sequence]) -> dict[str, TensorParts]:
    lengths = torch.tensor([len(each.token_ids) for each in sequences], dtype=torch.int32)
    tokens = int(lengths.sum())
    return {
        "lengths": TensorParts(torch.int32, (len(sequences),), [lengths]),
        "token_ids": TensorParts(torch.int32, (tokens,), [each.token_ids for each in sequences]),
        "loss_mask": TensorParts(torch.bool, (tokens,), [each.loss_mask for each in sequences]),
        "hidden": _states([each.hidden for each in sequences]),
        **(
            {"final": _states(final)}
            if (final := [s.final for s in sequences if s.final is not None])
            else {}
        ),
    }


def _states(parts: list[torch.Tensor]) -> TensorParts:
    dtype, width = (parts[0].dtype, parts[0].shape[1]) if parts else (torch.bfloat16, 0)
    return TensorParts(dtype, (sum(map(len, parts)), width), parts)


@dataclass(frozen=True)
class Shard:
    """One file, read by slices of its memory map."""

    path: Path
    with_final: bool = False

    @cached_property
    def _file(self) -> Any:
        return safe_open(self.path, framework="pt")

    @cached_property
    def _starts(self) -> list[int]:
        """Of each sequence's tokens, then the last's end; the states of sequence i start at starts[i] - i."""
        return [0, *accumulate(self._file.get_tensor("lengths").tolist())]

    def read_texts(self, sources: Many[str]) -> Iterator[Text]:
        """Of every sequence, in order; no states are read.  Raises UserError for a file that is not whole.

        sources: the names in the shard's `ShardEntry`, in their order.
        """
        try:
            metadata = self._file.metadata()
            token_ids, loss_masks = (self._split(name) for name in ("token_ids", "loss_mask"))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path}: cannot read this shard ({error}); {_REMEDY}") from error
        names: list[str] = json.loads(metadata["prompt_ids"])
        numbers: list[int] = json.loads(metadata.get("sources", "null")) or [0] * len(names)
        of_each = [(sources or [""])[number] for number in numbers]
        yield from map(Text, names, of_each, token_ids, loss_masks)

    def read_loss_masks(self) -> Iterator[torch.Tensor]:
        yield from self._split("loss_mask")

    def _split(self, name: str) -> tuple[torch.Tensor, ...]:
        """What there is of each token, by sequence."""
        return self._file.get_tensor(name).tensor_split(self._starts[1:-1])

    def read_sequence(self, index: int) -> Sequence:
        start, end = self._starts[index], self._starts[index + 1]
        of_states = slice(start - index, end - index - 1)
        return Sequence(
            self._file.get_slice("token_ids")[start:end],
            self._file.get_slice("loss_mask")[start:end],
            self._file.get_slice("hidden")[of_states],
            self._file.get_slice("final")[of_states] if self.with_final else None,
        )


class Shards:
    """All sequences of a folder, by number."""

    def __init__(self, directory: Path, manifest: ShardManifest, *, with_final: bool = False) -> None:
        self.manifest = manifest
        self._shards = [Shard(directory / entry.file, with_final) for entry in manifest.shards]
        self._firsts = [0, *accumulate(entry.sequences for entry in manifest.shards)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Sequence:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        shard = bisect_right(self._firsts, index) - 1
        return self._shards[shard].read_sequence(index - self._firsts[shard])

    def read_loss_masks(self) -> Iterator[torch.Tensor]:
        """Of every sequence, in order; no states are read."""
        for shard in self._shards:
            yield from shard.read_loss_masks()


def open_shards(
    directory: Path, manifest: ShardManifest | None = None, *, with_final: bool = False
) -> Shards:
    """Those that the manifest names, the folder's own if none is given.

    with_final: sequences have their final states.  Raises UserError for a missing or damaged manifest, for a
    shard that is not what was written, and where there are no final states.
    """
    manifest = manifest or read_manifest(directory / MANIFEST_NAME, ShardManifest)
    for entry in manifest.shards:
        if not (directory / entry.file).exists():
            raise UserError(
                f"{directory / entry.file}: the manifest names this shard, found no such file;"
                " run data/regenerate.py on its recipe again, which makes it anew"
            )
        check_file(directory, entry)
    if with_final and not manifest.final_states:
        raise UserError(
            f"{directory} holds no final states of the target: write data.final_states=true, and make the"
            " shards again"
        )
    return Shards(directory, manifest, with_final=with_final)


def check_file(directory: Path, entry: ShardEntry) -> None:
    """Compares a shard with its checksum; UserError names the file if they differ."""
    path = directory / entry.file
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.sha256:
        raise UserError(f"{path}: truncated or altered since it was written; {_REMEDY}")


def supervised_share(manifest: ShardManifest) -> float:
    tokens = sum(entry.tokens for entry in manifest.shards)
    return sum(entry.supervised_tokens for entry in manifest.shards) / tokens if tokens else 0.0
