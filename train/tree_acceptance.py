"""What draft trees commit on recorded text, without an engine: grown from scores, followed along the labels.

A label is what the target said after the recorded tokens before it, so a tree's accepted path is the longest
that the text goes on with.  Exact for greedy text; for sampled text it is one draw.
"""

# A=blocks  L=drafted slots  C=candidates of a slot  N=nodes  R=rows: the anchor, then the nodes

from collections.abc import Sequence

import torch

from serve.pairwise import walk_chain
from serve.tree import follow_tree, grow_tree
from serve.tree_batch import TreeBatch, follow_trees, grow_trees

NO_LABEL = -1
"""In `labels_AL` where the text has ended; no token is it."""


def accepted_by_trees(
    scores_ALCC: torch.Tensor, tokens_ALC: torch.Tensor, labels_AL: torch.Tensor, budget: int
) -> torch.Tensor:
    """Drafts accepted of each block's tree of `budget` nodes; scores as `serve.tree.grow_tree` takes. [A]"""
    trees = _grow(scores_ALCC, budget)
    slots_AN = (trees.depths_BN - 1).clamp_min(0)
    num_candidates = tokens_ALC.shape[-1]
    node_tokens_AN = tokens_ALC.flatten(1).gather(1, slots_AN * num_candidates + trees.candidates_BN)
    depths_AR = torch.cat([torch.zeros_like(trees.depths_BN[:, :1]), trees.depths_BN], dim=1)
    target_AR = _then_no_label(labels_AL).gather(1, depths_AR)
    return follow_trees(trees, node_tokens_AN, target_AR, labels_AL.shape[1]).num_accepted_B


def accepted_by_trees_one_by_one(
    scores_ALCC: torch.Tensor, tokens_ALC: torch.Tensor, labels_AL: torch.Tensor, budget: int
) -> torch.Tensor:
    """The slow twin: a heap, a tree and a walk for each block."""
    accepted = []
    for scores_LCC, tokens_LC, labels_L in zip(
        scores_ALCC, tokens_ALC.tolist(), _then_no_label(labels_AL).tolist(), strict=True
    ):
        tree = grow_tree(scores_LCC.numpy(), budget)
        pairs = zip(tree.depths, tree.candidates, strict=True)
        node_tokens = [tokens_LC[depth - 1][candidate] for depth, candidate in pairs]
        walk = follow_tree(tree, node_tokens, [labels_L[depth] for depth in (0, *tree.depths)])
        accepted.append(len(walk.path))
    return torch.tensor(accepted)


def accepted_by_chains(
    scores_ALCC: torch.Tensor, tokens_ALC: torch.Tensor, labels_AL: torch.Tensor
) -> torch.Tensor:
    """Drafts accepted of each block's greedy chain: at each slot what is best after the last. [A]"""
    chain_AL = tokens_ALC.gather(2, walk_chain(scores_ALCC)[:, :, None])[:, :, 0]
    return (chain_AL == labels_AL).long().cumprod(1).sum(1)


def committed_by_step(accepted: Sequence[int]) -> list[int]:
    """Tokens that each step commits when a text is decoded.

    accepted: what a step would accept whose anchor is the text's first token, its second, ..., its last but
    one.  A step commits what it accepts and the target's next token, and the last ones are cut with the text.
    """
    steps, at = [], 0
    while at < len(accepted):
        steps.append(min(accepted[at] + 1, len(accepted) - at))
        at += steps[-1]
    return steps


def _grow(scores_ALCC: torch.Tensor, budget: int) -> TreeBatch:
    """On a GPU in one launch: level by level the host takes longer than a small drafter's whole step."""
    if scores_ALCC.device.type == "cpu":
        return grow_trees(scores_ALCC, budget)
    from serve import tree_grow_kernels  # noqa: PLC0415 - without a GPU there is no Triton

    return tree_grow_kernels.grow_trees(scores_ALCC, budget)


def _then_no_label(labels_AL: torch.Tensor) -> torch.Tensor:
    return torch.cat([labels_AL, torch.full_like(labels_AL[:, :1], NO_LABEL)], dim=1)
