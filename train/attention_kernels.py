"""The kernels of `train.attention_launch`, in portable Triton: three, and what they share.

A tile of queries is a run of block rows, each with all query heads of one key-value head side by side, so
that a key is loaded once for the group.  The forward pass goes by tiles of queries; backward, the queries'
gradient by tiles of queries, and the keys' and values' by tiles of keys, of context and of blocks alike.
Every output has one writer and sums run in a fixed order, so results repeat bit for bit.  Nothing asks for
more than sm_80.
"""
# ruff: noqa: PLR0913, PLR0917  (a kernel takes pointers and sizes one by one)

# r=rows of a tile of queries, query heads of a key-value head to a block row  k=keys of a tile
# i=dims of a head, padded
#
# Scores are in base 2: s = q k * scale * log2(e), lse = log2(sum(2^s)), p = 2^(s - lse).  Backward, with
# do = gradient of the output o:  delta = do o,  ds = p (do v - delta),  dq = scale ds k,  dk = scale ds q,
# dv = p do.  A row's own block comes first and holds its own slot, so that its greatest score is a number.
#
# What a tile sees of the context is one stretch: masked at its ends, and without a mask in between, where
# every row of the tile sees every key.

import triton
import triton.language as tl

from train.layout import GRAIN

_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_SCORE = tl.constexpr(-1e30)  # before any key; finite, so that nothing is subtracted from itself
_GRAIN = tl.constexpr(GRAIN)


