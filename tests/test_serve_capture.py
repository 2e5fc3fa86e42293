"""serve/capture.py: rows of many steps become one contiguous file per request."""

from pathlib import Path

import numpy as np
import pytest
import torch

from serve.capture import CaptureSink, StepTaps, external_id, read_spooled

TAPS = 2


def state(request: str, position: int, pass_number: int = 0) -> float:
    """What tap 0 holds for a request's token; tap 1 holds its negative."""
    return float(1000 * (ord(request[0]) - ord("a")) + position + 0.25 * pass_number)


def step(*spans: tuple[str, int, int], rejected: tuple[int, ...] = (), pass_number: int = 0) -> StepTaps:
    """One step in which each (request, first position, rows) is computed; token ids are 7 x position."""
    places = [(name, first + i) for name, first, rows in spans for i in range(rows)]
    values = torch.tensor([state(name, position, pass_number) for name, position in places])
    positions = torch.tensor([position for _, position in places])
    return StepTaps(
        request_ids=[f"{name}-12345678" for name, _, _ in spans],
        starts=np.cumsum([0, *(rows for _, _, rows in spans)]),
        taps=[values[:, None], -values[:, None]],
        positions=positions,
        token_ids=(7 * positions).int(),
        num_rejected=torch.tensor(rejected or (0,) * len(spans)),
        arrived=None,
    )


@pytest.fixture
def sink(tmp_path: Path) -> CaptureSink:
    return CaptureSink(tmp_path)


def check(tmp_path: Path, name: str, rows: int) -> None:
    hidden, token_ids = read_spooled(tmp_path, name)
    expected = torch.tensor([[state(name, j), -state(name, j)] for j in range(rows)])
    assert torch.equal(hidden, expected)
    assert token_ids.tolist() == [7 * j for j in range(rows)]


def test_rows_of_requests_that_share_steps_are_kept_apart(sink, tmp_path):
    sink.add_step(step(("a", 0, 3), ("b", 0, 2)))
    sink.add_step(step(("b", 2, 1), ("a", 3, 1)))  # the batch's order changes from step to step
    sink.flush()
    check(tmp_path, "a", 4)
    check(tmp_path, "b", 3)


def test_rejected_rows_are_left_out_and_taken_when_computed_again(sink, tmp_path):
    sink.add_step(step(("a", 0, 3)))
    sink.add_step(step(("a", 3, 4), rejected=(3,)))
    sink.add_step(step(("a", 4, 4), rejected=(1,)))
    sink.flush()
    check(tmp_path, "a", 7)


def test_a_preempted_request_keeps_its_first_rows(sink, tmp_path):
    sink.add_step(step(("a", 0, 3)))
    sink.add_step(step(("a", 3, 1)))
    sink.add_step(step(("a", 0, 2), pass_number=1))
    sink.add_step(step(("a", 2, 4), pass_number=0))
    sink.flush()
    check(tmp_path, "a", 6)


def test_a_request_under_way_when_capture_begins_is_left_out(sink, tmp_path):
    sink.add_step(step(("a", 5, 1), ("b", 0, 2)))
    sink.flush()
    assert [path.stem for path in tmp_path.iterdir()] == ["b"]


def test_a_gap_is_an_error(sink):
    sink.add_step(step(("a", 0, 3)))
    sink.add_step(step(("a", 4, 1)))
    with pytest.raises(AssertionError, match=r"rows 3\.\.3"):
        sink.flush()


def test_a_finished_request_is_written_and_the_running_ones_are_not(sink, tmp_path):
    sink.add_step(step(("a", 0, 3), ("b", 0, 2)))
    sink.finish({"a-12345678", "z-12345678"})
    assert [path.stem for path in tmp_path.iterdir()] == ["a"]
    check(tmp_path, "a", 3)


def test_rows_after_a_flush_are_ignored(sink, tmp_path):
    sink.add_step(step(("a", 0, 3)))
    sink.flush()
    sink.add_step(step(("a", 3, 1)))
    sink.flush()
    check(tmp_path, "a", 3)


def test_the_last_step_is_in_the_file_of_a_finished_request(sink, tmp_path):
    sink.add_step(step(("a", 0, 3)))
    sink.add_step(step(("a", 3, 1)))
    sink.finish(["a-12345678"])
    check(tmp_path, "a", 4)


def test_external_ids_may_hold_dashes():
    assert external_id("chat-7-0a1b2c3d") == "chat-7"
