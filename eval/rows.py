"""Draws tokens a step over the drafts that it verifies: chains and trees, with a pairwise head and without.

    python eval/rows.py REPORT.json [--out rows.svg]

`tests/compare_heads.py --out REPORT.json` measures it.  The same report gives the same file, byte by byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from pydantic import Field, model_validator
from rich.console import Console
from typer import Option

from eval.acceptance import Counts
from eval.drawing import CHAIN, TREE, Name, Place, write, write_beside
from recipes.errors import run_command
from recipes.manifest import Count, Record, read_manifest
from recipes.pictures import FAINT, QUIET, STYLE, WIDTH_PX, begin_figure, write_svg

ABREAST = 2
"""Panels."""
PANEL_PX = 380
"""Its height."""
_ABOVE, _BELOW, _LEFT, _RIGHT = 44, 56, 34, 150  # px around an axis, for its title, numbers, values and names
_LABEL_GAP = 15 / (PANEL_PX - _ABOVE - _BELOW)  # of an axis' height: labels nearer than that would touch


# What was measured


class PromptCounts(Record):
    """Of one drafter: an item for each prompt, as `eval.acceptance` counts."""

    steps: list[Count]
    tokens: list[Count]

    @model_validator(mode="after")
    def _tell_a_length(self) -> "PromptCounts":
        if len(self.steps) != len(self.tokens):
            raise ValueError(f"{len(self.steps)} prompts have steps and {len(self.tokens)} have tokens")
        if not any(self.steps):
            raise ValueError("no step was taken")
        return self

    def counts(self) -> Counts:
        return Counts(np.array(self.steps), np.array(self.tokens))


class MeasuredWay(Record):
    """A way of decoding."""

    temperature: float
    budget: Annotated[int, Field(gt=0)] | None
    """Nodes of a tree; None: the chain."""
    without_head: PromptCounts
    with_head: PromptCounts


class HeadsReport(Record):
    """What a pairwise head adds to a drafter."""

    schema_version: Literal[1] = 1
    checkpoint: str
    """As the command was given it."""
    recipe: str
    """Its name."""
    target: str
    settings: dict[str, Any]
    """Of the recipe's `eval`: all that a measurement depends on."""
    num_prompts: Count
    chain_length: Annotated[int, Field(gt=0)]
    """Drafts of the drafter's block."""
    ways: Annotated[list[MeasuredWay], Field(min_length=1)]

    @model_validator(mode="after")
    def _has_chains_and_trees(self) -> "HeadsReport":
        for temperature in self.temperatures:
            budgets = [way.budget for way in self.ways_at(temperature)]
            if budgets.count(None) != 1 or len(budgets) < 2:
                raise ValueError(
                    f"expected a chain and trees at each temperature, found budgets {budgets} at"
                    f" {temperature:g}"
                )
        return self

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(way.temperature for way in self.ways))

    def ways_at(self, temperature: float) -> list[MeasuredWay]:
        """Trees by their nodes, the chain before them."""
        own = [way for way in self.ways if way.temperature == temperature]
        return sorted(own, key=lambda way: way.budget or 0)

    def drafts_of(self, way: MeasuredWay) -> int:
        """Verified a step."""
        return way.budget or self.chain_length


# What is drawn of it


@dataclass(frozen=True)
class Series:
    """One of the four: chain or trees, of the drafter without its head or with it."""

    name: str
    is_chain: bool
    drafter: Literal["without_head", "with_head"]

    @property
    def color(self) -> str:
        return CHAIN if self.is_chain else TREE

    @property
    def look(self) -> dict[str, Any]:
        """Hollow and thin, or, with the head, filled and strong."""
        has_head = self.drafter == "with_head"
        filling, width = (self.color, 1.6) if has_head else ("white", 1.0)
        return {"color": self.color, "markerfacecolor": filling, "linewidth": width, "zorder": 4 - has_head}

    def pick(self, ways: Sequence[MeasuredWay]) -> list[MeasuredWay]:
        return [way for way in ways if (way.budget is None) == self.is_chain]

    def count(self, way: MeasuredWay) -> Counts:
        return (way.with_head if self.drafter == "with_head" else way.without_head).counts()


