"""Keeps Python's garbage collector away from what stays: the thousands of modules that vLLM imports."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def modules_stay() -> Iterator[None]:
    """For large imports: no garbage is collected meanwhile, and what they made is never looked through again.

    vLLM is imported in a quarter less time, and starts sooner: it has garbage collected ten times in a start,
    0.35 s each where all of its modules are looked through.
    """
    atexit.register(gc.unfreeze)  # or Triton tells everybody at the end what was not taken apart
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
