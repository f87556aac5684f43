"""Partitions of a semiseparable matrix T + U Vᵀ over ranks.

    by columns   rank w keeps some columns of U and V, and all of T; a product adds N numbers over the ranks
    by rows      rank w keeps rows of T, U and V; a product adds r numbers, and takes one number from each neighbour

Every column and row belongs to exactly one of the ranks 0 to W − 1 (``world_size``); where there are more ranks than
columns, some keep none. What is computed on one rank is a plain function of its part, so that one process can play all
ranks. Every rank calls a product, which raises ``RankFailed`` if one has failed.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.distributed.group import Ranks
from engine.distributed.transfers import Label, exchange, run_together, sum_numbers
from engine.semiseparable.semiseparable_matrix import read_whole
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank, memory_report

_LABEL = Label("matrix", "structured product")


def shares(count: int, world_size: int) -> list[tuple[int, int]]:
    """Return begin and end of one run of ``count`` rows or columns for each rank, the longer ones first.

    Runs are empty where there are more ranks than rows. ``MatrixRefused`` if ``world_size`` is below 1.
    """
    each, more = divmod(count, read_whole(world_size, "world_size", 1))
    marks = [rank * each + min(rank, more) for rank in range(world_size + 1)]
    return list(itertools.pairwise(marks))


@dataclass(frozen=True, kw_only=True)
class RowShare:
    """The rows of one rank."""

    start: int
    diagonal: Tensor
    """(k,)."""
    lower: Tensor
    """(k,), entries left of the diagonal, that of row 0 being 0."""
    upper: Tensor
    """(k,), entries right of the diagonal, that of row N − 1 being 0."""
    U: Tensor
    """(k, r)."""
    V: Tensor
    """(k, r)."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(each.nbytes for each in (self.diagonal, self.lower, self.upper, self.U, self.V))

    def coupling(self, x: Tensor) -> Tensor:
        """Return this rank's summand of Vᵀ x, shape (r, columns), of its rows of x, (k, columns)."""
        return self.V.to(x.dtype).mT @ x

    def product(self, x: Tensor, before: Tensor, after: Tensor, coupled: Tensor) -> Tensor:
        """Return its rows of A x.

        Args:
            x: Its rows, (k, columns).
            before: The row before them, (1, columns); zeros where there is none.
            after: The row after them.
            coupled: The sum over ranks of ``coupling``, (r, columns).

        Returns:
            Shape (k, columns).
        """
        padded = torch.cat([before, x, after])
        diagonal, lower, upper = (each.to(x.dtype)[:, None] for each in (self.diagonal, self.lower, self.upper))
        return lower * padded[:-2] + diagonal * x + upper * padded[2:] + self.U.to(x.dtype) @ coupled


def share_rows(matrix: TridiagonalLowRank, rank: int, world_size: int) -> RowShare:
    """Return the rows of one rank of the whole matrix, whose columns in 16 bits are widened."""
    start, stop = shares(matrix.size, world_size)[rank]
    zero = matrix.diagonal.new_zeros(1)
    U, V = (matrix.U, matrix.V) if matrix.exponents is None else matrix.columns()
    return RowShare(
        start=start,
        diagonal=matrix.diagonal[start:stop].clone(),
        lower=torch.cat([zero, matrix.lower])[start:stop].clone(),
        upper=torch.cat([matrix.upper, zero])[start:stop].clone(),
        U=U[start:stop].clone(),
        V=V[start:stop].clone(),
    )


def share_columns(matrix: TridiagonalLowRank, rank: int, world_size: int) -> TridiagonalLowRank:
    """Return one rank's summand of the whole matrix: its columns of U and V, and T on rank 0 alone."""
    start, stop = shares(matrix.rank, world_size)[rank]
    own = {"U": matrix.U[:, start:stop], "V": matrix.V[:, start:stop]}
    own |= {} if matrix.exponents is None else {"exponents": matrix.exponents[:, start:stop]}
    if rank != 0:
        own |= {name: torch.zeros_like(matrix.tensors()[name]) for name in ("diagonal", "lower", "upper")}
    return TridiagonalLowRank.read(matrix.tensors() | own, {})


def multiply_rows(share: RowShare, x: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's rows of A x, from its rows of x, (k,) or (k, columns), and in that shape."""
    columns = x if x.ndim == 2 else x[:, None]
    width = columns.shape[1]
    own = share.coupling(columns).reshape(-1).contiguous()
    coupled = run_together([sum_numbers(ranks, own, _LABEL)])[0]
    first, last = columns[:1].reshape(-1).contiguous(), columns[-1:].reshape(-1).contiguous()
    lengths = ranks.gather(columns.shape[0], _LABEL.operation)
    left, right = _neighbour(lengths, ranks.rank, -1), _neighbour(lengths, ranks.rank, 1)
    send = [first if place == left else last if place == right else first[:0] for place in range(ranks.size)]
    counts = [width if place in (left, right) else 0 for place in range(ranks.size)]
    arrived = exchange(ranks, send, counts, _LABEL).wait()
    zero = columns.new_zeros(1, width)
    before, after = (zero if place is None else arrived[place].view(1, width) for place in (left, right))
    return share.product(columns, before, after, coupled.view(-1, width)).reshape(x.shape)


def multiply_columns(share: TridiagonalLowRank, x: Tensor, ranks: Ranks) -> Tensor:
    """Return A x on every rank, the sum of what each one's ``share`` gives of the whole x, (N,) or (N, columns)."""
    own = share.matvec(x).reshape(-1).contiguous()
    return run_together([sum_numbers(ranks, own, _LABEL)])[0].reshape(x.shape)


def _neighbour(lengths: Sequence[int], rank: int, step: int) -> int | None:
    """The nearest rank with rows in a direction; None beyond the last, and for a rank without rows."""
    if not lengths[rank]:
        return None
    place = rank + step
    while 0 <= place < len(lengths) and not lengths[place]:
        place += step
    return place if 0 <= place < len(lengths) else None


def scaling(size: int, rank: int, world_size: int, item: int = 4) -> dict[str, Any]:
    """Return what ranks save, by columns and by rows.

    Args:
        size: N.
        rank: r; 0 is the tridiagonal matrix alone.
        world_size: W.
        item: Bytes of a number.

    Returns:
        `scaling_factor`, `memory_per_gpu_no_zero_mb` and `memory_per_gpu_with_zero_mb` by columns, of the rank with the
        largest share; `by_rows` the same by rows; and the bytes that a rank sends for a product with one column.

    Raises:
        MatrixRefused: If N or W is below 1, or r below 0.
    """
    size, rank = read_whole(size, "size", 1), read_whole(rank, "rank", 0)
    world_size = read_whole(world_size, "world_size", 1)
    whole = memory_report(size, [rank], item * (3 * size - 2), 2 * item * size * rank)["total_bytes"]
    columns = -(-rank // world_size)
    by_columns = item * (3 * size - 2 + 2 * size * columns)
    rows = -(-size // world_size)
    by_rows = item * rows * (3 + 2 * rank)
    share = (world_size - 1) / world_size

    def report(part: int, sent: float) -> dict[str, Any]:
        return {
            "memory_per_gpu_no_zero_mb": whole / 2**20,
            "memory_per_gpu_with_zero_mb": part / 2**20,
            "scaling_factor": whole / part,
            "sent_bytes_per_product": sent,
        }

    halo = 2 * item if world_size > 1 else 0
    return report(by_columns, 2 * share * item * size) | {"by_rows": report(by_rows, 2 * share * item * rank + halo)}
