"""The names that scripts know: called as their users call them, with every statistic true."""

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.distributed.group import join
from engine.errors import NonFiniteFactor, UsageError, WrongShape
from engine.semiseparable.semiseparable_matrix import MatrixRefused, SingularMatrix, level_ranks
from kronoscope.semiseparable import (
    BirmanSchwingerCore,
    CPUOffloadManager,
    HierarchicalSemiseparable,
    MemoryOptimizationConfig,
    MixedPrecisionSemiseparable,
    ZeROSemiseparablePartitioner,
    create_optimized_semiseparable,
)
from tests.engine.distributed.rank_processes import run_ranks

SEVEN = {
    "tridiagonal_bytes", "lowrank_bytes", "total_bytes", "memory_reduction_vs_dense", "memory_reduction_vs_fp32",
    "total_rank", "ranks_per_level",
}  # fmt: skip


def smooth(size: int, seed: int = 0) -> Tensor:
    """Noise, and a smooth part that a low rank holds."""
    generator = torch.Generator().manual_seed(seed)
    i = torch.linspace(0, 1, size)
    return torch.exp(-((i[:, None] - i) ** 2) * 30) + 1e-3 * torch.randn(size, size, generator=generator)


def require_true(report: dict[str, Any], size: int, narrow: int, ranks: tuple[int, ...]) -> None:
    """Every statistic equals its definition."""
    rank = sum(ranks)
    assert report.keys() >= SEVEN
    assert report["tridiagonal_bytes"] == 4 * (3 * size - 2)
    assert report["lowrank_bytes"] == 2 * narrow * size * rank
    assert report["total_bytes"] == report["tridiagonal_bytes"] + report["lowrank_bytes"]
    assert report["memory_reduction_vs_dense"] == 1 - report["total_bytes"] / (4 * size**2)
    assert report["memory_reduction_vs_fp32"] == 1 - report["total_bytes"] / (4 * (3 * size - 2) + 8 * size * rank)
    assert (report["total_rank"], report["ranks_per_level"]) == (rank, list(ranks))


def test_mixed_precision_as_users_call_it() -> None:
    config = MemoryOptimizationConfig(use_mixed_precision=True)
    matrix = MixedPrecisionSemiseparable(n_seq=512, config=config)
    H = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    T, U, V = matrix.factorize(H)
    assert (T.dtype, U.dtype, V.dtype) == (torch.float32, torch.float16, torch.float16)
    assert (T.shape, U.shape, V.shape) == ((512, 512), (512, 9), (512, 9))
    require_true(matrix.get_memory_usage(), 512, 2, (9,))
    x = torch.randn(512, 3)
    whole = T + U.float() @ V.float().T
    assert torch.allclose(matrix.matvec(x), whole @ x, atol=0.05)
    off_band = (whole - H).tril(-2) + (whole - H).triu(2)
    assert float(off_band.norm() / H.norm()) < 0.97  # of noise no more can be had


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("size", [1024, 2048])
def test_levels_as_users_call_them(size: int) -> None:
    if size == 1024:
        matrix: Any = HierarchicalSemiseparable(n_seq=1024, num_levels=3)
    else:
        matrix = create_optimized_semiseparable(
            2048, MemoryOptimizationConfig(use_hierarchical=True, use_mixed_precision=True)
        )
    before = matrix.get_memory_usage()
    H = smooth(size)
    T, U, V = matrix.factorize(H)
    ranks = level_ranks(size, 3)
    assert [each.shape for each in U] == [each.shape for each in V] == [(size, r) for r in ranks]
    require_true(matrix.get_memory_usage(), size, 4 if size == 1024 else 2, ranks)
    assert matrix.get_memory_usage() == before
    whole = T + sum(u.float() @ v.float().T for u, v in zip(U, V, strict=True))
    assert float((whole - H).norm() / H.norm()) < 0.01
    x = torch.randn(size, generator=torch.Generator().manual_seed(1))
    assert float((matrix.matvec(x) - H @ x).norm() / (H @ x).norm()) < 0.02


