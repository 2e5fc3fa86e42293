"""A DFlash2 drafter in real engines: trees and chains are the selector's by definition, the text plain's."""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafted_checks import assert_greedy_chain, assert_heaps_tree, greedy_chain
from drafters import random_weights, write_checkpoint
from pairwise_probe import BUDGET, MAX_TOKENS, RESERVED, Told
from probe_host import run_probe
from safetensors.torch import load_file
from selector_probe import Selected
from tree_targets import NUM_SLOTS, Case, write_dense_case

pytestmark = pytest.mark.engine

TOP_K = 6
FEW = {"top_k": 2, "num_slots": 2}  # 2 + 4 nodes in all
MULTIPLIER, SOFTCAP = 0.5, 20.0
SELECTOR = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": TOP_K,
    "input_embedding_scale": 1.5,
    "output_multiplier": MULTIPLIER,
    "final_logit_softcapping": SOFTCAP,
}


@dataclass(frozen=True)
class Made:
    case: Case
    weights: dict[str, dict[str, torch.Tensor]]
    """Of the drafter, by round."""
    head_VD: torch.Tensor
    folder: Path
    """Where the engines told of their rounds."""


def write_selector(folder: Path, plain: Path, seed: int, **changes: Any) -> Path:
    """A DFlash2 with the shape of a DFlash, its selector loud enough to change most chains."""
    config = json.loads((plain / "config.json").read_text())
    own = changes.pop("dflash_config", {})
    config |= {"architectures": ["DFlash2DraftModel"], **changes}
    config["dflash_config"] |= SELECTOR | own
    weights = {name: weight.float() for name, weight in random_weights(config, seed).items()}
    for name in ("predecessor_codebook", "successor_codebook"):
        weights[f"candidate_selector.{name}"] *= 2
    return write_checkpoint(folder, config, weights)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("selector")
    dense = write_dense_case(folder / "case")
    plain = Path(dense.ckpt)
    first = write_selector(folder / "first", plain, seed=5)
    few = {"dflash_config": {"selector_top_k": FEW["top_k"]}, "block_size": FEW["num_slots"] + 1}
    few_ckpt = write_selector(folder / "few", plain, seed=5, **few)
    wider = {"dflash_config": {"selector_top_k": TOP_K + 1}}
    others = {
        "plain": plain,
        "wider": write_selector(folder / "wider", plain, seed=5, **wider),
        "other": write_selector(folder / "other", plain, seed=6),
    }
    case = Case(dense.target, str(first), dense.prompts[:3])
    named = {name: str(ckpt) for name, ckpt in others.items()}
    (folder / "told").mkdir()
    (folder / "told" / "case").write_bytes(pickle.dumps((case, named, str(few_ckpt))))
    run_probe("selector_probe", folder / "told")
    of_first = load_file(first / "model.safetensors")
    weights = dict.fromkeys(("trees", "chains", "chain", "reserved", "few", "GPU's trees"), of_first)
    weights["swapped"] = load_file(others["other"] / "model.safetensors")
    head_VD = load_file(Path(dense.target) / "model.safetensors")["lm_head.weight"]
    return Made(case, weights, head_VD, folder / "told")


@pytest.fixture(scope="module")
def told(made) -> dict[str, Told]:
    rounds: dict[str, Told] = {}
    for name in ("plain", "trees", "chain", "reserved", "few", "gpu"):
        rounds |= pickle.loads((made.folder / f"{name}.told").read_bytes())
    return rounds


def scores_by_definition(weights: dict[str, torch.Tensor], committed: int, each: Selected) -> torch.Tensor:
    """s(slot, parent's candidate, candidate), one parent after another. [L, C, C]"""
    predecessors_Vr = weights["candidate_selector.predecessor_codebook"]
    successors_Vr = weights["candidate_selector.successor_codebook"]
    projection_rD = weights["candidate_selector.hidden_projection.weight"]
    scores_LCC = torch.empty(*each.tokens_LC.shape, each.tokens_LC.shape[1])
    for slot, hidden_D in enumerate(each.hidden_LD):
        for row in range(scores_LCC.shape[1]):
            parent = committed if slot == 0 else int(each.tokens_LC[slot - 1, row])
            gated_r = predecessors_Vr[parent] * (projection_rD @ hidden_D)
            x_C = each.logits_LC[slot] + successors_Vr[each.tokens_LC[slot]] @ gated_r
            scores_LCC[slot, row] = x_C - x_C.logsumexp(0)
    return scores_LCC


