"""serve/tree_batch_kernels.py against torch and the heap: interpreted on a CPU, compiled on a GPU."""

# B=requests  L=slots  C=candidates of a slot  N=nodes, padded  R=rows: the committed token, then the nodes
# S=request slots  P=requests that the buffers hold  T=rows of the step or of its logits

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from kernel_compile import run_apart
from tree_draws import DEVICE, IS_CUDA, SLOTS, assert_same, draw_scores, draw_trees

from serve import tree_batch
from serve.tree import ROOT
from serve.tree_attention import pack_sees
from serve.tree_batch import Topology, see_ancestors
from serve.tree_batch_kernels import (
    Committed,
    StepBuffers,
    allocate_step,
    lay_out_step,
    lay_out_step_slowly,
    walk_and_commit,
)
from serve.tree_slots import commit_tokens

SHARED_BYTES = 99 * 1024  # that sm_86 gives one block of threads
STEPS = range(300, 330)
PACKED, WALKED = range(100, 150), range(200, 250)


# Steps


@dataclass(frozen=True)
class Step:
    planted: Topology
    slots_B: torch.Tensor
    num_drafts_B: torch.Tensor
    query_starts_B1: torch.Tensor
    seq_lens_B: torch.Tensor
    positions: torch.Tensor
    num_slots: int
    buffered: int

    @property
    def inputs(self) -> tuple[torch.Tensor | Topology, ...]:
        counts = (self.slots_B, self.num_drafts_B, self.query_starts_B1, self.seq_lens_B)
        return (self.planted, *counts, self.positions)

    @property
    def num_rows(self) -> int:
        return 1 + self.planted.parents_BN.shape[1]

    def empty(self) -> StepBuffers:
        """Buffers full of what another step could have left."""
        buffers = allocate_step(self.buffered, self.num_rows - 1, self.positions)
        for part in (*vars(buffers.trees).values(), *vars(buffers).values()):
            if isinstance(part, torch.Tensor):
                part.fill_(-5)
        return buffers


def draw_planted(rng: np.random.Generator, budget: int, num_slots: int) -> Topology:
    """Trees in most slots, some of them small; chains without nodes in the others, as at first."""
    scores = draw_scores(rng, SLOTS, num_slots, min(budget, 4), "unsorted")
    trees = tree_batch.grow_trees(scores, budget)
    is_planted_S = torch.from_numpy(rng.random(SLOTS) < 0.8).to(DEVICE)
    chain_N = torch.arange(budget, device=DEVICE)
    return Topology(
        trees.parents_BN.where(is_planted_S[:, None], chain_N - 1),
        trees.depths_BN.where(is_planted_S[:, None], chain_N + 1),
        trees.num_nodes_B.where(is_planted_S, 0),
    )


def draw_step(seed: int, axes: tuple[int, ...] = ()) -> Step:
    """Requests with all of their drafts, with some, or with none: then with few rows or with many."""
    rng = np.random.default_rng(seed)
    batch, absent = int(rng.integers(1, 8)), int(rng.integers(0, 4))
    budget = [1, 4, 15, 31, 63][seed % 5]
    num_slots = min(budget, int(rng.choice([1, 3, 7, 15])))
    most = 1 + budget
    drafts_B = rng.choice([0, int(rng.integers(0, budget + 1)), budget], batch)
    without_B = rng.choice([1, 2, most, most + 1, 150, 1100], batch, p=[0.3, 0.1, 0.2, 0.2, 0.15, 0.05])
    rows_B = np.where(drafts_B > 0, 1 + drafts_B, without_B)
    starts_B1 = np.concatenate([[0], rows_B.cumsum()])
    num_positions = int(starts_B1[-1] + rng.choice([0, 3, 200]))
    lengths_B = rows_B + rng.integers(0, 1000, batch)

    def on_device(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.array(values)).to(DEVICE, dtype)

    return Step(
        planted=draw_planted(rng, budget, num_slots),
        slots_B=on_device(rng.permutation(SLOTS)[:batch], [torch.int32, torch.int64][seed % 2]),
        num_drafts_B=on_device(drafts_B, [torch.int64, torch.int32][seed % 2]),
        query_starts_B1=on_device(np.concatenate([starts_B1, [-9] * absent]), torch.int32),
        seq_lens_B=on_device(np.concatenate([lengths_B, [-9] * absent]), torch.int32),
        positions=on_device(rng.integers(0, 10_000, (*axes, num_positions)), torch.int64),
        num_slots=num_slots,
        buffered=batch + absent,
    )


