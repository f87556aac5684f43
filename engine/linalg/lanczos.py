"""Lanczos' iteration: extreme eigenvalues of a symmetric matrix known by its products alone, with a bound on the error.

Lanczos with full reorthogonalisation: of an orthonormal basis Q the projection ``H = Qᵀ F Q``, whose eigenvalues θ
are the Ritz values. With ``H s = θ s`` and the norm ``β`` of the part of ``F q`` that the basis does not hold, the
residual of a Ritz pair is ``‖F y − θ y‖ = β |s_last|``: an eigenvalue of F lies within that of θ, the largest θ
never exceeds the largest eigenvalue, and the smallest is never below the smallest one. As many eigenvalues as there
are Ritz values lie within the root of the sum of their squared residuals of them.

    ``Lanczos``               a basis of fixed length in any precision, for a caller who makes the products of many
                              matrices in one pass; every coefficient of H is computed, so that a basis that has
                              reached its length is replaced by its best Ritz vectors and goes on (a thick restart)
    ``largest_eigenvalues``   the same in float64, until the residuals are below the tolerance
    ``smallest_eigenvalue``   the same for a fixed number of steps, of a matrix with few distinct eigenvalues

References:
    Wu & Simon (2000), Thick-restart Lanczos method for large symmetric eigenvalue problems
    Parlett (1998), The symmetric eigenvalue problem, chapters 11 and 13
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_PANEL = 2**20
_LONGEST = 160
"""Vectors of a basis beyond which its best Ritz vectors go on, which is as many as are planned for."""


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


@dataclass(kw_only=True)
class Lanczos:
    """A search for one matrix's largest eigenvalue, whose caller hands in ``F q`` for each ``q``.

    Memory:
        ``length`` vectors where ``start`` is, two more while one enters.
    """

    start: Tensor
    """(n,), of any norm; a zero vector says that F is zero."""
    length: int
    """Vectors kept at once, three or more: two Ritz vectors and what comes next."""
    values: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64), init=False)
    """Ritz values so far, ascending, float64 on the host."""
    residuals: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64), init=False)
    """Distance of each within which F has an eigenvalue."""
    products: int = 0
    """Handed in so far."""
    done: bool = False
    """The basis holds the eigenvector: nothing more can come."""
    _basis: Tensor = field(init=False)
    _held: int = 1
    _projected: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Make ``start`` the first vector."""
        self.length = min(self.length, max(self.start.numel(), 1))
        self._basis = self.start.new_empty(self.length, self.start.numel())
        self._projected = torch.zeros(self.length, self.length, dtype=torch.float64)
        norm = float(self.start.norm())
        self.done = norm == 0
        if not self.done:
            torch.div(self.start, norm, out=self._basis[0])

    @property
    def vector(self) -> Tensor:
        """``q`` (n,), to be multiplied next."""
        return self._basis[self._held - 1]

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
        tolerance = torch.finfo(self._basis.dtype).eps ** 0.5
        return self.done or (self.products > 0 and self.residual <= tolerance * self.value)

    def advance(self, product: Tensor) -> None:
        """Extend the basis by one product.

        Args:
            product: ``F q`` for the last ``vector``, shape (n,), its dtype and device; it is overwritten.
        """
        self.products += 1
        basis = self._basis[: self._held]
        coefficients = basis @ product
        product.addmv_(basis.T, coefficients, alpha=-1)
        again = basis @ product
        product.addmv_(basis.T, again, alpha=-1)
        here = self._held - 1
        column = (coefficients + again).to("cpu", torch.float64)
        self._projected[: self._held, here] = column
        self._projected[here, : self._held] = column
        self.values, vectors = torch.linalg.eigh(self._projected[: self._held, : self._held])
        left = float(product.norm())
        self.residuals = left * vectors[-1].abs()
        # what rounding leaves of a vector that lies in the basis is not a direction
        eps = torch.finfo(product.dtype).eps
        if left <= 8 * eps * float(self.values.abs().max()) or self._held == self.start.numel():
            self.done = True
            return
        if self._held == self.length:
            self._restart(self.values, vectors)
        torch.div(product, left, out=self._basis[self._held])
        self._held += 1

    def _restart(self, values: Tensor, vectors: Tensor) -> None:
        """Keep the upper Ritz vectors in place of the basis, a panel of coordinates at a time."""
        kept = max(1, self.length // 2)
        best = vectors[:, -kept:].to(self._basis)
        for first in range(0, self._basis.shape[1], _PANEL):
            panel = self._basis[:, first : first + _PANEL]
            panel[:kept] = best.T @ panel
        self._projected.zero_()
        self._projected[:kept, :kept] = torch.diag(values[-kept:])
        self._held = kept
