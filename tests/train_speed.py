"""A training step at the flagship's widths on one GPU: tokens a second, utilisation, memory, where time goes.

    python tests/train_speed.py [--tokens 4096] [--anchors 512] [--cap-gib 47.5] [--kernels]
                                [section.field=value ...]
    python tests/train_speed.py --sweep     lengths and numbers of anchors instead, a line for each
    ... --recipe RECIPE --sequences 64      another recipe's drafter, at its target's widths
    ... --tiny                              small widths, which a CPU takes too: whether all of it works

Tap states and tokens are random, in host memory, read and packed beside the step as in training; weights are
random.  Utilisation: the model's FLOPs (`count_flops`), recomputation left out, by the GPU's peak in bf16.
Parts of a step: kernels of one more step under torch's profiler, each by what it was launched in.
"""

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from data.shards import Sequence
from recipes.footprint import count_drafter_parameters, key_size, query_size
from recipes.load import load_recipe
from recipes.schema import Drafter, Recipe
from recipes.target_config import find_config, read_target_config
from train import step as train_step
from train.drafter import DFlashDrafter
from train.feed import Feed, MicroBatch, read_ahead
from train.pairwise_companion import begin_companion
from train.ranks import Ranks, joined_ranks
from train.step import Learner
from train.target_parts import TargetParts
from train.zero import TORCH_DTYPES, start_engine

FLAGSHIP = Path(__file__).parent.parent / "recipes" / "qwen36_dflash.yaml"
PEAK_TFLOPS = {"H200": 989.5, "H100": 989.5, "A100": 312.0, "A6000": 154.8}  # dense bf16, as NVIDIA says
NUM_SEQUENCES = 3
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Scale:
    hidden_size: int
    vocab_size: int
    overrides: tuple[str, ...]
    """Of the flagship's recipe."""
    sweep: tuple[tuple[int, int], ...]
    """Tokens of a sequence and its anchors."""


LARGE = Scale(
    5120,
    248_320,
    (),
    (
        *((4096, anchors) for anchors in (64, 128, 256)),
        *((tokens, 512) for tokens in (1024, 2048, 4096, 8192, 16384, 32768)),
    ),
)
TINY = Scale(
    48,
    256,
    (
        "drafter.num_hidden_layers=2",
        "drafter.layer_types=[sliding_attention, full_attention]",
        "drafter.sliding_window=24",
        "drafter.block_size=4",
        "drafter.mask_token_id=7",
        "drafter.intermediate_size=96",
        "drafter.num_attention_heads=4",
        "drafter.num_key_value_heads=2",
        "drafter.head_dim=16",
        "train.offload_optimizer=false",
    ),
    ((64, 8), (64, 16), (128, 16)),
)


def scale_of(recipe: Recipe) -> Scale:
    """Its target's; without a sweep."""
    target = recipe.target
    config = read_target_config(find_config(target.model, target.revision))
    return Scale(config.hidden_size, config.vocab_size, (), ())


# What is trained on


@dataclass(frozen=True)
class RandomShards:
    """As `data.shards.Shards`."""

    sequences: list[Sequence]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self.sequences[index]


def make_shards(scale: Scale, recipe: Recipe, tokens: int, device: torch.device) -> RandomShards:
    width = len(recipe.drafter.target_layer_ids) * scale.hidden_size
    with_final = recipe.train.objective.needs_final_states

    def draw_states(size: int) -> torch.Tensor:
        """Made on the device, which is sooner done with it."""
        return torch.randn(tokens - 1, size, dtype=torch.bfloat16, device=device).cpu()

    return RandomShards(
        [
            Sequence(
                torch.randint(scale.vocab_size, (tokens,), dtype=torch.int32),
                torch.ones(tokens, dtype=torch.bool),
                draw_states(width),
                draw_states(scale.hidden_size) if with_final else None,
            )
            for _ in range(NUM_SEQUENCES)
        ]
    )


def start(recipe: Recipe, scale: Scale, ranks: Ranks) -> Learner:
    train = recipe.train
    like = {"device": ranks.device, "dtype": TORCH_DTYPES[train.precision]}
    embedding, head = (torch.randn(scale.vocab_size, scale.hidden_size, **like) * 0.02 for _ in range(2))
    drafter = DFlashDrafter(recipe.drafter, scale.hidden_size)
    drafter.recompute_layers = train.activation_checkpointing
    drafter.fuse(train.compile)
    parts = TargetParts(embedding, head)
    engine = start_engine(drafter, train, ranks)
    return Learner(engine, parts, train, ranks, begin_companion(recipe, parts, ranks))


