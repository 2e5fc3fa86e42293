"""The evaluation server as clients know it: openai's, curl, `vllm bench serve`, and Prometheus.

One server for all, as `serve/server.py` starts it: the embedded target in bf16, trees of the default size.
Alone, a request is answered the same way each time; in company, near-ties may break another way.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from drafters import EMBEDDED_TARGET, tiny_recipe
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from data.render import load_chat_template
from recipes.schema import Target
from serve.engine import DEFAULT_BUDGET, child_environment, is_cuda
from serve.server import serving

pytestmark = pytest.mark.engine

REFERENCE = EMBEDDED_TARGET.parent / "drafter"
CONTEXT = 512
NEAR_TIE = 0.25  # nats between the first two; bf16 logits of this size are 0.06 to 0.12 apart
PROMPTS = [f"Write a function to {what}." for what in ("sort", "read", "sum", "join", "parse", "copy")]
GREEDY = {"temperature": 0, "max_tokens": 40}
COUNTED = {"stream": True, "stream_options": {"include_usage": True}}

# What `vllm bench serve` calls.  The CPU build's `vllm` (0.32) ends before it gets there: it looks for its
# version under the name of the CUDA build's distribution (vllm/entrypoints/cli/main.py).
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    small = ["max_num_seqs=8", "max_num_batched_tokens=512", f"max_model_len={CONTEXT}", "kv_cache_gib=0.5"]
    recipe = tiny_recipe(*(f"serve.{setting}" for setting in small))
    log = tmp_path_factory.mktemp("server") / "log"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NO_PROXY", "127.0.0.1")
        environment.setenv("no_proxy", "127.0.0.1")  # curl reads this one alone
        with serving(recipe.target, recipe.serve, REFERENCE, DEFAULT_BUDGET, log) as url:
            yield url


@pytest.fixture(scope="module")
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def request_body(model) -> dict[str, Any]:
    return {"model": model, "messages": chat(PROMPTS[0])} | GREEDY


@pytest.fixture(scope="module")
def answer(client, request_body) -> Any:
    """The greedy one to the first prompt."""
    return client.chat.completions.create(**request_body, logprobs=True, top_logprobs=2)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def tokens_of(chunks: list[Any]) -> list[list[str]]:
    """Of each chunk that has any."""
    logprobs = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    return [[each.token for each in found.content] for found in logprobs]


# What the server counts

Counts = dict[str, float]


def read_families(url: str) -> list[Metric]:
    return [*text_string_to_metric_families(httpx.get(f"{url}/metrics").raise_for_status().text)]


def counts_when_idle(url: str, patience_s: float = 30) -> Counts:
    """Sums over labels.  An answer may reach its client before its last step is counted."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        counts: Counts = {}
        for sample in chain(*(family.samples for family in read_families(url))):
            counts[sample.name] = counts.get(sample.name, 0) + sample.value
        if counts["vllm:num_requests_running"] == counts["vllm:num_requests_waiting"] == 0:
            return counts
        time.sleep(0.05)
    raise AssertionError(f"requests still run after {patience_s} s")


def counted(url: str, work: Callable[[], Any]) -> tuple[Any, Counts]:
    """What `work` returns, and what was counted meanwhile."""
    before = counts_when_idle(url)
    done = work()
    return done, {name: value - before.get(name, 0) for name, value in counts_when_idle(url).items()}


# openai's client


@pytest.mark.parametrize("max_tokens", [12, 40])  # cut, and to its own end
def test_a_streamed_chat_is_the_whole_one_in_pieces(client, request_body, max_tokens):
    body = request_body | {"max_tokens": max_tokens, "logprobs": True}
    whole = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(**body, **COUNTED))
    tokens = tokens_of(chunks)
    (expected,) = whole.choices
    assert text_of(chunks) == expected.message.content
    assert [*chain(*tokens)] == [each.token for each in expected.logprobs.content]
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert chunks[-1].usage == whole.usage
    assert sum(map(len, tokens)) == whole.usage.completion_tokens <= max_tokens
    assert max(map(len, tokens)) > 1  # of one step: an accepted path, and the target's own token


def test_no_token_is_likelier_than_the_greedy_one(answer):
    for each in answer.choices[0].logprobs.content:
        likeliest = {top.token: top.logprob for top in each.top_logprobs}
        assert likeliest[each.token] == each.logprob == max(likeliest.values()) <= 0
        assert len(likeliest) == 2


