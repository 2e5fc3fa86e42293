"""Where the words of our curves stand, and whose color is which: for `eval/curves.py` and `eval/rows.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.transforms import Transform

from recipes.pictures import BLUE, ORANGE

TREE, CHAIN = BLUE, ORANGE


@dataclass(frozen=True)
class Place:
    """Where a text stands beside its point: above it, below it, or at its height."""

    offset: tuple[float, float]
    """In points of 1/72 inch."""
    side: Literal["left", "center", "right"]
    """Of the text, that is nearest."""


def write(
    axes: Axes,
    text: str,
    point: tuple[float, float],
    place: Place,
    color: str,
    where: Transform | None = None,
) -> None:
    """`point` is in `where`'s coordinates, the data's if there is none."""
    up = place.offset[1]
    axes.annotate(
        text,
        point,
        place.offset,
        xycoords=where or axes.transData,
        textcoords="offset points",
        color=color,
        ha=place.side,
        va="bottom" if up > 0 else "top" if up < 0 else "center",
    )


@dataclass(frozen=True)
class Name:
    text: str
    value: float
    """What it stands beside."""
    color: str


def write_beside(axes: Axes, names: Sequence[Name], x: float, where: Transform, gap: float) -> None:
    """On the right of `x`, each at its value or as near to it as leaves `gap` between any two.

    In `where`'s coordinates, whose heights are shares of the axis', as `gap` is.
    """
    bottom, top = axes.get_ylim()
    heights = spread([(name.value - bottom) / (top - bottom) for name in names], gap)
    for name, height in zip(names, heights, strict=True):
        write(axes, name.text, (x, height), Place((10, 0), "left"), name.color, where)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """The same in the same order, moved apart as little as leaves `gap` between any two."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    clusters: list[tuple[float, int]] = []  # height of the lowest, members: each `gap` above the last
    for index in order:
        first, size = heights[index], 1
        while clusters and clusters[-1][0] + clusters[-1][1] * gap > first:
            before, count = clusters.pop()
            first = (before * count + (first - count * gap) * size) / (count + size)
            size += count
        clusters.append((first, size))
    placed = [first + place * gap for first, size in clusters for place in range(size)]
    return [height for _, height in sorted(zip(order, placed, strict=True))]
