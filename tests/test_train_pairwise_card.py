"""The model card's section on a pairwise head: on any card, once, and kept when the drafter is measured."""

from pathlib import Path

import pytest
from drafters import tiny_config, tiny_recipe
from huggingface_hub import ModelCard
from test_eval_report import tree_report
from test_train_card import PROVENANCE, manifest
from test_train_checkpoint import IDENTITY, drafter_weights

from eval.report import write_report
from recipes.manifest import Origin, write_json
from train.card import add_head, add_measurement
from train.checkpoint import publish
from train.pairwise_manifest import HeadManifest, Simulated, head_manifest_path, read_head_manifest

ROWS = ["| chain | 2.43 | 2.84 |", "| trees of 15 | 3.09 | 3.51 |", "| trees of 31 | 3.31 | 3.79 |"]


def head_manifest(after: float = 2.84) -> HeadManifest:
    return HeadManifest(
        target=IDENTITY,
        recipe=tiny_recipe("pairwise.budgets=[15, 31]").model_dump(mode="json"),
        provenance=PROVENANCE,
        drafter=Origin(checkpoint="/somewhere", format="published", fingerprint="ab" * 32),
        shards="cd" * 32,
        step=600,
        held_out_sequences=1288,
        held_out_blocks=8196,
        before=Simulated(chain=2.43, trees=[3.09, 3.31]),
        after=Simulated(chain=after, trees=[3.51, 3.79]),
    )


@pytest.fixture
def ckpt(tmp_path) -> Path:
    return publish(tmp_path, drafter_weights(), tiny_config(), manifest(simulated_acceptance=2.5))


def put_head(ckpt: Path, head: HeadManifest) -> str:
    """The card, then."""
    head_manifest_path(ckpt).parent.mkdir(exist_ok=True)
    write_json(head_manifest_path(ckpt), head)
    add_head(ckpt, ckpt.parent)
    return (ckpt / "README.md").read_text()


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("| chain", "| trees"))]


def test_what_is_written_is_read_again(ckpt):
    assert read_head_manifest(ckpt) is None
    put_head(ckpt, head_manifest())
    assert read_head_manifest(ckpt) == head_manifest()


def test_the_section_stands_below_a_card_that_is_otherwise_the_same(ckpt):
    before = (ckpt / "README.md").read_text()
    text = put_head(ckpt, head_manifest())
    assert text.startswith(before)
    assert rows_of(text) == ROWS
    assert "Rank 64, trained in 600 steps" in text
    assert "simulated on 1,288 sequences" in text
    assert ModelCard(text).data.to_dict()["library_name"] == "vllm"


def test_another_head_replaces_the_section(ckpt):
    put_head(ckpt, head_manifest())
    text = put_head(ckpt, head_manifest(after=2.91))
    assert rows_of(text)[0] == "| chain | 2.43 | 2.91 |"
    assert text == put_head(ckpt, head_manifest(after=2.91))
    assert text.count("## Pairwise head") == 1


def test_a_section_that_follows_stays(ckpt):
    put_head(ckpt, head_manifest())
    card = ckpt / "README.md"
    card.write_text(card.read_text() + "\n## Thanks\n\nTo all.\n")
    text = put_head(ckpt, head_manifest(after=2.91))
    assert "## Thanks\n\nTo all.\n\n## Pairwise head\n" in text
    assert rows_of(text)[0] == "| chain | 2.43 | 2.91 |"
    assert text.count("## Pairwise head") == 1


def test_a_measurement_keeps_the_section(ckpt):
    put_head(ckpt, head_manifest())
    write_report(ckpt.parent / "report.json", tree_report(provenance=PROVENANCE))
    add_measurement(ckpt, ckpt.parent / "report.json")
    text = (ckpt / "README.md").read_text()
    assert rows_of(text)[-3:] == ROWS
    assert "| chain | 0 | 2.50 |" in text


def test_a_drafter_without_a_card_gets_one(ckpt):
    (ckpt / "README.md").unlink()
    text = put_head(ckpt, head_manifest())
    assert text.startswith(f"# A DFlash drafter for {IDENTITY.model}\n\n## Pairwise head\n")
    assert not list(ckpt.parent.rglob("*.tmp"))
