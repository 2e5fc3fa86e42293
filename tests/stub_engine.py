"""An OpenAI-shaped server with vLLM's metric names that streams scripted answers: no model, no vllm.

It speaks as vLLM 0.32 does under `return_token_ids` and `return_tokens_as_token_ids`: a first event with the
role and the prompt's ids, an event per engine step, then the usage.  Request i of a batch (told by its seed)
gets answer i.
"""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROMPT_IDS = [11, 12, 13]


@dataclass(frozen=True)
class Answer:
    """What one request gets: the prefill's token, then what each verification step commits."""

    chunks: Sequence[Sequence[int]]
    num_cut: int = 0
    """Tokens that the last step accepted and the response's end cut off; the counters know them."""
    top_logprobs: Sequence[dict[int, float]] | None = None
    undrafted: frozenset[int] = frozenset()
    """Indices of chunks for which the engine had no draft, as after a preemption."""

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk]


@dataclass
class Stub:
    """The engine's state, shared by the handler's threads."""

    answers: Sequence[Answer]
    num_drafts: int
    """Of a step; 0 decodes plainly and counts nothing."""
    merge: int = 1
    """Steps per streamed event."""
    foreign_steps: int = 0
    """Steps that somebody else's requests take during each of ours."""
    pause_s: float = 0.0
    """Before each event."""
    seed: int = 0
    drafts: int = 0
    per_position: list[int] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.per_position = [0] * self.num_drafts

    def take(self, body: dict[str, Any]) -> Answer:
        answer = self.answers[(body["seed"] - self.seed) % len(self.answers)]
        with self.lock:
            self.requests.append(body)
            self._count(answer)
        return answer

    def _count(self, answer: Answer) -> None:
        if self.num_drafts:
            last = len(answer.chunks) - 1
            for index, chunk in enumerate(answer.chunks[1:], start=1):
                if index not in answer.undrafted:
                    self._count_step(len(chunk) - 1 + (answer.num_cut if index == last else 0))
            for _ in range(self.foreign_steps):
                self._count_step(self.num_drafts)

    def _count_step(self, accepted: int) -> None:
        self.drafts += 1
        for position in range(accepted):
            self.per_position[position] += 1


def metrics_page(stub: Stub) -> str:
    if not stub.num_drafts:
        return "vllm:num_requests_running 0.0\n"
    labels = 'engine="0",model_name="stub"'
    totals = {
        "drafts": stub.drafts,
        "draft_tokens": stub.drafts * stub.num_drafts,
        "accepted_tokens": sum(stub.per_position),
    }
    lines = [f"vllm:spec_decode_num_{name}_total{{{labels}}} {value}.0" for name, value in totals.items()]
    for position, value in enumerate(stub.per_position):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f'{name}{{{labels},position="{position}"}} {value}.0')
    return "\n".join(lines) + "\n"


def merged_chunks(answer: Answer, merge: int) -> Iterator[list[int]]:
    """The prefill's token by itself, then `merge` steps at a time."""
    yield list(answer.chunks[0])
    steps = answer.chunks[1:]
    for start in range(0, len(steps), merge):
        yield [token for chunk in steps[start : start + merge] for token in chunk]


def stream_events(answer: Answer, merge: int, with_logprobs: bool) -> Iterator[dict[str, Any]]:
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "token_ids": None}
    yield {"choices": [first], "prompt_token_ids": PROMPT_IDS}
    position = 0
    for tokens in merged_chunks(answer, merge):
        choice: dict[str, Any] = {"index": 0, "delta": {"content": "x" * len(tokens)}, "token_ids": tokens}
        if with_logprobs:
            span = range(position, position + len(tokens))
            choice["logprobs"] = {"content": [logprobs_at(answer, i) for i in span]}
        position += len(tokens)
        choice["finish_reason"] = "stop" if position == len(answer.token_ids) else None
        yield {"choices": [choice]}
    yield {"choices": [], "usage": {"completion_tokens": position}}


def logprobs_at(answer: Answer, position: int) -> dict[str, Any]:
    token = answer.token_ids[position]
    tops = {token: 0.0} if answer.top_logprobs is None else answer.top_logprobs[position]
    listed = [{"token": f"token_id:{top}", "logprob": logprob} for top, logprob in tops.items()]
    return {"token": f"token_id:{token}", "logprob": tops[token], "top_logprobs": listed}


class Handler(BaseHTTPRequestHandler):
    stub: Stub

    def do_GET(self) -> None:
        pages = {
            "/health": "",
            "/version": json.dumps({"version": "0.32.0"}),
            "/v1/models": json.dumps({"data": [{"id": "stub-target"}]}),
            "/metrics": metrics_page(self.stub),
        }
        self._start(200 if self.path in pages else 404)
        self.wfile.write(pages.get(self.path, "").encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.stub.take(body)
        self._start(200)
        for event in stream_events(answer, self.stub.merge, bool(body["logprobs"])):
            time.sleep(self.stub.pause_s)
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def _start(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream" if self.command == "POST" else "text/plain")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@contextmanager
def serve_stub(stub: Stub) -> Iterator[str]:
    """Yields the URL."""
    handler = type("StubHandler", (Handler,), {"stub": stub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def tokens_in_chunks(sizes: Sequence[int], start: int = 100) -> list[list[int]]:
    """Chunks of these sizes filled with ascending ids."""
    chunks, token = [], start
    for size in sizes:
        chunks.append(list(range(token, token + size)))
        token += size
    return chunks
