"""Another drafter for a running engine: it drafts from then on, and one that does not fit changes nothing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from drafters import EMBEDDED_TARGET, random_weights, write_checkpoint
from safetensors.torch import load_file
from swap_probe import TARGET, Plan, Swapped, probe
from transformers import AutoTokenizer

from data.groups import render
from data.prompts import load_prompts
from recipes.errors import UserError
from serve.served import describe_served
from serve.swap import read_replacement

REFERENCE = EMBEDDED_TARGET.parent / "drafter"
CONFIG = json.loads((REFERENCE / "config.json").read_text())
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("untrained"), CONFIG, random_weights(CONFIG))


def damaged(folder: Path, **changes: object) -> Path:
    """The reference drafter with other config keys or tensors."""
    config = CONFIG | {key: value for key, value in changes.items() if key in CONFIG}
    weights = load_file(REFERENCE / "model.safetensors")
    for name, tensor in changes.get("weights", {}).items():  # type: ignore[attr-defined]
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    return write_checkpoint(folder, config, weights)


def with_nan() -> torch.Tensor:
    tensor = load_file(REFERENCE / "model.safetensors")["fc.weight"].clone()
    tensor[3, 5] = torch.nan
    return tensor


def truncated(folder: Path) -> Path:
    shutil.copytree(REFERENCE, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return folder


def of_another_target(folder: Path) -> Path:
    shutil.copytree(REFERENCE, folder)
    manifest = json.loads((folder / "draftsmith.json").read_text())
    manifest["target"]["fingerprint"] = "0" * 64
    (folder / "draftsmith.json").write_text(json.dumps(manifest))
    return folder


OTHER_TAPS = CONFIG["dflash_config"] | {"target_layer_ids": [1, 3, 4, 6]}
HEAD = torch.zeros(CONFIG["vocab_size"], CONFIG["hidden_size"], dtype=torch.bfloat16)
MISFITS = {
    "taps": (lambda f: damaged(f, dflash_config=OTHER_TAPS), "target_layer_ids is"),
    "window": (lambda f: damaged(f, sliding_window=CONFIG["sliding_window"] + 1), "sliding_window is"),
    "layers": (lambda f: damaged(f, layer_types=["full_attention"] * 6), "layer_types is"),
    "block": (lambda f: damaged(f, block_size=16), "block_size is 16"),
    "missing": (lambda f: damaged(f, weights={"fc.weight": None}), "fc.weight .* is missing"),
    "shared": (lambda f: damaged(f, weights={"lm_head.weight": HEAD}), "overwrite the target"),
    "NaN": (lambda f: damaged(f, weights={"fc.weight": with_nan()}), "fc.weight has 1 values that are not"),
    "truncated": (truncated, "damaged or cut short"),
    "another target": (of_another_target, "made for .* another target"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_by_name(tmp_path, name):
    make, said = MISFITS[name]
    fingerprint = json.loads((REFERENCE / "draftsmith.json").read_text())["target"]["fingerprint"]
    served = describe_served(REFERENCE, TARGET, fingerprint)
    assert read_replacement(REFERENCE, served).keys() == load_file(REFERENCE / "model.safetensors").keys()
    with pytest.raises(UserError, match=said):
        read_replacement(make(tmp_path / "misfit"), served)


def test_the_same_config_in_other_words_fits(tmp_path):
    config = {key: value for key, value in CONFIG.items() if key != "rope_theta"} | CONFIG["dflash_config"]
    ckpt = write_checkpoint(tmp_path / "other", config, load_file(REFERENCE / "model.safetensors"))
    assert read_replacement(ckpt, describe_served(REFERENCE, TARGET, None))


# In an engine


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    return [prompt.token_ids for prompt in render(load_prompts("stdlib:heldout", 5), tokenizer)]


@pytest.fixture(scope="module")
def swapped(prompts, untrained, tmp_path_factory) -> Swapped:
    folder = tmp_path_factory.mktemp("swapped")
    misfits = [str(make(folder / name)) for name, (make, _) in MISFITS.items() if name != "another target"]
    reference, other = str(REFERENCE), str(untrained)
    plan = Plan(
        str(shutil.copytree(other, folder / "first")),
        prompts,
        MAX_TOKENS,
        first_goes=True,
        quiet=[reference, other, reference],
        refused=misfits,
        loaded=[other, reference] * 5,
    )
    return probe(plan, folder)


@pytest.fixture(scope="module")
def fresh(prompts, tmp_path_factory) -> Swapped:
    """An engine that starts with the reference drafter."""
    return probe(Plan(str(REFERENCE), prompts, MAX_TOKENS), tmp_path_factory.mktemp("fresh"))


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32, which FlashAttention does not know")


@pytest.mark.engine
def test_the_drafter_that_was_swapped_in_drafts_as_in_an_engine_of_its_own(swapped, fresh):
    first, again, last = swapped.quiet
    for told in (first, last):
        assert told.drafted == fresh.first.drafted
        assert told.emitted == fresh.first.emitted
    assert again.drafted == swapped.first.drafted != fresh.first.drafted


@pytest.mark.engine
def test_text_is_the_targets_whoever_drafts(swapped, fresh):
    texts = fresh.first.texts
    assert all(told.texts == texts for told in (swapped.first, *swapped.quiet))
    assert len(swapped.texts) > 20
    assert all(text == texts[number] for number, text in swapped.texts)


@pytest.mark.engine
def test_a_checkpoint_that_does_not_fit_is_refused_and_the_old_one_goes_on(swapped):
    assert [list(said) for said in swapped.refusals] == [["refused"]] * (len(MISFITS) - 1)
    assert swapped.after_refusals.drafted == swapped.quiet[-1].drafted


@pytest.mark.engine
def test_under_load_acceptance_is_that_of_the_loaded_drafter(swapped):
    """Ten swaps, with requests under way at each."""
    of_untrained, of_reference = swapped.acceptance[::2], swapped.acceptance[1::2]
    print([f"{accepted:.2f}" for accepted in swapped.acceptance])
    assert max(of_untrained) < 0.3
    assert min(of_reference) > 1.5


@pytest.mark.engine
def test_weights_stay_where_graphs_look_for_them(swapped):
    assert swapped.addresses_stay
