"""Conversations of one source of a recipe, read row by row: a file, a folder, the hub, or what is built in.

Bad rows are counted in `Skips` and the good ones behind them are read; a file that breaks off is refused, or
gives the rows before the place.  Called by `data.mixture`.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from data.conversations import Conversation
from data.hub import read_hub
from data.python_prompts import PYTHON_SOURCES, is_python, read_python
from data.rows import BrokenFileError, Placed, find_files, read_rows
from data.shapes import RowError, read_conversation
from data.skips import Skips
from data.suites import SUITES, is_suite, read_suite
from recipes.errors import UserError
from recipes.schema import Source

Found = tuple[str, Conversation]
"""Where it stands ("line 3"), and what is there."""


def name_source(name: str) -> Source:
    """Of a name that stands alone in a recipe."""
    if is_python(name) or is_suite(name):
        return Source(builtin=name)
    return Source(path=Path(name), name=name)


def read_source(source: Source, skips: Skips) -> Iterator[Found]:
    """In its own order, doubles too; what is left out goes to `skips`.

    Raises UserError where it cannot be read or has not one conversation.
    """
    is_any = False
    for place, content in islice(_read_placed(source), source.limit):
        skips.num_rows += 1
        try:
            yield place, replace(_make(content, source), place=place)
            is_any = True
        except RowError as defect:
            skips.add(place, defect)
    if not is_any:
        expected = "expected conversations, a row each (messages, conversations, prompt and response, ...)"
        found = skips.describe() or "  the source is empty"
        raise UserError(f"prompts {source.label}: {expected}, found none in {skips.num_rows}\n{found}")


def _make(content: Any, source: Source) -> Conversation:
    if isinstance(content, RowError):
        raise content
    if isinstance(content, Conversation):
        return replace(content, source=source.label)
    columns = (
        None if source.columns is None else {str(ours): theirs for ours, theirs in source.columns.items()}
    )
    return read_conversation(content, source.label, columns, has_open_turns=source.builtin is not None)


def _read_placed(source: Source) -> Iterator[Placed]:
    if source.path is not None:
        return _read_path(source.path, source)
    if source.hub is not None:
        return _read_hub(source.hub, source)
    return _read_builtin(str(source.builtin))


def _read_builtin(name: str) -> Iterator[Placed]:
    if is_suite(name):
        yield from read_suite(name)
    elif is_python(name):
        yield from ((f"row {number}", each) for number, each in enumerate(read_python(name), start=1))
    else:
        raise UserError(f"prompts {name!r}: expected {PYTHON_SOURCES}, {', '.join(SUITES)}")


# Files


def _read_path(path: Path, source: Source) -> Iterator[Placed]:
    if not path.is_dir():
        yield from _read_file(path, source)
        return
    files = find_files(path)
    if not files:
        raise UserError(f"prompts {path}: found no .jsonl, .json, .parquet or .txt file in this folder")
    for file in files:
        for place, row in _read_file(file, source):
            yield f"{file.relative_to(path)} {place}", row


def _read_file(path: Path, source: Source) -> Iterator[Placed]:
    count = 0
    try:
        for placed in read_rows(path):
            yield placed
            count += 1
    except OSError as error:
        raise UserError(
            f"prompts {str(path)!r}: cannot read it ({error.strerror or error}); expected {PYTHON_SOURCES},"
            f" {', '.join(SUITES)} or the path of a file or folder"
        ) from error
    except BrokenFileError as broken:
        if not source.keep_whole_rows:
            raise UserError(f"prompts {path}: the file {broken}; {_offer(path, count)}") from broken
        yield "the end", RowError("broken_file", f"{path.name} {broken}; {count:,} whole rows were read")


def _offer(path: Path, count: int) -> str:
    """What to do about a file that breaks off."""
    if not count:
        return "no whole row can be read before that: get the file again"
    return (
        f"get the file again, or keep the {count:,} whole rows before that: data.prompts:"
        f" [{{path: {path}, keep_whole_rows: true}}]"
    )


# The hub


def _read_hub(name: str, source: Source) -> Iterator[Placed]:
    where = f"prompts {name} at {source.revision}, split {source.split}"
    return read_hub(where, name, source.subset, split=source.split, revision=source.revision)
