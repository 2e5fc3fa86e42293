"""Cuts the attention of packed blocks into dense tiles, and stacks tiles of like size into one batched call.

A tile is a run of neighbouring blocks of one document and the stretch of its context that any of them may
see; `train.blocks.visible` decides inside it.  Blocks never see one another, so tiling loses nothing.
Stacked tiles are padded to one shape, and stock attention takes them with a boolean mask.
"""

# Q=query rows of a batch (blocks x slots)  S=context rows  H=heads  G=key-value heads  d=head dim
# T=tiles of a stack  q=query rows of a tile  k=keys of a tile

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch.nn import functional as F

from recipes.schema import LayerType
from train.blocks import Places, join_places, visible

TILE_ROWS = 64
"""Of a tile at most: wide enough for a matrix product, narrow enough to skip most foreign blocks."""
STACK_KEYS = 1 << 15
"""Keys of a stack, padding included: their copies are what a stack costs in memory."""
KEY_STEP = 64
"""Tiles share a stack when their numbers of keys are the same after rounding up to a multiple of this."""


@dataclass(frozen=True)
class Document:
    """Where one document's rows lie in a packed batch."""

    context: slice
    blocks: slice
    """Query rows: blocks x slots."""


class Tile(NamedTuple):
    """Row numbers of the batch."""

    first_context: int
    end_context: int
    first_query: int
    end_query: int

    @property
    def num_keys(self) -> int:
        return self.end_context - self.first_context + self.end_query - self.first_query


@dataclass(frozen=True)
class Stack:
    """Tiles in one shape.  A padding row is a copy of row 0 that sees its first key; nobody reads it."""

    queries_Tq: torch.Tensor
    keys_Tk: torch.Tensor
    """Into [all context rows, all block rows]."""
    mask_Tqk: torch.Tensor
    """bool"""


@dataclass(frozen=True)
class Tiling:
    """A batch's attention: its tiles cover every query row once."""

    stacks: list[Stack]
    places_Q: torch.Tensor
    """Where each query row stands in the stacks' rows, all stacks end to end."""

    def to(self, device: torch.device) -> "Tiling":
        stacks = [
            Stack(*(part.to(device) for part in (stack.queries_Tq, stack.keys_Tk, stack.mask_Tqk)))
            for stack in self.stacks
        ]
        return Tiling(stacks, self.places_Q.to(device))


def cut_tiles(
    kind: LayerType,
    window: int,
    context: Places,
    blocks: Places,
    documents: Sequence[Document],
    block_size: int,
) -> Tiling:
    """A document's context rows are its positions 0, 1, ..., its blocks ascend by anchor."""
    anchors = blocks.anchor.tolist()
    tiles = []
    for document in documents:
        start = document.context.start
        for first, end in _split(document.blocks, block_size):
            lowest = max(0, anchors[first] - window + 1) if kind == "sliding_attention" else 0
            highest = max(anchors[end - 1], lowest)
            tiles.append(Tile(start + lowest, start + highest, first, end))
    keys = join_places([context, blocks])
    stacks, places_Q, num_rows = [], torch.empty_like(blocks.position), 0
    for group in _like_sized(tiles):
        queries_Tq, is_row_Tq = _query_rows(group)
        keys_Tk, is_key_Tk = _key_rows(group, len(context.position))
        seen_Tqk = visible(kind, window, blocks[queries_Tq[:, :, None]], keys[keys_Tk[:, None, :]])
        mask_Tqk = seen_Tqk & is_key_Tk[:, None]
        mask_Tqk[:, :, 0] |= ~is_row_Tq  # a row that sees nothing would be NaN
        stacks.append(Stack(queries_Tq, keys_Tk, mask_Tqk))
        rows = is_row_Tq.flatten().nonzero().flatten()
        places_Q[queries_Tq.flatten()[rows]] = num_rows + rows
        num_rows += is_row_Tq.numel()
    return Tiling(stacks, places_Q)


def _split(rows: slice, block_size: int) -> Iterator[tuple[int, int]]:
    """Runs of whole blocks, as equal as can be, of TILE_ROWS at most."""
    most = max(1, TILE_ROWS // block_size)
    num_blocks = (rows.stop - rows.start) // block_size
    num_runs = -(-num_blocks // most)
    bounds = [rows.start + num_blocks * run // num_runs * block_size for run in range(num_runs + 1)]
    return pairwise(bounds)


def _like_sized(tiles: Sequence[Tile]) -> Iterator[list[Tile]]:
    """Tiles whose keys are as many, rounded up; ascending."""
    for size, group in groupby(sorted(tiles, key=_rounded_keys), key=_rounded_keys):
        alike, most = list(group), max(1, STACK_KEYS // size)
        for start in range(0, len(alike), most):
            yield alike[start : start + most]


def _rounded_keys(tile: Tile) -> int:
    return -(-tile.num_keys // KEY_STEP) * KEY_STEP


def _query_rows(tiles: Sequence[Tile]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers, 0 where it is padding, and whether it is none. Both [T, q]"""
    _, _, first_T1, end_T1 = torch.tensor(tiles)[:, :, None].unbind(1)
    numbers_Tq = first_T1 + torch.arange(int((end_T1 - first_T1).max()))
    is_row_Tq = numbers_Tq < end_T1
    return numbers_Tq.where(is_row_Tq, 0), is_row_Tq


def _key_rows(tiles: Sequence[Tile], num_context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a tile's context and then its own rows. Both [T, k]"""
    first_T1, end_T1, first_query_T1, _ = torch.tensor(tiles)[:, :, None].unbind(1)
    places_k = torch.arange(max(tile.num_keys for tile in tiles))
    of_context_T1 = end_T1 - first_T1
    numbers_Tk = torch.where(
        places_k < of_context_T1,
        first_T1 + places_k,
        num_context + first_query_T1 + places_k - of_context_T1,
    )
    is_key_Tk = places_k < torch.tensor([tile.num_keys for tile in tiles])[:, None]
    return numbers_Tk.where(is_key_Tk, 0), is_key_Tk


def attend(
    query_QHd: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    blocks: tuple[torch.Tensor, torch.Tensor],
    tiling: Tiling,
) -> torch.Tensor:
    """Block rows attend to context and blocks, each a pair of keys and values [rows, G, d]. [Q, H, d]"""
    dtype = _attention_dtype(query_QHd)
    query, keys, values = (
        part.to(dtype)
        for part in (query_QHd, *(torch.cat(pair) for pair in zip(context, blocks, strict=True)))
    )
    outputs = []
    for stack in tiling.stacks:
        out_THqd = F.scaled_dot_product_attention(
            _take(query, stack.queries_Tq),
            _take(keys, stack.keys_Tk),
            _take(values, stack.keys_Tk),
            attn_mask=stack.mask_Tqk[:, None],
            enable_gqa=True,
        )
        outputs.append(out_THqd.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, tiling.places_Q).to(query_QHd.dtype)


def _take(rows: torch.Tensor, numbers_Tn: torch.Tensor) -> torch.Tensor:
    """Rows [.., heads, d] by number, heads first. [T, heads, n, d]"""
    # index_select, not indexing: its backward pass adds rows up without sorting them
    taken = rows.index_select(0, numbers_Tn.flatten())
    return taken.unflatten(0, numbers_Tn.shape).transpose(1, 2)


def _attention_dtype(query_QHd: torch.Tensor) -> torch.dtype:
    # on a CPU torch 2.13's attention runs backward eight times slower in bf16 than in fp32
    return torch.float32 if query_QHd.device.type == "cpu" else query_QHd.dtype
