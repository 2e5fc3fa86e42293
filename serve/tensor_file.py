"""Writes safetensors files piece by piece: any size in little memory, whole or not at all, hashed on the way.

The format is the safetensors library's own (8-byte header length, JSON header, raw tensors), and that library
reads it.  Its writer needs every tensor whole in memory, and hides a full disk in an error of its own.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32", torch.bool: "BOOL"}
TEMPORARY_SUFFIX = ".tmp"


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


def _pieces(tensors: Mapping[str, TensorParts], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    header = json.dumps(_header(tensors, metadata)).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little")
    yield header
    for name, tensor in tensors.items():
        yield from _tensor_pieces(name, tensor)


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
        piece = memoryview(part.contiguous().view(torch.uint8).numpy()).cast("B") if part.numel() else b""
        written += len(piece)
        yield memoryview(piece)
    assert written == _num_bytes(tensor), f"{name}: {written} bytes came for the shape {tensor.shape}"


def _num_bytes(tensor: TensorParts) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def sync_path(path: Path) -> None:
    """Waits until a file is on the disk, or a directory: a rename is only once its directory is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
