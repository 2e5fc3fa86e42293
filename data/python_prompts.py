"""Prompts of Python's standard library and of installed packages, for a target that writes code.

`stdlib:train` and `stdlib:heldout` are the two sides of the standard library as chats (`data.python_source`);
`installed:NAME,NAME` adds those installed packages to `stdlib:train`, `installed` every one (minutes of
reading).  Called by `data.sources`.
"""

from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path

from data.conversations import Conversation, make_conversation
from data.python_source import (
    find_all_chats,
    installed_package_files,
    read_sources,
    standard_library_files,
)
from recipes.errors import UserError

STDLIB_TRAIN, STDLIB_HELDOUT, INSTALLED = "stdlib:train", "stdlib:heldout", "installed"
PYTHON_SOURCES = f"{STDLIB_TRAIN}, {STDLIB_HELDOUT}, {INSTALLED}, {INSTALLED}:PACKAGE,..."


def is_python(name: str) -> bool:
    return name.partition(":")[0] in ("stdlib", INSTALLED)


def read_python(name: str) -> list[Conversation]:
    """Sorted by id, so that the first N are a fair sample, and the same for every N.

    Raises UserError for an unknown side of the library or a package that is not installed.
    """
    # a request may stand in files on both sides; then it is held out
    requests = _requests(STDLIB_HELDOUT)
    if name != STDLIB_HELDOUT:
        requests = _requests(name) - requests
    asked = [make_conversation([{"role": "user", "content": request}], source=name) for request in requests]
    return sorted(asked, key=lambda conversation: conversation.id)


@cache
def _requests(name: str) -> frozenset[str]:
    return frozenset(chat.request for chat in find_all_chats(list(read_sources(_python_files(name)))))


def _python_files(name: str) -> list[Path]:
    if name == STDLIB_HELDOUT:
        return standard_library_files(held_out=True)
    own_files, (kind, _, names) = standard_library_files(held_out=False), name.partition(":")
    if name == STDLIB_TRAIN:
        return own_files
    if kind != INSTALLED or name.endswith(":"):
        raise UserError(f"prompts {name!r}: expected {PYTHON_SOURCES} or the path of a file or folder")
    return own_files + (_package_files(names.split(",")) if names else installed_package_files())


def _package_files(names: Iterable[str]) -> list[Path]:
    files = {name: installed_package_files(name) for name in names}
    missing = [name for name, found in files.items() if not found]
    if missing:
        raise UserError(f"prompts: found no installed Python package {', '.join(missing)}")
    return list(chain.from_iterable(files.values()))
