"""The projection of a symmetric F on an orthonormal basis that grows by blocks of products and shrinks to Ritz vectors.

Rows 0 … held − 1 of the basis have been multiplied, the ``pending`` ones behind them are multiplied next. For the
former ``F q`` lies in the basis, but for a part of known norm that was dropped. So with ``H s = θ s`` the residual of a
Ritz pair is at most ``‖L s‖ + |s|ᵀ d``: L holds the coefficients along the pending vectors, d the dropped norms. Every
coefficient of H is computed, none is taken to be zero, so that any Ritz vectors may be kept in place of the basis.

References:
    Wu & Simon (2000), Thick-restart Lanczos method for large symmetric eigenvalue problems
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.operators.krylov.vectors import gaussian, orthogonalise, rotate

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
        room: Vectors that the basis may hold; two more rows serve the caller.
        size: n.
        dtype: Of the vectors.
        device: Where they are kept.

    Memory:
        ``room + 2`` vectors, and some ten times ``room²`` float64 numbers on the host.
    """

    def __init__(self, room: int, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.room, self.size = room, size
        self.rows = torch.empty(room + 2, size, dtype=dtype, device=device)
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
            block: The products, shape (b, n), float64; overwritten.

        Returns:
            Orthonormal vectors to be made the pending ones, shape (at most b, n), float64.
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

    def append_random(self, count: int, seed: int, first: int) -> None:
        """Make random vectors orthogonal to the basis the pending ones, where nothing is pending."""
        held = self.held
        self.leaving.zero_()
        self.pending = min(count, self.size - held, self.room - held)
        block = gaussian(seed, range(first, first + self.pending), self.size, self.rows.device)
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
