"""A drafter with a pairwise head in real engines: trees and chains are the definition's, the text plain's."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from drafted_checks import assert_greedy_chain, assert_heaps_tree
from pairwise_probe import BUDGET, MAX_TOKENS, Drafted, Told
from probe_host import run_probe
from test_serve_parity import VOCAB
from tree_targets import NUM_SLOTS, Case, write_dense_case

from serve.pairwise import PairwiseTables, read_pairwise, score_after, write_pairwise
from serve.tree import broadcast_marginals

pytestmark = pytest.mark.engine

RANK = 4


def draw_head(ckpt: Path, rank: int, seed: int) -> PairwiseTables:
    """Loud enough to change most trees; what was written, as it is read."""
    config = json.loads((ckpt / "config.json").read_text())
    vocab_size, hidden_size = config["vocab_size"], config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    parents_Vr, children_Vr = torch.randn(2, vocab_size, rank, generator=generator)
    gate_rD = hidden_size**-0.5 * torch.randn(rank, hidden_size, generator=generator)
    write_pairwise(ckpt, PairwiseTables(parents_Vr, children_Vr, gate_rD, torch.ones(rank)))
    found = read_pairwise(ckpt, hidden_size, vocab_size)
    assert found is not None
    return PairwiseTables(*(each.float() for each in vars(found).values()))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Case, dict[str, PairwiseTables | None], Path]:
    """The case, its checkpoints' heads by round, and where the engines told of their rounds."""
    folder = tmp_path_factory.mktemp("pairwise")
    case = write_dense_case(folder / "case")
    others = {name: folder / name for name in ("narrow", "none", "wide")}
    for ckpt in others.values():
        shutil.copytree(case.ckpt, ckpt)
    heads: dict[str, PairwiseTables | None] = {"trees": draw_head(Path(case.ckpt), RANK, seed=1)}
    heads |= dict.fromkeys(("chains", "chain", "GPU's trees"), heads["trees"]) | {"none": None}
    heads["narrow"] = draw_head(others["narrow"], RANK - 1, seed=2)
    draw_head(others["wide"], RANK + 1, seed=3)
    named = {name: str(ckpt) for name, ckpt in others.items()}
    (folder / "told").mkdir()
    (folder / "told" / "case").write_bytes(pickle.dumps((case, named)))
    run_probe("pairwise_probe", folder / "told")
    return case, heads, folder / "told"


@pytest.fixture(scope="module")
def told(made) -> dict[str, Told]:
    _, _, folder = made
    rounds: dict[str, Told] = {}
    for name in ("plain", "trees", "chain", "gpu"):
        rounds |= pickle.loads((folder / f"{name}.told").read_bytes())
    return rounds


def scores_by_definition(told: Told, tables: PairwiseTables | None, each: Drafted) -> np.ndarray:
    """s(slot, parent's candidate, candidate), one parent after another, from the text that was answered."""
    log_probs_LC = each.log_probs_LC.clamp(max=0)
    if tables is None:
        return broadcast_marginals(log_probs_LC.numpy())
    committed = told.texts[each.request][each.committed - 1]
    scores_LCC = torch.empty(*log_probs_LC.shape, log_probs_LC.shape[1])
    for slot in range(len(log_probs_LC)):
        for row in range(log_probs_LC.shape[1]):
            parent = committed if slot == 0 else int(each.tokens_LC[slot - 1, row])
            of_slot = slice(slot, slot + 1)
            scores = score_after(
                tables,
                each.hidden_LD[None, of_slot],
                torch.tensor([[[parent]]]),
                each.tokens_LC[None, of_slot],
                log_probs_LC[None, of_slot],
            )
            scores_LCC[slot, row] = scores.candidates_BLPC[0, 0, 0]
    return scores_LCC.numpy()


def drafts_worth_checking(told: Told) -> list[Drafted]:
    """Whose committed token is in the text: the last step drafts beyond it."""
    return [each for each in told.drafted if 0 < each.committed <= MAX_TOKENS]


@pytest.mark.parametrize("name", ["trees", "chains", "chain", "narrow", "none", "wide", "GPU's trees"])
def test_the_text_is_plain_decodings(told, name):
    texts = told[name].texts
    assert texts == told["plain"].texts[: len(texts)]


@pytest.mark.parametrize("name", ["trees", "narrow", "none", "GPU's trees"])
def test_every_tree_is_the_heaps_on_the_definitions_scores(made, told, name):
    _, heads, _ = made
    drafted = drafts_worth_checking(told[name])
    assert len(drafted) > MAX_TOKENS
    for each in drafted:
        assert_heaps_tree(each, scores_by_definition(told[name], heads[name], each), BUDGET)


@pytest.mark.parametrize("name", ["chains", "chain"])
def test_every_chain_takes_what_is_best_after_what_it_took(made, told, name):
    _, heads, _ = made
    changed = 0
    for each in drafts_worth_checking(told[name]):
        assert len(each.tokens) == NUM_SLOTS
        changed += assert_greedy_chain(each, scores_by_definition(told[name], heads[name], each))
    assert changed > MAX_TOKENS  # or the head would not have been heard


def test_what_the_engine_has_room_for_is_swapped_in_and_the_rest_refused(told):
    assert "loaded" in told["narrow"].swapped[0]
    assert "loaded" in told["none"].swapped[0]
    (answer,) = told["wide"].swapped
    assert (
        f"a pairwise head of rank {RANK + 1}, the engine was started for at most {RANK}" in answer["refused"]
    )


def test_the_vocabulary_is_the_targets(made):
    _, heads, _ = made
    assert heads["trees"] is not None
    assert len(heads["trees"].parents_Vr) == VOCAB
