"""Engines whose drafter is a DFlash2, in a process of their own; tells a test what they drafted.

Reads `case` in a folder, whose drafter has a selector, and other checkpoints of the same target.  Saves what
each engine answered and drafted in each round.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pairwise_probe import BUDGET, RESERVED, Told, answer, run_apart, run_gpu_runtime, start
from tree_targets import Case

from serve.engine import CHAIN_REQUEST


@dataclass(frozen=True)
class Selected:
    """For one request."""

    request: int | str
    committed: int
    """Tokens of its text so far, without the prompt."""
    hidden_LD: torch.Tensor
    tokens_LC: torch.Tensor
    logits_LC: torch.Tensor
    parents: list[int]
    """Of the planted tree's nodes."""
    tokens: list[int]
    """Theirs, or a chain's."""


@contextmanager
def watched(runner: Any, told: Told) -> Iterator[None]:
    """Keeps what the drafter selected from and what was planted, for each request that had a token."""
    speculator = runner.speculator
    if speculator is None:
        yield
        return
    propose, compute, computed = speculator.propose, speculator.model.compute_candidates, []

    def computing(hidden_TD: torch.Tensor) -> Any:
        tokens_TC, logits_TC = compute(hidden_TD)
        computed.append((hidden_TD.clone(), tokens_TC.clone(), logits_TC.clone()))
        return tokens_TC, logits_TC

    def proposing(batch: Any, *given: Any, **named: Any) -> torch.Tensor:
        tokens_BN = propose(batch, *given, **named)
        parts = computed.pop()
        hidden_BLD, tokens_BLC, logits_BLC = (
            part.unflatten(0, (-1, speculator.num_speculative_steps)) for part in parts
        )
        parents = planted_parents(speculator, batch.idx_mapping)
        for row, slot in enumerate(batch.idx_mapping.tolist()):
            if int(given[4][row]) == 0:  # sampled just now
                continue
            told.drafted.append(
                Selected(
                    runner.req_states.index_to_req_id[slot],
                    int(runner.req_states.total_len.gpu[slot] - runner.req_states.prompt_len.np[slot]),
                    hidden_BLD[row],
                    tokens_BLC[row],
                    logits_BLC[row],
                    parents[row],
                    tokens_BN[row, : len(parents[row])].tolist(),
                )
            )
        return tokens_BN

    speculator.propose, speculator.model.compute_candidates = proposing, computing
    try:
        yield
    finally:
        del speculator.propose, speculator.model.compute_candidates


def planted_parents(speculator: Any, slots_B: torch.Tensor) -> list[list[int]]:
    """vLLM's own speculator has chains alone."""
    if not hasattr(speculator, "runtime"):
        return [list(range(-1, speculator.num_speculative_steps - 1))] * len(slots_B)
    runtime = speculator.runtime
    planted = runtime.trees_at(slots_B, torch.full_like(slots_B, runtime.budget, dtype=torch.int64))
    counts = planted.num_nodes_B.tolist()
    return [row[:count] for row, count in zip(planted.parents_BN.tolist(), counts, strict=True)]


def run_trees(case: Case, others: dict[str, str]) -> dict[str, Told]:
    """A round of trees, one of chains, and one of trees with another DFlash2 in the drafter's place."""
    engine = start(case, BUDGET)
    rounds = {
        "trees": answer(engine, case.prompts, watch=watched),
        "chains": answer(engine, case.prompts, CHAIN_REQUEST, watched),
    }
    swaps = {name: engine.collective_rpc("swap_drafter", args=(ckpt,)) for name, ckpt in others.items()}
    engine.reset_prefix_cache(reset_running_requests=True)
    rounds["swapped"] = answer(engine, case.prompts, watch=watched)
    rounds["swapped"].swapped = [said for each in swaps.values() for said in each]
    return rounds


def main(folder: Path) -> None:
    case, others, few = pickle.loads((folder / "case").read_bytes())
    prompts, of_few = case.prompts, replace(case, ckpt=few)
    runs = {
        "plain": lambda: {"plain": answer(start(case, 0), prompts, watch=watched)},
        "trees": lambda: run_trees(case, others),
        "chain": lambda: {"chain": answer(start(case, None), prompts, watch=watched)},
        "reserved": lambda: {"reserved": answer(start(case, BUDGET, RESERVED), prompts, watch=watched)},
        "few": lambda: {"few": answer(start(of_few, BUDGET), prompts, watch=watched)},
        "gpu": lambda: run_gpu_runtime(case, watched),
    }
    run_apart(folder, runs)
