"""train/rounds.py and train/pulse.py: the steps of a round, its data phase's child, and the gap alarm."""

from pathlib import Path

import pytest
from drafters import tiny_recipe
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.errors import MachineError, UserError
from recipes.manifest import Captured, Pulse, RoundManifest
from recipes.schema import Rounds
from train import rounds
from train.loop import Distilled
from train.pulse import check_gap, data_points, describe, drafter_points, draw_round, is_drawn
from train.rounds import DataPhase, Round, check_devices, engine_devices, plan_rounds


@pytest.mark.parametrize(
    ("count", "steps", "ends"),
    [(1, 10, [10]), (3, 10, [3, 6, 10]), (4, 5, [1, 2, 3, 5]), (2, 2100, [1050, 2100])],
)
def test_steps_are_shared_out(count, steps, ends):
    planned = plan_rounds(tiny_recipe(f"rounds.count={count}", f"train.steps={steps}"))
    assert [each.steps.stop for each in planned] == ends
    assert [step for each in planned for step in each.steps] == list(range(steps))


def test_a_round_takes_a_step_at_least():
    with pytest.raises(UserError, match=r"rounds\.count 4 .* train\.steps 3"):
        tiny_recipe("rounds.count=4", "train.steps=3")


# Engines beside the trainer


def test_engines_with_gpus_of_their_own_see_no_others():
    assert engine_devices(Rounds()) == {}
    assert engine_devices(Rounds(ahead=True, engine_gpus=[2, 3])) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    with pytest.raises(ValidationError, match="engine_gpus without ahead"):
        Rounds(engine_gpus=[2])


@pytest.mark.parametrize(("visible", "trainer_gpus"), [(None, 1), ("0", 1), ("2,0,1", 2), ("GPU-a,1", 1)])
def test_trainer_and_engines_take_different_gpus(monkeypatch, visible, trainer_gpus):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check_devices(Rounds(ahead=True, engine_gpus=[1]), trainer_gpus)
    check_devices(Rounds(), trainer_gpus)
    check_devices(Rounds(ahead=True), 0)


@pytest.mark.parametrize(("visible", "others"), [("0,1", "0"), ("1", "N")])
def test_a_gpu_for_both_is_a_users_mistake(monkeypatch, visible, others):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match=rf"both take GPU 1: .*--include localhost:{others}`"):
        check_devices(Rounds(ahead=True, engine_gpus=[1]), len(visible.split(",")))
    with pytest.raises(UserError, match=r"needs rounds\.engine_gpus"):
        check_devices(Rounds(ahead=True), 1)


# The child

RUN = """
import json, os, sys, pathlib
sys.path[:0] = {paths!r}
from data.rounds import round_path
from recipes.manifest import RoundManifest, write_json
out = pathlib.Path({out!r})
with (out / "starts").open("a") as file:
    print(os.getpid(), file=file)
for line in sys.stdin:
    order = json.loads(line)
    {act}
    report = RoundManifest(round=order["round"], checkpoint=order["checkpoint"], pulses=[], emitted_tokens=0,
                           request_steps=0, engine_seconds=0.0, num_engines=0)
    round_path(out, order["round"]).parent.mkdir(exist_ok=True)
    write_json(round_path(out, order["round"]), report)
"""


@pytest.fixture
def phase(tmp_path, monkeypatch):
    """A data phase whose child does as it is told before it says that a round is done."""

    def make(act: str = "pass") -> DataPhase:
        script = tmp_path / "data" / "host.py"
        script.parent.mkdir(exist_ok=True)
        repository = str(Path(__file__).parent.parent)
        script.write_text(RUN.format(paths=[repository], out=str(tmp_path), act=act))
        monkeypatch.setattr(rounds, "REPOSITORY", tmp_path)
        return DataPhase(tiny_recipe(f"output_dir={tmp_path}"), ["recipe.yaml"])

    return make


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().split()


def test_one_child_serves_all_rounds_and_ends_with_its_input(phase, tmp_path):
    with phase() as data:
        assert data.make(0, None).checkpoint is None
        assert data.make(1, Path("c")).checkpoint == "c"
        child = data._child
    assert child.returncode == 0
    assert len(starts(tmp_path)) == 1


def test_a_round_is_ordered_once_and_waited_for_later(phase, tmp_path):
    with phase("(out / 'orders').open('a').write(line)") as data:
        data.begin(0, Path("c"))
        assert data.make(0, Path("c")).checkpoint == "c"
        data.begin(0, Path("c"))
    assert len((tmp_path / "orders").read_text().splitlines()) == 1


def test_a_child_that_dies_before_anyone_waits_is_started_again(phase, tmp_path):
    dies_once = "len(open(out / 'starts').readlines()) > 1 or os.kill(os.getpid(), 9)"
    with phase(dies_once) as data:
        data.begin(0, None)
        data._child.wait()
        assert data.make(0, None).round == 0
    assert len(starts(tmp_path)) == 2


def test_a_round_that_is_done_needs_no_child(phase, tmp_path):
    with phase() as data:
        data.make(0, None)
    with phase("raise SystemExit(1)") as again:
        assert again.make(0, None).round == 0
    assert len(starts(tmp_path)) == 1


