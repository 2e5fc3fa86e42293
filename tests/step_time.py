"""Median milliseconds a step: draft trees beside vLLM's own chain, on a cut of the flagship's widths.

    python tests/step_time.py [--budgets 15,31,63] [--batches 1,4,8] [--contexts 512,8192,32768] [--trace .]

Weights are dummies, so nothing is accepted and a step is one token a request; CUDA graphs are on.  Each
engine has a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from recipes.load import load_recipe
from recipes.schema import Serve, Target
from serve.checkpoint import published_config
from serve.engine import child_environment, engine_arguments

REPOSITORY = Path(__file__).parent.parent
CHAIN = "chain"
WARM_STEPS, TIMED_STEPS = 12, 60
FIRST_TOKEN, LAST_TOKEN = 1000, 200_000


def flagship_config(num_layers: int) -> dict[str, Any]:
    """Qwen3.6-27B's text model, cut to so many layers (the widths are those of its published config)."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": num_layers,
        "layer_types": [kinds[layer % 4] for layer in range(num_layers)],
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "mamba_ssm_dtype": "float32",
        "vocab_size": 248_320,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 248_044,
        "pad_token_id": 248_044,
    }


def write_models(folder: Path, num_layers: int) -> tuple[Path, Path]:
    """Configs without weights: the target's, and that of the published drafter with its taps moved in."""
    target = flagship_config(num_layers)
    drafter = load_recipe(REPOSITORY / "recipes" / "qwen36_dflash.yaml").drafter
    taps = [min(num_layers * tap // 64, num_layers - 2) for tap in drafter.target_layer_ids]
    configs = {
        "target": target,
        "drafter": published_config(drafter.model_copy(update={"target_layer_ids": taps}), target),
    }
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder / "target", folder / "drafter"


def measure_engine(
    folder: Path, budget: int | None, batches: list[int], contexts: list[int], trace: Path | None
) -> Iterator[tuple[int, int, float]]:
    """(batch, context, milliseconds a step) of one engine, in this process."""
    os.environ.update(child_environment())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM  # noqa: PLC0415 - it reads the environment

    serve = Serve(
        max_model_len=max(contexts) + 256,
        max_num_seqs=max(batches),
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.8,
    )
    arguments = engine_arguments(Target(model=str(folder / "target")), serve, folder / "drafter", budget)
    num_rows = [1 + arguments["speculative_config"]["num_speculative_tokens"], 16]
    sizes = sorted({batch * rows for batch in batches for rows in num_rows})
    engine = LLM(
        **arguments
        | {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sizes,
            },
        }
    )
    for context in contexts:
        for batch in batches:
            yield batch, context, time_steps(engine.llm_engine, batch, context)
    if trace is not None:
        trace_steps(engine.llm_engine, trace / f"{budget or CHAIN}.json")


def add_requests(engine: Any, batch: int, context: int) -> list[str]:
    from vllm import SamplingParams  # noqa: PLC0415

    sampling = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=250)
    names = [f"{context} {number}" for number in range(batch)]
    for number, name in enumerate(names):
        tokens = [FIRST_TOKEN + (7919 * (place + number)) % LAST_TOKEN for place in range(context)]
        engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
    return names


def start_decoding(engine: Any, batch: int, context: int) -> list[str]:
    """Until every request decodes and is warm."""
    names, lengths = add_requests(engine, batch, context), {}
    while min((lengths.get(name, 0) for name in names), default=0) < WARM_STEPS:
        lengths |= {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
    return names


def time_steps(engine: Any, batch: int, context: int) -> float:
    """The median: now and then a kernel is compiled for a size that is met for the first time."""
    import torch  # noqa: PLC0415

    names = start_decoding(engine, batch, context)
    torch.cuda.synchronize()
    ends = [time.perf_counter()]
    for _ in range(TIMED_STEPS):  # a step's call waits for the one before it
        engine.step()
        ends.append(time.perf_counter())
    engine.abort_request(names)
    return median(end - start for start, end in pairwise(ends)) * 1e3


def trace_steps(engine: Any, path: Path) -> None:
    """A few steps of one request as a Chrome trace, and where their time goes as text."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    names = start_decoding(engine, 1, 512)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(5):
            engine.step()
    engine.abort_request(names)
    table = profiled.key_averages().table(sort_by="self_cuda_time_total", row_limit=40)
    path.with_suffix(".txt").write_text(table)


def main(
    budgets: str = "15,31,63",
    batches: str = "1,4,8",
    contexts: str = "512,8192,32768",
    layers: int = 16,
    trace: Annotated[Path | None, typer.Option(help="Where a profile of each engine goes.")] = None,
) -> None:
    """Prints a table: the chain's milliseconds, and each tree's, with their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), layers)
        measured: dict[str, dict[tuple[int, int], float]] = {}
        for name in [CHAIN, *budgets.split(",")]:
            command = [
                sys.executable,
                __file__,
                "--engine",
                folder,
                name,
                batches,
                contexts,
                str(trace or ""),
            ]
            done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"engine {name} failed:\n{done.stderr[-4000:]}")
            rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
            measured[name] = {(batch, context): ms for batch, context, ms in rows}
            print(name, measured[name], flush=True)
    show(measured)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}


def show(measured: dict[str, dict[tuple[int, int], float]]) -> None:
    table = Table("batch", "context", *measured, box=SIMPLE_HEAD, title="milliseconds a step")
    for at, chain in measured[CHAIN].items():
        cells = [f"{by_engine[at]:.2f} ({by_engine[at] / chain:.2f}x)" for by_engine in measured.values()]
        table.add_row(*map(str, at), *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        where, name, of_batches, of_contexts, traced = sys.argv[2:]
        each = measure_engine(
            Path(where),
            None if name == CHAIN else int(name),
            [int(batch) for batch in of_batches.split(",")],
            [int(context) for context in of_contexts.split(",")],
            Path(traced) if traced else None,
        )
        for result in each:
            print(json.dumps(result), flush=True)
    else:
        typer.run(main)
