"""What a plan says that training takes, against the real code and DeepSpeed."""

import json
import math
import os
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from itertools import compress
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from recipes import footprint, serve_needs, train_footprint
from recipes.footprint import (
    GIB,
)
from recipes.load import load_recipe
from recipes.needs import plan_phases
from recipes.schema import Drafter, Lora
from recipes.schema import Objective as ObjectiveSection
from recipes.train_footprint import Activations, WorstBatch, saved_bytes, worst_batch, zero_bytes
from recipes.train_needs import companion_bytes
from serve import engine, spool
from serve.drafter_config import pairwise_tensors
from tests.small_training import DRAFTER, HIDDEN, write_target
from tests.test_plan import BF16, FLAGSHIP, RECIPES, TINY, phase_of, plan_of
from train import attention, head, pairwise, pairwise_learner, pointwise, saving, tiles
from train.batches import worst_case_batch
from train.drafter import DFlashDrafter
from train.head import find_rows
from train.lora import adapt
from train.objective import Objective
from train.pairwise import DraftedBlocks, PairwiseHead
from train.pairwise_learner import backward
from train.ranks import _ALONE
from train.target_parts import TargetParts

TRAIN_ON_GPU = "train: memory of each GPU"


def test_numbers_with_another_home_are_those():
    assert footprint.SERVED_NODES == engine.DEFAULT_BUDGET
    assert serve_needs.CPU_CACHE_GIB == engine._CPU_CACHE_GIB
    assert serve_needs.HELD_ROWS_BYTES == spool.MOST_HELD_BYTES
    for name in ("TILE_ROWS", "STACK_KEYS", "KEY_STEP"):
        assert getattr(train_footprint, name) == getattr(tiles, name)
    assert train_footprint.CHUNK_LOGITS == head.CHUNK_LOGITS
    assert train_footprint.HEAD_BLOCKS == pairwise_learner.BLOCKS_AT_ONCE
    assert train_footprint.HEAD_ROW_NUMBERS == pairwise.ROW_NUMBERS
    assert {name: most for name, (_, most) in pairwise._RANKING.items()} == train_footprint.RANKED_LOGITS


def test_what_is_saved_is_what_the_trainer_makes_room_for():
    train = plan_of(TINY, "train.precision=float32").recipe.train
    assert sum(saved_bytes(train)) == saving.PAIR_BYTES


@pytest.mark.parametrize(
    ("sequences", "tokens", "anchors"), [(1, 300, 40), (2, 97, 200), (3, 33, 7), (1, 4096, 512), (2, 3, 5)]
)
@pytest.mark.parametrize("path", [TINY, FLAGSHIP])
def test_the_worst_batch_has_the_rows_and_tiles_of_the_real_one(path, sequences, tokens, anchors):
    drafter = load_recipe(path).drafter
    real = worst_case_batch(sequences, tokens, anchors, drafter, hidden_size=1)
    counted = WorstBatch(sequences, tokens, min(anchors, tokens - 1), drafter.block_size)
    assert counted.block_rows == len(real.input_ids_Q)
    assert counted.context_rows == len(real.taps_SE)
    assert counted.supervised_rows == int(real.supervised_AK.sum())
    for kind, tiling in real.cut_tiles().items():
        shapes = [
            (stack.tiles, stack.rows, stack.keys) for stack in counted.stacks(kind, drafter.sliding_window)
        ]
        assert shapes == [tuple(stack.mask_Tqk.shape) for stack in tiling.stacks]


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors held at once, those of `known` left out."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._add, out)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live and key not in self._known:
            self._live[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)


def measure_activations(
    drafter: Drafter,
    hidden_size: int,
    vocab_size: int,
    batch,
    views,
    *,
    objective: Objective,
    recompute: bool,
) -> int:
    """The peak of the real code's forward and backward pass in bf16, on tensors without storage."""
    rows = find_rows(batch.labels_AK, batch.supervised_AK)
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        model = DFlashDrafter(drafter, hidden_size)
        torch.set_default_dtype(torch.float32)
        model.recompute_layers = recompute
        head_VD = torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16)
        taps_SE = torch.empty(batch.taps_SE.shape, dtype=torch.bfloat16)
        for parameter in model.parameters():  # as ZeRO takes gradients away
            parameter.register_post_accumulate_grad_hook(lambda of: setattr(of, "grad", None))
        with LiveBytes([head_VD, taps_SE, *model.parameters()]) as live, sdpa_kernel(SDPBackend.MATH):
            embedded_QD = F.embedding(batch.input_ids_Q, head_VD)
            positions = batch.context_positions_S, batch.block_positions_Q
            if objective.settings.needs_final_states:
                rows = replace(rows, final_QD=torch.empty_like(embedded_QD))
            hidden_QD = model(taps_SE, positions[0], embedded_QD, positions[1], views)
            loss = objective.loss(hidden_QD[rows.places_R], head_VD, rows).loss_sum
            del embedded_QD, hidden_QD, rows
            loss.backward()
    return live.peak + taps_SE.numel() * BF16


