"""The draft tree by definition: which nodes it has, who their ancestors are, and what of it is accepted.

Pure and slow: the specification of `serve/tree_batch.py`, which does the same for a batch on the device.
Engines, trainers and evaluators agree on a tree through this module alone.

A node is a path of candidates, one for each of the first d slots after the committed token:

    score(node) = score(parent) + s(d, parent's candidate, node's candidate)        s <= 0, a log-probability
    before      = higher score, then fewer slots, then the earlier parent, then the lower candidate
    tree(N)     = the first N nodes in that order

Since s <= 0 a parent comes before its children, so every prefix of the order is a tree, and the best one of
its size: the sum of exp(score) over its nodes is the expected number of accepted drafts, if the scores are
true (arXiv 2604.12989, propositions 1 and 2, which hold for scores conditional on the parent as well).

Rows may be reserved for the greedy chain.  Its first K nodes then come before all others, in the chain's
order, and only after them do scores decide.  Parents still come before their children, and every prefix is
still the tree of its size: the best of those that hold as much of the chain.  It is no longer the best of
all, and a node may be likelier than one before it, so whoever leaves out the last nodes as the least likely
(`--budget auto`) cannot have rows reserved.
"""

# L=slots a node can stand in (depths 1..L)  C=candidates of a slot  N=nodes  K=nodes with reserved rows

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROOT = -1
"""The parent of a depth-1 node: the committed token that the drafts follow."""


@dataclass(frozen=True)
class Tree:
    """Nodes in their order: parents first, after reserved rows best first.  The committed token is none."""

    parents: tuple[int, ...]
    """Number of a node's parent; ROOT at depth 1."""
    depths: tuple[int, ...]
    """1..L"""
    candidates: tuple[int, ...]
    """Which of its slot's candidates a node is."""
    scores: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.parents)


def grow_tree(scores_LCC: np.ndarray, budget: int, reserved: Sequence[int] = ()) -> Tree:
    """The tree of at most `budget` nodes, by Algorithm 1's heap.

    scores_LCC[d - 1, p, c] is s(d, p, c), fp32 and at most 0; -inf forbids.  At depth 1 the parent is the
    committed token, and row p = 0 is read.  `broadcast_marginals` makes scores that ignore the parent.
    reserved: candidates of the chain's nodes that have rows reserved, from depth 1 on; the first that is
    forbidden ends them.
    """
    assert scores_LCC.dtype == np.float32, f"scores are {scores_LCC.dtype}, expected float32"
    num_slots, _, num_candidates = scores_LCC.shape
    chain = set(enumerate(reserved, start=1))
    grown: list[tuple[np.float32, int, int, int]] = []  # score, depth, parent, candidate
    heap: list[tuple[bool, np.float32, int, int, int]] = []

    def push_children(parent: int, score: np.float32, depth: int, candidate: int, *, on_chain: bool) -> None:
        if depth > num_slots:
            return
        for child in range(num_candidates):
            total = score + scores_LCC[depth - 1, candidate, child]
            if total > -np.inf:
                is_reserved = on_chain and (depth, child) in chain
                heapq.heappush(heap, (not is_reserved, -total, depth, parent, child))

    push_children(ROOT, np.float32(0), 1, 0, on_chain=True)
    while heap and len(grown) < budget:
        is_other, negated, depth, parent, candidate = heapq.heappop(heap)
        grown.append((-negated, depth, parent, candidate))
        push_children(len(grown) - 1, -negated, depth + 1, candidate, on_chain=not is_other)
    return Tree(
        parents=tuple(node[2] for node in grown),
        depths=tuple(node[1] for node in grown),
        candidates=tuple(node[3] for node in grown),
        scores=tuple(float(node[0]) for node in grown),
    )


def broadcast_marginals(log_probs_LC: np.ndarray) -> np.ndarray:
    """Scores that do not depend on the parent, as a block-diffusion drafter alone gives them. [L, C, C]"""
    num_slots, num_candidates = log_probs_LC.shape
    return np.broadcast_to(log_probs_LC[:, None], (num_slots, num_candidates, num_candidates))


def chain(num_slots: int) -> Tree:
    """The greedy chain as a tree: each slot's first candidate."""
    slots = range(num_slots)
    return Tree(
        parents=tuple(slot - 1 for slot in slots),
        depths=tuple(slot + 1 for slot in slots),
        candidates=(0,) * num_slots,
        scores=(0.0,) * num_slots,
    )


def ancestors(tree: Tree) -> np.ndarray:
    """Who sees whom among the rows [committed token, nodes]: itself and its ancestors. [1 + N, 1 + N] bool"""
    sees = np.eye(1 + len(tree), dtype=bool)
    for node, parent in enumerate(tree.parents):
        sees[1 + node] |= sees[1 + parent]
    return sees


@dataclass(frozen=True)
class Walk:
    """What one verification step commits: the tokens of `path`, then `bonus`."""

    path: tuple[int, ...]
    """Accepted nodes, from depth 1 on."""
    bonus: int
    """The target's own token after the last of them."""


def follow_tree(tree: Tree, node_tokens: Sequence[int], target_tokens: Sequence[int]) -> Walk:
    """Descends as long as the target's token at a row is one of the row's children.

    node_tokens: [N].  target_tokens: [1 + N], what the target has after the committed token and after each
    node, chosen without looking at the tree (an argmax, or a draw of its own): the output then has exactly
    the target's distribution.  Of two children with one token the earlier is taken.
    """
    path: list[int] = []
    at = ROOT
    while True:
        token = target_tokens[1 + at]
        children = (node for node, parent in enumerate(tree.parents) if parent == at)
        at = next((node for node in children if node_tokens[node] == token), ROOT)
        if at == ROOT:
            return Walk(tuple(path), token)
        path.append(at)


def expected_accepted(tree: Tree) -> float:
    """Expected number of accepted drafts, if the scores are true log-probabilities (proposition 1)."""
    return float(np.exp(np.array(tree.scores)).sum())
