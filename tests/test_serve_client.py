"""The client against a scripted server: order, concurrency, what is sent, and how an answer can go wrong."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from recipes.errors import MachineError, UserError
from serve.client import SamplingRequest, SpecCounters, complete_all, parse_counters, read_counters
from serve.ports import find_free_port

GREEDY = SamplingRequest(temperature=0.0, max_tokens=8)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def event(**changes: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": ""}} | changes]}


class ScriptedServer(ThreadingHTTPServer):
    """Answers each chat with `script(body)`: a status, or the events of a stream; a float is a pause in s."""

    daemon_threads = True

    def __init__(self, script: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.busy += 1
            self.server.most_busy = max(self.server.most_busy, self.server.busy)
        self._answer(self.server.script(body))

    def _answer(self, script: Any) -> None:
        status = script if isinstance(script, int) else 200
        self.send_response(status)
        self.end_headers()
        if status != 200:
            self.wfile.write(b'{"error": {"message": "prompt too long"}}')
        for item in [] if isinstance(script, int) else script:
            if isinstance(item, float):
                time.sleep(item)
            else:
                self.wfile.write(f"data: {item if isinstance(item, str) else json.dumps(item)}\n\n".encode())
        with self.server.lock:
            self.server.busy -= 1

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def scripted(script: Any) -> Iterator[ScriptedServer]:
    with ScriptedServer(script) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def whole_answer(*token_ids: list[int], text: str = "", pause: float = 0.0) -> list[Any]:
    """The events of an answer, one chunk per list of ids."""
    chunks = [
        event(token_ids=ids, delta={"content": text if i == 0 else ""}) for i, ids in enumerate(token_ids)
    ]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    first = event(delta={"role": "assistant", "content": ""}) | {"prompt_token_ids": [1, 2]}
    usage = {"choices": [], "usage": {"completion_tokens": sum(map(len, token_ids))}}
    return [pause, first, *chunks, usage, "[DONE]"]


def content_of(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


def test_completions_come_in_the_order_of_the_chats():
    def script(body: dict[str, Any]) -> list[Any]:
        index = int(content_of(body))
        return whole_answer([index], pause=0.3 - 0.05 * index)  # the first ends last

    ended: list[int] = []
    with scripted(script) as server:
        done = complete_all(
            server.url,
            [chat(str(i)) for i in range(6)],
            GREEDY,
            6,
            on_done=lambda c: ended.append(c.token_ids[0]),
        )
    assert [completion.token_ids for completion in done] == [(i,) for i in range(6)]
    assert sorted(ended) == list(range(6))
    assert ended != list(range(6))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_run_than_allowed(concurrency):
    with scripted(lambda body: whole_answer([5], pause=0.05)) as server:
        complete_all(server.url, [chat("x")] * 7, GREEDY, concurrency)
    assert server.most_busy == concurrency


def test_a_chunk_is_counted_by_its_tokens_and_the_role_and_usage_events_are_none():
    with scripted(lambda body: whole_answer([9], [8, 7, 6], [5, 4], text="hi")) as server:
        (completion,) = complete_all(server.url, [chat("x")], GREEDY, 1)
    assert completion.chunks == (1, 3, 2)
    assert completion.token_ids == (9, 8, 7, 6, 5, 4)
    assert completion.prompt_token_ids == (1, 2)
    assert (completion.text, completion.finish_reason, completion.top_logprobs) == ("hi", "stop", None)


def test_top_logprobs_are_keyed_by_token_id():
    tops = [[("token_id:7", -0.5), ("token_id:70", -1.5)], [("token_id:8", -0.25), ("token_id:80", -2.0)]]
    content = [{"top_logprobs": [{"token": t, "logprob": p} for t, p in position]} for position in tops]
    answer = whole_answer([7, 8])
    answer[2]["choices"][0]["logprobs"] = {"content": content}
    sampling = SamplingRequest(temperature=0.0, max_tokens=8, logprobs=2)
    with scripted(lambda body: answer) as server:
        (completion,) = complete_all(server.url, [chat("x")], sampling, 1)
    assert completion.top_logprobs == ({7: -0.5, 70: -1.5}, {8: -0.25, 80: -2.0})
    assert (server.bodies[0]["logprobs"], server.bodies[0]["top_logprobs"]) == (True, 2)


def test_every_setting_that_changes_the_text_is_sent():
    sampling = SamplingRequest(temperature=0.7, max_tokens=8, top_p=0.9, top_k=20, seed=40)
    with scripted(lambda body: whole_answer([1])) as server:
        complete_all(server.url, [chat("a"), chat("b")], sampling, 1)
    sent = server.bodies[0]
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0}
    assert expected.items() <= sent.items()
    assert {"presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 8}.items() <= sent.items()
    assert [body["seed"] for body in server.bodies] == [40, 41]


@pytest.mark.parametrize(
    ("thinking", "sent"),
    [("template", None), ("on", {"enable_thinking": True}), ("off", {"enable_thinking": False})],
)
def test_a_template_is_told_of_thinking_only_where_somebody_says_so(thinking, sent):
    sampling = SamplingRequest(temperature=0.0, max_tokens=8, thinking=thinking)
    with scripted(lambda body: whole_answer([1])) as server:
        complete_all(server.url, [chat("a")], sampling, 1)
    assert server.bodies[0].get("chat_template_kwargs") == sent


def test_a_chunk_arrives_when_it_comes_and_not_when_the_answer_ends():
    """Each is preceded by a pause, and so is the end."""
    *events, usage, end = whole_answer([9], [8, 7], [6])
    paused = [item for each in events for item in (0.05, each)]
    with scripted(lambda body: [*paused, 0.3, usage, end]) as server:
        (completion,) = complete_all(server.url, [chat("x")], GREEDY, 1)
    first, second, third = completion.arrivals
    assert first >= 0.1  # the role's event comes before it
    assert second - first >= 0.04
    assert third - second >= 0.04
    assert completion.seconds - third >= 0.25


@pytest.mark.parametrize(("status", "error"), [(400, UserError), (404, UserError), (500, MachineError)])
def test_a_refusal_is_the_users_or_the_machines(status, error):
    with scripted(lambda body: status) as server, pytest.raises(error, match=f"answered {status}.*too long"):
        complete_all(server.url, [chat("x")], GREEDY, 1)


@pytest.mark.parametrize(
    "answer",
    [
        whole_answer([1], [2])[:-3],  # no last chunk
        [*whole_answer([1], [2])[:2], *whole_answer([1], [2])[3:]],  # a chunk lost on the way
        whole_answer([1])[:-2],  # no usage
        [{"error": {"message": "engine died"}}],
    ],
)
def test_an_answer_that_breaks_off_is_never_taken_for_whole(answer):
    with scripted(lambda body: answer) as server, pytest.raises(MachineError):
        complete_all(server.url, [chat("x")], GREEDY, 1)


def test_a_url_where_nothing_answers_is_a_mistake():
    with pytest.raises(UserError, match="no server answers"):
        complete_all(f"http://127.0.0.1:{find_free_port()}", [chat("x")], GREEDY, 1)


def test_counters_of_a_dead_server_are_a_fault():
    with pytest.raises(MachineError, match="/metrics"):
        read_counters(f"http://127.0.0.1:{find_free_port()}")


def metrics_page(engines: int, positions: int) -> str:
    lines = []
    for engine in range(engines):
        labels = f'engine="{engine}",model_name="m"'
        for name, value in (("drafts", 10), ("draft_tokens", 70), ("accepted_tokens", 25)):
            lines += [f"# TYPE vllm:spec_decode_num_{name} counter"] if engine == 0 else []
            lines += [f"vllm:spec_decode_num_{name}_total{{{labels}}} {value}.0"]
            lines += [f"vllm:spec_decode_num_{name}_created{{{labels}}} 1.7e9"]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{k}"}} {100 - k}.0'
            for k in range(positions)
        ]
    return "\n".join(lines) + "\n"


def test_counters_are_summed_over_engines_and_ordered_by_depth():
    counters = parse_counters(metrics_page(engines=2, positions=12))
    assert (counters.drafts, counters.draft_tokens, counters.accepted_tokens) == (20, 140, 50)
    assert counters.accepted_per_position == tuple(2 * (100 - k) for k in range(12))


def test_counters_of_a_plain_engine_are_zero():
    assert parse_counters("# nothing drafts here\n") == SpecCounters()


def test_counters_are_subtracted_term_by_term():
    after, before = SpecCounters(9, 63, 12, (7, 5)), SpecCounters(4, 28, 2, (1, 1))
    assert after - before == SpecCounters(5, 35, 10, (6, 4))
