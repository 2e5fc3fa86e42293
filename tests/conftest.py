"""The environment every test runs in, set before anything of vLLM's is imported, and what tests share."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from serve.heap import modules_stay

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
if "PYTEST_XDIST_WORKER" in os.environ:  # each process of pytest has a core, and so have its children
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)  # torch has read the environment already
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if TYPE_CHECKING:
    from train.ranks import Ranks

REPOSITORY = Path(__file__).resolve().parent.parent
LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""What a launcher of one rank sets."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine: starts a vLLM engine (seconds to minutes)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """All that the tests' files import comes here, and stays."""
    with modules_stay():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start engines come first: of two processes neither has a long one left at the end."""
    first = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: item.path not in first)


@pytest.fixture(scope="session")
def embedded_target() -> Path:
    """The folder of the committed hybrid target."""
    return REPOSITORY / "recipes" / "embedded" / "target"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """What training reads of a small target (tests/small_training.py)."""
    from small_training import write_target  # noqa: PLC0415 - most tests need none

    return write_target(tmp_path / "target")


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A small drafter that fits it."""
    from small_drafters import write_drafter  # noqa: PLC0415

    return write_drafter(tmp_path / "drafter")


@pytest.fixture(scope="session")
def joined_rank() -> Iterator["Ranks"]:
    """Once in a process, as DeepSpeed remembers groups that are gone; the environment is put back at once."""
    from train.ranks import joined_ranks  # noqa: PLC0415 - most tests need no ranks

    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as environment:
            for name in LAUNCHED:
                environment.setenv(name, "")  # so that it is put back afterwards
                environment.delenv(name)
            environment.setenv("OMP_NUM_THREADS", "1")
            ranks = stack.enter_context(joined_ranks())
        yield ranks


@pytest.fixture(scope="module")
def only_rank(joined_rank: "Ranks") -> Iterator["Ranks"]:
    """For engines in this process: DeepSpeed asks the environment who it is."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in LAUNCHED.items():
            environment.setenv(name, value)
        environment.setenv("OMP_NUM_THREADS", "1")
        yield joined_rank
