"""data/shapes.py: the shapes people have become one, and a row that is no conversation says why."""

import json

import pytest

from data.prompts import as_prompt, make_prompt
from data.shapes import RowError, read_conversation

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
AGAIN = {"role": "user", "content": "r"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
SCHEMA = {"name": "f", "parameters": {"type": "object", "properties": {}}}


def say(*messages: dict) -> dict:
    return {"messages": list(messages)}


def read(row: object, **options: object) -> list[dict]:
    return list(read_conversation(row, **options).messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (say(USER), [USER]),
        (say(SYSTEM, USER, ASSISTANT, AGAIN), [SYSTEM, USER, ASSISTANT, AGAIN]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [USER, ASSISTANT],
        ),
        ({"conversations": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ({"conversations": [{"from": "human", "value": "q"}], "system": "s"}, [SYSTEM, USER]),
        ({"system": "t", "messages": [SYSTEM, USER]}, [SYSTEM, USER]),
        ({"prompt": "q"}, [USER]),
        ({"prompt": "q", "response": "a"}, [USER, ASSISTANT]),
        ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, [SYSTEM, USER, ASSISTANT]),
        ({"prompt": [SYSTEM, USER], "response": "a"}, [SYSTEM, USER, ASSISTANT]),
        ({"prompt": "x", "messages": [USER]}, [USER]),  # as ultrachat has them
        ({"instruction": "q", "input": "", "output": "a"}, [USER, ASSISTANT]),
        (
            {"instruction": "q", "input": "i", "output": "a"},
            [{"role": "user", "content": "q\n\ni"}, ASSISTANT],
        ),
        ({"system_prompt": "s", "question": "q", "response": "a"}, [SYSTEM, USER, ASSISTANT]),
        ({"question": "q", "answer": "a", "id": 7}, [USER, ASSISTANT]),
        ({"text": "q"}, [USER]),
        ("q", [USER]),
        (say({"role": "developer", "content": "s"}, USER), [SYSTEM, USER]),
        ({"messages": None, "prompt": "q"}, [USER]),  # tables of several shapes fill up with nothing
    ],
)
def test_shapes_that_people_have_become_one(row, expected):
    assert read(row) == expected


def test_ids_are_those_of_prompts():
    assert read_conversation(say(SYSTEM, USER)).id == make_prompt([SYSTEM, USER]).id
    assert as_prompt(read_conversation({"prompt": "q", "response": "a"})) == make_prompt([USER])


def test_tools_belong_to_the_id():
    assert read_conversation(say(USER) | {"tools": [SCHEMA]}).id != read_conversation(say(USER)).id


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
    assert read(say({"role": "user", "content": parts})) == [{"role": "user", "content": "one two"}]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_apart_from_what_is_said(name):
    (_, answer) = read(say(USER, ASSISTANT | {name: "hm"}))
    assert answer == ASSISTANT | {"reasoning_content": "hm"}


def test_calls_and_results_of_tools_are_kept():
    call = CALL | {"id": "c1"}
    result = {"role": "tool", "content": "", "tool_call_id": "c1", "name": "f"}
    asked = {"role": "assistant", "content": None, "tool_calls": [call, CALL]}
    found = read_conversation(say(USER, asked, result, ASSISTANT) | {"tools": [SCHEMA]})
    assert list(found.messages) == [USER, asked | {"content": ""}, result, ASSISTANT]
    assert found.tools == ({"type": "function", "function": SCHEMA},)


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        CALL["function"],
        {"name": "f", "arguments": {"x": 1}},
        {"function": {"name": "f", "arguments": {"x": 1}}},
    ],
)
def test_calls_have_one_form_whoever_wrote_them(call):
    (_, asked) = read(say(USER, {"role": "assistant", "content": "", "tool_calls": [call]}))
    assert asked["tool_calls"] == [CALL]


def test_arguments_that_are_text_stay_that_text():
    written = '{"x":1,  "é": "\\u00e9"}'
    call = {"function": {"name": "f", "arguments": written}}
    (_, asked) = read(say(USER, {"role": "assistant", "content": "", "tool_calls": [call]}))
    assert asked["tool_calls"][0]["function"]["arguments"] == written


