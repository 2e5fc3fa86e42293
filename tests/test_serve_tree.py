"""serve/tree.py against enumeration, and the device's trees against it, ties and odd sizes included."""

from itertools import product

import numpy as np
import pytest
import torch
from tree_draws import assert_same, draw_reserved, unbatch

from serve.pairwise import walk_chain
from serve.tree import (
    ROOT,
    Tree,
    ancestors,
    broadcast_marginals,
    chain,
    expected_accepted,
    follow_tree,
    grow_tree,
)
from serve.tree_batch import follow_trees, grow_trees, see_ancestors

CASES = 1000


def draw_scores(seed: int, batch: int, num_slots: int, num_candidates: int) -> np.ndarray:
    """Log-probabilities conditional on the parent; coarse ones, so that ties are common; some forbidden."""
    rng = np.random.default_rng(seed)
    scores = -rng.exponential(1.0, (batch, num_slots, num_candidates, num_candidates)).astype(np.float32)
    if seed % 3 == 1:
        scores = np.round(scores)
    if seed % 5 == 2:
        scores[rng.random(scores.shape) < 0.3] = -np.inf
    if seed % 2:
        scores = np.sort(scores, axis=-1)[..., ::-1].copy()  # candidates best first, as a drafter gives them
    return scores


def draw_case(seed: int) -> tuple[np.ndarray, int]:
    rng = np.random.default_rng([seed, 1])
    batch, num_slots = int(rng.integers(1, 10)), int(rng.choice([1, 2, 3, 7, 15]))
    num_candidates = int(rng.choice([1, 2, 5, 16]))
    budget = int(rng.choice([1, num_slots, 4, 15, 31, 63]))
    return draw_scores(seed, batch, num_slots, num_candidates), budget


def paths(tree: Tree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for parent, candidate in zip(tree.parents, tree.candidates, strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), candidate))
    return found


def path_score(scores_LCC: np.ndarray, path: tuple[int, ...]) -> np.float32:
    total, parent = np.float32(0), 0
    for depth, candidate in enumerate(path):
        total += scores_LCC[depth, parent, candidate]
        parent = candidate
    return total


@pytest.mark.parametrize("seed", range(60))
def test_the_tree_holds_the_best_paths_of_all(seed):
    scores = draw_scores(seed, 1, 3, 4)[0]
    every = [path for depth in (1, 2, 3) for path in product(range(4), repeat=depth)]
    best = sorted((float(path_score(scores, path)) for path in every), reverse=True)
    for budget in (1, 7, 20):
        tree = grow_tree(scores, budget)
        assert list(tree.scores) == [score for score in best[:budget] if score > -np.inf]
        assert [float(path_score(scores, path)) for path in paths(tree)] == list(tree.scores)
        assert len(set(paths(tree))) == len(tree)


@pytest.mark.parametrize("seed", range(30))
def test_a_prefix_of_a_tree_is_the_tree_of_its_size(seed):
    scores, _ = draw_case(seed)
    whole = grow_tree(scores[0], 31)
    assert all(parent < node for node, parent in enumerate(whole.parents))
    for size in (1, 2, 9, 30):
        cut = grow_tree(scores[0], size)
        assert cut.parents == whole.parents[:size]
        assert cut.candidates == whole.candidates[:size]


@pytest.mark.parametrize("seed", range(60))
def test_a_tree_holds_the_reserved_chain_and_the_best_of_all_other_paths(seed):
    scores = draw_scores(seed, 1, 3, 4)[0]
    greedy = walk_chain(torch.from_numpy(scores)[None])[0].tolist()
    chain_paths = [tuple(greedy[:depth]) for depth in (1, 2, 3)]
    chain_paths = [path for path in chain_paths if path_score(scores, path) > -np.inf]
    every = [path for depth in (1, 2, 3) for path in product(range(4), repeat=depth)]
    for reserved, budget in product(range(5), (1, 2, 7, 20)):
        first = chain_paths[: min(reserved, budget)]
        others = (float(path_score(scores, path)) for path in every if path not in first)
        best = [score for score in sorted(others, reverse=True) if score > -np.inf]
        tree = grow_tree(scores, budget, greedy[:reserved])
        assert paths(tree)[: len(first)] == first
        assert list(tree.scores[len(first) :]) == best[: budget - len(first)]
        assert [float(path_score(scores, path)) for path in paths(tree)] == list(tree.scores)
        assert len(set(paths(tree))) == len(tree)


@pytest.mark.parametrize("seed", range(30))
def test_a_prefix_of_a_tree_with_reserved_rows_is_the_tree_of_its_size(seed):
    scores, _ = draw_case(seed)
    (reserved,) = draw_reserved(seed, torch.from_numpy(scores[:1])).tolist()
    whole = grow_tree(scores[0], 31, reserved)
    assert all(parent < node for node, parent in enumerate(whole.parents))
    for size in (1, 2, 9, 30):
        cut = grow_tree(scores[0], size, reserved)
        assert cut.parents == whole.parents[:size]
        assert cut.candidates == whole.candidates[:size]


@pytest.mark.parametrize("seed", range(CASES))
def test_the_devices_trees_are_the_heaps(seed):
    scores, budget = draw_case(seed)
    trees = grow_trees(torch.from_numpy(scores), budget)
    sees = see_ancestors(trees.parents_BN, scores.shape[1])
    assert trees.parents_BN.shape == (len(scores), budget)
    for row, one in enumerate(scores):
        expected = grow_tree(one, budget)
        assert unbatch(trees, row) == expected
        rows = 1 + len(expected)
        assert np.array_equal(sees[row, :rows, :rows].numpy(), ancestors(expected))
        assert (trees.depths_BN[row, len(expected) :] == 0).all()


