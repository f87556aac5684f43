"""Gaussian elimination of a block SSS matrix, in the sparse system of its states.

With the states g_i and h_{i−1} of the edge left of block i as unknowns, A x = b reads

    V_iᵀ x_i + W_i h_i − h_{i−1} = 0,     P_i g_i + D_i x_i + U_i h_i = b_i,     R_i g_i + Q_iᵀ x_i − g_{i+1} = 0.

Block i touches the edge left of it, its own rows, and the edge right of it: a staircase, whose determinant is ±det A.
Partial pivoting within the rows that hold an unknown is that of the whole sparse matrix, so leading blocks of A may be
singular; block LU, which is cheaper, fails there. What is left of the blocks above, and of those below, are as many
equations in the states of one edge as a triangle's order: with both, the diagonal of the inverse is a system per block.

References:
    Chandrasekaran et al. (2005), Some fast algorithms for sequentially semiseparable representations
"""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from engine.semiseparable.semiseparable_matrix import SingularMatrix


class Elimination:
    """The staircase of one matrix; ``SingularMatrix`` where it is solved and a pivot is no more than rounding."""

    def __init__(self, generators: Sequence[Tensor], beyond: Tensor) -> None:
        """Assemble the equations, scaled so that no entry is far above one.

        Args:
            generators: D, U, W, V, P, R and Q as ``BlockSSS`` takes them.
            beyond: Rows (m, p) that are not the matrix's, in whose place the identity stands.

        Memory:
            m (p + a + b)(p + 2a + 2b) numbers, and as many once more while it is solved.
        """
        D, U, W, V, P, R, Q = generators
        m, p, a, b = D.shape[0], D.shape[1], U.shape[2], P.shape[2]
        self._m, self._p, self._a, self._b = m, p, a, b
        # powers of two, which round nothing: the states get the size of x, and A that of one
        up, down = _power(V), _power(Q)
        size = max(_power(D), _power(U) * up if a else 0.0, _power(P) * down if b else 0.0)
        self._size = size
        V, Q, U, P = V / up, Q / down, U * (up / size), P * (down / size)
        D = D / size + torch.diag_embed(beyond.to(D.dtype))
        self._real_rows = int((~beyond).sum())
        eye_a, eye_b = (torch.eye(k, dtype=D.dtype, device=D.device).expand(m, -1, -1) for k in (a, b))
        zero = D.new_zeros
        columns = (
            torch.cat([zero(m, a, b), P, R], 1),  # g_i
            torch.cat([-eye_a, zero(m, p, a), zero(m, b, a)], 1),  # h_{i−1}
            torch.cat([V.mT, D, Q.mT], 1),  # x_i
            torch.cat([zero(m, a, b), zero(m, p, b), -eye_b], 1),  # g_{i+1}
            torch.cat([W, U, zero(m, b, a)], 1),  # h_i
        )
        self._equations = torch.cat(columns, 2)
        self._first = torch.cat([torch.eye(b, dtype=D.dtype, device=D.device), zero(b, a)], 1)  # g_0 = 0
        self._last = torch.cat([zero(a, b), torch.eye(a, dtype=D.dtype, device=D.device)], 1)  # h_{m−1} = 0

    def solve(self, rows: Tensor) -> Tensor:
        """Return the solution for right sides (m, p, k), in that shape."""
        a, b, k = self._a, self._b, rows.shape[2]
        right, forward = rows.new_zeros(b, k), []
        for step, side in zip(self._steps, rows / self._size, strict=True):
            top, right = step.forward(torch.cat([right, side.new_zeros(a, k), side, side.new_zeros(b, k)]))
            forward.append(top)
        edge = torch.linalg.lu_solve(*self._closing, torch.cat([right, right.new_zeros(a, k)]))
        solution: list[Tensor] = []
        for step, top in zip(reversed(self._steps), reversed(forward), strict=True):
            unknown = step.back(top, edge)
            edge = unknown[: a + b]
            solution.append(unknown[a + b :])
        return torch.stack(solution[::-1])

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return sign (or phase) and logarithm of the absolute value of the determinant."""
        factor, swaps = self._closing
        pivots = torch.cat([*(step.pivots.diagonal() for step in self._steps), factor.diagonal()])
        moved = int((swaps != torch.arange(1, swaps.numel() + 1, device=swaps.device)).sum())
        # of a permutation the determinant is ±1, without rounding
        signs = (round(float(torch.linalg.det(step.permutation.detach().real))) for step in self._steps)
        parity = math.prod(signs) * (-1) ** (moved + self._m * (self._a + self._b))
        logarithm = pivots.abs().log().sum() + self._real_rows * math.log(self._size)
        return parity * (pivots / pivots.abs()).prod(), logarithm

    @cached_property
    def _steps(self) -> list["_Step"]:
        carry, steps = self._first, []
        for place, equations in enumerate(self._equations):
            steps.append(_Step(carry, equations, self._a + self._b + self._p))
            self._require_regular(steps[-1].pivots, place)
            carry = steps[-1].carry
        return steps

    @cached_property
    def _closing(self) -> tuple[Tensor, Tensor]:
        """The system in the states beyond the last block, factored."""
        factor, swaps, _ = torch.linalg.lu_factor_ex(torch.cat([self._steps[-1].carry, self._last]))
        self._require_regular(factor, self._m)
        return factor, swaps

    def inverse_diagonal(self) -> Tensor:
        """Return the diagonal of the inverse, (m, p)."""
        m, p, a, b = self._m, self._p, self._a, self._b
        c = a + b
        above, below = [self._first], [self._last]
        for equations in self._equations[:-1]:
            above.append(_Step(above[-1], equations, c + p).carry)
        for equations in self._equations[1:].flip(0):
            # the same with right and left exchanged: the columns of the edge that is kept come last
            turned = torch.cat([equations[:, c + p :], equations[:, c : c + p], equations[:, :c]], 1)
            below.append(_Step(below[-1], turned, c + p).carry)
        wide = self._equations.new_zeros(1, 1, 1).expand
        system = torch.cat(
            [
                torch.cat([torch.stack(above), wide(m, b, p + c)], 2),
                self._equations,
                torch.cat([wide(m, a, c + p), torch.stack(below[::-1])], 2),
            ],
            1,
        )
        factor, pivots, _ = torch.linalg.lu_factor_ex(system)
        for place in range(m):
            self._require_regular(factor[place], place)
        unit = torch.eye(2 * c + p, dtype=system.dtype, device=system.device)[:, c : c + p]
        solved = torch.linalg.lu_solve(factor, pivots, unit.expand(m, -1, -1))
        diagonal: Tensor = solved[:, c : c + p].diagonal(dim1=1, dim2=2)
        return diagonal / self._size

    def _require_regular(self, factor: Tensor, place: int) -> None:
        """Raise where the upper triangle of an LU factor has a pivot of no more than rounding."""
        pivots = factor.detach().diagonal().abs()
        precision = torch.finfo(factor.dtype).eps * factor.shape[-1]
        if pivots.numel() and not float(pivots.min()) > precision:
            where = f"at row {place * self._p}" if place < self._m else "at the last row"
            raise SingularMatrix(
                f"the matrix is singular, or too near to it: elimination {where} meets a pivot of "
                f"{float(pivots.min()) * self._size:.3g}, where rounding is {precision * self._size:.3g}; shift it off "
                "its spectrum, or damp it"
            )


class _Step:
    """The elimination of the unknowns of one edge and one block from the equations that hold them.

    Args:
        carry: What is left of the blocks before, (k, c), in the states of the edge.
        equations: The block's own, (q, c + p + c).
        count: c + p, unknowns that are eliminated.
    """

    def __init__(self, carry: Tensor, equations: Tensor, count: int) -> None:
        above = torch.cat([carry, carry.new_zeros(carry.shape[0], equations.shape[1] - carry.shape[1])], 1)
        panel = torch.cat([above, equations])
        self.permutation, self._lower, self.pivots = torch.linalg.lu(panel[:, :count])
        self._next, self.carry = self.forward(panel[:, count:])

    def forward(self, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return right sides of the unknowns that are eliminated, and of the equations that are left."""
        count, ordered = self.pivots.shape[0], self.permutation.mT @ right
        top = torch.linalg.solve_triangular(self._lower[:count], ordered[:count], upper=False, unitriangular=True)
        return top, ordered[count:] - self._lower[count:] @ top

    def back(self, top: Tensor, edge: Tensor) -> Tensor:
        """Return the unknowns that were eliminated, given those of the edge after them."""
        unknown: Tensor = torch.linalg.solve_triangular(self.pivots, top - self._next @ edge, upper=True)
        return unknown


def _power(tensor: Tensor) -> float:
    """The power of two above the largest entry; 1 of zeros."""
    largest = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
    return math.ldexp(1.0, min(math.frexp(largest)[1], 1023)) if 0 < largest < math.inf else 1.0
