"""The loop of train/distill.py with a stub for vLLM, in forks of one process: a second a life, repeatable.

    python tests/killable_loop.py < ORDERS

An order is a line of JSON, of one life of the command: {"overrides": [...], "log": FILE, "takes_turns": BOOL,
"changed": PATH or null, "number": N, "filler": FILE or null}.  Before the N-th change of that path below
output_dir, or of any, it ends as by kill -9, or a filler fills the disk; N = 0 is never.  Where it takes
turns, engines and trainer leave each other the device, as a GPU.  The answer is a line with the exit code.

Engines and trainer share the process here; tests/kills.py kills real ones.
"""

import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - seconds, that each life would take
import torch
from loop_lives import SMALL_RECIPE
from stepping_stub import SteppingStub

from data import engines, filling, host, shard_maker
from data.engines import Job, Work
from data.rounds import read_round
from data.shard_maker import ShardMaker
from data.shard_plan import make_plan
from recipes.errors import run_command
from recipes.load import load_recipe
from recipes.manifest import RoundManifest, write_json
from recipes.schema import Recipe, Sampling
from serve.generation import Answer, Request
from serve.spool import read_spooled, spool_path
from serve.tensor_file import TensorParts, write_tensors
from train import distill
from train.ranks import Ranks

VOCABULARY, HIDDEN, FIRST_TOKEN = 4096, 256, 10  # of the embedded target; tokens before those have meanings


# In vLLM's place