def make_outputs(query_QHd, *_inputs):
    return torch.empty_like(query_QHd), torch.empty(query_QHd.shape[:2])


def make_gradients(_gradient, query_QHd, context, blocks, outcome, *_settings):
    torch.empty_like(outcome[1])  # delta
    pairs = [tuple(torch.empty_like(part) for part in pair) for pair in (context, blocks)]
    return torch.empty_like(query_QHd), *pairs


def make_columns(logits_RV, *_inputs):
    """What the head's kernels make: a number a row, nothing as wide as the vocabulary."""
    column_R = torch.empty(len(logits_RV))
    return SimpleNamespace(
        **dict.fromkeys(("lse_R", "label_logits_R", "kl_R", "variation_R", "pull_R"), column_R),
        tokens_R=torch.empty(len(logits_RV), dtype=torch.int64),
    )


class Fused(Function):
    """A function of `train.pointwise` as compiled: nothing between its inputs and outputs is kept."""

    @staticmethod
    def forward(ctx, function, *given):
        ctx.are_tensors = [isinstance(each, torch.Tensor) for each in given]
        ctx.save_for_backward(*compress(given, ctx.are_tensors))
        return function(*given)

    @staticmethod
    def backward(ctx, *_gradients):
        saved = iter(ctx.saved_tensors)
        return None, *(torch.empty_like(next(saved)) if is_tensor else None for is_tensor in ctx.are_tensors)


def choose_fused(function, *_):
    return partial(Fused.apply, function)


HEAD_ON_GPU = SimpleNamespace(
    read_rows=make_columns,
    compare_rows=make_columns,
    slope_to_labels_=make_columns,
    slope_to_teacher_=make_columns,
)


