"""serve/capture.py: rows of many steps become one contiguous file per request."""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve import spool
from serve.capture import _MOST_WAITING, CaptureSink, TrafficSink
from serve.seam.capturing import Landing
from serve.spool import StepTaps, external_id, read_prompt_length, read_spooled, spool_path
from serve.tensor_file import GrowingFile

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
        states=torch.stack([values, -values], dim=1),
        positions=positions,
        token_ids=(7 * positions).int(),
        num_rejected=torch.tensor(rejected or (0,) * len(spans)),
    )


@pytest.fixture
def sink(tmp_path: Path) -> CaptureSink:
    return CaptureSink(tmp_path)


def check(tmp_path: Path, name: str, rows: int) -> None:
    hidden, token_ids = read_spooled(tmp_path, name)
    expected = torch.tensor([[state(name, j), -state(name, j)] for j in range(rows)])
    assert torch.equal(hidden, expected)
    assert token_ids.tolist() == [7 * j for j in range(rows)]


def whole_files(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.safetensors")}


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
    assert whole_files(tmp_path) == {"b"}


def test_a_gap_is_an_error(sink):
    sink.add_step(step(("a", 0, 3)))
    sink.add_step(step(("a", 4, 1)))
    with pytest.raises(AssertionError, match=r"rows 3\.\.3"):
        sink.flush()


def test_a_finished_request_is_written_and_the_running_ones_are_not(sink, tmp_path):
    sink.add_step(step(("a", 0, 3), ("b", 0, 2)))
    sink.finish({"a-12345678", "z-12345678"})
    sink.wait()
    assert whole_files(tmp_path) == {"a"}
    check(tmp_path, "a", 3)


def test_a_flush_of_what_ended_leaves_the_running_ones_whole(sink, tmp_path):
    sink.add_step(step(("a", 0, 3), ("b", 0, 2), ("aa", 0, 1)))
    sink.flush(["a"])
    assert whole_files(tmp_path) == {"a"}
    sink.add_step(step(("b", 2, 2), ("aa", 1, 1)))
    sink.finish({"a-12345678"})  # an engine tells of it a step late
    sink.flush()
    check(tmp_path, "a", 3)
    check(tmp_path, "b", 4)
    check(tmp_path, "aa", 2)


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
    assert whole_files(tmp_path) == {"a", "a-00000002", "a-00000003"}


@pytest.fixture
def full_disk(monkeypatch) -> None:
    def write(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("serve.tensor_file.os.pwrite", write)


def test_a_disk_that_fills_ends_a_servers_capture_and_not_the_server(traffic, full_disk, caplog, tmp_path):
    traffic.add_step(step(("a", 0, 3), ("b", 0, 4)))
    traffic.finish(["a-12345678"])
    told = traffic.status()
    assert not traffic.is_open
    assert (told["folder"], told["sequences"], told["tokens"]) == (None, 0, 0)
    assert "No space left on device" in told["error"]
    assert str(tmp_path) in told["error"]
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.ERROR, told["error"])]


def test_what_a_stopped_capture_is_given_is_lost_and_no_fault(traffic, full_disk, tmp_path):
    traffic.add_step(step(("a", 0, 3)))
    traffic.finish(["a-12345678"])
    traffic.status()
    assert not traffic.is_open
    traffic.add_step(step(("b", 0, 3)))
    traffic.finish(["b-12345678"])
    traffic.flush()
    assert not whole_files(tmp_path)


def test_a_capture_that_was_stopped_by_a_full_disk_leaves_no_part_of_a_file(traffic, full_disk, tmp_path):
    traffic.add_step(step(("a", 0, 3), ("b", 0, 4)))
    traffic.close()
    traffic._thread.shutdown()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_at_the_end_is_told_as_well(traffic, full_disk):
    traffic.add_step(step(("a", 0, 3)))
    traffic.close()
    assert "No space left" in traffic.status()["error"]


def test_a_disk_that_fills_stops_the_making_of_data(sink, full_disk):
    with pytest.raises(OSError, match="No space left"):
        sink.add_step(step(("a", 0, 3)))  # or the next call
        sink.flush()


def test_it_stops_before_more_steps_wait_than_may(sink, full_disk):
    with pytest.raises(OSError, match="No space left"):
        for position in range(spool.MOST_HELD_STEPS + _MOST_WAITING + 1):
            sink.add_step(step(("a", position, 1)))


def test_steps_are_taken_in_while_earlier_ones_are_on_their_way_and_no_more_than_may_wait(sink, tmp_path):
    """As where the disk is slower than the engine."""
    gate, taken = threading.Event(), []
    blocked = replace(step(("a", 0, 1)), arrived=SimpleNamespace(synchronize=gate.wait))
    sink.add_step(blocked)

    def go_on() -> None:
        for position in range(1, _MOST_WAITING + 2):
            sink.add_step(step(("a", position, 1)))
            taken.append(position)

    engine = threading.Thread(target=go_on)
    engine.start()
    wait_until(lambda: len(taken) == _MOST_WAITING - 1)
    engine.join(timeout=0.05)
    assert engine.is_alive()
    gate.set()
    engine.join()
    sink.flush()
    check(tmp_path, "a", _MOST_WAITING + 2)


@pytest.mark.parametrize("held", [1, 2])
def test_a_steps_place_is_given_back_once_it_was_taken_in_also_where_it_cannot_be_written(
    sink, full_disk, monkeypatch, held
):
    monkeypatch.setattr(spool, "MOST_HELD_STEPS", held)
    released = threading.Event()
    with pytest.raises(OSError, match="No space left"):
        sink.add_step(replace(step(("a", 0, 3)), release=released.set))
        sink.flush()
    assert released.is_set()


