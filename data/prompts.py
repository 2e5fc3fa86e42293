"""Prompts: conversations that end with the user's turn, from a named source, always in the same order.

`stdlib:train` and `stdlib:heldout` are the two sides of the standard library as chats (`data.python_source`);
`installed:NAME,NAME` adds those installed packages to `stdlib:train`, `installed` every one (minutes of
reading); anything else is the path of a JSONL file with {"messages": [{"role": ..., "content": ...}, ...]}
lines.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from data.python_source import (
    find_all_chats,
    installed_package_files,
    read_sources,
    standard_library_files,
)
from recipes.errors import UserError

STDLIB_TRAIN, STDLIB_HELDOUT, INSTALLED = "stdlib:train", "stdlib:heldout", "installed"
_SOURCES = f"{STDLIB_TRAIN}, {STDLIB_HELDOUT}, {INSTALLED}, {INSTALLED}:PACKAGE,..."
_ROLES = ("system", "user", "assistant")
_SHOWN_PROBLEMS = 5
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A conversation the target is to answer."""

    id: str
    """16 hex digits of the sha256 of its messages."""
    messages: tuple[Mapping[str, str], ...]
    """Each with "role" and "content"; the last is the user's."""


def load_prompts(source: str, count: int) -> list[Prompt]:
    """Up to `count` prompts, each once: a JSONL file's in its order, the standard library's shuffled.

    Lines that are no conversations are left out and logged by number.
    Raises UserError for an unknown source, a missing file, or one without a single conversation.
    """
    is_python = source.partition(":")[0] in ("stdlib", INSTALLED)
    prompts = _python_prompts(source) if is_python else _file_prompts(Path(source))
    return list({prompt.id: prompt for prompt in prompts}.values())[:count]


def make_prompt(messages: Iterable[Mapping[str, str]]) -> Prompt:
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    digest = hashlib.sha256(json.dumps(plain, ensure_ascii=False).encode()).hexdigest()
    return Prompt(digest[:16], tuple(plain))


def _python_prompts(source: str) -> list[Prompt]:
    """Sorted by id, so that the first N are a fair sample, and the same for every N."""
    # a request may stand in files on both sides; then it is held out
    requests = _requests(STDLIB_HELDOUT)
    if source != STDLIB_HELDOUT:
        requests = _requests(source) - requests
    prompts = [make_prompt([{"role": "user", "content": request}]) for request in requests]
    return sorted(prompts, key=lambda prompt: prompt.id)


@cache
def _requests(source: str) -> frozenset[str]:
    return frozenset(chat.request for chat in find_all_chats(list(read_sources(_python_files(source)))))


def _python_files(source: str) -> list[Path]:
    if source == STDLIB_HELDOUT:
        return standard_library_files(held_out=True)
    own_files, (kind, _, names) = standard_library_files(held_out=False), source.partition(":")
    if source == STDLIB_TRAIN:
        return own_files
    if kind != INSTALLED or source.endswith(":"):
        raise UserError(f"prompts {source!r}: expected {_SOURCES} or a JSONL file's path")
    return own_files + (_package_files(names.split(",")) if names else installed_package_files())


def _package_files(names: Iterable[str]) -> list[Path]:
    files = {name: installed_package_files(name) for name in names}
    missing = [name for name, found in files.items() if not found]
    if missing:
        raise UserError(f"prompts: found no installed Python package {', '.join(missing)}")
    return list(chain.from_iterable(files.values()))


def _file_prompts(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON text may hold other line separators
    except OSError as error:
        raise UserError(
            f"prompts {str(path)!r}: cannot read it ({error.strerror}); expected {_SOURCES} or the"
            " path of a JSONL file"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"prompts {path}: expected UTF-8, found bytes that are not ({error.reason})"
        ) from error
    prompts, problems = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(make_prompt(_read_messages(line)))
            except ValueError as problem:
                problems.append(f"line {number}: {problem}")
    _tell(path, prompts, problems)
    return prompts


def _tell(path: Path, prompts: list[Prompt], problems: list[str]) -> None:
    more = len(problems) - _SHOWN_PROBLEMS
    shown = problems[:_SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
    total = len(prompts) + len(problems)
    if not prompts:
        found = "\n  ".join([f"found none in {total}", *shown])
        raise UserError(f'prompts {path}: expected lines with {{"messages": [...]}}, {found}')
    if problems:
        lines = [f"prompts {path}: {len(problems)} of {total} lines are bad and left out:", *shown]
        _LOG.warning("\n  ".join(lines))


def _read_messages(line: str) -> list[dict[str, str]]:
    """Raises ValueError with what is wrong."""
    content: Any = json.loads(line)
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('expected {"messages": [...]} with at least one message')
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(f"expected messages with a role of {', '.join(_ROLES)}, found {message!r:.80}")
        if not isinstance(message.get("content"), str) or not message["content"]:
            raise ValueError(f"expected text as content, found {message.get('content')!r:.80}")
    if messages[-1]["role"] != "user":
        raise ValueError(f"expected the user's turn last, found the {messages[-1]['role']}'s")
    return messages
