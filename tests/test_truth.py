"""Stages that are done are passed over; one that fails or takes too long ends the run by name."""

import time
from pathlib import Path

import pytest
import truth
from drafters import tiny_recipe
from rich.console import Console

from recipes.errors import MachineError, UserError

CONSOLE = Console(quiet=True)


def stage(tmp_path: Path, code: str) -> truth.Stage:
    script = tmp_path / "stage.py"
    script.write_text(code)
    return truth.Stage("one", [str(script)], lambda: False)


def recipe_in(tmp_path: Path):
    recipe = tiny_recipe(f"output_dir={tmp_path / 'run'}")
    truth.resolved_path(recipe).parent.mkdir(parents=True)
    return recipe


def test_what_a_stage_prints_goes_to_its_log(tmp_path):
    recipe = recipe_in(tmp_path)
    truth.take(stage(tmp_path, "print('made')"), recipe, time.monotonic() + 60, CONSOLE)
    assert (tmp_path / "run" / "truth" / "one.log").read_text() == "made\n"


@pytest.mark.parametrize(("code", "failure"), [(2, UserError), (1, MachineError)])
def test_a_stage_that_fails_is_named_with_its_log(tmp_path, code, failure):
    recipe = recipe_in(tmp_path)
    with pytest.raises(failure, match=rf"one ended with code {code}: .*one\.log"):
        truth.take(stage(tmp_path, f"raise SystemExit({code})"), recipe, time.monotonic() + 60, CONSOLE)


def test_a_stage_that_takes_too_long_ends_with_all_that_it_started(tmp_path):
    recipe, left = recipe_in(tmp_path), tmp_path / "left"
    child = f"import time; time.sleep(4); open({str(left)!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(MachineError, match="one was not done in time"):
        truth.take(stage(tmp_path, code), recipe, time.monotonic() + 2, CONSOLE)
    time.sleep(3)
    assert not left.exists()


def test_no_stage_begins_when_the_time_is_over(tmp_path):
    with pytest.raises(MachineError, match="the time is over before one"):
        truth.take(stage(tmp_path, ""), recipe_in(tmp_path), time.monotonic(), CONSOLE)


def test_stages_know_what_is_there(tmp_path):
    recipe = tiny_recipe(f"output_dir={tmp_path}")
    named = {each.name: each for each in truth.stages(Path("recipe.yaml"), recipe, ["a.b=1"])}
    assert "target" not in named, "the recipe's target lies in the repository"
    assert not any(each.is_done() for each in named.values())
    (tmp_path / "truth").mkdir()
    (tmp_path / "truth" / "rows.json").touch()
    assert named["heads"].is_done() and not named["picture"].is_done()
    assert all("a.b=1" in named[name].command for name in ("text", "heads", "rates"))
