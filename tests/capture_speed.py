"""What capture costs, and what sleep frees, on a cut of the flagship's widths; needs a GPU.

    python tests/capture_speed.py [--layers 32] [--requests 32] [--prompt 256] [--new 256] [--repeats 2]
        [--shard 768 --shards 2] [--decoding plain] [--decoding trees]

Of plain engines, then of engines with trees, one with capture and one without are started together and
work in turn.  "with shards" is the data phase's own work until the last shard is generated: states compared
with a prefill's, looked through, written and on the disk.  "the last one": how long its writing takes then.
Weights are dummies, so nothing is accepted and a tree's step is one token a request.
"""

import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from engine_children import Child, running, serve_orders
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from step_time import FIRST_TOKEN, LAST_TOKEN, write_models

from recipes.load import load_recipe
from recipes.schema import Recipe
from serve.checkpoint import read_drafter_config
from serve.drafter_config import expected_tensors, parse_config
from serve.engine import child_environment

REPOSITORY = Path(__file__).parent.parent
FLAGSHIP = REPOSITORY / "recipes" / "qwen36_dflash.yaml"
DECODINGS = ("plain", "trees")
GRAPH_SIZES = [1, 32, 512]


@dataclass(frozen=True)
class Work:
    """What each engine does, again and again."""

    requests: int
    """At once."""
    prompt: int
    new: int
    of_shard: int
    """Requests; the flagship's shards hold some 400,000 tokens."""
    shards: int


def read_recipe(folder: Path, work: Work) -> Recipe:
    drafter = parse_config(read_drafter_config(folder / "drafter"), "drafter")
    settings = {
        "output_dir": folder / "run",
        "target.model": folder / "target",
        "target.load_format": "dummy",
        "drafter.target_layer_ids": list(drafter.target_layer_ids),
        "data.sampling": f"{{temperature: 0.0, max_tokens: {work.new}}}",
        "data.check_sequences": 0,  # transformers would need the weights
        "data.check_cosine": 0.9,  # made-up weights are not what is measured here
        "serve.tensor_parallel_size": 1,
        "serve.max_num_seqs": work.requests,
        "serve.max_model_len": work.prompt + work.new + 64,
        "data.max_prompt_tokens": work.prompt,
        "serve.kv_cache_gib": 8,
        "serve.gpu_memory_utilization": 0.3,
        "rounds.count": 3,
    }
    return load_recipe(FLAGSHIP, [f"{name}={value}" for name, value in settings.items()])


def write_weights(ckpt: Path) -> None:
    shapes = expected_tensors(read_drafter_config(ckpt))
    weights = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(weights, ckpt / "model.safetensors", metadata={"format": "pt"})


# An engine's process


class Bench:
    def __init__(self, folder: Path, kind: str, work: Work) -> None:
        from data.groups import Rendered  # noqa: PLC0415 - once the environment is right
        from data.shard_maker import ShardMaker  # noqa: PLC0415
        from serve import generation  # noqa: PLC0415

        self._recipe, self._work, self._ckpt = read_recipe(folder, work), work, folder / "drafter"
        self._captures = kind.endswith("captured")
        _start_as_benched(generation, captures=self._captures)
        shards = folder / kind.replace(", ", "-")
        shards.mkdir()
        self._shards = shards
        drafting = generation.Drafting(self._ckpt, 15) if kind.startswith("trees") else None
        self._maker = ShardMaker(self._recipe, shards, shards / "spool", lambda *_: None, drafting)
        self._count = 0
        self._rendered, self._request = Rendered, generation.Request

    def answer(self) -> tuple[float, int]:
        """(seconds, emitted tokens) of generating."""
        start = time.perf_counter()
        answers = self._answer_all()
        return time.perf_counter() - start, sum(len(each.token_ids) for each in answers)

    def make(self) -> tuple[float, int, float]:
        """The same of shards, as `data.engines` has them made; they are removed.

        The third is how many seconds the last one is still being written, with nothing beside it.
        """
        start = time.perf_counter()
        with ThreadPoolExecutor(1) as writer:
            written: list[Future[Any]] = []
            left = deque(range(self._work.shards))
            while left or self._maker.num_open:
                if left and self._maker.num_open < 2 and self._maker.wants_more:
                    self._maker.begin(left.popleft(), self._prompts())
                for shard in self._maker.step():
                    written.append(writer.submit(self._maker.write, shard))
            seconds = time.perf_counter() - start
            made = [each.result() for each in written]
            last = time.perf_counter() - start - seconds
        for each in made:
            (self._shards / each.entry.file).unlink()
        return seconds, sum(each.emitted_tokens for each in made), last

    def warm(self) -> None:
        """As many requests as run at once, and where states are captured a shard of them, too."""
        of_shard, shards = self._work.of_shard, self._work.shards
        self._work = replace(self._work, of_shard=self._work.requests, shards=1)
        self.answer()
        if self._captures:
            self.make()
        self._work = replace(self._work, of_shard=of_shard, shards=shards)

    def swap(self) -> float:
        """Seconds; the second time nothing is compiled."""
        return [_seconds(lambda: self._maker.swap(self._ckpt)) for _ in range(2)][-1]

    def nap(self) -> dict[str, float | bool]:
        """Memory and seconds, of the second time: the first sleep also has to find host memory.

        Alike: the share of texts that are as they were before.
        """
        before = self._answer_all()
        seconds = {}
        for _ in range(2):
            seconds |= {"awake_gib": used_gib(), "sleep_s": _seconds(self._maker.sleep)}
            seconds |= {"asleep_gib": used_gib(), "wake_s": _seconds(self._maker.wake)}
        self._count -= 1
        after = self._answer_all()
        alike = [a.token_ids == b.token_ids for a, b in zip(before, after, strict=True)]
        return seconds | {"alike": sum(alike) / len(alike)}

    def _answer_all(self) -> list[Any]:
        requests = [self._request(prompt.token_ids, prompt.seed) for prompt in self._prompts()]
        return self._maker._engine.answer(requests, self._recipe.data.sampling_of("").choose(0))

    def _prompts(self) -> list[Any]:
        """Others each time."""
        self._count += 1
        rows = range(self._count * self._work.of_shard, (self._count + 1) * self._work.of_shard)
        return [
            self._rendered(
                sha256(str(row).encode()).hexdigest(),
                [
                    FIRST_TOKEN + (7919 * (place + row * 31)) % LAST_TOKEN
                    for place in range(self._work.prompt)
                ],
            )
            for row in rows
        ]


