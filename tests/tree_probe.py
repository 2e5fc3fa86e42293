"""Runs engines with draft trees, or without, each in a process of its own, and tells tests what they did.

    python tree_probe.py FOLDER NAMES    reads `specs` there, writes what each of these engines told

What they are given and tell stands in tests/tree_rounds.py.
"""

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from search_path import environment
from tree_controls import broken, preempting
from tree_rounds import Round, Spec, Told
from tree_watch import Watch

from recipes.schema import Serve, Target
from serve.engine import child_environment, engine_arguments


def run_engines(specs: dict[str, Spec], folder: Path) -> dict[str, dict[str, Told]]:
    """Runs each in a process of its own, on a GPU all at once; what each round of each told."""
    (folder / "specs").write_bytes(pickle.dumps(specs))
    parts = [[name] for name in specs] if torch.cuda.is_available() else [list(specs)]
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda names: _run_process(folder, names), parts):
            assert done.returncode == 0, done.stderr[-5000:]
    return {name: pickle.loads((folder / f"{name}.told").read_bytes()) for name in specs}


def _run_process(folder: Path, names: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__, str(folder), *names],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def main(folder: Path, names: list[str]) -> None:
    os.environ.update(child_environment())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker is looked at from inside
    import vllm  # noqa: F401, PLC0415 - once for all: it takes longer than an engine

    specs = pickle.loads((folder / "specs").read_bytes())
    for name in names:
        child = os.fork()
        if child == 0:
            (folder / f"{name}.told").write_bytes(pickle.dumps(run_engine(specs[name])))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"engine {name} failed")


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


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
