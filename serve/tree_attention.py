"""Attention of tree rows, by definition and in the parts a server computes it in.

A request has C tokens of context and, after them, R rows in flight: its committed token, then the nodes of
its draft tree, parents first.  Row i attends to the whole context and to the rows it `sees`: its ancestors
and itself.  What stands here is torch on any device, slow and obvious: the reference of
`serve/tree_kernels.py`, and all that a backend on a CPU needs.  Positions and the cache's writing are the
caller's.

A backend on a GPU runs its stock kernel over the context without a mask, `attend_ragged` over the rows, and
`merge_states`; none is wired up yet.  The one on a CPU gathers and masks for itself (`gather_paged`,
`attend_masked`), because a drafter's layers may slide; `attend_paged` is what tests hold kernels against.
"""

# B=requests  T=rows of the batch, request after request, then padding  R=rows of a request
# C=tokens of its context  S=C+R  K=any number of keys  H=query heads  G=key/value heads  d=head size
# N=blocks of the cache  P=slots of a block  M=blocks of a request
# Query head h reads key/value head h // (H // G).  scale multiplies the scores.  Arithmetic is fp32, outputs
# have the query's dtype.  lse, fp32, is the log of the sum of exp(score) over the keys: -inf without keys.

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch.nn import functional as F

MOST_ROWS = 64
"""Rows of a request whose mask fits into a word."""

LseLayout = Literal["TH", "HT"]
"""HT is what vLLM's `flash_attn_varlen_func` returns."""


def attend_masked(
    query_RHd: torch.Tensor,
    key_KGd: torch.Tensor,
    value_KGd: torch.Tensor,
    mask_RK: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * q k) v over the keys that the mask lets through. [R, H, d]; zeros without any"""
    copies = query_RHd.shape[1] // key_KGd.shape[1]
    key_KHd = key_KGd.float().repeat_interleave(copies, dim=1)
    value_KHd = value_KGd.float().repeat_interleave(copies, dim=1)
    score_HRK = torch.einsum("rhd,khd->hrk", query_RHd.float(), key_KHd) * scale
    weight_HRK = score_HRK.masked_fill(~mask_RK, -torch.inf).softmax(dim=2)
    weight_HRK = weight_HRK.masked_fill(~mask_RK, 0)  # a row without keys has got NaN
    return torch.einsum("hrk,khd->rhd", weight_HRK, value_KHd).to(query_RHd.dtype)


def attend_densely(
    query_RHd: torch.Tensor,
    key_SGd: torch.Tensor,
    value_SGd: torch.Tensor,
    sees_RR: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one request's rows: the definition. [R, H, d]

    sees_RR: bool, as `serve.tree.ancestors` gives it.
    """
    rows, context = len(query_RHd), len(key_SGd) - len(query_RHd)
    assert sees_RR.shape == (rows, rows), f"{rows} rows with a mask of {tuple(sees_RR.shape)}"
    mask_RS = F.pad(sees_RR, (context, 0), value=True)
    return attend_masked(query_RHd, key_SGd, value_SGd, mask_RS, scale)


