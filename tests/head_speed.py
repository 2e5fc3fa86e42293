"""The head at the flagship's widths on one GPU: milliseconds forward and backward, TFLOP/s and memory.

    python tests/head_speed.py [--blocks 512] [--hidden 5120] [--vocabulary 248320] [--repeats 10]

By objective; states and weights are random.  FLOPs are those of the matrix products: logits and the gradient
of the hidden states, and the teacher's logits where there is one.  Memory is the most beside head and inputs.
"""

from dataclasses import dataclass
from statistics import median

import torch
import typer
from rich.console import Console
from rich.table import Table

from recipes.schema import Objective as Settings
from train.head import Rows, find_rows
from train.objective import Objective

KINDS = ("cross_entropy", "d_pace", "kl", "total_variation", "lk")
BLOCK_SIZE = 16
WARM_STEPS = 2
GIB = 1 << 30


@dataclass(frozen=True)
class Example:
    hidden_RD: torch.Tensor
    head_VD: torch.Tensor
    rows: Rows

    def flops(self) -> int:
        (num_rows, hidden), vocabulary = self.hidden_RD.shape, len(self.head_VD)
        products = 2 if self.rows.final_QD is None else 3
        return products * 2 * num_rows * hidden * vocabulary


@dataclass(frozen=True)
class Speed:
    forward_ms: float
    backward_ms: float
    peak_bytes: int


def make_example(settings: Settings, blocks: int, hidden: int, head_VD: torch.Tensor) -> Example:
    """All slots but the anchors' are supervised."""
    new = {"device": head_VD.device, "dtype": head_VD.dtype}
    supervised_AK = torch.ones(blocks, BLOCK_SIZE, dtype=torch.bool, device=head_VD.device)
    supervised_AK[:, 0] = False
    labels_AK = torch.randint(len(head_VD), supervised_AK.shape, device=head_VD.device)
    final_QD = torch.randn(supervised_AK.numel(), hidden, **new) if settings.needs_final_states else None
    rows = find_rows(labels_AK, supervised_AK, final_QD)
    return Example(torch.randn(len(rows.labels_R), hidden, **new).requires_grad_(), head_VD, rows)


def measure(objective: Objective, example: Example, repeats: int) -> Speed:
    """Medians over `repeats`, after some that compile and warm up."""
    times = []
    for step in range(WARM_STEPS + repeats):
        if step == WARM_STEPS:
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        loss_sum = objective.loss(example.hidden_RD, example.head_VD, example.rows).loss_sum
        marks[1].record()
        torch.autograd.grad(loss_sum, example.hidden_RD)
        marks[2].record()
        marks[2].synchronize()
        times.append((marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])))
        del loss_sum
    forward, backward = (median(each) for each in zip(*times[WARM_STEPS:], strict=True))
    return Speed(forward, backward, torch.cuda.max_memory_allocated() - held)


def main(blocks: int = 512, hidden: int = 5120, vocabulary: int = 248_320, repeats: int = 10) -> None:
    torch.manual_seed(0)
    head_VD = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
    table = Table("objective", "forward ms", "backward ms", "TFLOP/s", "peak GiB")
    for kind in KINDS:
        settings = Settings.model_validate({"kind": kind})
        example = make_example(settings, blocks, hidden, head_VD)
        speed = measure(Objective(settings), example, repeats)
        tflops = example.flops() / (speed.forward_ms + speed.backward_ms) / 1e9
        numbers = (speed.forward_ms, speed.backward_ms, tflops, speed.peak_bytes / GIB)
        table.add_row(kind, *(f"{number:,.2f}" for number in numbers))
        del example
    rows = blocks * (BLOCK_SIZE - 1)
    print(f"{torch.cuda.get_device_name()}: {rows:,} rows, {hidden:,} x {vocabulary:,}, bf16")
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
