"""The guard on a device: the budget is the allocator's own, and what exceeds it goes down the ladder."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from catalog.requests.memory import Memory
from engine.collect import collect_or_read
from engine.errors import OutOfMemory
from engine.memory.budget import MemoryBudget, free_device_bytes, hold_device
from engine.memory.guard import Fallback, Guard
from engine.memory.out_of_memory import free_memory, lost_device
from tests.oracles import relative_error, workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MIB = 2**20
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def unheld() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    free_memory(CUDA)


def held(device_bytes: int) -> tuple[MemoryBudget, list[str]]:
    """A device budget beyond what other tests hold, kept by torch's allocator."""
    free_memory(CUDA)
    budget = MemoryBudget(device_bytes=torch.cuda.memory_reserved() + device_bytes, host_bytes=2**62)
    hold_device(budget, CUDA)
    return budget, []


def numbers(mib: int) -> torch.Tensor:
    return torch.zeros(mib * MIB, dtype=torch.uint8, device=CUDA)


def ask(program: str) -> str:
    """Return the text that a separate process prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_context_is_measured_by_the_process_that_makes_it() -> None:
    pytest.importorskip("pynvml")
    measured = ask(
        "from engine.memory.budget import context_bytes\n"
        "from worker.execution.computing_environment import computing_device\n"
        "print(context_bytes(computing_device(None)))"
    )
    assert 64 * MIB < int(measured) < 4096 * MIB


def test_blocks_grow_in_place_and_the_budget_still_holds() -> None:
    told = ask(
        "import torch\n"
        "from engine.memory.budget import MemoryBudget, grow_segments, hold_device\n"
        "device = torch.device('cuda')\n"
        "grows = grow_segments(device)\n"
        "hold_device(MemoryBudget(device_bytes=256 * 2**20, host_bytes=0), device)\n"
        "kept = torch.ones(100 * 2**20, dtype=torch.uint8, device=device)\n"
        "print(grows, {each['is_expandable'] for each in torch.cuda.memory_snapshot()})\n"
        "try:\n"
        "    torch.ones(200 * 2**20, dtype=torch.uint8, device=device)\n"
        "except torch.OutOfMemoryError:\n"
        "    print('refused')\n"
    )
    assert told.splitlines() == ["True {True}", "refused"]


def test_the_allocator_refuses_what_exceeds_the_budget() -> None:
    held(256 * MIB)
    assert numbers(128).numel() == 128 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        numbers(512)


def test_a_failure_is_retried_and_then_taken_one_rung_down() -> None:
    budget, lines = held(256 * MIB)
    keeper = Guard(budget=budget, device=CUDA, log=lambda _, line: lines.append(line))
    calls: list[str] = []

    def rung(name: str, mib: int, foreseen: int) -> Fallback[int]:
        def run() -> int:
            calls.append(name)
            return numbers(mib).numel()

        return Fallback(name=name, formula="n", device_bytes=foreseen * MIB, host_bytes=0, run=run)

    # the first is foreseen too small, the second is passed over, the third does
    ladder = [rung("a", 600, 10), rung("b", 500, 500), rung("c", 64, 64)]
    found = keeper.run_with_fallbacks(ladder, what="w", layer="fc", stage="s")
    assert (found.value, found.taken, calls) == (64 * MIB, ("a", "c"), ["a", "a", "c"])
    assert [refused.name for refused in found.refused] == ["b"]
    assert len(found.planning_errors) == 1
    with pytest.raises(OutOfMemory, match="reserved") as ended:
        keeper.run_with_fallbacks(ladder[:1], what="w", layer="fc", stage="s")
    assert ended.value.pointer == "/memory/device"


def test_what_the_allocator_keeps_unused_counts_as_free() -> None:
    keeper = Guard(budget=MemoryBudget(device_bytes=2**62, host_bytes=2**62), device=CUDA, log=lambda _, __: None)
    kept = numbers(256)
    before = keeper.free_bytes("device")
    del kept
    assert torch.cuda.memory_reserved() >= 256 * MIB
    assert keeper.free_bytes("device") >= before + 200 * MIB
    assert free_device_bytes(CUDA) >= before + 200 * MIB


def test_a_collection_whose_batches_do_not_fit_goes_on_with_slices() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8)).to(CUDA)
    data = [(torch.randn(16384, 64), torch.randint(0, 8, (16384,)))]
    made, whole = (
        workspace(model, data, "classification", fisher="mc", dtype="float32", batch_size=16384) for _ in range(2)
    )
    for each in (made, whole):
        each.machine.device, each.options.memory = CUDA, Memory()
    wanted = collect_or_read(whole)
    # the plan knows of no limit: what it misses is found out
    made.machine.guard = Guard(budget=MemoryBudget.unlimited(), device=CUDA, log=lambda _, __: None)
    held(400 * MIB)
    found = collect_or_read(made)
    assert made.machine.guard.planning_errors
    assert found.micro_batch is not None
    assert found.micro_batch < 16384
    for layer in wanted.layers:
        for side in ("A", "G"):
            left, right = (getattr(each.load(layer.ordinal), side) for each in (found, wanted))
            assert relative_error(left, right) < 1e-5


def test_a_lost_device_is_no_want_of_memory() -> None:
    kind = getattr(torch, "AcceleratorError", RuntimeError)
    assert lost_device(kind("CUDA error: device-side assert triggered"))
