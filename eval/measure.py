"""Measures a drafter through the served engine: acceptance, speed, and whether greedy text stays the same.

    python eval/measure.py (--ckpt CKPT | --url U) --suite S --out report.json [--recipe R] [options]

--ckpt starts the plain server, then the chain's, where a tree budget is given that of draft trees, and one
for each baseline, and gives all the same prompts and seeds; --url measures whatever drafts there, as a chain.
Ends with report.json, a table, and points for TensorBoard if asked.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from eval.compose import ChainRun, Findings, PlainRun, TreeRun, compose_report, log_path
from eval.gpu_memory import read_used_gib
from eval.job import Job, Options, make_job
from eval.points import curve_points, write_curves
from eval.progress import Phases, show_phases
from eval.report import Decoding, Report, write_report
from eval.served import (
    DecodingT,
    OnDone,
    Pass,
    identify_server,
    run_pass,
    run_reference,
    run_tree_pass,
    warm_up,
)
from eval.table import print_report
from recipes.errors import UserError, run_command
from serve.baselines import Baseline
from serve.engine import PLAIN_BUDGET
from serve.plan import Plan
from serve.server import serving


def main(  # noqa: PLR0913, PLR0917 - a command line's options
    out: Annotated[Path, Option(help="Where report.json goes.")],
    url: Annotated[str | None, Option(help="A running server, as http://127.0.0.1:8000.")] = None,
    ckpt: Annotated[Path | None, Option(help="The drafter's checkpoint folder, served for this.")] = None,
    recipe: Annotated[Path | None, Option(help="Target, engine and eval settings of this recipe.")] = None,
    suite: Annotated[str | None, Option(help="Held-out prompts; this and the next eight: eval.*.")] = None,
    num_prompts: Annotated[int | None, Option(help="How many prompts of the suite.")] = None,
    max_tokens: Annotated[int | None, Option(help="Longest response.")] = None,
    temperature: Annotated[list[float] | None, Option(help="May be repeated; the first leads.")] = None,
    concurrency: Annotated[int | None, Option(help="Requests at a time.")] = None,
    seed: Annotated[int | None, Option(help="Of the first prompt; the next has one more.")] = None,
    tree_budget: Annotated[int | None, Option(help="Nodes of draft trees to measure too; 0: none.")] = None,
    thinking: Annotated[
        bool | None,
        Option("--thinking/--no-thinking", help="enable_thinking of each request; left out: none is sent."),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        Option(help="Of vLLM's own: ngram, mtp, eagle3=CHECKPOINT; ngram:K for K drafts. May be repeated."),
    ] = None,
    tensorboard: Annotated[Path | None, Option(help="Add points to the curves in this folder.")] = None,
    step: Annotated[int | None, Option(help="Their step; left out: the checkpoint's.")] = None,
    simulated: Annotated[float | None, Option(help="Training's acceptance length, for accept_gap.")] = None,
) -> None:
    """Measure acceptance and speed of a drafter on held-out prompts."""
    overrides = {
        "suite": suite,
        "num_prompts": num_prompts,
        "max_tokens": max_tokens,
        "temperatures": temperature,
        "concurrency": concurrency,
        "seed": seed,
        "tree_budget": tree_budget,
        "thinking": None if thinking is None else ("on" if thinking else "off"),
        "baselines": baseline,
    }
    job = make_job(Options(url, ckpt, recipe, out, overrides, tensorboard, step, simulated))
    report = measure(job)
    write_report(job.out, report)
    if job.tensorboard and job.step is not None:
        write_curves(job.tensorboard, job.step, curve_points(report, job.simulated))
    console = Console()
    print_report(report, console)
    console.print(f"report: {job.out}", soft_wrap=True, highlight=False)


def measure(job: Job) -> Report:
    """Runs every pass; writes nothing but the servers' logs."""
    gpu_gib: dict[str, float] = {}
    with show_phases() as phases:
        if job.plan is None:
            assert job.url is not None, "a job has a URL or a plan"
            found = Findings(run_chain(job, phases, job.url))
        else:
            found = measure_servers(job, phases, partial(start_server, job, phases, job.plan, gpu_gib))
    return compose_report(job, found, phases.seconds, gpu_gib)