@pytest.mark.parametrize(
    ("size", "options", "narrow"),
    [
        (8192, {"use_cpu_offload": True, "use_mixed_precision": True}, 2),
        (16_384, {"use_zero": True, "world_size": 2, "rank": 1, "use_mixed_precision": True}, 2),
        (
            131_072,
            {
                "use_zero": True, "world_size": 4, "rank": 0, "use_cpu_offload": True, "use_mixed_precision": True,
                "use_hierarchical": True,
            },
            2,
        ),
    ],
)  # fmt: skip
def test_a_report_before_a_fit_allocates_nothing(size: int, options: dict[str, Any], narrow: int) -> None:
    config = MemoryOptimizationConfig(**options)
    report = create_optimized_semiseparable(size, config).get_memory_usage()
    ranks = level_ranks(size, 3 if config.use_hierarchical else 1)
    require_true(report, size, narrow, ranks)
    share = -(-sum(ranks) // config.world_size) if config.rank == 0 else sum(ranks) // config.world_size
    own = 2 * narrow * size * share
    assert report["rank_bytes"] == report["tridiagonal_bytes"] + own
    assert report["host_bytes"] == (own if config.use_cpu_offload else 0)
    assert report["device_bytes"] == report["rank_bytes"] - report["host_bytes"]


@pytest.mark.parametrize(
    "options", [{}, {"use_cpu_offload": True}, {"use_cpu_offload": True, "use_mixed_precision": True}]
)
def test_a_product_is_that_of_what_was_returned(options: dict[str, Any]) -> None:
    matrix = create_optimized_semiseparable(100, MemoryOptimizationConfig(**options))
    T, U, V = matrix.factorize(smooth(100))
    x = torch.randn(100, 2)
    assert torch.allclose(matrix.matvec(x), (T + U.float() @ V.float().T) @ x, atol=1e-3)
    assert torch.allclose(matrix.matvec(x[:, 0]), matrix.matvec(x)[:, 0], atol=1e-5)


def test_the_partition_keeps_every_column() -> None:
    U, V = torch.randn(40, 9), torch.randn(40, 9)
    parts = [
        ZeROSemiseparablePartitioner(
            MemoryOptimizationConfig(use_zero=True, world_size=4, rank=rank)
        ).partition_lowrank_factors(U, V)
        for rank in range(4)
    ]
    assert torch.equal(torch.cat([part[0] for part in parts], 1), U)
    assert torch.equal(torch.cat([part[1] for part in parts], 1), V)
    found = ZeROSemiseparablePartitioner(MemoryOptimizationConfig(world_size=2)).compute_memory_savings(2048, 11)
    assert found["scaling_factor"] == pytest.approx(25 / 15, rel=0.001)
    assert found["memory_per_gpu_no_zero_mb"] == 4 * (3 * 2048 - 2 + 22 * 2048) / 2**20
    assert found["memory_per_gpu_with_zero_mb"] == 4 * (3 * 2048 - 2 + 12 * 2048) / 2**20


def test_factors_of_two_shapes_are_not_partitioned() -> None:
    partitioner = ZeROSemiseparablePartitioner(MemoryOptimizationConfig(world_size=2, rank=1))
    for V in (torch.randn(4, 5), torch.randn(3, 2), torch.randn(4)):
        with pytest.raises(WrongShape, match=r"`U` and `V` must both have shape \(N, r\) \(got \(4, 2\) and \("):
            partitioner.partition_lowrank_factors(torch.randn(4, 2), V)
    with pytest.raises(MatrixRefused, match=r"`V` must be a torch\.Tensor \(got list\)"):
        partitioner.partition_lowrank_factors(torch.randn(4, 2), [[1.0]])  # type: ignore[arg-type]


def test_savings_are_those_of_the_rank_that_was_given() -> None:
    partitioner = ZeROSemiseparablePartitioner(MemoryOptimizationConfig(world_size=2))
    alone = partitioner.compute_memory_savings(1024, 0)
    assert alone["memory_per_gpu_no_zero_mb"] == alone["memory_per_gpu_with_zero_mb"] == 4 * (3 * 1024 - 2) / 2**20
    assert alone["scaling_factor"] == 1
    assert partitioner.compute_memory_savings(1024) == partitioner.compute_memory_savings(1024, 10)
    for arguments, words in (
        ((1024, -3), r"`rank` must be at least 0 \(got -3\)"),
        ((1024, 2.5), r"`rank` must be a whole number \(got 2\.5\)"),
        ((0,), r"`n_seq` must be at least 1 \(got 0\)"),
    ):
        with pytest.raises(MatrixRefused, match=words):
            partitioner.compute_memory_savings(*arguments)  # type: ignore[arg-type]


def test_what_cannot_be_offloaded_is_refused() -> None:
    manager = CPUOffloadManager()
    with pytest.raises(MatrixRefused, match=r"`tensor` must be a torch\.Tensor \(got list\)"):
        manager.offload_to_cpu("U", [1.0])  # type: ignore[arg-type]
    manager.offload_to_cpu("U", torch.ones(2))
    for device in ("gpu0", "", 3.5):
        with pytest.raises(UsageError, match=f"`device` must be .*got '?{device}"):
            manager.load_to_gpu("U", device)  # type: ignore[arg-type]


def test_offloading_counts_its_copies() -> None:
    manager = CPUOffloadManager(MemoryOptimizationConfig(use_cpu_offload=True))
    tensor = torch.randn(30, 4)
    manager.offload_to_cpu("U", tensor)
    assert torch.equal(manager.load_to_gpu("U", "cpu"), tensor)
    found = manager.get_statistics()
    assert (found["num_transfers_to_cpu"], found["num_transfers_to_gpu"]) == (1, 1)
    assert found["avg_transfer_time_ms"] > 0


def test_a_product_without_the_other_ranks_says_what_to_do() -> None:
    matrix = create_optimized_semiseparable(40, MemoryOptimizationConfig(use_zero=True, world_size=2, rank=1))
    matrix.factorize(smooth(40))
    with pytest.raises(UsageError, match=r"columns of rank 1 of 2.*none is initialised.*torchrun --nproc-per-node 2"):
        matrix.matvec(torch.zeros(40))


def product_of_ranks(rank: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    ranks = join(torch.device("cpu"))
    config = MemoryOptimizationConfig(use_zero=True, world_size=ranks.size, rank=rank, **options)
    matrix = create_optimized_semiseparable(61, config)
    T, U, V = matrix.factorize(smooth(61))
    x = torch.randn(61, 2, generator=torch.Generator().manual_seed(2))
    return matrix.matvec(x), (T + U.float() @ V.float().T) @ x


@pytest.mark.parametrize("options", [{}, {"use_cpu_offload": True, "use_mixed_precision": True}])
def test_ranks_multiply_together(options: dict[str, Any]) -> None:
    for found, wanted in run_ranks(2, product_of_ranks, options):
        assert torch.allclose(found, wanted, atol=1e-3)


@pytest.mark.part(of=16, by=("size", "z"))
@pytest.mark.parametrize("size", [1, 40, 512, pytest.param(2048, marks=pytest.mark.part(of=16, by=()))])
@pytest.mark.parametrize("z", [0.7 + 0.1j, 1.3 + 1e-4j])
def test_the_resolvent_is_that_of_the_dense_matrix(size: int, z: complex) -> None:
    v = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    core = BirmanSchwingerCore(size)
    found = core(v, z)
    wanted = BirmanSchwingerCore(size, use_semiseparable=False)(v, z)
    assert found.shape == v.shape
    assert found.dtype == torch.complex128
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-9


def test_the_resolvent_takes_a_batch_and_gradients() -> None:
    v = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
    core = BirmanSchwingerCore(20, epsilon=0.5)
    found = core(v, 0.3 + 0.2j)
    for own, row in zip(v.detach(), found.detach(), strict=True):
        H = torch.diag(own + 8) - torch.diag(torch.full((19,), 4.0, dtype=torch.float64), 1)
        H = H - torch.diag(torch.full((19,), 4.0, dtype=torch.float64), -1)
        wanted = torch.linalg.inv(H - (0.3 + 0.2j) * torch.eye(20, dtype=found.dtype)).diagonal()
        assert float((row - wanted).abs().max()) <= 1e-12
    assert torch.autograd.gradcheck(lambda given: torch.view_as_real(core(given, 0.3 + 0.2j)), v, fast_mode=True)


def test_a_resolvent_that_does_not_exist_is_refused() -> None:
    core = BirmanSchwingerCore(3)
    eigenvalue = 2.0  # of the Laplacian on three points, with sines
    with pytest.raises(SingularMatrix, match="singular, or too near to it"):
        core(torch.zeros(3, dtype=torch.float64), eigenvalue)
    with pytest.raises(MatrixRefused, match=r"`v` must have shape \(3,\) or \(batch, 3\) \(got \(4,\)\)"):
        core(torch.zeros(4), 1j)
    with pytest.raises(NonFiniteFactor, match="`v` holds NaN or Inf"):
        core(torch.tensor([0.0, torch.nan, 0.0]), 1j)
    with pytest.raises(MatrixRefused, match=r"`v` must have at least one row \(got shape \(0, 3\)\)"):
        core(torch.zeros(0, 3), 1j)
    with pytest.raises(MatrixRefused, match=r"`v` must be a torch\.Tensor \(got list\)"):
        core([0.0, 1.0, 2.0], 1j)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 1e-200, 1e200, torch.inf, torch.nan, "1"])
