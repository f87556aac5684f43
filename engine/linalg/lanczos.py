"""The largest eigenvalue of a symmetric matrix known by its products alone, with a bound on the error.

Lanczos with full reorthogonalisation, every coefficient of the projection ``H = Qᵀ F Q`` computed, so that
a basis that has reached its length is replaced by its best Ritz vectors and goes on (a thick restart).
With ``H s = θ s`` and the part ``β`` of ``F q`` that the basis does not hold, the residual of the Ritz pair is
``‖F y − θ y‖ = β |s_last|``: an eigenvalue of F lies within that of θ, and θ never exceeds the largest one.

References:
    Wu & Simon (2000), Thick-restart Lanczos method for large symmetric eigenvalue problems
    Parlett (1998), The symmetric eigenvalue problem
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

_PANEL = 2**20


@dataclass(kw_only=True)
class Lanczos:
    """The search for one matrix's largest eigenvalue; whoever knows the matrix hands in ``F q`` for each ``q``.

    Memory:
        ``length`` vectors where ``start`` is, two more while one enters.
    """

    start: Tensor
    """(n,), of any norm; a zero vector says that F is zero."""
    length: int
    """Vectors kept at once, three or more: two Ritz vectors and what comes next."""
    value: float = 0.0
    """The largest Ritz value so far."""
    residual: float = 0.0
    """Distance within which F has an eigenvalue."""
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
    def converged(self) -> bool:
        """Whether the residual is below the root of the precision: θ is then exact to the precision itself, or nearly.

        The error of a Ritz value is at most its residual squared over the gap to the next eigenvalue.
        """
        return self.done or (
            self.products > 0 and self.residual <= torch.finfo(self._basis.dtype).eps ** 0.5 * self.value
        )

    def advance(self, product: Tensor) -> None:
        """Take ``F q`` (n,) for the last ``vector``; it is overwritten."""
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
        values, vectors = torch.linalg.eigh(self._projected[: self._held, : self._held])
        left = float(product.norm())
        self.value = float(values[-1])
        self.residual = left * abs(float(vectors[-1, -1]))
        # what rounding leaves of a vector that lies in the basis is no direction
        eps = torch.finfo(product.dtype).eps
        if left <= 8 * eps * max(abs(self.value), abs(float(values[0]))) or self._held == self.start.numel():
            self.done = True
            return
        if self._held == self.length:
            self._restart(values, vectors)
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
