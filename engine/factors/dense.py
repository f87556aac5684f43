"""Dense sides: a matrix or a diagonal as it is stored, as operators, with digest and packed triangle."""

import ctypes
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from engine.errors import BrokenFactors
from engine.linalg.eigenbasis import Eigenbasis
from engine.linalg.eigendecomposition import decompose, is_diagonal
from engine.linalg.layer_matrices import aligned, left_product, right_product
from engine.linalg.linear_operator import Operator, Structured
from engine.linalg.panels import frobenius_norm, wide_product
from engine.memory.guard import Guard

HOST = torch.device("cpu")
_HASHED_AT_ONCE = 2**26
_MIRRORED_ROWS = 64
_POWER_STEPS = 30


@dataclass(frozen=True, kw_only=True, eq=False)
class Dense(Operator):
    """``S = scale · M`` of a matrix M as it is stored."""

    kind: ClassVar[Literal["dense"]] = "dense"
    stored: Tensor
    """M (n, n), any float dtype, on any device."""
    scale: float = 1.0
    """A power of two."""
    rank_bound: int | None = None
    """Most nonzero eigenvalues there can be; None where that is not known."""
    host: Tensor | None = None
    """M on the host, where ``stored`` is a copy of it on a device."""

    @override
    @property
    def size(self) -> int:
        return self.stored.shape[0]

    @override
    @property
    def size_bytes(self) -> int:
        return self.stored.nbytes

    @override
    @property
    def storage_dtype(self) -> torch.dtype:
        return self.stored.dtype

    @override
    @property
    def wide_dtype(self) -> torch.dtype:
        # float16 holds numbers of any size beside its scale, float32 only those it reaches itself
        within = self.stored.element_size() > 2 or 2.0**-100 <= self.scale <= 2.0**100
        return torch.promote_types(self.stored.dtype, torch.float32 if within else torch.float64)

    @override
    def to(self, device: torch.device) -> Self:
        return replace(self, stored=self.stored.to(device), host=self.host if self.stored.is_cuda else self.stored)

    @override
    def trace(self) -> float:
        return float(self.stored.diagonal().to(torch.float64).sum()) * self.scale

    @override
    def diagonal(self) -> Tensor:
        return self.stored.diagonal().to("cpu", torch.float64) * self.scale

    @override
    def frobenius_norm(self) -> float:
        return frobenius_norm(self.stored) * self.scale

    @override
    def spectral_norm(self) -> float:
        """Return the largest eigenvalue to some per cent, from below: by a power iteration."""
        vector = torch.randn(self.size, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        vector = vector.to(self.stored.device)
        for _ in range(_POWER_STEPS):
            vector = wide_product(self.stored, vector / (frobenius_norm(vector) or 1.0))
        return frobenius_norm(vector) * self.scale

    @override
    def spectrum(self, layer: str, guard: Guard | None = None) -> tuple[Tensor, tuple[str, ...]]:
        found = decompose(self.stored, layer, host=self.host, rank_bound=self.rank_bound, guard=guard)
        return found.values * self.scale, found.rungs

    @override
    def basis(self, layer: str, device: torch.device, guard: Guard | None, dtype: torch.dtype) -> Eigenbasis:
        there = self.stored.to(device)
        found = decompose(there, layer, need="vectors", rank_bound=self.rank_bound, guard=guard)
        assert found.vectors is not None  # noqa: S101 - they were asked for
        values = found.values if found.signed is None else found.signed
        return Eigenbasis(values * self.scale, found.vectors.to(self.stored.device, dtype))

    @override
    def apply(self, right: Tensor) -> Tensor:
        return self.left(right[:, None])[:, 0]

    @override
    def solve(self, right: Tensor, damping: float) -> Tensor:
        damped = self.to_dense(torch.float64)
        damped = damped.clone() if damped is self.stored else damped
        damped.diagonal().add_(damping)
        solved: Tensor = torch.linalg.solve(damped, right.to(damped))
        return solved.to(right)

    @override
    def logdets(self, shifts: Tensor) -> Tensor:
        return torch.log(self.spectrum("")[0] + shifts.to("cpu", torch.float64)[:, None]).sum(1)

    @override
    def to_dense(self, dtype: torch.dtype) -> Tensor:
        wide = self.stored.to(dtype)
        return wide if self.scale == 1 else wide * self.scale

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"gradient_covariance": packed(self.stored)}

    @override
    def metadata(self) -> dict[str, str]:
        return {}

    @override
    def digest(self) -> str:
        return digest(self.stored)

    @override
    def panel(self, span: slice, unit: float) -> Tensor:
        return self.stored[span].to(torch.float64) * (self.scale / unit)

    @override
    def left(self, matrices: Tensor) -> Tensor:
        return self._scaled_(left_product(self.stored, matrices))

    @override
    def right(self, matrices: Tensor) -> Tensor:
        return self._scaled_(right_product(matrices, self.stored))

    @override
    def inverse(self, shift: float, device: torch.device, dtype: torch.dtype) -> "Dense | None":
        wide = self.stored.to(device, torch.float64, copy=True).mul_(self.scale)
        wide.diagonal().add_(shift)
        factor, failed = torch.linalg.cholesky_ex(wide)
        del wide
        return None if int(failed) else Dense(stored=torch.cholesky_inverse(factor).to(self.stored.device, dtype))

    def _scaled_(self, product: Tensor) -> Tensor:
        return product if self.scale == 1 else product.mul_(self.scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagonal(Dense):
    """``S = scale · diag m`` of its diagonal m (n,) as it is stored."""

    is_diagonal: ClassVar[bool] = True

    @override
    def trace(self) -> float:
        return float(self.stored.to(torch.float64).sum()) * self.scale

    @override
    def diagonal(self) -> Tensor:
        return self.stored.to("cpu", torch.float64) * self.scale

    @override
    def spectral_norm(self) -> float:
        return float(self.stored.max()) * self.scale

    @override
    def basis(self, layer: str, device: torch.device, guard: Guard | None, dtype: torch.dtype) -> Eigenbasis:
        return Eigenbasis(self.diagonal().clamp_min(0), None)

    @override
    def solve(self, right: Tensor, damping: float) -> Tensor:
        wide = Dense.to_dense(self, torch.float64)
        return (right.to(wide) / (wide + damping)[:, None]).to(right)

    @override
    def to_dense(self, dtype: torch.dtype) -> Tensor:
        return torch.diag(super().to_dense(dtype))

    @override
    def widened(self) -> Tensor:
        return super().to_dense(self.wide_dtype)

    @override
    def left(self, matrices: Tensor) -> Tensor:
        found = aligned(*matrices.shape, like=matrices)
        return self._scaled_(torch.mul(matrices, self.stored.to(matrices)[:, None, None], out=found))

    @override
    def right(self, matrices: Tensor) -> Tensor:
        found = aligned(*matrices.shape, like=matrices)
        return self._scaled_(torch.mul(matrices, self.stored.to(matrices), out=found))

    @override
    def inverse(self, shift: float, device: torch.device, dtype: torch.dtype) -> "Diagonal | None":
        damped = self.stored.to(device, torch.float64, copy=True).mul_(self.scale).add_(shift)
        inverse = damped.reciprocal().to(self.stored.device, dtype)
        return Diagonal(stored=inverse) if bool((damped > 0).all()) else None


def as_operator(
    factor: Tensor | Structured, scale: float = 1.0, rank_bound: int | None = None, host: Tensor | None = None
) -> "Dense | Structured":
    """Return a factor as an operator: itself where it is one.

    Args:
        factor: A matrix (n, n) or a diagonal (n,) as it is stored, or a structured side, whose scale is in it.
        scale: Power of two that the stored tensor is to be multiplied by.
        rank_bound: Most nonzero eigenvalues of a matrix; None if that is not known.
        host: The same matrix on the host, where there is one.
    """
    if isinstance(factor, Structured):
        return factor
    return (Diagonal if is_diagonal(factor) else Dense)(stored=factor, scale=scale, rank_bound=rank_bound, host=host)


def to_storage(matrix: Tensor, dtype: torch.dtype, place: torch.device = HOST) -> tuple[Tensor, float]:
    """Convert a matrix to its storage precision, on the host as a rule.

    Only float16 needs a scale: it ends at 65504, where bfloat16 has the exponents of float32. The
    largest entry of a positive semidefinite matrix stands on its diagonal, and comes to lie
    between 2¹⁴ and 2¹⁵.

    Args:
        matrix: Shape (n, n), or the diagonal (n,); any float dtype and device.
        dtype: Storage precision.
        place: Where it is to stand.

    Returns:
        The stored matrix, and the power of two that it must be multiplied by.

    Memory:
        On the matrix's device 1024 rows in float64; at its place one copy, unless it is there already.
    """
    if matrix.dtype == dtype:
        return matrix.to(place), 1.0
    scale = 1.0
    if dtype == torch.float16:
        largest = float(as_operator(matrix).diagonal().max())
        scale = 2.0 ** (math.frexp(largest)[1] - 15) if largest > 0 else 1.0
    stored = torch.empty(matrix.shape, dtype=dtype, device=place)
    for start in range(0, matrix.shape[0], 1024):
        # through float64, which holds both the scale and what it is divided out of
        rows = matrix[start : start + 1024].to(torch.float64)
        stored[start : start + 1024] = (rows if scale == 1 else rows.div_(scale)).to(dtype)
    return stored, scale


def mirrored_(matrix: Tensor) -> Tensor:
    """Copy the upper triangle onto the lower one, in place.

    A product gᵀg is symmetric only up to rounding, and that rounding depends on the library;
    one triangle decides.

    Args:
        matrix: Shape (…, n, n), or a diagonal (n,), which is left as it is.

    Returns:
        ``matrix``, exactly symmetric.
    """
    if is_diagonal(matrix):
        return matrix
    # few rows at once: what is read down the columns stays in the cache, and 4096 rows take a ninth of the time
    size = matrix.shape[-1]
    for start in range(0, size, _MIRRORED_ROWS):
        stop = min(start + _MIRRORED_ROWS, size)
        matrix[..., stop:, start:stop] = matrix[..., start:stop, stop:].mT
    whole = size - size % _MIRRORED_ROWS
    for blocks in (_diagonal_blocks(matrix[..., :whole, :whole]), matrix[..., whole:, whole:]):
        upper = torch.ones(blocks.shape[-2:], dtype=torch.bool, device=matrix.device).triu_()
        blocks.copy_(torch.where(upper, blocks, blocks.mT))
    return matrix


def diagonals(factor: Tensor) -> Tensor:
    """Return the diagonals (…, n) of matrices (…, n, n), or of what is held as one, as a view."""
    return factor if is_diagonal(factor) else factor.diagonal(dim1=-2, dim2=-1)


def _diagonal_blocks(matrix: Tensor) -> Tensor:
    """View of ``matrix`` (…, k·b, k·b) as the blocks (…, k, b, b) on its diagonal, b being ``_MIRRORED_ROWS``."""
    *leading, down, across = matrix.stride()
    shape = (*matrix.shape[:-2], matrix.shape[-1] // _MIRRORED_ROWS, _MIRRORED_ROWS, _MIRRORED_ROWS)
    return matrix.as_strided(shape, (*leading, _MIRRORED_ROWS * (down + across), down, across))


def packed(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a matrix, row by row, on the host.

    Args:
        matrix: Symmetric, shape (n, n), or a diagonal (n,), on any device.

    Returns:
        Shape (n(n+1)/2,), or (n,) of a diagonal, in the matrix's dtype.
    """
    size = matrix.shape[0]
    host = matrix.detach().to("cpu")
    if is_diagonal(matrix):
        return host
    triangle = torch.empty(size * (size + 1) // 2, dtype=host.dtype)
    for packed_at, dense_at, length in _upper_rows(triangle, host.contiguous()):
        ctypes.memmove(packed_at, dense_at, length)
    return triangle


def unpacked(triangle: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix of a packed upper triangle.

    Args:
        triangle: Shape (n(n+1)/2,), row by row.
        size: n.

    Returns:
        Shape (n, n), on the host.

    Raises:
        BrokenFactors: If the length is not size·(size+1)/2.
    """
    if triangle.shape != (size * (size + 1) // 2,):
        raise BrokenFactors(
            f"a packed triangle of {tuple(triangle.shape)} numbers cannot be a matrix of {size} rows, "
            f"which needs {size * (size + 1) // 2}"
        )
    matrix = torch.empty(size, size, dtype=triangle.dtype)
    for packed_at, dense_at, length in _upper_rows(triangle.contiguous(), matrix):
        ctypes.memmove(dense_at, packed_at, length)
    return mirrored_(matrix)


def _upper_rows(triangle: Tensor, matrix: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield each row's address in the triangle and in the matrix, and its bytes.

    A copy of a row by torch takes 6 µs whatever its length, which is most of the time of a thousand rows.
    """
    item, size = matrix.element_size(), matrix.shape[0]
    packed_at, dense_at = triangle.data_ptr(), matrix.data_ptr()
    for row in range(size):
        length = (size - row) * item
        yield packed_at, dense_at, length
        packed_at += length
        dense_at += (size + 1) * item


def digest(tensor: Tensor | Operator) -> str:
    """Return the SHA-256 over dtype, shape and the dense row-major little-endian bytes.

    Args:
        tensor: Any shape and device; an operator has its own digest, over all that it stores.

    Returns:
        64 hexadecimal digits.
    """
    if isinstance(tensor, Operator):
        return tensor.digest()
    host = tensor.detach().to("cpu").contiguous()
    hashed = Hashed(host)
    hashed.add(host.data_ptr(), host.nbytes)
    return hashed.hexdigest()


class Hashed:
    """The digest of a tensor whose bytes come one after another."""

    def __init__(self, tensor: Tensor) -> None:
        """Begin with dtype and shape of ``tensor``."""
        self._sha = hashlib.sha256(f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}".encode())

    def add(self, address: int, size: int) -> None:
        """Take in bytes on the host.

        Args:
            address: Where they begin.
            size: How many they are.
        """
        # torch gives no buffer without numpy, which this floor does without
        content = memoryview((ctypes.c_char * size).from_address(address)) if size else memoryview(b"")
        for start in range(0, size, _HASHED_AT_ONCE):
            self._sha.update(content[start : start + _HASHED_AT_ONCE])

    def hexdigest(self) -> str:
        """Return 64 hexadecimal digits."""
        return self._sha.hexdigest()
