"""Lanczos' iteration: eigenvalues of a symmetric matrix F known by its products alone, with a bound on the error.

Of an orthonormal basis Q the projection ``H = Qᵀ F Q`` has the Ritz values θ as its eigenvalues: one of F lies within
the residual of each, the largest θ never exceeds the largest eigenvalue, and the smallest is never below the smallest
one. As many eigenvalues as there are Ritz values lie within the root of the sum of their squared residuals of them.

Rows 0 … held − 1 of the basis have been multiplied, the ``pending`` ones behind them are multiplied next. For the
former ``F q`` lies in the basis, but for a part of known norm that was dropped. So with ``H s = θ s`` the residual of a
Ritz pair is at most ``‖L s‖ + |s|ᵀ d``: L holds the coefficients along the pending vectors, d the dropped norms. Every
coefficient of H is computed, none is taken to be zero, so that any Ritz vectors may be kept in place of the basis,
which then goes on (a thick restart).

Vectors are rows in their own precision; their coefficients are summed in float64. A block W of new ones is made
orthogonal to the rows Q by ``C = Q Wᵀ`` and ``W ← W − Cᵀ Q``, twice: the second time removes what rounding left of the
first. Rows stand first, so that a vector is contiguous and a product with all rows is one GEMM; columns are visited in
panels, which bounds what is widened at once.

    ``Projection``            blocks of products, whose caller chooses what is kept
    ``Lanczos``               one vector at a time, for the largest eigenvalue, in any precision
    ``largest_eigenvalues``   the same in float64, until the residuals are below the tolerance
    ``smallest_eigenvalue``   the same for a fixed number of steps, of a matrix with few distinct eigenvalues

References:
    Wu & Simon (2000), Thick-restart Lanczos method for large symmetric eigenvalue problems
    Parlett (1998), The symmetric eigenvalue problem, chapters 11 and 13
    Giraud, Langou, Rozložník & van den Eshof (2005), Rounding error analysis of the classical Gram-Schmidt process
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.linalg.panels import PANEL_NUMBERS

PANEL_BYTES = 8 * PANEL_NUMBERS
"""Bytes of basis rows that are widened at once."""
_LONGEST = 160
"""Vectors of a basis beyond which its best Ritz vectors go on, which is as many as are planned for."""
WIDTH = 8
"""Vectors to be multiplied at once, at most."""


@dataclass(frozen=True, kw_only=True)
class Ritz:
    """Ritz pairs of a part of the basis."""

    values: Tensor
    """(m,), float64, ascending."""
    vectors: Tensor
    """(m, m), float64, in coordinates of the basis."""
    residuals: Tensor
    """(m,), float64: norms of what they leave outside of the basis."""


class Projection:
    """A basis of at most ``room`` vectors of n numbers, and F in it.

    Args:
        room: Vectors that the basis may hold.
        size: n.
        dtype: Of the vectors.
        device: Where they are kept.
        spare: Rows beyond them that serve the caller.

    Memory:
        ``room + spare`` vectors, and some ten times ``room²`` float64 numbers on the host.
    """

    def __init__(self, room: int, size: int, dtype: torch.dtype, device: torch.device | str, *, spare: int = 2) -> None:
        self.room, self.size = room, size
        self.rows = torch.empty(room + spare, size, dtype=dtype, device=device)
        self.matrix = torch.zeros(room, room, dtype=torch.float64)
        self.leaving = torch.zeros(WIDTH, room, dtype=torch.float64)
        self.dropped = torch.zeros(room, dtype=torch.float64)
        self.held = 0
        self.pending = 0
        self.scale = 0.0
        """The largest magnitude of an eigenvalue, as far as it is known."""

    @property
    def vectors(self) -> Tensor:
        """The pending vectors, shape (n, b), a view."""
        return self.rows[self.held : self.held + self.pending].mT

    def extend(self, block: Tensor) -> Tensor:
        """Make the pending vectors part of the basis, and return what their products hold beside it.

        Args:
            block: The products, shape (b, n), in the precision that they are made orthogonal in; overwritten.

        Returns:
            Orthonormal vectors to be made the pending ones, shape (at most b, n), in that precision.
        """
        held, count = self.held, block.shape[0]
        total = held + count
        norms = block.norm(dim=1).tolist()
        column = orthogonalise(self.rows[:total], block).cpu()
        self.matrix[:total, held:total] = column
        self.matrix[held:total, :total] = column.mT
        corner = column[held:]
        self.matrix[held:total, held:total] = (corner + corner.mT) / 2
        self.dropped[held:total] = 0
        self.leaving.zero_()
        self.scale = max(self.scale, float(corner.diagonal().abs().max()))
        # rounding leaves something of a vector that lies in the basis; it is not a direction
        least = 8 * torch.finfo(self.rows.dtype).eps * max(self.scale, *norms)
        self.held, self.pending = total, 0
        fresh: list[Tensor] = []
        for index in range(count):
            vector = block[index : index + 1]
            left, beside = self._separate(vector, norms[index], fresh)
            self.leaving[: len(fresh), held + index] = beside
            if left <= least or total + len(fresh) >= self.size:
                self.dropped[held + index] = left
                continue
            self.leaving[len(fresh), held + index] = left
            fresh.append(vector / left)
        return torch.cat(fresh) if fresh else block[:0]

    def _separate(self, vector: Tensor, norm: float, fresh: list[Tensor]) -> tuple[float, Tensor]:
        """Make one product's remainder orthogonal to its block's others, and to the basis while cancellation goes on.

        Returns its norm and its coefficients along the others.
        """
        others = torch.cat(fresh) if fresh else vector[:0]
        total = torch.zeros(len(fresh), dtype=torch.float64)
        for _ in range(4):
            total += orthogonalise(others, vector)[:, 0].cpu()
            left = float(vector.norm())
            if left > norm / 2:
                break
            orthogonalise(self.rows[: self.held], vector)
            norm = left
        return float(vector.norm()), total

    def append(self, fresh: Tensor) -> None:
        """Make vectors the pending ones.

        Args:
            fresh: Shape (b, n), orthonormal and orthogonal to the basis, which has room for them.
        """
        self.pending = fresh.shape[0]
        self.rows[self.held : self.held + self.pending] = fresh.to(self.rows.dtype)

    def append_apart(self, block: Tensor) -> None:
        """Make vectors the pending ones once they are orthogonal to the basis, where nothing is pending.

        Args:
            block: Shape (b, n), float64, for which the basis has room; overwritten.
        """
        held = self.held
        self.leaving.zero_()
        self.pending = block.shape[0]
        for index in range(self.pending):
            vector = block[index : index + 1]
            for _ in range(2):
                orthogonalise(self.rows[: held + index], vector)
                vector /= vector.norm()
            self.rows[held + index] = vector[0].to(self.rows.dtype)

    def ritz(self, first: int = 0) -> Ritz:
        """Return the Ritz pairs of the basis."""
        here = slice(first, self.held)
        values, vectors = torch.linalg.eigh(self.matrix[here, here])
        residuals = (self.leaving[:, here] @ vectors).square().sum(0).sqrt() + vectors.abs().mT @ self.dropped[here]
        self.scale = max(self.scale, float(values.abs().max()))
        return Ritz(values=values, vectors=vectors, residuals=residuals)

    def restart(self, first: int, chosen: list[int]) -> None:
        """Put some Ritz vectors in place of the basis from ``first`` on; the part outside of them stays pending."""
        here, end = slice(first, self.held), first + len(chosen)
        pairs = self.ritz(first)
        turned = pairs.vectors[:, chosen]
        rotate(self.rows[here], turned)
        leaving, dropped = self.leaving[:, here] @ turned, turned.abs().mT @ self.dropped[here]
        coupled = self.matrix[:first, here] @ turned
        self.matrix[first:, :] = 0
        self.matrix[:, first:] = 0
        self.matrix[first:end, first:end] = torch.diag(pairs.values[chosen])
        self.matrix[:first, first:end] = coupled
        self.matrix[first:end, :first] = coupled.mT
        self.leaving[:, first:] = 0
        self.leaving[:, first:end] = leaving
        self.dropped[first:] = 0
        self.dropped[first:end] = dropped
        self.held = end

    def reduce(self, pairs: Ritz, chosen: list[int]) -> None:
        """Keep some Ritz vectors alone, and forget what they leave outside but for its norm."""
        rotate(self.rows[: self.held], pairs.vectors[:, chosen])
        self.held, self.pending = len(chosen), 0
        for numbers in (self.matrix, self.leaving, self.dropped):
            numbers.zero_()
        self.matrix[: self.held, : self.held] = torch.diag(pairs.values[chosen])
        self.dropped[: self.held] = pairs.residuals[chosen]


class Lanczos:
    """A search for one matrix's largest eigenvalue, whose caller hands in ``F q`` for each ``q``.

    Args:
        start: Vector to start from, shape (n,), of any norm; zero says that F is zero.
        length: Vectors kept at once, three or more: two Ritz vectors and what comes next.

    Memory:
        ``length`` vectors where ``start`` is, two more while one enters.
    """

    def __init__(self, *, start: Tensor, length: int) -> None:
        room, norm = min(length, max(start.numel(), 1)), float(start.norm())
        self._basis = Projection(room, start.numel(), start.dtype, start.device, spare=0)
        self.values = self.residuals = torch.zeros(1, dtype=torch.float64)
        """Ritz values so far, ascending, float64 on the host, and the distance of each within which F has one."""
        self.products = 0
        """Handed in so far."""
        self.done = norm == 0
        """The basis holds the eigenvector: nothing more can come."""
        if not self.done:
            self._basis.append((start / norm)[None])

    @property
    def vector(self) -> Tensor:
        """``q`` (n,), to be multiplied next."""
        return self._basis.rows[max(self._basis.held + self._basis.pending - 1, 0)]

    @property
    def value(self) -> float:
        """The largest Ritz value so far."""
        return float(self.values[-1])

    @property
    def residual(self) -> float:
        """Distance within which F has an eigenvalue."""
        return float(self.residuals[-1])

    @property
    def converged(self) -> bool:
        """Whether the residual is below the root of the vectors' precision, as a share of the value.

        The error of a Ritz value is at most its residual squared over the gap to the next eigenvalue: at the root of
        the precision θ is exact to the precision itself, or nearly.
        """
        tolerance = torch.finfo(self._basis.rows.dtype).eps ** 0.5
        return self.done or (self.products > 0 and self.residual <= tolerance * self.value)

    def advance(self, product: Tensor) -> None:
        """Extend the basis by one product.

        Args:
            product: ``F q`` for the last ``vector``, shape (n,), its dtype and device; it is overwritten.
        """
        self.products += 1
        basis = self._basis
        fresh = basis.extend(product[None])
        ritz = basis.ritz()
        self.values, self.residuals = ritz.values, ritz.residuals
        self.done = fresh.shape[0] == 0
        if self.done:
            return
        if basis.held == basis.room:
            basis.restart(0, list(range(basis.held - max(1, basis.room // 2), basis.held)))
        basis.append(fresh)


def largest_eigenvalues(
    apply: Callable[[Tensor], Tensor], start: Tensor, *, count: int = 1, steps: int = 400, tolerance: float = 1e-10
) -> tuple[list[float], float]:
    """Return the largest eigenvalues of a positive semidefinite operator; one that is multiple is found once.

    Args:
        apply: The operator's product with a float64 column, (n, 1) -> (n, 1), a new tensor.
        start: Vector to start from, shape (n,), float64, any norm; zero stands for the zero operator.
        count: How many to look for.
        steps: Products at most; some 30 are made where the largest eigenvalue stands apart.
        tolerance: Residual, over the largest eigenvalue, up to which a Ritz value counts as found: its error is the
            square of its residual over the gap to the next.

    Returns:
        The Ritz values found, descending, between one and ``count`` (those that have not converged are left out, but
        for the first), and the root of the sum of their squared residuals.

    Memory:
        The basis: 161 columns of n numbers, or n columns where the products may be as many.
    """
    # a whole space that the products suffice for is exact, and a basis of so few numbers is small
    length = steps if start.numel() <= steps else min(steps, _LONGEST)
    search = Lanczos(start=start, length=length + 1)
    values, residuals = search.values, search.residuals
    while not search.done and search.products < steps:
        search.advance(apply(search.vector[:, None])[:, 0])
        values, residuals = search.values.flip(0)[:count], search.residuals.flip(0)[:count]
        if values.numel() == count and bool((residuals <= tolerance * values[0]).all()):
            break
    settled = int((residuals <= tolerance * values[0]).to(torch.int64).cumprod(0).sum())
    kept = slice(max(settled, 1))
    return values[kept].tolist(), math.sqrt(float(residuals[kept].square().sum()))


def smallest_eigenvalue(apply: Callable[[Tensor], Tensor], start: Tensor, *, steps: int) -> float:
    """Return the smallest Ritz value of a symmetric operator, which its smallest eigenvalue does not exceed.

    Args:
        apply: As for ``largest_eigenvalues``.
        start: Column to start from, shape (n, 1), float64, not zero.
        steps: Products at most.

    Returns:
        θ, an estimate from above.

    Memory:
        ``steps`` columns of n numbers, and two.
    """
    search = Lanczos(start=start[:, 0], length=steps + 1)
    while not search.done and search.products < steps:
        search.advance(apply(search.vector[:, None])[:, 0])
    return float(search.values[0])


def panels(rows: Tensor) -> Iterator[slice]:
    """Yield slices of columns whose widened panels hold at most ``PANEL_NUMBERS`` numbers.

    Args:
        rows: Shape (…, m, n).

    Yields:
        Slices of the last dimension.
    """
    size = rows.shape[-1]
    width = max(1, PANEL_NUMBERS // max(math.prod(rows.shape[:-1]), 1))
    for first in range(0, size, width):
        yield slice(first, min(first + width, size))


def along(rows: Tensor, block: Tensor, wide: torch.dtype = torch.float64) -> Tensor:
    """Return the coefficients ``C = Q Wᵀ``.

    Args:
        rows: Q, shape (…, m, n), float32 or float64.
        block: W, shape (…, b, n), any of both, on Q's device.
        wide: Precision of the products.

    Returns:
        Shape (…, m, b), float64, on the same device.
    """
    made = torch.zeros(*rows.shape[:-1], block.shape[-2], dtype=torch.float64, device=rows.device)
    for panel in panels(rows):
        made += rows[..., panel].to(wide) @ block[..., panel].to(wide).mT
    return made


def orthogonalise(rows: Tensor, block: Tensor) -> Tensor:
    """Remove from W what it has along Q, twice, in place.

    Args:
        rows: Q, shape (…, m, n), orthonormal, float32 or float64.
        block: W, shape (…, b, n), overwritten; its precision is that of the products.

    Returns:
        The coefficients removed, shape (…, m, b), float64.
    """
    total = torch.zeros(*rows.shape[:-1], block.shape[-2], dtype=torch.float64, device=rows.device)
    if rows.shape[-2] == 0:
        return total
    for _ in range(2):
        coefficients = along(rows, block, block.dtype)
        for panel in panels(rows):
            block[..., panel] -= coefficients.to(block.dtype).mT @ rows[..., panel].to(block.dtype)
        total += coefficients
    return total


def rotate(rows: Tensor, rotation: Tensor) -> None:
    """Put ``Sᵀ Q`` in place of the first rows of Q.

    Args:
        rows: Q, shape (m, n).
        rotation: S, shape (m, k), float64, with k ≤ m.
    """
    turned = rotation.mT.to(rows.device)
    for panel in panels(rows):
        rows[: rotation.shape[1], panel] = (turned @ rows[:, panel].to(torch.float64)).to(rows.dtype)
