"""The memory of a CUDA context: measured once, beside the budget, and a line of the plan that no peak counts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from catalog.requests.memory import Memory
from engine.estimate import estimate
from engine.memory.budget import MemoryBudget, context_bytes, grow_segments
from engine.workspace import Workspace
from kronoscope.display.plan_tables import plan_lines
from tests.oracles import workspace

CUDA, MIB = torch.device("cuda"), 2**20


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    context_bytes.cache_clear()
    yield
    context_bytes.cache_clear()


class Card:
    """A device of which ``foreign`` bytes are in use, and ``context`` more once this process is on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, foreign: int, context: int) -> None:
        self.used, self.context, self.asked = foreign, context, 0
        monkeypatch.setattr(torch.cuda, "device_memory_used", self.in_use, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronise)

    def in_use(self, device: torch.device) -> int:
        assert device == CUDA
        self.asked += 1
        return self.used

    def synchronise(self, device: torch.device) -> None:
        assert device == CUDA
        self.used += self.context


def test_a_context_is_what_came_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, foreign=900 * MIB, context=512 * MIB)
    assert context_bytes(CUDA) == 512 * MIB
    # what the job allocates afterwards is none of it
    card.used += 2**30
    assert context_bytes(CUDA) == 512 * MIB
    assert card.asked == 2


def test_it_is_not_known_where_another_process_has_freed_more(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, foreign=900 * MIB, context=-10 * MIB)
    assert context_bytes(CUDA) == 0


def test_it_is_not_known_without_the_drivers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, foreign=0, context=MIB)

    def absent(device: torch.device) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "device_memory_used", absent)
    assert context_bytes(CUDA) == 0
    assert card.used == MIB  # made all the same


def test_a_device_that_does_not_answer_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, foreign=0, context=MIB)

    def failed(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device not ready")

    monkeypatch.setattr(torch.cuda, "synchronize", failed)
    with pytest.raises(RuntimeError, match="not ready"):
        context_bytes(CUDA)


def test_a_cpu_has_none() -> None:
    assert context_bytes(torch.device("cpu")) == 0


def test_a_budget_is_what_is_free_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, foreign=2**30, context=512 * MIB)
    context_bytes(CUDA)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * 2**30 - card.used, 8 * 2**30))
    found = MemoryBudget.measure(Memory(device=1.0), CUDA)
    assert (found.device_bytes, found.context_bytes) == (7 * 2**30 - 512 * MIB, 512 * MIB)


def planned(device: str, context: int) -> Workspace:
    chunk = torch.zeros(32, 24), torch.zeros(32, dtype=torch.int64)
    made = workspace(nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 10)), [chunk], "classification")
    made.machine.device = torch.device(device)
    made.machine.budget = MemoryBudget(device_bytes=2**33, host_bytes=2**40, context_bytes=context)
    made.options.decomposition = "none"
    return made


def test_a_plan_has_it_as_a_line_and_counts_it_in_no_peak() -> None:
    without: dict[str, Any] = estimate(planned("cuda", 0))
    beside: dict[str, Any] = estimate(planned("cuda", 512 * MIB))
    assert beside["context_bytes"] == 512 * MIB
    assert "context_bytes" not in without
    for name in ("device_peak_bytes", "budget"):
        assert beside[name] == without[name]
    assert beside["smallest_budget"]["device_bytes"] == without["smallest_budget"]["device_bytes"]
    (line,) = [line for line in plan_lines(beside) if line.startswith("context")]
    assert "512" in line
    assert not [line for line in plan_lines(without) if line.startswith("context")]
    assert "context_bytes" not in estimate(planned("cpu", 0))


class Allocator:
    """Torch's allocator of a device, of which a trial tensor stands on the host or ``fails``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Exception | None = None, *, grows: bool = True) -> None:
        self.settings: list[str] = []
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
        made = torch.ones

        def ones(*size: int, device: torch.device, **options: Any) -> torch.Tensor:
            assert device == CUDA
            assert self.settings == ["expandable_segments:True"], "tried as it is to be used"
            if fails is not None:
                raise fails
            return made(*size, **options)

        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.settings.append)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": grows}])
        monkeypatch.setattr(torch, "ones", ones)


@pytest.mark.parametrize("grows", [True, False])
def test_blocks_grow_where_a_tensor_shows_that_they_can(monkeypatch: pytest.MonkeyPatch, grows: bool) -> None:
    allocator = Allocator(monkeypatch, grows=grows)
    assert grow_segments(CUDA) == grows
    assert allocator.settings == ["expandable_segments:True"]


def test_blocks_are_fixed_again_where_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch, fails=RuntimeError("CUDA driver error: operation not supported"))
    assert not grow_segments(CUDA)
    assert allocator.settings == ["expandable_segments:True", "expandable_segments:False"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_a_caller_has_set_of_the_allocator_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    allocator = Allocator(monkeypatch)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    assert not grow_segments(CUDA)
    assert not grow_segments(torch.device("cpu"))
    assert allocator.settings == []
