"""The one place that touches the inside of an unmodified vLLM 0.32, on its V2 model runner.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`).  Nothing changes unless
`additional_config` holds a "draftsmith" section; everything is checked before anything is touched.

    {"draftsmith": {}}                                           on a CPU: what its build lacks (processor.py)
    {"draftsmith": {"capture": {"target_layer_ids": [1, 3]}}}    and capture of tap states (capturing.py)
    {"draftsmith": {"tree": {"num_slots": 7}}}                   and draft trees (trees.py)
    {"draftsmith": {"tree": {..., "reserved": 5}}}               that begin with the greedy chain's nodes
    {"draftsmith": {"tree": {..., "costs": {...}}}}              verified as far as is worth it (budgets.py)
    {"draftsmith": {"swap": {"config": {...}, ...}}}             and other drafters later (swapping.py)

Patched name: `vllm.v1.worker.worker_base.WorkerWrapperBase.init_device`, because device and runner are known
there and no request has been seen.  The patch goes when vLLM lets a plugin name a runner class.
"""
# ruff: noqa: PLC0415  (vLLM's modules are imported once vLLM calls: on a CPU its worker has to come first)

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from serve.engine import SECTION
from serve.seam.checks import WORKER_SIGNATURES, SeamError, check_signatures, check_version
from serve.served import Served

_had_trees: list[bool] = []
"""Not empty once an engine of this process was asked for trees."""


@dataclass(frozen=True)
class SeamOptions:
    """The "draftsmith" section of additional_config."""

    target_layer_ids: tuple[int, ...] | None = None
    """0-based layers whose output is captured, ascending; None captures nothing."""
    final_states: bool = False
    """What the target's head reads is captured too."""
    num_slots: int | None = None
    """Depth that the drafter works at under trees; None drafts vLLM's own chain."""
    chains: bool = False
    """Every tree is a chain: the one that a pairwise head prefers."""
    reserved: int = 0
    """Nodes of the greedy chain that come first in every tree."""
    costs: Mapping[str, Any] | None = None
    """Of steps, as `budgets.CostOptions` reads them; None verifies trees whole."""
    served: Served | None = None
    """What may be swapped; None: nothing."""


def read_options(additional_config: object) -> SeamOptions | None:
    """None if nothing was asked of us."""
    if not isinstance(additional_config, Mapping) or SECTION not in additional_config:
        return None
    section = additional_config[SECTION]
    unknown = sorted(set(section) - {"capture", "tree", "swap"})
    if unknown:
        raise SeamError(f"additional_config[{SECTION!r}]: expected capture, tree and swap, found {unknown}")
    capture = section.get("capture", {})
    return SeamOptions(
        target_layer_ids=tuple(capture["target_layer_ids"]) if capture else None,
        final_states=capture.get("final_states", False),
        num_slots=section["tree"]["num_slots"] if "tree" in section else None,
        chains=section.get("tree", {}).get("chains", False),
        reserved=section.get("tree", {}).get("reserved", 0),
        costs=section.get("tree", {}).get("costs"),
        served=Served(**section["swap"]) if "swap" in section else None,
    )


def register() -> None:
    """The plugin. Idempotent; imports of vLLM wait until it is vLLM that calls."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.init_device
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def init_device(wrapper: Any) -> None:
        options = read_options(wrapper.vllm_config.additional_config)
        if options is None:
            return original(wrapper)
        _refuse_mixture(options)
        _prepare(wrapper.vllm_config, options)
        original(wrapper)
        if options.num_slots is not None:
            from serve.seam.trees import confirm_trees

            confirm_trees(wrapper.worker.model_runner)
        if options.served is not None:
            from serve.seam.swapping import attach_swap

            attach_swap(wrapper.worker, options.served)
        if options.target_layer_ids is not None:
            from serve.seam.capturing import attach_capture

            attach_capture(wrapper.worker, options.target_layer_ids, final_states=options.final_states)

    WorkerWrapperBase.init_device = init_device


def _refuse_mixture(options: SeamOptions) -> None:
    """Trees change vLLM's registries for a whole process."""
    if options.num_slots is None and _had_trees:
        raise SeamError("an engine with draft trees ran in this process: start one without in a new process")
    if options.num_slots is not None:
        _had_trees.append(True)


def _prepare(vllm_config: Any, options: SeamOptions) -> None:
    import vllm

    check_version(vllm.__version__)
    check_signatures(WORKER_SIGNATURES)
    if vllm_config.device_config.device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        from serve.seam.processor import prepare_processor

        prepare_processor()
    if options.num_slots is not None:
        from serve.seam.budgets import CostOptions
        from serve.seam.trees import install_trees

        costs = None if options.costs is None else CostOptions.parse(options.costs)
        install_trees(
            vllm_config, options.num_slots, chains=options.chains, costs=costs, reserved=options.reserved
        )
