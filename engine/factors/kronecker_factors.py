"""Factors: A and G of one layer, their digests, and the packed triangles they are stored as.

``A`` (in_dim, in_dim) and ``G`` (out_dim, out_dim) are symmetric; where A is diagonal it is held
as its diagonal (in_dim,), and so is the G of a bare parameter. Row-vector convention: the layer's
block of the curvature of the mean loss is ``G ⊗ A`` for ``weight.flatten()`` with the bias as the
last column.
"""

import ctypes
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import BiasColumnMismatch, BrokenFactors
from engine.layers.layer import Form
from engine.linalg.linear_operator import Structured

HOST = torch.device("cpu")
_HASHED_AT_ONCE = 2**26
_MIRRORED_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class TiedParts:
    """The parts of the product of a head and its table, besides the head's own G."""

    A: Tensor
    """(in_dim, in_dim) the head's own A, on the host."""
    counts: Tensor
    """(V,) relative counts of the table's ids."""
    moments: Tensor
    """(d, d) second moments of the gradients of its vectors."""

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors under the names they are stored by, matrices as packed triangles."""
        return {
            "head_activation": packed(self.A),
            "table_counts": self.counts,
            "table_moments": packed(self.moments),
        }

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], *, in_dim: int, bias: bool) -> "TiedParts | None":
        """Restore the parts.

        Args:
            tensors: As ``stored`` returned them, and others.
            in_dim: Rows of A.
            bias: Whether A has a column for the head's bias, which the table lacks.

        Returns:
            The parts; None where they were not kept.

        Raises:
            BrokenFactors: If a triangle is of another size.
        """
        names = ("head_activation", "table_counts", "table_moments")
        if any(name not in tensors for name in names):
            return None
        head, counts, moments = (tensors[name] for name in names)
        return cls(A=unpacked(head, in_dim), counts=counts, moments=unpacked(moments, in_dim - int(bias)))


@dataclass(frozen=True, kw_only=True)
class Factors:
    """One layer's curvature."""

    layer: str
    form: Form
    bias: bool
    """A's last row and column belong to the bias."""
    A: Tensor
    """(in_dim, in_dim), or its diagonal (in_dim,), as it is stored."""
    G: Tensor | Structured
    """(out_dim, out_dim), or its diagonal (out_dim,), as it is stored; or what stands for it."""
    scale_A: float = 1.0
    """Power of two that the stored A is to be multiplied by."""
    scale_G: float = 1.0
    """The same of G."""
    head_diagonal: Tensor | None = None
    """(out_dim,) the diagonal of the head's own G, where G is that of the nearest product of a head and its table."""
    tied: TiedParts | None = None
    """The other parts of that product."""

    @property
    def out_dim(self) -> int:
        """Rows and columns of G."""
        return self.G.size if isinstance(self.G, Structured) else self.G.shape[0]

    @property
    def dense_G(self) -> Tensor:  # noqa: N802 - the field's own symbol
        """G where it is held as a matrix or a diagonal.

        Raises:
            TypeError: If something else stands for it.
        """
        if isinstance(self.G, Structured):
            message = f"layer `{self.layer}`: G is kept as `{self.G.kind}`, not as a matrix"
            raise TypeError(message)
        return self.G

    @property
    def widened_A(self) -> Tensor:  # noqa: N802 - the field's own symbol
        """A times its scale, in float32 or wider; (in_dim, in_dim), or (in_dim,) of a diagonal."""
        return _widened(self.A, self.scale_A)

    @property
    def widened_G(self) -> Tensor:  # noqa: N802 - the field's own symbol
        """G times its scale, in float32 or wider; a diagonal (out_dim,), or (out_dim, out_dim), structured or not."""
        if isinstance(self.G, Structured):
            return self.G.to_dense(torch.promote_types(self.G.storage_dtype, torch.float32))
        return _widened(self.G, self.scale_G)

    def require_fit(self, gradient: Tensor) -> None:
        """Check that a gradient agrees with the factors.

        Args:
            gradient: Matrix, shape (out_dim, in_dim), with the bias as its last column.

        Raises:
            BiasColumnMismatch: If one has the bias column and the other lacks it, or the shapes
                disagree altogether; the message names both shapes.
        """
        expected = (self.out_dim, self.A.shape[0])
        require_bias_column(self.layer, "gradient", tuple(gradient.shape), expected, bias=self.bias)


def _widened(stored: Tensor, scale: float) -> Tensor:
    if stored.element_size() > 2:
        return stored if scale == 1 else stored * scale
    # float16 holds numbers of any size beside its scale, float32 only those it reaches itself
    return stored.to(torch.float32 if 2.0**-100 <= scale <= 2.0**100 else torch.float64) * scale


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
        largest = float((matrix if matrix.ndim == 1 else matrix.diagonal()).max())
        scale = 2.0 ** (math.frexp(largest)[1] - 15) if largest > 0 else 1.0
    stored = torch.empty(matrix.shape, dtype=dtype, device=place)
    for start in range(0, matrix.shape[0], 1024):
        # through float64, which holds both the scale and what it is divided out of
        rows = matrix[start : start + 1024].to(torch.float64)
        stored[start : start + 1024] = (rows if scale == 1 else rows.div_(scale)).to(dtype)
    return stored, scale


def require_bias_column(
    layer: str, what: str, shape: tuple[int, ...], expected: tuple[int, ...], *, bias: bool
) -> None:
    """Raise unless a shape is the expected one; the message names both shapes and the bias column's part in it."""
    if shape == expected:
        return
    column = "with" if bias else "without"
    raise BiasColumnMismatch(
        f"layer `{layer}`: {what} has shape {shape}, but the layer is trained {column} a bias column, "
        f"which makes it {expected}; collect the factors and take the gradient of the same parameters",
        layer=layer,
    )


def mirrored_(matrix: Tensor) -> Tensor:
    """Copy the upper triangle onto the lower one, in place.

    A product gᵀg is symmetric only up to rounding, and that rounding depends on the library;
    one triangle decides.

    Args:
        matrix: Shape (…, n, n).

    Returns:
        ``matrix``, exactly symmetric.
    """
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
    if matrix.ndim == 1:
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


def digest(tensor: Tensor | Structured) -> str:
    """Return the SHA-256 over dtype, shape and the dense row-major little-endian bytes.

    Args:
        tensor: Any shape and device; a structured side has its own digest, over all that it stores.

    Returns:
        64 hexadecimal digits.
    """
    if isinstance(tensor, Structured):
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
