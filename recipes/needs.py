"""What a recipe needs, phase by phase, of disk, memory and time.  Pure.

`recipes.remedies` says what would make a phase fit.  Called by `recipes/plan.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from recipes.footprint import SEQUENCE_BYTES
from recipes.job import Job, Phase, Row, millions, times
from recipes.schema import Recipe, Rounds
from recipes.serve_needs import (
    measure_on_cpu,
    regenerate_on_cpu,
    regenerate_on_host,
    serve_cache,
    serve_on_gpu,
)
from recipes.train_footprint import saved_bytes
from recipes.train_needs import train_on_cpu, train_on_gpu, train_on_host


def plan_phases(job: Job) -> list[Phase]:
    """In the order in which a run meets them."""
    phases = [_disk(job)]
    if job.recipe.data.disk_gib is not None:
        phases.append(_shards(job))
    if not job.on_gpus or job.recipe.serve.kv_cache_gib is not None:
        phases.append(serve_cache(job))
    if job.on_gpus:
        return [*phases, regenerate_on_host(job), serve_on_gpu(job), train_on_gpu(job), train_on_host(job)]
    return [*phases, regenerate_on_cpu(job), train_on_cpu(job), measure_on_cpu(job)]


# The disk


def _disk(job: Job) -> Phase:
    return Phase("disk", tuple(_disk_rows(job)), "hardware.disk_gib", job.recipe.hardware.disk_gib)


def _shards(job: Job) -> Phase:
    data = job.recipe.data
    rows = [_one_round(job)] if data.policy == "rolling" else [_all_shards(job)]
    return Phase("shards at any time", tuple(rows), "data.disk_gib", data.disk_gib)


def _disk_rows(job: Job) -> Iterator[Row]:
    recipe, parameters = job.recipe, job.num_parameters
    yield _all_shards(job) if recipe.data.policy == "keep" else _one_round(job)
    engines = recipe.data.engines
    spool = f"{times(engines, 'engines')}{job.shard_tokens:,} tokens of a shard x {job.tap_bytes:,} bytes"
    yield Row("captured states on their way", spool, engines * job.shard_tokens * job.tap_bytes)
    published, state = saved_bytes(recipe.train)
    keep = recipe.train.keep_checkpoints
    words = f"({keep} kept + 1 being written) x {millions(parameters)} x {published} bytes"
    yield Row("checkpoints", words, (keep + 1) * parameters * published)
    words = f"(1 + 1 being written) x {millions(parameters)} x {state} bytes (weights, masters, 2 moments)"
    yield Row("optimizer state", words, 2 * parameters * state)
    if job.is_fetched:
        count = job.target.count_published_parameters()
        words = f"{millions(count)} x {job.dtype_bytes} bytes, in the hub's cache"
        yield Row("target", words, count * job.dtype_bytes)


def _all_shards(job: Job) -> Row:
    prompts, longest = job.recipe.data.num_prompts, job.longest
    words = f"{prompts:,} prompts x {longest:,} tokens x ({job.tap_bytes:,} taps + {SEQUENCE_BYTES}) bytes"
    return Row("all shards", words, prompts * longest * (job.tap_bytes + SEQUENCE_BYTES))


def _one_round(job: Job) -> Row:
    """The largest (`data.rounds.share_shards`), and a shard more: shares are of whole ones."""
    everything, share = _all_shards(job), _largest_share(job.recipe.rounds)
    shard = job.shard_tokens * (job.tap_bytes + SEQUENCE_BYTES)
    words = f"{share:.3g} of {everything.formula}, and a shard"
    most = min(everything.num_bytes, share * everything.num_bytes + shard)
    return Row("a round's shards", words, math.ceil(most))


def _largest_share(rounds: Rounds) -> float:
    if rounds.count == 1:
        return 1.0
    first = rounds.first_share or 1 / rounds.count
    return max(first, (1 - first) / (rounds.count - 1))


# What is counted in other things than bytes


def count_misfits(recipe: Recipe) -> Iterator[str]:
    """Engines and ranks that do not go into the GPUs (`data.engines`, `train.loop.check_split`)."""
    gpus, width, engines = recipe.hardware.gpus, recipe.serve.tensor_parallel_size, recipe.data.engines
    if gpus and width > gpus:
        yield f"an engine takes {width} GPUs, there are {gpus}: write serve.tensor_parallel_size <= {gpus}"
    elif gpus and engines * width > gpus and (width > 1 or recipe.serve.kv_cache_gib is None):
        remedy = f"write data.engines <= {gpus // width}"
        if width == 1:
            remedy += ", or let them share GPUs by setting serve.kv_cache_gib"
        yield f"{engines} engines of {width} GPUs take {engines * width}, there are {gpus}: {remedy}"
    train, ranks = recipe.train, max(1, gpus)
    share = ranks * train.micro_batch_sequences
    if train.sequences_per_step % share:
        nearest = max(share, train.sequences_per_step // share * share)
        yield (
            f"train.sequences_per_step {train.sequences_per_step} is no multiple of {ranks} ranks x"
            f" train.micro_batch_sequences {train.micro_batch_sequences}: write {nearest}"
        )


@dataclass(frozen=True)
class Duration:
    """How long a phase takes at most, or what is missing to say so."""

    phase: str
    formula: str
    hours: float | None


def durations(job: Job) -> list[Duration]:
    data, train, hardware = job.recipe.data, job.recipe.train, job.recipe.hardware
    emitted, steps, sequences = data.sampling.max_tokens, train.steps, train.sequences_per_step
    return [
        _duration(
            "regenerate",
            data.num_prompts * emitted,
            f"{data.num_prompts:,} prompts x {emitted:,} tokens",
            hardware.regeneration_tokens_per_second,
        ),
        _duration(
            "train",
            steps * sequences * job.longest,
            f"{steps:,} steps x {sequences} sequences x {job.longest:,} tokens",
            hardware.training_tokens_per_second,
        ),
    ]


def _duration(phase: str, tokens: int, words: str, rate: float | None) -> Duration:
    if rate is None:
        return Duration(phase, f"{words} = {tokens:,} / the rate, which hardware does not say", None)
    return Duration(phase, f"{words} / {rate:,.0f} tokens a second", tokens / rate / 3600)
