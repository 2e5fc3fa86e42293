"""Random traffic through an engine with draft trees for thousands of steps, and what it leaves behind.

    python tests/soak.py [--target hybrid|dense] [--steps N] [--budget N] [--seed N]

Requests come and go: long prompts in chunks, all ways to sample, several answers at once, aborts, lost
caches.  In the end nothing may be left of them: no cache block, no request, no memory.  Runs on a CPU and on
CUDA.
"""

# V=vocabulary  D=hidden size

import ctypes
import gc
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import load_file, save_file
from tree_targets import write_dense_case, write_hybrid_case

from recipes.schema import Serve, Target
from serve.engine import child_environment, engine_arguments

MODEL_LENGTH, MOST_REQUESTS, MOST_WAITING = 256, 6, 8
BATCHED_TOKENS = 150  # a long prompt takes two chunks, and not all trees fit whole
BLOCKS = {"hybrid": 40, "dense": 72}  # not enough for all requests at their longest
LOUD_TOKENS = (40, 41, 42, 43)  # A to D, where there is a tokenizer
FIRST_TOKEN = 10  # of random prompts; those before have meanings
_AT_ODDS = {  # together they may leave no token at all
    # vLLM's grammars allow no stop token where the text may not end
    "structured_outputs": ["allowed_token_ids", "bad_words", "stop_token_ids", "min_tokens"],
    "allowed_token_ids": ["bad_words", "stop_token_ids", "min_tokens"],
}
LEAST_ACCEPTED = 0.3  # drafts a verification: fewer would not be a test of trees
RSS_GROWTH_MIB, CUDA_GROWTH_MIB, OBJECTS_GROWTH = 24.0, 4.0, 8
MOST_SAMPLES, MOST_STEPS_OF_DRAINING = 200, 2000


class Kind(StrEnum):
    HYBRID = "hybrid"
    DENSE = "dense"


# The model


@dataclass(frozen=True)
class Model:
    kind: Kind
    target: Path
    ckpt: Path
    vocab: int

    @property
    def has_tokenizer(self) -> bool:
        return self.kind == Kind.HYBRID


def write_model(kind: Kind, folder: Path) -> Model:
    """The tests' target, its head replaced, and their untrained drafter."""
    case, eos = (write_hybrid_case(folder), 2) if kind == Kind.HYBRID else (write_dense_case(folder), 0)
    target = Path(shutil.copytree(case.target, folder / "loud"))
    return Model(kind, target, Path(case.ckpt), replace_head(target, eos))


def replace_head(target: Path, eos: int) -> int:
    """Makes a target of few words: one of LOUD_TOKENS almost always, or its end; the vocabulary's size."""
    for shard in target.glob("*.safetensors"):
        tensors = load_file(shard)
        if "lm_head.weight" not in tensors:
            continue
        head_VD = torch.zeros_like(tensors["lm_head.weight"])
        noise = torch.randn(3, head_VD.shape[1], generator=torch.Generator().manual_seed(0)).to(head_VD.dtype)
        loud = (
            12
            * head_VD.shape[1] ** -0.5
            * torch.stack([noise[0], -noise[0], noise[1], -noise[1], noise[2] / 2])
        )
        head_VD[[*LOUD_TOKENS, eos]] = loud
        shard.chmod(0o644)
        save_file(tensors | {"lm_head.weight": head_VD}, shard, metadata={"format": "pt"})
        return len(head_VD)
    raise AssertionError(f"{target} has no lm_head")


def guide_drafter() -> None:
    """Tells the untrained drafter which tokens the target uses, or hardly any draft would be accepted."""
    if not torch.cuda.is_available():
        import vllm.v1.worker.cpu_worker  # noqa: F401, PLC0415 - it patches what the next one imports
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator  # noqa: PLC0415 - the same

    compute = DraftModelSpeculator.compute_draft_logits

    def compute_draft_logits(speculator: Any, *args: Any) -> torch.Tensor:
        logits = compute(speculator, *args) * 0.03
        logits[:, LOUD_TOKENS[0] : LOUD_TOKENS[-1] + 1] += 10  # no index tensor: a CUDA graph cannot copy it
        return logits

    DraftModelSpeculator.compute_draft_logits = compute_draft_logits


# Traffic


