"""Cuts the attention of packed blocks into dense tiles that stock attention takes with a boolean mask.

A tile is a run of neighbouring blocks of one document and the stretch of its context that any of them may
see; `train.blocks.visible` decides inside it.  Blocks never see one another, so tiling loses nothing.
"""

# Q=query rows of a batch or tile (blocks x slots)  S=context rows  H=heads  G=key-value heads  d=head dim

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from recipes.schema import LayerType
from train.blocks import Places, visibility

TILE_ROWS = 64
"""Query rows of a tile: wide enough for a matrix product, narrow enough to skip most foreign blocks."""


@dataclass(frozen=True)
class Document:
    """Where one document's rows lie in a packed batch."""

    context: slice
    blocks: slice
    """Query rows: blocks x slots."""


@dataclass(frozen=True)
class Tile:
    document: int
    """Its number in the batch."""
    context: slice
    """Of the document's own context rows."""
    mask: torch.Tensor
    """[queries, context + queries] bool: the keys are the tile's context, then its own rows."""


@dataclass(frozen=True)
class Tiling:
    """A batch's attention: its tiles cover every query row once, in order."""

    context_rows: list[int]
    """Of each document."""
    tiles: list[Tile]

    def to(self, device: torch.device) -> "Tiling":
        return replace(self, tiles=[replace(tile, mask=tile.mask.to(device)) for tile in self.tiles])


def cut_tiles(
    kind: LayerType,
    window: int,
    context: Places,
    blocks: Places,
    documents: Sequence[Document],
    block_size: int,
) -> Tiling:
    """A document's context rows are its positions 0, 1, ..., its blocks ascend by anchor."""
    rows = max(1, TILE_ROWS // block_size) * block_size
    tiles = []
    for number, document in enumerate(documents):
        own_context, own_blocks = context[document.context], blocks[document.blocks]
        for start in range(0, len(own_blocks.position), rows):
            queries = own_blocks[start : start + rows]
            stretch = _context_stretch(kind, window, queries.anchor)
            mask = visibility(kind, window, own_context[stretch], queries)
            tiles.append(Tile(number, stretch, mask))
    return Tiling([document.context.stop - document.context.start for document in documents], tiles)


def _context_stretch(kind: LayerType, window: int, anchors: torch.Tensor) -> slice:
    first, last = int(anchors[0]), int(anchors[-1])
    lowest = max(0, first - window + 1) if kind == "sliding_attention" else 0
    return slice(lowest, max(last, lowest))


def attend(
    query_QHd: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    blocks: tuple[torch.Tensor, torch.Tensor],
    tiling: Tiling,
) -> torch.Tensor:
    """Block rows attend to context and blocks, each a pair of keys and values [rows, G, d]. [Q, H, d]"""
    dtype = _attention_dtype(query_QHd)
    # splitting, not slicing: the backward pass of a slice would fill the whole tensor once per tile
    query_rows = [len(tile.mask) for tile in tiling.tiles]
    documents = list(zip(*(part.to(dtype).split(tiling.context_rows) for part in context), strict=True))
    own_rows = zip(*(part.to(dtype).split(query_rows) for part in (query_QHd, *blocks)), strict=True)
    outputs = []
    for tile, (query, *own) in zip(tiling.tiles, own_rows, strict=True):
        seen = [part[tile.context] for part in documents[tile.document]]
        key, value = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(seen, own, strict=True))
        heads_first = query.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(heads_first, key, value, attn_mask=tile.mask, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs).to(query_QHd.dtype)


def _attention_dtype(query_QHd: torch.Tensor) -> torch.dtype:
    # on a CPU torch 2.13's attention runs backward eight times slower in bf16 than in fp32
    return torch.float32 if query_QHd.device.type == "cpu" else query_QHd.dtype