def test_an_epsilon_whose_square_is_no_number_is_refused(epsilon: Any) -> None:
    with pytest.raises(MatrixRefused, match=f"`epsilon` must be .*{re.escape(str(epsilon))}"):
        BirmanSchwingerCore(3, epsilon=epsilon)


@pytest.mark.parametrize("epsilon", [1e-150, 1e150])
def test_an_epsilon_at_its_bounds_gives_finite_numbers(epsilon: float) -> None:
    found = BirmanSchwingerCore(3, epsilon=epsilon)(torch.ones(3, dtype=torch.float64), 1j)
    assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize(
    "z", ["a", None, True, torch.inf, complex(0, torch.nan), 10**400, torch.zeros(3), torch.tensor(True)]
)
def test_a_shift_that_is_no_finite_number_is_refused(z: Any) -> None:
    with pytest.raises(MatrixRefused, match="`z` must be a "):
        BirmanSchwingerCore(3)(torch.zeros(3), z)


@pytest.mark.parametrize("z", [1, 0.3 + 0.1j, np.complex64(0.3), torch.tensor(0.3 + 0.1j), torch.tensor([0.3])])
@pytest.mark.parametrize(("dtype", "exact"), [(torch.complex64, 1e-6), (torch.complex128, 1e-12)])
@pytest.mark.parametrize("use_semiseparable", [True, False])
def test_the_resolvent_of_complex_numbers_is_that_of_the_dense_matrix(
    z: Any, dtype: torch.dtype, exact: float, use_semiseparable: bool
) -> None:
    v = torch.randn(2, 40, generator=torch.Generator().manual_seed(0), dtype=dtype)
    found = BirmanSchwingerCore(40, 0.7, use_semiseparable)(v, z)
    beside = torch.ones(39, dtype=torch.complex128) / 0.7**2
    H = torch.diag_embed(v.to(torch.complex128) + 2 / 0.7**2) - beside.diag(1) - beside.diag(-1)
    wanted = torch.linalg.inv(H - complex(z) * torch.eye(40, dtype=torch.complex128)).diagonal(dim1=1, dim2=2)
    assert found.dtype == dtype
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= exact


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 2, "rank": 2}, "`rank` must be from 0 to world_size"),
        ({"world_size": 0}, "`rank` must be from 0"),
        ({"use_mixed_precision": True, "lowrank_dtype": torch.float32}, r"must be torch.float16 or torch.bfloat16"),
        ({"tridiag_dtype": torch.float16}, r"must be torch.float32 or torch.float64"),
        ({"num_levels": 0}, "`num_levels` must be at least 1"),
        ({"num_levels": 2.5}, r"`num_levels` must be a whole number \(got 2\.5\)"),
        ({"world_size": "2"}, r"`world_size` must be a whole number \(got '2'\)"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MatrixRefused, match=words):
        MemoryOptimizationConfig(**options)