class Traffic:
    """Draws what clients do; crowds and quiet times take turns."""

    def __init__(self, seed: int, model: Model) -> None:
        self._rng, self._model = random.Random(seed), model
        self._arrivals = 0.3

    def happens(self, probability: float) -> bool:
        return self._rng.random() < probability

    def arrives(self) -> bool:
        if self.happens(0.01):
            self._arrivals = self._rng.choice([0, 0.05, 0.1, 0.5])
        return self.happens(self._arrivals)

    def pick(self, names: list[str]) -> str:
        return self._rng.choice(names)

    def draw_prompt(self) -> list[int]:
        low, high = self._rng.choice([(1, 20), (1, 20), (20, 100), (100, MODEL_LENGTH - 1)])
        return self._rng.choices(range(FIRST_TOKEN, self._model.vocab - 1), k=self._rng.randint(low, high))

    def draw_sampling(self, room: int) -> Any:
        """vLLM's SamplingParams for at most so many tokens."""
        from vllm import SamplingParams  # noqa: PLC0415 - after the environment
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # noqa: PLC0415

        settings = self._draw_settings(room)
        if "structured_outputs" in settings:
            settings["structured_outputs"] = StructuredOutputsParams(**settings["structured_outputs"])
        return SamplingParams(**settings, output_kind=RequestOutputKind.FINAL_ONLY)

    def _draw_settings(self, room: int) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "max_tokens": room if self.happens(0.1) else self._rng.randint(1, min(room, 80)),
            "ignore_eos": self.happens(0.7),
            "detokenize": self._model.has_tokenizer,
            "temperature": 0.0,
        }
        if self.happens(0.7):
            settings |= {"temperature": self._rng.uniform(0.2, 2)} | self._some(0.3, self._heats())
        settings |= self._some(0.07, self._options())
        for limit, others in _AT_ODDS.items():
            if limit in settings:
                settings = {name: value for name, value in settings.items() if name not in others}
        return settings

    def _some(self, share: float, options: Iterator[dict[str, Any]]) -> dict[str, Any]:
        return {name: value for option in options if self.happens(share) for name, value in option.items()}

    def _heats(self) -> Iterator[dict[str, Any]]:
        yield {"top_k": self._rng.randint(1, 50)}
        yield {"top_p": self._rng.uniform(0.3, 1)}
        yield {"seed": self._rng.randrange(2**40)}
        yield {"n": self._rng.randint(2, 4)}

    def _options(self) -> Iterator[dict[str, Any]]:
        loud = list(LOUD_TOKENS)
        yield {"repetition_penalty": self._rng.uniform(1, 1.5)}
        yield {"frequency_penalty": self._rng.uniform(-1, 1)}
        yield {"presence_penalty": self._rng.uniform(-1, 1)}
        yield {"logprobs": self._rng.randint(0, 4)}
        yield {"allowed_token_ids": loud[: self._rng.randint(1, 4)]}
        yield {"stop_token_ids": [self._rng.choice(loud)], "min_tokens": 1}
        if self._model.has_tokenizer:
            yield {"stop": ["".join(self._rng.choices("ABCD", k=self._rng.randint(1, 4)))]}
            yield {"bad_words": [self._rng.choice("ABCD")]}
        if (
            self._model.has_tokenizer and torch.cuda.is_available()
        ):  # the mask's kernel fails in the interpreter
            yield {"structured_outputs": {"regex": "[ABC]{5,30}D"}}


# The engine


def start_engine(model: Model, budget: int) -> Any:
    from vllm import LLM  # noqa: PLC0415 - it reads the environment

    serve = Serve(
        max_model_len=MODEL_LENGTH,
        max_num_seqs=MOST_REQUESTS,
        max_num_batched_tokens=BATCHED_TOKENS,
        enforce_eager=not torch.cuda.is_available(),
        kv_cache_gib=1,
    )
    arguments = engine_arguments(Target(model=str(model.target), dtype="bfloat16"), serve, model.ckpt, budget)
    arguments |= {"num_gpu_blocks_override": BLOCKS[model.kind], "gpu_memory_utilization": 0.3}
    if torch.cuda.is_available():  # graphs, without the minutes of vLLM's compiler
        arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if model.kind == Kind.DENSE:
        arguments["block_size"] = 16  # a hybrid's are as large as its states
    return LLM(**arguments, skip_tokenizer_init=not model.has_tokenizer, disable_log_stats=False).llm_engine


class Inside:
    """What can be seen of an engine that runs in this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._scheduler = engine.engine_core.engine_core.scheduler
        (self._runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
        self._manager = self._scheduler.kv_cache_manager
        self._free_blocks = self._manager.block_pool.get_num_free_blocks()

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def is_idle(self) -> bool:
        return not self._scheduler.has_requests()

    def leftovers(self) -> dict[str, int]:
        """What an engine without requests must not have."""
        states, outputs = self._runner.req_states, self._engine.output_processor
        managers = self._manager.coordinator.single_type_managers
        return {
            "cache blocks taken": self._free_blocks - self._manager.block_pool.get_num_free_blocks(),
            "requests with cache blocks": sum(len(manager.req_to_blocks) for manager in managers),
            "requests in the scheduler": len(self._scheduler.requests) + self.num_running + self.num_waiting,
            "request slots taken": states.max_num_reqs - len(states.free_indices),
            "requests in the worker": len(states.req_id_to_index),
            "requests with outputs": len(outputs.request_states) + len(outputs.parent_requests),
            "names of requests": len(outputs.external_req_ids),
        }

    def count(self, name: str) -> int:
        """One of vLLM's counters, over all labels."""
        return sum(metric.value for metric in self._engine.get_metrics() if metric.name == f"vllm:{name}")


