"""What engines need: their GPUs or host memory, their caches, and what capturing keeps in host memory.

Also what they leave to a trainer with which they take turns, and what it leaves to them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from recipes.footprint import FP32, GIB, Cache, cached_layers, served_drafter_bytes
from recipes.job import (
    CPU_PROCESS_GIB,
    CUDA_GIB,
    Job,
    Phase,
    Row,
    cuda_processes,
    host_phase,
    millions,
    times,
)

HELD_ROWS_BYTES = 64 * 2**20
"""Of captured states, by an engine (`serve.spool.MOST_HELD_BYTES`)."""
CPU_CACHE_GIB = 1.0
"""Where serve.kv_cache_gib is not set: `serve.engine` gives it to an engine on a CPU."""
GRAPHS_GIB = 0.75
"""Assumed: CUDA graphs of an engine."""
ASLEEP_GIB = 2.0
"""Assumed: what an engine that sleeps keeps of a GPU (measured: 1.5, at the flagship's widths)."""
TRAINER_GIB = 2.0
"""Assumed: CUDA's context and kernels, and NCCL, of a trainer whose state is on the disk (measured: 1.8)."""


def _engine_rows(job: Job, *, drafting: bool) -> Iterator[Row]:
    """Of one engine on one of its ranks, its cache left out."""
    recipe, target, b, ranks = job.recipe, job.target, job.dtype_bytes, job.engine_ranks
    serve, shared = recipe.serve, f" / {ranks} ranks" if ranks > 1 else ""
    count = target.count_served_parameters()
    yield Row("target", f"{millions(count)} x {b} bytes{shared}", count * b / ranks)
    if drafting:
        yield from _drafting_rows(job, shared)
    taps = serve.max_num_batched_tokens * job.tap_bytes
    copies = 2 if drafting else 1
    words = f"{serve.max_num_batched_tokens:,} tokens x {job.tap_bytes:,} bytes" + " x 2 copies" * drafting
    yield Row("tap states of a step", words, taps * copies)
    width = 2 * target.hidden_size + target.widest_layer(ranks)
    words = f"estimate: {serve.max_num_batched_tokens:,} tokens x {width:,} values of the widest layer x {b}"
    yield Row("activations of a step", words, serve.max_num_batched_tokens * width * b)
    rows = serve.max_num_seqs * (job.nodes + 1 if drafting else 1)
    words = f"{rows:,} rows x {target.vocab_size:,} tokens x ({b} + {FP32}) bytes"
    yield Row("logits", words, rows * target.vocab_size * (b + FP32))


def _drafting_rows(job: Job, shared: str) -> Iterator[Row]:
    recipe, target, b, ranks = job.recipe, job.target, job.dtype_bytes, job.engine_ranks
    drafter = served_drafter_bytes(recipe.drafter, target.hidden_size, b, ranks)
    words = f"{millions(job.num_parameters)} x {b} bytes{shared}; fc whole, keys' weights twice"
    yield Row("drafter", words, drafter)
    if recipe.train.pairwise is not None:
        yield Row("pairwise head", *job.describe_pairwise(recipe.train.pairwise.rank))
    if target.gdn:
        rows, most = job.nodes + 1, recipe.serve.max_num_seqs
        kept = target.gdn.kept_bytes(b, ranks, most, rows)
        layers = target.gdn.num_layers
        words = f"{layers} layers x {most} requests x {rows} rows x {kept // (layers * most * rows):,} bytes"
        yield Row(f"draft trees of {job.nodes} nodes", words, kept)


@dataclass(frozen=True)
class Mode:
    """A way of decoding, as an engine's cache sees it."""

    name: str
    cache: Cache
    state_slots: int

    def request_bytes(self, num_tokens: int) -> int:
        return self.cache.request_bytes(num_tokens, self.state_slots)


def decoding_modes(job: Job) -> list[Mode]:
    """Plainly, in trees (one recurrent state a request), in chains (a state for each of a block's slots)."""
    drafts = job.recipe.drafter.block_size - 1
    return [
        Mode("plain", _cache(job, 0, drafting=False), 1),
        Mode("trees", _cache(job, job.nodes, drafting=True), 1),
        Mode("chains", _cache(job, drafts, drafting=True), 1 + drafts),
    ]


def _cache(job: Job, num_drafts: int, *, drafting: bool) -> Cache:
    drafter = job.recipe.drafter if drafting else None
    layers = cached_layers(job.target, drafter, job.dtype_bytes, job.engine_ranks, num_drafts)
    steps = 2 if job.on_gpus else 1  # a GPU's scheduler is a step ahead
    return Cache(layers, steps * job.recipe.serve.max_num_batched_tokens)


def serve_on_gpu(job: Job) -> Phase:
    """The engine with everything, drafter, trees and taps.  Several of the data phase may share a GPU."""
    serve, hardware = job.recipe.serve, job.recipe.hardware
    rows = list(_engine_rows(job, drafting=True))
    assumed = CUDA_GIB + (0.0 if serve.enforce_eager else GRAPHS_GIB)
    rows.append(Row("CUDA, NCCL, graphs", "assumed", assumed * GIB))
    count, copies = job.engines_on_a_gpu, times(job.engines_on_a_gpu, "engines")
    rows = [Row(row.what, copies + row.formula, count * row.num_bytes) for row in rows]
    least = _least_cache(job)
    if serve.kv_cache_gib is not None:
        cache = Row("cache", f"{copies}serve.kv_cache_gib", count * serve.kv_cache_gib * GIB)
        share, left = 1.0, serve.kv_cache_gib * GIB
    else:
        cache = Row(least.what, copies + least.formula, count * least.num_bytes)
        share = serve.gpu_memory_utilization
        left = (hardware.gpu_gib or 0.0) * share * GIB - sum(row.num_bytes for row in rows)
    notes = _cache_notes(job, left)
    name = "serve: memory of each GPU"
    rows = [*rows, cache, *_trainer_on_gpu(job)]
    return Phase(name, tuple(rows), "hardware.gpu_gib", hardware.gpu_gib, share, notes)


def serve_cache(job: Job) -> Phase:
    """Of an engine whose cache has a size: vLLM refuses one that does not hold the longest request."""
    there_is = job.recipe.serve.kv_cache_gib or CPU_CACHE_GIB
    return Phase("serve: cache of an engine", (_least_cache(job),), "serve.kv_cache_gib", there_is)


def _least_cache(job: Job) -> Row:
    most = job.recipe.serve.max_model_len
    mode = max(decoding_modes(job), key=lambda mode: mode.request_bytes(most))
    words = f"at least one request of serve.max_model_len {most:,} in {mode.name}"
    return Row("cache", words, mode.request_bytes(most))


def _cache_notes(job: Job, cache_bytes: float) -> tuple[str, ...]:
    """How many of the longest requests run at once in that cache."""
    if cache_bytes <= 0:
        return ()
    counts = {mode.name: int(cache_bytes // mode.request_bytes(job.longest)) for mode in decoding_modes(job)}
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    recipe = job.recipe
    asked = f"serve.max_num_seqs is {recipe.serve.max_num_seqs}, eval.concurrency {recipe.eval.concurrency}"
    notes = [
        f"a cache of {cache_bytes / GIB:.1f} GiB holds {told} of {job.longest:,} tokens at once; {asked}"
    ]
    if 0 < counts["plain"] < recipe.serve.max_num_seqs:
        notes.append(f"serve.max_num_seqs={counts['plain']} avoids that requests are computed again")
    return tuple(notes)


def _capture_rows(job: Job) -> Iterator[Row]:
    recipe = job.recipe
    engines, tokens = recipe.data.engines, recipe.serve.max_num_batched_tokens
    words = f"{times(engines, 'engines')}2 steps x {tokens:,} tokens x {job.tap_bytes:,} bytes"
    yield Row("captured states on their way to files", words, engines * 2 * tokens * job.tap_bytes)
    words = f"{times(engines, 'engines')}{HELD_ROWS_BYTES // 2**20} MiB at most"
    yield Row("rows of small steps, written together", words, engines * HELD_ROWS_BYTES)
    if recipe.data.check_sequences:
        count = job.target.count_text_parameters()
        words = f"{times(engines, 'engines')}{millions(count)} x {job.dtype_bytes} bytes, if no GPU has room"
        yield Row("target in transformers, to check taps", words, engines * count * job.dtype_bytes)


def regenerate_on_host(job: Job) -> Phase:
    rows = [_engine_processes(job), *_capture_rows(job), *_trainer_on_host(job)]
    return host_phase(job, "regenerate: host memory", rows)


def _engine_processes(job: Job) -> Row:
    ranks = job.engine_ranks
    return cuda_processes("engines' processes", job.recipe.data.engines * (1 + (ranks if ranks > 1 else 0)))


def regenerate_on_cpu(job: Job) -> Phase:
    engines = job.recipe.data.engines
    rows = [
        Row(row.what, f"{times(engines, 'engines')}{row.formula}", engines * row.num_bytes)
        for row in _cpu_engine_rows(job, drafting=job.recipe.rounds.count > 1)
    ]
    return host_phase(job, "regenerate: host memory", [*rows, *_capture_rows(job)], _cpu_cache_notes(job))


def measure_on_cpu(job: Job) -> Phase:
    return host_phase(job, "measure: host memory", [*_cpu_engine_rows(job, drafting=True)])


def _cpu_engine_rows(job: Job, *, drafting: bool) -> Iterator[Row]:
    yield Row("engine's process", "assumed", CPU_PROCESS_GIB * GIB)
    yield from _engine_rows(job, drafting=drafting)
    gib = job.recipe.serve.kv_cache_gib or CPU_CACHE_GIB
    yield Row("cache", "serve.kv_cache_gib, or 1", gib * GIB)


def _cpu_cache_notes(job: Job) -> tuple[str, ...]:
    return _cache_notes(job, (job.recipe.serve.kv_cache_gib or CPU_CACHE_GIB) * GIB)


# Turns: what the one keeps while the other has the GPUs


def asleep_on_gpu(job: Job) -> Iterator[Row]:
    if job.engines_sleep:
        count = job.engines_on_a_gpu
        words = f"assumed: {times(count, 'engines')}{ASLEEP_GIB:g} GiB"
        yield Row("engine asleep", words, count * ASLEEP_GIB * GIB)


def asleep_on_host(job: Job) -> Iterator[Row]:
    if job.engines_sleep:
        yield _engine_processes(job)
        yield _slept_weights(job)


def _slept_weights(job: Job) -> Row:
    """Given back when they wake (`serve.engine`'s allocator settings)."""
    engines, ranks, b = job.recipe.data.engines, job.engine_ranks, job.dtype_bytes
    count = job.target.count_served_parameters()
    drafter = ranks * served_drafter_bytes(job.recipe.drafter, job.target.hidden_size, b, ranks)
    words = f"{times(engines, 'engines')}({millions(count)} x {b} + {drafter:,} of the drafter) bytes"
    return Row("engines' weights, asleep", words, engines * (count * b + drafter))


def _trainer_on_gpu(job: Job) -> Iterator[Row]:
    if job.takes_turns:
        yield Row("trainer, without its state", "assumed", TRAINER_GIB * GIB)


def _trainer_on_host(job: Job) -> Iterator[Row]:
    if job.takes_turns:
        yield cuda_processes("trainer, without its state", job.train_ranks)
