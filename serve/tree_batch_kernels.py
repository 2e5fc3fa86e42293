"""`serve/tree_batch.py` and parts of `serve/tree_slots.py` in Triton: one launch where torch takes dozens.

A step is laid out, walked and committed here; its trees were grown in `serve/tree_grow_kernels.py`.

For trees on a GPU, where a step has no room for a hundred tiny launches.  Results are those of the twins,
ties included.  Grids depend on shapes alone and sizes are read on the device, so a CUDA graph can hold the
launches; nothing asks for more than sm_80.
"""
# ruff: noqa: PLR0913, PLR0917  (a kernel takes pointers and strides one by one)

# B=requests  L=slots  N=nodes, padded  R=rows of a request: the committed token, then the nodes
# S=request slots of the engine  P=requests that a step's buffers hold, >= B  T=rows of the step,
# or of its logits  E=tokens that a request can emit in a step
#
# One program has a whole request in its registers: R <= 64 rows, a vector of a warp.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from serve.tree import ROOT
from serve.tree_attention import MOST_ROWS, pack_sees, spread_words
from serve.tree_batch import Topology, WalkBatch, see_ancestors
from serve.tree_slots import begin_step

_ROOT = tl.constexpr(ROOT)
_ROWS = tl.constexpr(MOST_ROWS)
_DOUBLINGS = tl.constexpr(MOST_ROWS.bit_length() - 1)  # that reach from any row to the first

_PARTS = 8  # programs that share the rows of a long request
_PART_ROWS = tl.constexpr(128)  # that one of them copies at a time


@dataclass(frozen=True)
class Committed:
    """What a verified step comes to."""

    walk: WalkBatch
    tokens_BE: torch.Tensor
    """Emitted: the path's, then the target's own, then zeros.  int64"""
    num_tokens_B: torch.Tensor
    """How many of them.  int32, as vLLM's `RejectionSampler` returns it"""


def walk_and_commit(
    trees: Topology,
    draft_tokens_T: torch.Tensor,
    target_tokens_T: torch.Tensor,
    logit_starts_B1: torch.Tensor,
    num_slots: int,
    num_tokens: int,
) -> Committed:
    """What follows the sampling of a step: `serve.tree_batch.follow_trees` and `commit_tokens` in one launch.

    draft_tokens_T, target_tokens_T: by rows of the logits, integers of any width: the draft that a row holds
    (none where the committed token is), and the target's token after it.  logit_starts_B1: [B + 1], vLLM's
    cu_num_logits; a request's rows are its committed token's and those of the scheduled drafts, to which its
    tree is cut.  num_tokens: E.

    A chunk of a step's requests passes slices of its trees.
    """
    batch, num_nodes = trees.parents_BN.shape
    assert logit_starts_B1.shape == (batch + 1,), f"{logit_starts_B1.shape} for {batch} requests"
    assert num_nodes < MOST_ROWS, f"{num_nodes} nodes, a request has at most {MOST_ROWS} rows"
    assert num_tokens <= MOST_ROWS, f"{num_tokens} tokens, expected at most {MOST_ROWS}"
    for dense in (draft_tokens_T, target_tokens_T):
        assert dense.is_contiguous(), f"tokens have strides {dense.stride()}"
    device = target_tokens_T.device
    committed = Committed(
        walk=_allocate_walk(batch, num_slots, target_tokens_T),
        tokens_BE=torch.empty(batch, num_tokens, dtype=torch.int64, device=device),
        num_tokens_B=torch.empty(batch, dtype=torch.int32, device=device),
    )
    _commit_kernel[(batch,)](
        trees.parents_BN,
        trees.num_nodes_B,
        draft_tokens_T,
        target_tokens_T,
        logit_starts_B1,
        committed.walk.path_BL,
        committed.walk.num_accepted_B,
        committed.walk.bonus_B,
        committed.tokens_BE,
        committed.num_tokens_B,
        num_slots,
        num_tokens,
        *trees.parents_BN.stride(),
        num_warps=1,
    )
    return committed


