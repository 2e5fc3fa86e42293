"""What the trainer needs, on each rank's device and in host memory."""

from collections.abc import Iterator

from recipes.footprint import DTYPE_BYTES, FP32, GIB
from recipes.job import (
    CPU_PROCESS_GIB,
    CUDA_GIB,
    Job,
    Phase,
    Row,
    cuda_processes,
    host_phase,
    millions,
)
from recipes.schema import PairwiseCompanion
from recipes.serve_needs import asleep_on_gpu, asleep_on_host
from recipes.train_footprint import (
    BATCHES_AHEAD,
    Activations,
    CompanionBytes,
    bucket_bytes,
    step_bytes,
    worst_batch,
    zero_bytes,
)


def _trainer_rows(job: Job) -> Iterator[Row]:
    """On one rank's device."""
    train, target, ranks = job.recipe.train, job.target, job.train_ranks
    b, trained = DTYPE_BYTES[train.precision], job.num_trained
    parts = target.vocab_size * target.hidden_size * (1 if target.tied else 2)
    words = f"{millions(parts)} x {b} bytes, frozen"
    yield Row("target's embedding and head", words, parts * b)
    if job.num_frozen:
        parts = ranks if train.zero_stage == 3 else 1
        words = f"{millions(job.num_frozen)} x {b} bytes" + f" / {parts} ranks" * (parts > 1)
        yield Row("drafter, frozen", words, job.num_frozen * b / parts)
    zero = zero_bytes(train)
    a_parameter = f"({zero.whole} + {zero.split} / {ranks} ranks) bytes"
    words = f"{millions(trained)} x {a_parameter}, ZeRO-{train.zero_stage}" + ", offloaded" * (zero.host > 0)
    what = "adapters" if job.num_frozen else "drafter"
    yield Row(f"{what}, gradients, masters, moments", words, trained * zero.on_device(ranks))
    buckets = bucket_bytes(train, trained, job.num_parameters)
    if buckets:
        words = "a bucket of 5e8 gradients and its copy" + ", gathered weights" * (train.zero_stage == 3)
        yield Row("DeepSpeed's buffers", words, buckets)
    activations = _activations(job)
    yield activations
    if train.pairwise is not None:
        yield _companion(job, train.pairwise, activations.num_bytes)
    beyond = step_bytes(train, trained, ranks) - buckets - activations.num_bytes
    if beyond > 0:
        words = f"{millions(trained)} x {FP32} / {ranks} ranks bytes, while buffers and activations rest"
        yield Row("gradients in one piece, at the step", words, beyond)


def _activations(job: Job) -> Row:
    train, drafter = job.recipe.train, job.recipe.drafter
    batch = worst_batch(train, drafter.block_size, job.longest)
    activations = Activations(
        drafter,
        job.target.hidden_size,
        job.target.vocab_size,
        batch,
        DTYPE_BYTES[train.precision],
        train.activation_checkpointing,
        job.on_gpus,
        train.objective.needs_final_states,
    )
    kept = "one layer at a time" if train.activation_checkpointing else f"{drafter.num_hidden_layers} layers"
    device = f", {BATCHES_AHEAD} batches ahead" if job.on_gpus else ", attention without a fused kernel"
    words = f"estimate: {batch.block_rows:,} block rows on {batch.context_rows:,} of context, {kept}{device}"
    return Row("activations", words, activations.peak_bytes() + activations.ahead_bytes)


def companion_bytes(job: Job, settings: PairwiseCompanion) -> CompanionBytes:
    """Of the pairwise head that learns beside the drafter."""
    train, drafter = job.recipe.train, job.recipe.drafter
    anchors = min(settings.num_anchors, worst_batch(train, drafter.block_size, job.longest).anchors)
    return CompanionBytes(
        settings,
        job.target.hidden_size,
        job.target.vocab_size,
        train.sequences_per_step // job.train_ranks * anchors,
        drafter.block_size,
        DTYPE_BYTES[train.precision],
        job.on_gpus,
        train.objective.needs_final_states,
    )


def _companion(job: Job, settings: PairwiseCompanion, activations: float) -> Row:
    head = companion_bytes(job, settings)
    beyond = max(0.0, head.work_bytes - activations)
    words = f"{millions(head.num_parameters)} x {4 * FP32} bytes, states of {head.blocks:,} blocks a step"
    if beyond:
        words += ", and work while activations rest"
    return Row("pairwise head beside it", words, head.lasting_bytes + beyond)


def train_on_gpu(job: Job) -> Phase:
    cuda = Row("CUDA, NCCL, fragments", "assumed", CUDA_GIB * GIB)
    rows, hardware = (*_trainer_rows(job), cuda, *asleep_on_gpu(job)), job.recipe.hardware
    return Phase("train: memory of each GPU", rows, "hardware.gpu_gib", hardware.gpu_gib)


def train_on_host(job: Job) -> Phase:
    ranks, parameters = job.train_ranks, job.num_parameters
    rows = [cuda_processes("trainer's processes", ranks), _read_ahead(job)]
    if zero_bytes(job.recipe.train).host >= ranks * FP32:
        rows.append(_offloaded(job))
    else:  # before, each rank makes the drafter
        words = f"{ranks} ranks x {millions(parameters)} x {FP32} bytes"
        rows.append(Row("drafter as it is made", words, parameters * ranks * FP32))
    words = f"{millions(parameters)} x 2 bytes"
    rows.append(Row("weights for a checkpoint", words, parameters * 2))
    return host_phase(job, "train: host memory", [*rows, *asleep_on_host(job)])


def train_on_cpu(job: Job) -> Phase:
    process = Row("trainer's process", "assumed", CPU_PROCESS_GIB * GIB)
    rows = [process, *_trainer_rows(job), _read_ahead(job)]
    return host_phase(
        job, "train: host memory", [*rows, _offloaded(job)] if _offloaded(job).num_bytes else rows
    )


def _offloaded(job: Job) -> Row:
    a_parameter = zero_bytes(job.recipe.train).host
    words = f"{millions(job.num_trained)} x {a_parameter} bytes"
    return Row("offloaded optimizer", words, job.num_trained * a_parameter)


def _read_ahead(job: Job) -> Row:
    sequences = job.recipe.train.sequences_per_step
    words = f"2 steps x {sequences} sequences x {job.longest:,} tokens x {job.tap_bytes:,} bytes"
    return Row("sequences read ahead", words, 2 * sequences * job.longest * job.tap_bytes)
