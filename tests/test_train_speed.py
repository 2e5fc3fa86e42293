"""tests/train_speed.py: what a step computes, where its time goes, and that all of it runs at tiny widths."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_speed
from drafters import tiny_recipe
from search_path import environment
from torch.autograd import DeviceType
from train_speed import ATTENTION, FC, HEAD, LAYERS, OPTIMIZER, OTHER, Spent, Timed, attribute, count_pairs

from data.shards import Sequence
from train.batches import pack
from train.blocks import block_places, context_places, visibility
from train.feed import MicroBatch, Visit


@pytest.mark.parametrize("window", [1, 3, 7, 64])
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_pairs_are_those_that_see_each_other(kind, window):
    drafter = tiny_recipe(f"drafter.sliding_window={window}", "drafter.block_size=5").drafter
    anchors_A = torch.tensor([0, 1, 4, 9, 17])
    sequence = Sequence(torch.arange(20).int(), torch.ones(20, dtype=torch.bool), torch.zeros(19, 6))
    micro = MicroBatch((Visit(0, 0),), pack([sequence], [anchors_A], drafter))
    context, blocks = context_places(0, 17), block_places(0, 0, anchors_A, 5)
    seen = visibility(kind, window, context, blocks)
    assert count_pairs(micro, drafter, kind) == int(seen.sum())


# Where a step's time goes

TAPS = 25_600


def operator(name: str, caller=None, shapes=(), kernels=(), **also):
    """As the profiler's events are; kernels are names and microseconds."""
    launched = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels]
    fields = {"is_user_annotation": False, "device_type": DeviceType.CPU, "self_cpu_time_total": 7.0} | also
    return SimpleNamespace(name=name, cpu_parent=caller, input_shapes=shapes, kernels=launched, **fields)


def annotation(name: str, caller=None):
    return operator(name, caller, kernels=[(name, 1e6)], is_user_annotation=True)


def on_device(name: str, us: float, **also):
    spent = SimpleNamespace(elapsed_us=lambda: us)
    return operator(name, time_range=spent, **{"device_type": DeviceType.CUDA} | also)


def backward(name: str):
    return operator(f"autograd::engine::evaluate_function: {name}")


def test_a_kernel_counts_where_it_was_launched():
    drafter, optimizer = annotation(train_speed.DRAFTER_RANGE), annotation(train_speed.OPTIMIZER_RANGE)
    attention, head = operator("_KernelAttention", drafter), operator("_FrozenHead")
    wide, narrow = [[4095, TAPS], [TAPS, 5120]], [[8192, 5120], [5120, 4096]]
    launched = {
        "taps": (operator("aten::mm", drafter, wide), FC),
        "taps' weights": (operator("aten::mm", backward("MmBackward0"), wide), FC),
        "queries": (operator("aten::mm", drafter, narrow), LAYERS),
        "queries' weights": (operator("aten::mm", backward("MmBackward0"), narrow), LAYERS),
        "fused": (operator("CompiledFunction", drafter), LAYERS),
        "forward_kernel": (attention, ATTENTION),
        "keys_kernel": (
            operator("_KernelAttentionBackward", backward("_KernelAttentionBackward")),
            ATTENTION,
        ),
        "again": (operator("_KernelAttention", backward("CheckpointBackward")), ATTENTION),
        "logits": (operator("aten::mm", head, [[2160, 5120], [5120, 248_320]]), HEAD),
        "adam": (operator("aten::_fused_adamw_", annotation("Optimizer.step", optimizer)), OPTIMIZER),
        "sums": (operator("aten::add_", backward("torch::autograd::AccumulateGrad")), OTHER),
        "taps to the device": (operator("aten::copy_"), OTHER),
    }
    events = [drafter, optimizer, *(event for event, _ in launched.values())]
    for number, (name, (event, _)) in enumerate(launched.items()):
        event.kernels.append(SimpleNamespace(name=name, duration=1000.0 * number))
        events.append(on_device(name, 1000.0 * number))
    events += [on_device("orphan", 5.0), on_device("orphan", 5.0)]
    events.append(on_device(train_speed.DRAFTER_RANGE, 1e6, is_user_annotation=True))
    found = list(attribute(events, TAPS, on_gpu=True))
    expected = [Spent(name, float(ms), part) for ms, (name, (_, part)) in enumerate(launched.items())]
    assert found == [*expected, Spent("orphan", 0.005, OTHER), Spent("orphan", 0.005, OTHER)]


def test_parts_add_up_to_the_step():
    spent = [Spent("a", 3.0, FC), Spent("b", 2.0, HEAD), Spent("c", 1.0, FC)]
    parts = train_speed.split_step(Timed(0.010, 0.001, 0.0, 0.0), spent)
    assert parts[FC] == 4.0
    assert parts["no kernel"] == pytest.approx(3.0)
    assert sum(parts.values()) == pytest.approx(10.0)


def run_tiny(*arguments: str) -> list[str]:
    script = Path(__file__).with_name("train_speed.py")
    command = [sys.executable, str(script), "--tiny", "--sequences", "2", *arguments]
    settings = environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_step_is_measured_at_tiny_widths():
    sizes = "--tokens", "48", "--anchors", "6", "--steps", "1"
    also = "train.activation_checkpointing=true", "train.pairwise.rank=4"
    *_, told = run_tiny("--kernels", *sizes, *also)
    parts = json.loads(told)["parts_ms"]
    assert all(parts[part] > 0 for part in (ATTENTION, LAYERS, FC, HEAD, OPTIMIZER, OTHER))


def test_another_recipes_widths_are_its_targets():
    scale = train_speed.scale_of(tiny_recipe())
    assert (scale.hidden_size, scale.vocab_size) == (256, 4096)


def test_lengths_and_anchors_are_swept_at_tiny_widths():
    lines = [line.split() for line in run_tiny("--sweep")]
    for tokens, anchors in train_speed.TINY.sweep:
        (line,) = (line for line in lines if line[:2] == [str(tokens), str(anchors)])
        assert len(line) == len(train_speed.SWEEP)