@triton.jit
def _load_heads(
    heads: tl.tensor,
    at: tl.tensor,
    is_there: tl.tensor,
    HEAD_DIM: tl.constexpr,
    TILE_DIMS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> tl.tensor:
    """Heads by number, counted through all rows; zeros where there is none, and beyond its size. [n, i]"""
    dim = tl.arange(0, TILE_DIMS)
    inside = is_there[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(heads + at.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0).to(
        DOT_TYPE
    )


@triton.jit
def _load_keys(
    keys: tl.tensor,
    values: tl.tensor,
    number: tl.tensor,
    end: int,
    HEAD_DIM: tl.constexpr,
    TILE_DIMS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> tuple:
    """Keys and values of rows by number, those before `end`, for this program's key-value head. [k, i]"""
    head, is_key = number * tl.num_programs(1) + tl.program_id(1), number < end
    key_ki = _load_heads(keys, head, is_key, HEAD_DIM, TILE_DIMS, DOT_TYPE)
    return key_ki, _load_heads(values, head, is_key, HEAD_DIM, TILE_DIMS, DOT_TYPE)


@triton.jit
def _store_heads(
    heads: tl.tensor,
    at: tl.tensor,
    is_there: tl.tensor,
    found: tl.tensor,
    HEAD_DIM: tl.constexpr,
    TILE_DIMS: tl.constexpr,
) -> None:
    dim = tl.arange(0, TILE_DIMS)
    inside = is_there[:, None] & (dim < HEAD_DIM)[None, :]
    to = heads + at.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to, found.to(heads.dtype.element_ty), mask=inside)


@triton.jit
def _place_queries(
    first_row: int,
    end_row: int,
    GROUP: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
) -> tuple:
    """For a tile's rows: the block row, the number of the head in all heads of all rows, whether it is one.

    What is none is placed on the tile's last, so that it widens no stretch.
    """
    place = tl.minimum(tl.arange(0, TILE_ROWS), TILE_SLOTS * GROUP - 1)
    row = first_row + place // GROUP
    is_row = (row < end_row) & (tl.arange(0, TILE_ROWS) < TILE_SLOTS * GROUP)
    row = tl.minimum(row, end_row - 1)
    at = (row * tl.num_programs(1) + tl.program_id(1)) * GROUP + place % GROUP
    return row, at, is_row


@triton.jit
def _see_context(
    row: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    window: int,
    BLOCK_SIZE: tl.constexpr,
    SLIDES: tl.constexpr,
) -> tuple:
    """The context rows low..high - 1 that each block row sees."""
    low, high = tl.load(first + row // BLOCK_SIZE), tl.load(end + row // BLOCK_SIZE)
    if SLIDES:
        low = tl.minimum(tl.maximum(low, high + row % BLOCK_SIZE + 1 - window), high)
    return low, high


@triton.jit
def _see_block(
    row: tl.tensor, key: tl.tensor, window: int, BLOCK_SIZE: tl.constexpr, SLIDES: tl.constexpr
) -> tl.tensor:
    """Whether block rows see block rows; broadcasts."""
    seen = row // BLOCK_SIZE == key // BLOCK_SIZE
    if SLIDES:
        seen = seen & (key <= row) & (row - key < window)
    return seen


@triton.jit
def _find_middle(start: int, end: int, whole_start: int, whole_end: int, STEP: tl.constexpr) -> tuple:
    """Cuts start..end into masked, whole and masked steps: the bounds of the whole ones."""
    before = tl.cdiv(tl.maximum(whole_start - start, 0), STEP) * STEP
    left = tl.minimum(start + before, end)
    return left, left + tl.maximum(whole_end - left, 0) // STEP * STEP


@triton.jit
def _cut_stretch(
    part: tl.constexpr, own_start: int, own_end: int, start: int, left: int, right: int, end: int
) -> tuple:
    """Keys of the own blocks (part 0), then context: masked (1), seen by every row (2), masked again (3)."""
    if part == 0:  # noqa: SIM116
        return own_start, own_end
    elif part == 1:
        return start, left
    elif part == 2:
        return left, right
    else:
        return right, end


@triton.jit
def _fold(
    output: tl.tensor,
    greatest: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    seen: tl.tensor,
    scale: float,
    IS_MASKED: tl.constexpr,
) -> tuple:
    """One step of the online softmax: output so far, greatest score, sum of 2^(score - greatest)."""
    score = tl.dot(query, tl.trans(key), input_precision="tf32x3") * (scale * _LOG2_E)
    if IS_MASKED:
        score = tl.where(seen, score, float("-inf"))
    greater = tl.maximum(greatest, tl.max(score, axis=1))
    weight, shrink = tl.exp2(score - greater[:, None]), tl.exp2(greatest - greater)
    output = tl.dot(weight.to(value.dtype), value, output * shrink[:, None], input_precision="tf32x3")
    return output, greater, total * shrink + tl.sum(weight, axis=1)


@triton.jit(do_not_specialize=["num_rows"])
def forward_kernel(
    query: tl.tensor,
    context_key: tl.tensor,
    context_value: tl.tensor,
    block_key: tl.tensor,
    block_value: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    num_rows: int,
    window: int,
    scale: float,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDES: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """One program a tile of queries and key-value head; late tiles first, as they see the most."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_SLOTS
    row, at, is_row = _place_queries(first_row, num_rows, GROUP, TILE_SLOTS, TILE_ROWS)
    low, high = _see_context(row, first, end, window, BLOCK_SIZE, SLIDES)
    query_ri = _load_heads(query, at, is_row, HEAD_DIM, TILE_DIMS, DOT_TYPE)
    output_ri = tl.zeros([TILE_ROWS, TILE_DIMS], tl.float32)
    greatest = tl.full([TILE_ROWS], _LEAST_SCORE, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)

    own_start = first_row // BLOCK_SIZE * BLOCK_SIZE
    own_end = tl.cdiv(tl.minimum(first_row + TILE_SLOTS, num_rows), BLOCK_SIZE) * BLOCK_SIZE
    start, stop = tl.min(low), tl.max(high)
    left, right = _find_middle(start, stop, tl.max(low), tl.min(high), TILE_KEYS)
    for part in tl.static_range(4):
        from_key, to_key = _cut_stretch(part, own_start, own_end, start, left, right, stop)
        for first_key in tl.range(from_key, to_key, TILE_KEYS, num_stages=STAGES):
            number = first_key + tl.arange(0, TILE_KEYS)
            if part == 0:
                key_ki, value_ki = _load_keys(
                    block_key, block_value, number, to_key, HEAD_DIM, TILE_DIMS, DOT_TYPE
                )
                seen = _see_block(row[:, None], number[None, :], window, BLOCK_SIZE, SLIDES)
            else:
                key_ki, value_ki = _load_keys(
                    context_key, context_value, number, to_key, HEAD_DIM, TILE_DIMS, DOT_TYPE
                )
                seen = (number[None, :] >= low[:, None]) & (number[None, :] < high[:, None])
            output_ri, greatest, total = _fold(
                output_ri, greatest, total, query_ri, key_ki, value_ki, seen, scale, part != 2
            )
    _store_heads(output, at, is_row, output_ri / total[:, None], HEAD_DIM, TILE_DIMS)
    tl.store(lse + at, greatest + tl.log2(total), mask=is_row)


@triton.jit
def _weigh(
    left: tl.tensor, right: tl.tensor, lse: tl.tensor, seen: tl.tensor, scale: float, IS_MASKED: tl.constexpr
) -> tl.tensor:
    """The weights of attention, again, as the forward pass had them."""
    score = tl.dot(left, tl.trans(right), input_precision="tf32x3") * (scale * _LOG2_E)
    weight = tl.exp2(score - lse)
    if IS_MASKED:
        weight = tl.where(seen, weight, 0.0)
    return weight


@triton.jit
def _add_d_query(
    d_query: tl.tensor,
    query: tl.tensor,
    d_output: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    seen: tl.tensor,
    scale: float,
    IS_MASKED: tl.constexpr,
) -> tl.tensor:
    weight = _weigh(query, key, lse[:, None], seen, scale, IS_MASKED)
    d_weight = tl.dot(d_output, tl.trans(value), input_precision="tf32x3")
    d_score = weight * (d_weight - delta[:, None])
    return tl.dot(d_score.to(key.dtype), key, d_query, input_precision="tf32x3")


@triton.jit(do_not_specialize=["num_rows"])
def queries_kernel(
    query: tl.tensor,
    context_key: tl.tensor,
    context_value: tl.tensor,
    block_key: tl.tensor,
    block_value: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    output: tl.tensor,
    d_output: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    d_query: tl.tensor,
    num_rows: int,
    window: int,
    scale: float,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDES: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """The queries' gradient, and delta for `keys_kernel`; a program's work as in `forward_kernel`."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_SLOTS
    row, at, is_row = _place_queries(first_row, num_rows, GROUP, TILE_SLOTS, TILE_ROWS)
    low, high = _see_context(row, first, end, window, BLOCK_SIZE, SLIDES)
    query_ri = _load_heads(query, at, is_row, HEAD_DIM, TILE_DIMS, DOT_TYPE)
    d_output_ri = _load_heads(d_output, at, is_row, HEAD_DIM, TILE_DIMS, DOT_TYPE)
    output_ri = _load_heads(output, at, is_row, HEAD_DIM, TILE_DIMS, DOT_TYPE)
    delta_r = tl.sum(output_ri.to(tl.float32) * d_output_ri.to(tl.float32), axis=1)
    tl.store(delta + at, delta_r, mask=is_row)
    lse_r = tl.load(lse + at, mask=is_row, other=float("inf"))
    d_query_ri = tl.zeros([TILE_ROWS, TILE_DIMS], tl.float32)

    own_start = first_row // BLOCK_SIZE * BLOCK_SIZE
    own_end = tl.cdiv(tl.minimum(first_row + TILE_SLOTS, num_rows), BLOCK_SIZE) * BLOCK_SIZE
    start, stop = tl.min(low), tl.max(high)
    left, right = _find_middle(start, stop, tl.max(low), tl.min(high), TILE_KEYS)
    for part in tl.static_range(4):
        from_key, to_key = _cut_stretch(part, own_start, own_end, start, left, right, stop)
        for first_key in tl.range(from_key, to_key, TILE_KEYS, num_stages=STAGES):
            number = first_key + tl.arange(0, TILE_KEYS)
            if part == 0:
                key_ki, value_ki = _load_keys(
                    block_key, block_value, number, to_key, HEAD_DIM, TILE_DIMS, DOT_TYPE
                )
                seen = _see_block(row[:, None], number[None, :], window, BLOCK_SIZE, SLIDES)
            else:
                key_ki, value_ki = _load_keys(
                    context_key, context_value, number, to_key, HEAD_DIM, TILE_DIMS, DOT_TYPE
                )
                seen = (number[None, :] >= low[:, None]) & (number[None, :] < high[:, None])
            d_query_ri = _add_d_query(
                d_query_ri, query_ri, d_output_ri, lse_r, delta_r, key_ki, value_ki, seen, scale, part != 2
            )
    _store_heads(d_query, at, is_row, d_query_ri * scale, HEAD_DIM, TILE_DIMS)


@triton.jit(do_not_specialize=["num_rows", "num_keys"])
def keys_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    blocks: tl.tensor,
    d_output: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    d_key: tl.tensor,
    d_value: tl.tensor,
    num_rows: int,
    num_keys: int,
    window: int,
    scale: float,
    OF_CONTEXT: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDES: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """One program a tile of keys and key-value head: all block rows that see any of it."""
    first_key = tl.program_id(0) * TILE_KEYS
    number = first_key + tl.arange(0, TILE_KEYS)
    head, is_key = number * tl.num_programs(1) + tl.program_id(1), number < num_keys
    key_ki, value_ki = _load_keys(key, value, number, num_keys, HEAD_DIM, TILE_DIMS, DOT_TYPE)
    d_key_ki = tl.zeros([TILE_KEYS, TILE_DIMS], tl.float32)
    d_value_ki = tl.zeros([TILE_KEYS, TILE_DIMS], tl.float32)

    end_key = tl.minimum(first_key + TILE_KEYS, num_keys)
    if OF_CONTEXT:
        at_first, at_end = blocks + first_key // _GRAIN * 4, blocks + tl.cdiv(end_key, _GRAIN) * 4
        start, stop = tl.load(at_first) * BLOCK_SIZE, tl.load(at_end + 1) * BLOCK_SIZE
        left, right = _find_middle(
            start, stop, tl.load(at_end + 2) * BLOCK_SIZE, tl.load(at_first + 3) * BLOCK_SIZE, TILE_SLOTS
        )
    else:  # all of it masked
        start, stop = first_key // BLOCK_SIZE * BLOCK_SIZE, tl.cdiv(end_key, BLOCK_SIZE) * BLOCK_SIZE
        left, right = stop, stop

    for part in tl.static_range(3 if OF_CONTEXT else 1):
        from_row = start if part == 0 else (left if part == 1 else right)
        to_row = left if part == 0 else (right if part == 1 else stop)
        for first_row in tl.range(from_row, to_row, TILE_SLOTS, num_stages=STAGES):
            row, at, is_row = _place_queries(first_row, to_row, GROUP, TILE_SLOTS, TILE_ROWS)
            query_ri = _load_heads(query, at, is_row, HEAD_DIM, TILE_DIMS, DOT_TYPE)
            d_output_ri = _load_heads(d_output, at, is_row, HEAD_DIM, TILE_DIMS, DOT_TYPE)
            lse_r = tl.load(lse + at, mask=is_row, other=float("inf"))  # no row weighs nothing
            delta_r = tl.load(delta + at, mask=is_row, other=0.0)
            if part == 1:
                seen = is_key[:, None]
            elif OF_CONTEXT:
                low, high = _see_context(row, first, end, window, BLOCK_SIZE, SLIDES)
                seen = (number[:, None] >= low[None, :]) & (number[:, None] < high[None, :])
            else:
                seen = _see_block(row[None, :], number[:, None], window, BLOCK_SIZE, SLIDES)
            weight_kr = _weigh(key_ki, query_ri, lse_r[None, :], seen, scale, part != 1)
            d_value_ki = tl.dot(weight_kr.to(DOT_TYPE), d_output_ri, d_value_ki, input_precision="tf32x3")
            d_weight_kr = tl.dot(value_ki, tl.trans(d_output_ri), input_precision="tf32x3")
            d_score_kr = weight_kr * (d_weight_kr - delta_r[None, :])
            d_key_ki = tl.dot(d_score_kr.to(DOT_TYPE), query_ri, d_key_ki, input_precision="tf32x3")
    _store_heads(d_key, head, is_key, d_key_ki * scale, HEAD_DIM, TILE_DIMS)
    _store_heads(d_value, head, is_key, d_value_ki, HEAD_DIM, TILE_DIMS)
