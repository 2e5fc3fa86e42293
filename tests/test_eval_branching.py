"""eval/branching.py: chain and tree paired where they began a step at the same token."""

import random
from itertools import takewhile

import pytest

from eval.branching import find_branching
from serve.client import Completion

K = 7


def completion(chunks, token_ids=None):
    ids = tuple(token_ids or range(sum(chunks)))
    return Completion((1,), ids, tuple(chunks), (0.0,) * len(chunks), "", "stop", None, 0.0)


def branching(chain, tree, **tokens):
    return find_branching([completion(chain)], [completion(tree, **tokens)], K)


def test_a_step_is_held_missed_or_short_by_what_the_tree_took_there():
    """Steps after 1, 3 and 10 tokens are shared; the one after 13 is the last, and is cut."""
    found = branching([1, 2, 7, 3, 2], [1, 2, 6, 1, 3, 2])
    assert (found.shared_steps, found.failed, found.held, found.short) == (3, 3, 0, 1)
    assert found.depth_after is None
    found = branching([1, 2, 2, 9], [1, 4, 9])
    assert (found.shared_steps, found.failed, found.held, found.depth_after) == (1, 1, 1, 2.0)


def test_a_chain_that_is_accepted_whole_has_not_failed():
    found = branching([1, K + 1, 1, 1], [1, K + 1, 1, 1])
    assert (found.shared_steps, found.failed) == (2, 1)


def test_steps_after_texts_have_parted_are_not_the_same():
    chunks = [1, 2, 2, 2, 1]
    parted = [0, 1, 2, 99, 98, 97, 96, 95]
    assert branching(chunks, chunks).shared_steps == 3
    assert branching(chunks, chunks, token_ids=parted).shared_steps == 2  # after 1 and after 3 tokens


def test_answers_without_a_step_between_first_and_last_share_none():
    assert branching([1], [1]) is None
    assert branching([1, 4], [1, 4]) is None


def decode(length, accept):
    """Chunks of a text whose step after so many tokens accepts `accept(tokens)` drafts."""
    chunks, at = [1], 1
    while at < length:
        chunks.append(min(1 + accept(at), length - at))
        at += chunks[-1]
    return chunks


@pytest.mark.parametrize("seed", range(3))
def test_shared_steps_tell_what_all_steps_would(seed):
    """A spine that fails at random; side branches hold the token there in 4 of 10 cases, one deep."""
    rng = random.Random(seed)
    length = 200_000
    is_right = [rng.random() < 0.7 for _ in range(length + K)]
    is_held = [rng.random() < 0.4 for _ in range(length + K)]

    def spine(at):
        return sum(1 for _ in takewhile(bool, is_right[at : at + K]))

    def tree(at):
        depth = spine(at)
        return depth + (depth < K and is_held[at + depth])

    found = branching(decode(length, spine), decode(length, tree))
    assert found.held / found.failed == pytest.approx(0.4, abs=0.02)
    assert (found.depth_after, found.short) == (1.0, 0)
    assert found.shared_steps > 10_000
