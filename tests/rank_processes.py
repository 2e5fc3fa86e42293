"""Processes that are the ranks of one training, as a launcher would start them.  No test."""

import os
import socket
import subprocess
import sys


def run_ranks(
    script: str, num_ranks: int, *arguments: object, on_gpus: bool = False, limit_s: float = 300
) -> str:
    """Runs `script` as each rank until all end; what they said, of which none may have failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    world = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "OMP_NUM_THREADS": 1}
    devices = {} if on_gpus else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, script, *map(str, arguments)]
    processes = []
    for rank in range(num_ranks):
        launched = where | world | devices | {"RANK": rank, "LOCAL_RANK": rank}
        environment = os.environ | {name: str(value) for name, value in launched.items()}
        processes.append(
            subprocess.Popen(
                command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    said = [process.communicate(timeout=limit_s)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * num_ranks, said
    return "".join(said)
