"""The target in this process, generating with capture: token ids in, the target's text and tap states out.

Given texts are read: prefilled, for their tap states alone.  With a drafter an answer takes fewer steps;
another drafter may take its place while nothing runs, and the engine may sleep, its GPU left to others.

The environment must be the engine's (`serve.engine.child_environment`) before an engine starts: vLLM reads it
when it is imported.  Called by data/shard_maker.py and data/batch.py.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from recipes.errors import MachineError
from recipes.schema import Sampling, Serve, Target
from serve.capture import capture_options
from serve.engine import CHAIN_REQUEST, PLAIN_BUDGET, SECTION, engine_arguments
from serve.heap import modules_stay
from serve.served import describe_served
from serve.spool import read_spooled, spool_path


@dataclass(frozen=True)
class Request:
    """One prompt to answer."""

    token_ids: Sequence[int]
    seed: int
    """Of its sampling; the same request in the same company gives the same answer."""


@dataclass(frozen=True)
class Answer:
    """What the target made of a request."""

    token_ids: Sequence[int]
    """What it emitted, the end-of-turn token included."""
    finish_reason: str
    """As vLLM says it: "stop" or "length"."""
    hidden: torch.Tensor | None
    """[prompt + emitted - 1, taps x hidden size]: the tap states of every token but the last.

    None where that is not whole: the engine gave the request up, or some states were never captured.
    """
    chunks: Sequence[int]
    """Tokens that each step of the engine gave it: one of the prefill, then what was verified."""


@dataclass(frozen=True)
class Drafting:
    """How an engine begins to draft."""

    ckpt: Path
    budget: int | None
    """Nodes of a tree; None: the chain."""


@dataclass(frozen=True)
class Step:
    """What one step of an engine did."""

    grown: Mapping[int, int]
    """Of each request that it gave something, by number: new tokens."""
    ended: Sequence[int]
    """Numbers of requests."""


@dataclass
class _Job:
    """A request under way, or not yet collected."""

    prompt: Sequence[int]
    chunks: list[int] = field(default_factory=list)
    num_emitted: int = 0
    """Tokens in all chunks."""
    output: Any = None
    """vLLM's, once it ended."""


WHOLE_ENDS = ("stop", "length")
"""Finish reasons of an answer that ended by itself; vLLM's others are "abort", "error" and "repetition"."""


