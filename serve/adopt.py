"""A checkpoint in any known format as the engine takes it: the folder itself, or a converted copy.

A copy lies in the user's cache, under a name that changes with the original's files, and is made once.
Called by `serve/plan.py` at start and by `serve/admin_drafter.py` for a swap.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import UserError
from serve.drafter_config import CONFIG_NAME
from serve.format_config import Format
from serve.formats import (
    PublishedCheckpoint,
    check_finite,
    read_checkpoint,
    recognise,
    write_published,
)
from serve.headers import read_json

CACHE_VARIABLE = "XDG_CACHE_HOME"


@dataclass(frozen=True)
class Adopted:
    """What to serve in place of a folder that somebody named."""

    ckpt: Path
    format: Format | None = None
    """The original's; None where that is served itself."""
    notes: tuple[str, ...] = ()
    """What was rewritten or left out, layer ids and their convention among it."""


def adopt(ckpt: Path) -> Adopted:
    """Raises UserError for a drafter of a known format that cannot be served.

    A folder that is none is handed back: whoever checks it says what it lacks.
    """
    layout = _foreign_format(ckpt)
    if layout is None:
        return Adopted(ckpt)
    checkpoint = read_checkpoint(ckpt)
    copy = cache_folder() / _name_of(ckpt)
    if not copy.is_dir():
        check_finite(checkpoint)
        _write(checkpoint, copy)
    return Adopted(copy, layout, checkpoint.notes)


def cache_folder() -> Path:
    """Of converted drafters; every folder in it may be removed while none is served."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache") / "draftsmith" / "drafters"


def _foreign_format(ckpt: Path) -> Format | None:
    try:
        layout = recognise(ckpt)
    except UserError:
        return None
    return None if is_served_itself(ckpt) else layout


def is_served_itself(ckpt: Path) -> bool:
    """Whether a drafter of a known format needs no conversion.  Raises UserError for another folder."""
    return recognise(ckpt) == Format.PUBLISHED and "block_size" in read_json(ckpt / CONFIG_NAME)


def _name_of(ckpt: Path) -> str:
    files = sorted(path for path in ckpt.iterdir() if path.is_file())
    facts = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return f"{ckpt.name}-{hashlib.sha256(repr((str(ckpt.resolve()), facts)).encode()).hexdigest()[:16]}"


def _write(checkpoint: PublishedCheckpoint, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_published(checkpoint, copy)
    except (OSError, UserError):
        if not copy.is_dir():  # or another process was quicker
            raise
