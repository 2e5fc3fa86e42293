"""The attention of `train/attention.py` on a GPU, forward and backward, by a `train.layout.Layout`.

What the kernels of `train.attention_kernels` are given: tiles, whose sizes are constants and fit into sm_86's
shared memory, or are larger where there is more of it; the constants of a launch, and memory for what they
return, beside which nothing is stored.
"""

# Q=block rows (blocks x slots)  S=context rows  H=query heads  G=key-value heads  d=head dim

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from train.attention_kernels import forward_kernel, keys_kernel, queries_kernel
from train.layout import Layout

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [rows, G, d]."""

_LEAST_DIMS = 16  # of tl.dot
_ROOMY_BYTES = 163 << 10  # sm_80's; sm_86 has 99 KiB, sm_90 227
_DOT_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Tile:
    """What one program works on at a time."""

    rows: int
    keys: int
    warps: int
    stages: int
    """Loads of the inner loop in flight."""


@dataclass(frozen=True)
class Tiles:
    forward: Tile
    queries: Tile
    keys: Tile
    """Of context or blocks, with their gradients; a multiple of `train.layout.GRAIN`."""


_TILES = {  # padded dims of a head of two-byte numbers -> tiles
    32: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    64: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    256: Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),
}
_ROOMY_TILES = _TILES | {  # of GPUs with more shared memory; measured on an H200
    128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 3)),
}
_FP32_TILES = {  # by tf32 three times, which leaves out the product of the lesser parts
    128: Tiles(*[Tile(32, 32, 4, 1)] * 3),
    256: Tiles(*[Tile(16, 16, 4, 1)] * 3),
}


def choose_tiles(padded_dims: int, dtype: torch.dtype, *, is_roomy: bool) -> Tiles:
    table = _FP32_TILES if dtype == torch.float32 else _ROOMY_TILES if is_roomy else _TILES
    assert padded_dims <= max(table), f"a head has {padded_dims} dims, at most {max(table)} fit"
    return table[max(padded_dims, min(table))]


@dataclass(frozen=True)
class Shape:
    """The constants of a launch."""

    group: int
    """Query heads of a key-value head."""
    head_dim: int
    block_size: int
    slides: bool
    dtype: torch.dtype
    is_roomy: bool
    """The GPU has the shared memory of an A100 or more."""

    @property
    def padded_dims(self) -> int:
        return max(_LEAST_DIMS, triton.next_power_of_2(self.head_dim))

    @property
    def tiles(self) -> Tiles:
        return choose_tiles(self.padded_dims, self.dtype, is_roomy=self.is_roomy)

    def slots(self, tile: Tile) -> int:
        """Block rows of a tile."""
        assert self.group <= tile.rows, f"{self.group} heads share a key, a tile has {tile.rows} rows"
        return tile.rows // self.group

    def constants(self, tile: Tile) -> dict[str, object]:
        return {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_SIZE": self.block_size,
            "SLIDES": self.slides,
            "TILE_SLOTS": self.slots(tile),
            "TILE_ROWS": tile.rows,
            "TILE_KEYS": tile.keys,
            "TILE_DIMS": self.padded_dims,
            "STAGES": tile.stages,
            # the interpreter (3.9) would multiply the bit patterns of bf16
            "DOT_TYPE": tl.float32 if triton.knobs.runtime.interpret else _DOT_TYPES[self.dtype],
        }


def shape_of(query_QHd: torch.Tensor, key_SGd: torch.Tensor, layout: Layout) -> Shape:
    heads, head_dim = query_QHd.shape[1:]
    group = heads // key_SGd.shape[1]
    is_roomy = _shared_bytes(query_QHd.device) >= _ROOMY_BYTES
    return Shape(group, head_dim, layout.block_size, layout.slides, query_QHd.dtype, is_roomy)


@cache
def _shared_bytes(device: torch.device) -> int:
    """That a program may have."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def attend_forward(
    query_QHd: torch.Tensor, context: Pair, blocks: Pair, layout: Layout, scale: float
) -> Pair:
    """Output [Q, H, d] and lse [Q, H] (fp32, base 2).  Tensors are contiguous, scale > 0."""
    _assert_fit(query_QHd, context, blocks, layout)
    num_rows, kv_heads = len(query_QHd), blocks[0].shape[1]
    output_QHd = torch.empty_like(query_QHd)
    lse_QH = torch.empty(query_QHd.shape[:2], dtype=torch.float32, device=query_QHd.device)
    shape = shape_of(query_QHd, blocks[0], layout)
    tile = shape.tiles.forward
    forward_kernel[(triton.cdiv(num_rows, shape.slots(tile)), kv_heads)](
        query_QHd,
        *context,
        *blocks,
        layout.first_A,
        layout.end_A,
        output_QHd,
        lse_QH,
        num_rows,
        layout.window,
        scale,
        **shape.constants(tile),
        num_warps=tile.warps,
    )
    return output_QHd, lse_QH


def attend_backward(
    d_output_QHd: torch.Tensor,
    query_QHd: torch.Tensor,
    context: Pair,
    blocks: Pair,
    outcome: Pair,
    layout: Layout,
    scale: float,
) -> tuple[torch.Tensor, Pair, Pair]:
    """Gradients of the query, and of the context's and the blocks' keys and values.

    outcome: of `attend_forward`.
    """
    output_QHd, lse_QH = outcome
    d_query_QHd, delta_QH = torch.empty_like(query_QHd), torch.empty_like(lse_QH)
    num_rows, kv_heads = len(query_QHd), blocks[0].shape[1]
    shape = shape_of(query_QHd, blocks[0], layout)
    tile = shape.tiles.queries
    queries_kernel[(triton.cdiv(num_rows, shape.slots(tile)), kv_heads)](
        query_QHd,
        *context,
        *blocks,
        layout.first_A,
        layout.end_A,
        output_QHd,
        d_output_QHd,
        lse_QH,
        delta_QH,
        d_query_QHd,
        num_rows,
        layout.window,
        scale,
        **shape.constants(tile),
        num_warps=tile.warps,
    )
    tile = shape.tiles.keys
    gradients = []
    for of_context, keys_and_values in ((True, context), (False, blocks)):
        d_key, d_value = (torch.empty_like(part) for part in keys_and_values)
        num_keys = len(d_key)
        if num_keys:  # all documents may begin with their only block
            keys_kernel[(triton.cdiv(num_keys, tile.keys), kv_heads)](
                query_QHd,
                *keys_and_values,
                layout.first_A,
                layout.end_A,
                layout.blocks_C4,
                d_output_QHd,
                lse_QH,
                delta_QH,
                d_key,
                d_value,
                num_rows,
                num_keys,
                layout.window,
                scale,
                OF_CONTEXT=of_context,
                **shape.constants(tile),
                num_warps=tile.warps,
            )
        gradients.append((d_key, d_value))
    return d_query_QHd, gradients[0], gradients[1]


def _assert_fit(query_QHd: torch.Tensor, context: Pair, blocks: Pair, layout: Layout) -> None:
    tensors = (query_QHd, *context, *blocks)
    assert all(each.is_contiguous() for each in tensors), "tensors are not contiguous"
    assert len({each.dtype for each in tensors}) == 1, f"types are {[each.dtype for each in tensors]}"
    rows = len(layout.end_A) * layout.block_size
    assert len(query_QHd) == len(blocks[0]) == rows, f"{len(query_QHd)} queries in a layout of {rows}"
    assert len(context[0]) == layout.num_context, f"{len(context[0])} context rows, not {layout.num_context}"
