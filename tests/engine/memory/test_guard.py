"""The guard's ladder, with failures that are injected: order, retries, what is said, and what stays referred to."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.errors import BudgetExceeded, OutOfMemory
from engine.linalg.eigendecomposition import decompose
from engine.memory import guard as guard_module
from engine.memory.budget import MemoryBudget, give_back_host_memory, hold_device, resident_bytes
from engine.memory.guard import Fallback, FallbackFailed, Guard
from engine.memory.out_of_memory import lost_device, ran_out_of_memory
from engine.memory.plan import Plan, Term

MIB = 2**20


def limited(host_bytes: int) -> tuple[Guard, list[str]]:
    """A guard with so many bytes free on the host, and what it logs."""
    lines: list[str] = []
    # what earlier tests have freed would be given back by the guard itself, and then count as free
    gc.collect()
    give_back_host_memory()
    budget = MemoryBudget(device_bytes=2**62, host_bytes=resident_bytes() + host_bytes)
    return Guard(budget=budget, device=torch.device("cpu"), log=lambda _, line: lines.append(line)), lines


def rung(name: str, host_bytes: int, run: Callable[[], str]) -> Fallback[str]:
    return Fallback(name=name, formula=f"{name}'s n²", device_bytes=0, host_bytes=host_bytes, run=run)


class Failing:
    """Raises the given errors one after another, then gives its name."""

    def __init__(self, name: str, *errors: BaseException) -> None:
        self.name, self.errors, self.calls = name, list(errors), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.name


def host_failure() -> RuntimeError:
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 800 bytes. Error code 12 (Cannot allocate memory)"
    )


def test_the_first_rung_that_fits_is_taken_and_the_others_are_named() -> None:
    keeper, _ = limited(100 * MIB)
    ladder = [rung("top", 4_000 * MIB, Failing("top")), rung("low", 10 * MIB, Failing("low"))]
    found = keeper.run_with_fallbacks(ladder, what="the eigenvalues of A", layer="fc", stage="decomposition")
    assert (found.value, found.taken, found.planning_errors) == ("low", ("low",), ())
    (passed,) = found.refused
    assert (passed.name, passed.place, passed.needed) == ("top", "host", 4_000 * MIB)
    assert passed.free == pytest.approx(100 * MIB, abs=20 * MIB)


def test_the_plans_rung_is_where_the_ladder_begins() -> None:
    keeper = Guard.unlimited()
    top, middle = Failing("top"), Failing("middle", MemoryError("no"), MemoryError("no"))
    ladder = [rung("top", 1, top), rung("middle", 1, middle), rung("low", 1, Failing("low"))]
    found = keeper.run_with_fallbacks(ladder, what="w", layer=None, stage="s", begin="middle")
    assert (found.value, found.taken, found.refused, top.calls) == ("low", ("middle", "low"), (), 0)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        host_failure(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        # on a MIG slice, where the driver does not list the processes that the message is to name
        RuntimeError(
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1090, please report a bug'
        ),
        RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("could not create a memory object"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=[
        "python",
        "cuda",
        "torch",
        "cublas",
        "mig",
        "cusolver-handle",
        "cublas-handle",
        "cudnn-handle",
        "onednn",
        "mmap",
    ],
)
def test_what_runs_out_is_tried_once_more_then_a_rung_lower(error: BaseException) -> None:
    assert ran_out_of_memory(error)
    assert not lost_device(error)
    keeper, lines = limited(100 * MIB)
    once, twice = Failing("a", error), Failing("a", error, error)
    ladder = [rung("a", MIB, once), rung("b", MIB, Failing("b"))]
    found = keeper.run_with_fallbacks(ladder, what="w", layer="fc", stage="s")
    assert (found.value, found.taken, len(found.planning_errors), once.calls) == ("a", ("a",), 1, 2)
    ladder[0] = rung("a", MIB, twice)
    found = keeper.run_with_fallbacks(ladder, what="w", layer="fc", stage="s")
    assert (found.value, found.taken, twice.calls) == ("b", ("a", "b"), 2)
    (missed,) = found.planning_errors
    assert (missed.rung, missed.layer, missed.foreseen_host_bytes) == ("a", "fc", MIB)
    assert len(keeper.planning_errors) == 2
    assert "layer `fc` ran out of memory by `a`" in lines[0]


def test_other_failures_pass_through_and_a_failed_rung_goes_on() -> None:
    keeper = Guard.unlimited()
    with pytest.raises(ZeroDivisionError):
        keeper.run_with_fallbacks([rung("a", 0, Failing("a", ZeroDivisionError()))], what="w", layer=None, stage="s")
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert lost_device(lost)
    with pytest.raises(RuntimeError, match="illegal"):
        keeper.run_with_fallbacks(
            [rung("a", 0, Failing("a", lost)), rung("b", 0, Failing("b"))], what="w", layer=None, stage="s"
        )
    ladder = [rung("a", 0, Failing("a", FallbackFailed("did not converge"))), rung("b", 0, Failing("b"))]
    assert keeper.run_with_fallbacks(ladder, what="w", layer=None, stage="s").taken == ("a", "b")
    ladder = [rung(name, 0, Failing(name, FallbackFailed("did not converge"))) for name in "ab"]
    with pytest.raises(FallbackFailed, match="a: did not converge; b: did not converge"):
        keeper.run_with_fallbacks(ladder, what="w", layer=None, stage="s")


HINT = (
    "\nSearch for `cudaErrorX' in https://docs.nvidia.com/cuda/cuda-runtime-api for more information."
    "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
"""The last lines of torch's errors of the CUDA runtime, whichever they are."""


