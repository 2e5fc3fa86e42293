"""What a tree holds where its greedy chain fails: from the chunks of both on the same text, at temperature 0.

Where both runs began a step at the same token of the same text, the chain's chunk says how many drafts of the
tree's spine the target takes, c, and the tree's how many of the whole tree, t.  With c below the drafts of a
chain the target took another token than the spine's at depth c + 1, and the tree

    held it     t > c    a side branch had that token, and its path went on t - c deep, that token included
    missed it   t = c
    was short   t < c    of so few nodes that its spine ends before that depth

Of all steps of the tree these are those that happen to be shared, and each answer's first.  An answer's last
step is left out, since the answer's end cut it.  Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, takewhile

from eval.report import BranchingPart
from serve.client import Completion


def find_branching(
    chain: Sequence[Completion], tree: Sequence[Completion], num_drafts: int
) -> BranchingPart | None:
    """Completions of the same prompts in their order; `num_drafts`: the chain's.  None: no step is shared."""
    shared = [pair for both in zip(chain, tree, strict=True) for pair in _pair_steps(*both)]
    failed = [(of_chain, of_tree) for of_chain, of_tree in shared if of_chain < num_drafts]
    further = [of_tree - of_chain for of_chain, of_tree in failed if of_tree > of_chain]
    if not shared:
        return None
    return BranchingPart(
        shared_steps=len(shared),
        failed=len(failed),
        held=len(further),
        short=sum(of_tree < of_chain for of_chain, of_tree in failed),
        depth_after=sum(further) / len(further) if further else None,
    )


def _pair_steps(chain: Completion, tree: Completion) -> Iterator[tuple[int, int]]:
    """Drafts that either accepted, for each step that both began after the same tokens."""
    pairs = zip(chain.token_ids, tree.token_ids, strict=False)
    num_alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    steps = dict(_begin_steps(chain.chunks))
    for start, size in _begin_steps(tree.chunks):
        if start in steps and start <= num_alike:
            yield steps[start] - 1, size - 1


def _begin_steps(chunks: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Tokens before each step, and how many it committed; without the prefill and the last."""
    return zip(accumulate(chunks[:-1]), chunks[1:-1], strict=False)
