"""Ties a process to its parent's life, so that no engine outlives the command that started it (Linux)."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def follow_parent(parent_pid: int) -> None:
    """Asks the kernel for SIGKILL when the parent dies; ends at once when it already has.

    SIGKILL, because vLLM 0.32 swallows a SIGTERM that reaches its server while the engine is starting.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            sys.exit(128 + signal.SIGKILL)