@pytest.mark.parametrize("hint", ["", HINT], ids=["plain", "hint"])
@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA error: device-side assert triggered", True),
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: operation not supported on global/shared address space", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(…)`", True),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True),
        ("CUDA error: an error that has no name yet", True),
        ("CUDA driver error: unknown error", True),
        ("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(…)`", False),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(…)`", False),
        ("CUDA error: CUBLAS_STATUS_ARCH_MISMATCH when calling `cublasCreate(handle)`", False),
        ("CUDA error: invalid configuration argument", False),
        ("CUDA error: invalid device function", False),
        ("CUDA error: too many resources requested for launch", False),
        ("CUDA error: the provided PTX was compiled with an unsupported toolchain.", False),
        ("CUDA error: no kernel image is available for execution on the device", False),
        ("CUDA error: operation not supported", False),
        ("cusolver error: CUSOLVER_STATUS_INVALID_VALUE, when calling `cusolverDnCreateParams(…)`", False),
        ("cusparse error: CUSPARSE_STATUS_INVALID_VALUE, when calling `cusparseCreateCsr(…)`", False),
        ("linalg.eigh: The algorithm failed to converge", False),
    ],
)
def test_only_a_broken_context_is_a_lost_device(said: str, lost: bool, hint: str) -> None:
    error = RuntimeError(said + hint)
    assert lost_device(error) == lost
    assert not ran_out_of_memory(error)


def test_a_solver_does_not_go_on_with_a_broken_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(said: str) -> Callable[..., Tensor]:
        def failing(*_: object, **__: object) -> Tensor:
            raise RuntimeError(said)

        return failing

    matrix = torch.eye(3, dtype=torch.float64)
    monkeypatch.setattr(torch.linalg, "eigh", fail("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        decompose(matrix, "fc", need="vectors", guard=Guard.unlimited())
    monkeypatch.setattr(torch.linalg, "eigh", fail("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling"))
    found = decompose(matrix, "fc", need="vectors", guard=Guard.unlimited())
    assert found.rungs[:2] == ("host_float64", "host_syevr")


def test_a_ladder_that_does_not_fit_says_what_would() -> None:
    keeper, _ = limited(10 * MIB)
    keeper.plan = Plan(
        terms=(Term(name="factors", formula="Σ n²", size_bytes=64 * MIB, place="host", source="exact", stage="s"),)  # type: ignore[arg-type]
    )
    ladder = [rung("a", 9_000 * MIB, Failing("a")), rung("b", 5_000 * MIB, Failing("b"))]
    with pytest.raises(BudgetExceeded) as refused:
        keeper.run_with_fallbacks(ladder, what="the eigenvalues of G", layer="head", stage="s")
    said = refused.value
    assert (said.layer, said.pointer, said.code) == ("head", "/memory/host", "budget_exceeded")
    assert "`b` requested 4.88 GiB of host memory (b's n²)" in said.message
    assert "factors 64 MiB (Σ n²)" in said.message
    needed = int(said.message.rpartition("`memory.host` to ")[2].removesuffix("MiB or more"))
    assert 5_000 * MIB + resident_bytes() == pytest.approx(needed * MIB, abs=8 * MIB)


def test_the_last_rung_that_runs_out_ends_with_the_report() -> None:
    keeper, _ = limited(500 * MIB)
    ladder = [rung(name, 20 * MIB, Failing(name, host_failure(), host_failure())) for name in "ab"]
    with pytest.raises(OutOfMemory, match=r"`b` requested 20 MiB of host memory \(b's n²\)") as ended:
        keeper.run_with_fallbacks(ladder, what="w", layer="fc", stage="s")
    assert (ended.value.code, ended.value.category) == ("out_of_memory", "usage")
    assert [missed.rung for missed in keeper.planning_errors] == ["a", "b"]
    assert "are resident" in ended.value.message


def test_an_attempt_that_failed_holds_nothing_when_the_next_begins() -> None:
    """A traceback refers to every tensor of the frames it went through: it must be gone before memory is freed."""
    kept: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def fails() -> str:
        alive.append(sum(each() is not None for each in kept))
        large = torch.zeros(1000)
        kept.append(weakref.ref(large))
        raise host_failure()

    def works() -> str:
        alive.append(sum(each() is not None for each in kept))
        return "b"

    gc.disable()
    try:
        Guard.unlimited().run_with_fallbacks(
            [rung("a", 0, fails), rung("b", 0, works)], what="w", layer=None, stage="s"
        )
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_freed_memory_is_given_back_before_a_rung_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"before": 5, "after": 50}
    given_back: list[bool] = []
    monkeypatch.setattr(guard_module, "give_back_host_memory", lambda: given_back.append(True))
    monkeypatch.setattr(guard_module, "free_host_bytes", lambda: free["after" if given_back else "before"])
    keeper, _ = limited(2**40)
    assert keeper.fits(host_bytes=5)
    assert not given_back
    assert keeper.fits(host_bytes=40)
    assert given_back
    assert not keeper.fits(host_bytes=60)


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_device_budget_is_held_with_an_index_and_without(
    monkeypatch: pytest.MonkeyPatch, name: str, index: int
) -> None:
    """torch's own function, on a machine with a GPU or without: only what asks the driver is replaced."""
    told: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8 * MIB))
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *given: told.append(given), raising=False)
    hold_device(MemoryBudget(device_bytes=2 * MIB, host_bytes=0), torch.device(name))
    assert told == [(0.25, index)]
