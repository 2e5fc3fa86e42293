"""Attention of tree rows: each way to compute it against its definition, and that against plain attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from kernel_compile import run_apart
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from serve import tree_attention, tree_kernels
from serve.tree import ancestors, chain
from serve.tree_attention import (
    attend_context,
    attend_densely,
    attend_paged,
    attend_rows,
    gather_paged,
    merge,
    pack_sees,
    see_before,
    spread_words,
    unpack_sees,
)
from serve.tree_batch import grow_trees, see_ancestors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernels are interpreted
CONTEXTS = [0, 1, 7, 65]
ROWS = [1, 2, 5, 16, 17, 33, 64]
SHARED_BYTES = 99 * 1024  # that sm_86 gives one block of threads


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    size: int

    @property
    def scale(self) -> float:
        return self.size**-0.5


HEADS = [Heads(query, kv, size) for query, kv in ((3, 3), (4, 2), (8, 2)) for size in (16, 64, 128)]
SOME = Heads(4, 2, 16)


class Draws:
    """Random tensors of one seed."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.numpy = np.random.default_rng(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def permutation(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator)

    def qkv(self, heads: Heads, rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query = self.normal(rows, heads.query, heads.size)
        return query, self.normal(keys, heads.kv, heads.size), self.normal(keys, heads.kv, heads.size)

    def tree(self, rows: int) -> torch.Tensor:
        """Who sees whom in a random tree; a prefix of one is one."""
        scores = -self.numpy.exponential(1.0, (1, 8, 4, 4)).astype(np.float32)
        trees = grow_trees(torch.from_numpy(scores), 63)
        return see_ancestors(trees.parents_BN, 8)[0, :rows, :rows]


def attend_in_parts(query, key, value, sees, scale):
    rows = len(query)
    context = attend_context(query, key[:-rows], value[:-rows], scale)
    return merge(*context, *attend_rows(query, key[-rows:], value[-rows:], sees, scale))[0]


# One request


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_parts_merge_to_the_definition(heads):
    draws = Draws()
    tree = draws.tree(64)
    for context in CONTEXTS:
        for rows in ROWS:
            inputs = (*draws.qkv(heads, rows, context + rows), tree[:rows, :rows], heads.scale)
            torch.testing.assert_close(attend_in_parts(*inputs), attend_densely(*inputs), rtol=0, atol=2e-6)


def test_a_row_gets_what_its_path_alone_would_get():
    draws, context, rows = Draws(), 7, 33
    query, key, value = draws.qkv(SOME, rows, context + rows)
    sees = draws.tree(rows)
    output = attend_densely(query, key, value, sees, SOME.scale)
    for row in range(rows):
        path = torch.cat([torch.arange(context), context + sees[row].nonzero()[:, 0]])
        alone = attend_densely(query[row : row + 1], key[path], value[path], see_before(1), SOME.scale)
        torch.testing.assert_close(output[row], alone[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_chain_is_torchs_causal_attention(context):
    rows = 17
    query, key, value = Draws().qkv(SOME, rows, context + rows)
    sees = torch.from_numpy(ancestors(chain(rows - 1)))
    assert torch.equal(sees, see_before(rows))
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (query, key, value)),
        attn_mask=causal_lower_right(rows, context + rows),
        enable_gqa=True,
    )
    output = attend_densely(query, key, value, sees, SOME.scale)
    torch.testing.assert_close(output, expected[0].transpose(0, 1), rtol=0, atol=2e-6)


def test_no_other_mask_gives_the_trees_attention():
    draws, context, rows = Draws(), 7, 17
    inputs, sees = draws.qkv(SOME, rows, context + rows), draws.tree(rows)
    output = attend_densely(*inputs, sees, SOME.scale)
    for wrong in (see_before(rows), torch.ones_like(sees), sees.T):
        worst = (attend_densely(*inputs, wrong, SOME.scale) - output).abs().amax((1, 2))
        assert (worst[(wrong != sees).any(1)] > 1e-3).all()
        assert (worst > 1e-3).sum() > rows // 2


def test_outputs_have_the_querys_type_and_lse_is_fp32():
    query, key, value = (x.bfloat16() for x in Draws().qkv(SOME, 5, 12))
    assert attend_densely(query, key, value, see_before(5), SOME.scale).dtype == torch.bfloat16
    output, lse = attend_context(query, key, value, SOME.scale)
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_without_keys_there_is_nothing_and_no_nan():
    query, key, value = Draws().qkv(SOME, 5, 5)
    blind = torch.zeros(5, 5, dtype=torch.bool)
    for output, lse in (
        attend_context(query, key[:0], value[:0], SOME.scale),
        attend_rows(query, key, value, blind, SOME.scale),
    ):
        assert (output == 0).all()
        assert (lse == -torch.inf).all()
    assert (attend_densely(query, key, value, blind, SOME.scale) == 0).all()
    merged, lse = merge(output, lse, output, lse)
    assert (merged == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_merging_looks_at_no_part_without_keys(empty):
    out, lse = Draws().normal(5, 4, 16), Draws().normal(5, 4)
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, empty)
    for merged, merged_lse in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)