@dataclass(frozen=True)
class Footprint:
    rss_mib: float
    cuda_mib: float


def measure_footprint() -> Footprint:
    """Of memory in use: what is free is given back first."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    cuda = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return Footprint(psutil.Process().memory_info().rss / 2**20, cuda / 2**20)


def count_objects() -> int:
    """Live objects of our own classes: trees, walks, steps."""
    gc.collect()
    return sum(type(each).__module__.startswith("serve.") for each in gc.get_objects())


@dataclass
class Told:
    """What happened."""

    num_steps: int = 0
    seconds: float = 0.0
    came: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    """By us."""
    unanswered: int = 0
    tokens: int = 0
    mistakes: list[str] = field(default_factory=list)
    footprints: list[Footprint] = field(default_factory=list)
    num_objects: list[int] = field(default_factory=list)
    """After a third of the steps, and at the end."""


@dataclass(frozen=True)
class Open:
    """A request that has not ended."""

    number: str
    """The engine's own name for it."""
    params: Any


class Soak:
    """Drives the engine, one step at a time."""

    def __init__(self, engine: Any, traffic: Traffic, inside: Inside) -> None:
        self._engine, self._traffic, self._inside = engine, traffic, inside
        self._open: dict[str, Open] = {}
        self.told = Told()

    def step(self) -> None:
        if self._inside.num_waiting < MOST_WAITING and self._traffic.arrives():
            self._add()
        if self._open and self._traffic.happens(0.02):
            self._abort(self._traffic.pick(list(self._open)))
        if self._traffic.happens(0.005):
            self._take_caches()
        self._advance()

    def drain(self) -> None:
        """Lets the last requests end."""
        for _ in range(MOST_STEPS_OF_DRAINING):
            if self._inside.is_idle:
                break
            self._advance()
        self.told.unanswered = len(self._open)

    def _add(self) -> None:
        prompt = self._traffic.draw_prompt()
        params = self._traffic.draw_sampling(MODEL_LENGTH - len(prompt))
        name = f"{self.told.came}"
        number = self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self._open[name] = Open(number, params)
        self.told.came += 1

    def _abort(self, name: str) -> None:
        # not by name: of several answers at once vLLM 0.32 then keeps the parent for ever
        self._engine.abort_request([self._open.pop(name).number], internal=True)
        self.told.aborted += 1

    def _take_caches(self) -> None:
        """All running requests begin anew; a hybrid's blocks are too large to run out of."""
        self.told.preempted += self._inside.num_running
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _advance(self) -> None:
        for output in self._engine.step():
            self._close(output)

    def _close(self, output: Any) -> None:
        params = self._open.pop(output.request_id).params
        self.told.finished += 1
        self.told.tokens += sum(len(answer.token_ids) for answer in output.outputs)
        if not is_well_formed(output, params):
            self.told.mistakes.append(f"request {output.request_id}: {output.outputs} for {params}")


def is_well_formed(output: Any, params: Any) -> bool:
    """As many answers as were asked for, and each as long and of such tokens as it may be."""
    if len(output.outputs) != params.n:
        return False
    return all(
        0 < len(answer.token_ids) <= params.max_tokens
        and (len(answer.token_ids) == params.max_tokens or answer.finish_reason == "stop")
        and (params.allowed_token_ids is None or set(answer.token_ids) <= set(params.allowed_token_ids))
        for answer in output.outputs
    )


# The run


