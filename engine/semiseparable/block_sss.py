"""A block SSS matrix: sequentially semiseparable, with small generators for each block of p rows.

    A_ij = U_i W_{i+1} ⋯ W_{j−1} V_jᵀ   (i < j),      A_ii = D_i,      A_ij = P_i R_{i−1} ⋯ R_{j+1} Q_jᵀ   (i > j)

U and W of block i meet the edge on its right, V_i the one on its left; P, R and Q mirror that. The order of an edge is
the width of the state that crosses it. Generators are stacked over the m blocks, padded by zeros to the largest order
and to full blocks, so that a product is a few batched steps:

    right to left   h_{i−1} = V_iᵀ x_i + W_i h_i         left to right   g_{i+1} = Q_iᵀ x_i + R_i g_i
    y_i = D_i x_i + U_i h_i + P_i g_i                    2N(p + 4r + 2r²/p) operations a column

Both recurrences compose associatively, and are scanned in 2 log₂ m steps of twice the work.

References:
    Chandrasekaran et al. (2005), Some fast algorithms for sequentially semiseparable representations
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from engine.errors import WrongShape
from engine.semiseparable.elimination import Elimination
from engine.semiseparable.semiseparable_matrix import (
    MatrixRefused,
    SemiseparableMatrix,
    SingularMatrix,
    as_columns,
    read_shift,
)

_NAMES = ("D", "U", "W", "V", "P", "R", "Q")
Orders = tuple[tuple[int, ...], tuple[int, ...]]
"""Order of each of the m − 1 edges, from the left: of the upper triangle, and of the lower."""


class BlockSSS(SemiseparableMatrix):
    """A matrix by generators."""

    kind = "block_sss"

    def __init__(  # noqa: PLR0913 - seven generators are what it is
        self,
        size: int,
        *,
        D: Tensor,
        U: Tensor,
        W: Tensor,
        V: Tensor,
        P: Tensor,
        R: Tensor,
        Q: Tensor,
        orders: Orders | None = None,
        error_bound: float | None = None,
    ) -> None:
        """Take stacked generators, which are not copied.

        Args:
            size: N; rows beyond it in the last block are zeros.
            D: Shape (m, p, p), m = ⌈N/p⌉.
            U: Shape (m, p, a), a the largest order of the upper triangle.
            W: Shape (m, a, a).
            V: Shape (m, p, a).
            P: Shape (m, p, b), b the largest order of the lower triangle.
            R: Shape (m, b, b).
            Q: Shape (m, p, b).
            orders: Orders of the edges, above and below; None takes a and b for all.
            error_bound: Upper bound of the Frobenius norm of what a construction left out, rounding included; None
                where the generators are the matrix.

        Raises:
            MatrixRefused: If an order is beyond a or b.
            WrongShape: If the shapes contradict each other.
        """
        m, p, a, b = D.shape[0], D.shape[-1], U.shape[-1], P.shape[-1]
        shapes = ((m, p, p), (m, p, a), (m, a, a), (m, p, a), (m, p, b), (m, b, b), (m, p, b))
        for name, tensor, shape in zip(_NAMES, (D, U, W, V, P, R, Q), shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise WrongShape(f"generator `{name}` must have shape {shape} (got {tuple(tensor.shape)})")
        if p == 0 or size < 1 or m != -(-size // p):
            raise WrongShape(f"{size} rows in blocks of {p} are {-(-size // max(p, 1))} blocks (got {m})")
        self.D, self.U, self.W, self.V, self.P, self.R, self.Q = D, U, W, V, P, R, Q
        self._size, self.error_bound = size, error_bound
        self.orders: Orders = ((a,) * (m - 1), (b,) * (m - 1)) if orders is None else orders
        for side, most in zip(self.orders, (a, b), strict=True):
            if len(side) != m - 1 or any(not 0 <= each <= most for each in side):
                raise MatrixRefused(f"{m} blocks have {m - 1} orders from 0 to {most} (got {list(side)[:20]})")

    @classmethod
    def from_blocks(cls, generators: Mapping[str, Sequence[Tensor]], error_bound: float | None = None) -> Self:
        """Make a matrix of the generators of single blocks, of which orders and the last block's rows may differ.

        Args:
            generators: For each of `D`, `U`, `W`, `V`, `P`, `R`, `Q` one tensor a block, as the module's formulas have
                them: `W` of block i of shape (order left of i, order right of i), `R` of shape (right, left), and order
                0 beyond the first and the last block.
            error_bound: As the constructor takes it.

        Raises:
            WrongShape: If two neighbours disagree about the order of the edge between them.
        """
        blocks = generators["D"]
        m, p = len(blocks), blocks[0].shape[0]
        above = [generators["V"][i].shape[1] for i in range(1, m)]
        below = [generators["P"][i].shape[1] for i in range(1, m)]
        for i, (up, down) in enumerate(zip(above, below, strict=True)):
            if generators["U"][i].shape[1] != up or generators["Q"][i].shape[1] != down:
                raise WrongShape(
                    f"blocks {i} and {i + 1} disagree about the edge between them: U has "
                    f"{generators['U'][i].shape[1]} columns and V {up}, Q {generators['Q'][i].shape[1]} and P {down}"
                )
        a, b = max(above, default=0), max(below, default=0)
        shapes = {"D": (p, p), "U": (p, a), "W": (a, a), "V": (p, a), "P": (p, b), "R": (b, b), "Q": (p, b)}
        stacked = {
            name: torch.stack([_padded(each, shape) for each in generators[name]]) for name, shape in shapes.items()
        }
        size = sum(each.shape[0] for each in blocks)
        return cls(size, **stacked, orders=(tuple(above), tuple(below)), error_bound=error_bound)

    @property
    @override
    def size(self) -> int:
        return self._size

    @property
    def block(self) -> int:
        """p, rows of a block."""
        return self.D.shape[-1]

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.D.dtype

    @property
    @override
    def device(self) -> torch.device:
        return self.D.device

    @override
    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(_NAMES, (self.D, self.U, self.W, self.V, self.P, self.R, self.Q), strict=True))

    @override
    def facts(self) -> dict[str, Any]:
        orders = {"upper": list(self.orders[0]), "lower": list(self.orders[1])}
        return {"kind": self.kind, "size": self.size, "orders": orders, "error_bound": self.error_bound}

    @classmethod
    @override
    def read(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Self:
        if missing := set(_NAMES) - tensors.keys():
            raise MatrixRefused(f"a block SSS matrix needs the tensors {', '.join(sorted(missing))}")
        orders = facts.get("orders")
        return cls(
            facts["size"],
            **{name: tensors[name] for name in _NAMES},
            orders=None if orders is None else (tuple(orders["upper"]), tuple(orders["lower"])),
            error_bound=facts.get("error_bound"),
        )

    @override
    def memory_usage(self) -> dict[str, Any]:
        edges = [*self.orders[0], *self.orders[1]]
        total = self.size_bytes
        return {
            "generator_bytes": total,
            "total_bytes": total,
            "memory_reduction_vs_dense": 1 - total / (self.D.element_size() * self.size**2),
            "orders": {"largest": max(edges, default=0), "mean": sum(edges) / len(edges) if edges else 0.0},
            "block": self.block,
        }

    @override
    def matvec(self, x: Tensor) -> Tensor:
        columns = as_columns(self, x)
        m, p = self.D.shape[:2]
        rows = in_blocks(columns, m, p)
        D, U, W, V, P, R, Q = (each.to(columns.dtype) for each in self.tensors().values())
        product = D @ rows
        if U.shape[-1]:
            product = product + U @ _states(W.flip(0), V.mT.flip(0) @ rows.flip(0)).flip(0)
        if P.shape[-1]:
            product = product + P @ _states(R, Q.mT @ rows)
        return product.reshape(m * p, -1)[: self.size].reshape(x.shape)

    @override
    def transposed(self) -> Self:
        # the triangles are exchanged
        above, below = self.orders
        return type(self)(
            self.size,
            D=self.D.mT,
            U=self.Q,
            W=self.R.mT,
            V=self.P,
            P=self.V,
            R=self.W.mT,
            Q=self.U,
            orders=(below, above),
            error_bound=self.error_bound,
        )

    @override
    def shifted(self, z: complex | Tensor) -> Self:
        z, inside = read_shift(z), torch.arange(self.D.shape[0] * self.block, device=self.device) < self.size
        moved = self.D - torch.diag_embed((inside.to(self.dtype) * z).view(-1, self.block))
        named = {name: tensor.to(moved.dtype) for name, tensor in self.tensors().items()} | {"D": moved}
        return type(self)(self.size, **named, orders=self.orders, error_bound=self.error_bound)

    @override
    def solve(self, right: Tensor, damping: float = 0.0) -> Tensor:
        if shift := read_shift(damping, "damping"):
            return self.shifted(-shift).solve(right)
        columns = as_columns(self, right)
        m, p = self.D.shape[:2]
        elimination = self._elimination(columns.dtype)
        solution = elimination.solve(in_blocks(columns, m, p)).reshape(m * p, -1)[: self.size]
        # one step of refinement: generators that grow along the blocks cost digits
        missing = in_blocks(columns - self.matvec(solution), m, p)
        solution = solution + elimination.solve(missing).reshape(m * p, -1)[: self.size]
        return solution.reshape(right.shape)

    @override
    def slogdet(self) -> tuple[Tensor, Tensor]:
        try:
            return self._elimination(self.dtype).slogdet()
        except SingularMatrix:
            return self.D.new_zeros(()), torch.full((), -torch.inf, device=self.device, dtype=self.D.real.dtype)

    @override
    def inverse_diagonal(self) -> Tensor:
        return self._elimination(self.dtype).inverse_diagonal().reshape(-1)[: self.size]

    def _elimination(self, dtype: torch.dtype) -> Elimination:
        # rows beyond N are those of the identity
        beyond = torch.arange(self.D.shape[0] * self.block, device=self.device) >= self.size
        return Elimination([each.to(dtype) for each in self.tensors().values()], beyond.view(-1, self.block))


def in_blocks(rows: Tensor, m: int, p: int) -> Tensor:
    """Return (N, r) as (m, p, r), with rows of zeros at the end."""
    return torch.cat([rows, rows.new_zeros(m * p - rows.shape[0], rows.shape[1])]).view(m, p, -1)


def _states(transfers: Tensor, inputs: Tensor) -> Tensor:
    """States s_i that enter each block: s_0 = 0, s_{i+1} = transfers_i s_i + inputs_i.

    Args:
        transfers: Shape (m, r, r).
        inputs: Shape (m, r, k).

    Returns:
        Shape (m, r, k).
    """
    m = inputs.shape[0]
    if m == 1:
        return torch.zeros_like(inputs)
    # neighbours make a pair, whose states are those of half as many blocks; a last one is alone
    even = m - m % 2
    first, second = transfers[0:even:2], transfers[1:even:2]
    before, after = inputs[0:even:2], inputs[1:even:2]
    paired_transfers, paired_inputs = second @ first, second @ before + after
    if m % 2:
        paired_transfers = torch.cat([paired_transfers, transfers[-1:]])
        paired_inputs = torch.cat([paired_inputs, inputs[-1:]])
    entering = _states(paired_transfers, paired_inputs)
    between = first @ entering[: even // 2] + before
    states = torch.stack([entering[: even // 2], between], 1).reshape(even, *inputs.shape[1:])
    return torch.cat([states, entering[-1:]]) if m % 2 else states


def _padded(tensor: Tensor, shape: tuple[int, int]) -> Tensor:
    rows, columns = shape[0] - tensor.shape[0], shape[1] - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (0, columns, 0, rows))
