"""serve/baselines.py: vLLM's own ways of drafting, and which targets have them."""

import json
import shutil

import numpy as np
import pytest
from drafters import EMBEDDED_TARGET, tiny_recipe
from safetensors.numpy import save_file

from recipes.errors import UserError
from recipes.schema import Target
from serve.baselines import read_baseline
from serve.plan import Request, Settings, make_plan
from serve.show import show_plan

PLAIN = Target(model=str(EMBEDDED_TARGET))


def write_target(folder, tensors=("mtp.fc.weight",), **config):
    """Of a config and the names of its tensors alone."""
    folder.mkdir()
    told = json.loads((EMBEDDED_TARGET / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | config))
    save_file({name: np.zeros(1, np.float32) for name in tensors}, folder / "model.safetensors")
    return Target(model=str(folder))


def test_a_baseline_drafts_as_much_as_the_chain_unless_it_says_a_number():
    assert read_baseline("ngram", PLAIN, 7).speculative == {
        "method": "ngram",
        "num_speculative_tokens": 7,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }
    few = read_baseline("ngram:3", PLAIN, 7)
    assert (few.name, few.num_drafts, few.speculative["num_speculative_tokens"]) == ("ngram:3", 3, 3)


def test_a_target_with_a_head_for_the_tokens_after_the_next_drafts_with_it(tmp_path):
    target = write_target(tmp_path / "t", mtp_num_hidden_layers=1)
    assert read_baseline("mtp", target, 7).speculative == {"method": "mtp", "num_speculative_tokens": 7}
    nested = write_target(tmp_path / "n", text_config={"num_nextn_predict_layers": 1}, tensors=("x",))
    assert read_baseline("mtp:2", nested, 7).num_drafts == 2


@pytest.mark.parametrize("config", [{}, {"mtp_num_hidden_layers": 0}])
def test_a_target_without_one_is_refused(config, tmp_path):
    with pytest.raises(UserError, match=r"has no MTP head, its config\.json has none of mtp_num"):
        read_baseline("mtp", write_target(tmp_path / "t", **config), 7)


def test_a_head_that_was_lost_when_the_target_was_written_is_missed(tmp_path):
    target = write_target(tmp_path / "t", tensors=("model.norm.weight",), mtp_num_hidden_layers=1)
    with pytest.raises(UserError, match=r"no tensor mtp\.\* in its files"):
        read_baseline("mtp", target, 7)
    dummy = target.model_copy(update={"load_format": "dummy"})
    assert read_baseline("mtp", dummy, 7).num_drafts == 7


def test_an_eagle_is_named_by_its_checkpoint(tmp_path):
    shutil.copytree(EMBEDDED_TARGET.parent / "drafter", tmp_path / "eagle")
    found = read_baseline(f"eagle3:4={tmp_path / 'eagle'}", PLAIN, 7)
    assert (found.name, found.num_drafts) == ("eagle3:4", 4)
    assert found.speculative["model"] == str(tmp_path / "eagle")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ngrams", "expected ngram, mtp or eagle3=CHECKPOINT"),
        ("ngram:0", "expected ngram"),
        ("suffix", "does not draft by suffixes"),
        ("eagle3", "eagle3 needs a CHECKPOINT"),
        ("ngram=folder", "no other has one"),
        ("eagle3=nowhere at all", "found no such folder"),
        ("eagle3=recipes", r"no config\.json in"),
    ],
)
def test_what_is_no_baseline_is_refused_with_what_is(text, said):
    with pytest.raises(UserError, match=said):
        read_baseline(text, PLAIN, 7)


def test_the_server_is_told_of_a_baseline_in_its_settings_and_says_it(tmp_path, capsys):
    recipe, baseline = tiny_recipe(), read_baseline("ngram:3", PLAIN, 7)
    path = tmp_path / "settings.json"
    settings = Settings(target=recipe.target, serve=recipe.serve, baseline=baseline)
    path.write_text(settings.model_dump_json())
    plan = make_plan(Request(None, None, None, path, 0))
    assert (plan.baseline, plan.drafter) == (baseline, None)
    show_plan(plan, "127.0.0.1", 8000)
    assert "vLLM's own ngram:3, 3 drafts a step" in " ".join(capsys.readouterr().out.split())
