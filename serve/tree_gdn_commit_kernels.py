"""The commit of `serve/tree_gdn.py` in Triton: accepted paths become state, in all layers at once.

What a step's layers keep while `serve/tree_gdn_kernels.py` verifies lies in one allocation, `KeptLayers`.  As
there, grids depend on shapes alone, so a CUDA graph can hold the launches, and nothing asks for more than
sm_80.
"""
# ruff: noqa: PLR0913, PLR0917  (a kernel takes pointers and strides one by one)

# B=requests  R=rows of a request: the committed token, then N nodes  L=slots of a path  S=state slots
# H=value heads  J=key heads  K=key dim  V=value dim  C=convolved channels  X=conv state columns
# Y=layers  G=KV cache groups
#
# Every state is read and written once, and nothing else is as large: 64 KiB a head in fp32, to which a row of
# the path adds less than 1.  So memory bounds the time as long as enough reads are under way.  Hence:
#   * A program is one warp, and holds its part of the state in registers from its only load to its only
#     store.  Lanes lie along K: a row of the state is one transfer of 16 bytes a lane, keys are loaded by the
#     lanes that need them, their squares are summed by shuffles.  No shared memory, no barrier.
#   * Of a thread's registers 64 are state and at most 128 in use, so that an SM holds 16 programs, all that
#     sm_86 takes, with 128 KiB of fp32 state.  An H200 needs 36 KiB an SM on their way: 4.8 TB/s for 1 us.
#   * Rows of the path are loaded as they come: other programs hide the wait.  Loads of the next row, written
#     before the sums of this one, the assembler moves behind them, where they are of no use.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from serve.tree_cache_kernels import StackedCaches
from serve.tree_gdn_kernels import NORM_EPS, Kept

# Of one program
_STATE_ELEMENTS = 64 * 32  # registers a thread, threads
_MOST_VALUE_DIMS = 16  # of 32, one a lane, u would be spread over the lanes and come to them by shared memory
_CONV_CHANNELS = 256


@dataclass(frozen=True)
class KeptLayers:
    """`Kept` of all layers.

    48 heads, 16 key heads, dims of 128 and 10240 channels in bf16 make 48 KiB a row and layer, 24 of them u.
    """

    inputs_YBRC: torch.Tensor
    key_YBRJK: torch.Tensor
    corrected_YBRHV: torch.Tensor
    log_decay_YBRH: torch.Tensor

    def of_layer(self, layer: int) -> Kept:
        """Views."""
        return Kept(
            self.inputs_YBRC[layer],
            self.key_YBRJK[layer],
            self.corrected_YBRHV[layer],
            self.log_decay_YBRH[layer],
        )


def allocate_kept(
    layers: int,
    batch: int,
    num_rows: int,
    channels: int,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    like: torch.Tensor,
) -> KeptLayers:
    """Uninitialised; batch: the largest.  like: any tensor of the inputs' dtype and device."""
    rows = layers, batch, num_rows
    return KeptLayers(
        inputs_YBRC=like.new_empty(*rows, channels),
        key_YBRJK=like.new_empty(*rows, key_heads, key_dim),
        corrected_YBRHV=like.new_empty(*rows, heads, value_dim, dtype=torch.float32),
        log_decay_YBRH=like.new_empty(*rows, heads, dtype=torch.float32),
    )


def commit_layers_(
    path_BL: torch.Tensor,
    num_accepted_B: torch.Tensor,
    num_rows_B: torch.Tensor,
    slots_GB: torch.Tensor,
    group_of_layer_Y: torch.Tensor,
    kept: KeptLayers,
    states: StackedCaches,
    conv_states: StackedCaches,
) -> None:
    """`serve.tree_gdn.commit_paths` and `commit_conv` in every layer, in place and two launches.

    path_BL, num_accepted_B: as `serve.tree_batch.WalkBatch`.  num_rows_B: as in `Placement`.  slots_GB: its
    slots_B, by KV cache group.  kept: of at least B requests, of which the first B.  states, conv_states:
    [S, H, V, K] and [S, C, X], those that were verified from; no two layers share the memory of a slot.
    """
    batch = len(path_BL)
    num_layers, most = kept.key_YBRJK.shape[:2]
    assert batch <= most, f"{batch} requests, kept are {most}"
    for of_layers in (states.caches, conv_states.caches, group_of_layer_Y):
        assert len(of_layers) == num_layers, f"{len(of_layers)} layers, kept are {num_layers}"
    where = path_BL, num_accepted_B, num_rows_B, slots_GB, group_of_layer_Y
    _commit_states(where, kept, states)
    _commit_conv_states(where, kept, conv_states)


