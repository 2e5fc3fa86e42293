"""Engines whose drafter has a pairwise head, in a process of their own; tells a test what they drafted.

Reads `case` in a folder (tests/tree_targets.py), whose drafter has a head, and the checkpoints that are to
take its place.  Saves what each engine answered and drafted in each round.
"""

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tree_targets import Case

from recipes.schema import Serve, Target
from serve.engine import CHAIN_REQUEST, engine_arguments
from serve.served import describe_served

MAX_TOKENS, BUDGET = 24, 15
RESERVED = 5
"""Rows, where some are."""


@dataclass(frozen=True)
class Drafted:
    """For one request."""

    request: int
    committed: int
    """Tokens of its text so far, without the prompt."""
    hidden_LD: torch.Tensor
    tokens_LC: torch.Tensor
    log_probs_LC: torch.Tensor
    parents: list[int]
    """Of the planted tree's nodes."""
    tokens: list[int]
    """Theirs."""


@dataclass
class Told:
    texts: list[list[int]] = field(default_factory=list)
    drafted: list[Drafted] = field(default_factory=list)
    swapped: list[dict[str, str]] = field(default_factory=list)


def start(case: Case, budget: int | None, reserved: int = 0) -> Any:
    """reserved: of a tree's rows, those of the greedy chain."""
    from vllm import LLM  # noqa: PLC0415 - it reads the environment

    target = Target(model=case.target, dtype="float32")
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    serve = Serve(**sizes, enforce_eager=True, reserve_chain=reserved)
    swappable = describe_served(Path(case.ckpt), target, None).options() if budget else None
    arguments = engine_arguments(target, serve, Path(case.ckpt), budget, swappable)
    return LLM(**arguments | {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.1})


def answer(
    engine: Any,
    prompts: list[list[int]],
    extra_args: dict[str, bool] | None = None,
    watch: "Callable[[Any, Told], AbstractContextManager[None]] | None" = None,
) -> Told:
    """watch: what keeps the drafts; None: `watched`."""
    from vllm import SamplingParams  # noqa: PLC0415

    told = Told()
    sampling = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, extra_args=extra_args
    )
    (runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
    with (watch or watched)(runner, told):
        outputs = engine.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
    first = int(outputs[0].request_id.split("-")[0])
    told.drafted = [
        replace(each, request=int(str(each.request).split("-")[0]) - first) for each in told.drafted
    ]
    told.texts = [list(output.outputs[0].token_ids) for output in outputs]
    return told


@contextmanager
def watched(runner: Any, told: Told) -> Iterator[None]:
    """Keeps what the drafter scored and what was planted, for each request that had a token."""
    speculator = runner.speculator
    if not hasattr(speculator, "runtime"):
        yield
        return
    propose, score, scored = speculator.propose, speculator._score, []

    def scoring(hidden_BLD: torch.Tensor, best: Any) -> Any:
        scored.append((hidden_BLD.clone(), best))
        return score(hidden_BLD, best)

    def proposing(batch: Any, *given: Any, **named: Any) -> torch.Tensor:
        tokens_BN = propose(batch, *given, **named)
        hidden_BLD, best = scored.pop()
        runtime, slots_B = speculator.runtime, batch.idx_mapping
        planted = runtime.trees_at(slots_B, torch.full_like(slots_B, runtime.budget, dtype=torch.int64))
        for row, slot in enumerate(slots_B.tolist()):
            count = int(given[4][row])  # sampled just now
            if count == 0:
                continue
            nodes = int(planted.num_nodes_B[row])
            tokens_BLC, log_probs_BLC = map(speculator._by_block, (best.tokens_TC, best.log_probs_TC))
            told.drafted.append(
                Drafted(
                    runner.req_states.index_to_req_id[slot],
                    int(runner.req_states.total_len.gpu[slot] - runner.req_states.prompt_len.np[slot]),
                    hidden_BLD[row],
                    tokens_BLC[row],
                    log_probs_BLC[row],
                    planted.parents_BN[row, :nodes].tolist(),
                    tokens_BN[row, :nodes].tolist(),
                )
            )
        return tokens_BN

    speculator.propose, speculator._score = proposing, scoring
    try:
        yield
    finally:
        del speculator.propose, speculator._score


def run_trees(case: Case, others: dict[str, str]) -> dict[str, Told]:
    """A round of trees, one of chains, and one of trees with each checkpoint in the drafter's place."""
    engine = start(case, BUDGET)
    rounds = {"trees": answer(engine, case.prompts), "chains": answer(engine, case.prompts, CHAIN_REQUEST)}
    for name, ckpt in others.items():
        swapped = engine.collective_rpc("swap_drafter", args=(ckpt,))
        engine.reset_prefix_cache(reset_running_requests=True)
        rounds[name] = answer(engine, case.prompts)
        rounds[name].swapped = swapped
    return rounds


def run_gpu_runtime(
    case: Case,
    watch: "Callable[[Any, Told], AbstractContextManager[None]] | None" = None,
    reserved: int = 0,
) -> dict[str, Told]:
    """Trees once more, by the runtime of a GPU, interpreted."""
    import gpu_runtime_on_cpu  # noqa: PLC0415 - it imports vLLM

    gpu_runtime_on_cpu.install()
    return {"GPU's trees": answer(start(case, BUDGET, reserved), case.prompts[:2], watch=watch)}


def main(folder: Path) -> None:
    case, others = pickle.loads((folder / "case").read_bytes())
    runs = {
        "plain": lambda: {"plain": answer(start(case, 0), case.prompts)},
        "trees": lambda: run_trees(case, others),
        "chain": lambda: {"chain": answer(start(case, None), case.prompts)},
        "gpu": lambda: run_gpu_runtime(case),
    }
    run_apart(folder, runs)


def run_apart(folder: Path, runs: dict[str, Callable[[], dict[str, Told]]]) -> None:
    """Each in a process of its own; what it told is in a file of its name."""
    for name, run in runs.items():
        child = os.fork()
        if child == 0:
            (folder / f"{name}.told").write_bytes(pickle.dumps(run()))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"engine {name} failed")
