"""The offload store: tensors come back as they went, and the cache holds no more than its capacity."""

import pytest
import torch

from engine.errors import UsageError
from engine.memory.offload_store import OffloadStore

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64, torch.int16])
def test_a_tensor_comes_back_as_it_went(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 5).to(dtype)
    store = OffloadStore()
    store.offload("U", tensor.mT)
    given = tensor.clone()
    tensor.zero_()
    assert torch.equal(store.load("U", CPU), given.mT)


def test_copies_are_counted_without_a_gpu() -> None:
    store = OffloadStore(0)
    store.offload("U", torch.zeros(10))
    for _ in range(3):
        store.load("U", CPU)
    found = store.statistics()
    assert (found["num_transfers_to_cpu"], found["num_transfers_to_gpu"]) == (1, 3)
    assert (found["bytes_to_cpu"], found["bytes_to_gpu"]) == (40, 120)
    assert found["avg_transfer_time_ms"] > 0
    assert (found["hit_rate"], found["evictions"]) == (0, 0)
    assert found["pinned"] is torch.cuda.is_available()


def test_the_least_recently_used_goes_first() -> None:
    store = OffloadStore(capacity_bytes=80)
    for name in "abc":
        store.offload(name, torch.zeros(10))
    for name in "abacb":  # c takes the place of b, then b that of a
        store.load(name, CPU)
        assert store.cached_bytes <= 80
    found = store.statistics()
    assert (found["num_transfers_to_gpu"], found["evictions"]) == (4, 2)
    assert found["hit_rate"] == 1 / 5
    assert store.host_bytes == 120
    store.offload("big", torch.zeros(100))
    store.load("big", CPU)  # alone beyond the capacity: nothing goes for it
    assert store.statistics()["evictions"] == 2


def test_a_new_tensor_takes_the_place_of_the_old() -> None:
    store = OffloadStore()
    store.offload("U", torch.zeros(3))
    store.load("U", CPU)
    store.offload("U", torch.ones(3))
    assert store.load("U", CPU).tolist() == [1, 1, 1]
    store.release("U")
    assert store.host_bytes == store.cached_bytes == 0
    with pytest.raises(UsageError, match="no tensor `U` was offloaded; there are: none"):
        store.load("U", CPU)


def test_statistics_of_nothing_are_zeros() -> None:
    assert OffloadStore().statistics()["avg_transfer_time_ms"] == 0
