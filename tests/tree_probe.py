"""Runs engines with draft trees, or without, each in a process of its own, and tells tests what they did.

What they are given and tell stands in tests/tree_rounds.py.
"""

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from probe_host import run_probe, start_host
from tree_controls import broken, preempting
from tree_rounds import Round, Spec, Told
from tree_watch import Watch

from recipes.schema import Serve, Target
from serve.engine import engine_arguments


def run_engines(specs: dict[str, Spec], folder: Path) -> dict[str, dict[str, Told]]:
    """Runs each in a process of its own, on a GPU all at once; what each round of each told."""
    start_host()
    with ThreadPoolExecutor(len(specs) if torch.cuda.is_available() else 1) as pool:
        list(pool.map(lambda name: run_probe("tree_probe", specs[name], folder / f"{name}.told"), specs))
    return {name: pickle.loads((folder / f"{name}.told").read_bytes()) for name in specs}


def main(spec: Spec, told: Path) -> None:
    told.write_bytes(pickle.dumps(run_engine(spec)))


def run_engine(spec: Spec) -> dict[str, Told]:
    from vllm import LLM  # noqa: PLC0415 - it reads the environment

    if spec.has_gpu_runtime:
        import gpu_runtime_on_cpu  # noqa: PLC0415 - it imports vLLM

        gpu_runtime_on_cpu.install()
    settings = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256, "enforce_eager": True}
    arguments = engine_arguments(
        Target(model=spec.target, dtype=spec.dtype),
        Serve(**settings | spec.serve),
        Path(spec.ckpt),
        spec.budget,
        adapts=spec.adapts,
    )
    arguments |= {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.1}
    engine = LLM(**arguments | spec.engine)
    return {name: run_round(engine, each) for name, each in spec.rounds.items()}


def run_round(engine: Any, given: Round) -> Told:
    told = answer(engine, given)
    if given.keeps_states == "of the end":
        prompts = [states.token_ids for _, states in sorted(told.states.items())]
        computed = [{"skip_reading_prefix_cache": True}] * len(prompts)
        again = answer(engine, Round(prompts, max_tokens=2, sampling=computed, keeps_states="of the prompt"))
        told.fresh_states = {request: again.states[i] for i, request in enumerate(sorted(told.states))}
    return told


def answer(engine: Any, given: Round) -> Told:
    from vllm import SamplingParams  # noqa: PLC0415

    told = Told()
    greedy = {"temperature": 0.0, "detokenize": False, "ignore_eos": True, "max_tokens": given.max_tokens}
    (runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    with (
        Watch(runner, given, told).attached(),
        broken(given.control, runner),
        preempting(scheduler, given, told),
    ):
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in given.prompts],
            [SamplingParams(**greedy | each) for each in given.sampling or [{}] * len(given.prompts)],
            use_tqdm=False,
        )
    for output in outputs:
        (completion,) = output.outputs
        told.texts.append(list(completion.token_ids))
        told.num_cached_tokens += output.num_cached_tokens or 0
        if completion.logprobs is not None:
            told.logprobs.append(
                [{token: each.logprob for token, each in step.items()} for step in completion.logprobs]
            )
    return told
