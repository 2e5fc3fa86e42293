"""`serve/tree_gdn.py` in Triton, for trees on a GPU: a layer's rows are convolved and verified.

Results go into tensors that the caller keeps; no state is written.  Once the walk is known, what is `Kept`
becomes state in `serve/tree_gdn_commit_kernels.py`.  Grids depend on shapes alone and sizes are read on the
device, so a CUDA graph can hold the launches and later steps replay them with other trees.  Nothing asks for
more than sm_80.
"""
# ruff: noqa: PLR0913, PLR0917  (a kernel takes pointers and strides one by one)

# B=requests  R=rows of a request: the committed token, then N nodes  T=rows of the step
# S=state slots  H=value heads  J=key heads  K=key dim  V=value dim  C=convolved channels
# W=taps of the convolution  X=conv state columns, >= W - 1
#
# The algebra is told in `serve/tree_gdn.py`.  Where precision and time lie:
#   * q and k stay as they come; products are scaled by their lengths.  So bf16 times bf16 is exact on tensor
#     cores, and fp32 times bf16 is three such products, of the fp32's leading, middle and last 8 bits: exact
#     too, and half the work of tf32x3, which fp32 times fp32 takes.  Sums are fp32 everywhere.
#   * (I + A) U = ... is solved in blocks of 16 rows, whose inverses are put together from those of their
#     halves, up from single rows; across blocks it is substitution.  That meets no powers of A, as a product
#     of (I + A^2^i) does: when keys are alike they grow like binomials, to 6435 in a chain of 16 rows and
#     1e18 in one of 64, only to cancel.
#   * A small batch waits for its state, 64 KiB a head in fp32: all of it is asked for before anything else.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from serve.tree_attention import MOST_ROWS

NORM_EPS = tl.constexpr(1e-6)  # of serve/tree_gdn.py
_SOFTPLUS_THRESHOLD = tl.constexpr(20.0)  # softplus(x) = x above it, torch's default

_LEAST_TILE = 16  # of tl.dot, in every dimension
_CONV_ROWS, _CONV_CHANNELS = 8, 128  # of one program


@dataclass(frozen=True)
class Tiles:
    """What a program of `verify_trees_` works on."""

    rows: int
    key_dims: int
    """At a time; a divisor of K."""
    stages: int
    """Such parts in flight."""
    value_dims: int
    """A divisor of V: V / value_dims programs share a head, and each makes A and its inverse for itself."""
    warps: int


