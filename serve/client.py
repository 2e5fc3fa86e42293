"""Talks to the evaluation server: streamed chat completions and the counters of speculative decoding.

Every setting that changes the text is sent, so that the model's own generation defaults never slip in.
Called by eval and by whoever measures; needs httpx only, no engine.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from recipes.errors import MachineError, UserError
from recipes.schema import Thinking

Chat = Sequence[Mapping[str, str]]
_TOKEN_PREFIX = "token_id:"  # vLLM's spelling of a token under return_tokens_as_token_ids
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class SamplingRequest:
    """How one batch of completions is sampled; the words are vLLM's."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int = 0
    """Of the first request; request i has seed + i."""
    logprobs: int | None = None
    """How many of the likeliest tokens are returned at each position, with their log-probabilities."""
    thinking: Thinking = "template"
    """What the chat template is told: `on` and `off` are its enable_thinking, `template` tells it nothing."""


@dataclass(frozen=True)
class Completion:
    """One answer, as token ids and as it arrived."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The end-of-turn token included, where it was reached."""
    chunks: tuple[int, ...]
    """New tokens per streamed chunk: an engine step each, the first of them the prefill's single token."""
    arrivals: tuple[float, ...]
    """When each chunk came: seconds since its own request was sent."""
    text: str
    finish_reason: str
    top_logprobs: tuple[dict[int, float], ...] | None
    """Token id -> log-probability, per position; before temperature, top_p and top_k."""
    seconds: float


def complete_all(
    url: str,
    chats: Sequence[Chat],
    sampling: SamplingRequest,
    concurrency: int,
    on_done: Callable[[Completion], None] | None = None,
) -> list[Completion]:
    """One completion per chat, in the chats' order, at most `concurrency` at a time.

    `on_done` is called as each one ends.  Raises UserError for what the server refuses, MachineError when it
    stops answering.
    """
    return asyncio.run(_complete_all(url, chats, sampling, concurrency, on_done or (lambda _: None)))


async def _complete_all(
    url: str,
    chats: Sequence[Chat],
    sampling: SamplingRequest,
    concurrency: int,
    on_done: Callable[[Completion], None],
) -> list[Completion]:
    turns = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    # a token may take long, and no proxy of the environment may stand in between
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:

        async def complete_in_turn(index: int, chat: Chat) -> Completion:
            async with turns:
                completion = await _complete(client, _body(chat, sampling, index))
            on_done(completion)
            return completion

        return await asyncio.gather(*(complete_in_turn(i, chat) for i, chat in enumerate(chats)))


