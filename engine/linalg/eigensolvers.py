"""Eigensolvers: each way to decompose one symmetric matrix, and the bytes that it takes.

Those that can be are in place: LAPACK's own workspace is then all that comes on top of the one
wide copy that the matrix is overwritten in. A solver that does not converge raises ``FallbackFailed``.

References:
    Dhillon, Parlett & Vömel (2006), The design and implementation of the MRRR algorithm
    Higham (1990), Analysis of the Cholesky decomposition of a semi-definite matrix
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from scipy.linalg import lapack
from torch import Tensor

from engine.memory.guard import FallbackFailed
from engine.memory.out_of_memory import lost_device, ran_out_of_memory

Need = Literal["values", "vectors"]
Solved = tuple[Tensor, Tensor | None]
"""Ascending values (n,), and vectors (n, n), one a column, where they were asked for."""

LARGEST = 46_340
"""LAPACK counts in 32 bits: a matrix of more than 2³¹ numbers is beyond it. cuSOLVER counts in 64."""
LARGEST_WORKSPACE = 32_766
"""Divide and conquer takes 1 + 6n + 2n² numbers besides, of which there may be 2³¹ too."""
_JITTER = 1e-10
_OF_VALUES = 5.0
"""Times n³, of values alone: half of their 4 n³ / 3 operations are products with vectors, at a fraction of the pace."""


@dataclass(frozen=True, kw_only=True)
class RungCost:
    """One rung of the list of fallbacks, and what it takes beside the factor itself."""

    name: str
    formula: str
    """Formula of its bytes."""
    device_bytes: int
    host_bytes: int
    seconds_flops: float
    """Floating-point operations that take as long, at the pace of ``eigh`` with vectors, which counts 9 n³."""


@dataclass(frozen=True, kw_only=True)
class Solver:
    """One way to do it."""

    cost: RungCost
    precision: torch.dtype
    solve: Callable[[Tensor], Solved]
    """Leaves its argument as it is."""


def solvers(
    size: int,
    need: Need,
    device: torch.device,
    dtype: torch.dtype,
    *,
    single: bool,
    rank_bound: int | None = None,
) -> tuple[Solver, ...]:
    """Return the solvers for one symmetric matrix, the preferred first.

    Where LAPACK cannot count that far they are the device's alone, and none on a CPU.
    """
    cuda = device.type != "cpu"
    found = []
    if cuda and single:
        found.append(_torch_rung("device_float32", size, need, torch.float32, dtype, on_device=True))
    if cuda:
        found.append(_torch_rung("device_float64", size, need, torch.float64, dtype, on_device=True))
    if size > LARGEST:
        return tuple(found)
    if size <= LARGEST_WORKSPACE or need == "values":
        if not cuda and gram_route(size, rank_bound, need, dtype):
            found.append(_pivoted(size, min(rank_bound or 0, size)))
        found.append(_torch_rung("host_float64", size, need, torch.float64, dtype, on_device=False))
    found.append(_lapack_rung("host_syevr", size, need))
    if need == "vectors":
        found.append(_lapack_rung("host_in_place", size, need))
    if single:
        found.append(_lapack_rung("host_float32_in_place", size, need))
    found.append(_jittered_rung(size, need))
    return tuple(found)


def is_on_device(rung: str | None) -> bool:
    """Tell whether a rung of this name decomposes on the device; False of none."""
    return rung is not None and rung.startswith("device_")


def gram_route(size: int, rank_bound: int | None, need: Need, dtype: torch.dtype) -> bool:
    """Return whether T columns of a dense matrix's pivoted Cholesky factor are tried before the matrix itself.

    This is so only for a matrix kept in float64: what float32 sums rounded off lies outside of the span of any T
    columns, and would be lost. It gives values alone, since a basis of the null space would have to be made besides.
    With T above n/4 there is little left to gain.
    """
    return need == "values" and dtype == torch.float64 and rank_bound is not None and 4 * rank_bound <= size


def _torch_rung(
    name: str, size: int, need: Need, precision: torch.dtype, dtype: torch.dtype, *, on_device: bool
) -> Solver:
    item = precision.itemsize
    copy = size * size * item
    if on_device:
        # cuSOLVER's workspace is four matrices, whether or not vectors are asked for; torch's copy is overwritten by
        # the vectors, and made a second time for values
        copies = 5 if need == "vectors" else 6 if dtype != precision else 5
        taken, formula = copies * copy + 64 * size * item, f"{copies} · n² · {item} + {64 * item} n"
        flops = 9.0 * size**3 if need == "vectors" else _OF_VALUES * size**3
    elif need == "vectors":
        # the copy is overwritten by the vectors; 1 + 6n + 2n² numbers of workspace, and 3 + 5n integers
        taken, formula = 3 * copy + (8 * size + 1) * item + 4 * (5 * size + 3), f"3 · n² · {item} + 84 n"
        flops = 9.0 * size**3
    else:
        # the library's own copy, and the one in this precision where the factor is in another
        copies = 2 if dtype != precision else 1
        taken, formula = copies * copy + 64 * size * item, f"{copies} · n² · {item} + {64 * item} n"
        flops = _OF_VALUES * size**3

    def solve(matrix: Tensor) -> Solved:
        there = matrix.to(matrix.device if on_device else "cpu")
        if need == "values":
            values: Tensor = _torch_values(there.to(precision))
            return values, None
        return _torch_vectors(there.to(precision, copy=True))

    cost = RungCost(
        name=name,
        formula=formula,
        device_bytes=taken if on_device else 0,
        host_bytes=0 if on_device else taken,
        seconds_flops=flops,
    )
    return Solver(cost=cost, precision=precision, solve=solve)


def _torch_values(matrix: Tensor) -> Tensor:
    try:
        values: Tensor = torch.linalg.eigvalsh(matrix)
    except RuntimeError as error:  # torch's LinAlgError is one
        raise _told(error) from error
    return values


def _torch_vectors(matrix: Tensor) -> Solved:
    """Decompose a C-contiguous symmetric matrix, which is overwritten: LAPACK reads and writes its transpose."""
    values = torch.empty(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    try:
        torch.linalg.eigh(matrix.mT, out=(values, matrix.mT))
    except RuntimeError as error:
        raise _told(error) from error
    return values, matrix.mT


def exact_svd(matrix: Tensor, *, full_matrices: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose a matrix into singular values and vectors, of which small ones are wanted as well as large ones.

    The solver that torch takes first on a device is one of eigenvalues of squares, which lose the small ones.

    Args:
        matrix: Shape (m, n).
        full_matrices: As ``torch.linalg.svd`` takes it.

    Returns:
        ``U``, the singular values, descending, and ``Vᴴ``.
    """
    driver = "gesvd" if matrix.is_cuda else None
    left, values, right = torch.linalg.svd(matrix, full_matrices=full_matrices, driver=driver)
    return left, values, right


