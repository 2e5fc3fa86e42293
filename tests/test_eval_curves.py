"""eval/curves.py: a picture of a run from its event files alone, the same each time."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from drafters import REPOSITORY

from eval.curves import TAGS, draw, read_curves
from eval.drawing import spread
from eval.points import write_curves
from recipes.errors import UserError
from recipes.pictures import write_svg

CHAIN, TREE, SIMULATED, TOKENS = (TAGS[name] for name in ("chain", "tree", "simulated", "tokens_per_step"))
RUN = {
    0: {TOKENS: 1.0},
    10: {SIMULATED: 1.4},
    20: {SIMULATED: 1.8, CHAIN: 1.5, TREE: 2.0, TOKENS: 2.0},
    40: {SIMULATED: 2.125, CHAIN: 1.75, TREE: 2.5, TOKENS: 2.5},
    60: {SIMULATED: 2.25, CHAIN: 2.0, TREE: 2.75},
}


def write_run(folder: Path, points: dict[int, dict[str, float]]) -> Path:
    for step, values in points.items():
        write_curves(folder / "tensorboard", step, values)
    return folder


def without(tag: str) -> dict[int, dict[str, float]]:
    return {step: {name: value for name, value in at.items() if name != tag} for step, at in RUN.items()}


def picture(run: Path) -> str:
    write_svg(draw(read_curves(run)), run / "curves.svg")
    return (run / "curves.svg").read_text()


def texts(svg: str) -> list[str]:
    """What matplotlib says of each text that it draws as paths."""
    return re.findall(r"<!-- (.*) -->", svg)


def test_curves_are_read_by_step_and_of_two_points_the_last_counts(tmp_path):
    run = write_run(tmp_path, RUN)
    write_run(run, {60: {CHAIN: 2.2}, 30: {CHAIN: 1.6}})
    found = read_curves(run)
    assert found.chain == pytest.approx({20: 1.5, 30: 1.6, 40: 1.75, 60: 2.2})
    assert list(found.chain) == [20, 30, 40, 60]
    assert found.tokens_per_step == {0: 1.0, 20: 2.0, 40: 2.5}


def test_curves_are_named_where_they_end_and_rounds_where_they_begin(tmp_path):
    said = texts(picture(write_run(tmp_path, RUN)))
    for label in ("trees  2.75", "chain  2.00", "chain, simulated  2.25", "tokens a step", "steps a token"):
        assert said.count(label) == 1
    assert said.index("round") + 3 == said.index("3", said.index("round"))
    assert {"2.50", "0.40", "1.00", "optimizer steps"} <= set(said)


def test_lines_are_where_rounds_begin_and_points_where_the_engine_was_asked(tmp_path):
    acceptance, regeneration = draw(read_curves(write_run(tmp_path, RUN))).axes
    simulated, tree, chain, *hairlines = acceptance.lines
    assert [line.get_xdata()[0] for line in hairlines] == [20, 40]
    assert (list(tree.get_xdata()), list(tree.get_ydata())) == ([20, 40, 60], [2.0, 2.5, 2.75])
    assert (simulated.get_marker(), chain.get_marker()) == ("None", "o")
    steps, tokens = regeneration.lines
    assert (list(steps.get_ydata()), list(tokens.get_ydata())) == ([1.0, 0.5, 0.4], [1.0, 2.0, 2.5])


def test_values_of_many_rounds_are_told_of_the_first_and_the_last(tmp_path):
    many = {100 + step: {TOKENS: 3 + step / 10} for step in range(8)}
    said = texts(picture(write_run(tmp_path, RUN | many)))
    assert {"1.00", "3.70"} <= set(said)
    assert not {"2.50", "3.60"} & set(said)


def test_the_picture_is_one_file_of_900_by_360_and_the_same_each_time(tmp_path):
    run = write_run(tmp_path, RUN)
    first = picture(run)
    assert picture(run) == first
    assert 'width="675pt" height="270pt"' in first
    assert "date" not in first.lower()
    assert 'href="http' not in first


@pytest.mark.parametrize("tag", TAGS.values())
def test_a_missing_curve_is_named(tag, tmp_path):
    with pytest.raises(UserError, match=f"found no {tag}; a recipe with rounds.count above 1"):
        read_curves(write_run(tmp_path, without(tag)))


def test_a_folder_without_curves_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(UserError, match=r"found none; give the output_dir of a run"):
        read_curves(tmp_path)


def test_the_command_draws_into_the_run(tmp_path):
    write_run(tmp_path, RUN)
    command = [sys.executable, str(REPOSITORY / "eval" / "curves.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"picture: {tmp_path}/curves.svg" in ended.stdout
    assert (tmp_path / "curves.svg").read_text() == picture(tmp_path)


@pytest.mark.parametrize(
    "heights", [[0.5], [0.1, 0.9], [0.5, 0.5, 0.5], [0.52, 0.5, 0.1, 0.12], [0.3, 0.2, 0.25]]
)
def test_labels_are_moved_apart_and_no_further(heights):
    gap = 0.1
    placed = spread(heights, gap)
    ascending = sorted(placed)
    assert all(above - below >= gap - 1e-9 for below, above in pairwise(ascending))
    assert sum(placed) == pytest.approx(sum(heights))
    pairs = sorted(zip(heights, placed, strict=True))
    assert [place for _, place in pairs] == ascending
    if all(above - below >= gap for below, above in pairwise(sorted(heights))):
        assert placed == heights