def _allocate_walk(batch: int, num_slots: int, tokens: torch.Tensor) -> WalkBatch:
    assert num_slots < MOST_ROWS, f"{num_slots} slots, a request has at most {MOST_ROWS} rows"
    integers = {"dtype": torch.int64, "device": tokens.device}
    return WalkBatch(
        path_BL=torch.empty(batch, num_slots, **integers),
        num_accepted_B=torch.empty(batch, **integers),
        bonus_B=torch.empty(batch, dtype=tokens.dtype, device=tokens.device),
    )


@dataclass(frozen=True)
class StepBuffers:
    """What the layers of a step read about its trees, at addresses that a CUDA graph can hold."""

    trees: Topology
    """[P, N], [P, N] and [P], cut to the scheduled drafts."""
    words_PR: torch.Tensor
    """Who sees whom, as `serve.tree_attention.pack_sees`; a chain where there are no drafts.  int64"""
    first_row_P: torch.Tensor
    """Of the committed token; the nodes' rows follow.  int64"""
    num_rows_P: torch.Tensor
    """1 + drafts; 0 for a request that is no tree and for one that is absent.  int32"""
    context_lens_P: torch.Tensor
    """Tokens before the rows in flight.  int32, as FlashAttention's seqused_k"""
    words_T: torch.Tensor
    """As `serve.tree_attention.spread_words`.  int64"""
    positions: torch.Tensor
    """[T], or [3, T] for M-RoPE: each node at its depth after the committed token."""

    def cut(self, num_rows: int) -> "StepBuffers":
        """Views for a step of so many rows; those by request stay whole."""
        parts = vars(self) | {
            "words_T": self.words_T[:num_rows],
            "positions": self.positions[..., :num_rows],
        }
        return StepBuffers(**parts)


def allocate_step(max_requests: int, budget: int, positions: torch.Tensor) -> StepBuffers:
    """Buffers for steps of up to max_requests requests; positions: any tensor of the step's largest size."""
    assert 0 < budget < MOST_ROWS, f"budget is {budget}, a request has at most {MOST_ROWS} rows"
    long = {"dtype": torch.int64, "device": positions.device}
    return StepBuffers(
        trees=Topology(
            parents_BN=torch.full((max_requests, budget), ROOT, **long),
            depths_BN=torch.zeros(max_requests, budget, **long),
            num_nodes_B=torch.zeros(max_requests, **long),
        ),
        words_PR=torch.zeros(max_requests, 1 + budget, **long),
        first_row_P=torch.zeros(max_requests, **long),
        num_rows_P=torch.zeros(max_requests, dtype=torch.int32, device=positions.device),
        context_lens_P=torch.zeros(max_requests, dtype=torch.int32, device=positions.device),
        words_T=torch.zeros(positions.shape[-1], **long),
        positions=torch.zeros_like(positions, memory_format=torch.contiguous_format),
    )


