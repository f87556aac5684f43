"""A side comparison: what is computed of two factors X and Y of one layer, for themselves and for products with others.

    spans         C_ij = (u_iᵀ v_j)², of the leading eigenvectors of X and of Y
    difference    X = (1 + p) Y + X⊥ with ⟨X⊥, Y⟩ = 0, p = ⟨X − Y, Y⟩ / ‖Y‖²,  so ‖X − Y‖² = p² ‖Y‖² + ‖X⊥‖²
    pencil        δ: the eigenvalues of (X + λ_X I)⁻¹ (Y + λ_Y I) − I, those of L⁻¹ (Y + λ_Y I − X − λ_X I) L⁻ᵀ

All three start from X − Y, whose entries are exact to rounding: of two factors that are nearly equal, the differences
keep their digits, and of two that are equal they are zero.

References:
    Golub & Van Loan (2013), Matrix Computations, section 6.4.3 (angles between subspaces) and 8.7 (pencils)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import NonFiniteFactor
from engine.factors.dense import Dense
from engine.linalg.eigendecomposition import decompose
from engine.linalg.eigensolvers import LARGEST
from engine.memory.guard import FallbackFailed, Guard
from engine.memory.out_of_memory import ran_out_of_memory
from engine.operators.pairs.matrix_pair import MatrixPair, Symmetric, guarded, pair_of

_ROUNDING = 1e3 * torch.finfo(torch.float64).eps
"""Times n and λ_max: what rounding of the arithmetic may turn, with three digits to spare."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Leading:
    """The spectrum of one factor."""

    values: Tensor
    """(r,) float64, descending, in the pair's unit; the n − r others are zero."""
    rounding: float
    """Gaps up to this are within rounding, of the arithmetic or of the precision that the factor was stored in."""

    def value(self, place: int) -> float:
        """Return one eigenvalue."""
        return float(self.values[place]) if place < self.values.numel() else 0.0