@pytest.mark.parametrize("kind", ["cross_entropy", "lk"])
@pytest.mark.parametrize("on_gpu", [True, False], ids=["gpu", "cpu"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    ("path", "vocab_size", "overrides"),
    [
        (TINY, 4096, ["train.num_anchors=48"]),
        (
            FLAGSHIP,
            248_320,
            ["train.num_anchors=80", "data.max_prompt_tokens=900", "data.sampling.max_tokens=100"],
        ),
    ],
)
def test_the_estimate_of_activations_bounds_the_real_peak_closely(
    path, vocab_size, overrides, recompute, on_gpu, kind, monkeypatch
):
    monkeypatch.setattr(tiles, "_attention_dtype", lambda query: query.dtype)
    monkeypatch.setattr(attention, "attend_forward", make_outputs)  # kernels make nothing else
    monkeypatch.setattr(attention, "attend_backward", make_gradients)
    if on_gpu:
        monkeypatch.setattr(head, "CHUNK_LOGITS", {"cpu": head.CHUNK_LOGITS["cuda"]})
        monkeypatch.setattr("train.objective.arithmetic_on", lambda device: HEAD_ON_GPU)
        monkeypatch.setattr(pointwise, "choose", choose_fused)
    monkeypatch.setattr(torch.nn.init, "normal_", lambda weight, std: weight)
    job = plan_of(path, *overrides)
    drafter, train, hidden_size = job.recipe.drafter, job.recipe.train, job.target.hidden_size
    batch = worst_batch(train, drafter.block_size, job.longest)
    objective = Objective(ObjectiveSection(kind=kind))
    settings = BF16, recompute, on_gpu, objective.settings.needs_final_states
    estimate = Activations(drafter, hidden_size, vocab_size, batch, *settings).peak_bytes()
    real = worst_case_batch(train.micro_batch_sequences, job.longest, train.num_anchors, drafter, hidden_size)
    views = real.layouts if on_gpu else real.views
    measured = measure_activations(
        drafter, hidden_size, vocab_size, real, views, objective=objective, recompute=recompute
    )
    assert 0.97 * measured < estimate < 1.25 * measured


def test_batches_that_are_on_their_way_are_counted_on_a_gpu_alone():
    job = plan_of(FLAGSHIP)
    train, drafter, D = job.recipe.train, job.recipe.drafter, job.target.hidden_size
    batch = worst_batch(train, drafter.block_size, job.longest)
    real = worst_case_batch(1, job.longest, train.num_anchors, drafter, 1, with_final=True)
    of_batch = (real.taps_SE.numel() + real.final_QD.numel()) * D * 2
    for on_gpu, batches in ((True, 2), (False, 0)):
        settings = BF16, False, on_gpu, True
        ahead = Activations(drafter, D, job.target.vocab_size, batch, *settings).ahead_bytes
        assert ahead == batches * of_batch


@pytest.mark.parametrize(
    ("overrides", "reserved_gib"),
    [
        ([], 40.2),  # the step's
        (["train.offload_optimizer=true"], 20.9),
    ],
)
def test_the_flagships_training_on_one_gpu_takes_what_was_measured(overrides, reserved_gib):
    """H200, 2026-11-30, `tests/train_speed.py`; LOG.md."""
    one_gpu = ["hardware.gpus=1", "serve.tensor_parallel_size=1", "train.activation_checkpointing=true"]
    as_then = ["train.zero_stage=2", "train.objective.kind=cross_entropy", "data.final_states=false"]
    job = plan_of(FLAGSHIP, *overrides, *one_gpu, *as_then)
    (phase,) = (phase for phase in plan_phases(job) if phase.name.startswith("train: memory of each"))
    planned = sum(row.num_bytes for row in phase.rows if not row.what.startswith("CUDA"))
    assert planned / 2**30 == pytest.approx(reserved_gib, rel=0.1)


ZERO = [
    {"zero_stage": stage, "offload_optimizer": offload, "precision": precision}
    for stage, offload, precision in [
        *[(stage, False, "bfloat16") for stage in (0, 1, 2, 3)],
        *[(stage, True, "bfloat16") for stage in (2, 3)],
        *[(stage, False, "float32") for stage in (0, 2)],
    ]
]


@pytest.fixture(scope="module")
def held_by_deepspeed(tmp_path_factory) -> list[float]:
    """Bytes of a parameter on a single rank, by setting."""
    folder = tmp_path_factory.mktemp("zero")
    write_target(folder / "target")
    command = [sys.executable, "-m", "tests.zero_probe", str(folder)]
    settings = "\n".join(map(json.dumps, ZERO))
    environment = {name: value for name, value in os.environ.items() if name not in _ALONE}
    done = subprocess.run(
        command,
        input=settings,
        capture_output=True,
        text=True,
        check=False,
        cwd=RECIPES.parent,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(line) for line in done.stdout.splitlines() if re.fullmatch(r"[\d.]+", line)]


@pytest.mark.parametrize(
    "number", range(len(ZERO)), ids=lambda number: " ".join(map(str, ZERO[number].values()))
)
def test_a_parameter_takes_the_bytes_that_deepspeed_holds(held_by_deepspeed, number):
    train = plan_of(TINY).recipe.train.model_copy(update=ZERO[number])
    zero = zero_bytes(train)
    assert zero.whole + zero.split + zero.host == pytest.approx(held_by_deepspeed[number], rel=0.05)


# Adapters


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], list(Lora().targets)])
def test_adapters_are_counted_as_they_are_made(targets):
    lora = Lora(rank=3, targets=targets)
    drafter = DFlashDrafter(DRAFTER, HIDDEN)
    adapt(drafter, lora)
    trained = sum(each.numel() for each in drafter.parameters() if each.requires_grad)
    assert footprint.count_adapter_parameters(DRAFTER, HIDDEN, lora) == trained


def test_adapters_need_no_masters_of_what_is_frozen():
    flagship = plan_of(FLAGSHIP)
    adapted = plan_of(FLAGSHIP, "train.lora={rank: 16}", "train.init_from=published")
    rows, whole = (
        {row.what: row.num_bytes for row in phase_of(job, "train: memory of each GPU").rows}
        for job in (adapted, flagship)
    )
    assert rows["drafter, frozen"] == 2 * flagship.num_parameters
    of_adapters, of_all = (
        rows["adapters, gradients, masters, moments"],
        whole["drafter, gradients, masters, moments"],
    )
    assert of_adapters * flagship.num_parameters == pytest.approx(of_all * adapted.num_trained)
    assert adapted.num_trained < flagship.num_parameters / 50
    disk, whole_disk = (phase_of(job, "disk").need_gib for job in (adapted, flagship))
    assert whole_disk - disk == pytest.approx(2 * 12 * (flagship.num_parameters) / GIB, rel=0.05)


# A pairwise head beside the drafter


