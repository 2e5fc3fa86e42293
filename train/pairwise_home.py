"""Where a head comes to lie: beside its drafter, in a checkpoint of output_dir whose own files stay.

A drafter from elsewhere is copied there, never written to; one in another project's format is converted, as
the server would.  Called by `train/pairwise_head.py`.
"""

import shutil
from pathlib import Path

import torch

from recipes.errors import UserError
from recipes.manifest import write_json
from serve.adopt import is_served_itself
from serve.drafter_config import PAIRWISE_NAME
from serve.formats import PublishedCheckpoint, read_checkpoint, write_published
from serve.pairwise import PairwiseTables, write_pairwise
from train.card import add_head
from train.checkpoint import settle
from train.pairwise_inputs import Source
from train.pairwise_manifest import HeadManifest, head_manifest_path

COPY_NAME = "drafter"
"""Of a drafter from elsewhere, in output_dir."""


def make_folder(folder: Path) -> None:
    """Raises UserError where nothing can be written there."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{folder}: cannot write there ({error.strerror}): name another output_dir, or mend it"
        ) from error


def find_home(source: Source, output_dir: Path) -> Path:
    """The drafter's folder if it lies in output_dir, else its copy there, made if missing.

    Raises UserError where another drafter has the copy's name.
    """
    folder = source.folder
    is_ours = folder.is_relative_to(output_dir.resolve()) and is_served_itself(folder)
    home = folder if is_ours else _find_copy(source, output_dir / COPY_NAME)
    make_folder(home / PAIRWISE_NAME.parent)
    return home


def _find_copy(source: Source, copy: Path) -> Path:
    for leftover in copy.parent.glob(f".{copy.name}*.tmp"):
        shutil.rmtree(leftover)
    if copy.exists():
        _check_same_drafter(source, copy)
    elif is_served_itself(source.folder):
        _copy_files(source.folder, copy)
    else:
        write_published(source.init.checkpoint, copy)
    return copy


def _copy_files(folder: Path, copy: Path) -> None:
    """All that lies in the folder itself, links followed (the hub's cache is made of them)."""
    temporary = copy.with_name(f".{copy.name}.tmp")
    temporary.mkdir()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            shutil.copyfile(path, temporary / path.name)
    settle(temporary, copy)


def _check_same_drafter(source: Source, copy: Path) -> None:
    ours, theirs = source.init.checkpoint, read_checkpoint(copy)
    if not _are_equal(ours, theirs):
        raise UserError(
            f"{copy} holds another drafter than {source.folder}: name another output_dir, or move it away"
        )


def _are_equal(ours: PublishedCheckpoint, theirs: PublishedCheckpoint) -> bool:
    if ours.config != theirs.config:
        return False
    return all(torch.equal(ours.load(name), theirs.load(name)) for name in ours.tensors)


def publish_head(home: Path, tables: PairwiseTables, manifest: HeadManifest, scratch: Path) -> Path:
    """The head, what it says of itself, and the model card's section.  Returns the head's path.

    Each file whole or not at all.  scratch: where the card lies until it is whole.
    """
    path = write_pairwise(home, tables)
    for leftover in path.parent.glob(".*.tmp"):
        leftover.unlink()
    write_json(head_manifest_path(home), manifest)
    add_head(home, scratch)
    return path