def chain_words(count: int) -> torch.Tensor:
    return pack_sees(torch.ones(1, count, count, dtype=torch.bool).tril())[0]


def lay_out_in_loops(step: Step, num_trees: int = 0) -> StepBuffers:
    """What `lay_out_step` promises, request by request and row by row; on a CPU."""
    buffers = allocate_step(step.buffered, step.num_rows - 1, step.positions.cpu())
    buffers.words_PR[:] = chain_words(step.num_rows)
    buffers.positions.copy_(step.positions)
    starts = step.query_starts_B1.tolist()
    for request, (slot, drafts) in enumerate(
        zip(step.slots_B.tolist(), step.num_drafts_B.tolist(), strict=True)
    ):
        start, end = starts[request], starts[request + 1]
        first = end - 1 - drafts
        buffers.first_row_P[request] = first
        buffers.num_rows_P[request] = 1 + drafts if drafts or request < num_trees else 0
        buffers.context_lens_P[request] = step.seq_lens_B[request] - (end - start)
        if drafts:
            words = [1, *(1 | 1 << row for row in range(1, step.num_rows))]
            nodes = min(drafts, int(step.planted.num_nodes_B[slot]))
            buffers.trees.num_nodes_B[request] = nodes
            for node in range(nodes):
                parent, depth = int(step.planted.parents_BN[slot, node]), step.planted.depths_BN[slot, node]
                words[1 + node] = words[1 + parent] | 1 << 1 + node
                buffers.trees.parents_BN[request, node] = parent
                buffers.trees.depths_BN[request, node] = depth
                position = step.positions[..., first] + depth
                buffers.positions[..., first + 1 + node] = position
            signed = [word - (word >> 63 << 64) for word in words]
            buffers.words_PR[request] = torch.tensor(signed)
        if end - start <= step.num_rows:
            buffers.words_T[start:end] = buffers.words_PR[request, : end - start]
    return buffers


def to_host(buffers: StepBuffers) -> StepBuffers:
    return StepBuffers(
        **{
            name: Topology(*(each.cpu() for each in vars(part).values()))
            if isinstance(part, Topology)
            else part.cpu()
            for name, part in vars(buffers).items()
        }
    )


@pytest.mark.parametrize("way", [lay_out_step, lay_out_step_slowly], ids=["triton", "torch"])
@pytest.mark.parametrize("axes", [(), (3,)], ids=["linear", "mrope"])
@pytest.mark.parametrize("seed", STEPS)
def test_a_step_is_laid_out_as_loops_do_it(seed, axes, way):
    step = draw_step(seed, axes)
    given, buffers = step.positions.clone(), step.empty()
    way(*step.inputs, buffers)
    assert_same(to_host(buffers), lay_out_in_loops(step))
    assert torch.equal(step.positions, given)  # the runner still needs the linear ones


@pytest.mark.parametrize("way", [lay_out_step, lay_out_step_slowly], ids=["triton", "torch"])
@pytest.mark.parametrize("seed", STEPS)
def test_a_tree_whose_drafts_are_all_left_out_has_one_row(seed, way):
    step = draw_step(seed)
    num_trees, buffers = (len(step.slots_B) + 1) // 2, step.empty()
    way(*step.inputs, buffers, num_trees)
    expected = lay_out_in_loops(step, num_trees)
    assert_same(to_host(buffers), expected)
    assert (expected.num_rows_P[:num_trees] > 0).all()