def soak(engine: Any, inside: Inside, traffic: Traffic, num_steps: int) -> Told:
    run = Soak(engine, traffic, inside)
    told = run.told
    start = time.monotonic()
    for step in show_steps(num_steps, inside):
        run.step()
        told.num_steps += 1
        if step % max(1, num_steps // MOST_SAMPLES) == 0:
            told.footprints.append(measure_footprint())
        if step + 1 in (num_steps // 3, num_steps):
            told.num_objects.append(count_objects())
    told.seconds = time.monotonic() - start
    run.drain()
    return told


def show_steps(num_steps: int, inside: Inside) -> Iterator[int]:
    columns = (
        TextColumn("steps"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[running]} running, {task.fields[waiting]} waiting"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=num_steps, running=0, waiting=0)
        for step in range(num_steps):
            yield step
            progress.update(task, advance=1, running=inside.num_running, waiting=inside.num_waiting)
            if not progress.console.is_terminal and (step + 1) % 500 == 0:  # a log gets no bars until the end
                progress.console.print(f"{step + 1} of {num_steps} steps")


def growth(told: Told) -> Footprint:
    """From the tenth of the steps that follows the first third to the last tenth: differences of medians."""
    size = max(1, len(told.footprints) // 10)
    first = len(told.footprints) // 3
    early, late = told.footprints[first : first + size], told.footprints[-size:]
    rss, cuda = (
        statistics.median(getattr(each, name) for each in late)
        - statistics.median(getattr(each, name) for each in early)
        for name in ("rss_mib", "cuda_mib")
    )
    return Footprint(rss, cuda)


@dataclass(frozen=True)
class Verdict:
    accepted: float
    """Drafts a verification."""
    preempted: int
    """By the engine or by us."""
    grown: Footprint
    leftovers: dict[str, int]


def judge(told: Told, inside: Inside) -> Verdict:
    verifications = max(1, inside.count("spec_decode_num_drafts"))
    accepted = inside.count("spec_decode_num_accepted_tokens") / verifications
    preempted = inside.count("num_preemptions") + told.preempted
    return Verdict(accepted, preempted, growth(told), inside.leftovers())


def find_faults(told: Told, verdict: Verdict) -> Iterator[str]:
    yield from told.mistakes[:5]
    if told.unanswered:
        yield f"{told.unanswered} requests were never answered"
    for what, count in verdict.leftovers.items():
        if count:
            yield f"left at the end: {count} {what}"
    if verdict.grown.rss_mib > RSS_GROWTH_MIB:
        yield f"the process grew by {verdict.grown.rss_mib:.1f} MiB, expected at most {RSS_GROWTH_MIB}"
    if verdict.grown.cuda_mib > CUDA_GROWTH_MIB:
        yield f"CUDA memory grew by {verdict.grown.cuda_mib:.1f} MiB, expected at most {CUDA_GROWTH_MIB}"
    if told.num_objects[1] - told.num_objects[0] > OBJECTS_GROWTH:
        yield f"live objects of ours after a third and at the end: {told.num_objects}"
    if verdict.accepted < LEAST_ACCEPTED:
        yield f"{verdict.accepted:.2f} drafts accepted a verification, too few for a test of trees"
    if not (verdict.preempted and told.aborted and told.finished):
        yield "too few steps: nothing was preempted, aborted or finished"


def show(told: Told, verdict: Verdict, console: Console) -> None:
    table = Table("soak", "", box=SIMPLE_HEAD)
    late = told.footprints[-1]
    for name, value in [
        ("steps", f"{told.num_steps}, {told.num_steps / told.seconds:.1f}/s"),
        ("requests", f"{told.came} came, {told.finished} finished, {told.aborted} aborted"),
        ("preempted", f"{verdict.preempted}"),
        ("tokens of finished requests", f"{told.tokens}"),
        ("accepted drafts a verification", f"{verdict.accepted:.2f}"),
        ("process", f"{late.rss_mib:.0f} MiB, grew by {verdict.grown.rss_mib:.1f}"),
        ("CUDA", f"{late.cuda_mib:.0f} MiB, grew by {verdict.grown.cuda_mib:.1f}"),
        ("live objects of ours", " -> ".join(map(str, told.num_objects))),
        ("left over", f"{sum(verdict.leftovers.values())}"),
    ]:
        table.add_row(name, value)
    console.print(table)


def enter_environment() -> None:
    """Starts this process anew in the engine's environment: some of it is read before Python's first line."""
    environment = {"VLLM_LOGGING_LEVEL": "ERROR"} | child_environment()
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is looked at from inside
    own, inherited = str(Path(__file__).parent.parent), environment.get("PYTHONPATH", "")
    if own not in inherited.split(os.pathsep):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [own, inherited]))
    environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = (
        "16"  # of 1024, each for a number of rows: grows for hours
    )
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def main(
    target: Annotated[
        Kind, typer.Option(help="Gated DeltaNet and attention, or attention alone.")
    ] = Kind.HYBRID,
    steps: Annotated[int, typer.Option(min=30, help="Engine steps before the last requests may end.")] = 5000,
    budget: Annotated[int, typer.Option(help="Nodes of a tree.")] = 15,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0,
) -> None:
    """Random traffic through an engine with draft trees; fails if anything is left of it."""
    enter_environment()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(target, Path(folder))
        guide_drafter()
        engine = start_engine(model, budget)
        inside = Inside(engine)
        told = soak(engine, inside, Traffic(seed, model), steps)
    verdict = judge(told, inside)
    console = Console(highlight=False)
    show(told, verdict, console)
    faults = list(find_faults(told, verdict))
    for fault in faults:
        console.print(f"[red bold]fault:[/] {fault}", soft_wrap=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