def _told(error: RuntimeError) -> Exception:
    """The error itself where another solver cannot help: without memory, or on a device whose context is broken."""
    return error if ran_out_of_memory(error) or lost_device(error) else FallbackFailed(str(error).splitlines()[0])


_ROUTINES = {
    "host_syevr": ("dsyevr", torch.float64),
    "host_in_place": ("dsyev", torch.float64),
    "host_float32_in_place": ("ssyev", torch.float32),
}


def _lapack_rung(name: str, size: int, need: Need) -> Solver:
    """By relatively robust representations, or by QR iteration, which overwrites the matrix by the vectors."""
    routine, precision = _ROUTINES[name]
    if routine == "ssyev" and need == "values":
        routine = "ssyevr"
    matrices = 2 if need == "vectors" and routine.endswith("syevr") else 1
    item = precision.itemsize
    flops = {"host_syevr": 12.0, "host_in_place": 60.0, "host_float32_in_place": 30.0}[name]
    cost = RungCost(
        name=name,
        formula=f"{matrices} · n² · {item} + {64 * item} n",
        device_bytes=0,
        host_bytes=matrices * size * size * item + 64 * size * item,
        seconds_flops=flops * size**3 if need == "vectors" else _OF_VALUES * size**3,
    )
    return Solver(cost=cost, precision=precision, solve=lambda matrix: _lapack(routine, matrix, precision, need))