def take_step(learner: Learner, micro_batches: list[MicroBatch]) -> None:
    """Of the pairwise head too, where one learns beside the drafter."""
    learner.learn(micro_batches, LEARNING_RATE, None if learner.companion is None else LEARNING_RATE)


# What a step computes


def count_flops(micro: MicroBatch, drafter: Drafter, scale: Scale) -> float:
    """Multiply-adds count twice; of a matrix with weights to learn forward, and twice that backward.

    The frozen head costs its input's gradient alone, `fc` its weights' alone.  Attention counts the pairs
    that see each other (2 products forward, 4 backward); norms, rotations and the optimizer count nothing.
    """
    batch, hidden = micro.batch, scale.hidden_size
    rows, context, supervised = len(batch.input_ids_Q), len(batch.taps_SE), int(batch.supervised_AK.sum())
    queries, keys = query_size(drafter), key_size(drafter)
    of_row = 2 * queries + 2 * keys + 3 * drafter.intermediate_size
    learnt = drafter.num_hidden_layers * hidden * (rows * of_row + context * 2 * keys)
    fc = context * len(drafter.target_layer_ids) * hidden * hidden
    pairs = sum(count_pairs(micro, drafter, kind) for kind in drafter.layer_types)
    return 6 * learnt + 4 * fc + 4 * supervised * hidden * scale.vocab_size + 12 * pairs * queries


def count_pairs(micro: MicroBatch, drafter: Drafter, kind: str) -> int:
    """(Block row, row that it sees) in a layer of that kind; of one document a sequence."""
    positions = micro.batch.block_positions_Q.view(-1, drafter.block_size)
    anchors, slots = positions[:, :1], torch.arange(drafter.block_size)
    if kind == "full_attention":
        return int((anchors.expand_as(positions) + drafter.block_size).sum())
    reach = (drafter.sliding_window - 1 - slots).clamp(min=0)
    own = (slots + 1).clamp(max=drafter.sliding_window)
    return int((torch.minimum(anchors, reach) + own).sum())


# Steps by the clock


@dataclass(frozen=True)
class Timed:
    """A step, medians."""

    seconds: float
    wait_seconds: float
    """Of these, until its data was there."""
    allocated_gib: float
    reserved_gib: float
    """The most, both."""


def time_steps(learner: Learner, coming: Iterator[list[MicroBatch]], warm_ups: int, steps: int) -> Timed:
    seconds, waits = [], []
    for _ in range(warm_ups + steps):
        asked = time.perf_counter()
        micro_batches = next(coming)
        waits.append(time.perf_counter() - asked)
        take_step(learner, micro_batches)
        synchronize()
        seconds.append(time.perf_counter() - asked)
    return Timed(median(seconds[warm_ups:]), median(waits[warm_ups:]), *most_gib())


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def most_gib() -> tuple[float, float]:
    """Allocated, and reserved for it."""
    if not torch.cuda.is_available():
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30