def attend_context(
    query_RHd: torch.Tensor, key_CGd: torch.Tensor, value_CGd: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of one request's context, which every row sees: output [R, H, d] and lse [R, H]."""
    return _attend_part(query_RHd, key_CGd, value_CGd, None, scale)


def attend_rows(
    query_RHd: torch.Tensor,
    key_RGd: torch.Tensor,
    value_RGd: torch.Tensor,
    sees_RR: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of one request's rows in flight: output [R, H, d] and lse [R, H]."""
    return _attend_part(query_RHd, key_RGd, value_RGd, sees_RR, scale)


def _attend_part(
    query_RHd: torch.Tensor,
    key_KGd: torch.Tensor,
    value_KGd: torch.Tensor,
    mask_RK: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    query_RGQd = query_RHd.float().unflatten(1, (key_KGd.shape[1], -1))  # Q=query heads of a key/value head
    score_RGQK = torch.einsum("rgqd,kgd->rgqk", query_RGQd, key_KGd.float()) * scale
    if mask_RK is not None:
        score_RGQK = score_RGQK.masked_fill(~mask_RK[:, None, None], -torch.inf)
    lse_RGQ = score_RGQK.logsumexp(dim=3)
    # nothing is subtracted where there are no keys: -inf - -inf would be NaN
    weight_RGQK = (score_RGQK - lse_RGQ.masked_fill(lse_RGQ == -torch.inf, 0)[..., None]).exp()
    output_RGQd = torch.einsum("rgqk,kgd->rgqd", weight_RGQK, value_KGd.float())
    return output_RGQd.flatten(1, 2).to(query_RHd.dtype), lse_RGQ.flatten(1)


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, from that over each: outputs [..., d], lse [...].

    Section 2.2 of arXiv 2501.01005.  A part with an lse of -inf is not looked at, nor one with +inf, which
    is what FlashAttention-2 gives without keys (`vllm.v1.attention.ops.triton_merge_attn_states`).
    """
    lse_a, lse_b = (lse.masked_fill(lse == torch.inf, -torch.inf) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == -torch.inf, 0)
    share_a, share_b = (_share(out, (part - base).exp()) for out, part in ((out_a, lse_a), (out_b, lse_b)))
    return (share_a + share_b).to(out_a.dtype), lse


def _share(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """weight * out; 0 for no weight, whatever the output holds."""
    return (out.float() * weight[..., None]).where(weight[..., None] > 0, 0)


def pack_sees(sees_BRR: torch.Tensor) -> torch.Tensor:
    """A word a row: bit j of word i says that row i sees row j. int64 [B, R]; bit 63 makes it negative."""
    rows = sees_BRR.shape[2]
    assert rows <= MOST_ROWS, f"{rows} rows do not fit into a word"
    return (sees_BRR.long() << torch.arange(rows, device=sees_BRR.device)).sum(dim=2)


def unpack_sees(words_BR: torch.Tensor) -> torch.Tensor:
    """The masks of `pack_sees`. bool [B, R, R]"""
    places = torch.arange(words_BR.shape[1], device=words_BR.device)
    return (words_BR[..., None] >> places & 1).bool()


def spread_words(words_BR: torch.Tensor, query_starts_B1: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The words of a batch in the order of its rows. int64 [T], T = num_rows

    words_BR: of `pack_sees`; zeros for a request that is no tree.  A request may have fewer rows than words
    (a prefix of a tree is one).  0, which no row of a tree has, says "not mine" to `attend_ragged` and
    `merge_states`: also rows of a request with more rows than words, and padding, get it.
    query_starts_B1: int [B + 1], the first row of each request and the end of the last (vLLM's
    query_start_loc); an absent request has no rows.  No value is read back to the host.
    """
    row_T = torch.arange(num_rows, device=words_BR.device, dtype=query_starts_B1.dtype)
    request_T = torch.searchsorted(query_starts_B1[1:], row_T, right=True).clamp(max=len(words_BR) - 1)
    first_T, end_T = query_starts_B1[request_T], query_starts_B1[request_T + 1]
    most = words_BR.shape[1]
    is_row_T = (row_T < end_T) & (end_T - first_T <= most)
    return words_BR[request_T, (row_T - first_T).clamp(max=most - 1)].where(is_row_T, 0)


def attend_ragged(
    query_THd: torch.Tensor,
    key_TGd: torch.Tensor,
    value_TGd: torch.Tensor,
    words_T: torch.Tensor,
    query_starts_B1: torch.Tensor,
    scale: float,
    max_rows: int = MOST_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_rows` for each request of at most max_rows rows: output [T, H, d] and lse [T, H].

    key_TGd, value_TGd: of the rows in flight, as the layer has just made them.  words_T: of `spread_words`.
    The rows of longer requests, and padding, are the caller's: what is returned for them means nothing.
    """
    output_THd = torch.zeros_like(query_THd)
    lse_TH = query_THd.new_full(query_THd.shape[:2], -torch.inf, dtype=torch.float32)
    for first, end in pairwise(query_starts_B1.tolist()):
        if 0 < end - first <= max_rows:
            rows = slice(first, end)
            sees_RR = unpack_sees(words_T[None, rows])[0]
            output_THd[rows], lse_TH[rows] = attend_rows(
                query_THd[rows], key_TGd[rows], value_TGd[rows], sees_RR, scale
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
    """Merges the rows' part into the context's, in place; rows with word 0 stay as they are.

    output_THd, lse_context: attention over the context, its lse as the layout says.
    rows_THd, lse_rows_TH: of `attend_ragged`.
    """
    lse_context_TH = lse_context.T if lse_layout == "HT" else lse_context
    merged_THd, _ = merge(output_THd, lse_context_TH, rows_THd, lse_rows_TH)
    output_THd.copy_(merged_THd.where((words_T != 0)[:, None, None], output_THd))


def gather_paged(cache_NPGd: torch.Tensor, block_table_M: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a request, in their order. [length, G, d]"""
    num_blocks = -(-length // cache_NPGd.shape[1])
    return cache_NPGd[block_table_M[:num_blocks].long()].flatten(0, 1)[:length]


def attend_paged(
    query_THd: torch.Tensor,
    key_cache_NPGd: torch.Tensor,
    value_cache_NPGd: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_starts_B1: torch.Tensor,
    sequence_lengths_B: torch.Tensor,
    sees: Sequence[torch.Tensor | None],
    scale: float,
) -> torch.Tensor:
    """`attend_densely` for each request of a batch, from a paged cache. [T, H, d]; zeros for padding

    A backend of vLLM 0.32 passes, after the keys and values of this step have been written,
      * caches: `kv_cache.transpose(1, 2).split(d, dim=-1)` of vLLM's [N, G, P, 2 * d] (any strides will do):
        what `FlashAttentionImpl.forward` reads, and a CPU backend that writes keys into [..., :d] and values
        into [..., d:] instead of the packed layout of `CPUAttentionBackendImpl`;
      * block_table, query_start_loc and seq_lens of its metadata (CPU or FlashAttention alike); a sequence's
        length is C + R, the rows in flight included;
      * for each request its rows' mask, bool [R, R], or None for the causal mask of ordinary decoding and
        prefill.  All ones is the mask of a block-diffusion drafter's queries (causal=False).
    A sliding window counts slots, not depths, so it has no meaning in a tree: a layer that has one calls
    `gather_paged` and `attend_masked` with a mask of its own.
    """
    output_THd = torch.zeros_like(query_THd)
    bounds, lengths = pairwise(query_starts_B1.tolist()), sequence_lengths_B.tolist()
    for (first, end), length, table_M, mask in zip(bounds, lengths, block_tables_BM, sees, strict=True):
        if first == end:
            continue
        assert end - first <= length, f"rows {first} to {end} in a sequence of {length}"
        key_SGd = gather_paged(key_cache_NPGd, table_M, length)
        value_SGd = gather_paged(value_cache_NPGd, table_M, length)
        sees_RR = see_before(end - first, query_THd.device) if mask is None else mask
        output_THd[first:end] = attend_densely(query_THd[first:end], key_SGd, value_SGd, sees_RR, scale)
    return output_THd


def see_before(rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The causal mask: each row sees those before it and itself. bool [R, R]"""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
