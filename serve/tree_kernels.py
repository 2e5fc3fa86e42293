"""`attend_ragged` and `merge_states` of `serve/tree_attention.py` in Triton, with the same signatures.

For an attention backend on a GPU.  Grids depend on shapes alone and sizes are read on the device, so a CUDA
graph can hold the launches and later steps replay them with other trees.  Nothing asks for more than sm_80.
Shapes and arguments: see there.  For those requests of a batch that are trees, with q, k, v as the layer made
them:

    out, lse = flash_attn_varlen_func(q, k_cache, v_cache, cu_seqlens_q=query_starts, causal=False,
                                      seqused_k=sequence_lengths - rows, block_table=block_tables,
                                      return_softmax_lse=True, ...)
    merge_states(out, lse, *attend_ragged(q, k, v, words, query_starts, scale, 1 + nodes), words)
"""
# ruff: noqa: PLR0913, PLR0917  (a kernel takes pointers and strides one by one)

import torch
import triton
import triton.language as tl

from serve.tree_attention import MOST_ROWS, LseLayout

_LEAST_TILE = 16  # of tl.dot, in every dimension
_MOST_DIMS = 64  # of a head at a time: whole heads of 256 would not fit into sm_86's shared memory
_HEADS = 4  # that one program merges
_DOT_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def attend_ragged(
    query_THd: torch.Tensor,
    key_TGd: torch.Tensor,
    value_TGd: torch.Tensor,
    words_T: torch.Tensor,
    query_starts_B1: torch.Tensor,
    scale: float,
    max_rows: int = MOST_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, d] and lse [T, H] fp32, uninitialised for the rows that are the caller's.

    A tile has the least of 16, 32 and 64 rows that holds max_rows, which is 1 + nodes of the largest tree.
    """
    _, heads, head_size = query_THd.shape
    assert max_rows <= MOST_ROWS, f"max_rows is {max_rows}, a word has {MOST_ROWS} bits"
    assert words_T.dtype == torch.int64, f"words are {words_T.dtype}, expected int64"
    _assert_dense_heads(query_THd, key_TGd, value_TGd)
    tile_rows = max(_LEAST_TILE, triton.next_power_of_2(max_rows))
    output_THd = torch.empty_like(query_THd, memory_format=torch.contiguous_format)
    lse_TH = torch.empty(query_THd.shape[:2], dtype=torch.float32, device=query_THd.device)
    _attend_kernel[(len(query_starts_B1) - 1, heads)](
        query_THd,
        key_TGd,
        value_TGd,
        words_T,
        query_starts_B1,
        output_THd,
        lse_TH,
        scale,
        *query_THd.stride()[:2],
        *key_TGd.stride()[:2],
        *value_TGd.stride()[:2],
        HEADS_PER_KV=heads // key_TGd.shape[1],
        HEAD_SIZE=head_size,
        MOST_ROWS=max_rows,
        TILE_ROWS=tile_rows,
        TILE_DIMS=min(_MOST_DIMS, max(_LEAST_TILE, triton.next_power_of_2(head_size))),
        # the interpreter (3.9) would multiply the bit patterns of bf16
        DOT_TYPE=tl.float32 if triton.knobs.runtime.interpret else _DOT_TYPES[query_THd.dtype],
        num_warps=max(4, tile_rows // 8),  # with 4, a tile of 64 rows spills registers
    )
    return output_THd, lse_TH


def merge_states(
    output_THd: torch.Tensor,
    lse_context: torch.Tensor,
    rows_THd: torch.Tensor,
    lse_rows_TH: torch.Tensor,
    words_T: torch.Tensor,
    lse_layout: LseLayout = "HT",
) -> None:
    """In place; where the context's lse is not finite its output is not used, so it may hold anything."""
    num_rows, heads, head_size = output_THd.shape
    lse_context_TH = lse_context.T if lse_layout == "HT" else lse_context
    assert lse_context_TH.shape == lse_rows_TH.shape, f"{lse_context.shape} is not in layout {lse_layout}"
    _assert_dense_heads(output_THd, rows_THd)
    _merge_kernel[(num_rows, triton.cdiv(heads, _HEADS))](
        output_THd,
        lse_context_TH,
        rows_THd,
        lse_rows_TH,
        words_T,
        heads,
        *output_THd.stride()[:2],
        *lse_context_TH.stride(),
        *rows_THd.stride()[:2],
        *lse_rows_TH.stride(),
        HEAD_SIZE=head_size,
        TILE_HEADS=_HEADS,
        TILE_DIMS=triton.next_power_of_2(head_size),
    )


