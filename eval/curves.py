"""Draws a run's curves from its TensorBoard files: what the engine accepts, and what regeneration costs.

    python eval/curves.py RUN_DIR [--out curves.svg]

RUN_DIR is a recipe's output_dir after several rounds.  The same curves give the same file, byte by byte.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer import Option

from eval.drawing import CHAIN, TREE, Name, Place, write, write_beside
from recipes.errors import UserError, run_command
from recipes.pictures import FAINT, INK, QUIET, STYLE, begin_figure, write_svg

Curve = Mapping[int, float]
"""Optimizer step -> value, ascending."""

HEIGHT_PX = 360
_LABEL_GAP = 0.06  # of an axis' height: labels nearer than that would touch
_MOST_VALUES = 6  # beyond that many rounds their values would touch


@dataclass(frozen=True)
class Curves:
    """What is drawn of a run."""

    simulated: Curve
    """Of the chain, as training simulates it."""
    chain: Curve
    tree: Curve
    tokens_per_step: Curve
    """Of regeneration: a point where each round begins."""


TAGS = {
    "simulated": "accept_sim/chain",
    "chain": "accept_real/chain",
    "tree": "accept_real/tree",
    "tokens_per_step": "data/tokens_per_step",
}


def main(
    run_dir: Annotated[Path, typer.Argument(help="A recipe's output_dir.")],
    out: Annotated[Path | None, Option(help="The picture; left out: curves.svg in RUN_DIR.")] = None,
) -> None:
    """Draw acceptance over steps, and regeneration over rounds."""
    path = out or run_dir / "curves.svg"
    write_svg(draw(read_curves(run_dir)), path)
    Console(soft_wrap=True, highlight=False).print(f"picture: {path}")


def read_curves(run_dir: Path) -> Curves:
    """Raises UserError for a folder without events, and names the curves that are missing."""
    folder = run_dir / "tensorboard"
    if not any(folder.glob("*tfevents*")):
        raise UserError(f"{folder}: expected TensorBoard files, found none; give the output_dir of a run")
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    there = events.Tags()["scalars"]
    missing = [tag for tag in TAGS.values() if tag not in there]
    if missing:
        raise UserError(
            f"{folder}: expected the curves {', '.join(TAGS.values())}, found no {', '.join(missing)};"
            " a recipe with rounds.count above 1, run to its end, writes them all"
        )
    # of two points at one step the last counts: a measurement may have been repeated
    points = {name: {p.step: p.value for p in events.Scalars(tag)} for name, tag in TAGS.items()}
    return Curves(**{name: dict(sorted(curve.items())) for name, curve in points.items()})


def draw(curves: Curves) -> Figure:
    with rc_context(STYLE):
        figure = begin_figure(HEIGHT_PX)
        # in shares of the figure; what is left on the right of an axis is for its labels
        draw_acceptance(figure.add_axes((0.05, 0.15, 0.43, 0.69)), curves)
        draw_regeneration(figure.add_axes((0.69, 0.15, 0.19, 0.69)), curves.tokens_per_step)
        return figure


def draw_acceptance(axes: Axes, curves: Curves) -> None:
    axes.set_title("Tokens accepted a verification step")
    axes.set_xlabel("optimizer steps", loc="left")
    axes.plot(*_points(curves.simulated), color=CHAIN, linewidth=0.7, alpha=0.7)
    for curve, color in ((curves.tree, TREE), (curves.chain, CHAIN)):
        axes.plot(*_points(curve), color=color, marker="o", clip_on=False)
    axes.set_xlim(0, max(max(curve) for curve in (curves.simulated, curves.chain, curves.tree)))
    axes.set_ylim(bottom=1)  # plain decoding
    axes.yaxis.set_major_locator(MaxNLocator(5))
    _mark_rounds(axes, list(curves.tokens_per_step))
    ends = ("trees", curves.tree, TREE), ("chain", curves.chain, CHAIN)
    _name_ends(axes, [*ends, ("chain, simulated", curves.simulated, CHAIN)])


def draw_regeneration(axes: Axes, tokens_per_step: Curve) -> None:
    """Both curves begin near 1, where the first round decodes plainly."""
    axes.set_title("Regeneration")
    axes.set_xlabel("rounds", loc="left")
    tokens = dict(enumerate(tokens_per_step.values(), start=1))
    steps = {number: 1 / value for number, value in tokens.items()}
    shown = tokens if len(tokens) <= _MOST_VALUES else (1, len(tokens))
    for curve, color, up in ((steps, QUIET, -1), (tokens, INK, 1)):
        axes.plot(*_points(curve), color=color, marker="o", clip_on=False)
        for number in shown:
            # aside where the curves part
            place = Place((-7, 3 * up), "right") if number == 1 else Place((0, 6 * up), "center")
            write(axes, f"{curve[number]:.2f}", (number, curve[number]), place, color)
    axes.set_ylim(bottom=0)
    axes.set_xticks(list(tokens))
    axes.set_yticks([])
    _name_ends(axes, [("tokens a step", tokens, INK), ("steps a token", steps, QUIET)], with_value=False)


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    return list(curve), list(curve.values())


def _mark_rounds(axes: Axes, starts: Sequence[int]) -> None:
    over_axis = axes.get_xaxis_transform()
    write(axes, "round", (0, 1), Place((-4, 4), "right"), QUIET, over_axis)
    for number, start in enumerate(starts, start=1):
        write(axes, f"{number}", (start, 1), Place((0, 4), "left"), QUIET, over_axis)
        if start:
            axes.axvline(start, color=FAINT, linewidth=0.8, zorder=0)


def _name_ends(axes: Axes, curves: Sequence[tuple[str, Curve, str]], *, with_value: bool = True) -> None:
    """A curve's name (and last value) beside its last point, in its color."""
    lasts = [(name, list(curve.values())[-1], color) for name, curve, color in curves]
    names = [Name(f"{name}  {last:.2f}" if with_value else name, last, color) for name, last, color in lasts]
    write_beside(axes, names, 1, axes.transAxes, _LABEL_GAP)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