def _commit_states(where: tuple[torch.Tensor, ...], kept: KeptLayers, states: StackedCaches) -> None:
    path_BL, slots_GB = where[0], where[3]
    num_layers, _, _, key_heads, _ = kept.key_YBRJK.shape
    _, heads, value_dim, key_dim = states.like.shape
    for of_rows in (kept.key_YBRJK, kept.corrected_YBRHV, kept.log_decay_YBRH):
        assert of_rows[0, 0].is_contiguous(), f"what is kept has strides {of_rows.stride()}"
    tile_k = triton.next_power_of_2(key_dim)
    tile_v = choose_value_dims(value_dim, tile_k)
    _commit_state_kernel[heads * (value_dim // tile_v), len(path_BL), num_layers](
        states.like,
        states.pointers_Y,
        kept.key_YBRJK,
        kept.corrected_YBRHV,
        kept.log_decay_YBRH,
        *where,
        *states.like.stride(),
        *kept.key_YBRJK.stride()[:2],
        *kept.corrected_YBRHV.stride()[:2],
        *kept.log_decay_YBRH.stride()[:2],
        *path_BL.stride(),
        *slots_GB.stride(),
        HEADS=heads,
        HEADS_PER_KEY=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        ALIGNMENT=states.alignment,
        TILE_K=tile_k,
        TILE_V=tile_v,
        num_warps=1,
    )


def choose_value_dims(value_dim: int, tile_k: int) -> int:
    """Of one program, which holds them with all key dims: a divisor of V."""
    return min(_MOST_VALUE_DIMS, max(1, _STATE_ELEMENTS // tile_k), value_dim & -value_dim)


def _commit_conv_states(
    where: tuple[torch.Tensor, ...], kept: KeptLayers, conv_states: StackedCaches
) -> None:
    path_BL, slots_GB = where[0], where[3]
    _, channels, num_columns = conv_states.like.shape
    grid = triton.cdiv(channels, _CONV_CHANNELS), len(path_BL), len(kept.inputs_YBRC)
    _commit_conv_kernel[grid](
        conv_states.like,
        conv_states.pointers_Y,
        kept.inputs_YBRC,
        *where,
        channels,
        *conv_states.like.stride(),
        *kept.inputs_YBRC.stride(),
        *path_BL.stride(),
        *slots_GB.stride(),
        COLUMNS=num_columns,
        ALIGNMENT=conv_states.alignment,
        TILE_COLUMNS=triton.next_power_of_2(num_columns),
        TILE_CHANNELS=_CONV_CHANNELS,
    )


@triton.jit
def _commit_state_kernel(
    like: tl.tensor,
    pointers: tl.tensor,
    kept_key: tl.tensor,
    kept_corrected: tl.tensor,
    kept_log_decay: tl.tensor,
    path: tl.tensor,
    accepted_counts: tl.tensor,
    row_counts: tl.tensor,
    slots: tl.tensor,
    groups: tl.tensor,
    state_slot_stride: int,
    state_head_stride: int,
    state_value_stride: int,
    state_key_stride: int,
    key_layer_stride: int,
    key_request_stride: int,
    corrected_layer_stride: int,
    corrected_request_stride: int,
    log_decay_layer_stride: int,
    log_decay_request_stride: int,
    path_request_stride: int,
    path_place_stride: int,
    slots_group_stride: int,
    slots_request_stride: int,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
) -> None:
    """One program a layer, request, value head and TILE_V of its value dims."""
    request, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = _find_slot(slots, groups, request, layer, slots_group_stride, slots_request_stride)
    if slot < 0 or tl.load(row_counts + request) <= 0:
        return
    KEY_SIZE: tl.constexpr = HEADS // HEADS_PER_KEY * KEY_DIM
    head, part = tl.program_id(0) // (VALUE_DIM // TILE_V), tl.program_id(0) % (VALUE_DIM // TILE_V)
    value_dim = part * TILE_V + tl.arange(0, TILE_V)
    dim = tl.arange(0, TILE_K)
    is_dim = dim < KEY_DIM
    state = tl.multiple_of(tl.load(pointers + layer).to(like.dtype), ALIGNMENT)
    state += slot * state_slot_stride + head * state_head_stride
    state += value_dim[:, None] * state_value_stride + dim[None, :] * state_key_stride
    after = tl.load(state, mask=is_dim[None, :], other=0.0).to(tl.float32)  # asked for before all else

    path += request * path_request_stride
    kept_key += layer * key_layer_stride + request * key_request_stride
    kept_key += head // HEADS_PER_KEY * KEY_DIM + dim
    kept_corrected += layer * corrected_layer_stride + request * corrected_request_stride
    kept_corrected += head * VALUE_DIM + value_dim
    kept_log_decay += layer * log_decay_layer_stride + request * log_decay_request_stride + head
    for place in tl.range(0, tl.load(accepted_counts + request).to(tl.int32) + 1, num_stages=1):
        row = tl.load(path + (place - 1) * path_place_stride, mask=place > 0, other=-1).to(tl.int32) + 1
        key = tl.load(kept_key + row * KEY_SIZE, mask=is_dim, other=0.0).to(tl.float32)
        corrected = tl.load(kept_corrected + row * (HEADS * VALUE_DIM)).to(tl.float32)
        log_decay = tl.load(kept_log_decay + row * HEADS)
        written = corrected * tl.rsqrt(tl.sum(key * key, axis=0) + NORM_EPS)
        after = tl.exp(log_decay) * after + written[:, None] * key[None, :]
    tl.store(state, after.to(state.dtype.element_ty), mask=is_dim[None, :])


@triton.jit
def _commit_conv_kernel(
    like: tl.tensor,
    pointers: tl.tensor,
    kept_inputs: tl.tensor,
    path: tl.tensor,
    accepted_counts: tl.tensor,
    row_counts: tl.tensor,
    slots: tl.tensor,
    groups: tl.tensor,
    num_channels: int,
    state_slot_stride: int,
    state_channel_stride: int,
    state_column_stride: int,
    kept_layer_stride: int,
    kept_request_stride: int,
    kept_row_stride: int,
    kept_channel_stride: int,
    path_request_stride: int,
    path_place_stride: int,
    slots_group_stride: int,
    slots_request_stride: int,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
) -> None:
    """One program a layer, request and TILE_CHANNELS channels."""
    request, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = _find_slot(slots, groups, request, layer, slots_group_stride, slots_request_stride)
    if slot < 0 or tl.load(row_counts + request) <= 0:
        return
    conv_state = tl.multiple_of(tl.load(pointers + layer).to(like.dtype), ALIGNMENT)
    channel = tl.program_id(0) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    column = tl.arange(0, TILE_COLUMNS)
    inside = (column < COLUMNS)[:, None] & (channel < num_channels)[None, :]
    # in the line of the old columns, the committed token and the accepted nodes
    at = column + 1 + tl.load(accepted_counts + request).to(tl.int32)
    is_old, is_node = at < COLUMNS, at > COLUMNS
    node = path + request * path_request_stride + (at - COLUMNS - 1) * path_place_stride
    row = tl.load(node, mask=is_node & (column < COLUMNS), other=-1).to(tl.int32) + 1

    conv_state += slot * state_slot_stride + channel[None, :] * state_channel_stride
    kept_inputs += layer * kept_layer_stride + request * kept_request_stride
    kept_inputs += row[:, None] * kept_row_stride + channel[None, :] * kept_channel_stride
    old = tl.load(
        conv_state + at[:, None] * state_column_stride, mask=inside & is_old[:, None], other=0.0
    ).to(tl.float32)
    new = tl.load(kept_inputs, mask=inside & (at >= COLUMNS)[:, None], other=0.0).to(tl.float32)
    line = tl.where(is_old[:, None], old, new)
    tl.debug_barrier()  # columns move: all are read before one is written
    at_column = column[:, None] * state_column_stride
    tl.store(conv_state + at_column, line.to(conv_state.dtype.element_ty), mask=inside)


@triton.jit
def _find_slot(
    slots: tl.tensor,
    groups: tl.tensor,
    request: tl.tensor,
    layer: tl.tensor,
    group_stride: int,
    request_stride: int,
) -> tl.tensor:
    group = tl.load(groups + layer).to(tl.int64)
    return tl.load(slots + group * group_stride + request * request_stride).to(tl.int64)
