"""eval/rows.py: a picture of a report of tests/compare_heads.py, with its own values, the same each time."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_heads import WITH, WITHOUT, make_report
from drafters import REPOSITORY, tiny_recipe
from matplotlib.container import ErrorbarContainer
from objective_scores import Way, count, estimate

from eval.acceptance import Counts
from eval.rows import SERIES, HeadsReport, draw
from recipes.errors import UserError
from recipes.manifest import read_manifest, write_json
from recipes.pictures import write_svg
from serve.generation import Answer

BLOCK_SIZE = 8
WAYS = [Way(temperature, budget) for budget in (None, 31, 15) for temperature in (0.0, 0.7)]
NUM_PROMPTS = 7


def draw_counts(seed: int) -> Counts:
    """Of answers, the first no longer than the prefill's token."""
    generator = np.random.default_rng(seed)
    sizes = [[1, *generator.integers(1, 9, size=3 * number)] for number in range(NUM_PROMPTS)]
    return count([Answer([], "stop", None, each) for each in sizes])


COUNTED = {
    way: {WITH: draw_counts(number), WITHOUT: draw_counts(number + 100)} for number, way in enumerate(WAYS)
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A report as the command writes it, of a drafter whose config alone is there."""
    ckpt = tmp_path / "drafter"
    ckpt.mkdir()
    config = json.loads((REPOSITORY / "recipes/embedded/drafter/config.json").read_text())
    (ckpt / "config.json").write_text(json.dumps(config | {"block_size": BLOCK_SIZE}))
    write_json(tmp_path / "report.json", make_report(COUNTED, tiny_recipe("eval.num_prompts=7"), ckpt))
    return tmp_path / "report.json"


def picture(path: Path) -> str:
    write_svg(draw(read_manifest(path, HeadsReport)), path.with_name("picture.svg"))
    return path.with_name("picture.svg").read_text()


def texts(svg: str) -> list[str]:
    """What matplotlib says of each text that it draws as paths."""
    return re.findall(r"<!-- (.*) -->", svg)


def drawn(container: ErrorbarContainer) -> dict[int, tuple[float, float, float]]:
    """By drafts verified: the value, and the ends of its bar."""
    line, _, (bars,) = container.lines
    ends = [(low[1], high[1]) for low, high in bars.get_segments()]
    values = zip(line.get_xdata(), line.get_ydata(), strict=True)
    return {int(x): (y, *of_bar) for (x, y), of_bar in zip(values, ends, strict=True)}


def test_a_panel_for_each_temperature_draws_the_reports_values_and_errors(path):
    panels = draw(read_manifest(path, HeadsReport)).axes
    assert [axes.get_title(loc="left")[-3:] for axes in panels] == ["= 0", "0.7"]
    for axes, temperature in zip(panels, (0.0, 0.7), strict=True):
        for container, series in zip(axes.containers, SERIES, strict=True):
            name = WITH if series.drafter == "with_head" else WITHOUT
            found = drawn(container)
            assert list(found) == ([BLOCK_SIZE - 1] if series.is_chain else [15, 31])
            for drafts, values in found.items():
                budget = None if series.is_chain else drafts
                true = estimate([COUNTED[Way(temperature, budget)][name]])
                error = true.standard_error
                assert error > 0
                assert values == pytest.approx((true.value, true.value - error, true.value + error))


@pytest.mark.parametrize("tallest", [0.0, 0.7])
def test_all_panels_have_one_scale_from_plain_decoding_to_the_highest_bar(tallest, path):
    told = json.loads(path.read_text())
    raised = next(way for way in told["ways"] if (way["temperature"], way["budget"]) == (tallest, 31))
    raised["with_head"]["tokens"] = [3 * tokens for tokens in raised["with_head"]["tokens"]]
    path.write_text(json.dumps(told))
    (scale,) = {axes.get_ylim() for axes in draw(read_manifest(path, HeadsReport)).axes}
    counts = COUNTED[Way(tallest, 31)][WITH]
    assert scale[0] == 1
    assert scale[1] > 3 * (counts.length + counts.standard_error)


def test_chains_and_the_largest_trees_are_named_with_their_lengths(path):
    said = texts(picture(path))
    for temperature in (0.0, 0.7):
        chain, trees = COUNTED[Way(temperature, None)], COUNTED[Way(temperature, 31)]
        for name, counts in (
            ("vLLM's chain", chain[WITHOUT]),
            ("conditional chain", chain[WITH]),
            ("marginal trees", trees[WITHOUT]),
            ("conditional trees", trees[WITH]),
        ):
            assert f"{name}  {counts.length:.2f}" in said
    assert said.count("31") == 2
    assert f"drafts verified a step; bars: standard errors over {NUM_PROMPTS} prompts" in said


@pytest.mark.parametrize(("temperatures", "size"), [([0.0], (675, 285)), ([0, 0.7, 1], (675, 570))])
def test_panels_stand_two_abreast_and_apart(temperatures, size, path):
    of_one = json.loads(path.read_text())
    own = [way for way in of_one["ways"] if way["temperature"] == 0]
    ways = [way | {"temperature": temperature} for temperature in temperatures for way in own]
    figure = draw(HeadsReport.model_validate_json(json.dumps(of_one | {"ways": ways})))
    assert tuple(figure.get_size_inches() * 72) == pytest.approx(size)
    boxes = [axes.get_position() for axes in figure.axes]
    assert all(0 < box.x0 < box.x1 < 1 and 0 < box.y0 < box.y1 < 1 for box in boxes)
    pairs = [(a, b) for number, a in enumerate(boxes) for b in boxes[:number]]
    assert not any(a.overlaps(b) for a, b in pairs)


def test_the_same_report_gives_the_same_file(path):
    first = picture(path)
    assert picture(path) == first
    assert 'width="675pt"' in first
    assert "date" not in first.lower()


def test_the_command_draws_beside_the_report_or_where_it_is_told(path):
    command = [sys.executable, str(REPOSITORY / "eval" / "rows.py"), str(path)]
    out = path.with_name("deep") / "own.svg"
    for arguments, made in (([], path.with_name("rows.svg")), (["--out", str(out)], out)):
        ended = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        assert f"picture: {made}" in ended.stdout
        assert made.read_text() == picture(path)


def test_the_report_says_what_was_measured(path):
    report, recipe = read_manifest(path, HeadsReport), tiny_recipe("eval.num_prompts=7")
    assert (report.recipe, report.target, report.num_prompts) == (recipe.name, recipe.target.model, 7)
    assert (report.settings["suite"], report.settings["num_prompts"]) == (recipe.eval.suite, 7)
    assert (report.chain_length, report.checkpoint) == (BLOCK_SIZE - 1, str(path.parent / "drafter"))
    for way, measured in zip(WAYS, report.ways, strict=True):
        assert (measured.temperature, measured.budget) == (way.temperature, way.budget)
        for name, told in ((WITH, measured.with_head), (WITHOUT, measured.without_head)):
            assert told.steps == COUNTED[way][name].steps_N.tolist()
            assert told.tokens == COUNTED[way][name].tokens_N.tolist()


def change(told: dict[str, Any], **fields: Any) -> str:
    return json.dumps(told | fields)


def test_what_is_no_such_report_is_refused_with_what_was_found(path):
    told = json.loads(path.read_text())
    ways = told["ways"]
    empty = {"steps": [0, 0], "tokens": [0, 0]}
    for text, said in (
        ("not {JSON", "expected JSON"),
        ("[]", "expected schema_version 1, found None"),
        (change(told, schema_version=2), "expected schema_version 1, found 2"),
        ('{"schema_version": 1, "settings": {}}', "ways: missing"),
        (change(told, ways=[]), "ways: List should have at least 1 item"),
        (change(told, ways=ways[:2]), r"found budgets \[None\] at 0"),
        (change(told, ways=ways[2:]), r"found budgets \[15, 31\] at 0"),
        (change(told, ways=[ways[0] | {"with_head": empty}, *ways[1:]]), "no step was taken"),
        (
            change(told, ways=[ways[0] | {"with_head": {"steps": [1], "tokens": [2, 2]}}, *ways[1:]]),
            "1 prompts have steps and 2 have tokens",
        ),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            read_manifest(path, HeadsReport)


def test_a_missing_report_is_refused_by_the_command_without_a_traceback(tmp_path):
    command = [sys.executable, str(REPOSITORY / "eval" / "rows.py"), str(tmp_path / "none.json")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "expected a HeadsReport, found no such file" in ended.stderr
    assert "Traceback" not in ended.stderr
