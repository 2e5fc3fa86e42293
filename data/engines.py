"""The data phase's engines: processes that share out the prompts, each with its own copy of the target.

An engine takes the next group once it has begun all prompts of one, so that its batch stays full; with every
other job it waits until nothing runs.  It ends with this process, however that dies, and its failure becomes
ours.
"""

import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock

import torch

from data.groups import Rendered
from data.shard_maker import Made, ShardMaker
from recipes.errors import MachineError, UserError
from recipes.manifest import Pulse
from recipes.schema import Recipe, Sampling, Serve
from serve.engine import is_cuda
from serve.generation import Drafting
from serve.lifetime import follow_parent

_PATIENCE_S = 10.0
_MOST_UNWRITTEN = 2
"""Shards of an engine whose states are on their way; recipes/needs.py counts the disk for them."""


@dataclass(frozen=True)
class Work:
    """A shard to be made."""

    number: int
    prompts: Sequence[Rendered]


@dataclass(frozen=True)
class Measurement:
    """A pulse to be taken."""

    prompts: Sequence[Rendered]
    sampling: Sampling
    is_chain: bool


@dataclass(frozen=True)
class Swap:
    """Another checkpoint is to draft from now on."""

    ckpt: Path


class Command(Enum):
    """What takes no more words."""

    GREET = auto()
    """Answer, once you have started."""
    SLEEP = auto()
    WAKE = auto()


Job = Work | Measurement | Swap | Command


@dataclass(frozen=True)
class Advanced:
    """One step of an engine."""

    new_tokens: int
    finished_answers: int


@dataclass(frozen=True)
class Free:
    """It can take the next job: all prompts of its shards were begun, and no more than one is unwritten."""


@dataclass(frozen=True)
class Obeyed:
    """A swap or a command was carried out."""


Done = Made | Pulse | Obeyed
Event = Advanced | Free | Done


class Engine:
    """A process that does one job at a time, but for shards, which overlap with the next one."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        spool: Path,
        drafting: Drafting | None,
        environment: Mapping[str, str],
    ) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (recipe, folder, spool, drafting, theirs, os.getpid())
        self._process = context.Process(target=_do_jobs, args=arguments)
        with _environment(environment):  # OpenMP reads its part when the process begins
            self._process.start()
        theirs.close()

    def begin(self, job: Job) -> None:
        with self._watched():
            self.connection.send(job)

    def hear(self) -> Event:
        """Waits.  Raises what the engine raised, or MachineError if it died."""
        with self._watched():
            event = self.connection.recv()
        if isinstance(event, Exception):
            raise event
        return event

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            raise MachineError(f"an engine of the data phase ended with code {code}, see above") from None

    def end(self, patience_s: float) -> None:
        """Lets it end by itself for a while: Python complains of what a killed process leaves behind."""
        self.connection.close()
        self._process.join(patience_s)
        self._process.kill()
        self._process.join()


@contextmanager
def running_engines(
    recipe: Recipe, folder: Path, spool: Path, most: int, drafting: Drafting | None = None
) -> Iterator[list[Engine]]:
    """data.engines of them, at most `most`; UserError if there are too few GPUs for them."""
    count = min(recipe.data.engines, most)
    environments = share_devices(count, recipe.serve)
    engines: list[Engine] = []
    patience_s = 0.0
    try:
        for number, environment in enumerate(environments):
            engines.append(Engine(recipe, folder, spool / str(number), drafting, environment))
        yield engines
        patience_s = _PATIENCE_S
    finally:
        for engine in engines:
            engine.end(patience_s)


def tell_all(engines: Sequence[Engine], job: Job) -> None:
    """Has every engine do the same, and waits."""
    for engine in engines:
        engine.begin(job)
    for engine in engines:
        while isinstance(engine.hear(), Advanced):
            pass


def share_out(engines: Sequence[Engine], jobs: Sequence[Job]) -> Iterator[Event]:
    """What happens, as it happens, until all jobs are done.

    A shard goes to the engine that asks first: of all it has the least to do before it can begin with it.
    """
    left = deque(jobs)
    promised: Counter[Engine] = Counter()
    """Events to come, steps apart: of a shard that its engine is free, and that it is made; of others one."""

    def begin_next(engine: Engine) -> None:
        if left:
            job = left.popleft()
            engine.begin(job)
            promised[engine] += 2 if isinstance(job, Work) else 1

    for each in engines:
        begin_next(each)
    while promised:
        for engine in _those_with_news(list(promised)):
            event = engine.hear()
            yield event
            if isinstance(event, Advanced):
                continue
            if not isinstance(event, Made):  # of which it tells that it is free
                begin_next(engine)
            promised[engine] -= 1
            promised += Counter()  # without those that have nothing to do


def _those_with_news(engines: Sequence[Engine]) -> list[Engine]:
    """Waits for one at least."""
    heard = wait([engine.connection for engine in engines])
    return [engine for engine in engines if engine.connection in heard]


def _do_jobs(
    recipe: Recipe,
    folder: Path,
    spool: Path,
    drafting: Drafting | None,
    parent: Connection,
    parent_pid: int,
) -> None:
    """The engine's process: does every job that comes, and tells of each step."""
    follow_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    line = Line(parent)
    try:
        maker = ShardMaker(recipe, folder, spool, lambda *step: line.tell(Advanced(*step)), drafting)
        _do_all(line, maker)
    except EOFError:
        return  # no more work
    except (UserError, MachineError, OSError) as error:
        line.tell(error)


