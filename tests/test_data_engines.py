"""data/engines.py: how engines share a machine; that they share the work is in test_data_regenerate.py."""

from multiprocessing import get_context
from pathlib import Path
from threading import Event

import pytest

from data import engines
from data.engines import Advanced, Command, Free, Line, Obeyed, Swap, Work, _do_all
from data.shard_maker import Made
from recipes.errors import UserError
from recipes.manifest import ShardEntry
from recipes.schema import Serve


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(engines, "is_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")


def test_an_engine_gets_neighbouring_gpus_of_its_own(four_gpus):
    shares = [
        share["CUDA_VISIBLE_DEVICES"] for share in engines.share_devices(2, Serve(tensor_parallel_size=2))
    ]
    assert shares == ["2,3", "5,7"]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in engines.share_devices(3, Serve())] == ["2", "3", "5"]


def test_too_few_gpus_are_a_users_mistake(four_gpus):
    with pytest.raises(UserError, match=r"need 6 GPUs, found 4: lower data\.engines"):
        engines.share_devices(3, Serve(tensor_parallel_size=2))


def test_engines_share_gpus_only_if_their_memory_is_given(four_gpus):
    shares = engines.share_devices(6, Serve(kv_cache_gib=4))
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["2", "3", "5", "7", "2", "3"]
    with pytest.raises(UserError, match=r"setting serve\.kv_cache_gib"):
        engines.share_devices(6, Serve())


@pytest.mark.parametrize(("threads", "count", "each"), [("7", 2, "3"), ("1", 2, "1"), ("4", 1, "4")])
def test_on_a_cpu_they_share_the_threads_of_one(monkeypatch, threads, count, each):
    monkeypatch.setattr(engines, "is_cuda", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert engines.share_devices(count, Serve()) == [{"OMP_NUM_THREADS": each}] * count


# Shards are written beside the next job


class Scripted:
    """An engine that tells what it is scripted to, job after job."""

    def __init__(self, *told: list[object]) -> None:
        self.begun: list[object] = []
        self._told, self._waiting = list(told), []
        self.connection, self._theirs = get_context("spawn").Pipe()

    def begin(self, job: object) -> None:
        self.begun.append(job)
        self._waiting += self._told.pop(0)
        self._theirs.send(None)  # there is news

    def hear(self) -> object:
        event = self._waiting.pop(0)
        if not self._waiting:
            self.connection.recv()
        if isinstance(event, Exception):
            raise event
        return event


def made(number: int) -> Made:
    entry = ShardEntry(file=f"{number}", sha256="0" * 64, sequences=1, tokens=2, supervised_tokens=1)
    return Made(entry, 1, 1, 1.0, {}, {})


def test_a_free_engine_gets_the_next_job_before_its_shard_is_there():
    engine = Scripted([Advanced(1, 0), Free()], [Advanced(1, 0), made(0), Free(), made(1)])
    jobs = [Work(0, []), Work(1, [])]
    happened = [(event, len(engine.begun)) for event in engines.share_out([engine], jobs)]
    assert [(type(event), begun) for event, begun in happened] == [
        *((Advanced, 1), (Free, 1), (Advanced, 2), (Made, 2), (Free, 2), (Made, 2)),
    ]
    assert engine.begun == jobs


def test_engines_take_what_is_left_and_all_is_waited_for():
    first, second = Scripted([Free()], [made(0), Free(), made(2)]), Scripted([Free(), made(1)])
    told = list(engines.share_out([first, second], [Work(number, []) for number in range(3)]))
    assert sorted(event.entry.file for event in told if isinstance(event, Made)) == ["0", "1", "2"]
    assert (len(first.begun), len(second.begun)) == (2, 1)


class SlowWriter:
    """A shard maker whose first file is only there once the second was generated."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self._second_is_generated = Event()

    def generate(self, number: int, _prompts: object) -> int:
        self.happened.append(f"generated {number}")
        if number == 1:
            self._second_is_generated.set()
        return number

    def write(self, number: int) -> Made:
        if number == 2:
            raise OSError("no room")
        assert self._second_is_generated.wait(10)
        self.happened.append(f"written {number}")
        return made(number)

    def swap(self, _ckpt: object) -> None:
        self.happened.append("swapped")


def test_a_shard_is_written_while_the_next_is_generated_and_before_anything_else():
    ours, theirs = get_context("spawn").Pipe()
    for job in (Work(0, []), Work(1, []), Swap(Path("c")), Work(2, []), Command.GREET):
        ours.send(job)
    maker, line = SlowWriter(), Line(theirs)
    ours.close()
    told: list[object] = []
    line.tell = told.append
    with pytest.raises(EOFError):
        _do_all(line, maker)
    kinds = [type(event) for event in told]
    assert kinds == [Free, Made, Free, Made, Obeyed, Free, OSError, Obeyed]
    assert maker.happened[:4] == ["generated 0", "generated 1", "written 0", "written 1"]
    assert maker.happened[4] == "swapped"
