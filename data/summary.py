"""What is in a folder of shards, for people: by source, with the supervised tokens of a few sequences.

    python data/summary.py SHARDS [--out data.svg] [--examples N] [--seed N] [--tokenizer PATH]

SHARDS is the folder `shards` of a run, finished or not.  Only reads, and no hidden state; checksums are not
looked at.  The tokenizer is the target's, as the manifest names it.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text as Line
from transformers import AutoTokenizer
from typer import Option

from data.outcome import count_cut, describe_counts
from data.shard_counts import (
    Counted,
    Placed,
    SourceTexts,
    count_dropped,
    count_shards,
    count_there,
    find_quantile,
)
from data.shards import MANIFEST_NAME
from data.summary_picture import draw
from recipes.errors import UserError, run_command
from recipes.manifest import ShardManifest, read_manifest
from recipes.pictures import write_svg
from recipes.target_config import resolve_model

Show = Callable[[Sequence[int]], str]
"""Token ids -> what is printed of them."""

_MOST_SHOWN = 120  # tokens of a stretch; of a longer one the beginning and the end
_SUPERVISED = "bold green"
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def main(
    shards: Annotated[
        Path, typer.Argument(metavar="SHARDS", help="A folder with shards and their manifest.")
    ],
    out: Annotated[Path | None, Option(help="Draw lengths and coverage into this SVG file.")] = None,
    examples: Annotated[int, Option(min=0, help="Sequences to print.")] = 3,
    seed: Annotated[int, Option(help="Of the draw of these.")] = 0,
    tokenizer: Annotated[str | None, Option(help="A folder; left out: that of the target.")] = None,
) -> None:
    """Tell what is in shards by source, how long it is, how much is supervised, and what was dropped."""
    console = Console(soft_wrap=True, highlight=False)
    manifest = read_manifest(shards / MANIFEST_NAME, ShardManifest)
    show = find_show(tokenizer, manifest, console) if examples else show_ids
    chosen = random.Random(seed).sample(range(count_there(manifest)), min(examples, count_there(manifest)))
    counted = count_shards(shards, manifest, chosen)
    print_summary(manifest, counted, console)
    for example in counted.examples:
        console.print()
        console.print(describe(example), style="bold", markup=False)
        console.print(highlight(example, show, with_marks=not console.is_terminal))
    if out is not None:
        write_svg(draw(counted), out)
        console.print(f"picture: {out}", markup=False)


def print_summary(manifest: ShardManifest, counted: Counted, console: Console) -> None:
    console.print(_describe_shards(manifest), markup=False)
    for columns in (_AMOUNTS, _SIZES):
        console.print(_tabulate(counted, columns))
    so_far = "" if manifest.complete else " so far"
    console.print(f"dropped{so_far}: {describe_counts(count_dropped(manifest))}", markup=False)
    console.print(f"ended early{so_far}: {describe_counts(count_cut(manifest))}", markup=False)


def _describe_shards(manifest: ShardManifest) -> str:
    consumed = sum(entry.is_consumed for entry in manifest.shards)
    state = "complete" if manifest.complete else "not complete: the data phase goes on with its recipe"
    lines = [f"{len(manifest.shards)} shards of {manifest.target.model}, {state}"]
    if consumed:
        lines.append(
            f"{consumed} of them are consumed: counted, but of their sequences nothing else is known"
        )
    return "\n".join(lines)


# Tables

Columns = Mapping[str, Callable[[SourceTexts], str]]

_AMOUNTS: Columns = {
    "sequences": lambda source: f"{source.sequences:,}",
    "tokens": lambda source: f"{source.tokens:,}",
    "supervised": lambda source: f"{source.supervised_tokens:,}",
    "coverage": lambda source: f"{source.coverage:.1%}",
}
_SIZES: Columns = {
    "shortest": lambda source: _at(source.lengths, 0),
    "median": lambda source: _at(source.lengths, 0.5),
    "90%": lambda source: _at(source.lengths, 0.9),
    "longest": lambda source: _at(source.lengths, 1),
    "mean answers": lambda source: f"{mean(source.answers):.1f}" if source.answers else "-",
    "most answers": lambda source: _at(source.answers, 1),
}


def _at(values: Sequence[int], share: float) -> str:
    return f"{find_quantile(values, share):,}" if values else "-"


def _tabulate(counted: Counted, columns: Columns) -> Table:
    """A row for each source, and one for all where there are several."""
    table = Table("source", box=SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="right")
    several = {"all": counted.together} if len(counted.sources) != 1 else {}
    for name, source in [*counted.sources.items(), *several.items()]:
        table.add_row(Line(name), *(cell(source) for cell in columns.values()))
    return table


# Examples


def find_show(tokenizer: str | None, manifest: ShardManifest, console: Console) -> Show:
    """Decodes; raises UserError where the tokenizer that was asked for is none.

    Ids where the target's is not here, which is said.
    """
    try:
        name = tokenizer or resolve_model(manifest.target.model)
        revision = None if tokenizer else manifest.recipe.get("target", {}).get("revision")
        decode = AutoTokenizer.from_pretrained(name, revision=revision).decode
    except (UserError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        if tokenizer is not None:
            raise UserError(
                f"--tokenizer {tokenizer}: expected a tokenizer's folder, found none ({reason})"
            ) from error
        console.print(f"token ids are shown: {reason}; --tokenizer names another place", markup=False)
        return show_ids
    return lambda ids: str(decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def show_ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids)) + " "


def describe(example: Placed) -> str:
    source = SourceTexts()
    source.add(example.text)
    (length,), (supervised,), (answers,) = source.lengths, source.supervised, source.answers
    where = ", ".join(filter(None, [example.text.source, example.file, example.text.name]))
    return f"{where}: {length:,} tokens, {supervised:,} supervised in {answers} answers"


def highlight(example: Placed, show: Show, *, with_marks: bool) -> Line:
    """Supervised stretches in color; with_marks: between ⟦ and ⟧ too, where there are no colors."""
    line = Line()
    for is_supervised, ids in find_stretches(
        example.text.token_ids.tolist(), example.text.loss_mask.tolist()
    ):
        text = _shorten(ids, show).translate(_CONTROL)
        if is_supervised:
            line.append(f"⟦{text}⟧" if with_marks else text, style=_SUPERVISED)
        else:
            line.append(text)
    return line


def find_stretches(ids: Sequence[int], loss_mask: Sequence[bool]) -> Iterator[tuple[bool, list[int]]]:
    """Whether it is supervised, and its tokens; no two neighbours are alike."""
    for is_supervised, pairs in groupby(zip(loss_mask, ids, strict=True), key=lambda pair: pair[0]):
        yield is_supervised, [id for _, id in pairs]


def _shorten(ids: Sequence[int], show: Show) -> str:
    half = _MOST_SHOWN // 2
    if len(ids) <= _MOST_SHOWN:
        return show(ids)
    return f"{show(ids[:half])} [{len(ids) - 2 * half:,} tokens] {show(ids[-half:])}"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