def _lapack(routine: str, matrix: Tensor, precision: torch.dtype, need: Need) -> Solved:
    copied = matrix.to("cpu", precision, copy=True).contiguous()
    given = copied.numpy().T
    found = getattr(lapack, routine)(given, compute_v=int(need == "vectors"), overwrite_a=1)
    values, vectors, info = found[0], found[1], found[-1]
    if info != 0:
        raise FallbackFailed(f"{routine} returned {info} for n = {matrix.shape[0]}")
    return torch.from_numpy(values.copy()), torch.from_numpy(vectors) if need == "vectors" else None


def _jittered_rung(size: int, need: Need) -> Solver:
    """``host_float64``, or what can count as far, on M + ε·mean(diag)·I, shifted back."""
    below = "host_float64" if size <= LARGEST_WORKSPACE or need == "values" else "host_syevr"
    inner = (
        _torch_rung(below, size, need, torch.float64, torch.float64, on_device=False)
        if below == "host_float64"
        else _lapack_rung(below, size, need)
    )
    copy = 8 * size * size

    def solve(matrix: Tensor) -> Solved:
        wide = matrix.to("cpu", torch.float64, copy=True)
        jitter = _JITTER * float(wide.diagonal().mean())
        wide.diagonal().add_(jitter)
        values, vectors = inner.solve(wide)
        return values - jitter, vectors

    cost = RungCost(
        name="jittered",
        formula=f"n² · 8 + {inner.cost.formula}",
        device_bytes=0,
        host_bytes=copy + inner.cost.host_bytes,
        seconds_flops=inner.cost.seconds_flops,
    )
    return Solver(cost=cost, precision=torch.float64, solve=solve)


def _pivoted(size: int, rank: int) -> Solver:
    """Values of ``M = L Lᵀ`` from the Gram matrix ``Lᵀ L`` of T pivoted Cholesky columns; the others are zeros.

    Exact where nothing is left of the diagonal after T columns but rounding; else it fails.
    """

    def solve(matrix: Tensor) -> Solved:
        values = torch.zeros(size, dtype=torch.float64)
        columns = _cholesky_columns(matrix, rank)
        if columns.shape[1]:
            values[size - columns.shape[1] :] = _torch_values(columns.T @ columns)
        return values, None

    cost = RungCost(
        name="host_gram",
        # the Gram matrix comes when the copy has gone, and is smaller
        formula="n² · 8 + n · T · 8",
        device_bytes=0,
        host_bytes=8 * (size * size + size * rank),
        # the copy, T columns by blocks of a few, and two triangular products
        seconds_flops=16.0 * size * rank * rank + _OF_VALUES * rank**3,
    )
    return Solver(cost=cost, precision=torch.float64, solve=solve)


def _cholesky_columns(matrix: Tensor, rank: int) -> Tensor:
    """``L`` (n, r ≤ T) with ``L Lᵀ`` the matrix, its rows permuted.

    Raises:
        FallbackFailed: If the matrix has another rank.
    """
    size = matrix.shape[0]
    wide = matrix.to("cpu", torch.float64, copy=True).contiguous()
    total = float(wide.diagonal().sum())
    factor, _, found, info = lapack.dpstrf(wide.numpy().T, tol=-1.0, lower=1, overwrite_a=1)
    if info < 0:
        raise FallbackFailed(f"dpstrf returned {info} for n = {size}")
    # beyond the rank that was found stands what was never factored
    columns = torch.from_numpy(factor)[:, : min(found, rank)].clone(memory_format=torch.contiguous_format)
    columns[: columns.shape[1]].tril_()
    kept = float(torch.linalg.vector_norm(columns)) ** 2
    # the trace is that of L Lᵀ: what further columns would add is what is missing of it
    if abs(total - kept) > 4 * size * torch.finfo(torch.float64).eps * total:
        raise FallbackFailed(f"the matrix has more than {rank} eigenvalues that are not rounding (dpstrf: {found})")
    return columns
