"""How much memory of the GPUs is in use, by whomever: what an engine takes is a difference of two such."""

import os
import subprocess

from serve.engine import is_cuda

_MIB_A_GIB = 1024
_LIMIT_S = 30.0


def read_used_gib() -> float | None:
    """Of the GPUs that this process may use, together; None on a CPU, and where the driver's tool is silent.

    Another process's memory counts as well, so nothing else may come or go between two readings.
    """
    if not is_cuda():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [f"--id={visible}"] if visible else []
    command = ["nvidia-smi", *chosen, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT_S).stdout
        return sum(map(float, told.split())) / _MIB_A_GIB
    except (OSError, subprocess.SubprocessError, ValueError):  # a container without it, "[N/A]"
        return None