# Words


@pytest.mark.parametrize("rows", ROWS)
def test_unpacking_gives_what_was_packed(rows):
    draws = Draws()
    sees = torch.stack([draws.tree(rows), see_before(rows), draws.normal(rows, rows) > 0])
    assert torch.equal(unpack_sees(pack_sees(sees)), sees)


def test_bit_63_is_the_sign():
    words = pack_sees(see_before(64)[None])
    assert words[0, [0, 1, 62, 63]].tolist() == [1, 3, 2**63 - 1, -1]
    assert pack_sees(torch.eye(64, dtype=torch.bool)[None])[0, 63] == -(2**63)


def test_words_are_spread_over_the_rows_of_their_requests():
    words = torch.arange(1, 21).view(5, 4)
    words[3] = 0  # no tree
    starts = torch.tensor([0, 4, 4, 6, 8, 13], dtype=torch.int32)  # whole, absent, cut, no tree, too long
    spread = spread_words(words, starts, 16)
    assert spread.tolist() == [1, 2, 3, 4, 9, 10, *[0] * 10]


# A paged cache


def test_gathering_follows_the_block_table():
    cache = torch.arange(40).view(10, 4, 1, 1)  # a value is its slot
    table = torch.tensor([7, 2, 9, 0], dtype=torch.int32)
    assert gather_paged(cache, table, 10).flatten().tolist() == [*range(28, 32), *range(8, 12), 36, 37]
    assert gather_paged(cache, table, 0).shape == (0, 1, 1)


@dataclass(frozen=True)
class Request:
    context: int
    rows: int
    is_tree: bool


