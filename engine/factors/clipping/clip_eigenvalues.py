"""Clip a factor's spectrum at a condition number, without rebuilding the matrix.

For ``M = Q Λ Qᵀ`` (n, n) and a floor ``f = λ_max / κ_max`` the stabilised factor is
``Q max(Λ, f) Qᵀ``. It differs from M in its k clipped directions alone and from ``f·I`` in the n − k
others, so it is reached by an update of rank k or n − k:

- ``clipped``: ``M + Q_c (f − Λ_c) Q_cᵀ``. What is added is no larger than f, so float32 products of a basis
  from float64 lose nothing of the floor; but whatever M is beside ``Q Λ Qᵀ`` stays in it.
- ``unclipped``: ``f·I + Q_u (Λ_u − f) Q_uᵀ``. What is added is as large as λ_max: rounded to float32 as it
  is summed, a flat spectrum loses a fifth of a floor at 1e-6, so it is summed in float64 and rounded once.

One triangle is computed, in tiles, and mirrored: the result is symmetric to the last bit.

References:
    Higham (1988), Computing a nearest symmetric positive semidefinite matrix
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.errors import NonFiniteFactor
from engine.factors.kronecker_factors import mirrored_
from engine.linalg.damping import clipping_floor
from engine.linalg.panels import Arrivals, wide_product
from engine.memory.host_accumulation import Staging

Placement = Literal["device", "panels", "host"]
PLACEMENTS: tuple[Placement, ...] = ("device", "panels", "host")
"""The fastest first."""
Update = Literal["none", "clipped", "unclipped", "diagonal"]

SCRATCH_BYTES = 48 * 2**20
"""Bytes that the tiles of an update may take beside the factor and its basis."""
_FLOAT64_COST = 2
"""A float64 product takes about as long as so many in float32 on a CPU and on a data centre's GPU; on others more,
but there the float64 eigendecomposition before it takes longer still."""
_TRUST = 0.01
"""Share of the floor that M may differ from ``Q Λ Qᵀ`` by in the clipped directions."""
_PROBES = 4
_SAMPLED = 64
_NARROWEST = 64
_TALLEST = 2048
"""Bytes of a column of a tile: enough rows for a product to be efficient with."""
_DIAGONAL_ROWS = 128
"""Rows at once of a block on the diagonal: half of each such square is computed in vain."""


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """The result of a stabilisation."""

    size: int
    clipped: int
    """k: eigenvalues below the floor."""
    update: Update
    floor: float
    """λ_max / κ_max; 0 where the factor is zero."""
    largest: float
    """λ_max."""
    mass: float
    """Trace added: Σ (f − λ) over what was clipped."""
    precision: str
    """Precision that the update was summed in."""
    placement: Placement


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """One update: of which columns, with which weights, onto what."""

    update: Update
    columns: Tensor
    """(n, r), a view of Q."""
    weights: Tensor
    """(r,) float64 on the host."""
    floor: float | None
    """Value that the diagonal starts from; None adds to the factor as it is."""
    dtype: torch.dtype


def stabilise_(
    factor: Tensor,
    values: Tensor,
    vectors: Tensor | None,
    kappa_max: float,
    *,
    placement: Placement = "device",
    device: torch.device | None = None,
) -> Clipped:
    """Raise the eigenvalues of ``factor`` below ``λ_max / kappa_max`` to that floor.

    The result is where ``factor`` is, in its dtype; what has 16 bits is widened tile by tile, after it
    has travelled, and rounded once. After an error the contents of ``factor`` are undefined.

    Args:
        factor: Matrix (n, n), symmetric positive semidefinite, or the diagonal (n,) of one; overwritten.
        values: Its eigenvalues, shape (n,), float64, ascending.
        vectors: Its eigenvectors, one a column, shape (n, n), or (n, r) of the r largest values; from float64, though
            they may be kept in float32. None for a diagonal.
        kappa_max: Condition number to clip at.
        placement: ``device`` brings factor and basis there; ``panels`` leaves both on the host, and tiles visit the
            device; ``host`` computes on the host alone, all of it in float64.
        device: Device of ``device`` and ``panels``; None is where the factor is.

    Returns:
        How many eigenvalues were raised, by which update, and the trace that this added.

    Memory:
        ``SCRATCH_BYTES`` where it computes (and as much pinned on the host for ``panels``); on a device that holds
        neither yet, ``device`` takes the factor and the columns of the update besides.

    Raises:
        NonFiniteFactor: If factor or basis hold NaN or Inf.
    """
    size, largest = factor.shape[0], float(values[-1])
    if not bool(torch.isfinite(values).all()):
        raise NonFiniteFactor("the factor's eigenvalues hold NaN or Inf")
    floor = clipping_floor(largest, kappa_max)
    clipped = int((values < floor).sum())
    plan = None if clipped == 0 or vectors is None else _planned(factor, values, vectors, floor, clipped, placement)
    if plan is not None:
        _carry_out_(factor, plan, placement, device or factor.device)
    elif clipped:
        factor.copy_(factor.to(torch.float64).clamp_min_(floor))
    # what was not finite in what entered is in the result
    if not _finite(factor):
        raise NonFiniteFactor("the factor or its eigenbasis holds NaN or Inf")
    return Clipped(
        size=size,
        clipped=clipped,
        update=plan.update if plan is not None else "diagonal" if vectors is None else "none",
        floor=floor,
        largest=largest,
        mass=float((floor - values[:clipped]).sum()),
        precision=str(factor.dtype if plan is None else plan.dtype).removeprefix("torch."),
        placement=placement,
    )


def update_rank(size: int, clipped: int, dtype: torch.dtype) -> int:
    """Return the number of columns of the cheaper update, for a factor that agrees with its basis."""
    cost = 1 if dtype == torch.float64 else _FLOAT64_COST
    return clipped if clipped <= cost * (size - clipped) else size - clipped


def placement_bytes(
    size: int, clipped: int | None, dtype: torch.dtype, placement: Placement, device: torch.device
) -> tuple[int, int]:
    """Return the bytes of an update beside the factor and its basis, both of which are on the host.

    Args:
        size: n, rows of the factor.
        clipped: k, eigenvalues below the floor; None is the most expensive number.
        dtype: Precision of the factor.
        placement: Place of factor and basis during the update.
        device: Where the job computes.

    Returns:
        Bytes on the device and on the host, for a factor that agrees with its basis.
    """
    if clipped is None:
        cost = 1 if dtype == torch.float64 else _FLOAT64_COST
        turn = cost * size // (1 + cost)
        worst = [placement_bytes(size, each, dtype, placement, device) for each in (turn, min(turn + 1, size))]
        return max(each[0] for each in worst), max(each[1] for each in worst)
    rank = update_rank(size, clipped, dtype)
    below = rank == clipped
    wide = dtype if below and dtype.itemsize > 2 else torch.float32 if below else torch.float64
    wide = torch.float64 if placement == "host" else wide
    if rank == 0:
        return 0, 0
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    cuda = device.type == "cuda"
    if placement == "panels":
        width = _panel_width(size, rank, wide.itemsize)
        panels, tiles = 2 * width * rank * wide.itemsize, 2 * width * width * wide.itemsize
        # both kinds have a twin on the host, and one more panel stays on the device
        there = panels + panels // 2 + tiles
        return (there, panels + tiles) if cuda else (0, there + panels + tiles)
    height, width = tile_extent(size, rank, wide)
    travels = cuda and placement == "device"
    converted = kept != wide and not travels
    left = height * rank * wide.itemsize
    made = [0, 0]
    if not (below and dtype == wide):
        # beside the largest tile the one before it: of a block on the diagonal, or another as large
        alone = width >= size
        made = [height * (max(size - height, _DIAGONAL_ROWS) if alone else width) * wide.itemsize]
        made += [min(height, _DIAGONAL_ROWS) * height * wide.itemsize] if alone else made
    # what a tile was made of is there until the next is
    tiles = max(left * (3 if converted else 2) + made[0], left + sum(made))
    tiles += width * rank * wide.itemsize if converted else 0
    if not travels:
        return 0, tiles
    # on its way the basis is widened on the host
    leaving = size * rank * wide.itemsize
    return size * size * dtype.itemsize + leaving + tiles, leaving if kept != wide else 0


def tile_extent(size: int, rank: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the rows and columns of a tile: a few hundred rows, and as many columns as fit.

    Two panels of the basis for the rows, one for the columns, and the tile itself in float64 keep to
    ``SCRATCH_BYTES``, unless 64 rows of the basis are more than that already.
    """
    item = torch.empty((), dtype=dtype).element_size()
    rows = min(size, max(_NARROWEST, min(_TALLEST // item, SCRATCH_BYTES // (8 * item * max(rank, 1)))))
    left = SCRATCH_BYTES - 2 * rows * rank * item
    return rows, min(size, max(rows, left // (rank * item + 8 * rows)))


def _planned(
    factor: Tensor, values: Tensor, vectors: Tensor, floor: float, clipped: int, placement: Placement
) -> _Plan:
    """The cheaper update, unless it would leave in M what does not belong there."""
    size, kept = factor.shape[0], factor.shape[0] - clipped
    wide = torch.float64 if factor.dtype == torch.float64 or placement == "host" else torch.float32
    whole = vectors.shape[1] == size
    if whole and update_rank(size, clipped, factor.dtype) == clipped:
        columns, below = vectors[:, :clipped], values[:clipped]
        if factor.dtype == torch.float64 or _stray(factor, columns, below) <= _TRUST * floor:
            return _Plan(update="clipped", columns=columns, weights=floor - below, floor=None, dtype=wide)
    # this update writes over what it is given
    if not _finite(factor):
        raise NonFiniteFactor("the factor holds NaN or Inf")
    return _Plan(
        update="unclipped",
        columns=vectors[:, vectors.shape[1] - kept :],
        weights=values[clipped:] - floor,
        floor=floor,
        dtype=torch.float64,
    )


def _finite(matrix: Tensor) -> bool:
    """Whether no number is NaN or infinite, without a copy: any such number stays in a sum."""
    if matrix.element_size() > 2 and math.isfinite(float(matrix.sum())):
        return True
    return all(bool(torch.isfinite(rows).all()) for rows in torch.split(matrix, 256))


def _stray(factor: Tensor, columns: Tensor, values: Tensor) -> float:
    """About ``‖M Q_c − Q_c Λ_c‖``, from what some rows of M make of some of the clipped directions.

    Rounding spreads evenly, and the norm of such a matrix is twice the root mean square of what it does
    to a unit vector.
    """
    rows, some = -(-factor.shape[0] // _SAMPLED), -(-columns.shape[1] // _SAMPLED)
    generator = torch.Generator().manual_seed(0)
    chosen, values = columns[:, ::some].to(torch.float64), values[::some].to(columns.device)
    draws = torch.randn(values.numel(), _PROBES, generator=generator, dtype=torch.float64).to(columns.device)
    inside, expected = chosen @ draws, chosen[::rows] @ (draws * values[:, None])
    found = wide_product(factor[::rows], inside.to(factor.device))
    stray = 2 * float((found - expected.to(factor.device)).norm() / inside[::rows].norm())
    if not math.isfinite(stray):
        raise NonFiniteFactor("the factor or its eigenbasis holds NaN or Inf")
    return stray


def _carry_out_(factor: Tensor, plan: _Plan, placement: Placement, device: torch.device) -> None:
    """Update the upper triangle where ``placement`` says, mirror it, and bring it back."""
    there = device if placement == "device" else torch.device("cpu")
    matrix = factor.to(there)
    if placement == "panels":
        _in_panels_(matrix, plan, device)
    else:
        # on its way to another device the basis takes the width that it is used in
        columns = plan.columns if plan.columns.device == there else plan.columns.to(there, plan.dtype)
        _in_tiles_(matrix, columns, plan)
    mirrored_(matrix)
    if matrix is not factor:
        factor.copy_(matrix)


def _in_tiles_(matrix: Tensor, columns: Tensor, plan: _Plan) -> None:
    size = matrix.shape[0]
    height, width = tile_extent(size, columns.shape[1], plan.dtype)
    weights = plan.weights.to(matrix.device, plan.dtype)
    for first in range(0, size, width):
        last = min(first + width, size)
        right = columns[first:last].to(plan.dtype)
        for start in range(0, last, height):
            stop = min(start + height, size)
            left = columns[start:stop].to(plan.dtype) * weights
            for row, until, begin, end in _upper(start, stop, first, last):
                tile, place = matrix[row:until, begin:end], slice(begin - first, end - first)
                if plan.floor is None and matrix.dtype == plan.dtype:
                    tile.addmm_(left[row - start : until - start], right[place].mT)
                    continue
                made = left[row - start : until - start] @ right[place].mT
                if plan.floor is None:
                    made += tile
                elif begin < until:
                    made.diagonal(row - begin).add_(plan.floor)
                tile.copy_(made)
        # before the next is made, not after
        del right


def _upper(start: int, stop: int, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the tiles of rows ``start … stop`` and columns ``first … last`` above the diagonal, as rows and columns."""
    if first < stop:
        for row in range(start, stop, _DIAGONAL_ROWS):
            until, begin, end = min(row + _DIAGONAL_ROWS, stop), max(row, first), min(stop, last)
            if begin < end:
                yield row, until, begin, end
    if stop < last:
        yield start, stop, max(stop, first), last


def _panel_width(size: int, rank: int, item: int) -> int:
    """Rows of a panel: two under way, one that stays, two tiles are on the device, and nearly as much on the host."""
    return min(size, max(_NARROWEST, min(1024, -(-size // 8), SCRATCH_BYTES // (5 * item * max(rank, 1024)))))


def _in_panels_(matrix: Tensor, plan: _Plan, device: torch.device) -> None:
    """The same with everything on the host: the columns of one row of tiles stay there, the others visit it in turn."""
    size, rank = plan.columns.shape
    item = torch.empty((), dtype=plan.dtype).element_size()
    width = _panel_width(size, rank, item)
    staging = Staging(width * width, plan.dtype, device)
    arrivals = Arrivals(width, rank, plan.dtype, device)
    weights = plan.weights.to(device, plan.dtype)
    left = torch.empty(width, rank, dtype=plan.dtype, device=device)
    places = [(start, other) for start in range(0, size, width) for other in range(start, size, width)]
    arrivals.send(plan.columns[:width])
    for (start, other), following in zip(places, [*places[1:], None], strict=True):
        right = arrivals.take()
        if following is not None:
            arrivals.send(plan.columns[following[1] : following[1] + width])
        if other == start:
            torch.mul(right, weights, out=left[: right.shape[0]])
        rows = left[: min(width, size - start)]
        tile = matrix[start : start + width, other : other + width]
        if plan.floor is not None:
            tile.zero_()
        staging.add_(tile, _Product(rows, right, plan.floor if other == start else None))
    staging.settle()


@dataclass(frozen=True)
class _Product:
    """``left rightᵀ``, with the floor on its diagonal where it is a diagonal tile."""

    left: Tensor
    right: Tensor
    floor: float | None

    def __call__(self, made: Tensor) -> None:
        torch.mm(self.left, self.right.mT, out=made)
        if self.floor is not None:
            made.diagonal().add_(self.floor)