def process_gib() -> float:
    """Of the GPU, by everything of this process."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


# Where a step's time goes

ATTENTION, LAYERS, FC, HEAD, OPTIMIZER, OTHER = (
    "attention",
    "the layers but attention",
    "fc",
    "head",
    "optimizer",
    "other: copies, sums of gradients",
)
ATTENTION_CALLS = "_KernelAttention", "scaled_dot_product", "ScaledDotProduct"  # the latter on a CPU
DRAFTER_RANGE, OPTIMIZER_RANGE = "the drafter's forward pass", "the optimizer's step"


@dataclass(frozen=True)
class Spent:
    """By a kernel; on a CPU, by an operator itself."""

    name: str
    ms: float
    part: str


def profile_step(learner: Learner, micro_batches: list[MicroBatch]) -> list[Spent]:
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    drafter, optimizer = (DFlashDrafter, "forward", DRAFTER_RANGE), (train_step, "take_step", OPTIMIZER_RANGE)
    with named(*drafter), named(*optimizer), profile(activities=activities, record_shapes=True) as profiler:
        take_step(learner, micro_batches)
        synchronize()
    taps_width = micro_batches[0].batch.taps_SE.shape[1]
    return list(attribute(profiler.events(), taps_width, on_gpu))


@contextmanager
def named(owner: Any, attribute: str, name: str) -> Iterator[None]:
    """A range of the profiler for each call."""
    call = getattr(owner, attribute)

    def in_range(*given: Any, **also_given: Any) -> Any:
        with record_function(name):
            return call(*given, **also_given)

    setattr(owner, attribute, in_range)
    try:
        yield
    finally:
        setattr(owner, attribute, call)


def attribute(events: Iterable[FunctionEvent], taps_width: int, on_gpu: bool) -> Iterator[Spent]:
    """Kernels hang from the operator that launched them; what hangs from none is OTHER."""
    on_device: Counter[tuple[str, float]] = Counter()  # name and microseconds
    claimed: Counter[tuple[str, float]] = Counter()
    for event in events:
        if event.is_user_annotation:  # which a GPU's timeline repeats
            continue
        if event.device_type != DeviceType.CPU:
            on_device[event.name, event.time_range.elapsed_us()] += 1
            continue
        part = part_of(event, taps_width)
        if not on_gpu:
            yield Spent(event.name, event.self_cpu_time_total / 1e3, part)
        for kernel in event.kernels:
            claimed[kernel.name, kernel.duration] += 1
            yield Spent(kernel.name, kernel.duration / 1e3, part)
    yield from (Spent(name, us / 1e3, OTHER) for name, us in (on_device - claimed).elements())


def part_of(event: FunctionEvent, taps_width: int) -> str:
    """By the operator's name and shapes, and by those it was called in: autograd's are named too."""
    callers = [each.name for each in with_callers(event)]

    def within(name: str) -> bool:
        return any(name in caller for caller in callers)

    if any(map(within, ATTENTION_CALLS)):
        return ATTENTION
    if within("_FrozenHead"):
        return HEAD
    if within(OPTIMIZER_RANGE):
        return OPTIMIZER
    if event.name == "aten::mm" and any(taps_width in shape for shape in event.input_shapes):
        return FC
    if within("AccumulateGrad"):  # DeepSpeed's sums and buckets
        return OTHER
    return LAYERS if within(DRAFTER_RANGE) or within("evaluate_function") else OTHER


def with_callers(event: FunctionEvent | None) -> Iterator[FunctionEvent]:
    while event is not None:
        yield event
        event = event.cpu_parent


def split_step(timed: Timed, spent: Iterable[Spent]) -> dict[str, float]:
    """Milliseconds by part, which add up to the step; kernels beside others count against `no kernel`."""
    parts = dict.fromkeys((ATTENTION, LAYERS, FC, HEAD, OPTIMIZER, OTHER), 0.0)
    for each in spent:
        parts[each.part] += each.ms
    parts["waiting for data"] = timed.wait_seconds * 1e3
    return parts | {"no kernel": timed.seconds * 1e3 - sum(parts.values())}


# What is shown


def measure(
    learner: Learner, recipe: Recipe, scale: Scale, tokens: int, steps: int, lists_kernels: bool
) -> None:
    """Prints a table, and a line of JSON."""
    shards = make_shards(scale, recipe, tokens, learner.ranks.device)
    coming = feed(learner, shards, recipe, range(steps + 4))
    timed = time_steps(learner, coming, 2, steps)
    num_waits = count_waits(learner, next(coming))
    micro_batches = next(coming)
    spent = profile_step(learner, micro_batches)
    flops = sum(count_flops(micro, recipe.drafter, scale) for micro in micro_batches)
    told = tell(timed, recipe, scale, tokens, flops)
    told |= {"waits": f"{num_waits} times a step has the host wait for the device"}
    parts = split_step(timed, spent)
    show(["", ""], told.items())
    show(["ms", "of a step"], ((f"{ms:,.1f}", part) for part, ms in parts.items()))
    if lists_kernels:
        show(["ms", "calls", "kernel"], longest_kernels(spent))
    print(json.dumps({"device": device_name(), **told, "parts_ms": parts}))


def feed(learner: Learner, shards: RandomShards, recipe: Recipe, steps: range) -> Iterator[list[MicroBatch]]:
    """As `train.loop` does."""
    pins = torch.cuda.is_available()
    reader = Feed(shards, recipe.train, recipe.drafter, 0, 1, pins=pins)  # type: ignore[arg-type]
    return read_ahead(lambda step: learner.send_first(reader.read_step(step)), steps)


def count_waits(learner: Learner, micro_batches: list[MicroBatch]) -> int:
    """Of one step on a GPU, as torch notices them."""
    if not torch.cuda.is_available():
        take_step(learner, micro_batches)
        return 0
    with warnings.catch_warnings(record=True) as noticed:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        take_step(learner, micro_batches)
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in noticed)


def tell(timed: Timed, recipe: Recipe, scale: Scale, tokens: int, flops: float) -> dict[str, str]:
    name = device_name()
    peak = next((rate for part, rate in PEAK_TFLOPS.items() if part in name), None)
    rate = flops / timed.seconds / 1e12
    used = "" if peak is None else f", {rate / peak:.1%} of {peak:g}"
    parameters = count_drafter_parameters(recipe.drafter, scale.hidden_size)
    return {
        "parameters": f"{parameters / 1e6:,.0f} M",
        "step": f"{timed.seconds * 1e3:,.0f} ms",
        "tokens a second": f"{recipe.train.sequences_per_step * tokens / timed.seconds:,.0f}",
        "TFLOP/s": f"{rate:,.0f}{used}",
        "memory": (
            f"{timed.allocated_gib:.1f} GiB allocated and {timed.reserved_gib:.1f} reserved at most,"
            f" {process_gib():.1f} the process"
        ),
    }


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def longest_kernels(spent: Iterable[Spent], most: int = 10) -> list[tuple[str, str, str]]:
    ms, calls = Counter(), Counter()
    for each in spent:
        ms[each.name] += each.ms
        calls[each.name] += 1
    return [(f"{total:,.1f}", str(calls[name]), name[:60]) for name, total in ms.most_common(most)]


SWEEP = ["tokens", "anchors", "ms a step", "waiting", "tokens/s", "us a token", "us a block row", "peak GiB"]
SWEEP_STEPS = 3  # timed, after as many: the first pin memory for what is read ahead


def sweep(learner: Learner, scale: Scale, load: Callable[[int], Recipe]) -> None:
    """A line for each length and number of anchors; microseconds are per context token and per block row."""
    lines = []
    for tokens, anchors in scale.sweep:
        recipe = load(anchors)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        shards = make_shards(scale, recipe, tokens, learner.ranks.device)
        coming = feed(learner, shards, recipe, range(2 * SWEEP_STEPS))
        timed = time_steps(learner, coming, SWEEP_STEPS, SWEEP_STEPS)
        sequences, block_size = recipe.train.sequences_per_step, recipe.drafter.block_size
        context, rows = sequences * tokens, sequences * anchors * block_size
        us = timed.seconds * 1e6
        ms = f"{us / 1e3:,.0f}", f"{timed.wait_seconds * 1e3:,.0f}"
        rates = f"{1e6 * context / us:,.0f}", f"{us / context:.2f}", f"{us / rows:.2f}"
        lines.append((f"{tokens:,}", str(anchors), *ms, *rates, f"{timed.allocated_gib:.1f}"))
    show(SWEEP, lines)


def show(titles: list[str], lines: Iterable[tuple[str, ...]]) -> None:
    table = Table(*titles, show_header=any(titles), box=None)
    for line in lines:
        table.add_row(*line)
    Console(width=110).print(table)


def main(  # noqa: PLR0913, PLR0917
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.field=value")] = None,
    recipe: Annotated[Path, typer.Option(help="Whose drafter is trained.")] = FLAGSHIP,
    tokens: int = 4096,
    anchors: int = 512,
    sequences: Annotated[int, typer.Option(help="Of a step.")] = 4,
    steps: Annotated[int, typer.Option(help="Timed after two more.")] = 6,
    cap_gib: Annotated[float | None, typer.Option(help="Memory that torch may take.")] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Also the ten that take longest.")] = False,
    sweep_all: Annotated[bool, typer.Option("--sweep", help="Lengths and numbers of anchors.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small widths.")] = False,
) -> None:
    scale = TINY if tiny else LARGE if recipe == FLAGSHIP else scale_of(load_recipe(recipe, overrides or []))

    def load(num_anchors: int) -> Recipe:
        own = [f"train.num_anchors={num_anchors}", f"train.sequences_per_step={sequences}"]
        return load_recipe(recipe, [*scale.overrides, *own, *(overrides or [])])

    if cap_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_gib * 2**30 / total)
    with joined_ranks() as ranks:
        learner = start(load(anchors), scale, ranks)
        if sweep_all:
            sweep(learner, scale, load)
        else:
            measure(learner, load(anchors), scale, tokens, steps, kernels)


if __name__ == "__main__":
    typer.run(main)