def test_training_reads_a_chat_as_the_server_does(url, model):
    parts = [{"type": "text", "text": "And"}, {"type": "text", "text": "back?"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sort <|im_end|> a list.\n"},
        {"role": "assistant", "content": "sorted(x)", "reasoning_content": "easy"},
        {"role": "user", "content": parts},
    ]
    asked = {"model": model, "messages": messages}
    told = httpx.post(f"{url}/tokenize", json=asked, trust_env=False).json()
    rendered = load_chat_template(Target(model=str(EMBEDDED_TARGET))).render(messages)
    assert told["tokens"] == rendered
    answer = httpx.post(f"{url}/v1/chat/completions", json=asked | GREEDY, trust_env=False).json()
    assert answer["usage"]["prompt_tokens"] == len(rendered)


def test_a_completion_of_the_rendered_chat_is_the_chats_answer(client, model, answer):
    prompt = f"<|im_start|>user\n{PROMPTS[0]}<|im_end|>\n<|im_start|>assistant\n"
    body = {"model": model, "prompt": prompt, "logprobs": 1} | GREEDY
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(**body, **COUNTED))
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    (expected,) = whole.choices
    assert expected.text == answer.choices[0].message.content
    assert "".join(piece.text for piece in pieces) == expected.text
    assert whole.usage == chunks[-1].usage == answer.usage
    logprobs = chain(*(piece.logprobs.token_logprobs for piece in pieces if piece.logprobs))
    assert [*logprobs] == expected.logprobs.token_logprobs
    assert len(expected.logprobs.token_logprobs) == whole.usage.completion_tokens


def test_a_seed_repeats_what_was_sampled(client, request_body):
    def sample(seed: int) -> str:
        body = request_body | {"temperature": 0.7, "seed": seed}
        return client.chat.completions.create(**body).choices[0].message.content

    assert sample(1) == sample(1) != sample(2)


def test_n_answers_are_several(client, request_body):
    body = request_body | {"temperature": 0.7, "seed": 1, "n": 2}
    whole = client.chat.completions.create(**body, logprobs=True)
    first, second = whole.choices
    assert (first.index, second.index) == (0, 1)
    assert first.message.content != second.message.content
    lengths = [len(choice.logprobs.content) for choice in whole.choices]
    assert whole.usage.completion_tokens == sum(lengths)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_a_stop_string_ends_the_text_wherever_in_a_step_it_lies(client, request_body, answer, share):
    text = answer.choices[0].message.content
    start = int(share * len(text))
    stop = text[start : start + 4]
    whole = client.chat.completions.create(**request_body, stop=[stop])
    chunks = list(client.chat.completions.create(**request_body, stop=[stop], logprobs=True, **COUNTED))
    assert whole.choices[0].message.content == text_of(chunks) == text[: text.index(stop)]
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "stop"
    assert whole.usage == chunks[-1].usage
    assert sum(map(len, tokens_of(chunks))) == whole.usage.completion_tokens


def test_an_answer_asked_for_in_a_schema_is_one(client, request_body):
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"a": digit}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "digit", "schema": schema}}
    found = client.chat.completions.create(**request_body, response_format=wanted).choices[0]
    assert found.finish_reason == "stop"
    assert json.loads(found.message.content)["a"] in range(10)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "another"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"max_tokens": 10 * CONTEXT}, openai.BadRequestError),
        ({"messages": chat("word " * CONTEXT)}, openai.BadRequestError),
        ({"messages": "no list"}, openai.BadRequestError),
    ],
)
def test_a_mistake_is_the_clients_own_error_and_costs_the_server_nothing(
    client, url, request_body, change, error
):
    def ask() -> None:
        with pytest.raises(error):
            client.chat.completions.create(**request_body | change)

    _, counts = counted(url, ask)
    assert counts["vllm:generation_tokens_total"] == 0
    assert client.chat.completions.create(**request_body | {"max_tokens": 2}).usage.completion_tokens == 2


def test_in_company_texts_part_at_near_ties_alone(client, url, model):
    bodies = [{"model": model, "messages": chat(text), "logprobs": True} | GREEDY for text in PROMPTS]
    alone = [client.chat.completions.create(**body, top_logprobs=2) for body in bodies]
    company, counts = counted(url, lambda: asyncio.run(stream_all(url, bodies)))
    for whole, chunks in zip(alone, company, strict=True):
        (expected,) = whole.choices
        gap = gap_where_they_part(expected.logprobs.content, [*chain(*tokens_of(chunks))])
        assert text_of(chunks) == expected.message.content if gap is None else gap <= NEAR_TIE
    tokens = sum(chunks[-1].usage.completion_tokens for chunks in company)
    assert counts["vllm:generation_tokens_total"] == tokens
    # a step served several
    assert counts["vllm:iteration_tokens_total_count"] < counts["vllm:spec_decode_num_drafts_total"]


async def stream_all(url: str, bodies: list[dict[str, Any]]) -> list[list[Any]]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def stream(body: dict[str, Any]) -> list[Any]:
            return [chunk async for chunk in await client.chat.completions.create(**body, **COUNTED)]

        return await asyncio.gather(*map(stream, bodies))


def gap_where_they_part(expected: list[Any], tokens: list[str]) -> float | None:
    """In nats, between the first two of what was expected there; None where nothing differs."""
    for own, token in zip(expected, tokens, strict=False):  # after it, one may end first
        if own.token != token:
            first, second = own.top_logprobs
            return first.logprob - second.logprob
    return None


# Clients that leave


def close_a_stream(client: openai.OpenAI, body: dict[str, Any]) -> None:
    with client.chat.completions.create(**body, stream=True) as chunks:
        for _ in range(3):
            next(chunks)


