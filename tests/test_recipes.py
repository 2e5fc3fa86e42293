"""Recipes: what loads, what is refused and in which words, and what a target's config forbids."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from recipes.errors import UserError
from recipes.load import check_against_target, load_recipe, resolve_model, write_resolved
from recipes.schema_paths import nearest_path, schema_fields

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
TINY = RECIPES / "tiny_cpu.yaml"
SMALL = Path(__file__).with_name("small_recipe.yaml")
FLAGSHIP = RECIPES / "qwen36_dflash.yaml"


def complaint(path: Path, *overrides: str) -> list[str]:
    """The lines of the one error that loading ends with."""
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).splitlines()


@pytest.fixture
def edited(tmp_path):
    """The small recipe with one piece of its text replaced."""

    def edit(old: str, new: str) -> Path:
        text = SMALL.read_text()
        assert text.count(old) == 1
        path = tmp_path / "edited.yaml"
        path.write_text(text.replace(old, new))
        return path

    return edit


@pytest.fixture
def other_target(tmp_path):
    """A target's folder with the given config.json (and generation_config.json)."""

    def make(config: dict, generation: dict | None = None) -> str:
        folder = tmp_path / "target"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return f"target.model={folder}"

    return make


SHAPE = {"hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 8}


# What loads


def test_the_demo_recipe_loads_and_fits_its_target():
    check_against_target(load_recipe(TINY))


def test_the_flagship_has_the_published_drafter_shape():
    recipe = load_recipe(FLAGSHIP)
    assert recipe.drafter.model_dump() == {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "block_size": 16,
        "target_layer_ids": [1, 16, 31, 46, 61],
        "mask_token_id": 248070,
        "intermediate_size": 17408,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e7,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "initializer_range": 0.02,
    }
    assert recipe.target.model == "Qwen/Qwen3.6-27B"
    assert recipe.target.dtype == "bfloat16"


def test_the_flagship_fits_a_config_of_its_targets_shape(other_target):
    text = {"hidden_size": 5120, "vocab_size": 248320, "num_hidden_layers": 64, "eos_token_id": 248044}
    generation = {"eos_token_id": [248046, 248044], "pad_token_id": 248044}
    override = other_target({"model_type": "qwen3_5", "text_config": text}, generation)
    check_against_target(load_recipe(FLAGSHIP, [override]))


@pytest.mark.parametrize("path", [TINY, FLAGSHIP])
def test_the_resolved_recipe_loads_as_the_same_recipe(path, tmp_path):
    recipe = load_recipe(path, ["train.optimizer.learning_rate=1e-5", "output_dir='1e3'"])
    write_resolved(recipe, tmp_path / "run")
    assert load_recipe(tmp_path / "run" / "recipe.yaml") == recipe


def test_the_resolved_recipe_says_the_same_to_other_yaml_readers(tmp_path):
    recipe = load_recipe(
        SMALL, ["train.optimizer.learning_rate=1e-5", "data.prompts='1e3'", "eval.suite='no'"]
    )
    write_resolved(recipe, tmp_path)
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text()) == recipe.model_dump(mode="json")


def test_provenance_stands_beside_the_resolved_recipe(tmp_path):
    write_resolved(load_recipe(SMALL), tmp_path)
    assert json.loads((tmp_path / "provenance.json").read_text())["argv"] == sys.argv


def test_recipes_load_without_torch():
    code = "import sys, recipes.load, recipes.manifest; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Overrides


def test_an_override_reaches_a_nested_field_that_the_file_leaves_out():
    assert load_recipe(FLAGSHIP, ["train.optimizer.learning_rate=0.25"]).train.optimizer.learning_rate == 0.25


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "+.001", "0.001"])
def test_every_spelling_of_a_number_is_a_number(text):
    assert load_recipe(SMALL, [f"train.optimizer.learning_rate={text}"]).train.optimizer.learning_rate == 1e-3


def test_an_exponent_in_the_file_is_a_number(edited):
    recipe = load_recipe(edited("learning_rate: 2.0e-3", "learning_rate: 2e-3"))
    assert recipe.train.optimizer.learning_rate == 2e-3


def test_overrides_take_lists_and_null_and_truth_values():
    overrides = ["drafter.target_layer_ids=[1,3]", "target.revision=null", "train.offload_optimizer=true"]
    recipe = load_recipe(SMALL, overrides)
    assert recipe.drafter.target_layer_ids == [1, 3]
    assert recipe.target.revision is None
    assert recipe.train.offload_optimizer is True


