"""The target in this process, generating with capture: token ids in, the target's text and tap states out.

Given texts are read: prefilled, for their tap states alone.  With a drafter an answer takes fewer steps;
another drafter may take its place between two calls, and the engine may sleep, its GPU left to others.

The environment must be the engine's (`serve.engine.child_environment`) before an engine starts: vLLM reads it
when it is imported.  Called by data/shard_maker.py.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


WHOLE_ENDS = ("stop", "length")
"""Finish reasons of an answer that ended by itself; vLLM's others are "abort", "error" and "repetition"."""
OnStep = Callable[[int, int], None]
"""Called after each step of an engine with its new tokens and finished answers."""


class CapturingEngine:
    """One engine and the spool its captured states pass through, which is empty between two calls."""

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
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_step: OnStep,
        *,
        is_chain: bool = False,
    ) -> list[Answer]:
        """Answers all requests together, in their order.  is_chain: with chains in place of trees."""
        options = {"extra_args": CHAIN_REQUEST} if is_chain else {}
        jobs = [
            (request.token_ids, _sampling_params(sampling, request.seed, options)) for request in requests
        ]
        return self._generate(jobs, on_step)

    def read(
        self, texts: Sequence[Sequence[int]], on_step: OnStep = lambda *_: None
    ) -> list[torch.Tensor | None]:
        """The tap states of given texts: of each [its tokens - 1, taps x hidden size], as `Answer.hidden`.

        Prefilled together, also where the engine drafts; what it samples after a text is kept nowhere.  A
        text has at least two tokens, at most the engine's max_model_len.
        """
        # the last token has no row, and without it the longest text leaves room for the one that is sampled
        one_token = _sampling_params(Sampling(max_tokens=1), 0, {})
        answers = self._generate([(text[:-1], one_token) for text in texts], on_step)
        return [answer.hidden for answer in answers]

    def _generate(self, jobs: Sequence[tuple[Sequence[int], Any]], on_step: OnStep) -> list[Answer]:
        """Answers to prompts, each with its sampling parameters."""
        for number, (prompt, params) in enumerate(jobs):
            self._engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, params)
        chunks: list[list[int]] = [[] for _ in jobs]
        outputs = {int(output.request_id): output.outputs[0] for output in self._run(chunks, on_step)}
        self._call_workers("flush_capture")
        return [
            self._collect(number, prompt, outputs[number], chunks[number])
            for number, (prompt, _) in enumerate(jobs)
        ]

    def _run(self, chunks: list[list[int]], on_step: OnStep) -> Iterator[Any]:
        """Steps until nothing is left; yields each request's last output."""
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            new_tokens = 0
            for output in outputs:
                of_request = chunks[int(output.request_id)]
                grown = len(output.outputs[0].token_ids) - sum(of_request)
                new_tokens += grown
                if grown:
                    of_request.append(grown)
            finished = [output for output in outputs if output.finished]
            on_step(new_tokens, len(finished))
            yield from finished

    def _collect(self, number: int, prompt: Sequence[int], output: Any, chunks: Sequence[int]) -> Answer:
        text = [*prompt, *output.token_ids]
        hidden = self._take_states(number, text)
        is_whole = output.finish_reason in WHOLE_ENDS and hidden is not None
        return Answer(list(output.token_ids), output.finish_reason, hidden if is_whole else None, chunks)

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

    def _call_workers(self, method: str, *arguments: str) -> list[Any]:
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
