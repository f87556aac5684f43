"""The comparison of two sets' curvature of one layer: of A, of G, and of G ⊗ A, which is never formed.

With ``X = (1 + p) Y + X⊥`` for both sides (``side_comparison``), p, G⊥ of G and q, A⊥ of A, the four parts of

    G₁ ⊗ A₁ − G₂ ⊗ A₂ = (p + q + pq) G₂ ⊗ A₂ + (1 + p) G₂ ⊗ A⊥ + (1 + q) G⊥ ⊗ A₂ + G⊥ ⊗ A⊥

are orthogonal: its squared norm is the sum of theirs, and nothing cancels. (The textbook sum of ‖G₁‖²‖A₁‖²,
−2⟨G₁, G₂⟩⟨A₁, A₂⟩ and ‖G₂‖²‖A₂‖² loses all digits of a difference below 1e-8.)

The eigenvectors of G ⊗ A are products of those of its sides, so that the squared cosine of ``g_i ⊗ a_j`` and
``g_k ⊗ a_l`` is ``C^G_ik C^A_jl``; the leading k products come from the leading k of each side.

With factored damping the pencil of the products has the eigenvalues ``(1 + δ_i)(1 + ε_j)``, and

    KL(N(0, P₁⁻¹) ‖ N(0, P₂⁻¹)) = ½ Σ_ij (x_ij − ln(1 + x_ij)),  x_ij = δ_i + ε_j + δ_i ε_j

of which no term is negative.

References:
    Golub & Van Loan (2013), Matrix Computations, section 6.4.3: angles between subspaces
    Hoffman & Wielandt (1953), The variation of the spectrum of a normal matrix
    Kullback & Leibler (1951), On information and sufficiency
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from catalog.analyses.compare_curvature import EigenspaceOverlap, MatrixComparison
from engine.linalg.panels import PANEL_NUMBERS
from engine.operators.pairs.side_comparison import Difference, SideComparison

MOST_PRODUCTS = 2**22
"""Eigenvalues of G ⊗ A that are put into order at most."""
_SERIES_UP_TO = 0.05
_SERIES_TERMS = 14
"""The next one is 0.05^13 of the first: less than rounding."""


def side_metrics(found: SideComparison, ks: Sequence[int]) -> MatrixComparison:
    """Return the numbers of one factor.

    Args:
        found: Two factors of a layer, compared.
        ks: Numbers of leading eigenvectors, ascending.

    Returns:
        The record; what is not knowable is null, with its reason.
    """
    spectral = None
    if found.spectra is not None and found.difference is not None:
        x, y = (each.values for each in found.spectra)
        spectral = _over(float((x - y).norm()) * found.unit, found.difference.second)
    return MatrixComparison(
        size=found.size,
        overlaps=tuple(_side_overlap(found, k) for k in ks),
        trace_log_ratio=_log_ratio(*found.traces),
        largest_log_ratio=None if found.largest is None else _log_ratio(*found.largest),
        spectral_distance=spectral,
        **_distances(found.difference),
        divergence=None if found.pencils is None else divergence(found.pencils[0]),
        reverse_divergence=None if found.pencils is None else divergence(found.pencils[1]),
        why=found.unknown or found.no_pencils,
    )


def product_metrics(G: SideComparison, A: SideComparison, ks: Sequence[int]) -> MatrixComparison:
    """Return the numbers of ``G ⊗ A``.

    Args:
        G: The output factors of a layer, compared.
        A: The input factors.
        ks: Numbers of leading eigenvectors, ascending.

    Returns:
        The record; what is not knowable of a side is null of the product too.

    Memory:
        16 MiB for the divergences, 40 bytes for each of up to 2²² eigenvalues in order, and (k + 1)² products.
    """
    known = [each.unknown or each.no_pencils for each in (G, A)]
    difference = product_difference(G.difference, A.difference) if G.difference and A.difference else None
    pencils = None
    if G.pencils is not None and A.pencils is not None:
        pencils = [divergence(g, a) for g, a in zip(G.pencils, A.pencils, strict=True)]
    spectral, beyond = _spectral_distance(G, A, difference)
    largest = None
    if G.largest is not None and A.largest is not None:
        largest = _sum(_log_ratio(*G.largest), _log_ratio(*A.largest))
    return MatrixComparison(
        size=G.size * A.size,
        overlaps=_product_overlaps(G, A, ks),
        trace_log_ratio=_sum(_log_ratio(*G.traces), _log_ratio(*A.traces)),
        largest_log_ratio=largest,
        spectral_distance=spectral,
        **_distances(difference),
        divergence=None if pencils is None else pencils[0],
        reverse_divergence=None if pencils is None else pencils[1],
        why="; ".join(dict.fromkeys(filter(None, (*known, beyond)))) or None,
    )


def product_difference(G: Difference, A: Difference) -> Difference:
    """Return what ``Difference`` says of G ⊗ A, from its sides."""
    p, q = G.along, A.along
    across = math.hypot((1 + p) * G.second * A.across, (1 + q) * G.across * A.second, G.across * A.across)
    if not (G.second > 0 and A.second > 0):
        return Difference(first=G.first * A.first, second=0.0, along=0.0, across=G.first * A.first)
    return Difference(first=G.first * A.first, second=G.second * A.second, along=p + q + p * q, across=across)


def divergence(deltas: Tensor, others: Tensor | None = None) -> float:
    """Return ``½ Σ (x − ln(1 + x))`` over the eigenvalues 1 + x of a pencil, or of the product of two.

    Args:
        deltas: δ, shape (n,), float64, above −1.
        others: ε, shape (m,), float64, above −1; None takes x = δ, else x = δ + ε + δε of every pair.

    Returns:
        Nats.

    Memory:
        Some panels of 2 MiB.
    """
    if others is None:
        return 0.5 * float(_excess(deltas).sum())
    parts = torch.split(deltas[:, None], max(1, PANEL_NUMBERS // (8 * others.numel())))
    return 0.5 * math.fsum(float(_excess(some + others + some * others).sum()) for some in parts)


def _excess(x: Tensor) -> Tensor:
    """``x − ln(1 + x)``; by its series where the two nearly cancel."""
    series = torch.zeros_like(x)
    for power in range(_SERIES_TERMS, 1, -1):
        series.add_((-1) ** power / power)
        if power > 2:
            series.mul_(x)
    series.mul_(x.square())
    return torch.where(x.abs() <= _SERIES_UP_TO, series, x - torch.log1p(x))


def _side_overlap(found: SideComparison, k: int) -> EigenspaceOverlap:
    if found.cosines is None or found.spectra is None:
        return EigenspaceOverlap(k=k, overlap=None, gap=None, why=found.unknown or found.no_vectors)
    if k >= found.size:
        return _whole(k, found.size)
    gaps, roundings = [], []
    for each in found.spectra:
        gaps.append(each.value(k - 1) - each.value(k))
        roundings.append(each.rounding)
    largest = [each.value(0) for each in found.spectra]
    gap, why = _gap(k, gaps, roundings, largest)
    if why is not None:
        return EigenspaceOverlap(k=k, overlap=None, gap=gap, why=why)
    overlap = float(found.cosines[:k, :k].sum()) / k
    return EigenspaceOverlap(k=k, overlap=min(overlap, 1.0), gap=gap, why=None)


def _whole(k: int, size: int) -> EigenspaceOverlap:
    if k == size:
        return EigenspaceOverlap(k=k, overlap=1.0, gap=None, why=None)
    return EigenspaceOverlap(k=k, overlap=None, gap=None, why=f"there are {size} eigenvectors")


def _gap(
    k: int, gaps: Sequence[float], roundings: Sequence[float], largest: Sequence[float]
) -> tuple[float | None, str | None]:
    """The smaller relative gap, and why it determines no span."""
    if not all(value > 0 for value in largest):
        return None, "a set has no curvature here"
    gap = max(min(each / value for each, value in zip(gaps, largest, strict=True)), 0.0)
    if all(each > rounding for each, rounding in zip(gaps, roundings, strict=True)):
        return gap, None
    return gap, f"eigenvalues {k} and {k + 1} of a set differ by no more than rounding, so that the span is any of many"


def _product_overlaps(G: SideComparison, A: SideComparison, ks: Sequence[int]) -> tuple[EigenspaceOverlap, ...]:
    if G.cosines is None or A.cosines is None or G.spectra is None or A.spectra is None:
        why = G.unknown or G.no_vectors or A.unknown or A.no_vectors
        return tuple(EigenspaceOverlap(k=k, overlap=None, gap=None, why=why) for k in ks)
    size = G.size * A.size
    most = min(ks[-1] + 1, size)
    orders = []
    for g, a in zip(G.spectra, A.spectra, strict=True):
        left, right = (_padded(each.values, min(most, own)) for each, own in ((g, G.size), (a, A.size)))
        products = (left[:, None] * right).flatten()
        values, places = torch.sort(products, descending=True, stable=True)
        # relative roundings of both sides add up
        rounding = g.rounding * a.value(0) + a.rounding * g.value(0)
        orders.append((values[:most], places[:most] // right.numel(), places[:most] % right.numel(), rounding))
    found = []
    for k in ks:
        if k >= size:
            found.append(_whole(k, size))
            continue
        gaps = [float(values[k - 1] - values[k]) for values, _, _, _ in orders]
        largest = [float(values[0]) for values, _, _, _ in orders]
        gap, why = _gap(k, gaps, [order[3] for order in orders], largest)
        overlap = None
        if why is None:
            (_, i, j, _), (_, left_i, left_j, _) = orders
            cosines = G.cosines[i[:k]][:, left_i[:k]] * A.cosines[j[:k]][:, left_j[:k]]
            overlap = min(float(cosines.sum()) / k, 1.0)
        found.append(EigenspaceOverlap(k=k, overlap=overlap, gap=gap, why=why))
    return tuple(found)


def _padded(values: Tensor, length: int) -> Tensor:
    """The first ``length`` of all eigenvalues, of which those beyond ``values`` are zero."""
    kept = values[:length]
    return torch.cat([kept, kept.new_zeros(length - kept.numel())]) if kept.numel() < length else kept


def _spectral_distance(
    G: SideComparison,
    A: SideComparison,
    difference: Difference | None,
) -> tuple[float | None, str | None]:
    """Return the distance of the product's eigenvalues in order, or why there is none where they are too many."""
    if G.spectra is None or A.spectra is None or difference is None:
        return None, None
    count = G.spectra[0].values.numel() * A.spectra[0].values.numel()
    if count > MOST_PRODUCTS:
        return None, f"the order of {count:,} eigenvalues of the product was not computed"
    x, y = ((g.values[:, None] * a.values).flatten().sort().values for g, a in zip(G.spectra, A.spectra, strict=True))
    return _over(float((x - y).norm()) * G.unit * A.unit, difference.second), None


def _distances(difference: Difference | None) -> dict[str, float | None]:
    if difference is None:
        return dict.fromkeys(("norm", "norm_against", "distance", "relative_distance", "cosine"))
    distance = math.hypot(difference.along * difference.second, difference.across)
    cosine = _over((1 + difference.along) * difference.second, difference.first) if difference.second > 0 else None
    return {
        "norm": difference.first,
        "norm_against": difference.second,
        "distance": distance,
        "relative_distance": _over(distance, difference.second),
        "cosine": None if cosine is None else min(cosine, 1.0),
    }


def _over(above: float, below: float) -> float | None:
    return above / below if below > 0 else None


def _log_ratio(first: float, second: float) -> float | None:
    return math.log(first) - math.log(second) if first > 0 and second > 0 else None


def _sum(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left + right