def test_an_override_leaves_the_fields_beside_it_alone():
    before, after = load_recipe(SMALL), load_recipe(SMALL, ["data.sampling.temperature=0.1"])
    assert (
        after.data.sampling.max_tokens
        == before.data.sampling.max_tokens
        != type(before.data.sampling)().max_tokens
    )


def test_the_last_override_of_a_field_wins():
    assert load_recipe(SMALL, ["train.steps=5", "train.steps=6"]).train.steps == 6


def test_only_true_and_false_are_truth_values():
    assert "train.offload_optimizer" in complaint(SMALL, "train.offload_optimizer=yes")[0]


def test_an_alias_shared_by_two_sections_is_overridden_in_one(tmp_path):
    text = SMALL.read_text().replace("data:\n", "data: &shared\n", 1)
    path = tmp_path / "alias.yaml"
    path.write_text(text.replace("optimizer: {learning_rate: 2.0e-3}", "optimizer: *shared"))
    lines = complaint(path, "data.num_prompts=17")
    assert any("train.optimizer.num_prompts: unknown key, found 512" in line for line in lines)


@pytest.mark.parametrize("override", ["train.steps", "=3", "train.steps 5"])
def test_an_override_without_a_path_and_a_value_is_refused(override):
    assert "expected section.field=value" in complaint(SMALL, override)[0]


def test_an_override_below_a_plain_value_is_refused():
    assert "train.steps has no fields" in complaint(SMALL, "train.steps.warm=1")[0]


# Unknown keys


def test_a_misspelt_key_names_the_right_spelling(edited):
    (line,) = complaint(edited("sliding_window:", "slidng_window:"))
    assert "drafter.slidng_window: unknown key, found 64" in line
    assert line.endswith("drafter.sliding_window")


def test_a_key_in_the_wrong_section_names_the_right_section():
    (line,) = complaint(SMALL, "train.block_size=8")
    assert "train.block_size: unknown key, found 8" in line
    assert line.endswith("drafter.block_size")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("learning_rate", "train.optimizer.learning_rate"),
        ("train.learning_rate", "train.optimizer.learning_rate"),
        ("train.optimiser.learning_rate", "train.optimizer.learning_rate"),
        ("data.max_model_len", "serve.max_model_len"),
        ("data.max_tokens", "data.sampling.max_tokens"),
        ("eval.temperature", "eval.temperatures"),
        ("target.dtyp", "target.dtype"),
        ("trian", "train"),
        ("serve.mask_token", "drafter.mask_token_id"),
    ],
)
def test_the_nearest_path_is_the_one_meant(wrong, right):
    assert nearest_path(wrong) == right


def test_every_valid_path_is_its_own_nearest():
    assert all(nearest_path(path) == path for path in schema_fields())


def test_every_field_of_the_schema_is_reachable_by_its_path():
    assert {"name", "drafter", "drafter.head_dim", "train.optimizer.betas"} <= set(schema_fields())
    assert not any("." in path and path.split(".")[0] not in schema_fields() for path in schema_fields())


# Wrong values


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps='400'", "train.steps: expected a valid integer, found '400'"),
        ("train.steps=true", "train.steps: expected a valid integer, found True"),
        ("train.steps=1.5", "train.steps: expected a valid integer, found 1.5"),
        ("train.steps=", "train.steps: expected a valid integer, found nothing"),
        ("train.steps=0", "train.steps: expected a number greater than 0, found 0"),
        ("target.model=7", "target.model: expected a valid string, found 7"),
        ("target.dtype=float16", "target.dtype: expected 'bfloat16' or 'float32', found 'float16'"),
        ("train=3", "train: expected a mapping, found 3"),
        (
            "drafter.target_layer_ids=[1,x]",
            "drafter.target_layer_ids[1]: expected a valid integer, found 'x'",
        ),
        ("drafter.target_layer_ids=[3,1]", "drafter: target_layer_ids [3, 1]"),
        ("drafter.num_hidden_layers=2", "drafter: layer_types has 3 entries"),
        ("eval.tree_budget=64", "eval.tree_budget: expected a number less than or equal to 63, found 64"),
        ("data.sampling.max_tokens=500", "data.max_prompt_tokens + data.sampling.max_tokens is 692"),
        ("data.num_prompts=2026-11-29", "data.num_prompts: expected a valid integer, found '2026-11-29'"),
    ],
)
def test_a_wrong_value_is_told_with_what_was_expected(override, words):
    (line,) = complaint(SMALL, override)
    assert words in line


