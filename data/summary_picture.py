"""Draws the lengths of a folder's sequences and how much of each is supervised, a row for each source.

Called by data/summary.py.
"""

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from data.shard_counts import Counted, SourceTexts, find_quantile
from recipes.errors import UserError
from recipes.pictures import BLUE, INK, STYLE, begin_figure

ROW_PX, HEAD_PX, FOOT_PX = 100, 30, 44
_LENGTH_BINS, _COVERAGE_BINS = 40, 25


def draw(counted: Counted) -> Figure:
    """Raises UserError where no sequence is there."""
    sources = {name: source for name, source in counted.sources.items() if source.lengths}
    if not sources:
        raise UserError("there is no sequence in these shards to draw: leave --out away")
    lengths = [length for source in sources.values() for length in source.lengths]
    edges = np.geomspace(min(lengths), max(lengths) + 1, _LENGTH_BINS + 1)
    height_px = HEAD_PX + ROW_PX * len(sources) + FOOT_PX
    with rc_context(STYLE):
        figure = begin_figure(height_px)
        for row, (name, source) in enumerate(sources.items()):
            bottom = (FOOT_PX + ROW_PX * (len(sources) - 1 - row)) / height_px
            height = 0.5 * ROW_PX / height_px
            left = figure.add_axes((0.03, bottom, 0.52, height))
            right = figure.add_axes((0.62, bottom, 0.35, height))
            _draw_lengths(left, source, edges)
            _draw_coverage(right, source)
            left.text(0, 1.4, f"{name}  {source.sequences:,} sequences", transform=left.transAxes)
            _finish(left, right, is_first=row == 0, is_last=row == len(sources) - 1)
        return figure


def _draw_lengths(axes: Axes, source: SourceTexts, edges: np.ndarray) -> None:
    _fill(axes, np.histogram(source.lengths, edges)[0], edges)
    axes.set_xscale("log")
    axes.set_xlim(float(edges[0]), float(edges[-1]))
    axes.xaxis.set_major_locator(FixedLocator(find_marks(int(edges[0]), int(edges[-1]))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    median = find_quantile(source.lengths, 0.5)
    _mark(axes, median, f"median {median:,}", is_left=median**2 < edges[0] * edges[-1])


def find_marks(least: int, most: int) -> list[int]:
    """1, 2 and 5 times powers of ten within; at least the ends."""
    marks = [digit * 10**power for power in range(8) for digit in (1, 2, 5)]
    return [mark for mark in marks if least <= mark <= most] or [least, most]


def _draw_coverage(axes: Axes, source: SourceTexts) -> None:
    edges = np.linspace(0, 1, _COVERAGE_BINS + 1)
    shares = np.array(source.supervised) / np.array(source.lengths)
    _fill(axes, np.histogram(shares, edges)[0], edges)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _mark(axes, source.coverage, f"{source.coverage:.1%} of all tokens", is_left=source.coverage < 0.5)


def _fill(axes: Axes, counts: np.ndarray, edges: np.ndarray) -> None:
    axes.stairs(counts, edges, fill=True, color=BLUE, alpha=0.75, linewidth=0)
    axes.set_ylim(0, max(1, int(counts.max())))
    axes.set_yticks([])


def _mark(axes: Axes, value: float, text: str, *, is_left: bool) -> None:
    """A line at a value; its text stands above, on the side with more room."""
    axes.axvline(value, color=INK, linewidth=0.9)
    axes.annotate(
        text,
        (value, 1.0),
        (-2 if is_left else 2, 2),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        ha="left" if is_left else "right",
        va="bottom",
    )


def _finish(left: Axes, right: Axes, *, is_first: bool, is_last: bool) -> None:
    """Titles above the first row, scales below the last."""
    for axes, title in ((left, "Length of sequences"), (right, "Supervised share of each")):
        if is_first:
            axes.set_title(title, pad=34)
        if not is_last:
            axes.tick_params(labelbottom=False)
    if is_last:
        left.set_xlabel("tokens", loc="left")
