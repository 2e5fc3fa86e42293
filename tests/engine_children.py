"""Engines in processes of their own that do what they are asked: in turn, a slow minute is everyone's."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ANSWER = "answer: "


class Child:
    """Answers each order, a line of its input, with a line of JSON; the first says that it is ready."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._log = log.open("w+")
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def hear(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        self._log.seek(0)
        raise SystemExit(f"{self.name}:\n{self._log.read()[-4000:]}")

    def ask(self, order: str) -> Any:
        assert self._process.stdin is not None
        print(order, file=self._process.stdin, flush=True)
        return self.hear()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def running(children: Sequence[Child]) -> Iterator[None]:
    """From all being ready on; then they end."""
    with ExitStack() as stack:
        for child in children:
            stack.callback(child.end)
        for child in children:
            child.hear()
        yield


def serve_orders(make_bench: Callable[[], Any]) -> None:
    """In the child.  An order is the name of a method of the bench, then its arguments as JSON."""
    bench = make_bench()
    print(ANSWER + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = line.strip().split(" ")
        print(ANSWER + json.dumps(getattr(bench, name)(*map(json.loads, arguments))), flush=True)
