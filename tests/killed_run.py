"""A small run of train/distill.py, to be killed: its processes, what they do, and what they have done."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from drafters import REPOSITORY
from loop_lives import SMALL_RECIPE, whole_shards

from recipes.load import load_recipe
from recipes.schema import Recipe
from train.checkpoint import published_steps

SETTINGS: dict[str, Any] = {
    "data.num_prompts": 330,
    "data.max_prompt_tokens": 64,
    "data.sampling.max_tokens": 16,
    "data.shard_tokens": 1300,  # a dozen shards
    "data.check_sequences": 2,
    "drafter.num_hidden_layers": 2,
    "drafter.layer_types": "[sliding_attention, full_attention]",
    "drafter.intermediate_size": 256,
    "train.steps": 90,
    "train.precision": "bfloat16",
    "train.sequences_per_step": 8,
    "train.micro_batch_sequences": 8,
    "train.num_anchors": 8,
    "train.save_every_steps": 5,
    "train.log_every_steps": 5,
    "rounds.count": 3,
    "rounds.budget": 7,
    "rounds.pulse_prompts": 8,
    "serve.kv_cache_gib": 0.1,
    "eval.num_prompts": 2,
    "eval.max_tokens": 12,
    "eval.temperatures": "[0.0]",
    "eval.concurrency": 2,
    "eval.tree_budget": 0,
}
POLL_S, STACKS_LIMIT_S, STACKS_POLL_S = 0.05, 1.0, 0.5
ORPHAN_LIMIT_S = 20.0  # an engine that just begins looks for its parent after its imports, before all else

# The first of these that the main thread of any process is in
PHASES = (
    ("shard write", "data/shards.py:write_shard_file"),
    ("shard write", "data/shards.py:_update"),
    ("pulse", "data/host.py:take_pulses"),
    ("capture", "serve/capture.py:_write"),
    ("regeneration", "data/filling.py:make_shards"),
    ("start of engines", "data/host.py:drafting_with"),
    ("start of the data phase", "train/rounds.py:_wait"),
    ("checkpoint", "train/saving.py:save"),
    ("training", "train/loop.py:_take_steps"),
    ("start of training", "train/loop.py:take"),
    ("measuring", "eval/measure.py:main"),  # the trainer waits in a system call, and tells nothing
)
START = "start"
# Every process is made to tell, when asked by a signal, where it is; faulthandler would do it without
# Python's lock, and crash one in some hundred times
TELLS_STACKS = """\
import os, signal, traceback
def tell(number, frame):
    with open(os.path.join(os.environ["KILLS_STACKS"], str(os.getpid())), "w") as file:
        traceback.print_stack(frame, file=file)
signal.signal(signal.SIGUSR2, tell)
signal.siginterrupt(signal.SIGUSR2, False)
"""


# The command and its processes


class Command:
    """One life of train/distill.py, the leader of a process group, and every process that it started."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self.since = time.monotonic()
        scripts = REPOSITORY / "train"
        begin = [sys.executable, str(scripts / "child.py"), str(os.getpid())]  # or it would outlive this one
        command = [*begin, str(scripts / "distill.py"), str(SMALL_RECIPE), *run.overrides]
        with run.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=run.environment
            )
        self._known = {psutil.Process(self._process.pid)}
        self._was_at_work = False

    @property
    def code(self) -> int | None:
        """Its exit code, once it ended."""
        return self._process.poll()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def look(self) -> None:
        """Gets to know the processes that began since."""
        with suppress(psutil.NoSuchProcess):
            self._known.update(psutil.Process(self._process.pid).children(recursive=True))

    def alive(self) -> list[psutil.Process]:
        return [process for process in self._known if is_alive(process)]

    def kill_all(self) -> None:
        """The server of eval/measure.py leads a group of its own."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_for_end_of(self, processes: Sequence[psutil.Process]) -> "Aftermath":
        since = time.monotonic()
        while left := [each for each in processes if is_alive(each)]:
            if time.monotonic() - since > ORPHAN_LIMIT_S:
                break
            self._process.poll()
            time.sleep(POLL_S)
        return Aftermath([name_of(each) for each in left], time.monotonic() - since)

    def read_stacks(self) -> str:
        """Of the main threads, as their processes tell."""
        asked = [each for each in self.alive() if hears(each, signal.SIGUSR2)]  # others would die of it
        files = [self._run.stacks / str(each.pid) for each in asked]
        for process, file in zip(asked, files, strict=True):
            file.write_text("")
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + STACKS_LIMIT_S
        while not all(told := [file.read_text() for file in files]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return "".join(told)

    def is_at_work(self) -> bool:
        """Whether it did anything yet but start."""
        if not self._was_at_work:
            time.sleep(STACKS_POLL_S)
            self._was_at_work = not tell_phase(self.read_stacks()).startswith(START)
        return self._was_at_work


@dataclass(frozen=True)
class Aftermath:
    """Of a kill or an end."""

    orphans: list[str]
    """Names of processes that were alive when the patience was over."""
    seconds: float
    """Until the last one was gone."""


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def hears(process: psutil.Process, number: int) -> bool:
    with suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.M)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False


def name_of(process: psutil.Process) -> str:
    """What it does for the loop."""
    with suppress(psutil.Error):
        words = " ".join(process.cmdline())
        for sign, name in (
            ("resource_tracker", "resource tracker"),
            ("train/distill.py", "trainer"),
            ("data/host.py", "host"),
            ("eval/measure.py", "measure.py"),
            ("serve/run.py", "server"),
            ("multiprocessing", "engine"),
            ("VLLM::", "server's engine"),
        ):
            if sign in words:
                return name
        return words[:60]
    return "a process that ended"


def tell_phase(stacks: str) -> str:
    root = re.escape(f"{REPOSITORY}/")
    frames = {
        f"{file}:{function}" for file, function in re.findall(rf'"{root}(.+?)", line \d+, in (\w+)', stacks)
    }
    return next((phase for phase, frame in PHASES if frame in frames), START)


# The run


@dataclass(frozen=True)
class Run:
    """A folder, and how the command runs there."""

    folder: Path

    @property
    def output_dir(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def stacks(self) -> Path:
        return self.folder / "stacks"

    @property
    def overrides(self) -> list[str]:
        settings = SETTINGS | {"output_dir": self.output_dir}
        return [f"{name}={value}" for name, value in settings.items()]

    @property
    def recipe(self) -> Recipe:
        return load_recipe(SMALL_RECIPE, self.overrides)

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(self.folder / "site"), os.environ.get("PYTHONPATH", "")]
        own = {"DS_ACCELERATOR": "cpu", "KILLS_STACKS": str(self.stacks), "TMPDIR": str(self.folder / "tmp")}
        return os.environ | own | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    @property
    def step(self) -> int:
        """Of the newest checkpoint."""
        return max(published_steps(self.output_dir / "checkpoints"), default=0)

    def count_marks(self) -> int:
        """What is done and stays done: shards, rounds, saves, servers that were started, the report."""
        out, saves = self.output_dir, self.step // SETTINGS["train.save_every_steps"]
        files = [*out.glob("rounds/round-*.json"), *out.glob("logs/*.json"), *out.glob("report.json")]
        return len(whole_shards(out)) + saves + len(files)


def prepare(folder: Path) -> Run:
    for name in ("site", "stacks", "tmp"):
        (folder / name).mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text(TELLS_STACKS)
    return Run(folder)
