"""Python source as text and as chats: the corpus and the prompts of the embedded target.

Reads what the running interpreter holds (its standard library, its installed packages) and never writes
any of it down.  A chat's user turn names a function and says what it does (its docstring) or quotes a
comment; its assistant turn is the code that follows.  Standard-library files are split once and for all by
the hash of their path, the same way for every Python: `train/embedded_target.py` never reads a held-out file,
and the demo measures on held-out files only.
"""

import ast
import hashlib
import re
import sys
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

HELD_OUT_SHARE = 8  # one standard-library file in eight
MAX_FILE_BYTES = 400_000
MAX_ANSWER_LINES = 8  # short: a small model asked for more begins to loop
MAX_LINE_REPEATS = 1  # an answer with a line more often than this teaches a small model to loop
MAX_REQUEST_CHARS = 600
_WORTH_PROCESSES = 2000  # files
_NOT_SOURCE = {"site-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", "turtledemo"}
_COMMENT = re.compile(r"^(?P<indent>[ ]*)# (?P<text>\S.*)$")


@dataclass(frozen=True)
class Chat:
    """One exchange: what is asked, the code that answers, and the file both came from."""

    request: str
    answer: str
    source: str


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(relative_path: str) -> bool:
    """Whether a standard-library file (its path relative to the library, `json/decoder.py`) is held out."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def standard_library_files(*, held_out: bool) -> list[Path]:
    """The standard library's modules on one side of the split, tests and bundled tools left out, sorted."""
    root = standard_library()
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _NOT_SOURCE.isdisjoint(relative.parts) and is_held_out(relative.as_posix()) == held_out:
            files.append(path)
    return files


def installed_package_files(package: str = "") -> list[Path]:
    """Every Python file of the packages on `sys.path`, or of one (its import name), sorted, each once."""
    roots = [Path(p, package) for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    return sorted({path for root in roots for path in root.rglob("*.py")})


def read_sources(files: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """(path, text) of each readable UTF-8 file; oversized files and copies of earlier ones are skipped."""
    seen: set[bytes] = set()
    for path in files:
        try:
            if not 0 < path.stat().st_size <= MAX_FILE_BYTES:
                continue
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield path, text


def find_all_chats(
    sources: Sequence[tuple[Path, str]], max_answer_lines: int = MAX_ANSWER_LINES
) -> list[Chat]:
    """The chats of all (path, text), in their order; on every core, where there are many."""
    names, texts = [path.name for path, _ in sources], [text for _, text in sources]
    find = partial(find_chats, max_answer_lines=max_answer_lines)
    if len(sources) < _WORTH_PROCESSES:
        return list(chain.from_iterable(map(find, texts, names)))
    with ProcessPoolExecutor(mp_context=get_context("forkserver")) as pool:
        return list(chain.from_iterable(pool.map(find, texts, names, chunksize=64)))


def find_chats(source: str, name: str, max_answer_lines: int = MAX_ANSWER_LINES) -> list[Chat]:
    """The chats of one file, documented functions first; a file that does not parse has none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = source.splitlines()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    chats = [chat for node in functions if (chat := _function_chat(node, lines, name))]
    chats += _comment_chats(lines, name)
    return [chat for chat in chats if chat.answer.count("\n") <= max_answer_lines]


def _function_chat(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], name: str) -> Chat | None:
    docstring = ast.get_docstring(node)
    if not docstring or len(node.body) < 2 or node.body[0].lineno <= node.lineno:
        return None
    summary = docstring.strip().split("\n\n")[0][:MAX_REQUEST_CHARS]
    code = lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[node.body[0].end_lineno : node.end_lineno]
    answer = textwrap.dedent("\n".join(code)).strip("\n")
    if "\t" in answer or _repeats_itself(code):
        return None
    arguments = ast.unparse(node.args)
    return Chat(f"{node.name}({arguments}): {summary}", answer + "\n", name)


def _comment_chats(lines: list[str], name: str) -> Iterator[Chat]:
    index = 0
    while index < len(lines):
        comment, index = _take_comment(lines, index)
        if comment is None:
            index += 1
            continue
        indent, text = comment
        code = _take_block(lines, index, indent)
        index += len(code)
        answer = textwrap.dedent("\n".join(code))
        if len(text.split()) >= 5 and len(code) >= 2 and not _repeats_itself(code) and _parses(answer):
            yield Chat(text[:MAX_REQUEST_CHARS], answer + "\n", name)


def _take_comment(lines: list[str], index: int) -> tuple[tuple[str, str] | None, int]:
    match = _COMMENT.match(lines[index])
    if match is None:
        return None, index
    indent, words = match["indent"], [match["text"]]
    index += 1
    while index < len(lines) and (more := _COMMENT.match(lines[index])) and more["indent"] == indent:
        words.append(more["text"])
        index += 1
    return (indent, " ".join(words)), index


def _take_block(lines: list[str], start: int, indent: str) -> list[str]:
    """The lines from `start` to the next blank line, comment or shallower indentation."""
    end = start
    while end < len(lines) and lines[end].startswith(indent) and lines[end].strip():
        if lines[end].lstrip().startswith("#"):
            break
        end += 1
    return lines[start:end]


def _repeats_itself(code: list[str]) -> bool:
    counts = Counter(line.strip() for line in code if len(line.strip()) > 3)
    return max(counts.values(), default=0) > MAX_LINE_REPEATS


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
