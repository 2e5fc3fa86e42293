"""The loop's rounds: which steps each takes, and the child process that keeps the engines between them.

A round's data phase measures the drafter made so far in the engine, and answers the round's prompts with it.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.rounds import read_round
from recipes.errors import MISTAKE, MachineError, UserError
from recipes.manifest import RoundManifest
from recipes.schema import Recipe, Rounds
from serve.engine import child_environment

REPOSITORY = Path(__file__).resolve().parent.parent
_POLL_S, _PATIENCE_S, _STARTS = 0.2, 15.0, 2


@dataclass(frozen=True)
class Round:
    number: int
    steps: range
    """Optimizer steps, 0-based."""

    def __str__(self) -> str:
        return f"round {self.number + 1}"


def plan_rounds(recipe: Recipe) -> list[Round]:
    """Steps are shared out evenly."""
    count, steps = recipe.rounds.count, recipe.train.steps
    ends = [steps * (number + 1) // count for number in range(count)]
    starts = [0, *ends[:-1]]
    return [Round(number, range(*each)) for number, each in enumerate(zip(starts, ends, strict=True))]


class DataPhase:
    """The main rank's handle on data/host.py, which is started when a round first needs it."""

    def __init__(self, recipe: Recipe, arguments: Sequence[str]) -> None:
        """arguments: the recipe's path and overrides, as the command line has them."""
        self._recipe = recipe
        self._command = [sys.executable, str(REPOSITORY / "data" / "host.py"), *arguments]
        self._child: subprocess.Popen[str] | None = None
        self._ordered: int | None = None
        """The round that this child makes, or made last."""

    def __enter__(self) -> "DataPhase":
        return self

    def __exit__(self, *_: Any) -> None:
        """Its engines end with its input."""
        if self._child is None:
            return
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # an order that a dead child never read
            self._child.stdin.close()
        try:
            self._child.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def begin(self, number: int, checkpoint: Path | None) -> None:
        """Orders a round's shards, for which `make` waits."""
        if read_round(self._recipe.output_dir, number) is None:
            self._order(number, checkpoint)

    def make(self, number: int, checkpoint: Path | None) -> RoundManifest:
        """Waits for a round's shards.  A child that dies is started once more, and goes on where it was."""
        for _ in range(_STARTS):
            done = read_round(self._recipe.output_dir, number)
            if done is not None:
                return done
            self._order(number, checkpoint)
            code = self._wait(number)
            if code == MISTAKE:
                raise UserError("data/host.py refused, as it says above")
        done = read_round(self._recipe.output_dir, number)
        if done is None:
            raise MachineError(
                f"data/host.py ended {_STARTS} times, the last with code {code}, as it says above"
            )
        return done

    def _order(self, number: int, checkpoint: Path | None) -> None:
        """Once of a child."""
        if self._child is None or self._child.poll() is not None:
            self._child, self._ordered = self._start(), None
        if self._ordered == number:
            return
        assert self._child.stdin is not None
        order = {"round": number, "checkpoint": None if checkpoint is None else str(checkpoint)}
        with suppress(BrokenPipeError):  # it may die just now: who waits for it is told
            print(json.dumps(order), file=self._child.stdin, flush=True)
        self._ordered = number

    def _wait(self, number: int) -> int | None:
        """The child's exit code, or None once the round is done."""
        assert self._child is not None
        while read_round(self._recipe.output_dir, number) is None:
            code = self._child.poll()
            if code is not None:
                return code
            time.sleep(_POLL_S)
        return None

    def _start(self) -> subprocess.Popen[str]:
        command = [*self._command, "--parent", str(os.getpid())]
        environment = child_environment() | engine_devices(self._recipe.rounds)
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)


def engine_devices(rounds: Rounds) -> dict[str, str]:
    """What the environment of engines with GPUs of their own says besides."""
    if rounds.engine_gpus is None:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, rounds.engine_gpus))}


def check_devices(rounds: Rounds, trainer_gpus: int) -> None:
    """Raises UserError unless engines that work beside the trainer have GPUs of their own.

    trainer_gpus: how many the trainer takes, the first visible ones; 0 on a CPU.
    """
    if not rounds.ahead or trainer_gpus == 0:
        return
    if rounds.engine_gpus is None:
        raise UserError(
            "rounds.ahead needs rounds.engine_gpus, which the engines have to themselves beside the trainer's"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(each) for each in range(trainer_gpus)] if visible is None else visible.split(",")
    shared = sorted(set(map(str, rounds.engine_gpus)) & set(names[:trainer_gpus]))
    if shared:
        others = ",".join(name for name in names if name not in map(str, rounds.engine_gpus)) or "N"
        raise UserError(
            f"rounds.engine_gpus and the trainer both take GPU {', '.join(shared)}: give the trainer others,"
            f" as with `deepspeed --include localhost:{others}`"
        )
