"""A recipe with its target's shape, and what a phase of it needs: rows of bytes, each with its arithmetic.

Sequences are taken as long as the recipe lets them be, so every number is "at most".
"""

import math
from dataclasses import dataclass
from functools import cached_property

from recipes.footprint import (
    DTYPE_BYTES,
    GIB,
    SERVED_NODES,
    Target,
    count_adapter_parameters,
    count_drafter_parameters,
    tap_bytes,
)
from recipes.schema import Recipe, Rounds

CUDA_GIB = 2.0
"""Assumed: context, NCCL, cuBLAS workspaces and what the allocator cannot use again."""
CUDA_PROCESS_GIB = 3.0
"""Assumed: Python, torch and CUDA's libraries in host memory."""
CPU_PROCESS_GIB = 1.5
"""Assumed: the same of an engine or a trainer on a CPU (measured: 1.6 with its cache, 0.9)."""


@dataclass(frozen=True)
class Row:
    what: str
    formula: str
    num_bytes: float

    @property
    def gib(self) -> float:
        return self.num_bytes / GIB


@dataclass(frozen=True)
class Phase:
    """One resource in one phase."""

    name: str
    rows: tuple[Row, ...]
    field: str
    """Of the recipe: how much there is."""
    there_is_gib: float | None
    """Its value; None: nobody said, nothing is checked."""
    share: float = 1.0
    """Of it that may be used."""
    notes: tuple[str, ...] = ()

    @property
    def need_gib(self) -> float:
        return sum(row.gib for row in self.rows)

    @property
    def room_gib(self) -> float | None:
        return None if self.there_is_gib is None else self.there_is_gib * self.share

    @property
    def room(self) -> str:
        return self.field if self.share == 1.0 else f"{self.field} x {self.share:g}"

    @property
    def fits(self) -> bool:
        return self.room_gib is None or self.need_gib <= self.room_gib


@dataclass(frozen=True)
class Job:
    """A recipe with its target's shape, and what follows from both."""

    recipe: Recipe
    target: Target
    is_fetched: bool
    """Whether the target comes from the hub and lies on this machine's disk too."""

    @property
    def on_gpus(self) -> bool:
        return self.recipe.hardware.gpus > 0

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.recipe.target.dtype]

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        return self.recipe.data.longest

    @property
    def tap_bytes(self) -> int:
        """Of a token, as captured: the final states with them, where they are asked for."""
        return captured_bytes(self.recipe, self.target.hidden_size)

    @cached_property
    def num_parameters(self) -> int:
        """Of the drafter."""
        return count_drafter_parameters(self.recipe.drafter, self.target.hidden_size)

    @property
    def num_trained(self) -> int:
        """Of these, or of adapters beside them."""
        lora = self.recipe.train.lora
        if lora is None:
            return self.num_parameters
        return count_adapter_parameters(self.recipe.drafter, self.target.hidden_size, lora)

    @property
    def num_frozen(self) -> int:
        """Of the drafter, where adapters are trained in its place."""
        return self.num_parameters if self.recipe.train.lora else 0

    @property
    def train_ranks(self) -> int:
        return max(1, count_train_gpus(self.recipe))

    @property
    def engine_ranks(self) -> int:
        """Among which an engine is split; on a CPU they share one memory."""
        return self.recipe.serve.tensor_parallel_size if self.on_gpus else 1

    @property
    def nodes(self) -> int:
        return max(self.recipe.eval.tree_budget, self.recipe.rounds.budget, SERVED_NODES)

    @property
    def engines_on_a_gpu(self) -> int:
        """Of the data phase; they share GPUs where these are too few."""
        return math.ceil(
            self.recipe.data.engines * self.engine_ranks / max(1, count_engine_gpus(self.recipe))
        )

    def describe_pairwise(self, rank: int) -> tuple[str, int]:
        """A published pairwise head in bf16, in words and bytes: `serve.drafter_config.pairwise_tensors`."""
        vectors, size = 2 * self.target.vocab_size + self.target.hidden_size + 1, DTYPE_BYTES["bfloat16"]
        return f"{vectors:,} vectors x {rank} x {size} bytes", vectors * rank * size

    @property
    def is_ahead(self) -> bool:
        """A round's data is made while the round before it is trained on."""
        return self.recipe.rounds.ahead and self.recipe.rounds.count > 1

    @property
    def takes_turns(self) -> bool:
        """Engines and trainer leave the same GPUs to each other, round after round."""
        return self.on_gpus and self.recipe.rounds.count > 1 and not self.is_ahead

    @property
    def engines_sleep(self) -> bool:
        """While the trainer has the GPUs.  Those of the first round and of the last are ended instead."""
        return self.takes_turns and self.recipe.rounds.engines_sleep

    @property
    def shard_tokens(self) -> int:
        """Of one shard: it is closed by the sequence that fills it."""
        data = self.recipe.data
        return min(data.num_prompts * self.longest, data.shard_tokens - 1 + self.longest)


def captured_bytes(recipe: Recipe, hidden_size: int) -> int:
    """Of a token's states."""
    dtype_bytes = DTYPE_BYTES[recipe.target.dtype]
    final = hidden_size * dtype_bytes if recipe.data.final_states else 0
    return tap_bytes(recipe.drafter, hidden_size, dtype_bytes) + final


def count_engine_gpus(recipe: Recipe) -> int:
    """All, unless engines have some to themselves."""
    own = recipe.rounds.engine_gpus
    return recipe.hardware.gpus if own is None else len(own)


def count_train_gpus(recipe: Recipe) -> int:
    """Those that engines do not have to themselves."""
    return recipe.hardware.gpus - len(recipe.rounds.engine_gpus or [])


def share_out_rounds(rounds: Rounds) -> list[float]:
    """Where each round's share of the data ends, of 1; each begins where the one before it ends."""
    first = rounds.first_share if rounds.first_share is not None and rounds.count > 1 else 1 / rounds.count
    rest = (1 - first) / max(1, rounds.count - 1)
    return [first + rest * number for number in range(rounds.count)]


def host_phase(job: Job, name: str, rows: list[Row], notes: tuple[str, ...] = ()) -> Phase:
    return Phase(name, tuple(rows), "hardware.host_gib", job.recipe.hardware.host_gib, notes=notes)


def cuda_processes(what: str, count: int) -> Row:
    """Their host memory."""
    return Row(what, f"assumed: {count} x {CUDA_PROCESS_GIB:g} GiB", count * CUDA_PROCESS_GIB * GIB)


def millions(count: int) -> str:
    return f"{count / 1e6:,.{0 if count >= 1e8 else 2}f} M parameters"


def times(count: int, what: str) -> str:
    return "" if count == 1 else f"{count} {what} x "
