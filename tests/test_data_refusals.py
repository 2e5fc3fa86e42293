"""What a chat template refuses, or fails on, is left out by row, and nothing else with it."""

import json
from pathlib import Path

import pytest
from chat_targets import TEMPLATES, write_chat_target

from data.groups import begin
from data.mixture import load_conversations
from data.outcome import show_skips
from data.render import load_chat_template
from data.shard_plan import ShardPlan, make_plan
from recipes.errors import UserError
from recipes.load import load_recipe
from recipes.schema import Data, Target
from tests.drafters import TINY_RECIPE

FAILS = {
    "raise_exception": "{{ raise_exception('no  such\nthing') }}",
    "nothing there": "{{ messages[99].content.x }}",
    "division": "{{ 1 // 0 }}",
    "type": "{{ 1 + 'x' }}",
    "lookup": "{{ '%(x)s' % {'y': 1} }}",
    "value": "{{ '{' | int + '{'.format(1) }}",
    "attribute": "{{ (messages | groupby('nothing.more')) }}",
    "depth": "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "security": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
}


def failing(fault: str) -> str:
    """A template that fails where somebody says "bad", and only there."""
    test = "{% for m in messages %}{% if m.content == 'bad' %}" + fault + "{% endif %}{% endfor %}"
    return test + TEMPLATES["plain"]


def ask(*texts: str) -> dict:
    users = [{"role": "user", "content": text} for text in texts]
    between = [{"role": "assistant", "content": "given"} for _ in users]
    return {"messages": [each for pair in zip(users, between, strict=True) for each in pair][:-1]}


def write(path: Path, *rows: dict) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def plan_of(folder: Path, template: str, prompts: object) -> ShardPlan:
    target = write_chat_target(folder / "target", template)
    settings = [f"output_dir={folder / 'run'}", f"target.model={target}", "target.load_format=dummy"]
    return make_plan(load_recipe(TINY_RECIPE, [*settings, f"data.prompts={prompts}"]))


@pytest.mark.parametrize("name", FAILS)
def test_a_conversation_that_a_template_fails_on_is_left_out_alone(tmp_path, name):
    template = load_chat_template(Target(model=str(write_chat_target(tmp_path / "t", failing(FAILS[name])))))
    rows = write(tmp_path / "a.jsonl", ask("one"), ask("bad"), ask("two", "bad"), ask("two", "three"))
    data = Data(prompts=str(rows), num_prompts=9)
    begun = begin(load_conversations(data).conversations, template, data)
    assert begun.left_out == {"refused_by_template": 2}
    assert [conversation.place for conversation, _ in begun.refused] == ["line 2", "line 3"]
    assert [len(prompt.turns) for prompt in begun.prompts] == [1, 2]
    for _, why in begun.refused:
        assert why.found.startswith("the chat template refuses these messages: ")
        assert "\n" not in why.found


def test_rows_are_told_by_source_and_counted_once(tmp_path, capsys):
    system = {"messages": [{"role": "system", "content": "s"}, *ask("late")["messages"]]}
    a = write(tmp_path / "a.jsonl", ask("one"), {"wrong": 1}, system, ask("two"))
    late = {"messages": [{"role": "system", "content": "other"}, *ask("later")["messages"]]}
    b = write(tmp_path / "b.jsonl", late, ask("three"), ask("four", "five"))
    sources = json.dumps([{"path": str(a), "name": "A"}, {"path": str(b), "name": "B"}])
    plan = plan_of(tmp_path, TEMPLATES["strict"], sources)
    assert sum(map(len, plan.groups)) == 4
    assert [each.counts for each in plan.skips] == [
        {"unknown_shape": 1, "refused_by_template": 1},
        {"refused_by_template": 1},
    ]
    refused = "the chat template refuses these messages: a user comes first"
    assert plan.skips[0].shown["refused_by_template"] == [f"line 3: {refused}"]
    assert plan.skips[1].shown["refused_by_template"] == [f"line 1: {refused}"]
    assert plan.num_prompts == 6
    assert plan.left_out == {"refused_by_template": 2}
    dropped = plan.count_dropped()
    assert (dropped["refused_by_template"], dropped["unknown_shape"]) == (2, 1)
    assert dropped["prompt_too_long"] == 0
    show_skips(plan)
    assert "prompts A: 2 of 4 rows are left out\n  unknown_shape 1: line 2: " in capsys.readouterr().out


def test_where_every_row_is_refused_the_rows_are_told(tmp_path):
    path = write(tmp_path / "a.jsonl", ask("bad"), ask("bad", "more"))
    with pytest.raises(
        UserError, match=r"no conversation can be answered\n.*2 of 2 rows.*\n.*line 1: .*oh no"
    ):
        plan_of(tmp_path, failing("{{ raise_exception('oh no') }}"), path)
