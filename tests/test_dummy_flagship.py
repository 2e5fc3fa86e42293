"""tests/dummy_flagship.py: a recipe of made-up weights that everything of ours reads."""

import json

import pytest
from dummy_flagship import EMBEDDED, FLAGSHIP, list_overrides, write_target
from transformers import AutoTokenizer

from recipes.load import check_against_target, load_recipe
from recipes.manifest import identify_target
from train.target_parts import load_target_parts

VOCABULARY, HIDDEN, LAYERS = 5000, 48, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dummy") / "target"
    config = json.loads((EMBEDDED / "config.json").read_text())
    write_target(folder, config | {"vocab_size": VOCABULARY, "hidden_size": HIDDEN})
    return folder


def test_the_recipe_reads_it_as_its_target(folder):
    recipe = load_recipe(FLAGSHIP, [*list_overrides(folder, LAYERS), "drafter.mask_token_id=7"])
    check_against_target(recipe)
    assert max(recipe.drafter.target_layer_ids) < LAYERS
    assert identify_target(recipe.target).vocab_size == VOCABULARY


def test_the_trainer_finds_an_embedding_and_another_head(folder):
    recipe = load_recipe(FLAGSHIP, list_overrides(folder, LAYERS))
    parts = load_target_parts(recipe.target)
    assert parts.embedding_VD.shape == parts.head_VD.shape == (VOCABULARY, HIDDEN)
    assert not parts.embedding_VD.equal(parts.head_VD)


def test_every_id_has_a_word_and_texts_are_cut_as_the_embedded_targets(folder):
    tokenizer, own = (AutoTokenizer.from_pretrained(path) for path in (folder, EMBEDDED))
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.decode([VOCABULARY - 1]) == f"<{VOCABULARY - 1}>"
    text = "def double(x):\n    return 2 * x  # <4999> is text"
    assert tokenizer(text).input_ids == own(text).input_ids