def test_a_matrix_that_cannot_be_is_refused() -> None:
    matrix = create_optimized_semiseparable(40)
    with pytest.raises(UsageError, match=r"call `factorize\(H\)` first"):
        matrix.matvec(torch.zeros(40))
    with pytest.raises(MatrixRefused, match="`H` must have 40 rows"):
        matrix.factorize(torch.zeros(41, 41))
    with pytest.raises(MatrixRefused, match="`H` must be real"):
        matrix.factorize(torch.zeros(40, 40, dtype=torch.complex64))
    with pytest.raises(MatrixRefused, match="`n_seq` must be at least 1"):
        create_optimized_semiseparable(0)
    with pytest.raises(MatrixRefused, match=r"`H` must be a torch\.Tensor \(got ndarray\); make one, such as by"):
        matrix.factorize(np.zeros((40, 40)))  # type: ignore[arg-type]
    with pytest.raises(MatrixRefused, match=r"`n_seq` must be a whole number \(got '4'\)"):
        create_optimized_semiseparable("4")  # type: ignore[arg-type]
    with pytest.raises(MatrixRefused, match=r"`config` must be a MemoryOptimizationConfig.*\(got dict\)"):
        create_optimized_semiseparable(4, {"use_zero": True})  # type: ignore[arg-type]


def test_columns_beyond_float16_are_held_with_a_scale() -> None:
    H = smooth(512) * 1e12
    matrix = MixedPrecisionSemiseparable(512)
    with pytest.warns(UserWarning, match="columns beyond float16 are returned in float32"):
        matrix.factorize(H)
    x = torch.randn(512, generator=torch.Generator().manual_seed(0))
    assert float((matrix.matvec(x) - H @ x).norm() / (H @ x).norm()) < 0.05


def test_the_package_stays_free_of_torch() -> None:
    code = "import sys, kronoscope; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