def time_out(client: openai.OpenAI, body: dict[str, Any]) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).chat.completions.create(**body)


@pytest.mark.parametrize("leave", [close_a_stream, time_out])
def test_nobody_writes_on_for_a_client_that_left(client, url, request_body, answer, leave):
    body = request_body | {"max_tokens": CONTEXT - 100, "extra_body": {"ignore_eos": True}}
    _, counts = counted(url, lambda: leave(client, body))
    assert counts["vllm:generation_tokens_total"] < CONTEXT - 100
    (again,) = client.chat.completions.create(**request_body).choices
    assert again.message.content == answer.choices[0].message.content


# curl


def curl(*words: str) -> str:
    command = ["curl", "--silent", "--show-error", "--max-time", "60", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def post(url: str, body: str) -> str:
    return curl("--no-buffer", "--header", "Content-Type: application/json", "--data", body, url)


def test_curl_finds_a_healthy_server_and_its_model(url, model):
    assert curl("--output", "/dev/null", "--write-out", "%{http_code}", f"{url}/health") == "200"
    (found,) = json.loads(curl(f"{url}/v1/models"))["data"]
    assert (found["id"], found["max_model_len"]) == (model, CONTEXT)
    assert Path(found["root"]).samefile(EMBEDDED_TARGET)


def test_curl_reads_a_stream_of_events_that_says_when_it_is_done(url, request_body, answer):
    told = post(f"{url}/v1/chat/completions", json.dumps(request_body | {"stream": True}))
    *events, done = [line for line in told.splitlines() if line]
    assert done == "data: [DONE]"
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    (expected,) = answer.choices
    assert "".join(piece["delta"].get("content") or "" for piece in pieces) == expected.message.content
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [
        expected.finish_reason
    ]


def test_curl_is_told_what_is_wrong_with_its_json(url):
    assert json.loads(post(f"{url}/v1/chat/completions", "{"))["error"]["code"] == 400


# Prometheus


def test_the_page_declares_vllms_families_and_ours(url):
    kinds = {family.name: family.type for family in read_families(url)}
    stock = {"drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"}
    assert {kinds[f"vllm:spec_decode_num_{name}"] for name in stock} == {"counter"}
    assert kinds["draftsmith:verified_nodes"] == kinds["draftsmith:delivered_draft_tokens"] == "counter"
    assert kinds["draftsmith:accepted_depth"] == "histogram"


def test_a_token_is_the_prompts_a_steps_or_a_delivered_draft(client, url, request_body):
    whole, counts = counted(url, lambda: client.chat.completions.create(**request_body))
    steps = counts["vllm:spec_decode_num_drafts_total"]
    delivered = counts["draftsmith:delivered_draft_tokens_total"]
    assert counts["vllm:generation_tokens_total"] == whole.usage.completion_tokens == 1 + steps + delivered
    assert counts["vllm:prompt_tokens_total"] == whole.usage.prompt_tokens
    check_drafts(counts)


def check_drafts(counts: Counts) -> None:
    """Nothing is delivered that was not accepted, or accepted that was not verified; both families agree."""
    steps, nodes, accepted, by_depth = (
        counts[f"vllm:spec_decode_num_{name}_total"]
        for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    )
    delivered = counts["draftsmith:delivered_draft_tokens_total"]
    assert 0 < delivered <= accepted <= nodes <= DEFAULT_BUDGET * steps
    assert counts["draftsmith:verified_nodes_total"] == nodes
    assert counts["draftsmith:accepted_depth_sum"] == accepted == by_depth
    assert counts["draftsmith:accepted_depth_count"] == steps


# vllm bench serve


def bench_command() -> list[str]:
    if is_cuda():
        return [str(Path(sys.executable).with_name("vllm")), "bench", "serve"]
    return [sys.executable, "-c", BENCH]


def run_bench(url: str, folder: Path) -> dict[str, Any]:
    """Eight prompts of exactly 24 tokens each, at once."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    options = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url]
    options += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"]
    options += ["--custom-output-len", "24", "--ignore-eos", "--temperature", "0", "--num-prompts", "8"]
    options += ["--save-result", "--result-dir", str(folder), "--result-filename", "result.json"]
    command = [*bench_command(), *options]
    done = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())


def test_vllms_benchmark_gets_every_answer_and_counts_what_the_server_does(url, model, tmp_path):
    result, counts = counted(url, lambda: run_bench(url, tmp_path))
    assert (result["model_id"], result["completed"], result["failed"]) == (model, 8, 0)
    assert result["total_output_tokens"] == counts["vllm:generation_tokens_total"] == 8 * 24
    assert result["total_input_tokens"] == counts["vllm:prompt_tokens_total"]
    assert result["spec_decode_num_drafts"] == counts["vllm:spec_decode_num_drafts_total"]
    assert result["spec_decode_draft_tokens"] == counts["vllm:spec_decode_num_draft_tokens_total"]
    assert result["spec_decode_accepted_tokens"] == counts["vllm:spec_decode_num_accepted_tokens_total"]
    assert result["spec_decode_acceptance_length"] > 2
    check_drafts(counts)