def test_a_head_beside_the_drafter_is_asked_for_and_learns_from_text():
    assert load_recipe(SMALL).train.pairwise is None
    defaults = load_recipe(SMALL, ["train.pairwise={}"])
    assert defaults.train.pairwise.rank == defaults.pairwise.rank
    assert load_recipe(SMALL, ["train.pairwise.rank=9"]).train.pairwise.rank == 9
    (line,) = complaint(SMALL, "train.pairwise.objective.kind=total_variation")
    assert "train.pairwise: objective.kind is total_variation: a head learns for" in line
    (line,) = complaint(SMALL, "train.pairwise.objective.kind=kl", "train.objective.kind=cross_entropy")
    assert "train: pairwise.objective.kind is kl, objective.kind cross_entropy: a head takes the" in line
    (line,) = complaint(SMALL, "train.pairwise.steps=9")
    assert "train.pairwise.steps: unknown key" in line


def test_a_missing_key_is_told_with_what_it_should_hold(edited):
    (line,) = complaint(edited("  block_size: 8\n", ""))
    assert "drafter.block_size: missing; expected an integer (Slots of a block" in line


def test_a_missing_section_is_told_with_its_required_keys(edited):
    (line,) = complaint(edited("target:\n  model: recipes/embedded/target\n", ""))
    assert "target: missing; expected a section with at least model" in line


def test_every_problem_is_told_at_once_on_a_line_of_its_own(edited):
    path = edited("  num_attention_heads: 4\n", "  num_attention_heads: 4\n  num_attention_heads: 8\n")
    lines = complaint(
        path, "train.steps=0", "train.block_size=8", "oops", "data.prompts=[", "target.dtype=int8"
    )
    assert lines[0] == f"{path}: 6 problems"
    assert len(lines) == 1 + 6


def test_a_temperature_is_a_number_or_a_list_and_a_list_of_one_is_that_number():
    texts = ["0.7", "[0.7]", "[0, 0.7]"]
    one, alone, two = (load_recipe(SMALL, [f"data.sampling.temperature={text}"]) for text in texts)
    assert one == alone
    dumped = [recipe.model_dump(mode="json")["data"]["sampling"]["temperature"] for recipe in (one, two)]
    assert dumped == [0.7, [0.0, 0.7]]
    assert [two.data.sampling.choose(seed).temperature for seed in range(5)] == [0, 0.7, 0, 0.7, 0]
    (line,) = complaint(SMALL, "data.sampling.temperature=[0.7, -1]")
    assert "data.sampling.temperature[1]: expected a number greater than or equal to 0, found -1" in line
    (line,) = complaint(SMALL, "data.sampling.temperature=[]")
    assert "data.sampling.temperature: List should have at least 1 item" in line


def test_thinking_is_a_mode_or_weights_of_modes_and_a_mode_alone_has_no_weight():
    texts = ["off", "{off: 3}", "{on: 1, off: 3}", "{off: 3, on: 1}"]
    one, alone, two, turned = (load_recipe(SMALL, [f"data.thinking={text}"]) for text in texts)
    dumped = [recipe.model_dump(mode="json")["data"]["thinking"] for recipe in (one, alone, two)]
    assert dumped == ["off", "off", {"on": 1.0, "off": 3.0}]
    ids = [f"{number:016x}" for number in range(2000)]
    chosen = Counter(two.data.choose_thinking(id) for id in ids)
    assert chosen == {"on": pytest.approx(500, abs=80), "off": pytest.approx(1500, abs=80)}
    assert all(two.data.choose_thinking(id) == turned.data.choose_thinking(id) for id in ids)
    assert {load_recipe(SMALL).data.choose_thinking(id) for id in ids} == {"template"}
    for text, expected in {"maybe": "maybe", "{on: 0}": "greater than 0", "{}": "at least 1"}.items():
        assert any(
            "data.thinking" in line and expected in line for line in complaint(SMALL, f"data.thinking={text}")
        )


# Broken files


def test_a_missing_file_names_the_recipes_there_are(tmp_path):
    (line,) = complaint(tmp_path / "none.yaml")
    assert "No such file" in line
    assert "tiny_cpu.yaml" in line