def _start_as_benched(generation: Any, *, captures: bool) -> None:
    """Graphs for the sizes that are met, no compilation, no tokenizer; without capture nothing of it."""
    full = generation.engine_arguments
    more = {
        "skip_tokenizer_init": True,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": GRAPH_SIZES,
        },
    }
    generation.engine_arguments = lambda *given, **named: full(*given, **named) | more
    if not captures:
        generation.capture_options = lambda *_, **_named: {generation.SECTION: {}}
        call = generation.CapturingEngine._call_workers
        generation.CapturingEngine._call_workers = lambda self, method, *rest: (
            [] if method.endswith("_capture") else call(self, method, *rest)
        )


def _seconds(act: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def used_gib() -> float:
    """Of the whole GPU, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


# The parent


def start(folder: Path, kind: str, work: Work) -> Child:
    command = [__file__, "--engine", str(folder), kind, json.dumps(asdict(work))]
    return Child(kind, command, folder / f"{kind}.log", child_environment())


def main(
    layers: int = 32,
    requests: int = 32,
    prompt: int = 256,
    new: int = 256,
    repeats: Annotated[int, typer.Option(help="Of each, once it is warm.")] = 2,
    shard: Annotated[int | None, typer.Option(help="Requests of a shard; left out: 2 x requests.")] = None,
    shards: Annotated[int, typer.Option(help="That are made in a row.")] = 4,
    decoding: Annotated[list[str] | None, typer.Option(help="One or both of plain and trees.")] = None,
) -> None:
    """Prints tokens a second with capture and without, and memory awake and asleep."""
    work = Work(requests, prompt, new, shard or 2 * requests, shards)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder, layers)
        write_weights(folder / "drafter")
        for each in decoding or DECODINGS:
            without, captured = (start(folder, kind, work) for kind in (each, f"{each}, captured"))
            with running([without, captured]):
                show(measure([without, captured], repeats), each, work)
                without.end()  # memory is told of the whole GPU
                if each == "trees":
                    show_turns(captured.ask("swap"), captured.ask("nap"))


def show_turns(swap_s: float, nap: dict[str, float]) -> None:
    print(f"swap under CUDA graphs: {swap_s:.2f} s")
    print(
        "asleep {asleep_gib:.2f} GiB, awake {awake_gib:.2f}; falls asleep in {sleep_s:.2f} s, wakes in"
        " {wake_s:.2f}; {alike:.0%} of the texts as before".format(**nap)
    )


@dataclass(frozen=True)
class Measured:
    """Medians."""

    rate: float
    """Tokens a second."""
    last_s: float


def measure(children: Sequence[Child], repeats: int) -> dict[tuple[str, str], Measured]:
    """Of (kind, order); in turn, so that a slow minute is everyone's."""
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for child in children:
        child.ask("warm")
    for _ in range(repeats):
        for child in children:
            for order in ("answer", "make") if child.name.endswith("captured") else ("answer",):
                seconds, tokens, *last = child.ask(order)
                print(
                    f"{child.name}, {order}: {tokens / seconds:,.0f} tokens a second", *last, file=sys.stderr
                )
                samples.setdefault((child.name, order), []).append((tokens / seconds, sum(last)))
    return {key: Measured(*map(median, zip(*values, strict=True))) for key, values in samples.items()}


def show(measured: dict[tuple[str, str], Measured], decoding: str, work: Work) -> None:
    table = Table(
        "tokens a second", "without capture", "with", "", "with shards", "", "the last one", box=SIMPLE_HEAD
    )
    without = measured[decoding, "answer"].rate
    captured, made = (measured[f"{decoding}, captured", order] for order in ("answer", "make"))
    cells = [
        cell for each in (captured, made) for cell in (f"{each.rate:,.0f}", f"{each.rate / without:.3f}")
    ]
    table.add_row(decoding, f"{without:,.0f}", *cells, f"{made.last_s:.1f} s")
    Console(width=110).print(table)
    print(
        f"{work.of_shard} requests a shard, {work.requests} at once: {work.prompt} tokens of prompt,"
        f" {work.new} new"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        place, decoding, given = sys.argv[2:]
        serve_orders(partial(Bench, Path(place), decoding, Work(**json.loads(given))))
    else:
        typer.run(main)
