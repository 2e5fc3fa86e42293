"""Putting a NumPy function in a Triton kernel's place.

A stand-in is launched as its kernel is, `kernel[grid](*arguments)`, and runs once for the whole grid.
vLLM's registry for such overrides (`vllm.triton_utils.dispatcher`) drops the grid, which some kernels need.
"""

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from serve.seam.checks import SeamError

Arguments = SimpleNamespace
"""A launch: `grid`, and the kernel's arguments by name; tensors as NumPy arrays in place, bf16 ones not."""
Function = Callable[[Arguments], bool | None]
"""False says: a case that is left to the interpreted kernel."""


@dataclass(frozen=True)
class StandIn:
    """What replaces one kernel."""

    kernel: str
    """`module.name`."""
    argument_names: tuple[str, ...]
    function: Function


def stands_in_for(kernel: str, argument_names: str) -> Callable[[Function], StandIn]:
    """Declares a stand-in; the names, separated by blanks, are all of the kernel's own and in their order."""
    return lambda function: StandIn(kernel, tuple(argument_names.split()), function)


class HostKernel:
    """The object that sits where the kernel was."""

    def __init__(self, kernel: Any, stand_in: StandIn) -> None:
        self.kernel = kernel
        self.arg_names = kernel.arg_names
        self._function = stand_in.function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        if self._function(self.bind(grid, *args, **kwargs)) is False:
            self.kernel[grid](*args, **kwargs)

    def bind(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> Arguments:
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        return Arguments(grid=grid, **{name: _in_place(value) for name, value in named.items()})


def _in_place(value: Any) -> Any:
    is_readable = isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16
    return value.detach().numpy() if is_readable else value


def install(stand_ins: list[StandIn]) -> None:
    """Puts each stand-in in its kernel's place; a second call changes nothing.

    Raises SeamError naming the kernel that is missing or takes other arguments, before any is replaced.
    """
    places = [(*_find_kernel(stand_in), stand_in) for stand_in in stand_ins]
    for module, name, kernel, stand_in in places:
        if not isinstance(kernel, HostKernel):
            setattr(module, name, HostKernel(kernel, stand_in))


def _find_kernel(stand_in: StandIn) -> tuple[Any, str, Any]:
    module_name, _, name = stand_in.kernel.rpartition(".")
    module = importlib.import_module(module_name)
    kernel = getattr(module, name, None)
    if kernel is None:
        raise SeamError(f"{stand_in.kernel}: this vLLM has no such kernel")
    found = tuple(kernel.arg_names)
    if found != stand_in.argument_names:
        raise SeamError(f"{stand_in.kernel}: expected the arguments {stand_in.argument_names}, found {found}")
    return module, name, kernel


def view_int32(address: int, count: int) -> np.ndarray:
    """The `count` int32 that begin at `address`, in place."""
    return np.ctypeslib.as_array(ctypes.cast(int(address), ctypes.POINTER(ctypes.c_int32)), (int(count),))