def _body(chat: Chat, sampling: SamplingRequest, index: int) -> dict[str, Any]:
    body = {
        "messages": list(chat),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": sampling.seed + index,
        "logprobs": sampling.logprobs is not None,
        "top_logprobs": sampling.logprobs,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if sampling.thinking != "template":
        body["chat_template_kwargs"] = {"enable_thinking": sampling.thinking == "on"}
    return body


async def _complete(client: httpx.AsyncClient, body: dict[str, Any]) -> Completion:
    answer = _Answer()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if not response.is_success:
                raise _describe_refusal(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                answer.take_line(line)
    except httpx.TransportError as broken:
        raise _describe_silence(client, broken) from broken
    return answer.finish()


def _describe_refusal(status: int, content: bytes) -> Exception:
    message = f"the server answered {status}: {content.decode(errors='replace')}"
    return UserError(message) if status < httpx.codes.INTERNAL_SERVER_ERROR else MachineError(message)


def _describe_silence(client: httpx.AsyncClient, broken: httpx.TransportError) -> Exception:
    if isinstance(broken, httpx.ConnectError):
        return UserError(
            f"no server answers at {client.base_url}: start one with serve/run.py, or correct the URL"
        )
    return MachineError(
        f"the server at {client.base_url} stopped answering ({type(broken).__name__}: {broken})"
    )


@dataclass
class _Answer:
    """A completion while it streams in."""

    started: float = field(default_factory=time.perf_counter)
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    completion_tokens: int | None = None

    def take_line(self, line: str) -> None:
        """One line of the event stream: `data: {...}`, `data: [DONE]` or empty."""
        event = line.removeprefix("data: ")
        if event and event != "[DONE]":
            self._take_event(json.loads(event))

    def _take_event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise MachineError(f"the server failed while it answered: {event['error']}")
        self.prompt_token_ids += event.get("prompt_token_ids") or []
        if event.get("usage"):
            self.completion_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        self.pieces.append(choice["delta"].get("content") or "")
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if choice.get("token_ids"):
            self.token_ids += choice["token_ids"]
            self.chunks.append(len(choice["token_ids"]))
            self.arrivals.append(time.perf_counter() - self.started)
        if choice.get("logprobs"):
            self.top_logprobs = (self.top_logprobs or []) + _read_logprobs(choice["logprobs"]["content"])

    def finish(self) -> Completion:
        if self.finish_reason is None or self.completion_tokens != len(self.token_ids):
            raise MachineError(
                f"an answer broke off: {len(self.token_ids)} tokens arrived of {self.completion_tokens},"
                f" finish_reason {self.finish_reason}"
            )
        return Completion(
            prompt_token_ids=tuple(self.prompt_token_ids),
            token_ids=tuple(self.token_ids),
            chunks=tuple(self.chunks),
            arrivals=tuple(self.arrivals),
            text="".join(self.pieces),
            finish_reason=self.finish_reason,
            top_logprobs=None if self.top_logprobs is None else tuple(self.top_logprobs),
            seconds=time.perf_counter() - self.started,
        )


def _read_logprobs(content: list[dict[str, Any]]) -> list[dict[int, float]]:
    return [
        {int(top["token"].removeprefix(_TOKEN_PREFIX)): top["logprob"] for top in position["top_logprobs"]}
        for position in content
    ]


@dataclass(frozen=True)
class SpecCounters:
    """The engine's own counts of speculative decoding since it started, over all requests."""

    drafts: int = 0
    """Verification steps of one request that had drafts to verify."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Accepted drafts, the bonus token not included."""
    accepted_per_position: tuple[int, ...] = ()
    """Steps in which the k-th draft was accepted, from the first on; empty where nothing drafts."""

    def __sub__(self, earlier: "SpecCounters") -> "SpecCounters":
        pairs = zip(self.accepted_per_position, earlier.accepted_per_position, strict=True)
        return SpecCounters(
            drafts=self.drafts - earlier.drafts,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted_tokens=self.accepted_tokens - earlier.accepted_tokens,
            accepted_per_position=tuple(now - before for now, before in pairs),
        )


def read_counters(url: str) -> SpecCounters:
    """All zero for a server that decodes plainly."""
    try:
        page = httpx.get(f"{url}/metrics", trust_env=False).raise_for_status().text
    except httpx.HTTPError as broken:
        raise MachineError(f"cannot read {url}/metrics ({type(broken).__name__}: {broken})") from broken
    return parse_counters(page)


def parse_counters(page: str) -> SpecCounters:
    """Sums over engines; vLLM 0.32's names (v1/spec_decode/metrics.py)."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def total(name: str, position: str | None = None) -> int:
        full_name = f"vllm:spec_decode_num_{name}_total"
        chosen = (s for s in samples if s.name == full_name and s.labels.get("position") == position)
        return int(sum(s.value for s in chosen))

    positions = {s.labels["position"] for s in samples if s.name == _PER_POSITION}
    return SpecCounters(
        drafts=total("drafts"),
        draft_tokens=total("draft_tokens"),
        accepted_tokens=total("accepted_tokens"),
        accepted_per_position=tuple(
            total("accepted_tokens_per_pos", position) for position in sorted(positions, key=int)
        ),
    )
