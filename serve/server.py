"""The evaluation server as a child process: started, waited for, and stopped with everything it started.

The child is `serve/run.py` in a process group of its own.  It ends with the `with` block, with this process
(however that dies), and its log holds everything that it and the engine said.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import httpx

from recipes.errors import MISTAKE, MachineError, UserError
from recipes.manifest import write_json
from recipes.schema import Serve, Target
from serve.baselines import Baseline
from serve.engine import CHAIN, child_environment
from serve.plan import Settings
from serve.ports import find_free_port

_RUN_SCRIPT = Path(__file__).with_name("run.py")
_START_LIMIT_S = 1800.0  # a large target on a cold machine: weights, kernels, CUDA graphs
_STOP_LIMIT_S = 20.0
_LINGER_LIMIT_S = 3.0
_POLL_S = 0.2
_TAIL_LINES = 30
_CAUSE = re.compile(r"^(?:\(\w+ pid=\d+\) ERROR .*\] )?(\w*(?:Error|Exception): .*)")

Child = subprocess.Popen[bytes]


@contextmanager
def serving(
    target: Target,
    serve: Serve,
    ckpt: Path | None,
    budget: int | None,
    log_path: Path,
    baseline: Baseline | None = None,
) -> Iterator[str]:
    """Yields the server's URL once it is healthy.

    `budget` None drafts the chain with `ckpt`, 0 decodes plainly or as `baseline` does, more are the nodes of
    a tree.  Raises MachineError with the log's tail if the server dies before it is healthy, and UserError
    when it found a mistake.
    """
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    settings = Settings(target=target, serve=serve, baseline=baseline)
    child = _start(settings, _options(ckpt, budget, port), log_path)
    patience_s = 0.0  # a starting vLLM swallows SIGTERM
    try:
        _wait_until_healthy(child, url, log_path)
        patience_s = _STOP_LIMIT_S
        yield url
    finally:
        _stop(child, patience_s)


def _options(ckpt: Path | None, budget: int | None, port: int) -> list[str]:
    drafter = [] if ckpt is None else ["--ckpt", str(ckpt)]
    width = ["--budget", CHAIN if budget is None else str(budget)]
    return [*drafter, *width, "--port", str(port), "--parent", str(os.getpid())]


def _start(settings: Settings, options: list[str], log_path: Path) -> Child:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    settings_path = log_path.with_suffix(".json")
    write_json(settings_path, settings)
    command = [sys.executable, str(_RUN_SCRIPT), "--settings", str(settings_path), *options]
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_until_healthy(child: Child, url: str, log_path: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while not _is_healthy(url):
        if child.poll() is not None:
            raise _describe_end(child.returncode, log_path)
        if time.monotonic() > deadline:
            raise MachineError(f"the server is not healthy after {_START_LIMIT_S:.0f} s; see {log_path}")
        time.sleep(_POLL_S)


def _is_healthy(url: str) -> bool:
    # no proxy of the environment may stand between two processes of this machine
    with httpx.Client(trust_env=False) as client, suppress(httpx.TransportError):
        return client.get(f"{url}/health").is_success
    return False


def _describe_end(code: int, log_path: Path) -> Exception:
    lines = log_path.read_text(errors="replace").splitlines()
    if code == MISTAKE:
        return UserError("\n".join(lines).rpartition("error: ")[2].strip())
    told = [*_first_cause(lines), f"{log_path} ends with", *lines[-_TAIL_LINES:]]
    return MachineError("\n".join([f"the server ended with code {code} before it was healthy", *told]))


def _first_cause(lines: list[str]) -> list[str]:
    """The first exception that the log names: the engine's, long before the server gives up on it."""
    causes = (match[1] for match in map(_CAUSE.match, lines) if match)
    return list(islice(causes, 1))


def _stop(child: Child, patience_s: float) -> None:
    """SIGTERM, then SIGKILL for the server, whose engine follows it; SIGKILL for whatever still lingers.

    The group is left a moment of its own: Python's resource tracker in it frees the engine's shared memory.
    """
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(patience_s)
    child.kill()
    child.wait()
    deadline = time.monotonic() + _LINGER_LIMIT_S
    while _signal_group(child, 0) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    _signal_group(child, signal.SIGKILL)


def _signal_group(child: Child, number: int) -> bool:
    """Whether there was still a process in the server's group."""
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return False
    return True
