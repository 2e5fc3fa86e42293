"""Tokens a second by budget and by requests at once: chains, trees, and trees that know what rows cost.

    python tests/budget_rates.py CKPT --recipe RECIPE [--budget plain] [--budget stock] [--budget 15] ...
        [--requests 1,4,8,32] [--temperature 0] [--temperature 0.7] ... [--prompts 32] [--repeats 2]
        [--out RATES.json]
        [section.field=value ...]

`plain` decodes without the drafter, `stock` is vLLM's own chain of the drafter without its head, others are
`serve/run.py --budget`'s.  The engines share a GPU (serve.gpu_memory_utilization must leave room) and work in
turn, each answers the same prompts.  Graphs of all sizes that are met, no compilation; `auto` starts last and
alone, since it measures what steps cost.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from compare_objectives import TINY_RECIPE, make_requests
from engine_children import Child, running, serve_orders
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from typer import Option

from recipes.errors import run_command
from recipes.load import load_recipe
from recipes.manifest import write_json
from recipes.schema import Recipe
from serve.drafter_config import PAIRWISE_NAME
from serve.engine import AUTO, PLAIN_BUDGET, Budget, child_environment, engine_arguments, is_cuda, read_budget
from serve.generation import Request

PLAIN, STOCK = "plain", "stock"
DEFAULT = (STOCK, "chain", "7", "15", "31", AUTO)
IN_ENGINE = "--engine"
Run = dict[str, float]
"""Tokens a second, tokens a step of a request, milliseconds a step of the engine."""
Told = dict[str, dict[str, list[Run]]]
"""By budget, then by requests at once: a run for each repeat."""


def main(  # noqa: PLR0913, PLR0917
    ckpt: Annotated[Path, typer.Argument(help="A drafter's folder.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.field=value")] = None,
    recipe: Annotated[Path, Option(help="Whose target, engine and prompts.")] = TINY_RECIPE,
    budget: Annotated[list[str] | None, Option(help=f"{PLAIN}, {STOCK}, chain, a number, auto.")] = None,
    requests: Annotated[str, Option(help="At once.")] = "1,4,8,32",
    temperature: Annotated[list[float] | None, Option(help="Of the answers; may be repeated.")] = None,
    prompts: Annotated[
        int, Option(help="Of one request at a time; of more, at least four times these.")
    ] = 32,
    repeats: Annotated[int, Option(help="Timed ones, after a short one that warms up.")] = 2,
    out: Annotated[Path | None, Option(help="All runs, as JSON; from the first temperature on.")] = None,
) -> None:
    """Measure what budgets are worth at several numbers of requests at once."""
    budgets = list(dict.fromkeys(budget or DEFAULT))
    at_once = [int(each) for each in requests.split(",")]
    settings = [*(overrides or []), f"serve.max_num_seqs={max(at_once)}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bare = folder / "bare"
        shutil.copytree(ckpt.resolve(), bare, ignore=shutil.ignore_patterns(PAIRWISE_NAME.parent.name))
        children = {
            each: partial(
                start, folder, each, bare if each == STOCK else ckpt.resolve(), [str(recipe), *settings]
            )
            for each in sorted(budgets, key=AUTO.__eq__)
        }
        with all_running(children) as ready:
            for degrees in temperature or [0.0]:
                told = measure(ready, at_once, degrees, prompts, repeats)
                show(degrees, told, budgets, at_once)
                if out is not None:
                    keep(out, str(ckpt), degrees, told)


def start(folder: Path, budget: str, ckpt: Path, arguments: Sequence[str]) -> Child:
    command = [__file__, IN_ENGINE, budget, str(ckpt), *arguments]
    return Child(budget, command, folder / f"{budget}.log", child_environment())


@contextmanager
def all_running(children: Mapping[str, Callable[[], Child]]) -> Iterator[list[Child]]:
    """One that measures what steps cost begins when the others stand still."""
    together = [start() for name, start in children.items() if name != AUTO]
    with running(together):
        alone = [start() for name, start in children.items() if name == AUTO]
        with running(alone):
            yield together + alone


def measure(
    children: Sequence[Child], at_once: Sequence[int], temperature: float, prompts: int, repeats: int
) -> Told:
    told: Told = {child.name: {str(each): [] for each in at_once} for child in children}
    for number in at_once:
        for child in children:
            child.ask(f"run {number} {temperature} {number}")
    for _ in range(repeats):
        for number in at_once:
            for child in children:
                order = f"run {number} {temperature} {max(prompts, 4 * number)}"
                told[child.name][str(number)].append(child.ask(order))
    return told


def keep(out: Path, ckpt: str, temperature: float, told: Told) -> None:
    """Beside what other temperatures of the same checkpoint gave."""
    before = json.loads(out.read_text()) if out.exists() else {}
    runs = before["runs"] if before.get("ckpt") == ckpt else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {"ckpt": ckpt, "runs": runs | {f"{temperature:g}": told}})


def show(temperature: float, told: Told, budgets: Sequence[str], at_once: Sequence[int]) -> None:
    titles = [f"{each} at once" for each in at_once]
    table = Table(f"T = {temperature:g}: tokens a second (a step; ms)", *titles, box=MARKDOWN)
    for name in budgets:
        table.add_row(name, *(tell(told[name][str(each)]) for each in at_once))
    Console(width=150).print(table)


def tell(runs: Sequence[Run]) -> str:
    rate, length, ms = (median(run[name] for run in runs) for name in ("rate", "length", "ms"))
    return f"{rate:,.0f} ({length:.2f}; {ms:.2f})"


# An engine's process


class Bench:
    def __init__(self, budget: str, ckpt: Path, recipe: Recipe) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import EngineArgs, LLMEngine  # noqa: PLC0415 - once the environment is right

        own = {PLAIN: Budget(PLAIN_BUDGET), STOCK: Budget(None)}
        nodes, adapts = own[budget] if budget in own else read_budget(budget)
        arguments = engine_arguments(recipe.target, recipe.serve, ckpt, nodes, adapts=adapts)
        if is_cuda():
            arguments["compilation_config"] = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": list(
                    graph_sizes(arguments, recipe.serve.max_num_seqs, adapts=adapts)
                ),
            }
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments, use_tqdm_on_load=False))
        self._recipe, self._requests = recipe, make_requests(recipe)
        self._asked = 0

    def run(self, at_once: int, temperature: float, prompts: int) -> Run:
        """Answers so many prompts, so many at a time."""
        waiting = deque(self._requests[number % len(self._requests)] for number in range(prompts))
        tokens, taken, steps = {}, 0, 0
        begun = time.perf_counter()
        running = self._add(waiting, at_once, temperature)
        while running:
            outputs = self._engine.step()
            steps += 1
            for output in outputs:
                taken += len(output.outputs[0].token_ids) > tokens.get(output.request_id, 0)
                tokens[output.request_id] = len(output.outputs[0].token_ids)
            running -= sum(output.finished for output in outputs)
            running += self._add(waiting, at_once - running, temperature)
        seconds, total = time.perf_counter() - begun, sum(tokens.values())
        return {"rate": total / seconds, "length": total / taken, "ms": seconds / steps * 1e3}

    def _add(self, waiting: deque[Request], most: int, temperature: float) -> int:
        from vllm import SamplingParams  # noqa: PLC0415

        added = min(most, len(waiting))
        for _ in range(added):
            request = waiting.popleft()
            self._asked += 1
            sampling = SamplingParams(
                temperature=temperature,
                max_tokens=self._recipe.eval.max_tokens,
                seed=request.seed,
                detokenize=False,
            )
            prompt: Any = {"prompt_token_ids": list(request.token_ids)}
            self._engine.add_request(str(self._asked), prompt, sampling)
        return added


def graph_sizes(arguments: dict[str, Any], most: int, *, adapts: bool) -> Iterator[int]:
    """Rows of the steps that are met, ascending: of numbers of requests, or close ones where rows vary."""
    rows = 1 + arguments.get("speculative_config", {}).get("num_speculative_tokens", 0)
    if not adapts:
        yield from (requests * rows for requests in range(1, most + 1) if requests <= 8 or requests % 4 == 0)
        return
    size = 1
    while size < most * rows:
        yield size
        size += 1 if size < 8 else max(4, size // 16 // 4 * 4)
    yield most * rows


if __name__ == "__main__":
    if sys.argv[1:2] == [IN_ENGINE]:
        of_budget, path, of_recipe, *rest = sys.argv[2:]
        serve_orders(partial(Bench, of_budget, Path(path), load_recipe(Path(of_recipe), rest)))
    else:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(main)
        run_command(app)
