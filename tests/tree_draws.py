"""Scores and trees that tests of the kernels draw, of every kind, and how they compare what comes out."""

import numpy as np
import torch

from serve import tree_batch
from serve.pairwise import walk_chain
from serve.tree import Tree
from serve.tree_batch import TreeBatch

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"  # on a CPU the kernels are interpreted
SLOTS = 11


def assert_same(found: object, expected: object) -> None:
    """Every tensor of two dataclasses, and of those in them."""
    for name, mine in vars(found).items():
        other = getattr(expected, name)
        if isinstance(mine, torch.Tensor):
            is_float = mine.dtype.is_floating_point
            assert torch.equal(mine if is_float else mine.long(), other if is_float else other.long()), name
        else:
            assert_same(mine, other)


def unbatch(trees: TreeBatch, row: int) -> Tree:
    count = int(trees.num_nodes_B[row])
    parts = (trees.parents_BN, trees.depths_BN, trees.candidates_BN, trees.scores_BN)
    return Tree(*(tuple(part[row, :count].tolist()) for part in parts))


def draw_reserved(seed: int, scores_BLCC: torch.Tensor) -> torch.Tensor:
    """Nodes of a chain that have rows reserved, of the greedy one or of any; none of them to all. [B, K]"""
    rng = np.random.default_rng([seed, 3])
    batch, num_slots, _, num_candidates = scores_BLCC.shape
    chain_BL = walk_chain(scores_BLCC)
    if seed % 3 == 0:
        drawn = rng.integers(0, num_candidates, (batch, num_slots))
        chain_BL = torch.from_numpy(drawn).to(scores_BLCC.device)
    return chain_BL[:, : rng.integers(0, num_slots + 1)]


def draw_scores(
    rng: np.random.Generator, batch: int, num_slots: int, num_candidates: int, kind: str
) -> torch.Tensor:
    """Log-probabilities: coarse ones, so that ties are common, or fine ones; some are forbidden."""
    shape = (batch, num_slots, 1 if kind == "marginal" else num_candidates, num_candidates)
    scores = -rng.exponential(1.0, shape).astype(np.float32)
    grain = np.float32(rng.choice([1, 0.5, 0.25, 0]))
    if grain:
        scores = np.round(scores / grain) * grain
    if rng.integers(3) == 0:
        scores[rng.random(shape) < rng.choice([0.1, 0.6])] = -np.inf
    if kind != "unsorted":
        scores = np.sort(scores, axis=-1)[..., ::-1].copy()  # best first, as a drafter gives them
    return torch.from_numpy(scores).to(DEVICE).expand(-1, -1, num_candidates, -1)


def draw_case(seed: int, most_nodes: int = 64) -> tuple[torch.Tensor, int]:
    """Scores and a budget; most_nodes: of the batch together."""
    rng = np.random.default_rng(seed)
    num_slots = int(rng.choice([1, 2, 3, 7, 15, 16]))
    budget = [1, num_slots, 4, 15, 31, 63][seed % 6]
    batch = int(rng.integers(1, 1 + max(1, min(9, most_nodes // budget))))
    num_candidates = min(budget, int(rng.choice([1, 2, 3, 5, 16, 63])))
    if rng.integers(4) == 0:
        num_candidates += 2  # more than a tree can use of sorted ones
    kind = str(rng.choice(["marginal", "sorted", "unsorted"]))
    return draw_scores(rng, batch, num_slots, num_candidates, kind), budget


def draw_trees(seed: int) -> tuple[TreeBatch, int]:
    scores, _ = draw_case(seed, most_nodes=300)
    budget = [1, 15, 31, 63][seed % 4]
    return tree_batch.grow_trees(scores, budget), scores.shape[1]
