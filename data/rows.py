"""Rows of files, one after the other and never a whole file in memory: JSON lines, JSON, Parquet, text.

A bad row comes as the `RowError` that it is, and those after it follow.  Where a file breaks so that nothing
behind the place can be read, `BrokenFileError` says at which byte.  Called by `data.sources`.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from pyarrow import parquet

from data.shapes import RowError

Placed = tuple[str, Any]
"""Where a row stands ("line 3"), and what it holds or the RowError that it is."""

MOST_BYTES = 64 * 2**20
"""Of one row: with a longer one somebody forgot the ends of lines."""
_CHUNK_BYTES = 2**20
_BATCH_ROWS = 64
_PIECE_CHARACTERS = 32  # what stands so close to the end of a piece may be cut


class BrokenFileError(Exception):
    """From some byte on nothing of a file can be read."""

    def __init__(self, offset: int, problem: str) -> None:
        super().__init__(f"breaks at byte {offset:,}: {' '.join(problem.split())}")


def read_rows(path: Path) -> Iterator[Placed]:
    """By the file's suffix; one that is unknown, or none, is that of JSON lines.  `.gz` may follow.

    Raises BrokenFileError, once every row before the place has been given; OSError as opening a file does.
    """
    return _READERS.get(_find_suffix(path), _read_json_lines)(path)


def find_files(folder: Path) -> list[Path]:
    """Of a folder and of folders in it, those whose suffix says that they hold rows, in order of their names.

    Text is left out where there is anything else: beside data it is a licence or a list of files.
    """
    seen = [path for path in sorted(folder.rglob("*")) if not _is_hidden(path.relative_to(folder))]
    found = [path for path in seen if path.is_file() and _find_suffix(path) in _READERS]
    return [path for path in found if _find_suffix(path) != ".txt"] or found


def _find_suffix(path: Path) -> str:
    return next((name for name in reversed(path.suffixes) if name != ".gz"), "")


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


# Lines


def _read_json_lines(path: Path) -> Iterator[Placed]:
    for place, line in _read_text(path):
        yield place, line if isinstance(line, RowError) else _parse(line)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return RowError("not_json", f"{error}; found {text[-40:]!r} at the end of {len(text):,} characters")


def _read_text(path: Path) -> Iterator[Placed]:
    """Lines that are not blank."""
    start = 0
    with _open(path) as file:
        for number, line in enumerate(_lines(file, path), start=1):
            if isinstance(line, int):
                yield f"line {number}", RowError("huge_line", f"{line:,} bytes, more than {MOST_BYTES:,}")
            elif line.strip():
                yield f"line {number}", _decode(line, start)
            start += line if isinstance(line, int) else len(line)


def _decode(line: bytes, start: int) -> str | RowError:
    try:
        return line.decode().removeprefix("\ufeff" if start == 0 else "").rstrip("\r\n")
    except UnicodeDecodeError as error:
        return RowError("not_utf8", f"{error.reason} at byte {start + error.start:,}")


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes | int]:
    """Of a longer line than a row may be: its length."""
    while line := _read(file, path, file.readline, MOST_BYTES):
        length = len(line)
        while line and not line.endswith(b"\n") and len(line) == MOST_BYTES:
            line = _read(file, path, file.readline, MOST_BYTES)
            length += len(line)
        yield line if length == len(line) else length


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _read(file: IO[bytes], path: Path, read: Any, size: int) -> bytes:
    """Raises BrokenFileError where a compressed file ends too early or is damaged."""
    try:
        return read(size)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BrokenFileError(
            file.tell(), f"{error}, counted in the text that {path.name} unpacks to"
        ) from error


# JSON


def _read_json(path: Path) -> Iterator[Placed]:
    """A list of rows, or an object that has them as "data"; else JSON lines under another name."""
    with _open(path) as file:
        text = _Text(file, path)
        if text.enter_list():
            for number, row in enumerate(text.read_list(), start=1):
                yield f"row {number}", row
            return
    yield from _read_json_lines(path)


class _Text:
    """A JSON file, read piece by piece.  Bytes that are no UTF-8 become surrogates, which no row may have."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._buffer, self._at = "", 0
        self._dropped_bytes = 0
        self._is_whole = False
        self._parse = JSONDecoder().raw_decode
        if self._peek() == "\ufeff":
            self._at += 1

    def enter_list(self) -> bool:
        """Whether there is a list of rows; its opening bracket has then been read."""
        if self._peek() == "[":
            self._at += 1
            return True
        if self._peek() != "{":
            return False
        try:
            return self._enter_data()
        except BrokenFileError:
            return False

    def _enter_data(self) -> bool:
        self._at += 1
        while self._peek() == '"':
            key = self._read_value()
            self._pass(":")
            if key == "data" and self._peek() == "[":
                self._at += 1
                return True
            self._read_value()
            if self._peek() == ",":
                self._at += 1
        return False

    def read_list(self) -> Iterator[Any]:
        if self._peek() == "]":
            return
        while True:
            yield self._read_value()
            if self._peek() == "]":
                return
            self._pass(",")

    def _read_value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._parse(self._buffer, self._at)
            except JSONDecodeError as error:
                if not self._may_go_on(error):
                    self._break(error.pos, "it ends" if self._ends_at(error) else error.msg)
                continue
            except (ValueError, RecursionError) as error:  # a number or a nesting that Python refuses
                self._break(self._at, str(error))
            # a number may go on in the next piece, behind a point even
            if end < len(self._buffer) - _PIECE_CHARACTERS or not self._more():
                self._at = end
                return value

    def _may_go_on(self, error: JSONDecodeError) -> bool:
        """Whether the error may be that not enough was read; more is, then."""
        if len(self._buffer) - self._at > MOST_BYTES:
            self._break(self._at, f"a row of more than {MOST_BYTES:,} characters")
        is_cut = error.msg.startswith("Unterminated string")
        return (is_cut or error.pos > len(self._buffer) - _PIECE_CHARACTERS) and self._more()

    def _ends_at(self, error: JSONDecodeError) -> bool:
        is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer)
        return self._is_whole and is_cut

    def _pass(self, sign: str) -> None:
        found = self._peek()
        if found != sign:
            self._break(self._at, f"expected {sign!r}, " + (f"found {found!r}" if found else "it ends"))
        self._at += 1

    def _peek(self) -> str:
        """The next character that is no white space, which is where reading goes on; "" at the end."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Reads as much again as there is still to parse, so that a long row is not parsed too often."""
        if self._is_whole:
            return False
        rest = self._buffer[self._at :]
        size = max(_CHUNK_BYTES, len(rest))
        piece = _read(self._file, self._path, self._file.read, size)
        self._is_whole = not piece
        self._dropped_bytes += _count_bytes(self._buffer[: self._at])
        self._buffer, self._at = rest + self._decode(piece, self._is_whole), 0
        return True

    def _break(self, at: int, problem: str) -> None:
        at = len(self._buffer) if problem == "it ends" else at
        raise BrokenFileError(self._dropped_bytes + _count_bytes(self._buffer[:at]), problem)