def test_a_step_that_is_shorter_than_the_buffers_leaves_the_rest_alone():
    step = draw_step(302, (3,))
    num_rows = step.positions.shape[1]
    wide = torch.nn.functional.pad(step.positions, (0, 7))
    buffers, exact = allocate_step(step.buffered, step.num_rows - 1, wide), step.empty()
    buffers.words_T.fill_(-5)
    lay_out_step(*step.inputs, buffers.cut(num_rows))
    lay_out_step(*step.inputs, exact)
    assert_same(buffers.cut(num_rows), exact)
    assert (buffers.words_T[num_rows:] == -5).all()
    assert (buffers.positions[:, num_rows:] == 0).all()


def test_the_drawn_steps_have_requests_of_every_kind():
    steps = [draw_step(seed) for seed in STEPS]
    drafts = torch.cat([step.num_drafts_B.long() for step in steps])
    planted = torch.cat([step.planted.num_nodes_B[step.slots_B] for step in steps])
    budgets = torch.cat([torch.full_like(step.num_drafts_B.long(), step.num_rows - 1) for step in steps])
    rows = torch.cat([step.query_starts_B1[: 1 + len(step.slots_B)].diff() for step in steps])
    assert ((drafts > 0) & (drafts < planted)).sum() > 5
    assert ((drafts > planted) & (planted > 0)).sum() > 5
    assert ((drafts > 0) & (planted == 0)).sum() > 5
    assert ((drafts == 0) & (rows > 1) & (rows <= 1 + budgets)).sum() > 5
    assert ((drafts == 0) & (rows > 1 + budgets)).sum() > 5
    assert (rows > 1024).sum() > 0


def step_of(planted: Topology, num_drafts_B: torch.Tensor, num_slots: int) -> Step:
    """Requests in the slots of their numbers, with so many drafts."""
    batch, rows_B = len(num_drafts_B), 1 + num_drafts_B
    starts_B1 = torch.nn.functional.pad(rows_B.cumsum(0), (1, 0)).int()
    positions = torch.arange(int(starts_B1[-1]), device=DEVICE)
    slots_B = torch.arange(batch, device=DEVICE)
    lengths_B = (rows_B + 5).int()
    return Step(planted, slots_B, num_drafts_B, starts_B1, lengths_B, positions, num_slots, batch)


def assert_laid_out_alike(step: Step) -> StepBuffers:
    mine, expected = step.empty(), step.empty()
    lay_out_step(*step.inputs, mine)
    lay_out_step_slowly(*step.inputs, expected)
    assert_same(mine, expected)
    return mine


@pytest.mark.parametrize("seed", PACKED)
def test_the_words_of_whole_trees_are_the_packed_masks(seed):
    trees, num_slots = draw_trees(seed)
    planted = Topology(trees.parents_BN, trees.depths_BN, trees.num_nodes_B)
    full_B = torch.full_like(trees.num_nodes_B, trees.parents_BN.shape[1])
    words_BR = assert_laid_out_alike(step_of(planted, full_B, num_slots)).words_PR
    assert torch.equal(words_BR, pack_sees(see_ancestors(trees.parents_BN, num_slots)))


@pytest.mark.parametrize("cut", [0, 1, 40, 63])
def test_a_cut_makes_padding_of_nodes_and_no_depth_is_too_deep(cut):
    chain_BN = torch.arange(-1, 62, device=DEVICE)[None]
    planted = Topology(chain_BN, chain_BN + 2, torch.tensor([63], device=DEVICE))
    words_BR = assert_laid_out_alike(step_of(planted, torch.tensor([cut], device=DEVICE), 63)).words_PR
    if cut:  # without drafts a request's words are a chain's, whatever is planted
        expected = chain_BN.where(torch.arange(63, device=DEVICE) < cut, ROOT)
        assert torch.equal(words_BR, pack_sees(see_ancestors(expected, 63)))
        assert (words_BR[0, 63] == -1) == (cut == 63)


