"""The options of a search for extreme eigenvalues, and the memory that they ask for."""

from dataclasses import dataclass
from typing import Literal

import torch

from engine.linalg.lanczos import PANEL_BYTES, WIDTH

_ENDS = ("largest", "smallest", "both")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The eigenvalues that are searched for, and the means of the search."""

    count: int
    """Eigenvalues wanted at each end."""
    end: Literal["largest", "smallest", "both"]
    tolerance: float | None
    """Residual over the largest magnitude at which a value has converged; None is the root of the precision."""
    seed: int
    dtype: torch.dtype
    """Precision of the vectors, float32 or float64; coefficients are float64."""
    most_products: int
    """Products of one vector, at most; the search ends with what it has."""
    length: int | None
    """Basis vectors kept; a longer search restarts from its best ones. None keeps all."""

    @property
    def wanted(self) -> int:
        """Eigenvalues wanted at both ends together."""
        return self.count * (2 if self.end == "both" else 1)

    def room(self, size: int) -> int:
        """Return the vectors that the basis has room for."""
        most = self.most_products + WIDTH if self.length is None else self.length
        return min(size, max(most, self.wanted + 4))


def search_bytes(size: int, options: SearchOptions) -> int:
    """Return the bytes that a search holds at its peak, beside the products of its caller."""
    rows = options.room(size) + 2
    return rows * size * options.dtype.itemsize + 3 * WIDTH * size * 8 + 3 * PANEL_BYTES + 10 * rows * rows * 8


def identity(size: int, options: SearchOptions) -> list[int]:
    """Return what tells a search from another: size and options as integers."""
    tolerance = -1.0 if options.tolerance is None else options.tolerance
    bits = int(torch.tensor(tolerance, dtype=torch.float64).view(torch.int64))
    return [size, options.count, _ENDS.index(options.end), bits, options.seed % 2**63, options.dtype.itemsize,
            options.most_products, -1 if options.length is None else options.length]  # fmt: skip


def require(size: int, options: SearchOptions) -> None:
    """Refuse what cannot be searched for."""
    if size < 1:
        raise ValueError(f"the matrix must have at least one row (got {size})")
    if not 1 <= options.count <= size:
        raise ValueError(f"count must be between 1 and the {size} rows of the matrix (got {options.count})")
    if options.end not in _ENDS:
        raise ValueError(f"end must be one of {', '.join(_ENDS)} (got {options.end!r})")
    if options.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64 (got {options.dtype})")
    if options.most_products < 1:
        raise ValueError(f"most_products must be at least 1 (got {options.most_products})")
    if options.tolerance is not None and not 0 < options.tolerance < 1:
        raise ValueError(f"tolerance must lie between 0 and 1 (got {options.tolerance})")
    least = min(options.wanted + 4, size)
    if options.length is not None and options.length < least:
        raise ValueError(
            f"length must be at least {least}, four more than the eigenvalues wanted (got {options.length}); "
            "give it more vectors, or ask for fewer eigenvalues"
        )
