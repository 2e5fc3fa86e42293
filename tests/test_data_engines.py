"""data/engines.py: how engines share a machine; that they share the work is in test_data_regenerate.py."""

import pytest

from data import engines
from recipes.errors import UserError


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(engines, "is_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")


def test_an_engine_gets_neighbouring_gpus_of_its_own(four_gpus):
    shares = [share["CUDA_VISIBLE_DEVICES"] for share in engines.share_devices(2, 2)]
    assert shares == ["2,3", "5,7"]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in engines.share_devices(3, 1)] == ["2", "3", "5"]


def test_too_few_gpus_are_a_users_mistake(four_gpus):
    with pytest.raises(UserError, match=r"need 6 GPUs, found 4: lower data\.engines"):
        engines.share_devices(3, 2)


@pytest.mark.parametrize(("threads", "count", "each"), [("7", 2, "3"), ("1", 2, "1"), ("4", 1, "4")])
def test_on_a_cpu_they_share_the_threads_of_one(monkeypatch, threads, count, each):
    monkeypatch.setattr(engines, "is_cuda", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert engines.share_devices(count, 1) == [{"OMP_NUM_THREADS": each}] * count
