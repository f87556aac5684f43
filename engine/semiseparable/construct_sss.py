"""Construction of a block SSS matrix from rows: one sweep of sequential SVDs for each triangle.

Upper triangle, from the top, B (r, rest) empty at first:

    V_iᵀ = first p columns of B;    [other columns of B; A(i, right of i)] = Q Σ Zᵀ;
    W_i = upper rows of Q, U_i = lower rows;    B = Qᵀ [other columns of B; A(i, right of i)]

with the columns of Q that are kept. The lower triangle is the upper one of the matrix turned by 180 degrees. The left
factors stay orthonormal and the error of each step is orthogonal to that of the next, so the squared Frobenius error
*is* the sum of all squared singular values that were left out: it is known without the dense matrix.

References:
    Chandrasekaran et al. (2005), Some fast algorithms for sequentially semiseparable representations
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.errors import WrongShape
from engine.linalg.panels import frobenius_norm
from engine.semiseparable.block_sss import BlockSSS
from engine.semiseparable.semiseparable_matrix import (
    MatrixRefused,
    read_tolerance,
    read_whole,
    require_finite,
    require_matrix,
    require_rank,
    require_tensor,
    widen,
)


class OrderBeyond(MatrixRefused):
    """A tolerance asks for a larger order than the caller allows."""

    code = "order_beyond"


Rows = Callable[[int, int], Tensor]
"""``rows(start, stop)`` gives those rows of the matrix, shape (stop − start, N)."""
_CHUNK = 2**20
"""Numbers that are reserved at a time for what stays."""
ROWS_AT_ONCE = 64
"""The most rows that a callback is asked for."""


def construct_sss(
    matrix: Tensor | Rows,
    size: int | None = None,
    *,
    block: int = 16,
    order: int | None = None,
    tolerance: float | None = None,
    most_order: int | None = None,
) -> BlockSSS:
    """Return the block SSS matrix nearest to a matrix, sweep by sweep.

    Args:
        matrix: The dense matrix (N, N), or a callback that gives its rows: each twice, or three times with a tolerance,
            and equally each time.
        size: N, of a callback.
        block: p, rows of a block.
        order: The largest order of an edge; singular values that are no more than rounding take none.
        tolerance: The largest error, by Frobenius norm and relative to the matrix's.
        most_order: The construction ends with an error at the first edge that the tolerance asks more of; None asks
            whatever it takes.

    Returns:
        The matrix, with its orders and an upper bound of its error.

    Raises:
        OrderBeyond: If the tolerance asks for a larger order than ``most_order``.
        MatrixRefused: If ``block``, ``order`` or ``tolerance`` cannot be, or a callback gives other numbers the second
            time, or no dense tensor.
        NonFiniteFactor: If the matrix holds NaN or Inf.
        WrongShape: If the matrix is not square, or a callback gives another shape, dtype or device.

    Memory:
        (p + r) N numbers a few times, and what the structure takes.
    """
    if (order is None) == (tolerance is None):
        raise MatrixRefused(f"give either `order` or `tolerance` (got order={order}, tolerance={tolerance})")
    if isinstance(matrix, Tensor):
        dense = require_matrix(matrix)
        source = _Source(lambda start, stop: dense[start:stop], dense.shape[0])
    elif not callable(matrix):
        raise MatrixRefused(
            f"`matrix` must be a torch.Tensor, or a callback that gives rows of one (got {type(matrix).__name__}); "
            "make a tensor, such as by torch.as_tensor"
        )
    elif size is None:
        raise MatrixRefused("`size` must be the rows of the matrix, at least 1, where a callback gives them (got None)")
    else:
        source = _Source(matrix, read_whole(size, "size", 1))
    n = source.size
    block = min(read_whole(block, "block", 1), n)
    order = None if order is None else require_rank(order, n, "order")
    tolerance = read_tolerance(tolerance)
    most_order = n if most_order is None else read_whole(most_order, "most_order", 0)
    steps = 2 * max(-(-n // block) - 1, 1)
    budget = None if tolerance is None else _Budget(tolerance * source.norm() or 1.0, steps, most_order)
    bounds = [(start, min(start + block, n)) for start in range(0, n, block)]
    above = _sweep(source.read, bounds, n, order, budget)
    turned = [(n - stop, n - start) for start, stop in reversed(bounds)]
    below = _sweep(lambda start, stop: source.read(n - stop, n - start).flip(0, 1), turned, n, order, budget)
    for place, (first, again) in enumerate(zip(above.diagonal, reversed(below.diagonal), strict=True)):
        if not torch.equal(first, again.flip(0, 1)):
            raise MatrixRefused(
                f"rows {bounds[place][0]} to {bounds[place][1]} came with other numbers the second time; a callback "
                "must give the same rows whenever it is asked"
            )
    # beside what was left out: rounding of as many orthogonal steps, each of so many rows and of at most four eps a row
    largest, precision = max(above.largest, below.largest), torch.finfo(above.diagonal[0].dtype)
    rounding = 4 * math.sqrt(len(bounds) * (block + largest)) * precision.eps * (above.norm + n * precision.tiny)
    left_out = math.hypot(above.left_out, below.left_out)
    generators = {
        "D": above.diagonal,
        "U": above.left,
        "W": above.transfers,
        "V": above.right,
        "P": [each.flip(0) for each in reversed(below.left)],
        "R": below.transfers[::-1],
        "Q": [each.flip(0) for each in reversed(below.right)],
    }
    return BlockSSS.from_blocks(generators, error_bound=left_out + rounding)


@dataclass(eq=False)
class _Source:
    """The rows of a matrix, at most 64 at a time."""

    rows: Rows
    size: int
    kind: tuple[torch.dtype, torch.device] | None = None
    """That of the first rows, which all others have."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return rows, checked."""
        pieces = []
        for first in range(start, stop, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, stop)
            piece, name = self.rows(first, last), f"rows({first}, {last})"
            require_tensor(piece, name)
            if tuple(piece.shape) != (last - first, self.size):
                raise WrongShape(f"{name} must have shape ({last - first}, {self.size}) (got {tuple(piece.shape)})")
            pieces.append(widen(piece))
            require_finite(pieces[-1], first)
            kind = piece.dtype, piece.device
            self.kind = self.kind or kind
            if kind != self.kind:
                before = " on ".join(map(str, self.kind))
                raise WrongShape(f"{name} must be of {before}, as rows before (got {' on '.join(map(str, kind))})")
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def norm(self) -> float:
        """The Frobenius norm."""
        starts = range(0, self.size, ROWS_AT_ONCE)
        read = (self.read(start, min(start + ROWS_AT_ONCE, self.size)) for start in starts)
        return math.hypot(*(frobenius_norm(rows) for rows in read))