class CapturingEngine:
    """One engine and the spool its captured states pass through, a file a request until it is collected.

    Requests may begin at any time; a swap and a sleep wait until none runs.
    """

    def __init__(
        self,
        target: Target,
        serve: Serve,
        target_layer_ids: Sequence[int],
        spool: Path,
        drafting: Drafting | None = None,
        *,
        final_states: bool = False,
        sleeps: bool = False,
    ) -> None:
        """final_states: what the target's head reads is captured as one more tap.  sleeps: it can be laid to
        sleep, for which vLLM keeps its memory in pools of another kind."""
        self._spool = spool
        self._jobs: dict[int, _Job] = {}
        self.num_begun = 0
        """Requests so far; the number of the next one."""
        capture = capture_options(target_layer_ids, final_states=final_states)
        self._engine = _start_engine(target, serve, capture, drafting, sleeps=sleeps)
        self._call_workers("start_capture", str(spool))

    def swap(self, ckpt: Path) -> None:
        """Drafts with another checkpoint from now on.  Raises MachineError if it does not fit."""
        for said in self._call_workers("swap_drafter", str(ckpt)):
            if "refused" in said:
                raise MachineError(said["refused"])
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def sleep(self) -> None:
        """Weights and graphs go to host memory, caches are forgotten (vLLM's sleep level 1)."""
        self._engine.sleep(level=1)

    def wake(self) -> None:
        self._engine.wake_up()

    def answer(
        self, requests: Sequence[Request], sampling: Sampling, *, is_chain: bool = False
    ) -> list[Answer]:
        """Answers all requests together, in their order."""
        return self._await([self.begin(request, sampling, is_chain=is_chain) for request in requests])

    def read(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """The tap states of given texts: of each [its tokens - 1, taps x hidden size], as `Answer.hidden`."""
        return [answer.hidden for answer in self._await([self.begin_reading(text) for text in texts])]

    def begin(self, request: Request, sampling: Sampling, *, is_chain: bool = False) -> int:
        """Its number, which no other has; steps answer it.  is_chain: with chains in place of trees."""
        options = {"extra_args": CHAIN_REQUEST} if is_chain else {}
        return self._add(request.token_ids, _sampling_params(sampling, request.seed, options))

    def begin_reading(self, text: Sequence[int]) -> int:
        """As a request that is prefilled, also where the engine drafts; what it samples is kept nowhere.

        A text has at least two tokens, at most the engine's max_model_len.
        """
        # the last token has no row, and without it the longest text leaves room for the one that is sampled
        return self._add(text[:-1], _sampling_params(Sampling(max_tokens=1), 0, {}))

    def step(self) -> Step:
        """One, of all requests that were begun and did not end."""
        assert self._engine.has_unfinished_requests(), "nothing runs"
        grown: dict[int, int] = {}
        ended = []
        for output in self._engine.step():
            job = self._jobs[number := int(output.request_id)]
            if new_tokens := len(output.outputs[0].token_ids) - job.num_emitted:
                job.chunks.append(new_tokens)
                job.num_emitted += new_tokens
                grown[number] = new_tokens
            if output.finished:
                job.output = output.outputs[0]
                ended.append(number)
        return Step(grown, ended)

    def has_ended(self, number: int) -> bool:
        """And was not collected."""
        return self._jobs[number].output is not None

    def collect(self, numbers: Sequence[int]) -> list[Answer]:
        """Of ended requests, which the engine forgets; others may run on.  Waits for their states' files."""
        if numbers:
            self._call_workers("flush_capture", [str(number) for number in numbers])
        return [self._take_answer(number) for number in numbers]

    def _await(self, numbers: Sequence[int]) -> list[Answer]:
        while not all(map(self.has_ended, numbers)):
            self.step()
        return self.collect(numbers)

    def _add(self, prompt: Sequence[int], params: Any) -> int:
        number = self.num_begun
        self.num_begun += 1
        self._jobs[number] = _Job(prompt)
        self._engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, params)
        return number

    def _take_answer(self, number: int) -> Answer:
        job = self._jobs.pop(number)
        output = job.output
        assert output is not None, f"request {number} still runs"
        hidden = self._take_states(number, [*job.prompt, *output.token_ids])
        is_whole = output.finish_reason in WHOLE_ENDS and hidden is not None
        return Answer(list(output.token_ids), output.finish_reason, hidden if is_whole else None, job.chunks)

    def _take_states(self, number: int, text: Sequence[int]) -> torch.Tensor | None:
        """Cuts the captured rows to the text: the engine may have computed its last token, or beyond it."""
        path, rows = spool_path(self._spool, str(number)), len(text) - 1
        if not path.exists():
            return None  # it never ran
        hidden, token_ids = read_spooled(self._spool, str(number))
        path.unlink()
        of_text = token_ids[:rows].tolist()
        assert of_text == text[: len(of_text)], f"request {number}: its states are of another text"
        return hidden[:rows] if len(hidden) >= rows else None

    def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        try:
            return self._engine.collective_rpc(method, args=arguments)
        except NotImplementedError as absent:
            raise MachineError(
                "draftsmith's plugin is not loaded in vLLM: install draftsmith in this environment"
                f" (pip install -e .) and leave VLLM_PLUGINS unset (found {os.environ.get('VLLM_PLUGINS')!r})"
            ) from absent


def _start_engine(
    target: Target,
    serve: Serve,
    capture: Mapping[str, Any],
    drafting: Drafting | None,
    *,
    sleeps: bool,
) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process; workers may be others
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are of CPU set-up
    with modules_stay():
        from vllm import EngineArgs, LLMEngine  # noqa: PLC0415 - it reads the environment

    if drafting is None:
        arguments = engine_arguments(target, serve, None, PLAIN_BUDGET, sleeps=sleeps)
    else:
        swappable = describe_served(drafting.ckpt, target, None).options()
        arguments = engine_arguments(target, serve, drafting.ckpt, drafting.budget, swappable, sleeps=sleeps)
    arguments["additional_config"].setdefault(SECTION, {}).update(capture[SECTION])
    return LLMEngine.from_engine_args(EngineArgs(**arguments, disable_log_stats=True, use_tqdm_on_load=False))


def _sampling_params(sampling: Sampling, seed: int, options: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams  # noqa: PLC0415 - as above

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=seed,
        detokenize=False,
        **options,
    )
