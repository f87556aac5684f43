"""A semiseparable matrix: an N×N matrix held in O(N log N) numbers, with products, solves and determinants.

    A x, Aᵀ x        matvec, rmatvec       no conjugate is taken anywhere
    A⁻¹ b            solve
    det A            slogdet
    diag A⁻¹         inverse_diagonal
    A − z I          shifted

Gradients flow through every one of them to the tensors that the matrix is held in.
"""

import cmath
import math
import numbers
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor
from typing_extensions import override

from catalog.record import FieldError
from catalog.record_reader import read
from engine.errors import NonFiniteFactor, UsageError, WrongShape
from engine.linalg.linear_operator import LinearOperator

_ROWS_AT_ONCE = 256
_PRECISIONS = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class MatrixRefused(UsageError):
    """A matrix, a callback or a choice cannot be used; the message says what can."""

    code = "matrix_refused"


class SingularMatrix(UsageError):
    """A system has no solution, or none that rounding leaves anything of."""

    code = "singular_matrix"


class SemiseparableMatrix(LinearOperator):
    """An N×N matrix that is held in far fewer than N² numbers."""

    kind: ClassVar[str]
    """The structure's name in files and tables."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Precision of the arithmetic: that of every result, unless an argument is wider."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the tensors."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what ``read`` needs beside the tensors, of types that JSON holds."""

    @classmethod
    @abstractmethod
    def read(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Self:
        """Make the matrix of what ``tensors`` and ``facts`` returned.

        Raises:
            MatrixRefused: If a tensor is missing, or its shape contradicts the facts.
        """

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the matrix on another device, or in another precision of its arithmetic.

        Args:
            device: The device; None leaves it.
            dtype: float32, float64, complex64 or complex128; None leaves it.

        Raises:
            MatrixRefused: If the dtype is another one, or real where the matrix is complex, or there is no such device.
        """
        if dtype is not None and (dtype not in _PRECISIONS or self.dtype.is_complex > dtype.is_complex):
            allowed = ", ".join(map(str, _PRECISIONS[2 * self.dtype.is_complex :]))
            raise MatrixRefused(f"`dtype` of a matrix of {self.dtype} must be one of {allowed} (got {dtype})")
        try:
            place = torch.empty(0, device=self.device if device is None else device).device
        except (RuntimeError, TypeError, AssertionError) as error:
            raise MatrixRefused(f"`device` must be one that this machine's PyTorch has (got {device!r})") from error
        moved = {name: self._convert(name, tensor.to(place), dtype) for name, tensor in self.tensors().items()}
        return self.read(moved, self.facts())

    def _convert(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        del name
        return tensor if dtype is None else tensor.to(dtype)

    @property
    @override
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @abstractmethod
    def memory_usage(self) -> dict[str, Any]:
        """Return the report of its bytes, counted from the tensors that exist."""

    @override
    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        dense = self.matvec(torch.eye(self.size, dtype=self.dtype, device=self.device))
        return dense if dtype is None else dense.to(dtype)

    @override
    def apply(self, right: Tensor) -> Tensor:
        return self.matvec(right)

    @abstractmethod
    def matvec(self, x: Tensor) -> Tensor:
        """Return A x.

        Args:
            x: One column (N,) or several (N, k), of any float or complex dtype.

        Returns:
            The product, in the shape of ``x``.

        Raises:
            WrongShape: If ``x`` has other rows than N.
        """

    @abstractmethod
    def transposed(self) -> Self:
        """Return Aᵀ, without a conjugate."""

    def rmatvec(self, x: Tensor) -> Tensor:
        """Return Aᵀ x, without a conjugate; arguments as for ``matvec``."""
        return self.transposed().matvec(x)

    @override
    @abstractmethod
    def solve(self, right: Tensor, damping: float = 0.0) -> Tensor:
        """Return (A + damping I)⁻¹ b.

        Args:
            right: b, one column (N,) or several (N, k).
            damping: Of either sign.

        Returns:
            The solution, in the shape of ``b``.

        Raises:
            SingularMatrix: If a pivot is no more than rounding.
            WrongShape: If b has other rows than N.
        """

    @abstractmethod
    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return sign (or phase) and log of the absolute value of the determinant; 0 and −inf where it is singular."""

    @override
    def logdets(self, shifts: Tensor) -> Tensor:
        # of the absolute value of the determinant, which may be of either sign
        return torch.stack([self.shifted(-shift).slogdet()[1] for shift in shifts]).to("cpu", torch.float64)

    @override
    def spectrum(self, layer: str, guard: object = None) -> NoReturn:
        raise self._need_not_be_symmetric("spectrum")

    @override
    def power(self, exponent: float, layer: str) -> NoReturn:
        raise self._need_not_be_symmetric(f"power {exponent:g}")

    @override
    def clip(self, kappa_max: float, layer: str, largest: float | None = None) -> NoReturn:
        raise self._need_not_be_symmetric(f"spectrum to be clipped at {kappa_max:g}")

    def _need_not_be_symmetric(self, what: str) -> MatrixRefused:
        return MatrixRefused(
            f"a matrix kept as `{self.kind}` need not be symmetric, so it has no {what}; decompose `to_dense()`"
        )

    @abstractmethod
    def inverse_diagonal(self) -> Tensor:
        """Return the diagonal (N,) of the inverse.

        Raises:
            SingularMatrix: If a pivot is no more than rounding.
        """

    @abstractmethod
    def shifted(self, z: complex | Tensor) -> Self:
        """Return A − z I.

        Args:
            z: A finite number, or a tensor of one.

        Raises:
            MatrixRefused: If it is not.
        """

    def __repr__(self) -> str:
        """Return one line: structure, size and bytes."""
        return f"<{type(self).__name__} of {self.size} rows, {self.size_bytes:,} bytes>"


def as_columns(matrix: SemiseparableMatrix, x: Tensor) -> Tensor:
    """Return an argument as columns (N, k), in a precision that holds both it and the matrix.

    Raises:
        MatrixRefused: If it is not a tensor.
        WrongShape: If it has other rows than the matrix.
    """
    require_tensor(x, "x")
    if x.ndim not in (1, 2) or x.shape[0] != matrix.size:
        raise WrongShape(
            f"a vector for this matrix must have shape ({matrix.size},) or ({matrix.size}, k) (got {tuple(x.shape)})"
        )
    wide = torch.promote_types(x.dtype, matrix.dtype)
    return (x if x.ndim == 2 else x[:, None]).to(matrix.device, wide)


def require_matrix(matrix: Tensor) -> Tensor:
    """Check a dense matrix before it is compressed.

    Args:
        matrix: Shape (N, N); integers and 16-bit floats are widened, with a warning.

    Returns:
        The matrix in float32, float64, complex64 or complex128.

    Raises:
        MatrixRefused: If it is not a tensor, or has no rows.
        NonFiniteFactor: If it holds NaN or Inf; the message names the first such row.
        WrongShape: If it is not square.
    """
    require_tensor(matrix, "matrix")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise WrongShape(f"the matrix must be square, of shape (N, N) (got {tuple(matrix.shape)})")
    if matrix.shape[0] == 0:
        raise MatrixRefused("the matrix must have a row (got shape (0, 0))")
    wide = widen(matrix)
    for start in range(0, wide.shape[0], _ROWS_AT_ONCE):
        require_finite(wide[start : start + _ROWS_AT_ONCE], start)
    return wide


def widen(matrix: Tensor) -> Tensor:
    """Return a tensor in a precision that the structures compute in; a warning says where that is another."""
    if matrix.dtype in _PRECISIONS:
        return matrix
    wider = torch.float32 if matrix.dtype in (torch.float16, torch.bfloat16) else torch.float64
    warnings.warn(f"the matrix is of {matrix.dtype} and is computed with in {wider}", stacklevel=3)
    return matrix.to(wider)


def require_tensor(value: object, name: str) -> None:
    """Raise ``MatrixRefused`` where an argument is not a dense tensor, with its type or layout."""
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise MatrixRefused(f"`{name}` must be dense (got {value.layout}); give its to_dense()")
    if not isinstance(value, Tensor):
        raise MatrixRefused(
            f"`{name}` must be a torch.Tensor (got {type(value).__name__}); make one, such as by torch.as_tensor"
        )


def require_finite(rows: Tensor, start: int, name: str = "the matrix") -> None:
    """Raise where rows of a matrix hold NaN or Inf, or sums of N such entries would.

    Args:
        rows: Shape (k, N), in the precision of the arithmetic.
        start: Number of the first of them in the matrix.
        name: The matrix's name in the error.

    Raises:
        MatrixRefused: With the largest entry.
        NonFiniteFactor: With the number of the first such row.
    """
    if not bool(torch.isfinite(rows).all()):
        bad = start + int((~torch.isfinite(rows)).any(1).nonzero()[0])
        raise NonFiniteFactor(f"{name} holds NaN or Inf in row {bad}; give finite numbers")
    largest = float(torch.linalg.vector_norm(rows, math.inf))
    if largest * rows.shape[1] > torch.finfo(rows.dtype).max:
        raise MatrixRefused(
            f"{name} has entries of up to {largest:.3g}, of which {rows.shape[1]} add up to infinity in {rows.dtype}; "
            "divide it by a power of two"
        )


def read_number(kind: type, value: object, name: str) -> Any:  # noqa: ANN401 - of the kind
    """Return an argument as a number of a kind, int or float; ``MatrixRefused`` if it is not one."""
    try:
        return read(kind, value, name)
    except FieldError as error:
        raise MatrixRefused(str(error)) from error


def read_whole(value: object, name: str, least: int | None = None) -> int:
    """Return an argument as a whole number; ``MatrixRefused`` if it is not one, or below the least."""
    number: int = read_number(int, value, name)
    if least is not None and number < least:
        raise MatrixRefused(f"`{name}` must be at least {least} (got {number})")
    return number


def read_tolerance(value: object) -> float | None:
    """Return a tolerance, or None as it is; ``MatrixRefused`` if it is not a number between 0 and 1."""
    number: float | None = None if value is None else read_number(float, value, "tolerance")
    if number is not None and not 0 < number < 1:
        raise MatrixRefused(f"`tolerance` must be above 0 and below 1 (got {number})")
    return number


def read_shift(z: object, name: str = "z") -> complex | Tensor:
    """Return a finite number, or a tensor () through which gradients flow; ``MatrixRefused`` if it is not one."""
    one = z.numel() == 1 and z.dtype != torch.bool if isinstance(z, Tensor) else not isinstance(z, bool)
    if not one or not isinstance(z, (numbers.Complex, Tensor)):
        got = f"a tensor of {z.dtype}, shape {tuple(z.shape)}" if isinstance(z, Tensor) else repr(z)
        raise MatrixRefused(f"`{name}` must be a complex number, or a tensor of one (got {got})")
    try:
        number = complex(z.detach() if isinstance(z, Tensor) else z)
    except OverflowError:
        number = complex(cmath.inf)
    if not cmath.isfinite(number):
        raise MatrixRefused(f"`{name}` must be a finite number (got {z})")
    if isinstance(z, Tensor):
        return z.reshape(())
    return number.real if isinstance(z, numbers.Real) else number


def require_rank(rank: object, size: int, name: str = "rank") -> int:
    """Return a rank or an order as a whole number; ``MatrixRefused`` if it is not one, or below 1 or above N."""
    number = read_whole(rank, name)
    if not 1 <= number <= size:
        raise MatrixRefused(f"`{name}` must be from 1 to {size}, the rows of the matrix (got {number})")
    return number


def default_rank(size: int) -> int:
    """Return ⌈log₂ N⌉, at least 1."""
    return max(1, math.ceil(math.log2(size)))


def level_ranks(size: int, levels: int) -> tuple[int, ...]:
    """Return the rank of each level of a hierarchical matrix of N rows.

    Returns:
        ⌈log₂ N⌉, then of each level the rounded-up logarithm of the one before, at least 1.

    Raises:
        MatrixRefused: If ``levels`` is not a whole number of at least 1.
    """
    levels, ranks = read_whole(levels, "num_levels", 1), [default_rank(size)]
    while len(ranks) < levels:
        ranks.append(default_rank(ranks[-1]))
    return tuple(ranks)
