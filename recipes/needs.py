"""What a recipe needs, phase by phase, of disk, memory and time.  Pure.

`recipes.remedies` says what would make a phase fit.  Called by `recipes/plan.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from recipes.footprint import DTYPE_BYTES, SEQUENCE_BYTES
from recipes.job import (
    Job,
    Phase,
    Row,
    count_engine_gpus,
    count_train_gpus,
    host_phase,
    millions,
    share_out_rounds,
    times,
)
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
    return [*phases, *(_phases_on_gpus(job) if job.on_gpus else _phases_on_cpu(job))]


def _phases_on_gpus(job: Job) -> list[Phase]:
    regenerate, train = regenerate_on_host(job), train_on_host(job)
    on_gpus = [serve_on_gpu(job), train_on_gpu(job)]
    return [_together(job, regenerate, train), *on_gpus] if job.is_ahead else [regenerate, *on_gpus, train]


def _phases_on_cpu(job: Job) -> list[Phase]:
    regenerate, train, measure = regenerate_on_cpu(job), train_on_cpu(job), measure_on_cpu(job)
    return [_together(job, regenerate, train), measure] if job.is_ahead else [regenerate, train, measure]


def _together(job: Job, regenerate: Phase, train: Phase) -> Phase:
    rows, notes = [*regenerate.rows, *train.rows], (*regenerate.notes, *train.notes)
    return host_phase(job, "regenerate and train: host memory", rows, notes)


# The disk


def _disk(job: Job) -> Phase:
    return Phase("disk", tuple(_disk_rows(job)), "hardware.disk_gib", job.recipe.hardware.disk_gib)


def _shards(job: Job) -> Phase:
    data = job.recipe.data
    return Phase("shards at any time", (_shards_at_once(job),), "data.disk_gib", data.disk_gib)


def _disk_rows(job: Job) -> Iterator[Row]:
    recipe, parameters = job.recipe, job.num_parameters
    yield _shards_at_once(job)
    engines = recipe.data.engines
    words = f"{times(engines, 'engines')}2 shards x {job.shard_tokens:,} tokens x {job.tap_bytes:,} bytes"
    # data/engines.py: two that are generated, or one that is and one that is written
    yield Row("captured states on their way", words, 2 * engines * job.shard_tokens * job.tap_bytes)
    published, state = saved_bytes(recipe.train)
    keep, drafting = recipe.train.keep_checkpoints, int(job.is_ahead)
    counted = f"{keep} kept + 1 being written" + " + 1 that drafts" * drafting
    words = f"({counted}) x {millions(parameters)} x {published} bytes"
    yield Row("checkpoints", words, (keep + 1 + drafting) * parameters * published)
    if recipe.train.pairwise is not None:
        words, head = job.describe_pairwise(recipe.train.pairwise.rank)
        yield Row("pairwise heads in them", f"({counted}) x {words}", (keep + 1 + drafting) * head)
    words = (
        f"(1 + 1 being written) x {millions(job.num_trained)} x {state} bytes (weights, masters, 2 moments)"
    )
    yield Row("optimizer state", words, 2 * job.num_trained * state)
    if job.num_frozen:
        weight = DTYPE_BYTES[recipe.train.precision]
        words = f"(1 + 1 being written) x {millions(job.num_frozen)} x {weight} bytes"
        yield Row("frozen weights in it", words, 2 * job.num_frozen * weight)
    if job.is_fetched:
        count = job.target.count_published_parameters()
        words = f"{millions(count)} x {job.dtype_bytes} bytes, in the hub's cache"
        yield Row("target", words, count * job.dtype_bytes)


def _shards_at_once(job: Job) -> Row:
    """All, or as many rounds' as there are at a time, and a shard more: shares are of whole ones."""
    everything = _all_shards(job)
    if job.recipe.data.policy == "keep":
        return everything
    what, rounds = ("two rounds' shards", 2) if job.is_ahead else ("a round's shards", 1)
    share = _largest_share(job.recipe.rounds, rounds)
    shard = job.shard_tokens * (job.tap_bytes + SEQUENCE_BYTES)
    words = f"{share:.3g} of {everything.formula}, and a shard"
    most = min(everything.num_bytes, share * everything.num_bytes + shard)
    return Row(what, words, math.ceil(most))


def _all_shards(job: Job) -> Row:
    prompts, longest = job.recipe.data.num_prompts, job.longest
    words = f"{prompts:,} prompts x {longest:,} tokens x ({job.tap_bytes:,} taps + {SEQUENCE_BYTES}) bytes"
    return Row("all shards", words, prompts * longest * (job.tap_bytes + SEQUENCE_BYTES))


def _largest_share(rounds: Rounds, neighbours: int) -> float:
    """Of so many rounds that follow each other."""
    bounds = [0.0, *share_out_rounds(rounds)]
    neighbours = min(neighbours, rounds.count)
    return max(end - start for start, end in zip(bounds, bounds[neighbours:], strict=False))


# What is counted in other things than bytes


def count_misfits(recipe: Recipe) -> Iterator[str]:
    """GPUs that are shared out in vain; else what does not go into each part of them."""
    wrong = list(_misnamed_gpus(recipe))
    yield from wrong or [*_misfit_engines(recipe), *_misfit_ranks(recipe)]


def _misnamed_gpus(recipe: Recipe) -> Iterator[str]:
    """Where engines and the trainer work at a time, each needs GPUs of its own."""
    gpus, own = recipe.hardware.gpus, recipe.rounds.engine_gpus
    if own is None:
        if gpus and recipe.rounds.ahead:
            yield (
                "rounds.ahead is true, but engines and trainer share their GPUs:"
                " write rounds.engine_gpus, GPUs that are the engines' own"
            )
    elif not gpus:
        yield f"rounds.engine_gpus is {own}, but hardware.gpus is 0, a CPU: leave rounds.engine_gpus out"
    elif len(set(own)) < len(own):
        yield f"rounds.engine_gpus {own} names a GPU twice: write {sorted(set(own))}"
    elif max(own) >= gpus:
        yield f"rounds.engine_gpus {own} names GPU {max(own)}, hardware.gpus is {gpus}: write 0 to {gpus - 1}"
    elif len(own) == gpus:
        remedy = "name fewer, or write rounds.ahead=false without it"
        yield f"rounds.engine_gpus {own} leaves the trainer none of {gpus} GPUs: {remedy}"


def _misfit_engines(recipe: Recipe) -> Iterator[str]:
    """`data.engines` refuses them."""
    width, engines, gpus = recipe.serve.tensor_parallel_size, recipe.data.engines, count_engine_gpus(recipe)
    there = f"there are {gpus}" if recipe.rounds.engine_gpus is None else f"rounds.engine_gpus names {gpus}"
    if gpus and width > gpus:
        yield f"an engine takes {width} GPUs, {there}: write serve.tensor_parallel_size <= {gpus}"
    elif gpus and engines * width > gpus and (width > 1 or recipe.serve.kv_cache_gib is None):
        remedy = f"write data.engines <= {gpus // width}"
        if width == 1:
            remedy += ", or let them share GPUs by setting serve.kv_cache_gib"
        yield f"{engines} engines of {width} GPUs take {engines * width}, {there}: {remedy}"


def _misfit_ranks(recipe: Recipe) -> Iterator[str]:
    """`train.loop.check_split` refuses them."""
    train, ranks = recipe.train, max(1, count_train_gpus(recipe))
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
