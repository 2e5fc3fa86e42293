"""An oracle's drafts: the target's own text along a random path of a random tree, or lifted among others.

So side branches are really accepted; nothing else in an engine knows of it.
"""

# B=requests of a step  N=nodes of a tree  L=slots of a block  V=vocabulary

import random
from dataclasses import dataclass
from functools import partial

import torch

from serve.tree import ROOT
from serve.tree_batch import TreeBatch


@dataclass(frozen=True)
class HiddenText:
    """A tree with a part of the text along one of its paths, and a chain that begins with another."""

    parents: list[int]
    depths: list[int]
    tokens: list[int]
    chain: list[int]


def hide_text(rng: random.Random, text: list[int], budget: int, num_slots: int) -> HiddenText:
    """Its right token may also stand under a wrong parent, where it is not to be taken."""
    parents, depths = draw_tree(rng, budget, num_slots)
    right = path_to(rng.randrange(budget), parents)[: len(text)]
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        truth = text[depths[node] - 1 : depths[node]]
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        may_be_true = parent != ROOT and parent not in right and rng.random() < 0.3
        if node in right or (may_be_true and truth and truth[0] not in taken):
            tokens += truth
        else:
            tokens.append(draw_token(rng, taken | set(truth)))
    num_true = rng.randint(0, num_slots)
    wrong = [draw_token(rng, set(text[slot : slot + 1])) for slot in range(num_slots)]
    return HiddenText(parents, depths, tokens, [*text[:num_true], *wrong[len(text[:num_true]) :]])


def draw_tree(rng: random.Random, budget: int, num_slots: int) -> tuple[list[int], list[int]]:
    """Parents and depths."""
    parents: list[int] = []
    depths: list[int] = []
    for node in range(budget):
        parent = rng.choice([ROOT, *(at for at in range(node) if depths[at] < num_slots)][-6:])
        parents.append(parent)
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return parents, depths


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node == ROOT else [*path_to(parents[node], parents), node]


def draw_token(rng: random.Random, forbidden: set[int]) -> int:
    return next(token for token in iter(lambda: rng.randrange(1, 290), None) if token not in forbidden)


def as_tensors(hidden: list[HiddenText], device: torch.device) -> tuple[TreeBatch, torch.Tensor]:
    """Trees, and the tokens of their candidates: first the chain's, then each node's own. [B, L, 1 + N]"""
    of_device = partial(torch.tensor, device=device)
    trees = TreeBatch(
        parents_BN=of_device([each.parents for each in hidden]),
        depths_BN=of_device([each.depths for each in hidden]),
        num_nodes_B=of_device([len(each.parents) for each in hidden]),
        candidates_BN=of_device([range(1, 1 + len(each.parents)) for each in hidden]),
        scores_BN=of_device([[0.0] * len(each.parents) for each in hidden]),
    )
    # a node is at its own depth alone
    return trees, of_device([[[first, *each.tokens] for first in each.chain] for each in hidden])


def lift(logits_V: torch.Tensor, token: int, rank: int | None) -> None:
    """Lets so many others stand before a token; in place."""
    if rank is not None:
        logits_V[token] = -torch.inf
        logits_V[token] = logits_V.topk(rank + 1).values[rank] + 1e-2
