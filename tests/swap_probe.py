"""Swaps drafters in engines of its own, for a test: in quiet, under load, and checkpoints that do not fit.

The target is the embedded one in fp32 and trees are drafted, so that greedy text is exact.
"""

import pickle
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafters import EMBEDDED_TARGET
from probe_host import run_probe
from tree_probe import answer
from tree_rounds import Round, Told

from recipes.schema import Serve, Target
from serve.engine import engine_arguments
from serve.served import describe_served

STEPS_BETWEEN = 12
TARGET = Target(model=str(EMBEDDED_TARGET), dtype="float32")
SERVE = Serve(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256, enforce_eager=True)


@dataclass(frozen=True)
class Plan:
    first: str
    """The checkpoint that the engine starts with."""
    prompts: list[list[int]]
    max_tokens: int
    first_goes: bool = False
    """Its folder is removed before anything else comes, as a trainer does."""
    quiet: list[str] = field(default_factory=list)
    """Checkpoints to be swapped in, one after the other, when no request runs."""
    refused: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    """Under load."""


@dataclass
class Swapped:
    first: Told
    quiet: list[Told] = field(default_factory=list)
    refusals: list[dict[str, str]] = field(default_factory=list)
    after_refusals: Told | None = None
    texts: list[tuple[int, list[int]]] = field(default_factory=list)
    """Prompt's number and answer, of all requests that met swaps."""
    acceptance: list[float] = field(default_factory=list)
    """Accepted drafts a verification between swaps, where requests were under way."""
    addresses_stay: bool = True


def probe(plan: Plan, folder: Path) -> Swapped:
    """Runs it in a process of its own."""
    run_probe("swap_probe", plan, folder / "swapped")
    return pickle.loads((folder / "swapped").read_bytes())


def main(plan: Plan, swapped: Path) -> None:
    swapped.write_bytes(pickle.dumps(run(plan)))


def run(plan: Plan) -> Swapped:
    from vllm import LLM  # noqa: PLC0415 - it reads the environment

    first = Path(plan.first)
    swappable = describe_served(first, TARGET, None).options()
    arguments = engine_arguments(TARGET, SERVE, first, 15, swappable)
    llm = LLM(**arguments, skip_tokenizer_init=True, disable_log_stats=False)
    asked = Round(plan.prompts, plan.max_tokens)
    told = Swapped(answer(llm, asked))
    if plan.first_goes:
        shutil.rmtree(first)
    addresses = find_addresses(llm)
    for ckpt in plan.quiet:
        assert swap(llm, ckpt) == {"loaded": ckpt}
        told.quiet.append(answer(llm, asked))
    told.refusals = [swap(llm, ckpt) for ckpt in plan.refused]
    if plan.refused:
        told.after_refusals = answer(llm, asked)
    if plan.loaded:
        Load(llm.llm_engine, plan, told).run(lambda ckpt: swap(llm, ckpt))
    told.addresses_stay = addresses == find_addresses(llm)
    return told


def swap(llm: Any, ckpt: str) -> dict[str, str]:
    (said,) = llm.collective_rpc("swap_drafter", args=(ckpt,))
    if "loaded" in said:
        llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    return said


def find_addresses(llm: Any) -> dict[str, int]:
    """Of the drafter's weights, where they are not packed away, and of what vLLM fuses of them."""
    (model,) = llm.collective_rpc(lambda worker: worker.model_runner.speculator.model)
    fused = {name: getattr(model.model, name) for name in ("_fused_kv_weight", "_k_norm_weights")}
    return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *fused.items()]}


class Load:
    """Requests that never end to come, while drafters are swapped."""

    def __init__(self, engine: Any, plan: Plan, told: Swapped) -> None:
        self._engine, self._plan, self._told = engine, plan, told
        self._came = 0

    def run(self, swap_in: Any) -> None:
        for ckpt in self._plan.loaded:
            assert swap_in(ckpt) == {"loaded": ckpt}
            before = self._counts()
            for _ in range(STEPS_BETWEEN):
                self._step(adds=True)
            drafts, accepted = (late - early for late, early in zip(self._counts(), before, strict=True))
            self._told.acceptance.append(accepted / drafts)
        while self._engine.has_unfinished_requests():
            self._step(adds=False)

    def _step(self, *, adds: bool) -> None:
        from vllm import SamplingParams  # noqa: PLC0415

        prompts = self._plan.prompts
        while adds and self._engine.get_num_unfinished_requests() < SERVE.max_num_seqs:
            greedy = SamplingParams(
                temperature=0.0, max_tokens=self._plan.max_tokens, ignore_eos=True, detokenize=False
            )
            prompt = {"prompt_token_ids": prompts[self._came % len(prompts)]}
            self._engine.add_request(str(self._came), prompt, greedy)
            self._came += 1
        for output in self._engine.step():
            if output.finished:
                number = int(output.request_id) % len(prompts)
                self._told.texts.append((number, list(output.outputs[0].token_ids)))

    def _counts(self) -> tuple[int, int]:
        values = {metric.name: getattr(metric, "value", 0) for metric in self._engine.get_metrics()}
        return values["vllm:spec_decode_num_drafts"], values["vllm:spec_decode_num_accepted_tokens"]
