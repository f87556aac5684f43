"""A tridiagonal matrix plus one of low rank, A = T + U Vᵀ.

    T        diagonal (N,), lower and upper (N − 1,)         3N − 2 numbers
    U, V     (N, r)                                          2 N r numbers
    A x      T x + U (Vᵀ x)                                  5N + 4rN operations a column

Levels of a hierarchical matrix, Σ_k U_k V_kᵀ, are columns of one U and one V. Columns that are held in 16 bits have a
power of two each, since a bare float16 loses what is below 6e-8 and above 65504. Solves, determinants and the inverse's
diagonal go through the equal block SSS matrix of order r + 1, whose elimination needs neither T nor a leading block to
be invertible; the formula of Woodbury would lose what T loses. Rows and columns are brought near one before, by powers
of two, so that a pivot of rounding is one at any scale, and of rows of any sizes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from engine.errors import WrongShape
from engine.semiseparable.block_sss import BlockSSS, in_blocks
from engine.semiseparable.semiseparable_matrix import (
    MatrixRefused,
    SemiseparableMatrix,
    as_columns,
    read_shift,
    read_whole,
)

_BLOCK = 32
_NARROW = (torch.float16, torch.bfloat16)
_MOST_EXPONENT = 14
"""Largest power of two that a column in float16 is scaled to: a quarter of the largest number of the type."""


class TridiagonalLowRank(SemiseparableMatrix):
    """T + U Vᵀ."""

    kind = "tridiagonal_lowrank"

    def __init__(
        self,
        diagonal: Tensor,
        lower: Tensor,
        upper: Tensor,
        U: Tensor,
        V: Tensor,
        *,
        ranks: Sequence[int] | None = None,
        exponents: Tensor | None = None,
    ) -> None:
        """Take the tensors, which are not copied.

        Args:
            diagonal: Shape (N,), float or complex; its precision is that of the arithmetic.
            lower: Entries (i + 1, i) of T, shape (N − 1,).
            upper: Entries (i, i + 1) of T, shape (N − 1,).
            U: Shape (N, r), any float dtype; r may be 0.
            V: Shape (N, r).
            ranks: Rank of each level, which add up to r; None for one level.
            exponents: Powers of two by which the columns of U (first row) and V (second) are multiplied, shape (2, r),
                int16; None multiplies by none.

        Raises:
            MatrixRefused: If the ranks do not add up to r.
            WrongShape: If the shapes contradict each other.
        """
        n, r = diagonal.numel(), U.shape[-1]
        shapes = {"lower": (lower, (max(n - 1, 0),)), "upper": (upper, (max(n - 1, 0),)), "U": (U, (n, r))}
        shapes |= {"V": (V, (n, r)), "diagonal": (diagonal, (n,))}
        shapes |= {} if exponents is None else {"exponents": (exponents, (2, r))}
        for name, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != shape:
                raise WrongShape(f"`{name}` must have shape {shape} (got {tuple(tensor.shape)})")
        self.diagonal, self.lower, self.upper, self.U, self.V = diagonal, lower, upper, U, V
        self.ranks = (r,) if ranks is None else tuple(read_whole(each, "ranks", 0) for each in ranks)
        self.exponents = exponents
        if sum(self.ranks) != r:
            raise MatrixRefused(f"`ranks` must add up to the {r} columns of U (got {list(self.ranks)})")

    @property
    @override
    def size(self) -> int:
        return self.diagonal.numel()

    @property
    def rank(self) -> int:
        """r, columns of U and V."""
        return self.U.shape[1]

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.diagonal.dtype

    @property
    @override
    def device(self) -> torch.device:
        return self.diagonal.device

    @override
    def tensors(self) -> dict[str, Tensor]:
        named = {"diagonal": self.diagonal, "lower": self.lower, "upper": self.upper, "U": self.U, "V": self.V}
        return named | ({} if self.exponents is None else {"exponents": self.exponents})

    @override
    def facts(self) -> dict[str, Any]:
        return {"kind": self.kind, "size": self.size, "ranks": list(self.ranks)}

    @classmethod
    @override
    def read(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Self:
        names = {"diagonal", "lower", "upper", "U", "V"}
        if missing := names - tensors.keys():
            raise MatrixRefused(f"a matrix T + U Vᵀ needs the tensors {', '.join(sorted(missing))}")
        diagonal, lower, upper, U, V = (tensors[name] for name in ("diagonal", "lower", "upper", "U", "V"))
        exponents = tensors.get("exponents")
        return cls(diagonal, lower, upper, U, V, ranks=facts.get("ranks"), exponents=exponents)

    @override
    def _convert(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        # columns of 16 bits stay: their precision is not that of the arithmetic
        kept = dtype is None or name == "exponents" or tensor.dtype in _NARROW
        return tensor if kept else tensor.to(dtype)

    @override
    def memory_usage(self) -> dict[str, Any]:
        """Return bytes by part, and what is saved against a dense float32 matrix and against this one in float32.

        The exponents of columns in 16 bits stand apart, outside of the total, as `exponent_bytes`.
        """
        tridiagonal = self.diagonal.nbytes + self.lower.nbytes + self.upper.nbytes
        report = memory_report(self.size, self.ranks, tridiagonal, self.U.nbytes + self.V.nbytes)
        return report | ({} if self.exponents is None else {"exponent_bytes": self.exponents.nbytes})

    def columns(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return U and V as they enter the arithmetic, each (N, r).

        Args:
            dtype: Their precision; None is that of the arithmetic.
        """
        wide = self.dtype if dtype is None else dtype
        if self.exponents is None:
            return self.U.to(wide), self.V.to(wide)
        scales = torch.ldexp(torch.ones_like(self.exponents, dtype=torch.float64), self.exponents).to(wide)
        return self.U.to(wide) * scales[0], self.V.to(wide) * scales[1]

    def rounded(self, lowrank: torch.dtype, tridiagonal: torch.dtype = torch.float32) -> Self:
        """Return the matrix with U and V in 16 bits, and T in float32.

        Args:
            lowrank: ``torch.float16``, in which each column gets a power of two, or ``torch.bfloat16``.
            tridiagonal: Precision of T, and of the arithmetic.

        Raises:
            MatrixRefused: If ``lowrank`` is another type, or the matrix is complex.
        """
        if self.dtype.is_complex:
            raise MatrixRefused(f"a matrix in 16 bits must be real (got {self.dtype}); leave it as it is")
        if lowrank not in _NARROW:
            raise MatrixRefused(f"`lowrank_dtype` must be torch.float16 or torch.bfloat16 (got {lowrank})")
        diagonal, lower, upper = (each.to(tridiagonal) for each in (self.diagonal, self.lower, self.upper))
        U, V = self.columns()
        exponents = None
        if lowrank == torch.float16:
            exponents = torch.stack([_exponents(U), _exponents(V)])
            inverse = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64, device=self.device), -exponents)
            U, V = U.to(torch.float64) * inverse[0], V.to(torch.float64) * inverse[1]
        U, V = U.to(lowrank), V.to(lowrank)
        return type(self)(diagonal, lower, upper, U, V, ranks=self.ranks, exponents=exponents)

    @override
    def matvec(self, x: Tensor) -> Tensor:
        columns = as_columns(self, x)
        U, V = self.columns(columns.dtype)
        diagonal, lower, upper = (each.to(columns.dtype)[:, None] for each in (self.diagonal, self.lower, self.upper))
        product = diagonal * columns
        # in place: a product with many columns is as fast as memory is
        product[1:].addcmul_(lower, columns[:-1])
        product[:-1].addcmul_(upper, columns[1:])
        return (product + U @ (V.mT @ columns)).reshape(x.shape)

    @override
    def transposed(self) -> Self:
        exponents = None if self.exponents is None else self.exponents.flip(0)
        return type(self)(self.diagonal, self.upper, self.lower, self.V, self.U, ranks=self.ranks, exponents=exponents)

    @override
    def shifted(self, z: complex | Tensor) -> Self:
        diagonal = self.diagonal - read_shift(z)
        lower, upper = (each.to(diagonal.dtype) for each in (self.lower, self.upper))
        return type(self)(diagonal, lower, upper, self.U, self.V, ranks=self.ranks, exponents=self.exponents)

    @override
    def solve(self, right: Tensor, damping: float = 0.0) -> Tensor:
        if shift := read_shift(damping, "damping"):
            return self.shifted(-shift).solve(right)
        scaled, rows, columns = self._equilibrated()
        side = as_columns(self, right)
        return (scaled.as_sss().solve(side * rows[:, None]) * columns[:, None]).reshape(right.shape)

    @override
    def slogdet(self) -> tuple[Tensor, Tensor]:
        scaled, rows, columns = self._equilibrated()
        sign, logarithm = scaled.as_sss().slogdet()
        moved = (rows.to(torch.float64).log() + columns.to(torch.float64).log()).sum()
        return sign, (logarithm - moved).to(logarithm.dtype)

    @override
    def inverse_diagonal(self) -> Tensor:
        scaled, rows, columns = self._equilibrated()
        return scaled.as_sss().inverse_diagonal() * rows * columns

    def _equilibrated(self) -> tuple[Self, Tensor, Tensor]:
        """R A C with rows and columns near one, and the diagonals of R and C, powers of two (N,)."""
        U, V, _ = self._balanced()
        d, lower, upper, u, v = (each.detach().abs() for each in (self.diagonal, self.lower, self.upper, U, V))
        rows = _row_powers(d, lower, upper, u, v)
        columns = _row_powers(d * rows, upper * rows[:-1], lower * rows[1:], v, u * rows[:, None])
        band = (
            self.diagonal * rows * columns,
            self.lower * rows[1:] * columns[:-1],
            self.upper * rows[:-1] * columns[1:],
        )
        return type(self)(*band, U * rows[:, None], V * columns[:, None]), rows, columns

    def _balanced(self) -> tuple[Tensor, Tensor, float]:
        """U and V with columns of equal size, by powers of two, and the power near the root of the largest entry."""
        U, V = self.columns()
        with torch.no_grad():
            left, right = (each.abs().amax(0).to(torch.float64).log2() for each in (U, V))
            band = torch.cat([self.diagonal, self.lower, self.upper]).abs().to(torch.float64).log2()
            size = float(torch.cat([band, left + right]).max())
            size = round(size / 2) * 2 if math.isfinite(size) else 0
            # beside a column of zeros any size will do but one that the matrix does not have
            left, right = (torch.where(a > -math.inf, a, size - b) for a, b in ((left, right), (right, left)))
            half = torch.nan_to_num((right - left) / 2, 0.0, 0.0, 0.0).round()
        return U * torch.exp2(half).to(U.dtype), V * torch.exp2(-half).to(V.dtype), 2.0 ** (size // 2)

    def as_sss(self, block: int | None = None) -> BlockSSS:
        """Return the same matrix as block SSS, of order r + 1.

        Args:
            block: Rows of a block; None takes 32, or r + 1 where that is more.

        Raises:
            MatrixRefused: If ``block`` is below 1.

        Memory:
            N (p + 4 (r + 1)) numbers, p the rows of a block.
        """
        n, r = self.size, self.rank
        p = max(_BLOCK, r + 1) if block is None else read_whole(block, "block", 1)
        m = -(-n // p)
        U, V, root = self._balanced()
        U, V = (in_blocks(each, m, p) for each in (U, V))
        # an entry of the band crosses the edge between two blocks: its own state, from a last row to a first one
        upper, lower = (
            torch.cat([each, each.new_zeros(m * p - n + 1)]).view(m, p) for each in (self.upper, self.lower)
        )
        first, last = (torch.eye(p, dtype=self.dtype, device=self.device)[:, place] for place in (0, -1))
        crossing_up, crossing_down = upper[:, -1:] / root, torch.cat([lower.new_zeros(1, 1), lower[:-1, -1:]]) / root
        roots = torch.full_like(crossing_up, root)
        within = torch.cat([torch.ones(r), torch.zeros(1)]).to(self.device, self.dtype).diag().expand(m, -1, -1)
        D = U @ V.mT + torch.diag_embed(torch.cat([self.diagonal, self.diagonal.new_zeros(m * p - n)]).view(m, p))
        if p > 1:
            D = D + torch.diag_embed(upper[:, :-1], 1) + torch.diag_embed(lower[:, :-1], -1)
        orders = (min(r + 1, n),) * (m - 1)
        return BlockSSS(
            n,
            D=D,
            U=torch.cat([U, (crossing_up * last)[:, :, None]], 2),
            W=within,
            V=torch.cat([V, (roots * first)[:, :, None]], 2),
            P=torch.cat([U, (crossing_down * first)[:, :, None]], 2),
            R=within,
            Q=torch.cat([V, (roots * last)[:, :, None]], 2),
            orders=(orders, orders),
        )


def memory_report(size: int, ranks: Sequence[int], tridiagonal_bytes: int, lowrank_bytes: int) -> dict[str, Any]:
    """Return the seven statistics of a matrix T + Σ_k U_k V_kᵀ, k a level.

    Bytes of each part and together; the share that is saved of a dense float32 matrix, and of this structure in
    float32; the ranks.
    """
    total = tridiagonal_bytes + lowrank_bytes
    single = 4 * (3 * size - 2) + 8 * size * sum(ranks)
    return {
        "tridiagonal_bytes": tridiagonal_bytes,
        "lowrank_bytes": lowrank_bytes,
        "total_bytes": total,
        "memory_reduction_vs_dense": 1 - total / (4 * size**2),
        "memory_reduction_vs_fp32": 1 - total / single,
        "total_rank": sum(ranks),
        "ranks_per_level": list(ranks),
    }


def _exponents(columns: Tensor) -> Tensor:
    """Power of two of each column, that of zeros being 0."""
    largest = columns.abs().amax(0).to(torch.float64)
    exact = torch.where(largest > 0, torch.frexp(largest).exponent - _MOST_EXPONENT, 0)
    return exact.to(torch.int16)


def _row_powers(diagonal: Tensor, lower: Tensor, upper: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """Powers of two (N,) that bring the largest entry of each row of T + U Vᵀ, all of them positive, below one."""
    beside = torch.nn.functional.pad(lower, (1, 0)), torch.nn.functional.pad(upper, (0, 1))
    largest = torch.stack([diagonal, *beside, U @ V.amax(0)]).amax(0).to(torch.float64)
    most = math.log2(torch.finfo(diagonal.dtype).max) - 8
    return torch.exp2(-torch.frexp(largest).exponent.to(largest.dtype).clamp(-most, most)).to(diagonal.dtype)


def formula_bytes(
    size: int, ranks: Sequence[int], lowrank: torch.dtype, tridiagonal: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return the report that ``memory_usage`` would give, without a matrix.

    Args:
        size: N.
        ranks: Rank of each level.
        lowrank: Precision of U and V.
        tridiagonal: Precision of T.
    """
    report = memory_report(size, ranks, tridiagonal.itemsize * (3 * size - 2), 2 * lowrank.itemsize * size * sum(ranks))
    return report | ({"exponent_bytes": 4 * sum(ranks)} if lowrank == torch.float16 else {})