def lay_out_step(
    planted: Topology,
    slots_B: torch.Tensor,
    num_drafts_B: torch.Tensor,
    query_starts_B1: torch.Tensor,
    seq_lens_B: torch.Tensor,
    positions: torch.Tensor,
    step: StepBuffers,
    num_trees: int = 0,
) -> None:
    """Fills the step's buffers, all of them, from the trees that wait in its requests' slots; one launch.

    Integers are of any width.  planted: by request slot, [S, N], [S, N] and [S].  query_starts_B1: the first
    row of each request, then the end of the last (vLLM's query_start_loc, which may go on); rows from there
    on are nobody's.  A request with drafts has 1 + drafts rows, its committed token's first; any other's last
    row is its committed token's.  seq_lens_B: with the rows in flight.  positions: [T] or [3, T], linear.
    num_trees: so many of the first requests are trees, also those whose every draft was left out, which have
    one row.
    """
    batch, (buffered, num_rows) = len(slots_B), step.words_PR.shape
    assert batch <= buffered, f"{batch} requests in buffers for {buffered}"
    assert positions.shape == step.positions.shape, f"{positions.shape} into {step.positions.shape}"
    assert positions.shape[-1:] == step.words_T.shape, f"{positions.shape} with words {step.words_T.shape}"
    assert planted.parents_BN.shape[1] + 1 == num_rows, f"{planted.parents_BN.shape} for {num_rows} rows"
    for trees in (planted, step.trees):
        for dense in (trees.parents_BN, trees.depths_BN):
            assert dense.is_contiguous(), f"trees have strides {dense.stride()}"
    for dense in (slots_B, num_drafts_B, query_starts_B1, seq_lens_B):
        assert dense.is_contiguous(), f"what is by request has strides {dense.stride()}"
    axes, axes_out = torch.atleast_2d(positions), torch.atleast_2d(step.positions)
    assert axes.stride(1) == axes_out.stride(1) == 1, f"rows of positions lie {axes.stride(1)} apart"
    _lay_out_kernel[buffered + 1, _PARTS](
        planted.parents_BN,
        planted.depths_BN,
        planted.num_nodes_B,
        slots_B,
        num_drafts_B,
        query_starts_B1,
        seq_lens_B,
        positions,
        step.trees.parents_BN,
        step.trees.depths_BN,
        step.trees.num_nodes_B,
        step.words_PR,
        step.first_row_P,
        step.num_rows_P,
        step.context_lens_P,
        step.words_T,
        step.positions,
        batch,
        positions.shape[-1],
        num_rows - 1,
        num_trees,
        axes.stride(0),
        axes_out.stride(0),
        AXES=len(axes),
        num_warps=1,
    )


def lay_out_step_slowly(
    planted: Topology,
    slots_B: torch.Tensor,
    num_drafts_B: torch.Tensor,
    query_starts_B1: torch.Tensor,
    seq_lens_B: torch.Tensor,
    positions: torch.Tensor,
    step: StepBuffers,
    num_trees: int = 0,
) -> None:
    """The twin of `lay_out_step`, in torch and on any device."""
    batch, num_rows = len(slots_B), step.words_PR.shape[1]
    numbers_N = torch.arange(num_rows - 1, device=positions.device)
    num_drafts_B, starts_B1 = num_drafts_B.long(), query_starts_B1[: batch + 1].long()
    num_nodes_B = torch.minimum(planted.num_nodes_B[slots_B], num_drafts_B)
    is_node_BN = numbers_N < num_nodes_B[:, None]
    parents_BN = planted.parents_BN[slots_B].where(is_node_BN, ROOT)
    depths_BN = planted.depths_BN[slots_B].where(is_node_BN, 0)
    seen_BN = parents_BN.where((num_drafts_B > 0)[:, None], numbers_N - 1)  # without drafts, a chain
    words_BR = pack_sees(see_ancestors(seen_BN, num_rows))
    chain_R = pack_sees(see_ancestors(numbers_N[None] - 1, num_rows))[0]
    trees = Topology(parents_BN, depths_BN, num_nodes_B)
    first_row_B = starts_B1[1:] - 1 - num_drafts_B
    is_tree_B = (num_drafts_B > 0) | (torch.arange(batch, device=positions.device) < num_trees)
    filled = [
        (step.trees.parents_BN, parents_BN, ROOT),
        (step.trees.depths_BN, depths_BN, 0),
        (step.trees.num_nodes_B, num_nodes_B, 0),
        (step.words_PR, words_BR, chain_R),
        (step.first_row_P, first_row_B, 0),
        (step.num_rows_P, (1 + num_drafts_B).where(is_tree_B, 0), 0),
        (step.context_lens_P, seq_lens_B[:batch] - starts_B1.diff(), 0),
    ]
    for buffer, of_requests, of_absent in filled:
        buffer[:batch] = of_requests
        buffer[batch:] = of_absent
    step.words_T.copy_(spread_words(words_BR, starts_B1, len(step.words_T)))
    step.positions.copy_(begin_step(trees, first_row_B, num_rows).move_positions(positions))


