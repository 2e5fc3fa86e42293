"""A training step at the flagship's widths on one GPU: tokens a second, utilisation, memory, where time goes.

    python tests/train_speed.py [--tokens 4096] [--anchors 512] [--cap-gib 47.5] [section.field=value ...]

Tap states and tokens are random, in host memory, read and packed beside the step as in training; weights are
random.  Utilisation: the model's FLOPs (`count_flops`), recomputation left out, by the GPU's peak in bf16.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from data.shards import Sequence
from recipes.footprint import count_drafter_parameters, key_size, query_size
from recipes.load import load_recipe
from recipes.schema import Drafter, Recipe
from train import step as train_step
from train.drafter import DFlashDrafter
from train.feed import Feed, MicroBatch, read_ahead
from train.ranks import Ranks, joined_ranks
from train.step import Learner
from train.target_parts import TargetParts
from train.zero import TORCH_DTYPES, start_engine

FLAGSHIP = Path(__file__).parent.parent / "recipes" / "qwen36_dflash.yaml"
HIDDEN, VOCABULARY = 5120, 248_320
PEAK_TFLOPS = {"H200": 989.5, "H100": 989.5, "A100": 312.0, "A6000": 154.8}  # dense bf16, as NVIDIA says
NUM_SEQUENCES = 3


@dataclass(frozen=True)
class RandomShards:
    """As `data.shards.Shards`."""

    sequences: list[Sequence]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self.sequences[index]


def make_shards(drafter: Drafter, tokens: int) -> RandomShards:
    width = len(drafter.target_layer_ids) * HIDDEN
    return RandomShards(
        [
            Sequence(
                torch.randint(VOCABULARY, (tokens,), dtype=torch.int32),
                torch.ones(tokens, dtype=torch.bool),
                torch.randn(tokens - 1, width, dtype=torch.bfloat16),
            )
            for _ in range(NUM_SEQUENCES)
        ]
    )


def count_flops(micro: MicroBatch, drafter: Drafter) -> float:
    """Multiply-adds count twice; of a matrix with weights to learn forward, and twice that backward.

    The frozen head costs its input's gradient alone, `fc` its weights' alone.  Attention counts the pairs
    that see each other (2 products forward, 4 backward); norms, rotations and the optimizer count nothing.
    """
    batch = micro.batch
    rows, context, supervised = len(batch.input_ids_Q), len(batch.taps_SE), int(batch.supervised_AK.sum())
    queries, keys = query_size(drafter), key_size(drafter)
    of_row = 2 * queries + 2 * keys + 3 * drafter.intermediate_size
    learnt = drafter.num_hidden_layers * HIDDEN * (rows * of_row + context * 2 * keys)
    fc = context * len(drafter.target_layer_ids) * HIDDEN * HIDDEN
    pairs = sum(count_pairs(micro, drafter, kind) for kind in drafter.layer_types)
    return 6 * learnt + 4 * fc + 4 * supervised * HIDDEN * VOCABULARY + 12 * pairs * queries


def count_pairs(micro: MicroBatch, drafter: Drafter, kind: str) -> int:
    """(Block row, row that it sees) in a layer of that kind; of one document a sequence."""
    positions = micro.batch.block_positions_Q.view(-1, drafter.block_size)
    anchors, slots = positions[:, :1], torch.arange(drafter.block_size)
    if kind == "full_attention":
        return int((anchors.expand_as(positions) + drafter.block_size).sum())
    reach = (drafter.sliding_window - 1 - slots).clamp(min=0)
    own = (slots + 1).clamp(max=drafter.sliding_window)
    return int((torch.minimum(anchors, reach) + own).sum())


class Clock:
    """Milliseconds on the GPU of calls that are wrapped, summed by name."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        call = getattr(owner, attribute)

        def timed(*given: Any, **named: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            try:
                return call(*given, **named)
            finally:
                end.record()
                self._spans.setdefault(name, []).append((start, end))

        setattr(owner, attribute, timed)

    def read(self) -> dict[str, float]:
        torch.cuda.synchronize()
        sums = {name: sum(a.elapsed_time(b) for a, b in spans) for name, spans in self._spans.items()}
        self._spans.clear()
        return sums


@dataclass(frozen=True)
class Measured:
    seconds: float
    """A step; the median."""
    tokens: int
    flops: float
    wait_seconds: float
    parts_ms: dict[str, float]
    reserved_gib: float
    process_gib: float


def measure(recipe: Recipe, ranks: Ranks, tokens: int, steps: int) -> Measured:
    learner = start(recipe, ranks)
    feed = Feed(make_shards(recipe.drafter, tokens), recipe.train, recipe.drafter, 0, 1, pins=True)  # type: ignore[arg-type]
    clock = Clock()
    clock.wrap(train_step, "take_step", "optimizer")
    clock.wrap(Learner, "_score", "forward, the head's gradient with it")
    seconds, waits, flops, parts = [], [], 0.0, {}
    asked = time.perf_counter()
    for number, micro_batches in enumerate(read_ahead(feed.read_step, range(steps))):
        begun = time.perf_counter()
        learner.learn(micro_batches, 1e-5)
        torch.cuda.synchronize()
        waits.append(begun - asked)
        seconds.append(time.perf_counter() - asked)
        parts, asked = clock.read(), time.perf_counter()
        if number == 0:
            flops = sum(count_flops(micro, recipe.drafter) for micro in micro_batches)
    return Measured(
        median(seconds[2:]),
        recipe.train.sequences_per_step * tokens,
        flops,
        median(waits[2:]),
        parts,
        torch.cuda.max_memory_reserved() / 2**30,
        process_gib(),
    )


def start(recipe: Recipe, ranks: Ranks) -> Learner:
    dtype = TORCH_DTYPES[recipe.train.precision]
    like = {"device": ranks.device, "dtype": dtype}
    embedding, head = (torch.randn(VOCABULARY, HIDDEN, **like) * 0.02 for _ in range(2))
    drafter = DFlashDrafter(recipe.drafter, HIDDEN)
    drafter.recompute_layers = recipe.train.activation_checkpointing
    return Learner(
        start_engine(drafter, recipe.train, ranks), TargetParts(embedding, head), recipe.train, ranks
    )


def process_gib() -> float:
    """Of the GPU, by everything of this process."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.field=value")] = None,
    tokens: int = 4096,
    anchors: int = 512,
    sequences: Annotated[int, typer.Option(help="Of a step.")] = 4,
    steps: Annotated[int, typer.Option(help="Timed after two more.")] = 6,
    cap_gib: Annotated[float | None, typer.Option(help="Memory that torch may take.")] = None,
) -> None:
    """Prints a table, and a line of JSON."""
    own = [f"train.num_anchors={anchors}", f"train.sequences_per_step={sequences}"]
    recipe = load_recipe(FLAGSHIP, [*own, *(overrides or [])])
    if cap_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_gib * 2**30 / total)
    with joined_ranks() as ranks:
        measured = measure(recipe, ranks, tokens, steps + 2)
    show(measured, recipe)


def show(measured: Measured, recipe: Recipe) -> None:
    name = torch.cuda.get_device_name()
    peak = next((rate for part, rate in PEAK_TFLOPS.items() if part in name), None)
    rate = measured.flops / measured.seconds / 1e12
    used = "" if peak is None else f", {rate / peak:.1%} of {peak:g}"
    told = {
        "parameters": f"{count_drafter_parameters(recipe.drafter, HIDDEN) / 1e6:,.0f} M",
        "step": f"{measured.seconds * 1e3:,.0f} ms, {measured.wait_seconds * 1e3:,.1f} waiting for data",
        "tokens a second": f"{measured.tokens / measured.seconds:,.0f}",
        "TFLOP/s": f"{rate:,.0f}{used}",
        **{name: f"{ms:,.0f} ms" for name, ms in measured.parts_ms.items()},
        "memory": f"{measured.reserved_gib:.1f} GiB reserved at most, {measured.process_gib:.1f} the process",
    }
    table = Table(show_header=False, box=None)
    for what, text in told.items():
        table.add_row(what, text)
    Console(width=110).print(table)
    print(json.dumps({"device": name, **told}))


if __name__ == "__main__":
    typer.run(main)