# Committing


@dataclass(frozen=True)
class Verified:
    """A step and what was drawn at the rows of its logits."""

    trees: Topology
    """As planted: not yet cut to the scheduled drafts."""
    draft_tokens_T: torch.Tensor
    target_tokens_T: torch.Tensor
    logit_starts_B1: torch.Tensor
    num_slots: int
    num_tokens: int

    def commit(self, requests: slice = slice(None)) -> Committed:
        parts = (self.trees.parents_BN, self.trees.depths_BN, self.trees.num_nodes_B)
        first, end, _ = requests.indices(len(self.logit_starts_B1) - 1)
        starts = self.logit_starts_B1[first : end + 1]
        rows = slice(int(starts[0]), int(starts[-1]))
        return walk_and_commit(
            Topology(*(part[requests] for part in parts)),
            self.draft_tokens_T[rows],
            self.target_tokens_T[rows],
            starts - starts[0],
            self.num_slots,
            self.num_tokens,
        )


def draw_verified(seed: int) -> Verified:
    step = draw_step(seed)
    rng = np.random.default_rng([seed, 1])
    counts_B = 1 + step.num_drafts_B.long()
    starts_B1 = torch.nn.functional.pad(counts_B.cumsum(0), (1, 0)).int()
    total = int(starts_B1[-1])
    drafts_T = torch.from_numpy(rng.integers(1, 3, total)).to(DEVICE, torch.int32)
    drafts_T[torch.from_numpy(rng.random(total) < 0.1).to(DEVICE)] = -1  # vLLM's placeholder
    return Verified(
        Topology(*(part[step.slots_B] for part in vars(step.planted).values())),
        drafts_T,
        torch.from_numpy(rng.integers(1, 3, total)).to(DEVICE),
        starts_B1,
        step.num_slots,
        step.num_rows,
    )


def commit_by_twins(verified: Verified) -> Committed:
    """As `serve.seam.verifier` does it."""
    starts_B, counts_B = verified.logit_starts_B1[:-1].long(), verified.logit_starts_B1.diff().long()
    cut_B = torch.minimum(verified.trees.num_nodes_B, counts_B - 1)
    topology = Topology(verified.trees.parents_BN, verified.trees.depths_BN, cut_B)
    numbers_R = torch.arange(1 + verified.trees.parents_BN.shape[1], device=DEVICE)
    rows_BR = starts_B[:, None] + numbers_R.where(numbers_R < counts_B[:, None], 0)
    drafts_BN = verified.draft_tokens_T[rows_BR[:, 1:]].long()
    target_BR = verified.target_tokens_T[rows_BR]
    walk = tree_batch.follow_trees(topology, drafts_BN, target_BR, verified.num_slots)
    return Committed(walk, *commit_tokens(walk, drafts_BN, verified.num_tokens))


def verify_whole(seed: int) -> Verified:
    """Trees with all of their drafts; one token or three, so that paths are long and siblings share some."""
    trees, num_slots = draw_trees(seed)
    rng = np.random.default_rng(seed)
    batch, budget = trees.parents_BN.shape
    total, num_tokens = batch * (1 + budget), [1, 3][seed % 2]
    return Verified(
        Topology(trees.parents_BN, trees.depths_BN, trees.num_nodes_B),
        torch.from_numpy(rng.integers(0, num_tokens, total)).to(DEVICE, torch.int32),
        torch.from_numpy(rng.integers(0, num_tokens, total)).to(DEVICE),
        torch.arange(0, total + 1, 1 + budget, device=DEVICE, dtype=torch.int32),
        num_slots,
        1 + budget,
    )


@pytest.mark.parametrize("seed", WALKED)
def test_the_walks_of_whole_trees_are_the_twins(seed):
    verified = verify_whole(seed)
    assert_same(verified.commit(), commit_by_twins(verified))