@dataclass(eq=False)
class _Budget:
    """Squared error that may still be made, over the steps that are left."""

    error: float
    """The largest error in all, the unit of what is left."""
    steps: int
    most_order: int
    left: float = 1.0

    def take(self, values: Tensor) -> int:
        """Return how many of the singular values, descending, are kept; the others are paid for."""
        share = self.left / max(self.steps, 1)
        tails = (values.to(torch.float64) / self.error).square().flip(0).cumsum(0).flip(0)
        kept = int((tails > share).sum())
        if kept > self.most_order:
            raise OrderBeyond(f"the tolerance asks for an order above {self.most_order}")
        self.left -= float(tails[kept]) if kept < values.numel() else 0.0
        self.steps -= 1
        return kept


@dataclass(eq=False)
class _Triangle:
    """Generators of a triangle, block by block, and what was left out."""

    diagonal: list[Tensor] = field(default_factory=list)
    left: list[Tensor] = field(default_factory=list)
    transfers: list[Tensor] = field(default_factory=list)
    right: list[Tensor] = field(default_factory=list)
    left_out: float = 0.0
    norm: float = 0.0
    """The Frobenius norm of the whole matrix."""

    @property
    def largest(self) -> int:
        """The largest order."""
        return max(each.shape[1] for each in self.left)


class _Chunks:
    """Small tensors that stay, in a few large ones: each alone would stand between the large ones that come and go."""

    def __init__(self) -> None:
        self._rest: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a copy."""
        size = tensor.numel()
        if self._rest is None or self._rest.numel() < size:
            self._rest = torch.empty(max(_CHUNK, size), dtype=tensor.dtype, device=tensor.device)
        kept, self._rest = self._rest[:size], self._rest[size:]
        return kept.view(tensor.shape).copy_(tensor)


def _sweep(
    rows: Rows, bounds: list[tuple[int, int]], size: int, order: int | None, budget: _Budget | None
) -> _Triangle:
    """Compress an upper triangle from the top."""
    triangle, largest, keep = _Triangle(), 0.0, _Chunks()
    carry: Tensor | None = None
    for start, stop in bounds:
        own = rows(start, stop)
        triangle.norm = math.hypot(triangle.norm, frobenius_norm(own))
        triangle.diagonal.append(keep(own[:, start:stop]))
        before = own.new_zeros(0, size - start) if carry is None else carry
        height = stop - start
        triangle.right.append(keep(before[:, :height].mT))
        stack = torch.cat([before[:, height:], own[:, stop:]])
        left, kept = stack.new_zeros(stack.shape[0], 0), 0
        if stack.shape[1]:
            # a QR of the tall transpose first: its triangle is small, and has the same singular values
            small = torch.linalg.qr(stack.mT, mode="r").R.mT
            basis, values, _ = torch.linalg.svd(small, full_matrices=False)
            largest = max(largest, float(values[0]))
            noise = torch.finfo(values.dtype).eps * stack.shape[0] * largest
            kept = int((values > noise).sum())
            if order is not None:
                kept = min(kept, order)
            if budget is not None:
                kept = min(kept, budget.take(values))
            triangle.left_out = math.hypot(triangle.left_out, frobenius_norm(values[kept:]))
            left = keep(basis[:, :kept])
        triangle.transfers.append(left[: before.shape[0]])
        triangle.left.append(left[before.shape[0] :])
        carry = left.mH @ stack
    return triangle
