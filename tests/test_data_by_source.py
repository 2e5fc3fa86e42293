"""Settings by source, and what shards say of theirs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from test_data_shards import EMPTY, check_equal, sequence

from data.groups import Rendered
from data.mixture import load_conversations
from data.shard_plan import make_plan
from data.shards import MANIFEST_NAME, Shard, ShardWriter, open_shards, write_shard_file
from recipes.errors import UserError
from recipes.load import load_recipe, write_resolved
from recipes.manifest import ShardManifest, read_manifest, write_json
from recipes.schema import Data, Recipe
from tests.drafters import TINY_RECIPE

OWN = {"temperature": 0.7, "max_tokens": 30}


def data(*sources: dict[str, Any], **options: Any) -> Data:
    return Data(prompts=[{"path": "a"} | source for source in sources], num_prompts=9, **options)


def recipe_of(folder: Path, *sources: dict[str, Any]) -> Recipe:
    path = folder / "a.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    prompts = json.dumps([{"path": str(path)} | source for source in sources])
    return load_recipe(TINY_RECIPE, [f"output_dir={folder}", f"data.prompts={prompts}"])


# What a source says, and what it leaves to all


def test_what_a_source_does_not_say_is_as_for_all():
    mixed = data({"sampling": OWN}, {"path": "b"}, sampling={"top_p": 0.9, "temperature": 0.2})
    assert mixed.sampling_of("a").model_dump() == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "max_tokens": 30,
    }
    assert mixed.sampling_of("b") == mixed.sampling_of("no such") == mixed.sampling


def test_a_written_recipe_leaves_open_what_was_left_open(tmp_path):
    recipe = recipe_of(tmp_path, {"sampling": {"temperature": [0, 1]}, "thinking": "off"})
    write_resolved(recipe, tmp_path)
    again = load_recipe(tmp_path / "recipe.yaml", ["data.sampling.max_tokens=7"])
    (source,) = again.data.prompts
    assert source == recipe.data.prompts[0]
    assert again.data.sampling_of(source.label).max_tokens == 7


def test_a_source_has_its_own_modes_of_thinking():
    mixed = data({"thinking": {"on": 1, "off": 1}}, {"path": "b"}, {"path": "c", "thinking": "off"})
    ids = [f"{number:x}" for number in range(50)]
    assert {mixed.choose_thinking(each, "a") for each in ids} == {"on", "off"}
    assert {mixed.choose_thinking(each, "b") for each in ids} == {"template"}
    assert {mixed.choose_thinking(each, "c") for each in ids} == {"off"}


def test_room_is_kept_for_answers_as_long_as_the_sources_own():
    mixed = data({"sampling": OWN}, {"path": "b"}, sampling={"max_tokens": 50})
    assert Rendered("0" * 16, [1] * 5, source="a").most_tokens(mixed) == 35
    assert Rendered("0" * 16, [1] * 5, source="b", turns=(1, 3)).most_tokens(mixed) == 105


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"sampling": {"max_tokens": 51}}, r"prompts\[1\]\.sampling\.max_tokens is 51, .*is 50: raise"),
        ({"sampling": {"top_k": 5}}, r"prompts\[1\]\.sampling\.top_k changes nothing at temperature 0"),
        ({"sampling": {}}, r"prompts\.1\.sampling\n.*expected one of temperature, top_p, top_k, max_tokens"),
        ({"sampling": {"temprature": 1}}, r"prompts\.1\.sampling\.temprature"),
        ({"thinking": "loud"}, r"prompts\.1\.thinking"),
        ({"path": "a", "thinking": "on"}, r"prompts\[1\] is called a as one before it"),
    ],
)
def test_settings_without_sense_are_refused_by_name(source, said):
    with pytest.raises(ValueError, match=said):
        data({}, {"path": "b"} | source, sampling={"max_tokens": 50})


def test_a_mode_that_the_template_does_not_know_is_refused_with_its_source(tmp_path):
    recipe = recipe_of(tmp_path, {"path": "a", "name": "other"}, {"thinking": "off"})
    with pytest.raises(UserError, match=r"data\.prompts\[1\]\.thinking off: the chat template of .* has no"):
        make_plan(recipe)


# Going on


def begin_shards(recipe: Recipe) -> Path:
    """A folder that the recipe has begun; the path of its manifest."""
    path = recipe.output_dir / "shards" / MANIFEST_NAME
    write_json(path, make_plan(recipe).writer.manifest)
    return path


@pytest.mark.parametrize(
    "change", [{"sampling": OWN}, {"thinking": "template"}, {"sampling": {"top_p": 0.5, "temperature": 1}}]
)
def test_other_settings_of_a_source_make_other_shards(tmp_path, change):
    begin_shards(recipe_of(tmp_path, {"sampling": {"temperature": 1}}))
    assert make_plan(recipe_of(tmp_path, {"sampling": {"temperature": 1}})).missing == [0]
    with pytest.raises(UserError, match=r"data\.prompts: found"):
        make_plan(recipe_of(tmp_path, change))


def test_shards_that_are_older_than_these_settings_are_gone_on_with(tmp_path):
    path = begin_shards(recipe_of(tmp_path, {}))
    old = json.loads(path.read_text())
    for name in ("sampling", "thinking"):
        del old["recipe"]["data"]["prompts"][0][name]
    path.write_text(json.dumps(old))
    assert make_plan(recipe_of(tmp_path, {})).missing == [0]


# Names


def test_a_shard_has_the_same_bytes_whatever_its_sources_are_called(tmp_path):
    sequences = [sequence(0), sequence(1)]
    one, other, nameless, alone = (
        write_shard_file(tmp_path, number, sequences, ["p", "q"], sources)
        for number, sources in enumerate([["a", "b"], ["/c", "/d"], (), ["a", "a"]])
    )
    assert one.sha256 == other.sha256
    assert nameless.sha256 == alone.sha256 != one.sha256
    assert list(alone.sources) == ["a"]
    assert {each.source for each in Shard(tmp_path / alone.file).read_texts(["a"])} == {"a"}


def test_a_prompt_knows_its_source_and_the_place_there(tmp_path):
    recipe = recipe_of(tmp_path, {"name": "mine"})
    (first, second) = sorted(load_conversations(recipe.data).conversations, key=lambda each: each.place)
    assert [(each.source, each.place) for each in (first, second)] == [("mine", "line 1"), ("mine", "line 2")]
    assert [prompt.source for group in make_plan(recipe).groups for prompt in group] == ["mine"] * 2


def test_every_sequence_keeps_the_name_of_its_source(tmp_path):
    sources, sequences = ["b", "a", "b", "c"], [sequence(seed) for seed in range(4)]
    writer = ShardWriter(tmp_path, EMPTY)
    writer.add(write_shard_file(tmp_path, 0, sequences, list("pqrs"), sources))
    shards = open_shards(tmp_path)
    (entry,) = shards.manifest.shards
    texts = list(Shard(tmp_path / entry.file).read_texts(list(entry.sources)))
    assert [(each.name, each.source) for each in texts] == list(zip("pqrs", sources, strict=True))
    for text, expected in zip(texts, sequences, strict=True):
        assert torch.equal(text.token_ids, expected.token_ids)
        assert torch.equal(text.loss_mask, expected.loss_mask)
    check_equal(shards[2], sequences[2])
    counts = entry.sources
    assert list(counts) == ["b", "a", "c"]
    assert counts["b"].tokens == sum(len(sequences[number].token_ids) for number in (0, 2))
    assert counts["c"].supervised_tokens == int(sequences[3].loss_mask.sum())


def test_a_source_is_still_counted_when_its_shard_is_consumed(tmp_path):
    writer = ShardWriter(tmp_path, EMPTY)
    entry = write_shard_file(tmp_path, 0, [sequence(0)], ["p"], ["a"])
    writer.add(entry)
    writer.consume_before(1)
    assert read_manifest(tmp_path / MANIFEST_NAME, ShardManifest).shards[0].sources == entry.sources


def test_shards_without_sources_are_as_before_and_read_as_nameless(tmp_path):
    entry = write_shard_file(tmp_path, 0, [sequence(0), sequence(1)], ["p", "q"])
    with safe_open(tmp_path / entry.file, framework="pt") as file:
        assert file.metadata() == {"prompt_ids": '["p", "q"]'}
    assert [each.source for each in Shard(tmp_path / entry.file).read_texts([])] == ["", ""]
    old = {name: value for name, value in entry.model_dump().items() if name != "sources"}
    assert type(entry).model_validate(old) == entry
