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
from recipes.schema import Recipe
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

    def make(self, number: int, checkpoint: Path | None) -> RoundManifest:
        """Waits for a round's shards.  A child that dies is started once more, and goes on where it was."""
        for _ in range(_STARTS):
            done = read_round(self._recipe.output_dir, number)
            if done is not None:
                return done
            code = self._order(number, checkpoint)
            if code == MISTAKE:
                raise UserError("data/host.py refused, as it says above")
        done = read_round(self._recipe.output_dir, number)
        if done is None:
            raise MachineError(
                f"data/host.py ended {_STARTS} times, the last with code {code}, as it says above"
            )
        return done

    def _order(self, number: int, checkpoint: Path | None) -> int | None:
        """The child's exit code, or None once the round is done."""
        if self._child is None or self._child.poll() is not None:
            self._child = self._start()
        assert self._child.stdin is not None
        order = {"round": number, "checkpoint": None if checkpoint is None else str(checkpoint)}
        with suppress(BrokenPipeError):  # it may die just now: the code below tells
            print(json.dumps(order), file=self._child.stdin, flush=True)
        while read_round(self._recipe.output_dir, number) is None:
            code = self._child.poll()
            if code is not None:
                return code
            time.sleep(_POLL_S)
        return None

    def _start(self) -> subprocess.Popen[str]:
        command = [*self._command, "--parent", str(os.getpid())]
        return subprocess.Popen(command, env=child_environment(), stdin=subprocess.PIPE, text=True)
