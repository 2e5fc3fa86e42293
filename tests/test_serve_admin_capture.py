"""/admin/capture: what a server serves, as tap states and token ids of each request, for the key's holder.

python test_serve_admin_capture.py TEXTS OUT     an engine of its own reads texts; both pickled
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from drafters import EMBEDDED_TARGET, REPOSITORY
from starlette.applications import Starlette
from test_serve_admin import HOLDER, KEY, ask, wait_until_healthy

from recipes.schema import Serve, Target
from serve.admin import KEY_VARIABLE, AdminRoutes
from serve.capture import TrafficSink
from serve.plan import Settings
from serve.ports import find_free_port
from serve.spool import read_prompt_length, read_spooled, spool_path

REFERENCE = EMBEDDED_TARGET.parent / "drafter"
TAPS = (1, 3, 5, 6)
TARGET = Target(model=str(EMBEDDED_TARGET), dtype="float32")
SERVE = Serve(
    max_model_len=512, max_num_seqs=4, max_num_batched_tokens=512, enforce_eager=True, kv_cache_gib=0.25
)
LEAST_COSINE = 0.9999
NOTHING = {"folder": None, "sequences": 0, "tokens": 0}


# The route


class Engine:
    """Two workers: the first captures, as the seam has it do."""

    def __init__(self) -> None:
        self.sink: TrafficSink | None = None

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(self, method)(*args), None]

    def start_capture(self, folder: str, is_traffic: bool) -> None:
        assert is_traffic
        self.sink = TrafficSink(Path(folder))

    def stop_capture(self) -> dict[str, Any] | None:
        if self.sink:
            self.sink.close()
        return self.capture_status()

    def capture_status(self) -> dict[str, Any] | None:
        return self.sink and self.sink.status()


@pytest.fixture
def client(monkeypatch) -> httpx.AsyncClient:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    app = Starlette()
    app.add_middleware(AdminRoutes)
    app.state.engine_client = Engine()
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def capture_into(client: httpx.AsyncClient, folder: object) -> httpx.Response:
    return ask(client, "POST", "/admin/capture", headers=HOLDER, json={"folder": folder})


def status(client: httpx.AsyncClient) -> dict[str, Any]:
    return ask(client, "GET", "/admin/capture", headers=HOLDER).json()


def test_without_the_key_nothing_is_captured(client, tmp_path):
    assert ask(client, "POST", "/admin/capture", json={"folder": str(tmp_path / "a")}).status_code == 401
    assert not (tmp_path / "a").exists()
    assert status(client) == NOTHING


def test_capture_begins_and_stops_and_begins_elsewhere(client, tmp_path):
    for name in "ab":
        folder = str(tmp_path / "deep" / name)
        begun = {"folder": folder, "sequences": 0, "tokens": 0}
        assert capture_into(client, folder).json() == begun == status(client)
        assert capture_into(client, None).json() == NOTHING == status(client)


def test_stopping_what_never_began_is_harmless(client):
    assert capture_into(client, None).json() == NOTHING


def test_a_folder_may_be_relative_to_where_the_server_runs(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert capture_into(client, "there").json()["folder"] == str(tmp_path / "there")


def test_a_folder_with_files_is_refused(client, tmp_path):
    (tmp_path / "mine").touch()
    refused = capture_into(client, str(tmp_path))
    assert refused.status_code == 409
    assert "nothing is overwritten" in refused.json()["error"]
    assert status(client) == NOTHING


def test_a_folder_that_cannot_be_made_is_refused(client, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none"):
        refused = capture_into(client, str(folder))
        assert refused.status_code == 409
        assert str(folder) in refused.json()["error"]


def test_a_second_capture_is_refused_while_one_goes_on(client, tmp_path):
    capture_into(client, str(tmp_path / "a"))
    refused = capture_into(client, str(tmp_path / "b"))
    assert refused.status_code == 409
    assert "stop that first" in refused.json()["error"]
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"path": "a"}', b'{"folder": 3}', b'{"folder": "a\\u0000"}']
)
def test_a_malformed_body_is_told(client, body):
    answer = ask(client, "POST", "/admin/capture", headers=HOLDER, content=body)
    assert answer.status_code == 400
    assert "folder" in answer.json()["error"]


# A server


@dataclass(frozen=True)
class Served:
    """What a client was told of one request."""

    id: str
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Traffic:
    """What a server was asked before, while and after it captured, and what that left."""

    before: Served
    during: list[Served]
    cut: str
    """The id of a request that still ran when the capture stopped."""
    after: Served
    begun: dict[str, Any]
    stopped: dict[str, Any]
    folder: Path
    names: list[str]
    """Of the files when capture stopped."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """An engine that waits for texts, and where it will write their states; it starts beside the server."""
    out = tmp_path_factory.mktemp("read") / "states"
    process = subprocess.Popen(
        [sys.executable, __file__, str(out)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    yield process, out
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """A server that drafts trees, in float32: whatever computes a state, it is the same."""
    folder, port = tmp_path_factory.mktemp("server"), find_free_port()
    (folder / "settings").write_text(Settings(target=TARGET, serve=SERVE).model_dump_json())
    options = ["--ckpt", REFERENCE, "--admin", "--port", port, "--settings", folder / "settings"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "serve/run.py", *map(str, options)],
            cwd=REPOSITORY,
            env=os.environ | {KEY_VARIABLE: KEY},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, server, folder / "log")
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


def chat(url: str, what: str, max_tokens: int, name: str) -> Served:
    body = {
        "messages": [{"role": "user", "content": f"Write a function to {what}."}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "request_id": name,
    }
    told = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False).json()
    return Served(told["id"], told["prompt_token_ids"], told["choices"][0]["token_ids"])


def capture(url: str, folder: Path | None) -> dict[str, Any]:
    body = {"folder": folder and str(folder)}
    told = httpx.post(f"{url}/admin/capture", headers=HOLDER, json=body, timeout=60, trust_env=False)
    assert told.is_success, told.text
    return told.json()


def is_running(url: str) -> bool:
    page = httpx.get(f"{url}/metrics", trust_env=False).text
    (line,) = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running{")]
    return float(line.rpartition(" ")[2]) > 0


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def traffic(reader, url, tmp_path_factory) -> Traffic:
    folder = tmp_path_factory.mktemp("captured") / "states"
    with ThreadPoolExecutor() as pool:
        before = pool.submit(chat, url, "read a file", 250, "before")
        wait_until(lambda: is_running(url))
        begun = capture(url, folder)
        assert not before.done()
        asked = [("sort a list", 40, "a/../b"), ("join two strings", 33, "c")]
        during = list(pool.map(lambda given: chat(url, *given), asked))
        before.result()
        cut = pool.submit(chat, url, "sum numbers", 300, "cut")
        wait_until(lambda: is_running(url))
        stopped = capture(url, None)
        assert not cut.done()
        names = sorted(path.name for path in folder.iterdir())
        after = chat(url, "open a socket", 20, "after")
        cut_id = cut.result().id
    return Traffic(before.result(), during, cut_id, after, begun, stopped, folder, names)


@pytest.fixture(scope="module")
def read(reader, traffic) -> list[torch.Tensor]:
    """The tap states of what was served meanwhile, as another engine reads them."""
    process, out = reader
    texts = [served.prompt + served.answer for served in traffic.during]
    said = process.communicate(pickle.dumps(texts), timeout=120)[1]
    assert process.returncode == 0, said.decode()[-5000:]
    return pickle.loads(out.read_bytes())


in_float32 = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32, which FlashAttention does not know")


@in_float32
def test_the_tokens_and_the_prompts_length_are_those_that_were_served(traffic):
    for served in traffic.during:
        text, path = served.prompt + served.answer, spool_path(traffic.folder, served.id)
        _, token_ids = read_spooled(traffic.folder, served.id)
        assert len(token_ids) >= len(text) - 1
        assert token_ids.tolist()[: len(text)] == text[: len(token_ids)]
        assert read_prompt_length(path) == len(served.prompt)


@in_float32
def test_the_states_are_those_of_a_prefill(traffic, read):
    for served, expected in zip(traffic.during, read, strict=True):
        hidden, _ = read_spooled(traffic.folder, served.id)
        found = hidden[: len(expected)].unflatten(1, (len(TAPS), -1))
        cosine = torch.cosine_similarity(found, expected.unflatten(1, (len(TAPS), -1)), dim=-1)
        assert len(expected) == len(served.prompt) + len(served.answer) - 1
        assert cosine.min() > LEAST_COSINE, float(cosine.min())


@in_float32
def test_only_what_began_while_it_captured_is_there_and_nothing_comes_later(traffic):
    ids = [*(served.id for served in traffic.during), traffic.cut]
    expected = sorted(spool_path(traffic.folder, name).name for name in ids)
    assert traffic.names == expected == sorted(path.name for path in traffic.folder.iterdir())
    assert traffic.before.id not in ids
    assert traffic.after.id not in ids


@in_float32
def test_a_request_that_still_runs_is_written_as_far_as_it_is(traffic):
    hidden, token_ids = read_spooled(traffic.folder, traffic.cut)
    assert 0 < len(hidden) == len(token_ids) < 300


@in_float32
def test_the_server_counts_what_it_wrote(traffic):
    assert traffic.begun == {"folder": str(traffic.folder), "sequences": 0, "tokens": 0}
    lengths = [len(read_spooled(traffic.folder, served.id)[1]) for served in traffic.during]
    lengths.append(len(read_spooled(traffic.folder, traffic.cut)[1]))
    assert traffic.stopped == {"folder": None, "sequences": 3, "tokens": sum(lengths)}


@in_float32
def test_a_folder_that_goes_ends_the_capture_and_the_server_answers_on(url, traffic, tmp_path):
    folder = tmp_path / "going"
    capture(url, folder)
    folder.rmdir()
    assert len(chat(url, "join two strings", 33, "d").answer) == 33
    chat(url, "join two strings", 1, "e")  # the step that ends the first one has been by then
    told = httpx.get(f"{url}/admin/capture", headers=HOLDER, trust_env=False).json()
    assert told["folder"] is None
    assert "No such file or directory" in told["error"]
    assert capture(url, tmp_path / "next") == {"folder": str(tmp_path / "next"), "sequences": 0, "tokens": 0}
    assert chat(url, "join two strings", 33, "c").answer == traffic.during[1].answer
    assert capture(url, None)["sequences"] == 1


def main(out: str) -> None:
    from tempfile import TemporaryDirectory  # noqa: PLC0415

    from serve.engine import child_environment  # noqa: PLC0415
    from serve.generation import CapturingEngine, Drafting  # noqa: PLC0415

    os.environ.update(child_environment())
    with TemporaryDirectory() as spool:
        # vLLM's CPU build computes this target in float32 with our layers alone, which come with trees
        engine = CapturingEngine(TARGET, SERVE, TAPS, Path(spool), Drafting(REFERENCE, 15))
        states = engine.read(pickle.load(sys.stdin.buffer))
    Path(out).write_bytes(pickle.dumps(states))


if __name__ == "__main__":
    main(sys.argv[1])
