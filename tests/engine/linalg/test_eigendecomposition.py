"""The ladder of eigensolvers: known spectra by every rung, each rung's failure, and what is laid aside."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import NonFiniteFactor, NotConverged
from engine.factors.low_rank import LowRank
from engine.linalg import eigendecomposition, eigensolvers
from engine.linalg.eigendecomposition import decompose, rungs
from engine.memory.budget import MemoryBudget
from engine.memory.guard import Guard
from tests.memory_profile import peak_bytes

HOST = torch.device("cpu")
FLOAT64_RUNGS = ("host_float64", "host_syevr", "host_in_place", "jittered")


def covariance(size: int, rank: int, seed: int = 0) -> Tensor:
    rows = torch.randn(rank, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows.T @ rows / rank


def with_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    size = values.numel()
    noise = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    basis, _ = torch.linalg.qr(noise)
    made = (basis * values) @ basis.T
    return (made + made.T) / 2


def test_the_second_difference_matrix_by_every_rung() -> None:
    size = 30
    matrix = 2 * torch.eye(size) - torch.diag(torch.ones(size - 1), 1) - torch.diag(torch.ones(size - 1), -1)
    expected = torch.tensor(
        [2 - 2 * math.cos(k * math.pi / (size + 1)) for k in range(1, size + 1)], dtype=torch.float64
    )
    for rung in rungs(size, need="values", device=HOST):
        found = decompose(matrix, "layer", begin=rung.name)
        assert found.rungs == (rung.name,)
        assert torch.allclose(found.values, expected, atol=1e-12)


@pytest.mark.part(of=16, by=("rung",))
@pytest.mark.parametrize("size", [90, 150])
@pytest.mark.parametrize("rung", FLOAT64_RUNGS)
def test_a_graded_spectrum_and_its_basis_by_every_rung(rung: str, size: int) -> None:
    """Eigenvalues over twelve orders: each to 1e-13 of the largest, and the basis gives the matrix back."""
    truth = torch.logspace(-12, 0, size, dtype=torch.float64)
    matrix = with_spectrum(truth)
    kept = matrix.clone()
    found = decompose(matrix, "layer", need="vectors", begin=rung)
    assert torch.equal(matrix, kept)
    assert found.rungs == (rung,)
    assert found.precision == "float64"
    assert float((found.values - truth).abs().max()) < 1e-13
    vectors = found.vectors
    assert vectors is not None
    assert float((vectors.T @ vectors - torch.eye(size, dtype=torch.float64)).norm()) < 1e-11
    missed = float((matrix - (vectors * found.values) @ vectors.T).norm() / matrix.norm())
    assert missed < 1e-13
    assert found.residual is not None
    # exact up to 128 rows, estimated from eight products above
    assert found.residual == pytest.approx(missed, rel=0.8, abs=2e-15)


def test_float32_is_taken_only_where_nothing_small_is_looked_at() -> None:
    names = {
        ratio: [rung.name for rung in rungs(64, need="vectors", device=torch.device("cuda"), smallest_ratio=ratio)]
        for ratio in (0.0, 1e-6, 1e-4)
    }
    assert names[1e-4][:2] == ["device_float32", "device_float64"]
    assert "host_float32_in_place" in names[1e-4]
    for ratio in (0.0, 1e-6):
        assert not any("float32" in name for name in names[ratio])
    truth = torch.logspace(-3, 0, 80, dtype=torch.float64)
    for need in ("values", "vectors"):
        found = decompose(with_spectrum(truth), "layer", need=need, smallest_ratio=1e-3, begin="host_float32_in_place")
        assert found.precision == "float32"
        assert float(((found.values - truth) / truth).abs().max()) < 1e-2


@pytest.mark.parametrize("rank", [1, 5, 10])
def test_the_gram_route_is_exact_and_its_zeros_are_zero(rank: int) -> None:
    size = 40
    rows = torch.randn(rank, size, dtype=torch.float64) * torch.logspace(0, -3, rank, dtype=torch.float64)[:, None]
    matrix = rows.T @ rows
    found = decompose(matrix, "layer", rank_bound=rank)
    assert found.rungs == ("host_gram",)
    assert found.values[: size - rank].tolist() == [0] * (size - rank)
    truth = torch.linalg.eigvalsh(rows @ rows.T)
    assert float((found.values[size - rank :] - truth).abs().max()) < 1e-14 * float(truth[-1])


def test_what_lies_outside_of_the_rows_is_not_lost() -> None:
    """A matrix of more rank than it was said to have, by rounding or by mistake, is decomposed itself."""
    matrix = covariance(40, 10)
    rounded = matrix.float().double()
    found = decompose(rounded, "layer", rank_bound=10)
    assert found.rungs == ("host_gram", "host_float64")
    assert torch.allclose(found.values[30:], torch.linalg.eigvalsh(rounded)[30:], rtol=1e-13)
    # sums in float32 are known to have that noise
    assert decompose(matrix.float(), "layer", rank_bound=10).rungs == ("host_float64",)
    assert decompose(torch.zeros(40, 40, dtype=torch.float64), "layer", rank_bound=10).values.tolist() == [0] * 40


def test_rank_bound_makes_the_zeros_exact() -> None:
    found = decompose(covariance(12, 5).float(), "layer", rank_bound=5)
    assert found.values[:7].tolist() == [0] * 7
    assert float(found.values[7]) > 0.01


def test_diagonal_is_sorted() -> None:
    found = decompose(torch.tensor([3.0, 0.0, 1.0]), "table", need="vectors")
    assert found.values.tolist() == [0, 1, 3]
    assert (found.rungs, found.vectors) == (("diagonal",), None)


def _raises(*_: Any, **__: Any) -> Any:
    raise torch.linalg.LinAlgError("did not converge")


def _nan(matrix: Tensor, **_: Any) -> Any:
    return torch.full((matrix.shape[0],), float("nan"), dtype=torch.float64)


def _ones(matrix: Tensor, **_: Any) -> Any:
    return torch.ones(matrix.shape[0], dtype=torch.float64)


@pytest.mark.parametrize("broken", [_raises, _nan, _ones])
def test_values_go_down_the_ladder_when_a_solver_fails_or_lies(
    broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = covariance(8, 20)
    truth = decompose(matrix, "layer").values
    working = torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", broken)
    found = decompose(matrix, "layer")
    assert found.rungs == ("host_float64", "host_syevr")
    assert torch.allclose(found.values, truth, rtol=1e-12)
    # where both fail on the matrix itself, but not on the shifted one
    monkeypatch.setattr(eigensolvers.lapack, "dsyevr", lambda *_, **__: ([], None, 0, [], 3))
    monkeypatch.setattr(
        torch.linalg, "eigvalsh", lambda given: working(given) if not torch.equal(given, matrix) else broken(given)
    )
    shifted = decompose(matrix, "layer")
    assert shifted.rungs == ("host_float64", "host_syevr", "jittered")
    assert torch.allclose(shifted.values, truth, rtol=1e-9)
    monkeypatch.setattr(torch.linalg, "eigvalsh", broken)
    with pytest.raises(NotConverged, match=r"`layer`.*host_float64.*dsyevr returned 3.*jittered"):
        decompose(matrix, "layer")


def _identity(matrix: Tensor, out: tuple[Tensor, Tensor]) -> Any:
    """The right values with the wrong vectors."""
    out[0].copy_(torch.linalg.eigvalsh(matrix.clone()))
    out[1].copy_(torch.eye(matrix.shape[0]))


def _not_orthonormal(matrix: Tensor, out: tuple[Tensor, Tensor]) -> Any:
    values, vectors = torch.linalg._eigh_of_the_test(matrix.clone())  # type: ignore[attr-defined]
    out[0].copy_(values)
    out[1].copy_(vectors * (1 + 1e-9))


@pytest.mark.part(of=16, by=("broken",))
@pytest.mark.parametrize("broken", [_raises, _identity, _not_orthonormal])
@pytest.mark.parametrize("size", [7, 140])
def test_vectors_go_down_the_ladder_when_a_solver_fails_or_lies(
    broken: Callable[..., Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = covariance(size, 2 * size)
    truth = decompose(matrix, "layer").values
    monkeypatch.setattr(torch.linalg, "_eigh_of_the_test", torch.linalg.eigh, raising=False)
    monkeypatch.setattr(torch.linalg, "eigh", broken)
    found = decompose(matrix, "layer", need="vectors")
    assert found.rungs == ("host_float64", "host_syevr")
    assert torch.allclose(found.values, truth, rtol=1e-12)
    for routine in ("dsyevr", "dsyev"):
        monkeypatch.setattr(eigensolvers.lapack, routine, lambda *_, **__: ([], None, 2))
        if routine == "dsyevr":
            assert decompose(matrix, "layer", need="vectors").rungs[-1] == "host_in_place"
    with pytest.raises(NotConverged, match=r"host_in_place: dsyev returned 2.*jittered"):
        decompose(matrix, "layer", need="vectors")


@pytest.mark.parametrize("size", [20, 140])
def test_a_basis_whose_null_vectors_are_lost_is_not_taken(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such vectors give the matrix back all the same: their eigenvalues are zero."""
    working = torch.linalg.eigh

    def broken(matrix: Tensor, out: tuple[Tensor, Tensor]) -> None:
        values, vectors = working(matrix.clone())
        vectors[:, : size // 2] = vectors[:, :1]
        out[0].copy_(values)
        out[1].copy_(vectors)

    monkeypatch.setattr(torch.linalg, "eigh", broken)
    found = decompose(covariance(size, size // 2), "layer", need="vectors")
    assert found.rungs == ("host_float64", "host_syevr")


@pytest.mark.parametrize("need", ["values", "vectors"])
def test_non_finite_factor_names_the_layer(need: Any) -> None:
    matrix = covariance(4, 9)
    matrix[1, 1] = float("inf")
    with pytest.raises(NonFiniteFactor, match=r"`encoder\.7`.* in 1 of its 16 numbers"):
        decompose(matrix, "encoder.7", need=need)


def test_beyond_lapack_is_refused_with_a_reason_and_large_vectors_go_another_way() -> None:
    with pytest.raises(NotConverged, match=r"`head`.*46341×46341.*32-bit"):
        decompose(torch.zeros(()).expand(46_341, 46_341), "head")
    names = [rung.name for rung in rungs(32_768, need="vectors", device=HOST)]
    assert names == ["host_syevr", "host_in_place", "jittered"]
    assert rungs(32_768, need="values", device=HOST)[0].name == "host_float64"


def test_lapacks_limits_bar_the_host_alone() -> None:
    cuda = torch.device("cuda")
    names = [rung.name for rung in rungs(50_000, need="values", device=cuda)]
    assert names == ["device_float64"]
    assert rungs(50_000, need="values", device=HOST) == ()
    single = [rung.name for rung in rungs(50_000, need="vectors", device=cuda, smallest_ratio=1e-3)]
    assert single == ["device_float32", "device_float64"]
    # too many for the workspace of divide and conquer on the host
    large = [rung.name for rung in rungs(32_768, need="vectors", device=cuda)]
    assert large == ["device_float64", "host_syevr", "host_in_place", "jittered"]


@pytest.mark.part(of=16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("need", ["values", "vectors"])
def test_each_rung_takes_the_bytes_it_says(need: Any, dtype: torch.dtype) -> None:
    """By the profiler's allocation events, which see torch's own workspace; scipy's copies and results are numpy's."""
    size = 600
    matrix = covariance(size, 2 * size).to(dtype)
    for rung in rungs(size, need=need, device=HOST, dtype=dtype):
        if rung.name not in ("host_float64", "jittered"):
            continue
        peak = peak_bytes(partial(decompose, matrix, "layer", need=need, begin=rung.name))
        assert 0.9 <= peak / rung.host_bytes <= 1.02, rung


def test_a_lower_rung_is_taken_where_the_first_does_not_fit() -> None:
    matrix = covariance(64, 128).float()
    costs = {rung.name: rung.host_bytes for rung in rungs(64, need="vectors", device=HOST)}
    assert costs["host_float64"] > costs["host_syevr"] > costs["host_in_place"]

    class Tight(Guard):
        def free_bytes(self, place: Any) -> int:
            return self.budget.host_bytes

    for limit, wanted in (
        (10**9, "host_float64"),
        (costs["host_syevr"], "host_syevr"),
        (costs["host_in_place"], "host_in_place"),
    ):
        guard = Tight(budget=MemoryBudget(device_bytes=limit, host_bytes=limit), device=HOST, log=lambda *_: None)
        found = decompose(matrix, "layer", need="vectors", guard=guard)
        assert found.rungs == (wanted,)
        assert [each.name for each in found.refused] == list(FLOAT64_RUNGS[: FLOAT64_RUNGS.index(wanted)])


@pytest.mark.parametrize("size", [40, 200])
def test_a_side_of_few_rows_gives_its_basis_and_the_residual_of_it(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(6, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    side = LowRank(rows=rows, scales=torch.ones(6, dtype=torch.float64), weight=6.0)
    dense = rows.T @ rows / 6
    found = side.decompose("head", need="vectors")
    assert found is not None
    assert found.values[: size - 6].tolist() == [0] * (size - 6)
    assert torch.allclose(found.values, torch.linalg.eigvalsh(dense), atol=1e-13 * float(found.values[-1]))
    vectors = found.vectors
    assert vectors is not None
    assert tuple(vectors.shape) == (size, 6)
    assert float(((vectors * found.values[size - 6 :]) @ vectors.T - dense).norm() / dense.norm()) < 1e-13
    assert found.residual is not None
    assert found.residual < 1e-13
    monkeypatch.setattr(LowRank, "eigenbasis", lambda *_: (found.values[-6:], vectors.flip(1)))
    with pytest.raises(NotConverged, match=r"`head`.*`woodbury` give it back to"):
        side.decompose("head", need="vectors")


UNDER_A_LIMIT = """
import resource, torch
from engine.linalg.eigensolvers import solvers
from engine.memory.budget import give_back_host_memory
from engine.memory.out_of_memory import ran_out_of_memory

torch.set_num_threads(1)
torch.manual_seed(0)
size, host = 500, torch.device("cpu")
rows = torch.randn(size // 4, size, dtype=torch.float64)
whole = rows.T @ rows

def held():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))

def fits(solver, matrix, share):
    give_back_host_memory()
    limit = held() + int(share * solver.cost.host_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    try:
        solver.solve(matrix)
        return True
    except Exception as error:
        assert ran_out_of_memory(error), error
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

for need in ("values", "vectors"):
    for dtype in (torch.float32, torch.float64):
        matrix = whole.to(dtype)
        for solver in solvers(size, need, host, dtype, single=True, rank_bound=size // 4):
            solver.solve(matrix)  # what the libraries take for themselves the first time
            # twice, since what is freed meanwhile by others leaves holes that a block may or may not fit into
            enough = fits(solver, matrix, 1.12) or fits(solver, matrix, 1.12)
            print(need, dtype, solver.cost.name, enough, fits(solver, matrix, 0.85))
"""


def test_under_the_kernels_limit_each_rung_fits_into_what_it_says_and_not_into_less() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT],
        capture_output=True,
        text=True,
        check=False,
        # every large block by itself, so that what is freed is not there to be taken again
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 + 5 + 5 + 5
    assert [line for line in lines if not line.endswith("True False")] == []


class Poisoned(torch.Tensor):
    """A matrix on a device that fails with its first solver: from then on nothing of it can be read."""

    failed = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if cls.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_solvers_of_the_host_read_the_hosts_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.randn(160, 160, dtype=torch.float64)
    matrix = made @ made.T

    def fail(*_: object, **__: object) -> None:
        monkeypatch.setattr(Poisoned, "failed", True)
        raise eigensolvers.FallbackFailed("it did not converge")

    given = matrix.clone().as_subclass(Poisoned)
    on_device = eigensolvers.Solver(
        cost=eigensolvers.RungCost(name="device_float64", formula="", device_bytes=1, host_bytes=0, seconds_flops=1.0),
        precision=torch.float64,
        solve=fail,
    )
    known = eigensolvers.solvers
    monkeypatch.setattr(eigendecomposition, "solvers", lambda *words, **options: (on_device, *known(*words, **options)))
    found = decompose(given, "fc", host=matrix, need="vectors")
    assert found.rungs == ("device_float64", "host_float64")
    assert torch.allclose(found.values, torch.linalg.eigvalsh(matrix))
