"""The model card: what the Hub's own reader finds on it, and a measurement's numbers once there are any."""

import pytest
from drafters import EMBEDDED_TARGET, tiny_config, tiny_recipe
from huggingface_hub import ModelCard
from test_eval_report import report, tree_report
from test_train_checkpoint import IDENTITY, drafter_weights, manifest_at

from eval.report import write_report
from recipes.errors import UserError
from recipes.manifest import Origin
from train.card import add_measurement, model_card
from train.checkpoint import publish

ARGV = ["/somewhere/eval/measure.py", "--ckpt", "runs/a b/checkpoint-3", "--out", "runs/report.json"]
PROVENANCE = {"argv": ARGV}


def manifest(model: str = "Qwen/Qwen3.6-27B", *overrides: str, **changes):
    identity = IDENTITY.model_copy(update={"model": model})
    recipe = tiny_recipe(*overrides).model_dump(mode="json")
    return manifest_at(1300).model_copy(update={"target": identity, "recipe": recipe} | changes)


def card(*arguments, **changes) -> ModelCard:
    return ModelCard(model_card(tiny_config(), manifest(*arguments, **changes)))


def test_the_hub_reads_the_header():
    data = card().data
    assert data.base_model == "Qwen/Qwen3.6-27B"
    assert data.to_dict()["library_name"] == "vllm"
    assert {"dflash", "speculative-decoding"} <= set(data.tags)
    assert card().text.startswith("\n# A DFlash drafter for Qwen/Qwen3.6-27B\n")


def test_a_target_in_a_folder_is_no_base_model_that_the_hub_knows():
    found = card(str(EMBEDDED_TARGET))
    assert found.data.base_model is None
    assert f"# A DFlash drafter for {EMBEDDED_TARGET}" in found.text


def test_target_data_recipe_and_objective_are_told():
    text = card("t/t", "data.num_prompts=6200").text
    assert f"- target: t/t in bfloat16, fingerprint `{'0' * 64}`" in text
    assert "- recipe: `tiny_cpu`" in text
    assert "6,200 prompts of `stdlib:train`" in text
    assert "10,400 sequences (1,300,000 tokens)" in text
    assert "decay 2.5" in text
    assert "1,300 optimizer steps" in text


def test_a_beginning_and_adapters_are_told():
    assert "- begun: at random\n- trained: all weights\n" in card().text
    origin = Origin(checkpoint="/models/z", format="speculators", fingerprint="ab" * 32)
    overrides = ["train.init_from=/models/z", "train.lora={rank: 8, alpha: 16, targets: [q_proj, v_proj]}"]
    text = card("t/t", *overrides, init_from=origin).text
    assert f"- begun: with `z` (speculators format), fingerprint `{'ab' * 32}`\n" in text
    assert "- trained: adapters (LoRA) of rank 8, alpha 16, on q_proj, v_proj; merged" in text


def test_prompts_in_a_file_are_told_without_their_folder():
    assert "6,200 prompts of `chats.jsonl` at most" in card("t/t", "data.prompts=/data/chats.jsonl").text


def test_a_checkpoint_that_was_not_measured_says_what_was_simulated():
    text = card(simulated_acceptance=2.25).text
    assert "Simulated, of the chain on training blocks: 2.25." in text
    assert "Not measured yet." in text


@pytest.fixture
def ckpt(tmp_path):
    return publish(tmp_path, drafter_weights(), tiny_config(), manifest(simulated_acceptance=2.5))


def measured_card(ckpt, measured) -> str:
    write_report(ckpt.parent / "report.json", measured)
    add_measurement(ckpt, ckpt.parent / "report.json")
    return (ckpt / "README.md").read_text()


def test_a_measurement_is_a_table_by_drafts_and_temperature(ckpt):
    text = measured_card(ckpt, tree_report(provenance=PROVENANCE))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:] == [
        "| chain | 0 | 2.50 | 2.25 to 2.75 | 4 | 500 |",
        "| trees of 15 | 0 | 3.00 | 2.75 to 3.25 | 4 | 600 |",
        "| chain | 0.7 | 1.50 | 1.25 to 1.75 | 4 | 300 |",
        "| trees of 15 | 0.7 | 1.75 | 1.50 to 2.00 | 4 | 350 |",
    ]
    assert "Measured on 4 held-out prompts of `stdlib:heldout`, answers of up to\n64 tokens" in text
    assert "in vLLM 0.32.0, cpu, bfloat16:" in text
    assert "Not measured" not in text
    assert "training blocks: 2.50." in text


def test_the_command_that_measured_it_can_be_typed_again(ckpt):
    text = measured_card(ckpt, report(provenance=PROVENANCE))
    command = "    python eval/measure.py --ckpt 'runs/a b/checkpoint-3' --out runs/report.json\n"
    assert text.endswith(command)


def test_a_measurement_without_trees_or_intervals_has_none(ckpt):
    plain = report(provenance=PROVENANCE)
    unsure = plain.chain.model_copy(update={"standard_error": None})
    text = measured_card(ckpt, plain.model_copy(update={"chain": unsure}))
    assert "| chain | 0 | 2.50 | unknown | 4 | 500 |" in text
    assert "trees" not in text


def test_measuring_again_replaces_the_numbers(ckpt):
    first = measured_card(ckpt, tree_report(provenance=PROVENANCE))
    measured_card(ckpt, report(provenance=PROVENANCE))
    assert measured_card(ckpt, tree_report(provenance=PROVENANCE)) == first


def test_only_the_card_changes_and_no_half_of_it_is_left(ckpt, monkeypatch):
    before = {path.name: path.read_bytes() for path in ckpt.iterdir()}
    write_report(ckpt.parent / "report.json", report(provenance=PROVENANCE))
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            add_measurement(ckpt, ckpt.parent / "report.json")
    assert {path.name: path.read_bytes() for path in ckpt.iterdir()} == before
    add_measurement(ckpt, ckpt.parent / "report.json")
    after = {path.name: path.read_bytes() for path in ckpt.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"README.md"}
    assert after.keys() == before.keys()


def test_a_report_of_another_schema_is_refused(ckpt):
    (ckpt.parent / "report.json").write_text('{"schema_version": 2}')
    with pytest.raises(UserError, match="expected schema_version 1, found 2"):
        add_measurement(ckpt, ckpt.parent / "report.json")