@pytest.mark.parametrize("seed", range(CASES))
def test_the_devices_trees_with_reserved_rows_are_the_heaps(seed):
    scores, budget = draw_case(seed)
    reserved_BK = draw_reserved(seed, torch.from_numpy(scores))
    trees = grow_trees(torch.from_numpy(scores), budget, reserved_BK)
    for row, (one, reserved) in enumerate(zip(scores, reserved_BK.tolist(), strict=True)):
        expected = grow_tree(one, budget, reserved)
        assert unbatch(trees, row) == expected
        assert (trees.depths_BN[row, len(expected) :] == 0).all()


def test_the_drawn_reservations_are_of_every_kind():
    changed = ended = whole = 0
    for seed in range(CASES):
        scores, budget = draw_case(seed)
        scores = torch.from_numpy(scores)
        reserved_BK = draw_reserved(seed, scores)
        trees = grow_trees(scores, budget, reserved_BK)
        without = grow_trees(scores, budget)
        count = min(reserved_BK.shape[1], budget)
        begins_B = (trees.candidates_BN[:, :count] == reserved_BK[:, :count]).all(1)
        begins_B &= (trees.depths_BN[:, :count] == torch.arange(1, count + 1)).all(1)
        ended += int((~begins_B).sum())  # by a node that is forbidden
        whole += count == scores.shape[1]
        changed += int((trees.candidates_BN != without.candidates_BN).any(1).sum())
    assert changed > CASES
    assert ended > CASES / 10
    assert whole > CASES / 10


def test_no_reserved_row_changes_nothing():
    for seed in range(100):
        scores, budget = draw_case(seed)
        scores = torch.from_numpy(scores)
        none_B0 = torch.empty(len(scores), 0, dtype=torch.int64)
        assert_same(grow_trees(scores, budget, none_B0), grow_trees(scores, budget))


def test_a_reserved_node_comes_before_likelier_ones_and_its_sibling_is_numbered_after_it():
    log_probs = np.log(np.array([[0.6, 0.4], [0.9, 0.1]], dtype=np.float32))
    tree = grow_tree(broadcast_marginals(log_probs), 4, [1, 1])
    assert paths(tree) == [(1,), (1, 1), (0,), (0, 0)]  # 0.4, 0.04, 0.6, 0.54
    assert tree.parents == (ROOT, 0, ROOT, 2)


def test_of_equal_nodes_those_after_the_reserved_parent_come_first():
    """Without reserved rows the other parent's children do."""
    scores = np.zeros((2, 2, 2), dtype=np.float32)
    assert paths(grow_tree(scores, 5)) == [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    assert paths(grow_tree(scores, 5, [1])) == [(1,), (0,), (1, 0), (1, 1), (0, 0)]


@pytest.mark.parametrize("seed", range(200))
def test_the_devices_walks_are_the_slow_ones(seed):
    scores, budget = draw_case(seed)
    rng = np.random.default_rng([seed, 2])
    trees = grow_trees(torch.from_numpy(scores), budget)
    # few tokens, so that paths are long and siblings sometimes share one
    tokens = rng.integers(0, 3, (len(scores), budget))
    target = rng.integers(0, 3, (len(scores), 1 + budget))
    walks = follow_trees(trees, torch.from_numpy(tokens), torch.from_numpy(target), scores.shape[1])
    for row in range(len(scores)):
        expected = follow_tree(unbatch(trees, row), tokens[row].tolist(), target[row].tolist())
        count = int(walks.num_accepted_B[row])
        assert tuple(walks.path_BL[row, :count].tolist()) == expected.path
        assert int(walks.bonus_B[row]) == expected.bonus
        assert (walks.path_BL[row, count:] == ROOT).all()


def test_one_candidate_a_slot_makes_a_chain():
    tree = grow_tree(np.full((5, 1, 1), -0.5, dtype=np.float32), 9)
    assert (tree.parents, tree.depths, tree.candidates) == (
        chain(5).parents,
        chain(5).depths,
        chain(5).candidates,
    )
    assert np.array_equal(ancestors(tree), np.tri(6, dtype=bool))


def test_marginals_are_scores_that_ignore_the_parent():
    log_probs = np.log(np.array([[0.6, 0.4], [0.9, 0.1]], dtype=np.float32))
    tree = grow_tree(broadcast_marginals(log_probs), 4)
    assert paths(tree) == [(0,), (0, 0), (1,), (1, 0)]  # 0.6, 0.54, 0.4, 0.36
    assert expected_accepted(tree) == pytest.approx(0.6 + 0.54 + 0.4 + 0.36)


def test_scores_that_know_the_parent_open_another_branch():
    scores = np.log(np.array([[[0.6, 0.4], [1, 1]], [[0.5, 0.5], [0.01, 0.99]]], dtype=np.float32))
    assert paths(grow_tree(scores, 3)) == [(0,), (1,), (1, 1)]


def test_the_expected_acceptance_is_what_walking_gives_on_average():
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(3), (3, 3))
    tree = grow_tree(np.log(probs).astype(np.float32), 6)
    accepted = 0
    for _ in range(20_000):
        drawn, parent = [], 0
        for depth in range(3):
            parent = int(rng.choice(3, p=probs[depth, parent]))
            drawn.append(parent)
        target = [drawn[0], *(drawn[depth] if depth < 3 else 0 for depth in tree.depths)]
        accepted += len(follow_tree(tree, tree.candidates, target).path)
    assert accepted / 20_000 == pytest.approx(expected_accepted(tree), abs=0.02)