# Rows that are held


NAMES = "abc"


@st.composite
def traffic_of_steps(draw: st.DrawFn) -> list[tuple[StepTaps, list[str]]]:
    """Steps with the requests that end after each: chunks, refused drafts, preemption, other last tokens."""
    computed = dict.fromkeys(NAMES, 0)
    steps: list[tuple[StepTaps, list[str]]] = []
    for number in range(draw(st.integers(1, 14))):
        running = draw(st.lists(st.sampled_from(sorted(computed)), unique=True)) if computed else []
        spans, rejected = [], []
        for name in running:
            first = draw(st.integers(0, computed[name])) if draw(st.booleans()) else computed[name]
            rows = draw(st.integers(1, 5))
            rejected.append(draw(st.integers(0, rows - 1)))
            spans.append((name, first, rows))
        ended = [name for name in computed if draw(st.integers(0, 9)) == 0]
        if spans:
            made = step(*spans, rejected=tuple(rejected), pass_number=number)
            if draw(st.integers(0, 3)) == 0:  # as after a swap
                made.token_ids[int(made.starts[-2]) :] += 1 + number
            steps.append((made, ended))
        files = follow_slowly(steps)  # rows that a swap made untrue are computed again
        computed = {name: len(files.get(name, ((), ()))[1]) for name in computed if name not in ended}
    return steps


def follow_slowly(steps: list[tuple[StepTaps, list[str]]]) -> dict[str, tuple[list[float], list[int]]]:
    """What each file holds: (tap 0, token) by position, the first copy of each up to another token."""
    files: dict[str, list[tuple[float, int]]] = {}
    for taken, _ in steps:
        for row, own in enumerate(taken.request_ids):
            file = files.setdefault(own.partition("-")[0], [])
            for place in range(taken.starts[row], taken.starts[row + 1] - int(taken.num_rejected[row])):
                position, token = int(taken.positions[place]), int(taken.token_ids[place])
                if position < len(file) and file[position][1] != token:
                    del file[position:]
                if position == len(file):
                    file.append((float(taken.states[place, 0]), token))
    return {name: tuple(map(list, zip(*rows, strict=True))) for name, rows in files.items()}  # type: ignore[misc]


@given(traffic_of_steps(), st.sampled_from([1, 2, 3, 32]), st.sampled_from([1, 64, 200, 2**26]))
def test_files_do_not_depend_on_how_long_rows_are_held(steps, most_steps, most_bytes):
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(spool, "MOST_HELD_STEPS", most_steps)
        patched.setattr(spool, "MOST_HELD_BYTES", most_bytes)
        sink = CaptureSink(Path(name))
        for taken, ended in steps:
            copy = replace(taken, states=taken.states.clone(), token_ids=taken.token_ids.clone())
            sink.add_step(copy)
            sink.wait()
            copy.states[:], copy.token_ids[:] = -9, -9  # its place is another step's by now
            sink.finish([f"{each}-12345678" for each in ended])
        sink.flush()
        for request, (states, token_ids) in follow_slowly(steps).items():
            hidden, found_ids = read_spooled(Path(name), request)
            assert (hidden[:, 0].tolist(), found_ids.tolist()) == (states, token_ids)
            assert torch.equal(hidden[:, 1], -hidden[:, 0])


def test_rows_of_small_steps_are_written_together(sink, tmp_path, monkeypatch):
    writes = []
    monkeypatch.setattr(GrowingFile, "write_rows", lambda _, first, rows: writes.append((first, len(rows))))
    for position in range(spool.MOST_HELD_STEPS):
        assert not writes
        sink.add_step(step(("a", position, 1), ("b", 2 * position, 2)))
        sink.wait()
    assert sorted(writes) == [(0, spool.MOST_HELD_STEPS), (0, 2 * spool.MOST_HELD_STEPS)]


def test_a_large_step_is_written_at_once_and_not_copied(sink, monkeypatch):
    written = []
    monkeypatch.setattr(GrowingFile, "write_rows", lambda _, first, rows: written.append(rows.data_ptr()))
    monkeypatch.setattr(spool, "MOST_HELD_BYTES", 4 * 23)
    large = step(("a", 0, 3))
    assert large.states.nbytes == 24
    sink.add_step(large)
    sink.wait()
    assert written == [large.states.data_ptr()]


# Where steps land


def test_places_that_are_held_do_not_overlap_and_come_round():
    landing = Landing(10, 1, torch.float32, pinned=False)
    first, second = landing.take(4), landing.take(5)
    first[:], second[:] = 1, 2
    landing.release()
    third = landing.take(4)  # one row is left at the end: too few
    third[:] = 3
    assert third.data_ptr() == first.data_ptr()
    assert second.eq(2).all()
    landing.release()
    landing.take(5)[:] = 4  # behind the third
    assert third.eq(3).all()


def test_one_who_finds_no_place_waits_for_the_first_that_is_given_back():
    landing = Landing(10, 1, torch.float32, pinned=False)
    landing.take(5)
    landing.take(5)
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(landing.take(5)))
    waiting.start()
    waiting.join(timeout=0.05)
    assert not taken
    landing.release()
    waiting.join()
    assert len(taken) == 1


@given(st.lists(st.integers(1, 8), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_no_row_is_held_twice(counts, chance):
    landing = Landing(16, 1, torch.float32, pinned=False)
    held: deque[set[int]] = deque()
    for count in counts:
        while held and (chance.random() < 0.4 or landing._find(count) is None):
            held.popleft()
            landing.release()
        rows = landing.take(count)
        start = rows.storage_offset()
        fresh = set(range(start, start + count))
        assert all(fresh.isdisjoint(other) for other in held)
        held.append(fresh)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)
