"""Breaks one part of an engine with draft trees, for tests to notice; or takes its requests' caches.

On a CPU the runtime does a part in a method of its own, on a GPU by one kernel for all layers.
"""

# B=requests  L=slots  R=rows of a request

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from tree_rounds import Control, Round, Told

from serve.tree import ROOT
from serve.tree_attention import pack_sees, spread_words

Broken = Iterator[tuple[Any, str, Callable]]
"""What takes the place of what."""


@contextmanager
def preempting(scheduler: Any, given: Round, told: Told) -> Iterator[None]:
    """vLLM's own way to take the caches of running requests, which then begin anew with what they have."""
    schedule = scheduler.schedule
    steps = itertools.count(1)

    def scheduling(*args: Any) -> Any:
        if given.preempted_every and next(steps) % given.preempted_every == 0:
            told.num_preempted += len(scheduler.running)
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(*args)

    with patch.object(scheduler, "schedule", scheduling):
        yield


@contextmanager
def broken(control: Control, runner: Any) -> Iterator[None]:
    """One part of the engine does nothing."""
    with ExitStack() as stack:
        if control != "none":
            runtime = runner.speculator.runtime
            for owner, name, replacement in breakages(control, runtime):
                stack.enter_context(patch.object(owner, name, replacement))
        yield


def breakages(control: Control, runtime: Any) -> Broken:
    """Every control there is but "none"."""
    if control == "no depth positions":
        yield runtime, "move_positions", leave_positions(runtime.move_positions)
    elif control == "no permutation of tap states":
        yield runtime, "tidy_states", lambda *_: None
    elif control == "no chain for penalties":
        yield runtime, "admit", admit_to_trees(runtime.admit)
    elif runtime.device.type == "cuda":
        yield from breakages_by_kernel(control)
    else:
        yield from breakages_by_method(control, runtime)


def breakages_by_method(control: Control, runtime: Any) -> Broken:
    if control == "no compaction":
        yield runtime, "tidy_caches", lambda _step: None
    elif control == "no tree mask":
        yield runtime, "begin", see_all_before(runtime)
    elif control == "no recurrent commit":
        for layer in runtime.recurrent_layers:
            yield layer, "commit", commit_none(layer.commit)


def breakages_by_kernel(control: Control) -> Broken:
    from serve.seam import cuda_runtime  # noqa: PLC0415 - it imports vLLM

    if control == "no compaction":
        yield cuda_runtime, "compact_layers_", lambda *_: None
    elif control == "no tree mask":
        yield cuda_runtime, "lay_out_step", lay_out_chains(cuda_runtime.lay_out_step)
    elif control == "no recurrent commit":
        yield cuda_runtime, "commit_layers_", commit_no_path(cuda_runtime.commit_layers_)


def leave_positions(move: Callable) -> Callable:
    def moving(batch: Any, positions: torch.Tensor) -> torch.Tensor:
        moved = move(batch, positions)
        return positions if moved is positions else moved.copy_(positions)

    return moving


def see_all_before(runtime: Any) -> Callable:
    begin = runtime.begin

    def beginning(batch: Any) -> None:
        begin(batch)
        step = runtime.step_of(batch)
        if step is not None:
            step.trees.sees_BRR[:] = torch.ones_like(step.trees.sees_BRR).tril()

    return beginning


def lay_out_chains(lay_out: Callable) -> Callable:
    def laying_out(*args: Any) -> None:
        lay_out(*args)
        query_starts_B1, laid_out = args[3], args[-1]
        rows = laid_out.words_PR.shape[1]
        sees_1RR = torch.ones(1, rows, rows, dtype=torch.bool, device=laid_out.words_PR.device).tril()
        laid_out.words_PR[:] = pack_sees(sees_1RR)
        has_tree_B1 = (laid_out.num_rows_P > 0)[: len(query_starts_B1) - 1, None]
        words_BR = laid_out.words_PR[: len(has_tree_B1)].where(has_tree_B1, 0)
        laid_out.words_T.copy_(spread_words(words_BR, query_starts_B1, len(laid_out.words_T)))

    return laying_out


def commit_none(commit: Callable) -> Callable:
    def committing(walk: Any) -> None:
        none = torch.zeros_like(walk.num_accepted_B)
        commit(replace(walk, path_BL=torch.full_like(walk.path_BL, ROOT), num_accepted_B=none))

    return committing


def commit_no_path(commit_layers: Callable) -> Callable:
    def committing(path_BL: torch.Tensor, num_accepted_B: torch.Tensor, *others: Any) -> None:
        commit_layers(torch.full_like(path_BL, ROOT), torch.zeros_like(num_accepted_B), *others)

    return committing


def admit_to_trees(admit: Callable) -> Callable:
    return lambda slot, **_: admit(slot, chain_only=False)