def drafts_worth_checking(made: Made, told: dict[str, Told], name: str) -> list[tuple[Selected, np.ndarray]]:
    """Whose committed token is in the text (the last step drafts beyond it), with the definition's scores."""
    texts = told[name].texts
    drafted = [each for each in told[name].drafted if 0 < each.committed <= MAX_TOKENS]
    assert len(drafted) > MAX_TOKENS
    return [
        (
            each,
            scores_by_definition(made.weights[name], texts[each.request][each.committed - 1], each).numpy(),
        )
        for each in drafted
    ]


@pytest.mark.parametrize("name", ["trees", "chains", "chain", "reserved", "swapped", "few", "GPU's trees"])
def test_the_text_is_plain_decodings(told, name):
    texts = told[name].texts
    assert texts == told["plain"].texts[: len(texts)]


@pytest.mark.parametrize("name", ["trees", "swapped", "few", "GPU's trees"])
def test_every_tree_is_the_heaps_on_the_definitions_scores(made, told, name):
    branching = 0
    for each, scores_LCC in drafts_worth_checking(made, told, name):
        tree = assert_heaps_tree(each, scores_LCC, BUDGET)
        branching += len(set(tree.parents)) < len(tree)
    assert branching > MAX_TOKENS


def test_a_tree_with_reserved_rows_begins_with_the_chain_that_the_selector_prefers(made, told):
    changed = 0
    for each, scores_LCC in drafts_worth_checking(made, told, "reserved"):
        chain = greedy_chain(scores_LCC)[:RESERVED]
        assert_heaps_tree(each, scores_LCC, BUDGET, chain)
        changed += chain != [0] * RESERVED
    assert changed > MAX_TOKENS  # or each slot's first candidates would do


def test_fewer_paths_than_nodes_give_smaller_trees(told):
    sizes = {len(each.parents) for each in told["few"].drafted}
    assert sizes == {FEW["top_k"] + FEW["top_k"] ** 2}
    assert max(sizes) < BUDGET


@pytest.mark.parametrize("name", ["chains", "chain"])
def test_every_chain_takes_what_is_best_after_what_it_took(made, told, name):
    changed = 0
    for each, scores_LCC in drafts_worth_checking(made, told, name):
        assert len(each.tokens) == NUM_SLOTS
        changed += assert_greedy_chain(each, scores_LCC)
    assert changed > MAX_TOKENS  # or the selector would not have been heard


def test_chain_requests_draft_what_vllms_own_dflash2_drafts(told):
    ours, theirs = (
        {(each.request, each.committed): each.tokens for each in told[name].drafted}
        for name in ("chains", "chain")
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["trees", "chain"])
def test_candidates_are_the_heads_best_scaled_and_capped(made, told, name):
    for each in told[name].drafted:
        best = (each.hidden_LD @ made.head_VD.T).topk(TOP_K)
        assert each.tokens_LC.equal(best.indices)
        expected_LC = SOFTCAP * torch.tanh(MULTIPLIER * best.values / SOFTCAP)
        torch.testing.assert_close(each.logits_LC, expected_LC, rtol=1e-4, atol=1e-4)


def test_another_dflash2_is_swapped_in_and_what_has_another_shape_refused(told):
    plain, wider, other = told["swapped"].swapped
    assert "conv_kernel_size is None, the engine was started for 2" in plain["refused"]
    assert f"selector_top_k is {TOP_K + 1}, the engine was started for {TOP_K}" in wider["refused"]
    assert "loaded" in other
