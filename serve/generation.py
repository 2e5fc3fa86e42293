"""The target in this process, generating with capture: token ids in, the target's text and tap states out.

The environment must be the engine's (`serve.engine.child_environment`) before an engine starts: vLLM reads it
when it is imported.  Called by data/regenerate.py.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.errors import MachineError
from recipes.schema import Sampling, Serve, Target
from serve.capture import capture_options, read_spooled, spool_path
from serve.engine import PLAIN_BUDGET, engine_arguments


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
    hidden: torch.Tensor
    """[prompt + emitted - 1, taps x hidden size]: the tap states of every token but the last."""


class CapturingEngine:
    """One engine and the spool its captured states pass through, which is empty between two calls."""

    def __init__(self, target: Target, serve: Serve, target_layer_ids: Sequence[int], spool: Path) -> None:
        self._spool = spool
        self._engine = _start_engine(target, serve, target_layer_ids)
        self._call_workers("start_capture", str(spool))

    def answer(
        self, requests: Sequence[Request], sampling: Sampling, on_step: Callable[[int, int], None]
    ) -> list[Answer]:
        """Answers all requests together, in their order; on_step(new tokens, finished answers) per step."""
        for number, request in enumerate(requests):
            prompt = {"prompt_token_ids": list(request.token_ids)}
            self._engine.add_request(str(number), prompt, _sampling_params(sampling, request.seed))
        outputs = {int(output.request_id): output.outputs[0] for output in self._run(on_step)}
        self._call_workers("flush_capture")
        return [self._collect(number, request, outputs[number]) for number, request in enumerate(requests)]

    def _run(self, on_step: Callable[[int, int], None]) -> Iterator[Any]:
        """Steps until nothing is left; yields each request's last output."""
        lengths: dict[str, int] = {}
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            grown = {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
            new_tokens = sum(length - lengths.get(name, 0) for name, length in grown.items())
            lengths |= grown
            finished = [output for output in outputs if output.finished]
            on_step(new_tokens, len(finished))
            yield from finished

    def _collect(self, number: int, request: Request, output: Any) -> Answer:
        """Cuts the captured rows to the text: the engine may have computed its last token, or beyond it."""
        text = [*request.token_ids, *output.token_ids]
        hidden, token_ids = read_spooled(self._spool, str(number))
        spool_path(self._spool, str(number)).unlink()
        rows = len(text) - 1
        assert token_ids[:rows].tolist() == text[:rows], f"request {number}: its states are of another text"
        return Answer(list(output.token_ids), output.finish_reason, hidden[:rows])

    def _call_workers(self, method: str, *arguments: str) -> None:
        try:
            self._engine.collective_rpc(method, args=arguments)
        except NotImplementedError as absent:
            raise MachineError(
                "draftsmith's plugin is not loaded in vLLM: install draftsmith in this environment"
                f" (pip install -e .) and leave VLLM_PLUGINS unset (found {os.environ.get('VLLM_PLUGINS')!r})"
            ) from absent


def _start_engine(target: Target, serve: Serve, target_layer_ids: Sequence[int]) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process; workers may be others
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are of CPU set-up
    from vllm import EngineArgs, LLMEngine  # noqa: PLC0415 - it reads the environment

    arguments = engine_arguments(target, serve, None, PLAIN_BUDGET)
    arguments["additional_config"] = arguments["additional_config"] | capture_options(target_layer_ids)
    return LLMEngine.from_engine_args(EngineArgs(**arguments, disable_log_stats=True, use_tqdm_on_load=False))


def _sampling_params(sampling: Sampling, seed: int) -> Any:
    from vllm import SamplingParams  # noqa: PLC0415 - as above

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=seed,
        detokenize=False,
    )