@dataclass(frozen=True, kw_only=True)
class Difference:
    """X − Y by Frobenius norm, in absolute numbers but for p."""

    first: float
    """‖X‖."""
    second: float
    """‖Y‖."""
    along: float
    """p: the part along Y; 0 where Y is zero."""
    across: float
    """‖X⊥‖."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SideComparison:
    """Two factors of one layer."""

    size: int
    traces: tuple[float, float]
    unit: float
    unknown: str | None = None
    """Why nothing but the traces is known."""
    spectra: tuple[Leading, Leading] | None = None
    largest: tuple[float, float] | None = None
    """λ_max of both, in absolute numbers."""
    cosines: Tensor | None = None
    """C (m, m'), float64: squared cosines between leading eigenvectors."""
    no_vectors: str | None = None
    """Why there are none."""
    difference: Difference | None = None
    pencils: tuple[Tensor, Tensor] | None = None
    """δ (n,) of X against Y, and of Y against X."""
    no_pencils: str | None = None
    """Why there are none."""


def compare_sides(
    sides: tuple[Symmetric, Symmetric],
    layer: str,
    *,
    vectors: int,
    damping: tuple[float | None, float | None],
    guard: Guard,
    known: SideComparison | None = None,
) -> SideComparison:
    """Compare two factors of one layer.

    Args:
        sides: X and Y, of as many rows.
        layer: The layer's name, for messages.
        vectors: The number of leading eigenvectors that are compared, at most.
        damping: λ_X and λ_Y, in absolute numbers; None where a set has no curvature to damp.
        guard: Knows what memory is free.
        known: The same two factors, compared under another damping; only the pencils are computed anew.

    Returns:
        Whatever is knowable, with reasons for the rest.

    Raises:
        NonFiniteFactor: If a factor holds NaN or Inf.
        NotConverged: If every eigensolver fails.
        BudgetExceeded: If no way fits into what is free.

    Memory:
        The costs of one eigendecomposition with vectors, or 24 n² bytes, whichever is more; ``vectors`` columns of
        both; nothing of size n² stays.
    """
    pair = pair_of(*sides, layer, guard)
    found = _undamped(pair, layer, vectors, guard) if known is None else known
    if found.spectra is None:
        return found
    made, why = _pencils(pair, damping, found.spectra, layer, guard)
    return replace(found, pencils=made, no_pencils=why)


def _undamped(pair: MatrixPair, layer: str, vectors: int, guard: Guard) -> SideComparison:
    """All but the pencils."""
    found = SideComparison(size=pair.size, traces=pair.traces, unit=pair.unit, unknown=pair.unknown)
    if pair.unknown is not None:
        return found
    found = replace(found, difference=_difference(pair, layer))
    if not pair.is_dense:
        reason = f"of a G of {pair.size} rows that is kept as `{_kind(pair)}`, no eigenvectors and no pencil are made"
        largest = pair.first.side.spectral_norm(), pair.second.side.spectral_norm()
        return replace(found, largest=largest, no_vectors=reason, no_pencils=reason)
    (x, left), (y, right) = (_leading(each, layer, pair, vectors, guard) for each in (pair.first, pair.second))
    cosines = (left[:, None] == right).to(torch.float64) if pair.is_diagonal else (left.mT @ right).square_()
    largest = x.value(0) * pair.unit, y.value(0) * pair.unit
    return replace(found, spectra=(x, y), largest=largest, cosines=cosines)


def _kind(pair: MatrixPair) -> str:
    kinds = [each.side.kind for each in (pair.first, pair.second) if each.side.kind != "dense"]
    return "` and `".join(dict.fromkeys(kinds))


def _leading(side: Symmetric, layer: str, pair: MatrixPair, vectors: int, guard: Guard) -> tuple[Leading, Tensor]:
    """The spectrum, and the leading eigenvectors (r, m), or of a diagonal their places (m,)."""
    matrix = side.side
    assert isinstance(matrix, Dense)  # noqa: S101 - the pair is dense
    found = decompose(
        matrix.stored,
        layer,
        need="vectors",
        rank_bound=side.rank_bound,
        guard=guard,
        what="the eigendecomposition of a factor that is compared",
    )
    values = (found.values * (matrix.scale / pair.unit)).flip(0)
    largest = float(values[0])
    rounding = max(pair.size * _ROUNDING, side.epsilon / math.sqrt(pair.size)) * largest
    spectrum = Leading(values=values, rounding=rounding)
    if found.vectors is None:
        return spectrum, torch.sort(matrix.stored.to(torch.float64), descending=True, stable=True).indices[:vectors]
    kept = found.vectors[:, -min(vectors, values.numel()) :].flip(1)
    return spectrum, kept.to("cpu", torch.float64)


def _difference(pair: MatrixPair, layer: str) -> Difference:
    squares: list[tuple[float, float, float]] = []
    for x, y in pair.panels():
        squares.append((float(x.square().sum()), float(y.square().sum()), float(((x - y) * y).sum())))
    if not all(math.isfinite(each) for panel in squares for each in panel):
        raise NonFiniteFactor(f"layer `{layer}`: a factor that is compared holds NaN or Inf", layer=layer)
    first, second, inner = (math.fsum(each) for each in zip(*squares, strict=True))
    along = inner / second if second > 0 else 0.0
    across = math.fsum(float((x - y).sub_(y, alpha=along).square_().sum()) for x, y in pair.panels())
    return Difference(
        first=math.sqrt(first) * pair.unit,
        second=math.sqrt(second) * pair.unit,
        along=along,
        across=math.sqrt(across) * pair.unit,
    )


def _pencils(
    pair: MatrixPair,
    damping: tuple[float | None, float | None],
    spectra: tuple[Leading, Leading],
    layer: str,
    guard: Guard,
) -> tuple[tuple[Tensor, Tensor] | None, str | None]:
    """δ both ways, or why there are none."""
    added: list[float] = []
    for value, spectrum, which in zip(damping, spectra, ("first set", "set compared with"), strict=True):
        if value is None:
            return None, f"the {which} has no curvature here, so nothing to damp"
        smallest = pair.size * _ROUNDING * spectrum.value(0)
        # A is 1 where G is the exact block, and is not damped
        if value / pair.unit < smallest and not (pair.size == 1 and spectrum.value(0) > 0):
            return None, (
                f"the damping of the {which}, {value:.3g}, is within rounding of its largest eigenvalue, "
                f"{spectrum.value(0) * pair.unit:.3g}: raise `stabilisation.damping`"
            )
        added.append(value / pair.unit)
    if pair.first.side.size > LARGEST:
        return None, f"{pair.first.side.size} rows are beyond LAPACK's 32-bit indices, which reach {LARGEST}"
    made = []
    for base, other in ((0, 1), (1, 0)):
        sides = (pair.first, pair.second)
        inside = _pencil(pair, (sides[base], sides[other]), (added[base], added[other]), layer, guard)
        if inside is None:
            return None, "rounding made a damped matrix indefinite: raise `stabilisation.damping`"
        if pair.outside:
            rest = (added[other] - added[base]) / added[base]
            inside = torch.cat([inside, inside.new_full((pair.outside,), rest)])
        if not float(inside.min()) > -1:
            return None, "the two are so far apart that rounding hides an eigenvalue of their quotient"
        made.append(inside)
    return (made[0], made[1]), None


def _pencil(
    pair: MatrixPair, sides: Sequence[Symmetric], added: Sequence[float], layer: str, guard: Guard
) -> Tensor | None:
    """The eigenvalues of (B + λ_B I)⁻¹ (O + λ_O I) − I of ``sides`` (B, O); None where B + λ_B I is not definite."""
    base, other = sides
    if pair.is_diagonal:
        b, o = (each.side.panel(slice(0, each.side.size), pair.unit) for each in sides)
        return ((o - b) + (added[1] - added[0])) / (b + added[0])

    def work() -> Tensor | None:
        damped = base.dense(pair.unit)
        damped.diagonal().add_(added[0])
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            return None
        del damped
        change = _subtracted(other, base, pair)
        change.diagonal().add_(added[1] - added[0])
        once = torch.linalg.solve_triangular(lower, change, upper=False)
        del change
        twice = torch.linalg.solve_triangular(lower, once.mT, upper=False)
        del once, lower
        try:
            found: Tensor = torch.linalg.eigvalsh(twice)
        except RuntimeError as error:  # torch's LinAlgError is one
            if ran_out_of_memory(error):
                raise
            raise FallbackFailed(f"the eigenvalues of the pencil of two factors: {error}") from error
        return found

    return guarded(work, 24 * base.side.size**2, "3 · n² · 8", layer, guard)


def _subtracted(left: Symmetric, right: Symmetric, pair: MatrixPair) -> Tensor:
    """``left − right`` in the pair's unit, (r, r) float64."""
    whole = left.dense(pair.unit)
    size = left.side.size
    step = max(1, 2**18 // size)
    for start in range(0, size, step):
        span = slice(start, min(start + step, size))
        whole[span] -= right.side.panel(span, pair.unit)
    return whole