def test_a_call_in_sharegpt_is_a_call():
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"x": 1}})},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "a"},
    ]
    row = {"conversations": turns, "tools": json.dumps([SCHEMA])}
    found = read_conversation(row)
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"] == [CALL]
    assert found.tools[0]["function"] == SCHEMA


def test_fields_that_are_nothing_are_not_there():
    unset = {"tool_calls": None, "reasoning_content": None, "name": None}
    assert read(say(USER | unset, ASSISTANT | unset)) == [USER, ASSISTANT]


def test_columns_of_a_recipe_override_what_is_guessed():
    row = {"messages": [AGAIN], "query": "q", "reply": "a", "sys": "s"}
    columns = {"prompt": "query", "response": "reply", "system": "sys"}
    assert read(row, columns=columns) == [SYSTEM, USER, ASSISTANT]
    assert read(row, columns={"question": "query"}) == [USER]


def test_an_open_turn_is_one_where_it_is_allowed():
    row = say(USER, {"role": "assistant", "content": ""}, AGAIN)
    assert [message["content"] for message in read(row, has_open_turns=True)] == ["q", "", "r"]
    assert as_prompt(read_conversation(row, has_open_turns=True)) == make_prompt([USER])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (say(), "no_messages"),
        (say(SYSTEM), "system_only"),
        (say(ASSISTANT, USER), "assistant_first"),
        (say(SYSTEM, ASSISTANT), "assistant_first"),
        (say({"role": "tool", "content": "x"}), "tool_first"),
        (say(USER, USER), "not_alternating"),
        (say(USER, ASSISTANT, ASSISTANT), "not_alternating"),
        (say(USER, {"role": "tool", "content": "x"}), "not_alternating"),
        (say(USER, SYSTEM), "system_not_first"),
        (say({"role": "user", "content": None}), "null_content"),
        (say({"role": "user"}), "null_content"),
        (say(USER, {"role": "assistant", "content": None}), "null_content"),
        ({"prompt": "q", "response": None}, "null_content"),
        ({"prompt": None}, "null_content"),
        (say({"role": "user", "content": " \n"}), "empty_content"),
        ({"instruction": "", "output": "a"}, "empty_content"),
        (say(USER, {"role": "assistant", "content": ""}), "zero_length_response"),
        ({"prompt": "q", "response": ""}, "zero_length_response"),
        (say({"role": "user", "content": 7}), "wrong_type"),
        ({"messages": "hello"}, "wrong_type"),
        ({"messages": {"role": "user", "content": "q"}}, "wrong_type"),
        (say("hello"), "wrong_type"),  # type: ignore[arg-type]
        ({"prompt": 7}, "wrong_type"),
        ({"instruction": "q", "input": ["i"]}, "wrong_type"),
        (7, "wrong_type"),
        ([USER], "wrong_type"),
        (say({"role": "robot", "content": "x"}), "unknown_role"),
        (say({"role": None, "content": "x"}), "unknown_role"),
        (say({"role": ["user"], "content": "x"}), "unknown_role"),
        (say({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}), "unknown_part"),
        (say({"role": "user", "content": ["q"]}), "unknown_part"),
        ({"body": "q"}, "unknown_shape"),
        ({}, "unknown_shape"),
        (say(USER, {"role": "assistant", "content": "", "tool_calls": [{}]}), "bad_tool_call"),
        (say(USER, {"role": "assistant", "content": "", "tool_calls": "f()"}), "bad_tool_call"),
        (say(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}), "bad_tool_call"),
        (
            say(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}),
            "bad_tool_call",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "f"}]},
            "bad_tool_call",
        ),
        (say(USER) | {"tools": "{"}, "bad_tools"),
        (say(USER) | {"tools": [{"parameters": {}}]}, "bad_tools"),
        (say({"role": "user", "content": "\ud800"}), "not_utf8"),
        (say(USER) | {"tools": [{"name": "f", "description": "\udcff"}]}, "not_utf8"),
    ],
)
def test_a_row_that_is_no_conversation_says_why(row, reason):
    with pytest.raises(RowError) as caught:
        read_conversation(row)
    assert caught.value.reason == reason
    assert caught.value.found


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(RowError, match="missing_column: no qeury; the row has query"):
        read_conversation({"query": "q"}, columns={"prompt": "qeury"})
