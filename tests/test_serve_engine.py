"""The real server, plain and with an untrained drafter: what it streams, counts, opens and leaves behind."""

import dataclasses
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from drafters import EMBEDDED_TARGET, REPOSITORY, tiny_recipe, write_random_drafter
from prometheus_client.parser import text_string_to_metric_families

from recipes.errors import UserError
from serve.baselines import read_baseline
from serve.checkpoint import load_target_config
from serve.client import Completion, SamplingRequest, complete_all, read_counters
from serve.server import serving

pytestmark = pytest.mark.engine

RECIPE = tiny_recipe("serve.kv_cache_gib=0.25")
REFERENCE = EMBEDDED_TARGET.parent / "drafter"
TOPICS = ("open a file", "sort a list", "parse a date", "join two paths", "count words", "close a socket")
CHATS = [[{"role": "user", "content": f"Write a function to {topic}."}] for topic in TOPICS]
GREEDY = SamplingRequest(temperature=0.0, max_tokens=24, logprobs=2)
NEAR_TIE = 0.2  # nats between the plain engine's first two; bf16 logits of this size are 0.06 apart or equal


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Path:
    return write_random_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def plain(log_folder) -> Iterator[str]:
    with serving(RECIPE.target, RECIPE.serve, None, None, log_folder / "plain.log") as url:
        yield url


@pytest.fixture(scope="module")
def chain(log_folder, drafter) -> Iterator[str]:
    with serving(RECIPE.target, RECIPE.serve, drafter, None, log_folder / "chain.log") as url:
        yield url


@pytest.fixture(scope="module")
def tree(log_folder) -> Iterator[str]:
    with serving(RECIPE.target, RECIPE.serve, REFERENCE, 15, log_folder / "tree.log") as url:
        yield url


@pytest.fixture(scope="module")
def lookup(log_folder) -> Iterator[str]:
    baseline = read_baseline("ngram:5", RECIPE.target, 7)
    with serving(RECIPE.target, RECIPE.serve, None, 0, log_folder / "lookup.log", baseline) as url:
        yield url


@pytest.fixture(scope="module")
def plain_completions(plain) -> list[Completion]:
    return complete_all(plain, CHATS, GREEDY, concurrency=len(CHATS))


@pytest.fixture(scope="module")
def chain_completions(chain) -> list[Completion]:
    return complete_all(chain, CHATS, GREEDY, concurrency=len(CHATS))


def count_steps(url: str) -> float:
    """Of the engine, whatever the server made of them: it may hand over two at once."""
    page = httpx.get(f"{url}/metrics", trust_env=False).text
    samples = [each for family in text_string_to_metric_families(page) for each in family.samples]
    return sum(each.value for each in samples if each.name == "vllm:iteration_tokens_total_count")


def test_a_plain_engine_takes_a_step_for_each_token(plain):
    before = count_steps(plain)
    (completion,) = complete_all(plain, CHATS[:1], GREEDY, concurrency=1)
    assert count_steps(plain) - before == len(completion.token_ids) == sum(completion.chunks)
    assert read_counters(plain).drafts == 0


def test_greedy_tokens_are_the_likeliest_of_their_top_logprobs(plain_completions):
    for completion in plain_completions:
        assert completion.top_logprobs is not None
        assert [max(top, key=top.__getitem__) for top in completion.top_logprobs] == list(
            completion.token_ids
        )


def test_a_finished_answer_keeps_its_end_token(plain_completions):
    ended = [
        completion.token_ids[-1] for completion in plain_completions if completion.finish_reason == "stop"
    ]
    assert set(ended) <= {load_target_config(str(EMBEDDED_TARGET))["eos_token_id"]}


