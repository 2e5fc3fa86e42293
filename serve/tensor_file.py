"""Writes safetensors files piece by piece: any size in little memory, whole or not at all, hashed on the way.

`write_tensors` knows every shape beforehand; a `GrowingFile` takes rows as they come.
The format is the safetensors library's own (8-byte header length, JSON header, raw tensors), and that library
reads it.  Its writer needs every tensor whole in memory, and hides a full disk in an error of its own.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32", torch.bool: "BOOL"}
TEMPORARY_SUFFIX = ".tmp"
_LENGTH_BYTES = 8
_MOST_ROWS = 10**12  # more digits than any file's header will have


class Digest(Protocol):
    """As hashlib makes them."""

    def update(self, data: bytes | memoryview, /) -> None: ...


@dataclass(frozen=True)
class TensorParts:
    """A tensor of known shape that comes in consecutive pieces along its first dimension."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Iterable[torch.Tensor]


def write_tensors(
    path: Path,
    tensors: Mapping[str, TensorParts],
    metadata: Mapping[str, str] | None = None,
    *,
    digest: Digest | None = None,
    survives_power_cut: bool = True,
) -> None:
    """Writes `path` under a temporary name, then renames it: whole or not there.

    `digest` is fed its bytes; `survives_power_cut` waits for the disk.  Raises OSError as the system gives
    it, with nothing left behind.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            for piece in _pieces(tensors, metadata or {}):
                if digest is not None:
                    digest.update(piece)
                file.write(piece)
            if survives_power_cut:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # a failed write does not say where
        raise
    finally:
        temporary.unlink(missing_ok=True)
    if survives_power_cut:
        sync_path(path.parent)


class GrowingFile:
    """Tensors with a row for each of a number of things; the first one's are written as they come.

    They lie behind room for the header, which comes last.
    """

    def __init__(self, path: Path, rows: Mapping[str, TensorParts], metadata: Mapping[str, str]) -> None:
        """rows: one row of each tensor.  Raises OSError where `path` cannot be made."""
        self._path, self._rows, self._metadata = path, rows, metadata
        self._room = len(_make_header(_repeat(rows, _MOST_ROWS), metadata))
        self._row_bytes = _num_bytes(next(iter(rows.values())))
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def write_rows(self, first: int, rows: torch.Tensor) -> None:
        """Of the first tensor, from row `first` on, over what was there."""
        self._write(_as_bytes(rows), self._room + first * self._row_bytes)

    def finish(self, path: Path, num_rows: int, *others: torch.Tensor) -> None:
        """With the tensors after the first, whole, and its first `num_rows` rows; renames the file."""
        end = self._room + num_rows * self._row_bytes
        for other in others:
            self._write(_as_bytes(other), end)
            end += other.nbytes
        os.ftruncate(self._descriptor, end)
        self._write(_make_header(_repeat(self._rows, num_rows), self._metadata, self._room), 0)
        os.close(self._descriptor)
        self._path.replace(path)

    def discard(self) -> None:
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)

    def _write(self, data: bytes | memoryview, at: int) -> None:
        left = memoryview(data)
        try:
            while left:
                written = os.pwrite(self._descriptor, left, at)
                left, at = left[written:], at + written
        except OSError as error:
            error.filename = str(self._path)  # a failed write does not say where
            raise


def _repeat(rows: Mapping[str, TensorParts], count: int) -> dict[str, TensorParts]:
    return {name: replace(row, shape=(count, *row.shape[1:])) for name, row in rows.items()}


def _pieces(tensors: Mapping[str, TensorParts], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    yield _make_header(tensors, metadata)
    for name, tensor in tensors.items():
        yield from _tensor_pieces(name, tensor)


def _make_header(
    tensors: Mapping[str, TensorParts], metadata: Mapping[str, str], num_bytes: int = 0
) -> bytes:
    """Padded to that many bytes, or to the next eight."""
    header = json.dumps(_header(tensors, metadata)).encode()
    header = header.ljust(max(num_bytes - _LENGTH_BYTES, -(-len(header) // 8) * 8))
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header


def _header(tensors: Mapping[str, TensorParts], metadata: Mapping[str, str]) -> dict[str, object]:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + _num_bytes(tensor)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    return header


def _tensor_pieces(name: str, tensor: TensorParts) -> Iterator[memoryview]:
    written = 0
    for part in tensor.parts:
        assert part.dtype == tensor.dtype, f"{name}: a part of {part.dtype} in a tensor of {tensor.dtype}"
        piece = _as_bytes(part.contiguous())
        written += len(piece)
        yield piece
    assert written == _num_bytes(tensor), f"{name}: {written} bytes came for the shape {tensor.shape}"


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous one."""
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B") if tensor.numel() else memoryview(b"")


def _num_bytes(tensor: TensorParts) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def sync_path(path: Path) -> None:
    """Waits until a file is on the disk, or a directory: a rename is only once its directory is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
