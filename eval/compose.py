"""Puts a job and what its passes found together into a Report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eval.branching import find_branching
from eval.job import Job
from eval.lossless import NEAR_TIE_NATS, Divergence, find_divergences
from eval.report import (
    AtTemperature,
    BranchingPart,
    Decoding,
    DivergencePart,
    DrafterPart,
    EnginePart,
    GreedyPart,
    LosslessPart,
    Report,
    Settings,
    TargetPart,
    TreeDecoding,
)
from eval.served import Pass, Server
from recipes.manifest import identify_target, provenance
from serve.client import Completion
from serve.engine import is_cuda

_RUNNER_LINE = "Using V2 Model Runner"  # vLLM 0.32's workers log it, and nothing for the other runner


@dataclass(frozen=True)
class PlainRun:
    """The plain server's passes, one per temperature, and its greedy completions with log-probabilities."""

    passes: list[Pass[Decoding]]
    reference: list[Completion] | None
    """None where temperature 0 is not measured."""


@dataclass(frozen=True)
class ChainRun:
    """The drafting server and its passes, one per temperature."""

    server: Server
    passes: list[Pass[Decoding]]


@dataclass(frozen=True)
class TreeRun:
    """The passes of the server that drafts trees, one per temperature."""

    passes: list[Pass[TreeDecoding]]


@dataclass(frozen=True)
class Findings:
    """Of all servers of a job; passes are in the order of its temperatures."""

    chain: ChainRun
    plain: PlainRun | None = None
    """None where only a URL was given."""
    tree: TreeRun | None = None
    """None where no trees were asked for."""
    baselines: Mapping[str, list[Pass[Decoding]]] = field(default_factory=dict)
    """By name."""


def log_path(job: Job, name: str) -> Path:
    """Where the server `name` (plain, chain, tree or a baseline) of this job writes."""
    return job.out.parent / "logs" / f"measure-{name.replace(':', '-')}.log"


def compose_report(
    job: Job, found: Findings, seconds: Mapping[str, float], gpu_gib: Mapping[str, float]
) -> Report:
    """`seconds` by phase, `gpu_gib` by server."""
    plain, chain, tree = found.plain, found.chain, found.tree
    first, *others = _join_passes(job, found)
    return Report(
        target=_describe_target(job, chain.server),
        drafter=DrafterPart(checkpoint=str(job.plan.ckpt) if job.plan else None, step=job.step),
        engine=_describe_engine(job, chain.server),
        settings=_describe_settings(job, chain.server, tree),
        plain=first.plain,
        chain=first.chain,
        tree=first.tree,
        baselines=first.baselines,
        lossless=_compare_greedy(job, plain, chain, tree),
        branching=_find_branching(job, chain, tree),
        seconds=dict(seconds),
        gpu_gib=dict(gpu_gib),
        other_temperatures=others,
        recipe=job.recipe.model_dump(mode="json") if job.recipe else None,
        provenance=provenance(),
    )


def _join_passes(job: Job, found: Findings) -> list[AtTemperature]:
    plain, chain, tree = found.plain, found.chain, found.tree
    return [
        AtTemperature(
            temperature=temperature,
            plain=plain.passes[index].decoding if plain else None,
            chain=chain.passes[index].decoding,
            tree=tree.passes[index].decoding if tree else None,
            baselines={name: passes[index].decoding for name, passes in found.baselines.items()},
        )
        for index, temperature in enumerate(job.settings.temperatures)
    ]


def _describe_target(job: Job, server: Server) -> TargetPart:
    if job.plan is None:
        return TargetPart(model=server.model, fingerprint=None)
    return TargetPart(model=job.plan.target.model, fingerprint=identify_target(job.plan.target).fingerprint)


def _describe_engine(job: Job, server: Server) -> EnginePart:
    if job.plan is None:
        return EnginePart(vllm=server.vllm, runner=None, device=None, precision=None)
    log = log_path(job, "chain").read_text(errors="replace")
    return EnginePart(
        vllm=server.vllm,
        runner="V2" if _RUNNER_LINE in log else "V1",
        device="cuda" if is_cuda() else "cpu",
        precision=job.plan.target.dtype,
    )


def _describe_settings(job: Job, server: Server, tree: TreeRun | None) -> Settings:
    return Settings(
        suite=job.settings.suite,
        n_prompts=len(job.prompts),
        temperature=job.settings.temperatures[0],
        max_tokens=job.settings.max_tokens,
        concurrency=job.settings.concurrency,
        seed=job.settings.seed,
        block_size=server.num_drafts + 1,
        budget=job.settings.tree_budget if tree else None,
        thinking=job.settings.thinking,
    )


def _find_branching(job: Job, chain: ChainRun, tree: TreeRun | None) -> BranchingPart | None:
    if tree is None or 0.0 not in job.settings.temperatures:
        return None
    greedy = job.settings.temperatures.index(0.0)
    of_chain, of_tree = chain.passes[greedy], tree.passes[greedy]
    if of_chain.decoding.coalesced or of_tree.decoding.coalesced:
        return None
    return find_branching(of_chain.completions, of_tree.completions, chain.server.num_drafts)


def _compare_greedy(
    job: Job, plain: PlainRun | None, chain: ChainRun, tree: TreeRun | None
) -> LosslessPart | None:
    if plain is None or plain.reference is None or job.plan is None:
        return None
    greedy, bound = job.settings.temperatures.index(0.0), NEAR_TIE_NATS[job.plan.target.dtype]
    of_chain = _compare(job, plain.reference, chain.passes[greedy].completions, bound)
    of_tree = _compare(job, plain.reference, tree.passes[greedy].completions, bound) if tree else None
    return LosslessPart(
        **dict(of_chain),
        lossless=all(part.has_only_near_ties for part in (of_chain, of_tree) if part),
        n_prompts=len(job.prompts),
        near_tie_nats=bound,
        tree=of_tree,
    )


def _compare(
    job: Job, plain: list[Completion], drafted: list[Completion], near_tie_nats: float
) -> GreedyPart:
    found = find_divergences(plain, drafted, near_tie_nats)
    return GreedyPart(
        n_diverging=len(found),
        n_near_ties=sum(each.is_near_tie for each in found),
        divergences=[_name_prompt(job, each) for each in found],
    )


def _name_prompt(job: Job, divergence: Divergence) -> DivergencePart:
    return DivergencePart(
        prompt_id=job.prompts[divergence.prompt].id,
        position=divergence.position,
        gap=divergence.gap,
        is_near_tie=divergence.is_near_tie,
    )
