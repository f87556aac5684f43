"""Eigenvalues of one factor, by a ladder of solvers that never skips a layer silently.

Values only: their workspace is O(n), where vectors need 2n² more. The arithmetic is float64
whatever the factor's precision. A covariance of T positions has rank at most T, so the n − T
smallest values are zero exactly, and rounding below zero is cut off.

Rungs, in order; each one taken is in the layer's record:

1. ``device_float64``: torch on the factor's own device;
2. ``host_float64``: torch on the CPU (LAPACK syevd);
3. ``host_syevr``: LAPACK's relatively robust representations, another algorithm;
4. ``jittered``: the first again on M + ε·mean(diag)·I, shifted back.

References:
    Dhillon, Parlett & Vömel (2006), The design and implementation of the MRRR algorithm
"""

from collections.abc import Callable

import torch
from scipy.linalg import lapack
from torch import Tensor

from engine.errors import NonFiniteFactor, NotConverged

_JITTER = 1e-10
_LARGEST = 46_340
"""LAPACK counts in 32 bits: a matrix of more than 2³¹ numbers is beyond it."""
_LARGEST_BASIS = 32_767
"""Eigenvectors take a workspace of 2 n² numbers besides."""
_TRACE_TOLERANCE = 1e-6


def eigenvalues(factor: Tensor, layer: str, rank_bound: int | None = None) -> tuple[Tensor, tuple[str, ...]]:
    """Ascending eigenvalues (n,) of a positive semidefinite ``factor``, float64 on the host.

    Args:
        factor: (n, n) symmetric, or (n,) the diagonal of a diagonal matrix.
        layer: Name for the messages.
        rank_bound: Most nonzero eigenvalues there can be, where known.

    Returns:
        The values, and the rungs that were taken.

    Memory:
        Two copies of the factor in float64.

    Raises:
        NonFiniteFactor: If the factor holds NaN or Inf.
        NotConverged: If every rung failed.
    """
    if not bool(torch.isfinite(factor).all()):
        raise NonFiniteFactor(f"layer `{layer}`: the factor holds NaN or Inf", layer=layer)
    if factor.ndim == 1:
        return torch.sort(factor.to("cpu", torch.float64)).values.clamp_min_(0), ("diagonal",)
    if factor.shape[0] > _LARGEST:
        raise NotConverged(
            f"layer `{layer}`: a {factor.shape[0]}×{factor.shape[0]} factor is beyond LAPACK's 32-bit indices, "
            f"which reach {_LARGEST} rows",
            layer=layer,
        )
    taken: list[str] = []
    for rung, solve in _rungs(factor):
        taken.append(rung)
        values = _attempt(solve, factor)
        if values is not None:
            values.clamp_min_(0)
            if rank_bound is not None and rank_bound < values.numel():
                values[: values.numel() - rank_bound] = 0
            return values, tuple(taken)
    raise NotConverged(
        f"layer `{layer}`: no eigenvalue solver converged on a {factor.shape[0]}×{factor.shape[0]} factor "
        f"(tried {', '.join(taken)})",
        layer=layer,
    )


def eigenbasis(factor: Tensor, layer: str) -> Tensor:
    """Orthonormal eigenvectors (n, n) of a symmetric ``factor``, by ascending eigenvalue; float64 on its device.

    By the same rungs, each taken only if its basis gives the factor back.

    Memory:
        4 n² numbers in float64.

    Raises:
        NonFiniteFactor: If the factor holds NaN or Inf.
        NotConverged: If every rung failed, or the factor is beyond LAPACK.
    """
    if not bool(torch.isfinite(factor).all()):
        raise NonFiniteFactor(f"layer `{layer}`: the factor holds NaN or Inf", layer=layer)
    size = factor.shape[0]
    if size > _LARGEST_BASIS:
        raise NotConverged(
            f"layer `{layer}`: the eigenvectors of a {size}×{size} factor are beyond LAPACK's 32-bit indices, "
            f"which reach {_LARGEST_BASIS} rows; take `collection.ekfac: false`",
            layer=layer,
        )
    wide = factor.to(torch.float64)
    solvers: list[Callable[[], tuple[Tensor, Tensor]]] = [
        lambda: _eigh(wide),
        lambda: _eigh(wide.to("cpu")),
        lambda: _syevr_vectors(wide),
    ]
    for solve in solvers[int(factor.device.type == "cpu") :]:
        try:
            values, vectors = solve()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's LinAlgError is one
            if "can't allocate memory" in str(error):
                raise MemoryError(str(error)) from error
            continue
        values, vectors = values.to(wide.device), vectors.to(wide.device)
        if _gives_back(wide, values, vectors):
            return vectors
    raise NotConverged(f"layer `{layer}`: no eigenvalue solver converged on a {size}×{size} factor", layer=layer)


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors


def _syevr_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors, _, _, info = lapack.dsyevr(matrix.to("cpu").numpy(), compute_v=1)
    if info != 0:
        raise RuntimeError(f"dsyevr returned {info} for n = {matrix.shape[0]}")
    return torch.from_numpy(values), torch.from_numpy(vectors)


def _gives_back(matrix: Tensor, values: Tensor, vectors: Tensor) -> bool:
    """Whether ``Q Λ Qᵀ x = M x`` and ``Q Qᵀ x = x`` for one x: some library versions err without an error."""
    probe = torch.linspace(-1, 1, matrix.shape[0], dtype=matrix.dtype, device=matrix.device).cos()
    inside = vectors.T @ probe
    norm = float(probe.norm())
    unitary = float((vectors @ inside - probe).norm()) <= _TRACE_TOLERANCE * norm
    scale = float(values.abs().max())
    return unitary and float((vectors @ (values * inside) - matrix @ probe).norm()) <= _TRACE_TOLERANCE * scale * norm


def _rungs(factor: Tensor) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    rungs: list[tuple[str, Callable[[Tensor], Tensor]]] = []
    if factor.device.type != "cpu":
        rungs.append(("device_float64", lambda matrix: _values(matrix.to(torch.float64)).cpu()))
    rungs.append(("host_float64", lambda matrix: _values(matrix.to("cpu", torch.float64))))
    rungs.append(("host_syevr", _syevr))
    rungs.append(("jittered", _jittered))
    return rungs


def _attempt(solve: Callable[[Tensor], Tensor], factor: Tensor) -> Tensor | None:
    """The values, unless the solver failed or its values do not add up to the trace."""
    try:
        values = solve(factor)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch's LinAlgError is one
        if "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        return None
    # some library versions return NaN, or wrong values, without an error
    trace = float(factor.diagonal().to(torch.float64).sum())
    if not bool(torch.isfinite(values).all()) or abs(float(values.sum()) - trace) > _TRACE_TOLERANCE * abs(trace):
        return None
    return values


def _syevr(matrix: Tensor) -> Tensor:
    size = matrix.shape[0]
    values, _, _, _, info = lapack.dsyevr(matrix.to("cpu", torch.float64).numpy(), compute_v=0)
    if info != 0:
        raise RuntimeError(f"dsyevr returned {info} for n = {size}")
    return torch.tensor(values.tolist(), dtype=torch.float64)


def _jittered(matrix: Tensor) -> Tensor:
    wide = matrix.to("cpu", torch.float64).clone()
    jitter = _JITTER * float(wide.diagonal().mean())
    wide.diagonal().add_(jitter)
    return _values(wide) - jitter


def _values(matrix: Tensor) -> Tensor:
    values: Tensor = torch.linalg.eigvalsh(matrix)
    return values
