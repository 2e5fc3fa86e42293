"""Runs probes, which start engines, in forks of one process that has imported vLLM, which takes longer.

    run_probe("pairwise_probe", FOLDER)    calls main(FOLDER) of tests/pairwise_probe.py in a fork

The host starts with a test process's first probe and ends with that process.
"""
# ruff: noqa: PLC0415  (vLLM reads the environment when it is imported)

import importlib
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from multiprocessing.connection import Client, Connection
from pathlib import Path
from select import select
from tempfile import NamedTemporaryFile, mkdtemp
from typing import Any, NoReturn

from search_path import environment

from serve.engine import child_environment, is_cuda
from serve.heap import modules_stay
from serve.lifetime import follow_parent


def run_probe(module: str, *arguments: Any) -> None:
    """Raises AssertionError with the end of what the probe said, if it does not return."""
    with NamedTemporaryFile("r", errors="replace") as log, Client(start_host().address) as connection:
        connection.send((module, arguments, log.name))
        try:
            has_returned = connection.recv()
        except EOFError:
            has_returned = False
        assert has_returned, log.read()[-5000:]


class Host:
    def __init__(self) -> None:
        self.address = f"{mkdtemp()}/probes"
        # the worker is looked at from inside
        own = {"PYTHONPATH": environment()["PYTHONPATH"], "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.address],
            env=child_environment() | own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it listens


@cache
def start_host() -> Host:
    """This process's; threads find it started, or each would start one."""
    return Host()


def _serve(address: str) -> None:
    """Until standard input ends."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    print("listening", flush=True)
    _import_vllm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while listening in select([listening, sys.stdin], [], [])[0]:
        with Connection(listening.accept()[0].detach()) as connection:
            host = os.getpid()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                follow_parent(host)
                _run(connection)


def _import_vllm() -> None:
    with modules_stay():
        import vllm

        vllm.LLM  # noqa: B018 - its modules are imported only now
        if not is_cuda():
            import vllm.v1.worker.cpu_worker


def _run(connection: Connection) -> NoReturn:
    """A probe's forks come back here too, where they fail."""
    code = 1
    try:
        module, arguments, log = connection.recv()
        with Path(log).open("w") as said:
            os.dup2(said.fileno(), sys.stdout.fileno())
            os.dup2(said.fileno(), sys.stderr.fileno())
        importlib.import_module(module).main(*arguments)
        connection.send(True)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
