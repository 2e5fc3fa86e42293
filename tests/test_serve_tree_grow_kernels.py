"""serve/tree_grow_kernels.py against torch and the heap: interpreted on a CPU, compiled on a GPU."""

import numpy as np
import pytest
import torch
from kernel_compile import run_apart
from tree_draws import (
    DEVICE,
    IS_CUDA,
    SLOTS,
    assert_same,
    draw_case,
    draw_reserved,
    draw_scores,
    draw_trees,
    unbatch,
)

from serve import tree_batch
from serve.pairwise import walk_chain
from serve.tree import ROOT, grow_tree
from serve.tree_batch import Topology
from serve.tree_grow_kernels import grow_trees, plant_trees

SHARED_BYTES = 99 * 1024  # that sm_86 gives one block of threads
GROWN, PLANTED = range(120), range(400, 415)


# Growing


@pytest.mark.parametrize("seed", GROWN)
def test_the_kernels_trees_are_the_twins_and_the_heaps(seed):
    scores, budget = draw_case(seed)
    trees = grow_trees(scores, budget)
    expected = tree_batch.grow_trees(scores, budget)
    assert_same(trees, expected)
    assert trees.parents_BN.dtype == trees.num_nodes_B.dtype == torch.int64
    for row, one in enumerate(scores.cpu().numpy()):
        assert unbatch(trees, row) == grow_tree(one, budget)


@pytest.mark.parametrize("seed", GROWN)
def test_the_kernels_trees_with_reserved_rows_are_the_twins_and_the_heaps(seed):
    scores, budget = draw_case(seed)
    reserved_BK = draw_reserved(seed, scores)
    trees = grow_trees(scores, budget, reserved_BK)
    assert_same(trees, tree_batch.grow_trees(scores, budget, reserved_BK))
    for row, one in enumerate(scores.cpu().numpy()):
        assert unbatch(trees, row) == grow_tree(one, budget, reserved_BK[row].tolist())


def test_no_reserved_row_changes_nothing():
    scores, budget = draw_case(3)
    none_B0 = torch.empty(len(scores), 0, dtype=torch.int64, device=DEVICE)
    assert_same(grow_trees(scores, budget, none_B0), grow_trees(scores, budget))


def test_a_forbidden_node_ends_the_reserved_ones_for_good():
    """After slot 1's second candidate nothing may come, so the best path is another, in every later slot."""
    scores = torch.full((1, 4, 2, 2), -1.0, device=DEVICE)
    scores[0, 1, 1] = -torch.inf
    scores[0, :, 0, 1] = -9.0
    reserved_BK = torch.tensor([[1, 0, 1, 1]], device=DEVICE)
    trees = grow_trees(scores, 4, reserved_BK)
    assert_same(trees, tree_batch.grow_trees(scores, 4, reserved_BK))
    assert trees.candidates_BN[0].tolist() == [1, 0, 0, 0]
    assert trees.parents_BN[0].tolist() == [ROOT, ROOT, 1, 2]


def test_scores_that_are_no_numbers_reserve_nothing():
    scores = torch.full((1, 3, 2, 2), -1.0, device=DEVICE)
    scores[0, 1, 0, 0] = torch.nan
    reserved_BK = torch.zeros(1, 3, dtype=torch.int64, device=DEVICE)
    found, expected = grow_trees(scores, 3, reserved_BK), tree_batch.grow_trees(scores, 3, reserved_BK)
    assert found.candidates_BN.tolist() == expected.candidates_BN.tolist() == [[0, 1, 1]]


def test_the_drawn_scores_are_of_every_kind():
    cases = [draw_case(seed) for seed in GROWN]
    trees = [tree_batch.grow_trees(scores, budget) for scores, budget in cases]
    ties = [tree.scores_BN.diff(dim=1) == 0 for tree in trees]
    assert sum(len(scores) for scores, _ in cases) > 350
    assert {len(scores) for scores, _ in cases} == set(range(1, 10))
    assert sum(bool(tie.any()) for tie in ties) > 40
    assert sum(bool((tree.scores_BN == -torch.inf).any()) for tree in trees) > 20
    assert sum(scores.stride(2) == 0 for scores, _ in cases) > 20
    assert sum(bool((scores.diff(dim=3) > 0).any()) for scores, _ in cases) > 20


def test_sums_that_rounding_makes_equal_leave_the_lower_candidate_first():
    """The second slot's candidates differ by less than the first's score can hold."""
    scores = torch.full((1, 2, 2, 2), -64.0, device=DEVICE)
    scores[0, 1, 0] = torch.tensor([-3e-7, -1e-7])
    trees = grow_trees(scores, 4)
    assert_same(trees, tree_batch.grow_trees(scores, 4))
    assert trees.candidates_BN[0].tolist() == [0, 1, 0, 1]
    assert trees.parents_BN[0].tolist() == [ROOT, ROOT, 0, 0]