def test_the_drawn_walks_are_of_every_length():
    walks = [commit_by_twins(verify_whole(seed)).walk for seed in WALKED]
    assert set(torch.cat([walk.num_accepted_B for walk in walks]).tolist()) >= {0, 1, 2, 3, 5, 7}


@pytest.mark.parametrize("seed", STEPS)
def test_one_launch_commits_what_the_twins_commit(seed):
    verified = draw_verified(seed)
    committed = verified.commit()
    assert_same(committed, commit_by_twins(verified))
    assert (committed.tokens_BE.dtype, committed.num_tokens_B.dtype) == (torch.int64, torch.int32)


def test_the_drawn_steps_accept_nothing_or_much_on_and_off_the_spine():
    walks = [commit_by_twins(draw_verified(seed)).walk for seed in STEPS]
    accepted = torch.cat([walk.num_accepted_B for walk in walks])
    off_spine = [(walk.path_BL > torch.arange(walk.path_BL.shape[1], device=DEVICE)).any(1) for walk in walks]
    assert torch.cat(off_spine).sum() > 10
    assert (accepted == 0).sum() > 10
    assert (accepted > 2).sum() > 5


def test_chunks_of_a_step_commit_what_the_whole_does():
    verified = draw_verified(next(seed for seed in STEPS if len(draw_step(seed).slots_B) == 5))
    whole, chunks = verified.commit(), [verified.commit(slice(0, 2)), verified.commit(slice(2, 5))]
    for name in ("tokens_BE", "num_tokens_B"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(chunk, name) for chunk in chunks]))
    assert torch.equal(whole.walk.path_BL, torch.cat([chunk.walk.path_BL for chunk in chunks]))


# On a GPU


@pytest.mark.skipif(not IS_CUDA, reason="needs a GPU")
def test_a_graph_replays_the_layout_and_the_commit_of_other_drafts():
    step, verified = draw_step(304), draw_verified(304)
    buffers = step.empty()
    lay_out_step(*step.inputs, buffers)
    verified.commit()
    starts_B1 = verified.logit_starts_B1.clone()
    inputs = (verified.trees, verified.draft_tokens_T, verified.target_tokens_T, starts_B1)
    sizes = (verified.num_slots, verified.num_tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lay_out_step(*step.inputs, buffers)
        committed = walk_and_commit(*inputs, *sizes)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        planted = draw_planted(rng, step.num_rows - 1, step.num_slots)
        for mine, new in zip(vars(step.planted).values(), vars(planted).values(), strict=True):
            mine.copy_(new)
        for mine, new in zip(vars(verified.trees).values(), vars(planted).values(), strict=True):
            mine.copy_(new[step.slots_B])
        verified.target_tokens_T.copy_(torch.randint(1, 3, verified.target_tokens_T.shape))
        graph.replay()
        expected = step.empty()
        lay_out_step_slowly(*step.inputs, expected)
        assert_same(buffers, expected)
        assert_same(committed, commit_by_twins(verified))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from serve import tree_batch_kernels as kernels

NARROW = ("slots", "query_starts", "seq_lens", "row_counts", "context_lens")
NARROW += ("draft_tokens", "logit_starts", "token_counts")

def type_of(name):
    if name.endswith("stride") or name.startswith(("num_", "most_")) or name == "budget":
        return "i32"
    if name in ("scores", "node_scores", "chain_flags"):
        return "*i1" if name == "chain_flags" else "*fp32"
    return "*i32" if name in NARROW else "*i64"

def shared_bytes(kernel, capability, warps, **sizes):
    signature = {name: "constexpr" if name in sizes else type_of(name) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps}).metadata.shared

for capability in (86, 90):
    print(shared_bytes(kernels._commit_kernel, capability, 1))
    print(shared_bytes(kernels._lay_out_kernel, capability, 1, AXES=3))
"""


def test_the_kernels_compile_for_sm_86_and_sm_90(tmp_path):
    shared = [number for (number,) in run_apart(COMPILE, tmp_path)]
    assert len(shared) == 4
    assert max(shared) <= SHARED_BYTES
