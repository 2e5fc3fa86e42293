"""A DFlash drafter of any known format, rewritten in the published one.

    python serve/convert.py CKPT OUT

Only reads aloud.  What was converted or left out is printed; serve the result with `serve/run.py --ckpt OUT`.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recipes.errors import run_command
from serve.formats import (
    PublishedCheckpoint,
    check_finite,
    read_checkpoint,
    recognise,
    require_absent,
    write_published,
)


def main(
    ckpt: Annotated[Path, typer.Argument(metavar="CKPT", help="The drafter's folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the published drafter.")],
) -> None:
    """Rewrite a DFlash drafter of any known format in the published one."""
    require_absent(out)
    checkpoint = read_checkpoint(ckpt)
    check_finite(checkpoint)
    write_published(checkpoint, out)
    _show(checkpoint, ckpt, out)


def _show(checkpoint: PublishedCheckpoint, ckpt: Path, out: Path) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{ckpt}: {recognise(ckpt)} format")
    for note in checkpoint.notes:
        console.print(f"  {note}")
    dtype, block_size = checkpoint.config["dtype"], checkpoint.config["block_size"]
    console.print(
        f"{out}: {len(checkpoint.tensors)} tensors, {dtype}, blocks of {block_size}", style="bold green"
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