def test_scores_of_any_strides_give_the_same_trees():
    scores, budget = draw_case(33)
    axes = (3, 1, 0, 2)
    strided = scores.permute(axes).contiguous().permute(tuple(np.argsort(axes)))
    assert not strided.is_contiguous()
    assert_same(grow_trees(strided, budget), grow_trees(scores.contiguous(), budget))


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_a_chain_of_any_strides_gives_the_same_trees(axes):
    scores, budget = draw_case(15)
    chain_BL = walk_chain(scores)
    strided = chain_BL.permute(axes).contiguous().permute(axes)
    dense = chain_BL[:, :5].contiguous()
    assert_same(grow_trees(scores, budget, strided[:, :5]), grow_trees(scores, budget, dense))


# Planting


@pytest.mark.parametrize("names_chain", [False, True])
@pytest.mark.parametrize("seed", PLANTED)
def test_a_planted_tree_or_chain_has_the_tokens_of_its_candidates(seed, names_chain):
    trees, num_slots = draw_trees(seed)
    rng = np.random.default_rng(seed)
    batch, budget = trees.parents_BN.shape
    most = 1 + int(trees.candidates_BN.max())
    tokens_BLC = torch.from_numpy(rng.integers(1, 1000, (batch, most, num_slots))).to(DEVICE).transpose(1, 2)
    is_chain_S = torch.from_numpy(rng.random(SLOTS) < 0.4).to(DEVICE)
    slots_B = torch.from_numpy(rng.permutation(SLOTS)[:batch].astype(np.int32)).to(DEVICE)
    slots_B[-1] -= SLOTS * (seed % 2)  # padding
    strided_B = slots_B.repeat_interleave(3)[::3]
    planted = Topology(
        *(torch.full(shape, -5, device=DEVICE) for shape in 2 * [(SLOTS, budget)] + [(SLOTS,)])
    )
    expected = Topology(*(part.clone() for part in vars(planted).values()))
    chain_BL = torch.from_numpy(rng.integers(0, most, (batch, num_slots))).to(DEVICE) if names_chain else None
    found_BN = plant_trees(trees, tokens_BLC, is_chain_S, strided_B, planted, chain_BL)
    for request, slot in enumerate(slots_B.tolist()):
        if slot < 0:
            continue
        if is_chain_S[slot]:
            chain = chain_BL[request].tolist() if names_chain else [0] * num_slots
            tokens = [int(tokens_BLC[request, place, candidate]) for place, candidate in enumerate(chain)]
            text = [*tokens, *[0] * budget][:budget]
            expected.parents_BN[slot] = torch.arange(budget) - 1
            expected.depths_BN[slot] = torch.arange(budget) + 1
            expected.num_nodes_B[slot] = num_slots
        else:
            places = zip(
                trees.depths_BN[request].tolist(), trees.candidates_BN[request].tolist(), strict=True
            )
            text = [int(tokens_BLC[request, max(depth - 1, 0), candidate]) for depth, candidate in places]
            expected.parents_BN[slot] = trees.parents_BN[request]
            expected.depths_BN[slot] = trees.depths_BN[request]
            expected.num_nodes_B[slot] = trees.num_nodes_B[request]
        assert found_BN[request].tolist() == text
    assert_same(planted, expected)  # other slots are left alone


# On a GPU


@pytest.mark.skipif(not IS_CUDA, reason="needs a GPU")
@pytest.mark.parametrize("budget", [15, 31, 63])
@pytest.mark.parametrize("kind", ["marginal", "sorted", "unsorted"])
def test_a_graph_replays_growth_of_a_large_batch(kind, budget):
    rng = np.random.default_rng(budget)
    draws = [draw_scores(rng, 128, 15, budget, kind) for _ in range(3)]
    scores = draws[0].clone()
    grow_trees(scores, budget)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trees = grow_trees(scores, budget)
    for other in draws:
        scores.copy_(other)
        graph.replay()
        assert_same(trees, tree_batch.grow_trees(other, budget))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from serve import tree_grow_kernels as kernels

def type_of(name):
    if name.endswith("stride") or name.startswith(("num_", "most_")) or name == "budget":
        return "i32"
    if name in ("scores", "node_scores", "chain_flags"):
        return "*i1" if name == "chain_flags" else "*fp32"
    return "*i32" if name == "slots" else "*i64"

def shared_bytes(kernel, capability, warps, **sizes):
    signature = {name: "constexpr" if name in sizes else type_of(name) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps}).metadata.shared

ones = dict(num_slots=1, num_candidates=1, budget=1, num_reserved=1)  # which Triton makes constants of
for capability in (86, 90):
    print(shared_bytes(kernels._grow_kernel, capability, 1, TILE_PARENTS=1, TILE_CANDIDATES=1, **ones))
    for none in ({}, dict(reserved=None)):
        print(shared_bytes(kernels._grow_kernel, capability, 1, TILE_PARENTS=16, TILE_CANDIDATES=16, **none))
        print(shared_bytes(kernels._grow_kernel, capability, 8, TILE_PARENTS=64, TILE_CANDIDATES=64, **none))
    print(shared_bytes(kernels._plant_kernel, capability, 1))
"""


def test_the_kernels_compile_for_sm_86_and_sm_90(tmp_path):
    shared = [number for (number,) in run_apart(COMPILE, tmp_path)]
    assert len(shared) == 12
    assert max(shared) <= SHARED_BYTES
