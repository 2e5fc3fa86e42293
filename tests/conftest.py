"""The environment every test runs in, set before anything of vLLM's is imported, and what tests share."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
if "PYTEST_XDIST_WORKER" in os.environ:  # each process of pytest has a core, and so have its children
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)  # torch has read the environment already
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine: starts a vLLM engine (seconds to minutes)")


@pytest.fixture(scope="session")
def embedded_target() -> Path:
    """The folder of the committed hybrid target."""
    return REPOSITORY / "recipes" / "embedded" / "target"
