"""eval/gpu_memory.py: the driver's tool is played; no GPU is needed."""

import pytest

from eval import gpu_memory
from eval.gpu_memory import read_used_gib


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """Puts a script in the place of the driver's tool, on a machine that has a GPU."""
    monkeypatch.setattr(gpu_memory, "is_cuda", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return put


def test_what_several_gpus_hold_is_added(tool):
    tool("echo 1024; echo 512")
    assert read_used_gib() == 1.5


def test_only_the_gpus_that_are_visible_are_asked(tool, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    tool('for word in "$@"; do test "$word" = --id=2,3 && echo 2048; done; exit 0')
    assert read_used_gib() == 2.0


@pytest.mark.parametrize("script", ["exit 9", "echo '[N/A]'"])
def test_a_tool_that_says_nothing_is_no_number(tool, script):
    tool(script)
    assert read_used_gib() is None


def test_a_machine_without_the_tool_or_without_a_gpu_has_none(tool, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_used_gib() is None
    monkeypatch.setattr(gpu_memory, "is_cuda", lambda: False)
    tool("echo 1024")
    assert read_used_gib() is None
