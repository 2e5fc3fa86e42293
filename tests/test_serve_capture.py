"""serve/capture.py: rows of many steps become one contiguous file per request."""

import errno
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serve.capture import (
    _MOST_WAITING,
    CaptureSink,
    StepTaps,
    TrafficSink,
    external_id,
    read_prompt_length,
    read_spooled,
    spool_path,
)

TAPS = 2
PROMPT = 3
"""Tokens of every prompt."""


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
        prompt_lengths=np.full(len(spans), PROMPT, dtype=np.int32),
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


def test_a_request_that_samples_its_last_tokens_anew_keeps_those_of_its_text(sink, tmp_path):
    """As after a swap, which drops what was sampled and not yet delivered."""
    sink.add_step(step(("a", 0, 3)))
    dropped = step(("a", 3, 2), pass_number=1)
    dropped.token_ids[:] = 5
    sink.add_step(dropped)
    sink.add_step(step(("a", 0, 3), pass_number=2))
    sink.add_step(step(("a", 3, 1)))
    sink.flush()
    check(tmp_path, "a", 4)


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
    sink.wait()
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
    sink.wait()
    check(tmp_path, "a", 4)


def test_external_ids_may_hold_dashes():
    assert external_id("chat-7-0a1b2c3d") == "chat-7"


def test_a_file_says_how_long_the_prompt_is_and_whose_it_was(sink, tmp_path):
    sink.add_step(step(("a", 0, 5)))
    sink.flush()
    assert read_prompt_length(spool_path(tmp_path, "a")) == PROMPT


# Of a server


@pytest.fixture
def traffic(tmp_path: Path) -> TrafficSink:
    return TrafficSink(tmp_path)


def named(*names: str) -> StepTaps:
    """A step of three tokens of each, by the engine's own ids."""
    return replace(step(*((name, 0, 3) for name in names)), request_ids=list(names))


def test_what_was_written_is_counted(traffic, tmp_path):
    assert traffic.status() == {"folder": str(tmp_path), "sequences": 0, "tokens": 0}
    traffic.add_step(step(("a", 0, 3), ("b", 0, 4)))
    traffic.finish(["a-12345678"])
    assert traffic.status() == {"folder": str(tmp_path), "sequences": 1, "tokens": 3}


def test_a_closed_sink_has_written_what_ran_and_takes_no_more(traffic, tmp_path):
    traffic.add_step(step(("a", 0, 3), ("b", 0, 4)))
    traffic.close()
    assert not traffic.is_open
    assert traffic.status() == {"folder": None, "sequences": 2, "tokens": 7}
    check(tmp_path, "b", 4)


def test_a_clients_id_leads_nowhere_else_and_fits_into_a_name(traffic, tmp_path):
    wild = ["/etc/passwd", "../../up", "..", "a\0b", "ä b", "x" * 5000, "y" * 250 + "/z"]
    traffic.add_step(named(*(f"{name}-{number:08}" for number, name in enumerate(wild))))
    traffic.close()
    assert len(list(tmp_path.iterdir())) == traffic.status()["sequences"] == len(wild)
    assert all(len(read_spooled(tmp_path, name)[1]) == 3 for name in wild)


def test_an_id_that_comes_twice_overwrites_nothing(traffic, tmp_path):
    for own in ("a-00000001", "a-00000002", "a-00000003"):
        traffic.add_step(named(own))
        traffic.finish([own])
    traffic.close()
    assert {path.stem for path in tmp_path.iterdir()} == {"a", "a-00000002", "a-00000003"}


@pytest.fixture
def full_disk(monkeypatch) -> None:
    def write(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("serve.capture.write_tensors", write)


def test_a_disk_that_fills_ends_a_servers_capture_and_not_the_server(traffic, full_disk, caplog, tmp_path):
    traffic.add_step(step(("a", 0, 3), ("b", 0, 4)))
    traffic.finish(["a-12345678"])
    told = traffic.status()
    assert not traffic.is_open
    assert (told["folder"], told["sequences"], told["tokens"]) == (None, 0, 0)
    assert "No space left on device" in told["error"]
    assert str(tmp_path / "a.safetensors") in told["error"]
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.ERROR, told["error"])]


def test_a_disk_that_fills_at_the_end_is_told_as_well(traffic, full_disk):
    traffic.add_step(step(("a", 0, 3)))
    traffic.close()
    assert "No space left" in traffic.status()["error"]


def test_a_disk_that_fills_stops_the_making_of_data(sink, full_disk):
    sink.add_step(step(("a", 0, 3)))
    with pytest.raises(OSError, match="No space left"):
        sink.flush()


def test_it_stops_as_well_where_no_more_requests_may_wait(sink, full_disk):
    names = [f"{number}-12345678" for number in range(_MOST_WAITING + 1)]
    sink.add_step(named(*names))
    with pytest.raises(OSError, match="No space left"):
        sink.finish(names)
        sink.finish([])
