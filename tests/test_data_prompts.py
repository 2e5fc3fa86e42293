"""data/prompts.py: the same prompts in the same order, each once, bad lines named."""

import json
import logging
from pathlib import Path

import pytest

from data.prompts import load_prompts, make_prompt
from recipes.errors import UserError


def ask(content: str) -> dict:
    return {"messages": [{"role": "user", "content": content}]}


def write_lines(path: Path, *lines: str | dict) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_fewer_prompts_are_the_first_of_more():
    many = load_prompts("stdlib:train", 300)
    assert load_prompts("stdlib:train", 100) == many[:100]
    assert len({prompt.id for prompt in many}) == 300


def test_the_first_prompts_are_a_sample_of_the_whole_library():
    firsts = [prompt.messages[0]["content"][0] for prompt in load_prompts("stdlib:train", 200)]
    assert len(set(firsts)) > 20  # not in alphabetical order, nor all of one module


def test_held_out_requests_are_never_trained_on():
    trained = {prompt.id for prompt in load_prompts("stdlib:train", 10**6)}
    held_out = load_prompts("stdlib:heldout", 10**6)
    assert len(held_out) > 100
    assert trained.isdisjoint(prompt.id for prompt in held_out)


def test_an_unknown_library_side_is_refused():
    with pytest.raises(UserError, match="stdlib:heldout"):
        load_prompts("stdlib:test", 1)


def test_a_files_prompts_keep_their_order_and_come_once(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", ask("b"), ask("a"), "", ask("b"))
    assert [prompt.messages[0]["content"] for prompt in load_prompts(path, 9)] == ["b", "a"]


def test_the_id_is_of_the_messages_alone():
    messages = [{"role": "user", "content": "x"}]
    assert make_prompt(messages).id == make_prompt([{"content": "x", "role": "user", "name": "n"}]).id
    assert make_prompt(messages).id != make_prompt([{"role": "system", "content": "x"}, *messages]).id
    assert len(make_prompt(messages).id) == 16


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]},
    ],
)
def test_a_bad_line_is_left_out_counted_and_named(tmp_path, caplog, bad):
    path = write_lines(tmp_path / "p.jsonl", ask("a"), bad, ask("b"))
    with caplog.at_level(logging.WARNING):
        assert len(load_prompts(path, 9)) == 2
    assert "1 of 3 rows" in caplog.text
    assert "line 2:" in caplog.text


def test_the_answer_at_the_end_is_left_to_the_target(tmp_path):
    answered = {"messages": [*ask("a")["messages"], {"role": "assistant", "content": "y"}]}
    path = write_lines(tmp_path / "p.jsonl", answered, ask("a"), ask("b"))
    assert load_prompts(path, 9) == [make_prompt(ask(text)["messages"]) for text in "ab"]


def test_a_file_of_bad_lines_only_is_refused(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", "{", "{}")
    with pytest.raises(UserError, match="line 1") as caught:
        load_prompts(path, 9)
    assert "found none in 2" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"gone\.jsonl"):
        load_prompts(str(tmp_path / "gone.jsonl"), 9)


def test_line_separators_inside_text_do_not_end_a_line(tmp_path):
    text = "a\u2028b\x0bc"
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(ask(text), ensure_ascii=False), encoding="utf-8")
    assert load_prompts(str(path), 9)[0].messages[0]["content"] == text