def measure_servers(job: Job, phases: Phases, start: Callable[..., AbstractContextManager[str]]) -> Findings:
    """One server after the other; `start` is `start_server` but for what it serves."""
    with start("plain", PLAIN_BUDGET) as url:
        plain = run_plain(job, phases, url)
    with start("chain", None) as url:
        chain = run_chain(job, phases, url)
    tree, baselines = None, {}
    if job.settings.tree_budget:
        with start("tree", job.settings.tree_budget) as url:
            tree = run_tree(job, phases, url, depth=chain.server.num_drafts)
    for baseline in job.baselines:
        with start(baseline.name, PLAIN_BUDGET, baseline) as url:
            baselines[baseline.name] = run_baseline(job, phases, url, baseline)
    return Findings(chain, plain, tree, baselines)


@contextmanager
def start_server(
    job: Job,
    phases: Phases,
    plan: Plan,
    gpu_gib: dict[str, float],
    name: str,
    budget: int | None,
    baseline: Baseline | None = None,
) -> Iterator[str]:
    """The server of this budget (as `serving` reads it) or baseline, its start a phase of its own.

    What it takes of the GPUs goes to `gpu_gib`, where it can be read.
    """
    ckpt = None if budget == PLAIN_BUDGET else plan.ckpt
    before = read_used_gib()
    with ExitStack() as stack:
        with phases.phase(f"start {name}"):
            server = serving(plan.target, plan.serve, ckpt, budget, log_path(job, name), baseline)
            url = stack.enter_context(server)
        yield url
        used = read_used_gib()
    if before is not None and used is not None:
        gpu_gib[name] = used - before


def run_plain(job: Job, phases: Phases, url: str) -> PlainRun:
    passes = run_passes(job, phases, url, "plain", partial(run_pass, url, job.prompts, job.settings))
    if 0.0 not in job.settings.temperatures:
        return PlainRun(passes, reference=None)
    with phases.phase("plain, T = 0, for comparison", total=len(job.prompts)) as on_done:
        return PlainRun(passes, run_reference(url, job.prompts, job.settings, on_done))


def run_chain(job: Job, phases: Phases, url: str) -> ChainRun:
    server = identify_server(url)
    if server.num_drafts == 0:
        raise UserError(
            f"the server at {url} decodes plainly: start it with a drafter (serve/run.py --ckpt CKPT)"
        )
    one_pass = partial(run_pass, url, job.prompts, job.settings)
    return ChainRun(server, run_passes(job, phases, url, "chain", one_pass))


def run_tree(job: Job, phases: Phases, url: str, depth: int) -> TreeRun:
    """`depth` is that of the drafter: the chain's drafts."""
    found, budget = identify_server(url).num_drafts, job.settings.tree_budget
    assert found == budget, f"asked for trees of {budget} nodes, the engine drafts {found}"
    one_pass = partial(run_tree_pass, url, job.prompts, job.settings, depth)
    return TreeRun(run_passes(job, phases, url, "tree", one_pass))


def run_baseline(job: Job, phases: Phases, url: str, baseline: Baseline) -> list[Pass[Decoding]]:
    found = identify_server(url).num_drafts
    assert found == baseline.num_drafts, f"asked for {baseline.num_drafts} drafts, the engine makes {found}"
    return run_passes(job, phases, url, baseline.name, partial(run_pass, url, job.prompts, job.settings))


def run_passes(
    job: Job, phases: Phases, url: str, name: str, one_pass: Callable[[float, OnDone], Pass[DecodingT]]
) -> list[Pass[DecodingT]]:
    """One Pass per temperature, in the settings' order."""
    with phases.phase(f"warm up {name}"):
        warm_up(url)
    passes = []
    for temperature in job.settings.temperatures:
        with phases.phase(f"{name}, T = {temperature:g}", total=len(job.prompts)) as on_done:
            passes.append(one_pass(temperature, on_done))
    return passes


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
