"""How our pictures look, and how they are written: the same picture is the same file, byte by byte.

Drawn with by data/summary.py, eval/curves.py and eval/rows.py.
"""

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

WIDTH_PX = 900
INK, QUIET, FAINT = "#24292f", "#6e7781", "#d0d7de"
BLUE, ORANGE = "#0b62c4", "#c2571a"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "draftsmith",  # ids in the file, which are drawn at random otherwise
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": QUIET,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titlepad": 20,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.markersize": 4.5,
    "lines.linewidth": 1.6,
}


def begin_figure(height_px: int) -> Figure:
    """An empty one of our width."""
    return Figure(figsize=(WIDTH_PX / 96, height_px / 96), facecolor="white")


def write_svg(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
