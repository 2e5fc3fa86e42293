"""Kernels compiled for GPUs that are not there, by a process that does not interpret them.

Triton brings its assembler along.  The code that is run prints a line of numbers for each.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from search_path import environment


def run_apart(code: str, cache: Path) -> list[tuple[int, ...]]:
    """The numbers in each line that the code prints, where Triton compiles into an empty cache."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment() | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


def stack_bytes(cubin: bytes) -> int:
    """Of a thread: what did not fit its registers."""
    from triton import knobs  # noqa: PLC0415 - the process that compiles has its own environment

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(usage.split("STACK:")[1].split()[0])