def _assert_dense_heads(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.stride(-1) == 1, f"a head's dimensions lie {tensor.stride(-1)} apart, expected 1"


@triton.jit
def _attend_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    words: tl.tensor,
    query_starts: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    scale: float,
    query_row_stride: int,
    query_head_stride: int,
    key_row_stride: int,
    key_head_stride: int,
    value_row_stride: int,
    value_head_stride: int,
    HEADS_PER_KV: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """One program a request and query head."""
    first = tl.load(query_starts + tl.program_id(0)).to(tl.int64)
    num_rows = tl.load(query_starts + tl.program_id(0) + 1) - first
    if num_rows <= 0 or num_rows > MOST_ROWS:
        return
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    row = tl.arange(0, TILE_ROWS)
    is_row = row < num_rows
    at = first + row[:, None]

    query += at * query_row_stride + head * query_head_stride
    key += at * key_row_stride + head // HEADS_PER_KV * key_head_stride
    score = tl.zeros([TILE_ROWS, TILE_ROWS], tl.float32)
    for start in tl.range(0, HEAD_SIZE, TILE_DIMS, num_stages=1):
        dim = start + tl.arange(0, TILE_DIMS)[None, :]
        inside = is_row[:, None] & (dim < HEAD_SIZE)
        query_part = tl.load(query + dim, mask=inside, other=0.0).to(DOT_TYPE)
        key_part = tl.load(key + dim, mask=inside, other=0.0).to(DOT_TYPE)
        score += tl.dot(query_part, tl.trans(key_part), input_precision="ieee")

    # An arithmetic shift repeats the sign bit, but bit 0 of its result is right for all 64 places.
    word = tl.load(words + first + row, mask=is_row, other=0)
    sees = ((word[:, None] >> row[None, :].to(tl.int64)) & 1) == 1
    score = tl.where(sees & is_row[None, :], score * scale, float("-inf"))
    greatest = tl.max(score, axis=1)
    sees_any = greatest > float("-inf")
    weight = tl.exp(score - tl.where(sees_any, greatest, 0.0)[:, None])
    total = tl.where(sees_any, tl.sum(weight, axis=1), 1.0)
    tl.store(lse + (first + row) * num_heads + head, greatest + tl.log(total), mask=is_row)

    value += at * value_row_stride + head // HEADS_PER_KV * value_head_stride
    output += (at * num_heads + head) * HEAD_SIZE
    for start in tl.range(0, HEAD_SIZE, TILE_DIMS, num_stages=1):
        dim = start + tl.arange(0, TILE_DIMS)[None, :]
        inside = is_row[:, None] & (dim < HEAD_SIZE)
        value_part = tl.load(value + dim, mask=inside, other=0.0).to(DOT_TYPE)
        result = tl.dot(weight.to(DOT_TYPE), value_part, input_precision="ieee") / total[:, None]
        tl.store(output + dim, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _merge_kernel(
    output: tl.tensor,
    lse_context: tl.tensor,
    rows: tl.tensor,
    lse_rows: tl.tensor,
    words: tl.tensor,
    num_heads: int,
    output_row_stride: int,
    output_head_stride: int,
    lse_context_row_stride: int,
    lse_context_head_stride: int,
    rows_row_stride: int,
    rows_head_stride: int,
    lse_rows_row_stride: int,
    lse_rows_head_stride: int,
    HEAD_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
) -> None:
    """One program a row and TILE_HEADS heads."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(words + row) == 0:
        return
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    is_head = head < num_heads
    lse_a = tl.load(
        lse_context + row * lse_context_row_stride + head * lse_context_head_stride,
        mask=is_head,
        other=float("-inf"),
    )
    lse_b = tl.load(
        lse_rows + row * lse_rows_row_stride + head * lse_rows_head_stride, mask=is_head, other=0.0
    )
    lse_a = tl.where(lse_a == float("inf"), float("-inf"), lse_a)  # FlashAttention-2, without a context
    # A row of a tree sees itself, so lse_b is finite and is no -inf to be subtracted from itself.
    greatest = tl.maximum(lse_a, lse_b)
    weight_a, weight_b = tl.exp(lse_a - greatest), tl.exp(lse_b - greatest)
    total = weight_a + weight_b

    dim = tl.arange(0, TILE_DIMS)[None, :]
    inside = is_head[:, None] & (dim < HEAD_SIZE)
    output += row * output_row_stride + head[:, None] * output_head_stride + dim
    rows += row * rows_row_stride + head[:, None] * rows_head_stride + dim
    has_context = (weight_a > 0.0)[:, None]
    out_a = tl.load(output, mask=inside & has_context, other=0.0).to(tl.float32)
    out_b = tl.load(rows, mask=inside, other=0.0).to(tl.float32)
    merged = out_a * (weight_a / total)[:, None] + out_b * (weight_b / total)[:, None]
    tl.store(output, merged.to(output.dtype.element_ty), mask=inside)