SERIES = (
    Series("vLLM's chain", True, "without_head"),
    Series("conditional chain", True, "with_head"),
    Series("marginal trees", False, "without_head"),
    Series("conditional trees", False, "with_head"),
)


def main(
    report: Annotated[Path, typer.Argument(help="Of tests/compare_heads.py --out.")],
    out: Annotated[Path | None, Option(help="The picture; left out: rows.svg beside REPORT.")] = None,
) -> None:
    """Draw tokens a step over the drafts that it verifies."""
    path = out or report.parent / "rows.svg"
    write_svg(draw(read_manifest(report, HeadsReport)), path)
    Console(soft_wrap=True, highlight=False).print(f"picture: {path}")


def draw(report: HeadsReport) -> Figure:
    """All panels have one scale, so that temperatures compare."""
    with rc_context(STYLE):
        abreast = min(ABREAST, len(report.temperatures))
        num_rows = -(-len(report.temperatures) // abreast)
        figure = begin_figure(num_rows * PANEL_PX)
        first: Axes | None = None
        for number, temperature in enumerate(report.temperatures):
            axes = figure.add_axes(place_panel(number, abreast, num_rows), sharey=first)
            draw_ways(axes, report, temperature)
            first = first or axes
        for axes, temperature in zip(figure.axes, report.temperatures, strict=True):
            axes.set_ylim(bottom=1)  # plain decoding
            name_ways(axes, report, temperature)
        return figure


def place_panel(number: int, abreast: int, num_rows: int) -> tuple[float, float, float, float]:
    """Left, bottom, width and height of its axis, in shares of the figure."""
    row, column = divmod(number, abreast)
    width, height = WIDTH_PX / abreast, num_rows * PANEL_PX
    bottom = (num_rows - 1 - row) * PANEL_PX + _BELOW
    return (
        (column * width + _LEFT) / WIDTH_PX,
        bottom / height,
        (width - _LEFT - _RIGHT) / WIDTH_PX,
        (PANEL_PX - _ABOVE - _BELOW) / height,
    )


def draw_ways(axes: Axes, report: HeadsReport, temperature: float) -> None:
    ways = report.ways_at(temperature)
    for series in SERIES:
        own = series.pick(ways)
        counts = [series.count(way) for way in own]
        lengths, errors = [each.length for each in counts], [each.standard_error for each in counts]
        drafts = [report.drafts_of(way) for way in own]
        drawn = axes.errorbar(drafts, lengths, errors, fmt="o-", elinewidth=3, **series.look)
        for bars in drawn.lines[2]:
            bars.set(alpha=0.3, zorder=2)  # where two overlap, both are seen
    axes.set_title(f"Tokens a verification step, T = {temperature:g}", pad=12)
    said = f"drafts verified a step; bars: standard errors over {report.num_prompts} prompts"
    axes.set_xlabel(said, loc="left", labelpad=6)
    mark_axes(axes, sorted({report.drafts_of(way) for way in ways}))


def mark_axes(axes: Axes, drafts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(drafts, [f"{number}" for number in drafts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y", color=FAINT, linewidth=0.5)
    axes.set_axisbelow(True)


def name_ways(axes: Axes, report: HeadsReport, temperature: float) -> None:
    """Beside the chains' points, and where the trees' lines end."""
    ways = report.ways_at(temperature)
    for way in (ways[0], ways[-1]):
        named = [series for series in SERIES if series.is_chain == (way.budget is None)]
        lengths = [series.count(way).length for series in named]
        names = [
            Name(f"{series.name}  {length:.2f}", length, series.color)
            for series, length in zip(named, lengths, strict=True)
        ]
        write_beside(axes, names, report.drafts_of(way), axes.get_xaxis_transform(), _LABEL_GAP)
    write(axes, "plain decoding", (1, 0), Place((10, 0), "left"), QUIET, axes.transAxes)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
