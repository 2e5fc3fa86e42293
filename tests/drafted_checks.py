"""What a drafted tree or chain has to be, by `serve.tree`, for tests of engines that score after parents.

A draft is what a probe kept of one request: `tokens_LC`, and the planted tree's `parents` and `tokens`.
"""

# L=slots  C=candidates of a slot

from collections.abc import Sequence
from typing import Any

import numpy as np

from serve.tree import Tree, grow_tree


def assert_heaps_tree(each: Any, scores_LCC: np.ndarray, budget: int, reserved: Sequence[int] = ()) -> Tree:
    """reserved: as `serve.tree.grow_tree`."""
    tree = grow_tree(scores_LCC, budget, reserved)
    pairs = zip(tree.depths, tree.candidates, strict=True)
    assert each.parents == list(tree.parents)
    assert each.tokens == [int(each.tokens_LC[depth - 1, candidate]) for depth, candidate in pairs]
    return tree


def assert_greedy_chain(each: Any, scores_LCC: np.ndarray) -> bool:
    """Whether it is another than each slot's first candidates."""
    chain = [int(each.tokens_LC[slot, at]) for slot, at in enumerate(greedy_chain(scores_LCC))]
    assert each.tokens == chain
    assert each.parents == list(range(-1, len(chain) - 1))
    return chain != each.tokens_LC[:, 0].tolist()


def greedy_chain(scores_LCC: np.ndarray) -> list[int]:
    """At each slot the best candidate after the last one."""
    chain = [0]
    for scores_CC in scores_LCC:
        chain.append(int(scores_CC[chain[-1]].argmax()))
    return chain[1:]
