"""Eigendecomposition memory of one matrix, for a caller who asks about a matrix and not about a job.

The figures are the solvers' own (``eigensolvers``), by which plans are made and jobs decompose.
"""

from dataclasses import dataclass

import torch

from engine.linalg.eigendecomposition import rungs
from engine.linalg.eigensolvers import LARGEST, RungCost


@dataclass(frozen=True, kw_only=True)
class EigendecompositionBytes:
    """What the eigendecomposition of one matrix holds at its peak, beside the matrix itself."""

    device_bytes: int
    """On the device; 0 on a CPU."""
    host_bytes: int
    rung: str
    """The way that is taken first."""
    formula: str
    """Of its bytes."""
    ladder: tuple[RungCost, ...]
    """Every way, the preferred first: what is taken where less memory is free."""


def eigendecomposition_bytes(
    n: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    vectors: bool = False,
) -> EigendecompositionBytes:
    """Return the bytes that decomposing one symmetric matrix takes, by the figures that a job's plan uses.

    Args:
        n: Rows of the matrix.
        dtype: Precision that it is kept in; the arithmetic is float64.
        device: Where it stands. It need not be one of this machine's.
        vectors: Whether the eigenvectors are wanted too.

    Returns:
        Bytes of the solver that is tried first, and every solver with its cost.

    Raises:
        ValueError: If n is not positive, or beyond what LAPACK counts.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1 (got {n})")
    ladder = rungs(n, need="vectors" if vectors else "values", device=torch.device(device), dtype=dtype)
    if not ladder:
        raise ValueError(f"n must be at most {LARGEST:,}, beyond which LAPACK does not count (got {n:,})")
    first = ladder[0]
    return EigendecompositionBytes(
        device_bytes=first.device_bytes,
        host_bytes=first.host_bytes,
        rung=first.name,
        formula=first.formula,
        ladder=ladder,
    )
