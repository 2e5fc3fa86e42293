"""Engines that reserve rows for the greedy chain: every tree begins with it, and the text is the target's."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from drafted_checks import assert_heaps_tree, greedy_chain
from drafters import EMBEDDED_TARGET
from pairwise_probe import BUDGET, MAX_TOKENS, RESERVED, Drafted, Told
from probe_host import run_probe
from reserved_probe import RESERVED_IN
from test_serve_pairwise_engine import RANK, drafts_worth_checking, draw_head, scores_by_definition
from tree_targets import NUM_SLOTS, Case, greedy_texts, write_dense_case, write_hybrid_case

from serve.pairwise import PairwiseTables
from serve.tree import grow_tree

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Case]:
    """By round: the embedded target with its own drafter, which has a head or none; and a dense one."""
    folder = tmp_path_factory.mktemp("cases")
    hybrid = write_hybrid_case(folder / "hybrid")
    ckpts = {name: folder / name for name in ("with a head", "without")}
    for ckpt in ckpts.values():
        shutil.copytree(EMBEDDED_TARGET.parent / "drafter", ckpt)
    of_embedded = {name: Case(hybrid.target, str(ckpt), hybrid.prompts) for name, ckpt in ckpts.items()}
    return of_embedded | {"GPU's trees": write_dense_case(folder / "dense")}


@pytest.fixture(scope="module")
def heads(cases) -> dict[str, PairwiseTables | None]:
    """By round."""
    drawn = {name: draw_head(Path(cases[name].ckpt), RANK, seed=1) for name in ("with a head", "GPU's trees")}
    return drawn | {"without": None}


@pytest.fixture(scope="module")
def told(cases, heads, tmp_path_factory) -> dict[str, Told]:
    folder = tmp_path_factory.mktemp("told")
    (folder / "cases").write_bytes(pickle.dumps(cases))
    run_probe("reserved_probe", folder)
    rounds: dict[str, Told] = {}
    for name in RESERVED_IN:
        rounds |= pickle.loads((folder / f"{name}.told").read_bytes())
    return rounds


def drafts_with_scores(
    told: dict[str, Told], heads: dict[str, PairwiseTables | None], name: str
) -> list[tuple[Drafted, np.ndarray]]:
    drafted = drafts_worth_checking(told[name])
    assert len(drafted) > MAX_TOKENS
    return [(each, scores_by_definition(told[name], heads[name], each)) for each in drafted]


@pytest.mark.parametrize("name", RESERVED_IN)
def test_the_text_is_plain_decodings(told, cases, name):
    pairs = zip(cases[name].prompts, greedy_texts(cases[name], MAX_TOKENS), strict=True)
    texts = told[name].texts
    assert texts == [whole[len(prompt) :] for prompt, whole in pairs][: len(texts)]


@pytest.mark.parametrize("name", RESERVED_IN)
def test_every_tree_begins_with_the_chain_and_goes_on_as_the_heaps(told, heads, name):
    count = min(RESERVED_IN[name], NUM_SLOTS)
    for each, scores_LCC in drafts_with_scores(told, heads, name):
        chain = greedy_chain(scores_LCC)[:count]
        assert_heaps_tree(each, scores_LCC, BUDGET, chain)
        assert each.parents[:count] == list(range(-1, count - 1))
        assert each.tokens[:count] == [int(each.tokens_LC[slot, at]) for slot, at in enumerate(chain)]


@pytest.mark.parametrize("name", RESERVED_IN)
def test_without_reserved_rows_many_trees_would_lack_some_of_the_chain(told, heads, name):
    lacking = 0
    for _, scores_LCC in drafts_with_scores(told, heads, name):
        tree, at = grow_tree(scores_LCC, BUDGET), -1
        places = list(zip(tree.parents, tree.candidates, strict=True))
        for candidate in greedy_chain(scores_LCC)[: RESERVED_IN[name]]:
            if (at, candidate) not in places:
                lacking += 1
                break
            at = places.index((at, candidate))
    assert lacking > MAX_TOKENS / 2


def test_with_a_head_the_chain_is_another_than_each_slots_first_candidates(told, heads):
    drafted = drafts_with_scores(told, heads, "with a head")
    chains = [greedy_chain(scores_LCC)[:RESERVED] for _, scores_LCC in drafted]
    assert sum(chain != [0] * RESERVED for chain in chains) > MAX_TOKENS
