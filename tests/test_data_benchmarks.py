"""data/benchmarks.py: the sets that drafters are measured on, by name, as their rows are on the hub."""

import json
import re

import datasets
import pytest

from data.benchmarks import BENCHMARKS
from data.prompts import load_prompts, load_suite_prompts
from data.suites import SUITES
from recipes.errors import MachineError, UserError

STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ROWS = {  # as the hub has them, with braces, which are no columns
    "gsm8k": {"question": "How many {sets}?", "answer": "#### 2"},
    "math500": {"problem": r"Find $\frac{1}{2}$.", "solution": "s", "answer": "a", "level": 2},
    "aime24": {"id": 60, "problem": "Let {a}.", "answer": "204"},
    "aime25": {"problem_idx": 1, "problem": "Let {b}.", "answer": 70},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "assert f() == {}"},
    "mbpp": {"task_id": 2, "prompt": "Write a {function}.", "test_list": ["assert True"]},
    "livecodebench": {"question_content": "Add {x}.", "starter_code": "", "private_test_cases": "eJx"},
    "alpaca": {"instruction": "Sort {these}.", "input": "", "output": "o", "text": "t"},
}
ASKED = {
    "gsm8k": f"How many {{sets}}?{STEPS}",
    "math500": rf"Find $\frac{{1}}{{2}}$.{STEPS}",
    "aime24": f"Let {{a}}.{STEPS}",
    "aime25": f"Let {{b}}.{STEPS}",
    "humaneval": "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\ndef f():\n\n```",
    "mbpp": "Write a {function}.",
    "alpaca": "Sort {these}.",
}


@pytest.fixture
def hub(monkeypatch):
    """Puts rows in the hub's place; gives how they were asked for."""
    asked_for = []

    def put(*rows):
        def load_dataset(*names, **options):
            asked_for.append((names, options))
            return datasets.Dataset.from_list(list(rows)).to_iterable_dataset()

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked_for

    return put


def read(name, count=9):
    return [prompt.messages[-1]["content"] for prompt in load_suite_prompts(name, count, None)]


@pytest.mark.parametrize("name", ASKED)
def test_a_set_is_worded_as_the_papers_word_it(name, hub):
    hub(ROWS[name])
    assert read(name) == [ASKED[name]]


def test_every_set_is_read_at_a_commit(hub):
    for name, benchmark in BENCHMARKS.items():
        asked_for = hub(ROWS[name])
        read(name)
        ((names, options),) = asked_for[-1:]
        assert re.fullmatch("[0-9a-f]{40}", benchmark.revision)
        assert options.pop("streaming") is True
        if name == "livecodebench":
            path = f"hf://datasets/{benchmark.hub}@{benchmark.revision}/test6.jsonl"
            assert (names, options) == (("json",), {"data_files": [path], "split": "train"})
        else:
            assert names == (benchmark.hub, benchmark.subset)
            assert options == {"split": benchmark.split, "revision": benchmark.revision}


def test_a_contests_starter_code_is_asked_to_be_filled_and_an_instructions_input_follows_it(hub):
    hub(ROWS["livecodebench"], ROWS["livecodebench"] | {"starter_code": "class S:"})
    free, given = read("livecodebench")
    assert "format:\n```python\n# YOUR CODE HERE\n```" in free
    assert (
        "### Question:\nAdd {x}.\n\n### Format: Use the following code structure:\n```python\nclass S:"
        in given
    )
    hub(ROWS["alpaca"], ROWS["alpaca"] | {"input": "3, 1"})
    assert read("alpaca") == ["Sort {these}.", "Sort {these}.\n\nInput:\n3, 1"]


def test_the_first_prompts_of_a_set_are_taken_each_once(hub):
    hub(*({"prompt": text} for text in "baba"), {"prompt": "c"})
    assert read("mbpp", 2) == ["b", "a"]
    assert read("mbpp") == ["b", "a", "c"]


def test_a_set_whose_columns_were_renamed_is_refused_with_those_it_has(hub):
    hub({"Problem": "x", "Answer": "y"})
    with pytest.raises(UserError, match=r"(?s)found none in 1\n.*no problem; the row has Problem, Answer"):
        read("math500")


def test_a_set_is_read_from_a_file_by_the_library_itself(tmp_path, monkeypatch):
    """The part of `datasets` that no test's fake knows: lists of files, as a stream."""
    path = tmp_path / "test6.jsonl"
    path.write_text(json.dumps(ROWS["livecodebench"]) + "\n")
    load = datasets.load_dataset

    def load_dataset(*names, data_files, **options):
        assert data_files[0].startswith("hf://")
        return load(*names, data_files=[str(path)], **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (text,) = read("livecodebench")
    assert "Add {x}." in text


def test_a_hub_that_does_not_answer_is_the_machines_fault_and_is_named(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(MachineError, match=r"prompts gsm8k \(openai/gsm8k at 7403.*after 0 rows \(offline\)"):
        read("gsm8k")


def test_an_unknown_name_lists_those_that_are_known():
    with pytest.raises(UserError) as refused:
        load_prompts("gsm-8k", 1)
    assert {*BENCHMARKS, "mt-bench"} < set(SUITES)
    assert all(known in str(refused.value) for known in SUITES)


def test_a_set_has_no_parts():
    with pytest.raises(UserError, match="gsm8k has no parts; write gsm8k"):
        load_prompts("gsm8k:main", 1)