@pytest.mark.parametrize(
    "text", ["a: [1", "a: b: c", "\tx: 1", "a: !!python/name:os.system x", "a: *x", "? [a]\n: 1"]
)
def test_text_that_is_no_yaml_is_told_in_one_line_with_its_place(text, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    (line,) = complaint(path)
    assert "expected YAML, found an error at line 1, column" in line


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: \x00"])
def test_bytes_that_are_no_text_are_refused_in_one_line(content, tmp_path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(content)
    assert len(complaint(path)) == 1


@pytest.mark.parametrize(("text", "found"), [("", "nothing"), ("- a", "['a']"), ("7", "7")])
def test_a_file_that_holds_no_sections_is_refused(text, found, tmp_path):
    path = tmp_path / "flat.yaml"
    path.write_text(text)
    assert complaint(path) == [f"{path}: expected a mapping of sections, found {found}"]


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text(SMALL.read_text() + "  seed: 1\n  seed: 1\n")
    count = len(path.read_text().splitlines())
    (line,) = complaint(path)
    assert f"eval.seed: expected once, found on lines {count - 1} and {count}" in line


# The target's own config


def fits(override: str, *others: str) -> None:
    check_against_target(load_recipe(SMALL, [override, "drafter.target_layer_ids=[1, 3, 6]", *others]))


def test_the_last_layer_is_refused_as_a_tap_and_the_one_before_it_is_not(other_target):
    model = other_target(SHAPE)
    fits(model)
    with pytest.raises(UserError, match=r"target_layer_ids: expected ids from 0 to 6 .* found \[7\]"):
        fits(model, "drafter.target_layer_ids=[1, 3, 7]")


def test_the_mask_id_must_lie_in_the_vocabulary(other_target):
    model = other_target(SHAPE)
    fits(model, "drafter.mask_token_id=99")
    with pytest.raises(UserError, match="below the vocabulary size 100, found 100"):
        fits(model, "drafter.mask_token_id=100")


@pytest.mark.parametrize("mask", [1, 2, 3, 4, 5])
def test_the_mask_may_not_begin_end_or_pad_text(mask, other_target):
    config = {"text_config": SHAPE | {"eos_token_id": 1, "bos_token_id": None}, "pad_token_id": 2}
    generation = {"eos_token_id": [3, 4], "bos_token_id": 5}
    with pytest.raises(UserError, match=r"never occurs in text, found \d"):
        fits(other_target(config, generation), f"drafter.mask_token_id={mask}")


def test_a_wrapped_vision_language_config_is_read_through(other_target):
    model = other_target(
        {"hidden_size": 1, "text_config": SHAPE, "num_hidden_layers": 99, "vocab_size": 10**6}
    )
    with pytest.raises(UserError, match="vocabulary size 100"):
        fits(model, "drafter.mask_token_id=100")


def test_every_misfit_is_told_at_once(other_target):
    overrides = ["drafter.target_layer_ids=[1,3,9]", "drafter.mask_token_id=512", "target.revision=main"]
    with pytest.raises(UserError) as caught:
        fits(other_target(SHAPE), *overrides)
    assert len(str(caught.value).splitlines()) == 1 + 3


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "expected JSON"), ("[]", "expected a JSON object"), ("{}", "found no hidden_size")],
)
def test_a_broken_target_config_is_a_users_mistake(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=words):
        check_against_target(load_recipe(SMALL, [f"target.model={tmp_path}"]))


def test_a_folder_without_a_config_is_a_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"found no config\.json"):
        check_against_target(load_recipe(SMALL, [f"target.model={tmp_path}"]))


def test_a_hub_target_is_left_for_later():
    check_against_target(load_recipe(SMALL, ["target.model=some/model", "drafter.mask_token_id=999999"]))


# Where a model is


def test_a_model_folder_is_found_from_the_working_directory_first(tmp_path, monkeypatch, embedded_target):
    monkeypatch.chdir(tmp_path)
    assert Path(resolve_model("recipes/embedded/target")) == embedded_target
    nearer = tmp_path / "recipes" / "embedded" / "target"
    nearer.mkdir(parents=True)
    assert Path(resolve_model("recipes/embedded/target")) == nearer


def test_a_hub_name_is_returned_as_it_is():
    assert resolve_model("Qwen/Qwen3.6-27B") == "Qwen/Qwen3.6-27B"


@pytest.mark.parametrize("name", ["nowhere", "/no/such/folder", "./no/target", "../target", "a/b/c"])
def test_a_missing_folder_is_not_taken_for_a_hub_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="found no such folder"):
        resolve_model(name)
