"""The sets that drafters are usually measured on, by name: from the hub, each at one commit.

None of their contents lies here.  Prompts are worded as the authors of DFlash word them (z-lab/dflash,
dflash/benchmark.py; AIME, Alpaca and LiveCodeBench as others' copies of their loader have them), so that
acceptance can be held against theirs.  They draw a sample of each set; here its first prompts are taken.
MT-Bench is in `data.suites`, from a package: the same 80 questions.  Called by `data.suites`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from data.hub import read_hub
from data.rows import Placed
from data.shapes import RowError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Benchmark:
    hub: str
    revision: str
    """A commit, so that its prompts stay the same."""
    word: Callable[[Row], str]
    """What the user asks; raises KeyError for a column that is not there."""
    subset: str | None = None
    split: str = "test"
    file: str | None = None
    """Of the repository, to be read as JSON lines: where a set comes with a script, which `datasets` does not
    run."""


def _word_instruction(row: Row) -> str:
    about = row["input"]
    return f"{row['instruction']}\n\nInput:\n{about}" if about else row["instruction"]


def _word_contest(row: Row) -> str:
    starter = row["starter_code"]
    shape = "Use the following code structure:" if starter else "Write your code in the following format:"
    return _CONTEST.format(question=row["question_content"], shape=shape, code=starter or "# YOUR CODE HERE")


_CONTEST = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will"
    " generate a correct Python program that matches the specification and passes all tests. You will NOT"
    " return anything except for the program\n\n"
    "### Question:\n{question}\n\n"
    "### Format: {shape}\n```python\n{code}\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)
"""LiveCodeBench's own wording."""
_REASON = "Please reason step by step, and put your final answer within \\boxed{{}}."
_word_problem = f"{{problem}}\n{_REASON}".format_map

BENCHMARKS = {
    "gsm8k": Benchmark(
        "openai/gsm8k",
        "740312add88f781978c0658806c59bc2815b9866",
        f"{{question}}\n{_REASON}".format_map,
        subset="main",
    ),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", _word_problem),
    "aime24": Benchmark(
        "HuggingFaceH4/aime_2024", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", _word_problem, split="train"
    ),
    "aime25": Benchmark(
        "MathArena/aime_2025", "c94da77eb22bbd6439e62a323bec18493a421302", _word_problem, split="train"
    ),
    "humaneval": Benchmark(
        "openai/openai_humaneval",
        "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\n{prompt}\n```"
        ).format_map,
    ),
    "mbpp": Benchmark(
        "google-research-datasets/mbpp",
        "4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        "{prompt}".format_map,
        subset="sanitized",
    ),
    "livecodebench": Benchmark(
        "livecodebench/code_generation_lite",
        "0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
        _word_contest,
        file="test6.jsonl",  # what release 6 added; all six are gigabytes, most of it hidden tests
    ),
    "alpaca": Benchmark(
        "tatsu-lab/alpaca", "dce01c9b08f87459cf36a430d809084718273017", _word_instruction, split="train"
    ),
}


def read_benchmark(name: str) -> Iterator[Placed]:
    """Rows with "messages".  Raises UserError and MachineError as `data.hub` does."""
    benchmark = BENCHMARKS[name]
    for place, row in _read(name, benchmark):
        yield place, _ask(row, benchmark)


def _read(name: str, benchmark: Benchmark) -> Iterator[Placed]:
    where = f"prompts {name} ({benchmark.hub} at {benchmark.revision})"
    if benchmark.file is None:
        of_set = {"split": benchmark.split, "revision": benchmark.revision}
        return read_hub(where, benchmark.hub, benchmark.subset, **of_set)
    file = f"hf://datasets/{benchmark.hub}@{benchmark.revision}/{benchmark.file}"
    return read_hub(where, "json", data_files=[file], split="train")


def _ask(row: Row, benchmark: Benchmark) -> dict[str, Any] | RowError:
    try:
        return {"messages": [{"role": "user", "content": benchmark.word(row)}]}
    except KeyError as missing:
        return RowError("missing_column", f"no {missing.args[0]}; the row has {', '.join(row)}")
