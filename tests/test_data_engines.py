"""data/engines.py: how engines share a machine; that they share the work is in test_data_regenerate.py."""

import pytest

from data import engines
from recipes.errors import UserError
from recipes.schema import Serve


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(engines, "is_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")


def test_an_engine_gets_neighbouring_gpus_of_its_own(four_gpus):
    shares = [
        share["CUDA_VISIBLE_DEVICES"] for share in engines.share_devices(2, Serve(tensor_parallel_size=2))
    ]
    assert shares == ["2,3", "5,7"]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in engines.share_devices(3, Serve())] == ["2", "3", "5"]


def test_too_few_gpus_are_a_users_mistake(four_gpus):
    with pytest.raises(UserError, match=r"need 6 GPUs, found 4: lower data\.engines"):
        engines.share_devices(3, Serve(tensor_parallel_size=2))


def test_engines_share_gpus_only_if_their_memory_is_given(four_gpus):
    shares = engines.share_devices(6, Serve(kv_cache_gib=4))
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["2", "3", "5", "7", "2", "3"]
    with pytest.raises(UserError, match=r"setting serve\.kv_cache_gib"):
        engines.share_devices(6, Serve())


@pytest.mark.parametrize(("threads", "count", "each"), [("7", 2, "3"), ("1", 2, "1"), ("4", 1, "4")])
def test_on_a_cpu_they_share_the_threads_of_one(monkeypatch, threads, count, each):
    monkeypatch.setattr(engines, "is_cuda", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert engines.share_devices(count, Serve()) == [{"OMP_NUM_THREADS": each}] * count
