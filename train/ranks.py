"""The processes of one training: who this one is, and the few things they do together.

The only owner of ranks.  One process without a launcher is the same code path.  Python objects and CPU
tensors go over gloo and wait as long as it takes: a data phase may last for days.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recipes.errors import FAULT, MISTAKE, MachineError, UserError

PATIENCE = timedelta(days=365)
_ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # any free one
}


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def gpus_here(self) -> int:
        """That ranks of this machine take: the first visible ones."""
        return _count_local() if self.is_on_gpu else 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise over all ranks, in fp64 on the CPU."""
        total = values.detach().to("cpu", torch.float64)
        dist.all_reduce(total)
        return total

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, on every rank."""
        items = [None] * self.world_size
        dist.all_gather_object(items, item)
        return items

    def wait(self) -> None:
        self.gather(None)

    def on_main(self, action: Callable[[], None]) -> None:
        """The main rank acts while the others wait; its failure ends them all, with its exit code."""
        failure = None
        try:
            if self.is_main:
                action()
        except (UserError, MachineError, OSError) as error:
            failure = error
        code = self.gather((MISTAKE if isinstance(failure, UserError) else FAULT) if failure else None)[0]
        if failure is not None:
            raise failure
        if code is not None:
            raise SystemExit(code)


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Joins the launcher's ranks, or is the only one."""
    if "RANK" not in os.environ:
        os.environ.update(_ALONE)
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_cuda else torch.device("cpu")
    if has_cuda:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:  # a launcher that binds cores sets it
        _share_cores(_count_local())
    # NCCL connects at its first use, so that a GPU is free while the data phase's engine runs on it
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_cuda else "gloo", timeout=PATIENCE)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()
        if has_cuda:  # the engine that measures wants this memory
            gc.collect()
            torch.cuda.empty_cache()


def _count_local() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


def _share_cores(processes: int) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
