"""One pass of the prompts through one served engine, clocked and counted.

Knows nothing of recipes, files or how the engine came up; `eval/measure.py` calls it for each engine and
temperature.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import httpx

from data.prompts import Prompt
from eval.acceptance import count_acceptance, cut_to_depth, repeated_ngram_share
from eval.latency import find_latency
from eval.report import Decoding, TreeDecoding
from recipes.errors import UserError
from recipes.schema import Eval
from serve.client import Completion, SamplingRequest, SpecCounters, complete_all, read_counters

DecodingT = TypeVar("DecodingT", bound=Decoding)
OnDone = Callable[[], None]  # called as each prompt is done
TOP_LOGPROBS = 5  # a near-tie is between the first few
WARM_UP = [{"role": "user", "content": "Count from one to nine."}]


@dataclass(frozen=True)
class Server:
    """A running server, as it describes itself."""

    vllm: str
    """Version."""
    model: str
    num_drafts: int
    """Proposed at each step; 0 where it decodes plainly."""


@dataclass(frozen=True)
class Pass(Generic[DecodingT]):
    """All prompts at one temperature."""

    completions: list[Completion]
    decoding: DecodingT
    seconds: float


def warm_up(url: str) -> None:
    """One short request, so that no first-time compilation is clocked."""
    complete_all(url, [WARM_UP], SamplingRequest(temperature=0.0, max_tokens=16), concurrency=1)


def identify_server(url: str) -> Server:
    """What the server says of itself."""
    version = _get(url, "/version")["version"]
    model = _get(url, "/v1/models")["data"][0]["id"]
    return Server(vllm=version, model=model, num_drafts=len(read_counters(url).accepted_per_position))


def _get(url: str, path: str) -> dict[str, Any]:
    try:
        # no proxy of the environment may stand in between
        answer: dict[str, Any] = httpx.get(f"{url}{path}", trust_env=False).raise_for_status().json()
    except httpx.ConnectError as refused:
        raise UserError(
            f"no server answers at {url}: start one with serve/run.py, or correct --url"
        ) from refused
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as broken:
        raise UserError(f"{url} is no vLLM server: {path} gave {type(broken).__name__}: {broken}") from broken
    return answer


def run_pass(
    url: str, prompts: Sequence[Prompt], settings: Eval, temperature: float, on_done: OnDone
) -> Pass[Decoding]:
    """Completes every prompt and counts; plain decoding or the chain."""
    clocked = _clock(url, prompts, settings, temperature, on_done)
    # no positions: nothing drafts there
    counters = clocked.counters if clocked.counters.accepted_per_position else None
    decoding = _describe(clocked.completions, counters, clocked.seconds)
    return Pass(clocked.completions, decoding, clocked.seconds)


def run_tree_pass(
    url: str, prompts: Sequence[Prompt], settings: Eval, depth: int, temperature: float, on_done: OnDone
) -> Pass[TreeDecoding]:
    """The same where draft trees are verified; `depth` is what their drafter works at, block_size - 1."""
    clocked = _clock(url, prompts, settings, temperature, on_done)
    counters = cut_to_depth(clocked.counters, depth)
    decoding = _describe(clocked.completions, counters, clocked.seconds)
    return Pass(clocked.completions, _as_tree(decoding, counters, depth), clocked.seconds)


def _as_tree(decoding: Decoding, counters: SpecCounters, depth: int) -> TreeDecoding:
    missing = depth - len(decoding.accepted_by_depth)  # a tree of fewer nodes reaches no deeper
    fields = dict(decoding) | {"accepted_by_depth": decoding.accepted_by_depth + [0.0] * missing}
    return TreeDecoding(**fields, nodes_per_step=counters.draft_tokens / decoding.steps)


@dataclass(frozen=True)
class _Clocked:
    completions: list[Completion]
    counters: SpecCounters
    seconds: float


def _clock(
    url: str, prompts: Sequence[Prompt], settings: Eval, temperature: float, on_done: OnDone
) -> _Clocked:
    """Completes every prompt; the clock and the counters span just these requests."""
    sampling = _sampling(settings, temperature)
    before, start = read_counters(url), time.monotonic()
    completions = _complete(url, prompts, sampling, settings, on_done)
    seconds, after = time.monotonic() - start, read_counters(url)
    return _Clocked(completions, after - before, seconds)


def run_reference(url: str, prompts: Sequence[Prompt], settings: Eval, on_done: OnDone) -> list[Completion]:
    """Completes every prompt greedily with top log-probabilities, which say how near a tie was.

    A run apart, unclocked: on a CPU log-probabilities make decoding several times slower.
    """
    sampling = replace(_sampling(settings, 0.0), logprobs=TOP_LOGPROBS)
    return _complete(url, prompts, sampling, settings, on_done)


def _sampling(settings: Eval, temperature: float) -> SamplingRequest:
    return SamplingRequest(temperature, settings.max_tokens, seed=settings.seed, thinking=settings.thinking)


def _complete(
    url: str, prompts: Sequence[Prompt], sampling: SamplingRequest, settings: Eval, on_done: OnDone
) -> list[Completion]:
    chats = [list(prompt.messages) for prompt in prompts]
    return complete_all(url, chats, sampling, settings.concurrency, on_done=lambda _: on_done())


def _describe(completions: Sequence[Completion], counters: SpecCounters | None, seconds: float) -> Decoding:
    acceptance = count_acceptance([done.chunks for done in completions], counters)
    return Decoding(
        acceptance_length=acceptance.acceptance_length,
        standard_error=acceptance.standard_error,
        interval=acceptance.interval,
        mean_of_request_means=acceptance.mean_of_request_means,
        tokens_per_second=sum(len(done.token_ids) for done in completions) / seconds,
        steps=acceptance.steps,
        committed_tokens=acceptance.committed_tokens,
        accepted_by_depth=list(acceptance.accepted_by_depth),
        repeated_8gram_share=repeated_ngram_share([done.token_ids for done in completions], n=8),
        coalesced=acceptance.coalesced,
        undrafted_steps=acceptance.undrafted_steps,
        latency=find_latency(completions, acceptance.steps),
    )