def test_a_stream_holds_the_tokens_of_the_same_request_unstreamed(plain, plain_completions):
    body = {
        "messages": CHATS[0],
        "temperature": 0,
        "max_tokens": GREEDY.max_tokens,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{plain}/v1/chat/completions", json=body, timeout=None, trust_env=False).json()
    (alone,) = complete_all(plain, CHATS[:1], GREEDY, concurrency=1)
    assert answer["choices"][0]["token_ids"] == list(alone.token_ids)
    assert answer["choices"][0]["message"]["content"] == alone.text
    assert answer["prompt_token_ids"] == list(plain_completions[0].prompt_token_ids)


def test_a_seed_fixes_a_sampled_text_and_another_changes_it(plain):
    def sample(seed: int) -> tuple[int, ...]:
        sampling = SamplingRequest(temperature=1.0, max_tokens=12, seed=seed)
        return complete_all(plain, CHATS[:1], sampling, concurrency=1)[0].token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_a_prompt_that_is_too_long_is_refused_with_the_servers_words(plain):
    long = [{"role": "user", "content": "word " * RECIPE.serve.max_model_len}]
    with pytest.raises(UserError, match=r"400.*512"):
        complete_all(plain, [long], GREEDY, concurrency=1)


def test_the_chain_runs_on_the_v2_runner(chain, log_folder):
    assert "Using V2 Model Runner" in (log_folder / "chain.log").read_text()


def test_the_chain_gives_the_plain_engines_text_up_to_near_ties(plain_completions, chain_completions):
    for plain_one, chain_one in zip(plain_completions, chain_completions, strict=True):
        assert plain_one.prompt_token_ids == chain_one.prompt_token_ids
        if plain_one.token_ids != chain_one.token_ids:
            assert gap_where_they_part(plain_one, chain_one) < NEAR_TIE


def test_vllms_own_lookup_drafts_what_stood_before_and_changes_no_text(plain_completions, lookup):
    completions = complete_all(lookup, CHATS, dataclasses.replace(GREEDY, logprobs=None), len(CHATS))
    for plain_one, lookup_one in zip(plain_completions, completions, strict=True):
        if plain_one.token_ids != lookup_one.token_ids:
            assert gap_where_they_part(plain_one, lookup_one) < NEAR_TIE
    counters = read_counters(lookup)
    assert len(counters.accepted_per_position) == 5
    assert counters.accepted_tokens > 0
    assert any(size > 1 for completion in completions for size in completion.chunks)


def gap_where_they_part(plain_one: Completion, chain_one: Completion) -> float:
    pairs = zip(plain_one.token_ids, chain_one.token_ids, strict=False)
    position = next(i for i, (a, b) in enumerate(pairs) if a != b)
    assert plain_one.top_logprobs is not None
    first, second = sorted(plain_one.top_logprobs[position].values(), reverse=True)[:2]
    return first - second


def test_the_counters_are_the_streams_steps_and_drafts(chain, drafter):
    before = read_counters(chain)
    completions = complete_all(chain, CHATS[:3], dataclasses.replace(GREEDY, max_tokens=9), concurrency=3)
    counted = read_counters(chain) - before
    steps = sum(len(completion.chunks) - 1 for completion in completions)  # the prefill verifies nothing
    assert counted.drafts == steps > 0
    assert len(counted.accepted_per_position) == RECIPE.drafter.block_size - 1
    assert counted.draft_tokens <= steps * (RECIPE.drafter.block_size - 1)
    assert counted.accepted_tokens == sum(counted.accepted_per_position)
    assert all(completion.chunks[0] == 1 for completion in completions)


def test_the_server_and_its_engine_listen_on_this_machine_only(chain):
    processes = psutil.Process().children(recursive=True)
    listening = [c for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert httpx.URL(chain).port in {connection.laddr.port for connection in listening}
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}


PARENT = """
import sys, time
from pathlib import Path
from recipes.load import load_recipe
from serve.server import serving
recipe = load_recipe("recipes/tiny_cpu.yaml", ["serve.kv_cache_gib=0.25"])
with serving(recipe.target, recipe.serve, None, None, Path(sys.argv[1])):
    time.sleep(600)
"""


def test_no_engine_outlives_the_command_that_started_it(tmp_path):
    command = [sys.executable, "-c", PARENT, str(tmp_path / "server.log")]
    with subprocess.Popen(command, cwd=REPOSITORY) as parent:
        family = wait_for_engine(psutil.Process(parent.pid))
        parent.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not alive


def wait_for_engine(parent: psutil.Process) -> list[psutil.Process]:
    """The server and whatever it has started by the time that its engine runs."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        family = parent.children(recursive=True)
        if any(process.name().startswith("VLLM::Engine") for process in family):
            return family
        time.sleep(0.2)
    raise AssertionError("no engine within five minutes")


@pytest.mark.parametrize("served", ["plain", "chain", "tree"])
def test_a_grammar_is_obeyed_and_binds_no_neighbour(request, served):
    url, pattern = request.getfixturevalue(served), "[a-f]{3} or [0-9]{4}"
    asked = {"messages": CHATS[0], "max_tokens": 24, "temperature": 0.0}
    constrained = {"structured_outputs": {"regex": pattern}}
    with ThreadPoolExecutor() as pool:
        texts = list(pool.map(lambda more: ask(url, asked | more), [constrained, {}, constrained]))
    # greedy texts themselves may differ from company to company: bf16 breaks ties another way
    assert [re.fullmatch(pattern, text) is not None for text in texts] == [True, False, True], texts


def ask(url: str, body: dict[str, Any]) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    return answer["choices"][0]["message"]["content"]