@triton.jit
def _close(row: tl.tensor, up: tl.tensor) -> tl.tensor:
    """The words of all rows.  up: the row above a row; the first row's is its own."""
    word = tl.full([_ROWS], 1, tl.int64) << row.to(tl.int64)
    for _ in tl.static_range(_DOUBLINGS):  # a word reaches twice as far up after each
        word |= tl.gather(word, up, 0)
        up = tl.gather(up, up, 0)
    return word


@triton.jit
def _follow(
    parent: tl.tensor, node_token: tl.tensor, targets: tl.tensor, target_stride: int, num_slots: int
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The path and then ROOT, its tokens, the bonus and then zeros, the path's length, the bonus.

    parent, node_token: of each node; the parent of what is no node is no row.  targets: where the target's
    token after the committed token is.
    """
    number = tl.arange(0, _ROWS)
    path = tl.full([_ROWS], _ROOT, tl.int32)
    tokens = tl.zeros([_ROWS], tl.int64)
    count = 0
    token = tl.load(targets).to(tl.int64)
    node = _first_child(parent, node_token, _ROOT, token)
    while (node < _ROWS) & (count < num_slots):
        path = tl.where(number == count, node, path)
        tokens = tl.where(number == count, token, tokens)
        count += 1
        token = tl.load(targets + (node + 1) * target_stride).to(tl.int64)
        node = _first_child(parent, node_token, node, token)
    return path, tl.where(number == count, token, tokens), count, token


@triton.jit
def _first_child(parent: tl.tensor, node_token: tl.tensor, of: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The first child with this token; _ROWS without one."""
    number = tl.arange(0, _ROWS)
    return tl.min(tl.where((parent == of) & (node_token == token), number, _ROWS), axis=0)


@triton.jit
def _commit_kernel(
    parents: tl.tensor,
    node_counts: tl.tensor,
    draft_tokens: tl.tensor,
    target_tokens: tl.tensor,
    logit_starts: tl.tensor,
    path: tl.tensor,
    accepted_counts: tl.tensor,
    bonus: tl.tensor,
    tokens: tl.tensor,
    token_counts: tl.tensor,
    num_slots: int,
    num_tokens: int,
    parents_request_stride: int,
    parents_node_stride: int,
) -> None:
    """One program a request."""
    request = tl.program_id(0).to(tl.int64)
    first_logit = tl.load(logit_starts + request).to(tl.int64)
    num_drafts = tl.load(logit_starts + request + 1) - first_logit - 1
    number = tl.arange(0, _ROWS)
    is_node = number < tl.minimum(tl.load(node_counts + request), num_drafts)
    parents += request * parents_request_stride + number * parents_node_stride
    nodes, emitted, count, last = _follow(
        tl.load(parents, mask=is_node, other=_ROWS),
        tl.load(draft_tokens + first_logit + 1 + number, mask=is_node, other=0),
        target_tokens + first_logit,
        1,
        num_slots,
    )
    tl.store(accepted_counts + request, count)
    tl.store(bonus + request, last.to(bonus.dtype.element_ty))
    tl.store(tokens + request * num_tokens + number, emitted, mask=number < num_tokens)
    tl.store(token_counts + request, count + 1)
    tl.store(path + request * num_slots + number, nodes, mask=number < num_slots)


# These come in all values, so none is to be compiled for.
@triton.jit(
    do_not_specialize=["num_requests", "num_positions", "num_trees", "axis_stride", "moved_axis_stride"]
)
def _lay_out_kernel(
    planted_parents: tl.tensor,
    planted_depths: tl.tensor,
    planted_counts: tl.tensor,
    slots: tl.tensor,
    draft_counts: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    positions: tl.tensor,
    parents: tl.tensor,
    depths: tl.tensor,
    node_counts: tl.tensor,
    request_words: tl.tensor,
    first_rows: tl.tensor,
    row_counts: tl.tensor,
    context_lens: tl.tensor,
    words: tl.tensor,
    moved: tl.tensor,
    num_requests: int,
    num_positions: int,
    most_nodes: int,
    num_trees: int,
    axis_stride: int,
    moved_axis_stride: int,
    AXES: tl.constexpr,
) -> None:
    """The first program of a request has its tree; all of its programs share the rows of no tree.

    After those of the buffers' requests come programs for the rows that are nobody's.
    """
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_nobody = request == tl.num_programs(0) - 1
    is_request = request < num_requests
    # an absent request starts and ends where the last one ends
    start = tl.load(query_starts + tl.minimum(request, num_requests)).to(tl.int64)
    end = tl.load(query_starts + tl.minimum(request + 1, num_requests)).to(tl.int64)
    end = tl.where(is_nobody, num_positions, end)
    is_short = (end - start <= most_nodes + 1) & (request < tl.num_programs(0) - 1)

    if (part == 0) & (request < tl.num_programs(0) - 1):
        num_drafts = tl.load(draft_counts + request, mask=is_request, other=0).to(tl.int32)
        slot = tl.load(slots + request, mask=is_request, other=0).to(tl.int64)
        planted_count = tl.load(planted_counts + slot).to(tl.int32)
        num_nodes = tl.minimum(planted_count, num_drafts)
        first = tl.where(is_request, end - 1 - num_drafts, 0)
        row = tl.arange(0, _ROWS)
        is_node = (row > 0) & (row <= num_nodes)
        of_tree = slot * most_nodes + row - 1
        up = tl.load(planted_parents + of_tree, mask=is_node, other=_ROOT).to(tl.int32) + 1
        depth = tl.load(planted_depths + of_tree, mask=is_node, other=0).to(tl.int32)
        word = _close(row, tl.where(num_drafts > 0, up, tl.maximum(row - 1, 0)))

        at = request * most_nodes + row - 1
        inside = (row > 0) & (row <= most_nodes)
        tl.store(parents + at, up - 1, mask=inside)
        tl.store(depths + at, depth, mask=inside)
        tl.store(node_counts + request, num_nodes)
        tl.store(request_words + request * (most_nodes + 1) + row, word, mask=row <= most_nodes)
        tl.store(first_rows + request, first)
        is_tree = is_request & ((num_drafts > 0) | (request < num_trees))
        tl.store(row_counts + request, tl.where(is_tree, num_drafts + 1, 0))
        length = tl.load(seq_lens + request, mask=is_request, other=0)
        tl.store(context_lens + request, (length - (end - start)).to(tl.int32))

        is_row = row < tl.where(is_short, end - start, 0)
        tl.store(words + start + row, word, mask=is_row)
        for axis in tl.static_range(AXES):
            linear = positions + axis * axis_stride + start
            position = tl.load(linear + tl.where(is_node, 0, row), mask=is_row, other=0)
            tl.store(moved + axis * moved_axis_stride + start + row, position + depth, mask=is_row)

    if not is_short:
        for begin in range(start + part * _PART_ROWS, end, tl.num_programs(1) * _PART_ROWS):
            at = begin + tl.arange(0, _PART_ROWS)
            is_row = at < end
            tl.store(words + at, tl.zeros([_PART_ROWS], tl.int64), mask=is_row)
            for axis in tl.static_range(AXES):
                position = tl.load(positions + axis * axis_stride + at, mask=is_row, other=0)
                tl.store(moved + axis * moved_axis_stride + at, position, mask=is_row)