def test_a_head_takes_what_its_published_tensors_do():
    job = plan_of(FLAGSHIP, "train.pairwise.rank=96")
    target = job.target
    tensors = pairwise_tensors(target.vocab_size, target.hidden_size, 96).values()
    assert job.describe_pairwise(96)[1] == 2 * sum(map(math.prod, tensors))


def test_a_head_is_on_the_disk_with_each_checkpoint_and_in_each_engine():
    with_head, without = (plan_of(FLAGSHIP, *more) for more in (["train.pairwise={}"], []))
    for phase, name in (
        ("disk", "pairwise heads in them"),
        ("serve: memory of each GPU", "pairwise head"),
    ):
        names = [[row.what for row in phase_of(job, phase).rows] for job in (with_head, without)]
        assert [name in each for each in names] == [True, False]


def measure_head(counted) -> tuple[int, int]:
    """Numbers that a head learns, and the peak of its loss and gradient, on tensors without storage."""
    sizes = counted.blocks, counted.block_size - 1
    candidates = *sizes, counted.settings.candidates
    with FakeTensorMode():
        parts = TargetParts(*torch.empty(2, counted.vocab_size, counted.hidden_size, dtype=torch.bfloat16))
        learning = PairwiseHead(parts, counted.settings.rank)
        drafted = DraftedBlocks(
            torch.empty(*sizes, counted.hidden_size, dtype=torch.bfloat16),
            torch.empty(sizes[0], dtype=torch.int64),
            torch.empty(sizes, dtype=torch.int64),
            torch.empty(sizes, dtype=torch.bool),
            torch.empty(candidates, dtype=torch.int64),
            torch.empty(candidates),
        )
        blocks = [part for part in vars(drafted).values() if part is not None]
        given = [parts.embedding_VD, parts.head_VD, *learning.parameters(), *blocks]
        with LiveBytes(given) as live:
            weight = torch.empty((), dtype=torch.float64)
            backward(learning, [drafted], counted.settings.objective, weight=weight)
    return sum(each.numel() for each in learning.parameters()), live.peak


@pytest.mark.parametrize(
    ("path", "overrides"),
    [
        (FLAGSHIP, []),
        (FLAGSHIP, ["hardware.gpus=1", "serve.tensor_parallel_size=1", "train.pairwise.num_anchors=512"]),
        (FLAGSHIP, ["train.pairwise.rank=256"]),
        (FLAGSHIP, ["hardware.gpus=1", "serve.tensor_parallel_size=1", "train.pairwise.candidates=63"]),
        (TINY, []),
    ],
)
def test_a_head_beside_the_drafter_takes_what_the_plan_says(path, overrides):
    job = plan_of(path, "train.pairwise={}", *overrides)
    counted = companion_bytes(job, job.recipe.train.pairwise)
    num_parameters, peak = measure_head(counted)
    assert counted.num_parameters == num_parameters
    gradients = 4 * num_parameters
    assert 0.95 * peak < counted._loss_bytes() + gradients < 1.2 * peak


def test_a_head_beside_the_drafter_is_a_row_only_if_it_is_asked_for():
    without, with_head = (
        {row.what: row.num_bytes for row in phase_of(plan_of(FLAGSHIP, *more), TRAIN_ON_GPU).rows}
        for more in ([], ["train.pairwise={}"])
    )
    head_bytes = with_head.pop("pairwise head beside it")
    assert with_head == without
    blocks, hidden, rank = 16 // 2 * 32, 5120, 64
    states = 2 * blocks * 16 * hidden * BF16  # the drafter's, and the target's final ones
    assert head_bytes == 16 * (3 * hidden * rank + rank) + states
    without_final = plan_of(FLAGSHIP, "train.pairwise={}", "train.objective.kind=cross_entropy")
    rows = {row.what: row.num_bytes for row in phase_of(without_final, TRAIN_ON_GPU).rows}
    assert head_bytes - rows["pairwise head beside it"] == states / 2


def test_a_head_that_works_in_more_than_activations_leave_is_counted_whole():
    small = ["train.micro_batch_sequences=1", "train.num_anchors=1", "data.max_prompt_tokens=8"]
    job = plan_of(FLAGSHIP, *small, "data.sampling.max_tokens=8", "train.pairwise={rank: 512}")
    rows = {row.what: row.num_bytes for row in phase_of(job, TRAIN_ON_GPU).rows}
    counted = companion_bytes(job, job.recipe.train.pairwise)
    whole = counted.lasting_bytes + counted.work_bytes
    assert rows["activations"] < counted.work_bytes
    assert rows["pairwise head beside it"] + rows["activations"] == pytest.approx(whole)