@dataclass(frozen=True)
class Batch:
    """Requests as an engine holds them, in scrambled blocks; the cache is vLLM's [N, G, P, 2 * d]."""

    query_THd: torch.Tensor
    key_TGd: torch.Tensor
    value_TGd: torch.Tensor
    cache: torch.Tensor
    block_tables: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    sees: list[torch.Tensor | None]
    words_T: torch.Tensor
    dense: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Of each request: query [R, H, d], keys and values [S, G, d]."""

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        return self.cache.transpose(1, 2).chunk(2, dim=-1)


MIXED = [
    Request(13, 17, True),
    Request(65, 1, True),
    Request(0, 0, False),
    Request(1, 64, True),
    Request(0, 5, True),
    Request(9, 70, False),
    Request(4, 6, False),
]


def make_batch(requests: list[Request], heads: Heads, dtype: torch.dtype = torch.float32) -> Batch:
    draws, block_size, padding = Draws(), 8, 3
    dense = [
        tuple(x.to(DEVICE, dtype) for x in draws.qkv(heads, r.rows, r.context + r.rows)) for r in requests
    ]
    sees = [draws.tree(r.rows) if r.is_tree else None for r in requests]
    sees_BRR = torch.zeros(len(requests), 64, 64, dtype=torch.bool)
    for request, mask in enumerate(sees):
        if mask is not None:
            sees_BRR[request, : len(mask), : len(mask)] = mask
    starts = F.pad(torch.tensor([r.rows for r in requests]).cumsum(0), (1, 0)).int()

    widest = max(-(-(r.context + r.rows) // block_size) for r in requests)
    tables = draws.permutation(widest * len(requests)).view(len(requests), widest).int()
    cache = torch.full((tables.numel(), heads.kv, block_size, 2 * heads.size), torch.nan, dtype=dtype)
    for table, (_, key, value) in zip(tables, dense, strict=True):
        for token, pair in enumerate(torch.cat([key, value], dim=-1)):
            cache[table[token // block_size], :, token % block_size] = pair

    # the rows as slices of one projection: their strides are not those of a dense tensor
    rows = [torch.cat([q, k[k.shape[0] - len(q) :], v[v.shape[0] - len(q) :]], 1) for q, k, v in dense]
    qkv = F.pad(torch.cat(rows), (0, 0, 0, 0, 0, padding), value=torch.nan)
    query, key, value = qkv.split([heads.query, heads.kv, heads.kv], dim=1)
    words = spread_words(pack_sees(sees_BRR), starts, len(qkv))
    lengths = torch.tensor([r.context + r.rows for r in requests], dtype=torch.int32)
    tensors = (x.to(DEVICE) for x in (query, key, value, cache, tables, starts, lengths))
    return Batch(*tensors, [m if m is None else m.to(DEVICE) for m in sees], words.to(DEVICE), dense)


def attend_pages(batch: Batch, scale: float) -> torch.Tensor:
    tables = batch.block_tables
    return attend_paged(
        batch.query_THd, *batch.caches, tables, batch.starts, batch.lengths, batch.sees, scale
    )


def test_a_paged_batch_gets_what_each_request_gets_alone():
    batch = make_batch(MIXED, SOME)
    output = attend_pages(batch, SOME.scale)
    for first, sees, dense in zip(batch.starts.tolist(), batch.sees, batch.dense, strict=False):
        rows = len(dense[0])
        mask = see_before(rows, DEVICE) if sees is None else sees
        expected = attend_densely(*dense, mask, SOME.scale)
        assert torch.equal(output[first : first + rows], expected)
    assert (output[batch.starts[-1] :] == 0).all()


# The kernels


def assert_close(dtype: torch.dtype, found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_rows", [5, 17, 32, 64])
@pytest.mark.parametrize("heads", [Heads(2, 2, 16), Heads(4, 1, 80)], ids=str)
def test_the_kernel_gives_the_ragged_rows_part(heads, max_rows, dtype):
    batch = make_batch(MIXED, heads, dtype)
    rows = (batch.query_THd, batch.key_TGd, batch.value_TGd, batch.words_T, batch.starts, heads.scale)
    expected, expected_lse = tree_attention.attend_ragged(*rows, max_rows)
    found, found_lse = tree_kernels.attend_ragged(*rows, max_rows)
    counts = batch.starts.diff().repeat_interleave(batch.starts.diff())
    mine = (counts <= max_rows).nonzero()[:, 0]
    assert len(mine) < len(found)
    assert_close(dtype, found[mine], expected[mine])
    torch.testing.assert_close(found_lse[mine], expected_lse[mine], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["HT", "TH"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_merges_as_torch_does(dtype, layout):
    draws, (rows, heads, size) = Draws(), (9, 6, 80)
    context, part = (draws.normal(rows, heads, size).to(DEVICE, dtype) for _ in range(2))
    lse_context, lse_part = (3 * draws.normal(rows, heads).to(DEVICE) for _ in range(2))
    words = torch.tensor([1, 3, 5, -1, 0, 0, 1, 1, 1], device=DEVICE)
    lse_context[6], lse_context[7] = torch.inf, -torch.inf
    context[6:8] = torch.nan
    part[4:6], lse_part[4:6] = torch.nan, torch.nan
    lse = lse_context.T.contiguous() if layout == "HT" else lse_context
    expected, found = context.clone(), context.clone()
    tree_attention.merge_states(expected, lse, part, lse_part, words, layout)
    tree_kernels.merge_states(found, lse, part, lse_part, words, layout)
    assert_close(dtype, found, expected)
    assert torch.equal(found[4:6], context[4:6])
    assert torch.equal(found[6:8], part[6:8])


@pytest.mark.parametrize("ways", [tree_attention, tree_kernels], ids=["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stock_attention_then_the_kernels_is_attention_of_the_batch(dtype, ways):
    """As a backend does it: the context of trees without a mask, everything else in full."""
    batch = make_batch(MIXED, SOME, dtype)
    expected = attend_pages(batch, SOME.scale)
    output, lse = torch.zeros_like(expected), torch.full((SOME.query, len(expected)), -torch.inf)
    for first, request, (query, key, value) in zip(batch.starts.tolist(), MIXED, batch.dense, strict=False):
        rows = slice(first, first + request.rows)
        if request.is_tree:
            context = slice(0, request.context)
            output[rows], part_lse = attend_context(query, key[context], value[context], SOME.scale)
            lse[:, rows] = part_lse.T
        else:
            output[rows] = expected[rows]
    part, part_lse = ways.attend_ragged(
        batch.query_THd, batch.key_TGd, batch.value_TGd, batch.words_T, batch.starts, SOME.scale
    )
    ways.merge_states(output, lse.to(DEVICE), part, part_lse, batch.words_T)
    assert_close(dtype, output, expected)


COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from serve import tree_kernels

def shared_bytes(kernel, capability, pointers, **sizes):
    types = {name: "i32" for name in kernel.arg_names}
    types |= {name: "*bf16" for name in ("query", "key", "value", "output", "rows") if name in types}
    types |= pointers | {name: "constexpr" for name in sizes}
    signature = {name: types[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).metadata.shared

for capability in (86, 90):
    print(shared_bytes(
        tree_kernels._attend_kernel, capability,
        {"words": "*i64", "query_starts": "*i32", "lse": "*fp32", "scale": "fp32"},
        HEADS_PER_KV=6, HEAD_SIZE=256, MOST_ROWS=64, TILE_ROWS=64, TILE_DIMS=64, DOT_TYPE=tl.bfloat16,
    ))
    print(shared_bytes(
        tree_kernels._merge_kernel, capability,
        {"words": "*i64", "lse_context": "*fp32", "lse_rows": "*fp32"},
        HEAD_SIZE=256, TILE_HEADS=4, TILE_DIMS=256,
    ))
"""


def test_the_kernels_compile_for_sm_86_and_sm_90(tmp_path):
    shared = [number for (number,) in run_apart(COMPILE, tmp_path)]
    assert len(shared) == 4
    assert max(shared) <= SHARED_BYTES
