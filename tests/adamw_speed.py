"""An optimizer step over one flat tensor of the flagship's size: milliseconds, and GB/s of what has to move.

    python tests/adamw_speed.py [--millions 1730] [--repeats 10]

By `train.adamw`, by torch's fused AdamW, and by that after a pass that clips, as DeepSpeed has it.  On a GPU;
for a rehearsal on a CPU: TRITON_INTERPRET=1 and --millions 1.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import typer
from rich.console import Console
from rich.table import Table

from train import adamw

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
SETTINGS = {"lr": 1e-5, "weight_decay": 0.01}
WARM_STEPS = 2
STEP_BYTES = 4 * (4 + 3)  # of an element: weight, gradient and two moments are read, all but one written
CLIP_BYTES = 4 * (1 + 1)


@dataclass(frozen=True)
class Way:
    step: Callable[[], None]
    element_bytes: int


def by_ours(weight_N: torch.Tensor, factor: torch.Tensor) -> Way:
    return Way(adamw.AdamW([weight_N], **SETTINGS, scale=lambda: factor).step, STEP_BYTES)


def by_torchs(weight_N: torch.Tensor, factor: torch.Tensor) -> Way:
    return Way(torch.optim.AdamW([weight_N], **SETTINGS, fused=True).step, STEP_BYTES)


def by_clipping_first(weight_N: torch.Tensor, factor: torch.Tensor) -> Way:
    optimizer = torch.optim.AdamW([weight_N], **SETTINGS, fused=True)

    def step() -> None:
        if factor < 1:
            weight_N.grad.mul_(factor)
        optimizer.step()

    return Way(step, STEP_BYTES + CLIP_BYTES)


WAYS = {
    "train.adamw, clipping as it reads": by_ours,
    "torch's fused, not clipping": by_torchs,
    "clipping, then torch's fused": by_clipping_first,
}


def measure(step: Callable[[], None], repeats: int) -> float:
    """Milliseconds, the median over `repeats`, after some that compile and warm up."""
    times = []
    for _ in range(WARM_STEPS + repeats):
        synchronize()
        begun = time.perf_counter()
        step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - begun))
    return median(times[WARM_STEPS:])


def synchronize() -> None:
    if IS_CUDA:
        torch.cuda.synchronize()


def main(millions: float = 1730, repeats: int = 10) -> None:
    adamw.KERNEL_ON.add(DEVICE.type)
    size = round(millions * 1e6)
    weight_N = torch.randn(size, device=DEVICE, requires_grad=True)
    weight_N.grad = torch.randn(size, device=DEVICE)
    factor = torch.tensor(0.99, device=DEVICE)
    table = Table("step", "ms", "bytes an element", "GB/s")
    for name, begin in WAYS.items():
        way = begin(weight_N, factor)
        step_ms = measure(way.step, repeats)
        gigabytes_s = size * way.element_bytes / step_ms / 1e6
        table.add_row(name, f"{step_ms:,.2f}", str(way.element_bytes), f"{gigabytes_s:,.1f}")
        del way  # and its moments, 8 bytes an element
    print(f"{torch.cuda.get_device_name() if IS_CUDA else 'a CPU'}: {size:,} elements, fp32")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