def _count_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


# Parquet


def _read_parquet(path: Path) -> Iterator[Placed]:
    num_bytes = path.stat().st_size
    try:
        file = parquet.ParquetFile(path, buffer_size=_CHUNK_BYTES)
    except (pa.ArrowException, OSError) as error:
        problem = f"it ends, without its index, which says where its rows are ({error})"
        raise BrokenFileError(num_bytes, problem) from error
    number = 0
    with file:
        for group in range(file.num_row_groups):
            try:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group]):
                    for row in read_batch(batch):
                        number += 1
                        yield f"row {number}", row
            except (pa.ArrowException, OSError) as error:
                raise BrokenFileError(_find_start(file, group), f"row group {group + 1}: {error}") from error


def read_batch(batch: pa.RecordBatch) -> Iterator[Any]:
    try:
        yield from map(without_unset, batch.to_pylist())
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            yield _read_one(batch.slice(index, 1))


def _read_one(batch: pa.RecordBatch) -> Any:
    try:
        return without_unset(batch.to_pylist()[0])
    except UnicodeDecodeError as error:
        return RowError("not_utf8", f"{error.reason} at byte {error.start:,} of a text")


def without_unset(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without the fields inside its columns that are nothing: Arrow adds them, so that all rows are alike."""
    return {name: _strip(value) for name, value in row.items()}


def _strip(value: Any) -> Any:
    if isinstance(value, list):
        return [_strip(item) for item in value]
    if isinstance(value, dict):
        return {name: _strip(inner) for name, inner in value.items() if inner is not None}
    return value


def _find_start(file: parquet.ParquetFile, group: int) -> int:
    row_group = file.metadata.row_group(group)
    columns = [row_group.column(index) for index in range(row_group.num_columns)]
    return min(column.dictionary_page_offset or column.data_page_offset for column in columns)


_READERS = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