def _do_all(line: "Line", maker: ShardMaker) -> None:
    """Raises EOFError once no job will come."""
    with ThreadPoolExecutor(1, "shard") as writer:
        bench = _Bench(line, maker, writer)
        while True:
            if bench.is_idle or (bench.is_free and line.has_news()):
                bench.take(line.hear())
            else:
                bench.step()


class _Bench:
    """What an engine is at: shards, at most `_MOST_UNWRITTEN`, or a job of another kind."""

    def __init__(self, line: "Line", maker: ShardMaker, writer: Executor) -> None:
        self._line, self._maker, self._writer = line, maker, writer
        self._writing: list[Future[None]] = []
        self.is_free = True
        """And the parent knows it."""

    @property
    def is_idle(self) -> bool:
        return self.is_free and not self._maker.num_open

    def take(self, job: Job) -> None:
        if isinstance(job, Work):
            self._maker.begin(job.number, job.prompts)
            self.is_free = False
            return
        while self._maker.num_open:
            self.step()
        self._wait_for_writer(most=0)
        self._line.tell(_do(job, self._maker))

    def step(self) -> None:
        """One of the engine; what is generated goes to the writer, and the parent hears of room."""
        for shard in self._maker.step():
            write = partial(self._maker.write, shard)
            self._writing.append(self._writer.submit(self._line.tell_of, write))
        if not self._maker.num_open:
            self._wait_for_writer(most=_MOST_UNWRITTEN - 1)
        self._writing = [each for each in self._writing if not each.done()]
        has_room = self._maker.num_open + len(self._writing) < _MOST_UNWRITTEN
        if not self.is_free and has_room and self._maker.wants_more:
            self._line.tell(Free())
            self.is_free = True

    def _wait_for_writer(self, most: int) -> None:
        """Until it has no more shards than that; it told of its failures."""
        while len(self._writing) > most:
            self._writing.pop(0).result()


class Line:
    """To the parent, for several threads."""

    def __init__(self, parent: Connection) -> None:
        self._parent, self._turn = parent, Lock()

    def has_news(self) -> bool:
        """A job is there, or none will come."""
        return self._parent.poll()

    def hear(self) -> Job:
        """Waits."""
        return self._parent.recv()

    def tell(self, event: Event | Exception) -> None:
        with self._turn:
            self._parent.send(event)

    def tell_of(self, act: Callable[[], Event]) -> None:
        """What it returns, or raises."""
        try:
            self.tell(act())
        except (UserError, MachineError, OSError) as error:
            self.tell(error)


def _do(job: Measurement | Swap | Command, maker: ShardMaker) -> Pulse | Obeyed:
    if isinstance(job, Measurement):
        return maker.measure(job.prompts, job.sampling, is_chain=job.is_chain)
    _obey(job, maker)
    return Obeyed()


def _obey(job: Swap | Command, maker: ShardMaker) -> None:
    if isinstance(job, Swap):
        maker.swap(job.ckpt)
    elif job is Command.SLEEP:
        maker.sleep()
    elif job is Command.WAKE:
        maker.wake()


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def share_devices(engines: int, serve: Serve) -> list[dict[str, str]]:
    """What each of `engines` processes adds to the engine's environment, so that they share the machine.

    On CUDA its own GPUs, or one that it shares; on a CPU its share of the threads.
    UserError if there are too few GPUs.
    """
    if not is_cuda():
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        return [{"OMP_NUM_THREADS": str(max(1, threads // engines))}] * engines
    gpus, width = _visible_gpus(), serve.tensor_parallel_size
    if len(gpus) >= engines * width:
        shares = [gpus[first : first + width] for first in range(0, engines * width, width)]
    elif gpus and width == 1 and serve.kv_cache_gib is not None:
        # without that size an engine takes its neighbour's memory for its own when it measures
        shares = [[gpus[number % len(gpus)]] for number in range(engines)]
    else:
        raise UserError(
            f"{engines} engines with serve.tensor_parallel_size {width} need {engines * width} GPUs, found"
            f" {len(gpus)}: lower data.engines, or let engines of one GPU each share them by setting"
            " serve.kv_cache_gib"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    return [str(index) for index in range(torch.cuda.device_count())]
