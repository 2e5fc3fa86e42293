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


# Shards overlap and are written beside the next job


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
    return Made(entry, 1, 1, 1, 0, 1.0, {}, {})


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


def test_an_engine_may_tell_that_it_is_free_after_its_shard_is_there():
    engine = Scripted([made(0), Free()], [Free(), made(1)])
    told = list(engines.share_out([engine], [Work(0, []), Work(1, [])]))
    assert [type(event) for event in told] == [Made, Free, Free, Made]


def test_what_an_engine_tells_of_a_round_is_heard_before_the_next_job():
    """A swap between rounds finds nothing left to hear of the shards before it."""
    engine = Scripted([made(0), Free()], [Obeyed()])
    list(engines.share_out([engine], [Work(0, [])]))
    engines.tell_all([engine], Swap(Path("c")))
    assert engine.begun == [Work(0, []), Swap(Path("c"))]


class Maker:
    """A shard maker whose shards take some steps each; it begins all prompts of one in its first step."""

    def __init__(self, **steps: int) -> None:
        self.happened: list[str] = []
        self.most_unwritten = 0
        self._steps = {int(name[1:]): count for name, count in steps.items()}
        self._open: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._unwritten: set[int] = set()
        self._may_write = {number: Event() for number in self._steps}

    def let_write(self, number: int) -> None:
        self._may_write[number].set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def wants_more(self) -> bool:
        return not self._fresh

    def begin(self, number: int, _prompts: object) -> None:
        self.happened.append(f"began {number}")
        self._open[number] = self._steps[number]
        self._fresh.add(number)
        self._unwritten.add(number)
        self.most_unwritten = max(self.most_unwritten, len(self._unwritten))

    def step(self) -> list[int]:
        self._fresh.clear()
        self._open = {number: left - 1 for number, left in self._open.items()}
        generated = [number for number, left in self._open.items() if left == 0]
        self._open = {number: left for number, left in self._open.items() if left}
        self.happened += [f"generated {number}" for number in generated]
        return generated

    def write(self, number: int) -> Made:
        assert self._may_write[number].wait(10)
        if number == 9:
            raise OSError("no room")
        self.happened.append(f"wrote {number}")
        self._unwritten.remove(number)
        return made(number)

    def swap(self, _ckpt: object) -> None:
        self.happened.append("swapped")


def work(maker: Maker, *jobs: object) -> list[object]:
    """What an engine's process tells that has all these jobs before it."""
    ours, theirs = get_context("spawn").Pipe()
    for job in jobs:
        ours.send(job)
    ours.close()
    line, told = Line(theirs), []
    line.tell = told.append
    with pytest.raises(EOFError):
        _do_all(line, maker)
    return told


def test_a_shard_begins_while_the_last_one_is_generated_and_the_third_once_one_is_written():
    maker = Maker(_0=9, _1=12, _2=3)
    for number in range(3):
        maker.let_write(number)
    told = work(maker, Work(0, []), Work(1, []), Work(2, []))
    assert maker.happened[:3] == ["began 0", "began 1", "generated 0"]
    assert maker.happened.index("wrote 0") < maker.happened.index("began 2")
    assert maker.most_unwritten == 2
    assert sorted(event.entry.file for event in told if isinstance(event, Made)) == ["0", "1", "2"]
    assert told.count(Free()) == 3


def test_a_shard_is_written_while_the_next_is_generated():
    maker = Maker(_0=1, _1=5)
    maker.let_write(1)
    step = maker.step

    def step_and_let_write() -> list[int]:
        generated = step()
        if 1 in generated:
            maker.let_write(0)
        return generated

    maker.step = step_and_let_write
    work(maker, Work(0, []), Work(1, []))
    assert maker.happened.index("generated 1") < maker.happened.index("wrote 0")


def test_a_swap_waits_until_every_shard_before_it_is_written():
    maker = Maker(_0=9, _1=4, _2=2)
    for number in range(3):
        maker.let_write(number)
    told = work(maker, Work(0, []), Work(1, []), Swap(Path("c")), Work(2, []))
    swapped = maker.happened.index("swapped")
    assert {"wrote 0", "wrote 1"} <= set(maker.happened[:swapped])
    assert maker.happened[swapped + 1] == "began 2"
    assert told.count(Obeyed()) == 1


def test_a_shard_that_cannot_be_written_is_told_of_and_no_other_job_comes_before():
    maker = Maker(_9=2)
    maker.let_write(9)
    told = work(maker, Work(9, []), Command.GREET)
    assert [type(event) for event in told] == [Free, OSError, Obeyed]