class StubEngine(SteppingStub):
    """As `serve.generation.CapturingEngine`: answers depend on the prompt alone, states on the text."""

    def __init__(
        self,
        _target: Any,
        _serve: Any,
        target_layer_ids: Sequence[int],
        spool: Path,
        drafting: Any = None,
        *,
        final_states: bool = False,
        sleeps: bool = False,
    ) -> None:
        super().__init__()
        self._width = (len(target_layer_ids) + final_states) * HIDDEN
        self._spool, self._is_drafting = spool, drafting is not None
        self._sleeps, self._is_awake = sleeps, True
        spool.mkdir(parents=True, exist_ok=True)

    def swap(self, ckpt: Path) -> None:
        assert self._is_awake
        assert (ckpt / "model.safetensors").is_file(), ckpt

    def sleep(self) -> None:
        assert self._sleeps
        assert self._is_awake
        self._is_awake = False

    def wake(self) -> None:
        assert not self._is_awake
        self._is_awake = True

    def read_together(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        assert self._is_awake
        return [self._states(text)[:-1] for text in texts]

    def answer_together(
        self, numbers: Sequence[int], requests: Sequence[Request], samplings: Sequence[Sampling]
    ) -> list[Answer]:
        assert self._is_awake
        named = zip(map(str, numbers), requests, samplings, strict=True)
        return [self._answer_one(*each) for each in named]

    def _answer_one(self, name: str, request: Request, sampling: Sampling) -> Answer:
        generator = torch.Generator().manual_seed(request.seed)
        length = int(torch.randint(6, sampling.max_tokens, (1,), generator=generator))
        tokens = torch.randint(FIRST_TOKEN, VOCABULARY, (length,), generator=generator).tolist()
        hidden = self._pass_through_spool(name, self._states([*request.token_ids, *tokens])[:-1])
        size = 2 if self._is_drafting else 1
        chunks = [1, *(len(tokens[start : start + size]) for start in range(1, length, size))]
        return Answer(token_ids=tokens, finish_reason="length", hidden=hidden, chunks=chunks)

    def _states(self, text: Sequence[int]) -> torch.Tensor:
        """[len(text), W], each of the text up to there."""
        seeds = accumulate(text, lambda seed, token: (seed * 6007 + token + 1) % 2**61, initial=0)
        generators = [torch.Generator().manual_seed(seed) for seed in islice(seeds, 1, None)]
        return torch.stack([torch.randn(self._width, generator=each) for each in generators]).bfloat16()

    def _pass_through_spool(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        path = spool_path(self._spool, name)
        parts = {
            "hidden": TensorParts(hidden.dtype, tuple(hidden.shape), [hidden]),
            "token_ids": TensorParts(torch.int32, (0,), []),
        }
        write_tensors(path, parts, survives_power_cut=False)
        read, _ = read_spooled(self._spool, name)
        path.unlink()
        return read.clone()


@contextmanager
def one_engine(
    recipe: Recipe, folder: Path, spool: Path, most: int, drafting: Any = None
) -> Iterator[list[ShardMaker]]:
    yield [ShardMaker(recipe, folder, spool / "0", lambda *_: None, drafting)]


def do_all(makers: Sequence[ShardMaker], jobs: Sequence[Job]) -> Iterator[Any]:
    """Two shards at a time, as an engine of its own; any other job once none is open."""
    maker, left = makers[0], deque(jobs)
    while left or maker.num_open:
        if left and isinstance(left[0], Work) and maker.num_open < 2 and maker.wants_more:
            work = left.popleft()
            maker.begin(work.number, work.prompts)
        elif left and not maker.num_open:
            yield engines._do(left.popleft(), maker)
        yield from map(maker.write, maker.step())


class DataPhaseHere:
    """As `train.rounds.DataPhase`, without the child."""

    def __init__(self, recipe: Recipe, _arguments: Sequence[str]) -> None:
        self._plan: Any = None
        self._recipe = recipe

    def __enter__(self) -> "DataPhaseHere":
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._plan is not None:
            self._fleet.__exit__(*failure)

    def begin(self, number: int, checkpoint: Path | None) -> None:
        self.make(number, checkpoint)

    def make(self, number: int, checkpoint: Path | None) -> RoundManifest:
        if self._plan is None:
            self._plan = make_plan(self._recipe)
            self._fleet = host.Fleet(self._plan)
        host.take_round(
            self._plan, self._fleet, host.Order(round=number, checkpoint=checkpoint and str(checkpoint))
        )
        report = read_round(self._recipe.output_dir, number)
        assert report is not None
        return report


def write_report(script: str, _arguments: Sequence[str], recipe: Recipe) -> None:
    """What the checkpoint's card needs of it."""
    chain = {"acceptance_length": 1.5, "standard_error": 0.25, "committed_tokens": 96}
    settings = {"suite": recipe.eval.suite, "n_prompts": 2, "temperature": 0.0, "max_tokens": 48}
    report = {
        "schema_version": 1,
        "engine": {"vllm": "stub", "device": "cpu", "precision": "float32"},
        "settings": settings | {"budget": None},
        "chain": chain,
        "tree": None,
        "other_temperatures": [],
        "provenance": {"argv": [script]},
    }
    write_json(recipe.output_dir / "report.json", report)


def put_stubs_in_place() -> None:
    shard_maker.CapturingEngine = StubEngine  # type: ignore[misc, assignment]
    host.running_engines = one_engine  # type: ignore[assignment]
    host.share_out = filling.share_out = do_all  # type: ignore[assignment]
    host.tell_all = lambda makers, job: list(do_all(makers, [job]))  # type: ignore[assignment, return-value]
    distill.DataPhase = DataPhaseHere  # type: ignore[misc, assignment]
    distill.run_child = write_report


# A life and its end


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk(filler: str) -> None:
    """To the last byte."""
    with Path(filler).open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


class Changes:
    """Counts what the main thread changes in a folder, as Python's audit events tell before it happens.

    The libraries that write weights open those files by themselves, and are not seen.
    """

    def __init__(self, folder: Path, path: str | None, number: int, act: Callable[[], None]) -> None:
        """Acts before the change `number` of `path`, or of anything."""
        self.count = 0
        self._folder, self._path = str(folder), path and str(folder / path)
        self._number, self._act = number, act
        self._thread = threading.get_ident()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        paths = [path for path in _changed_paths(event, args) if path.startswith(self._folder)]
        if not paths or threading.get_ident() != self._thread:
            return
        if self._path is None or self._path in paths:
            self.count += 1
            if self.count == self._number:
                self._act()


def _changed_paths(event: str, args: tuple[Any, ...]) -> list[str]:
    if event == "open":
        path, _, flags = args
        return [path] if isinstance(path, str) and flags & (os.O_WRONLY | os.O_RDWR) else []
    if event in ("os.mkdir", "os.remove", "os.rmdir"):
        return [_absolute(args[0], args[-1])]
    if event == "os.symlink":
        return [_absolute(args[1], args[-1])]
    if event == "os.rename":
        return [_absolute(args[0], args[2]), _absolute(args[1], args[3])]
    return []


def _absolute(path: Any, folder_descriptor: int) -> str:
    """shutil.rmtree names files by their folder's descriptor."""
    folder = Path() if folder_descriptor == -1 else Path(f"/proc/self/fd/{folder_descriptor}").readlink()
    return str(folder / os.fsdecode(path))


def live(order: SimpleNamespace) -> None:
    """One run of the command, in this process, whose output goes to the log; the last line counts changes."""
    with Path(order.log).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if order.takes_turns:
        host.is_cuda = lambda: True
        Ranks.is_on_gpu = True  # type: ignore[assignment, method-assign]
    sys.argv = ["train/distill.py", str(SMALL_RECIPE), *order.overrides]
    folder = load_recipe(SMALL_RECIPE, order.overrides).output_dir
    act = partial(fill_disk, order.filler) if order.filler else die
    changes = Changes(folder, order.changed, order.number, act)
    run_command(distill.main)
    print(f"{changes.count} changes", flush=True)


def fork(action: Callable[[], None]) -> int:
    """The exit code of `action` in a process of its own."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        action()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    put_stubs_in_place()
    for line in sys.stdin:
        print(fork(partial(live, SimpleNamespace(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
