"""What engines with draft trees are given by tests, and what these are told (tests/tree_probe.py)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Drafts = Literal["own", "lifted", "oracle"]
Control = Literal[
    "none",
    "no compaction",
    "no depth positions",
    "no tree mask",
    "no permutation of tap states",
    "no recurrent commit",
    "no chain for penalties",
]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Round:
    """Requests that an engine is given at once."""

    prompts: Sequence[list[int]]
    max_tokens: int
    texts: Sequence[list[int]] = ()
    """Prompt and the target's own continuation, for drafts that are to be right; longer than max_tokens."""
    sampling: Sequence[dict[str, Any]] = ()
    """Of each request, beside greedy decoding; empty for all."""
    drafts: Drafts = "own"
    """The drafter's; the same with the text's tokens among the best; or an oracle's tree."""
    control: Control = "none"
    is_chain_only: bool = False
    preempted_every: int = 0
    """Steps after which all requests lose their caches; 0: never."""
    keeps_states: Literal["no", "of the end", "of the prompt"] = "no"
    """Compares caches with a fresh prefill's, which is what the second asks for."""


@dataclass(frozen=True)
class Spec:
    """One engine."""

    target: str
    ckpt: str
    budget: int | None
    rounds: dict[str, Round]
    serve: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments that a recipe does not have."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    adapts: bool = False
    """Each step verifies as much of its trees as serve.step_costs makes worth it."""
    has_gpu_runtime: bool = False
    """On a CPU: what a GPU runs, its kernels interpreted (gpu_runtime_on_cpu.py)."""


@dataclass(frozen=True)
class Verified:
    """One verification of one request's drafts."""

    request: int
    length: int
    """Of prompt and text before it."""
    parents: list[int]
    """Of the nodes that were planted."""
    tokens: list[int]
    num_drafts: int
    """So many of them were scheduled."""
    path: list[int]
    """Accepted nodes."""
    is_placeholder: bool = False
    """A prompt's last token, padded: nothing was drafted, and what was planted is of another time."""


@dataclass(frozen=True)
class States:
    """What the caches held of one request at the start of its last step, by layer."""

    token_ids: list[int]
    """Computed and committed."""
    target: Tensors
    drafter: Tensors


@dataclass
class Told:
    """What happened in a round."""

    texts: list[list[int]] = field(default_factory=list)
    logprobs: list[list[dict[int, float]]] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)
    emitted: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """How many tokens each request got in each step that gave it some."""
    drafted: dict[int, list[list[int]]] = field(default_factory=lambda: defaultdict(list))
    """What was drafted after each of those steps."""
    states: dict[int, States] = field(default_factory=dict)
    fresh_states: dict[int, States] = field(default_factory=dict)
    """After a prefill of the same tokens."""
    num_preempted: int = 0
    num_cached_tokens: int = 0
    """Of prompts, found in the prefix cache."""
    num_mixed_steps: int = 0
    """In which some rows were drafts and others a prompt's."""
    chosen: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each step with drafts: other rows, drafts that were scheduled, drafts that were verified."""
