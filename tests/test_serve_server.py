"""The server as a child process, played by small scripts: its start, its failures, and what survives it."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from drafters import tiny_recipe

from recipes.errors import MachineError, UserError
from serve import server
from serve.server import serving

RECIPE = tiny_recipe()
HEALTHY = """
    import signal, subprocess, sys, threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(" ".join(sys.argv[1:]).encode())

        def log_message(self, *args):
            pass

    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    subprocess.Popen([sys.executable, "-c", stubborn])
    port = int(sys.argv[sys.argv.index("--port") + 1])
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
ENGINE_FAILS = """
    import sys
    print("(EngineCore pid=7) ERROR 01-01 [core.py:1] Traceback (most recent call last):")
    print("(EngineCore pid=7) ERROR 01-01 [core.py:1] ValueError: too little memory")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    print("\\n".join(f"line {i}" for i in range(100)))
    sys.exit(1)
"""
FINDS_MISTAKE = """
    import sys
    print("something before")
    print("error: this is wrong\\n  and so is that", file=sys.stderr)
    sys.exit(2)
"""


@pytest.fixture
def play(monkeypatch, tmp_path):
    def put_in_place(script: str) -> None:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        monkeypatch.setattr(server, "_RUN_SCRIPT", path)
        monkeypatch.setattr(server, "_LINGER_LIMIT_S", 0.3)

    return put_in_place


def serve_in(folder: Path, ckpt: Path | None = None, budget: int | None = None):
    return serving(RECIPE.target, RECIPE.serve, ckpt, budget, folder / "logs" / "server.log")


@pytest.fixture
def family() -> Callable[[], list[psutil.Process]]:
    """The processes that come of this one from now on; others of a test process stay."""
    before = psutil.Process().children(recursive=True)
    return lambda: [each for each in psutil.Process().children(recursive=True) if each not in before]


def test_the_block_runs_while_the_server_does_and_nothing_is_left_after_it(play, tmp_path, family):
    play(HEALTHY)
    with serve_in(tmp_path) as url:
        assert httpx.get(url, trust_env=False).is_success
        processes = family()
        assert len(processes) == 2
    assert not psutil.wait_procs(processes, timeout=5)[1]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_the_server_ends_whatever_ends_the_block(play, tmp_path, family, fault):
    play(HEALTHY)
    with pytest.raises(fault), serve_in(tmp_path):
        processes = family()
        raise fault
    assert not psutil.wait_procs(processes, timeout=5)[1]


@pytest.mark.parametrize(
    ("ckpt", "budget", "said"),
    [
        (None, None, "--budget chain"),
        (Path("c"), None, "--ckpt c --budget chain"),
        (Path("c"), 0, "--ckpt c --budget 0"),
        (Path("c"), 15, "--ckpt c --budget 15"),
    ],
)
def test_the_command_line_says_what_is_served(play, tmp_path, ckpt, budget, said):
    play(HEALTHY)
    with serve_in(tmp_path, ckpt, budget) as url:
        words = httpx.get(url, trust_env=False).text
    settings = tmp_path / "logs" / "server.json"
    assert words.startswith(f"--settings {settings} {said}".rstrip() + " --port ")


def test_a_failed_start_tells_the_engines_reason_and_the_end_of_the_log(play, tmp_path):
    play(ENGINE_FAILS)
    with pytest.raises(MachineError) as failed, serve_in(tmp_path):
        pass
    lines = str(failed.value).splitlines()
    assert lines[:2] == [
        "the server ended with code 1 before it was healthy",
        "ValueError: too little memory",
    ]
    assert lines[-1] == "line 99"
    assert len(lines) < 40


def test_a_mistake_that_the_server_finds_is_the_users(play, tmp_path):
    play(FINDS_MISTAKE)
    with pytest.raises(UserError) as mistake, serve_in(tmp_path):
        pass
    assert str(mistake.value) == "this is wrong\n  and so is that"


def test_a_folder_that_is_no_checkpoint_is_found_by_the_real_script(tmp_path):
    with pytest.raises(UserError, match="is no drafter checkpoint"), serve_in(tmp_path, ckpt=tmp_path):
        pass