def choose_tiles(
    num_rows: int, heads_of_batch: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> Tiles:
    """Tile sizes, from shapes alone.

    heads_of_batch: B * H.  Few are spread over many programs; for many, less is done twice, and for 64 rows
    always, since their A and its inverse take longest.  dtype: of q and k.
    """
    # us a layer on an H200 (bf16, an fp32 state, 48 heads of 128), value dims x warps, batches of 1, 4 and 8:
    #   16 rows: 32x4 16, 45, -;   64x4 16, 39, 71
    #   32 rows: 32x4 20, 55, -;   64x4 21, 60, 90
    #   64 rows: 32x8 57, 166, -;  64x8 42, 123, 242;  64x4 37, 110, 169
    # Of 64 rows, 4 warps spill up to 600 bytes a thread and 8 fewer, but at 255 registers a thread a program
    # of 8 has an SM to itself, and of 4 there are two: in 48 KiB each on sm_86, which has 100 (60 on sm_90).
    # By 16 and 32 rows little or nothing is spilt.  fp32 inputs spill more, and hold up to 80 KiB in 32x8.
    rows = max(_LEAST_TILE, triton.next_power_of_2(num_rows))
    is_narrow, is_most = dtype == torch.bfloat16, rows == MOST_ROWS
    return Tiles(
        rows=rows,
        key_dims=_divisor(key_dim, 32),
        stages=4,
        value_dims=_divisor(value_dim, 64 if is_narrow and (is_most or heads_of_batch > 256) else 32),
        warps=8 if is_most and not is_narrow else 4,
    )


def _divisor(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides a head's size."""
    tile = min(most, size & -size)
    assert tile >= _LEAST_TILE, f"heads have {size} dimensions, expected a multiple of {_LEAST_TILE}"
    return tile


@dataclass(frozen=True)
class Placement:
    """Where each request's rows and state are; integers of any width, on the device."""

    first_row_B: torch.Tensor
    """The committed token's row in tensors [T, ...]; the nodes' follow."""
    num_rows_B: torch.Tensor
    """Up to R.  0 for padding, which is left alone."""
    slots_B: torch.Tensor
    """Negative for padding."""


@dataclass(frozen=True)
class Kept:
    """What committing any path needs of a layer's verified step."""

    inputs_BRC: torch.Tensor
    """Before the convolution."""
    key_BRJK: torch.Tensor
    """After the convolution, not normalised: exact in the dtype they came in."""
    corrected_BRHV: torch.Tensor
    """u.  fp32, since it becomes part of a state that lasts: bf16 would be off by up to 2**-9 of it."""
    log_decay_BRH: torch.Tensor
    """fp32, each row's own."""

    def of_batch(self, batch: int) -> "Kept":
        """Views for the first `batch` requests."""
        return Kept(
            self.inputs_BRC[:batch],
            self.key_BRJK[:batch],
            self.corrected_BRHV[:batch],
            self.log_decay_BRH[:batch],
        )


@dataclass(frozen=True)
class Projected:
    """A layer's inputs to the recurrence, views of any strides but of dense heads."""

    query_TJK: torch.Tensor
    key_TJK: torch.Tensor
    value_THV: torch.Tensor
    a_TH: torch.Tensor
    b_TH: torch.Tensor


@dataclass(frozen=True)
class GateWeights:
    """`A_log` and `dt_bias` of vLLM's layer."""

    a_log_H: torch.Tensor
    dt_bias_H: torch.Tensor


def convolve_trees_(
    inputs_TC: torch.Tensor,
    conv_state_SCX: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    parents_BN: torch.Tensor,
    placement: Placement,
    outputs_TC: torch.Tensor,
    kept: Kept,
    use_silu: bool = True,
) -> None:
    """`serve.tree_gdn.convolve_trees` for the rows of trees; other rows of outputs_TC stay as they are.

    Writes outputs_TC and kept.inputs_BRC.  conv_state_SCX: a view of any strides of vLLM's cache.
    """
    batch, num_nodes = parents_BN.shape
    channels, num_taps = weight_CW.shape
    assert conv_state_SCX.shape[1] == channels, f"{conv_state_SCX.shape} for {channels} channels"
    assert conv_state_SCX.shape[2] >= num_taps - 1, f"{conv_state_SCX.shape} for {num_taps} taps"
    kept_shape = batch, 1 + num_nodes, channels
    assert kept.inputs_BRC.shape == kept_shape, f"{kept.inputs_BRC.shape} for {kept_shape}"
    grid = (triton.cdiv(channels, _CONV_CHANNELS), triton.cdiv(1 + num_nodes, _CONV_ROWS), batch)
    _convolve_kernel[grid](
        inputs_TC,
        conv_state_SCX,
        weight_CW,
        bias_C,
        parents_BN,
        placement.first_row_B,
        placement.num_rows_B,
        placement.slots_B,
        outputs_TC,
        kept.inputs_BRC,
        channels,
        *inputs_TC.stride(),
        *conv_state_SCX.stride(),
        *weight_CW.stride(),
        parents_BN.stride(0),
        *outputs_TC.stride(),
        *kept.inputs_BRC.stride(),
        TAPS=num_taps,
        COLUMNS=conv_state_SCX.shape[2],
        USE_SILU=use_silu,
        TILE_ROWS=_CONV_ROWS,
        TILE_CHANNELS=_CONV_CHANNELS,
    )


def verify_trees_(
    rows: Projected,
    gate_weights: GateWeights,
    state_SHVK: torch.Tensor,
    words_BR: torch.Tensor,
    placement: Placement,
    scale: float,
    outputs_THV: torch.Tensor,
    kept: Kept,
) -> None:
    """`serve.tree_gdn.compute_gates` and `verify_trees`, normalising, for the rows of trees.

    Writes outputs_THV, whose other rows stay as they are, and all that is kept but the convolution's inputs.
    state_SHVK: vLLM's CUDA cache [slots, H, V, K], any strides.  words_BR: int64, of
    `serve.tree_attention.pack_sees`.  scale multiplies the query, K**-0.5 in vLLM.
    """
    batch, num_rows = words_BR.shape
    heads, value_dim, key_dim = state_SHVK.shape[1:]
    key_heads = rows.key_TJK.shape[1]
    assert num_rows <= MOST_ROWS, f"{num_rows} rows, a word has {MOST_ROWS} bits"
    assert words_BR.dtype == torch.int64, f"words are {words_BR.dtype}, expected int64"
    assert heads % key_heads == 0, f"{heads} value heads for {key_heads} key heads"
    for dense in (rows.query_TJK, rows.key_TJK, rows.value_THV, outputs_THV, kept.key_BRJK):
        assert dense.stride(-1) == 1, f"a head's dimensions lie {dense.stride(-1)} apart, expected 1"
    for of_rows in (kept.key_BRJK, kept.corrected_BRHV, kept.log_decay_BRH):
        assert of_rows[0].is_contiguous(), f"what is kept has strides {of_rows.stride()}"
        assert of_rows.shape[:2] == words_BR.shape, f"kept {of_rows.shape[:2]} for {words_BR.shape}"
    tiles = choose_tiles(num_rows, batch * heads, key_dim, value_dim, rows.key_TJK.dtype)
    _verify_kernel[value_dim // tiles.value_dims, heads, batch](
        rows.query_TJK,
        rows.key_TJK,
        rows.value_THV,
        rows.a_TH,
        rows.b_TH,
        gate_weights.a_log_H,
        gate_weights.dt_bias_H,
        state_SHVK,
        words_BR,
        placement.first_row_B,
        placement.num_rows_B,
        placement.slots_B,
        outputs_THV,
        kept.key_BRJK,
        kept.corrected_BRHV,
        kept.log_decay_BRH,
        scale,
        *rows.query_TJK.stride()[:2],
        *rows.key_TJK.stride()[:2],
        *rows.value_THV.stride()[:2],
        *rows.a_TH.stride(),
        *rows.b_TH.stride(),
        *state_SHVK.stride(),
        words_BR.stride(0),
        *outputs_THV.stride()[:2],
        kept.key_BRJK.stride(0),
        kept.corrected_BRHV.stride(0),
        kept.log_decay_BRH.stride(0),
        HEADS_PER_KEY=heads // key_heads,
        KEY_DIM=key_dim,
        TILE_ROWS=tiles.rows,
        TILE_K=tiles.key_dims,
        TILE_V=tiles.value_dims,
        STAGES=tiles.stages,
        DOT_TYPE=_dot_type(),
        num_warps=tiles.warps,
    )


def _dot_type() -> tl.dtype:
    """Of products of bf16: the interpreter (3.9) would multiply their bit patterns."""
    return tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16


@triton.jit
def _convolve_kernel(
    inputs: tl.tensor,
    conv_state: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    parents: tl.tensor,
    first_rows: tl.tensor,
    row_counts: tl.tensor,
    slots: tl.tensor,
    outputs: tl.tensor,
    kept_inputs: tl.tensor,
    num_channels: int,
    input_row_stride: int,
    input_channel_stride: int,
    state_slot_stride: int,
    state_channel_stride: int,
    state_column_stride: int,
    weight_channel_stride: int,
    weight_tap_stride: int,
    parents_stride: int,
    output_row_stride: int,
    output_channel_stride: int,
    kept_request_stride: int,
    kept_row_stride: int,
    kept_channel_stride: int,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_SILU: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
) -> None:
    """One program a request, TILE_ROWS rows and TILE_CHANNELS channels."""
    request = tl.program_id(2).to(tl.int64)
    num_rows = tl.load(row_counts + request)
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0 or tl.program_id(1) * TILE_ROWS >= num_rows:
        return
    first = tl.load(first_rows + request).to(tl.int64)
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    channel = tl.program_id(0) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_row, is_channel = row < num_rows, channel < num_channels
    inside = is_row[:, None] & is_channel[None, :]

    inputs += first * input_row_stride + channel[None, :] * input_channel_stride
    conv_state += slot * state_slot_stride + channel[None, :] * state_channel_stride
    total = tl.zeros([TILE_ROWS, TILE_CHANNELS], tl.float32)
    at = row  # -1 is the state's last column, -2 the one before
    for back in tl.static_range(TAPS):
        in_tree = at >= 0
        of_tree = tl.load(
            inputs + at[:, None].to(tl.int64) * input_row_stride, mask=inside & in_tree[:, None], other=0.0
        )
        of_state = tl.load(
            conv_state + (COLUMNS + at[:, None]) * state_column_stride,
            mask=inside & (at < 0)[:, None],
            other=0.0,
        )
        if back == 0:
            kept = kept_inputs + request * kept_request_stride + row[:, None] * kept_row_stride
            tl.store(kept + channel[None, :] * kept_channel_stride, of_tree, mask=inside)
        of_tap = weight + channel * weight_channel_stride + (TAPS - 1 - back) * weight_tap_stride
        tap = tl.load(of_tap, mask=is_channel, other=0.0).to(tl.float32)
        total += tap[None, :] * (of_tree.to(tl.float32) + of_state.to(tl.float32))
        parent = tl.load(parents + request * parents_stride + at - 1, mask=is_row & (at > 0), other=-1)
        at = tl.where(at > 0, parent.to(tl.int32) + 1, at - 1)

    if bias is not None:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    if USE_SILU:
        total *= tl.sigmoid(total)
    outputs += (first + row[:, None]) * output_row_stride + channel[None, :] * output_channel_stride
    tl.store(outputs, total.to(outputs.dtype.element_ty), mask=inside)


@triton.jit
def _verify_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    state: tl.tensor,
    words: tl.tensor,
    first_rows: tl.tensor,
    row_counts: tl.tensor,
    slots: tl.tensor,
    outputs: tl.tensor,
    kept_key: tl.tensor,
    kept_corrected: tl.tensor,
    kept_log_decay: tl.tensor,
    scale: float,
    query_row_stride: int,
    query_head_stride: int,
    key_row_stride: int,
    key_head_stride: int,
    value_row_stride: int,
    value_head_stride: int,
    a_row_stride: int,
    a_head_stride: int,
    b_row_stride: int,
    b_head_stride: int,
    state_slot_stride: int,
    state_head_stride: int,
    state_value_stride: int,
    state_key_stride: int,
    words_stride: int,
    output_row_stride: int,
    output_head_stride: int,
    kept_key_stride: int,
    kept_corrected_stride: int,
    kept_log_decay_stride: int,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """One program a request, value head and TILE_V of its value dims."""
    request = tl.program_id(2).to(tl.int64)
    num_rows = tl.load(row_counts + request)
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0 or num_rows <= 0:
        return
    first = tl.load(first_rows + request).to(tl.int64)
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    row = tl.arange(0, TILE_ROWS)
    is_row = row < num_rows
    at = first + row
    value_dim = tl.program_id(0) * TILE_V + tl.arange(0, TILE_V)

    # asked for here, so that it is there when the state is
    gate = tl.load(a + at * a_row_stride + head * a_head_stride, mask=is_row, other=0.0)
    gate_bias, gate_scale = tl.load(dt_bias + head), tl.load(a_log + head)
    write = tl.load(b + at * b_row_stride + head * b_head_stride, mask=is_row, other=0.0)
    word = tl.load(words + request * words_stride + row, mask=is_row, other=0)
    value += at[:, None] * value_row_stride + head * value_head_stride + value_dim[None, :]
    alone = tl.load(value, mask=is_row[:, None], other=0.0)

    key_head = head // HEADS_PER_KEY
    query += at[:, None] * query_row_stride + key_head * query_head_stride
    key += at[:, None] * key_row_stride + key_head * key_head_stride
    state += slot * state_slot_stride + head * state_head_stride + value_dim[:, None] * state_value_stride
    query_of_state, key_of_state, query_of_key, key_of_key, query_square, key_square = _multiply(
        query, key, state, state_key_stride, is_row, KEY_DIM, TILE_ROWS, TILE_K, TILE_V, STAGES, DOT_TYPE
    )
    query_scale = scale * tl.rsqrt(query_square + NORM_EPS)
    key_scale = tl.rsqrt(key_square + NORM_EPS)

    log_decay = tl.where(is_row, _log_decay(gate, gate_bias, gate_scale), 0.0)
    beta = tl.sigmoid(write.to(tl.float32))
    # An arithmetic shift repeats the sign bit, but bit 0 of its result is right for all 64 places.
    sees = ((word[:, None] >> row[None, :].to(tl.int64)) & 1) == 1
    is_above = sees & (row[:, None] > row[None, :])
    of_path = tl.where(sees, log_decay[None, :], 0.0)
    from_start = tl.exp(tl.sum(of_path, axis=1))
    # off the path it is a sum of nothing: exp cannot overflow
    below = _dot(of_path, is_above.to(tl.float32).to(tl.bfloat16), DOT_TYPE)
    decay = tl.where(sees, tl.exp(below), 0.0) * key_scale[None, :]

    alone = beta[:, None] * (alone.to(tl.float32) - (from_start * key_scale)[:, None] * key_of_state)
    coupling = tl.where(is_above, (beta * key_scale)[:, None] * decay * key_of_key, 0.0)
    corrected = _solve(coupling, alone, TILE_ROWS, TILE_V)
    within = tl.dot(decay * query_of_key, corrected, input_precision="tf32x3")
    result = query_scale[:, None] * (from_start[:, None] * query_of_state + within)
    outputs += at[:, None] * output_row_stride + head * output_head_stride + value_dim[None, :]
    tl.store(outputs, result.to(outputs.dtype.element_ty), mask=is_row[:, None])

    kept_corrected += request * kept_corrected_stride + value_dim[None, :]
    kept_corrected += (row * num_heads + head)[:, None] * (tl.num_programs(0) * TILE_V)
    tl.store(kept_corrected, corrected.to(kept_corrected.dtype.element_ty), mask=is_row[:, None])
    if tl.program_id(0) == 0:
        kept_rows = kept_log_decay + request * kept_log_decay_stride + row * num_heads
        tl.store(kept_rows + head, log_decay, mask=is_row)
        if head % HEADS_PER_KEY == 0:
            kept_key_rows = kept_key + request * kept_key_stride + key_head * KEY_DIM
            kept_key_rows += row[:, None] * (num_heads // HEADS_PER_KEY * KEY_DIM)
            _copy_rows(key, kept_key_rows, is_row, KEY_DIM, TILE_K)


@triton.jit
def _multiply(
    query: tl.tensor,
    key: tl.tensor,
    state: tl.tensor,
    state_key_stride: int,
    is_row: tl.tensor,
    KEY_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Q S0, K S0, Q K^T, K K^T and the squared lengths of Q and K, in parts of the key dim."""
    query_of_state = tl.zeros([TILE_ROWS, TILE_V], tl.float32)
    key_of_state = tl.zeros([TILE_ROWS, TILE_V], tl.float32)
    query_of_key = tl.zeros([TILE_ROWS, TILE_ROWS], tl.float32)
    key_of_key = tl.zeros([TILE_ROWS, TILE_ROWS], tl.float32)
    query_square = tl.zeros([TILE_ROWS], tl.float32)
    key_square = tl.zeros([TILE_ROWS], tl.float32)
    for start in tl.range(0, KEY_DIM, TILE_K, num_stages=STAGES):
        dim = start + tl.arange(0, TILE_K)[None, :]
        state_part = _bf16_or_fp32(tl.load(state + dim * state_key_stride))
        key_part = _bf16_or_fp32(tl.load(key + dim, mask=is_row[:, None], other=0.0))
        query_part = _bf16_or_fp32(tl.load(query + dim, mask=is_row[:, None], other=0.0))
        query_of_state += _dot(query_part, tl.trans(state_part), DOT_TYPE)
        key_of_state += _dot(key_part, tl.trans(state_part), DOT_TYPE)
        query_of_key += _dot(query_part, tl.trans(key_part), DOT_TYPE)
        key_of_key += _dot(key_part, tl.trans(key_part), DOT_TYPE)
        query_square += _sum_squares(query_part)
        key_square += _sum_squares(key_part)
    return query_of_state, key_of_state, query_of_key, key_of_key, query_square, key_square


@triton.jit
def _log_decay(gate: tl.tensor, bias: tl.tensor, scale: tl.tensor) -> tl.tensor:
    x = gate.to(tl.float32) + bias.to(tl.float32)
    softplus = tl.log(1.0 + tl.exp(tl.minimum(x, _SOFTPLUS_THRESHOLD)))
    return -tl.exp(scale.to(tl.float32)) * tl.where(x > _SOFTPLUS_THRESHOLD, x, softplus)


@triton.jit
def _copy_rows(
    source: tl.tensor,
    target: tl.tensor,
    is_row: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    for start in tl.range(0, SIZE, TILE, num_stages=1):
        dim = start + tl.arange(0, TILE)[None, :]
        part = tl.load(source + dim, mask=is_row[:, None], other=0.0)
        tl.store(target + dim, part, mask=is_row[:, None])


@triton.jit
def _bf16_or_fp32(x: tl.tensor) -> tl.tensor:
    if x.dtype == tl.bfloat16:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def _sum_squares(x: tl.tensor) -> tl.tensor:
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@triton.jit
def _dot(left: tl.tensor, right: tl.tensor, DOT_TYPE: tl.constexpr) -> tl.tensor:
    """left @ right in fp32, each of bf16 or fp32."""
    if left.dtype == tl.bfloat16 and right.dtype == tl.bfloat16:
        return tl.dot(left.to(DOT_TYPE), right.to(DOT_TYPE))
    elif left.dtype == tl.bfloat16:
        high, middle, low = _split(right, DOT_TYPE)
        left = left.to(DOT_TYPE)
        return tl.dot(left, high, tl.dot(left, middle, tl.dot(left, low)))
    elif right.dtype == tl.bfloat16:
        high, middle, low = _split(left, DOT_TYPE)
        right = right.to(DOT_TYPE)
        return tl.dot(high, right, tl.dot(middle, right, tl.dot(low, right)))
    else:
        return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _split(x: tl.tensor, DOT_TYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Three bf16 whose sum is x."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high.to(DOT_TYPE), middle.to(DOT_TYPE), low.to(DOT_TYPE)


@triton.jit
def _solve(coupling: tl.tensor, right: tl.tensor, TILE_ROWS: tl.constexpr, TILE_V: tl.constexpr) -> tl.tensor:
    """U of (I + coupling) U = right, for a strictly lower triangular coupling."""
    BLOCKS: tl.constexpr = TILE_ROWS // 16
    block = tl.arange(0, BLOCKS)
    of_blocks = tl.reshape(coupling, [BLOCKS, 16, BLOCKS, 16])
    is_own = block[:, None, None, None] == block[None, None, :, None]
    inverse = _invert(tl.sum(tl.where(is_own, of_blocks, 0.0), axis=2))
    alone = tl.dot(inverse, tl.reshape(right, [BLOCKS, 16, TILE_V]), input_precision="tf32x3")
    alone = tl.reshape(alone, [TILE_ROWS, TILE_V])
    if BLOCKS == 1:
        return alone
    others = tl.reshape(tl.where(is_own, 0.0, of_blocks), [BLOCKS, 16, TILE_ROWS])
    across = tl.dot(inverse, others, input_precision="tf32x3")
    across = tl.reshape(across, [TILE_ROWS, TILE_ROWS])
    solved = alone
    for _ in tl.range(0, BLOCKS - 1, num_stages=1):  # each pass makes one more block final
        solved = alone - tl.dot(across, solved, input_precision="tf32x3")
    return solved


@triton.jit
def _invert(strict: tl.tensor) -> tl.tensor:
    """(I + strict)^-1 of each block of 16 rows.

    [[P, 0], [M, Q]]^-1 = [[P^-1, 0], [-Q^-1 M P^-1, Q^-1]], for P and Q of 1, 2, 4 and 8 rows.
    """
    place = tl.arange(0, 16)
    apart = (place[:, None] ^ place[None, :])[None, :, :]
    inverse = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, strict, 0.0)
    for power in tl.static_range(1, 4):
        between = tl.where(apart >> power == 1, strict, 0.0)
        between = tl.dot(inverse, between, input_precision="tf32x3")
        inverse -= tl.dot(between, inverse, input_precision="tf32x3")
    return inverse