def test_a_child_that_dies_is_started_once_more(phase, tmp_path):
    dies_once = "len(open(out / 'starts').readlines()) > 1 or os.kill(os.getpid(), 9)"
    with phase(dies_once) as data:
        assert data.make(0, None).round == 0
    assert len(starts(tmp_path)) == 2


@pytest.mark.parametrize(
    ("act", "error", "said"),
    [
        ("sys.exit(2)", UserError, "refused"),
        ("sys.exit(1)", MachineError, "ended 2 times, the last with code 1"),
    ],
)
def test_its_failure_keeps_its_meaning(phase, act, error, said):
    with phase(act) as data, pytest.raises(error, match=said):
        data.make(0, None)


def test_a_child_that_does_not_end_is_ended(phase, monkeypatch):
    monkeypatch.setattr(rounds, "_PATIENCE_S", 0.3)
    with phase("import threading; threading.Thread(target=threading.Event().wait).start()") as data:
        data.make(0, None)
    assert data._child.returncode == -9


# What it says


def report(*pulses: tuple[float, bool, int, int]) -> RoundManifest:
    return RoundManifest(
        round=1,
        checkpoint="c",
        pulses=[
            Pulse(
                temperature=t, is_chain=is_chain, steps=steps, committed_tokens=tokens, reached=[steps // 2]
            )
            for t, is_chain, steps, tokens in pulses
        ],
        emitted_tokens=300,
        request_steps=100,
        occupancy=0.75,
        engine_seconds=4.0,
        num_engines=2,
    )


def test_curves_show_the_first_temperature():
    said = report((0.0, True, 10, 20), (0.0, False, 10, 30), (0.7, True, 10, 11))
    points = dict(drafter_points(said, simulated=2.5, num_drafts=2)) | dict(data_points(said))
    assert (points["accept_real/chain"], points["accept_real/tree"]) == (2.0, 3.0)
    assert (points["accept_real/depth_1"], points["accept_real/depth_2"]) == (0.5, 0.0)
    assert "accept_real/depth_3" not in points
    assert points["accept_gap"] == 0.5
    assert (points["data/tokens_per_step"], points["data/tokens_per_second"]) == (3.0, 150.0)
    assert points["data/occupancy"] == 0.75
    assert describe(said).startswith("the engine accepts chain 2.00 (T = 0), trees 3.00 (T = 0), chain 1.10")


CAPTURED = Captured(
    sequences=90,
    tokens=4000,
    shard_bytes=3 * 2**29,
    dropped={"empty_answer": 2, "incomplete": 1},
    least_cosine=0.5,
)


def test_curves_tell_what_was_captured_and_how_long_it_took():
    times = {"captured": CAPTURED, "swap_seconds": 0.25, "pulse_seconds": 3.0, "start_seconds": 40.0}
    before, after = (dict(data_points(said)) for said in (report(), report().model_copy(update=times)))
    assert {tag: value for tag, value in after.items() if tag not in before} == {
        "capture/sequences": 90,
        "capture/tokens": 4000,
        "capture/gib": 1.5,
        "capture/dropped": 3,
        "capture/dropped_empty_answer": 2,
        "capture/dropped_incomplete": 1,
        "capture/least_cosine": 0.5,
        "time/start_s": 40.0,
        "time/swap_s": 0.25,
        "time/pulse_s": 3.0,
    }
    assert before["time/generate_s"] == 2.0


def test_states_that_nobody_compared_have_no_cosine():
    unchecked = CAPTURED.model_copy(update={"least_cosine": None})
    said = report().model_copy(update={"captured": unchecked})
    assert "capture/least_cosine" not in dict(data_points(said))


def test_points_stand_at_the_drafters_step_and_at_that_of_the_data(tmp_path):
    assert not is_drawn(tmp_path)
    said = report((0.0, True, 10, 20), (0.0, False, 10, 30))
    recipe = tiny_recipe(f"output_dir={tmp_path}")
    draw_round(said, Round(1, range(40, 80)), Distilled(tmp_path, 30, 2.5), recipe)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    expected = {tag: [30] for tag, _ in drafter_points(said, simulated=2.5, num_drafts=7)}
    expected |= {tag: [40] for tag, _ in data_points(said)}
    drawn = events.Tags()["scalars"]
    assert {tag: [point.step for point in events.Scalars(tag)] for tag in drawn} == expected
    assert is_drawn(tmp_path)


def test_a_first_round_has_no_acceptance(tmp_path):
    recipe = tiny_recipe(f"output_dir={tmp_path}")
    draw_round(report(), Round(0, range(40)), None, recipe)
    drawn = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    assert drawn
    assert not [tag for tag in drawn if tag.startswith("accept")]


def test_a_gap_beyond_what_the_recipe_allows_ends_the_run_with_its_usual_causes():
    said = report((0.0, True, 10, 20), (0.7, True, 10, 11))
    check_gap(said, simulated=2.9, most=1.0)
    check_gap(said, simulated=9.0, most=None)
    check_gap(report(), simulated=9.0, most=1.0)
    with pytest.raises(
        MachineError, match=r"(?s)simulates .* 3\.10, the engine measures 2\.00.*taps:.*template:"
    ):
        check_gap(said, simulated=3.1, most=1.0)
