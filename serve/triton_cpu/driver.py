"""The driver half: active only where Triton interprets."""

import os

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpretedCpuDriver(DriverBase):
    """Answers `is_active`; the interpreter asks a driver for nothing else."""

    @classmethod
    def is_active(cls) -> bool:
        return os.environ.get("TRITON_INTERPRET") == "1"

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("the interpreted cpu backend launches no compiled kernels")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError("autotuning is meaningless in Triton's interpreter")
