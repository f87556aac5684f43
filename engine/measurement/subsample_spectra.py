"""Subsample spectra: one layer's spectra and traces after ever more examples, to see whether they have converged."""

from dataclasses import dataclass

import torch
from torch import Tensor

from catalog.analyses.subsamples import NestedCapacity, NestedTraces
from engine.factors.factor_files import nested_file, write_factors
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.linalg import kronecker_spectrum as spectrum
from engine.linalg.eigendecomposition import decompose
from engine.linalg.eigensolvers import LARGEST
from engine.linalg.linear_operator import Structured
from engine.workspace import Workspace

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class MeasuredSize:
    """One layer at one sample size."""

    examples: int
    spectrum_A: Tensor | None
    """(in_dim,) float64, ascending; None where no analysis asks for it."""
    spectrum_G: Tensor | None
    """(out_dim,) float64, ascending; None where no analysis asks for it, or it is not to be had without n×n."""
    trace_A: float
    trace_G: float
    frobenius_A: float | None
    frobenius_G: float | None
    """None where only the diagonal of G is kept."""


class _SharedSpectra(dict[tuple[int, int], Tensor | None]):
    """Spectra of A that several layers share, by the ordinal of the first and the size."""


def smaller_sizes(
    workspace: Workspace, whole: FactorSet, facts: LayerFacts, *, keep_factors: bool
) -> tuple[MeasuredSize, ...]:
    """Measure one layer at every sample size below the whole, and write the factors that the job keeps.

    Memory:
        One layer's factors at one size, and their eigenvalues.
    """
    shared_a = workspace.results.of(_SharedSpectra)
    leader = facts.ordinal if facts.shared_A_with is None else facts.shared_A_with
    found = []
    for size in whole.nested:
        workspace.ports.raise_if_cancelled()
        factors = size.load(facts.ordinal)
        if keep_factors:
            write_factors(workspace.ports.artifacts, facts, factors, nested_file(size.eighths, facts.ordinal))
        bound_a, bound_g = size.rank_bounds[facts.ordinal]
        if (size.eighths, leader) not in shared_a:
            shared_a[size.eighths, leader] = _spectrum(workspace, factors.A, facts.name, bound_a, factors.scale_A)
        found.append(
            MeasuredSize(
                examples=size.examples,
                spectrum_A=shared_a[size.eighths, leader],
                spectrum_G=_spectrum(workspace, factors.G, facts.name, bound_g, factors.scale_G),
                trace_A=trace(factors.A, factors.scale_A),
                trace_G=trace(factors.G, factors.scale_G),
                frobenius_A=frobenius(factors.A, factors.scale_A),
                frobenius_G=frobenius(factors.G, factors.scale_G),
            )
        )
    return tuple(found)


def _spectrum(
    workspace: Workspace, factor: Tensor | Structured, layer: str, rank_bound: int | None, scale: float
) -> Tensor | None:
    """Return the eigenvalues alone: a basis of smaller sizes is not needed."""
    if workspace.options.decomposition == "none":
        return None
    if isinstance(factor, Structured):
        known = factor.to(workspace.machine.device).spectrum(layer, workspace.machine.guard)
        return None if known is None else known[0] * scale
    if factor.ndim == 2 and factor.shape[0] > LARGEST:
        return None
    there = factor.to(workspace.machine.device)
    found = decompose(there, layer, host=factor, rank_bound=rank_bound, guard=workspace.machine.guard)
    return found.values.mul_(scale)


def trace(factor: Tensor | Structured, scale: float) -> float:
    """Compute the trace of a factor.

    Args:
        factor: The factor, dense with shape (n, n), diagonal with shape (n,), or structured.
        scale: Number that the factor is multiplied by.

    Returns:
        ``scale`` times the sum of the diagonal, in float64.
    """
    if isinstance(factor, Structured):
        return factor.trace() * scale
    diagonal = factor if factor.ndim == 1 else factor.diagonal()
    return float(diagonal.to(torch.float64).sum()) * scale


def frobenius(factor: Tensor | Structured, scale: float) -> float | None:
    """Compute the Frobenius norm of a factor.

    Args:
        factor: The factor, dense with shape (n, n), diagonal with shape (n,), or structured.
        scale: Number that the factor is multiplied by, not negative.

    Returns:
        ``scale`` times the norm, in float64; None where only the diagonal of a structured factor is kept.

    Memory:
        256 rows in float64.
    """
    if isinstance(factor, Structured):
        return factor.frobenius_norm() * scale if factor.complete else None
    parts = [
        torch.linalg.vector_norm(factor[start : start + _ROWS_AT_ONCE].to(torch.float64))
        for start in range(0, factor.shape[0], _ROWS_AT_ONCE)
    ]
    return float(torch.linalg.vector_norm(torch.stack(parts))) * scale


def nested_traces(sizes: tuple[MeasuredSize, ...]) -> tuple[NestedTraces, ...] | None:
    """Collect the traces at every sample size, for the analysis `factors`.

    Args:
        sizes: One layer's records, ascending.

    Returns:
        One row per size; None where no sizes were asked for.
    """
    rows = tuple(
        NestedTraces(
            examples=size.examples, trace_A=size.trace_A, trace_G=size.trace_G, trace=size.trace_A * size.trace_G
        )
        for size in sizes
    )
    return rows or None


def nested_capacity(sizes: tuple[MeasuredSize, ...]) -> tuple[NestedCapacity, ...] | None:
    """Compute trace, participation ratio and effective rank at every sample size, for the analysis `capacity`.

    Args:
        sizes: One layer's records, ascending.

    Returns:
        One row per size, with None for a metric whose spectra or norms are missing; None where no sizes were asked for.
    """
    rows = []
    for size in sizes:
        rank_a, rank_g = (
            None if side is None else spectrum.entropy_effective_rank(side)
            for side in (size.spectrum_A, size.spectrum_G)
        )
        rows.append(
            NestedCapacity(
                examples=size.examples,
                trace=size.trace_A * size.trace_G,
                participation_ratio=spectrum.participation_ratio(
                    (size.trace_A, size.trace_G), (size.frobenius_A, size.frobenius_G)
                ),
                effective_rank=None if rank_a is None or rank_g is None else rank_a * rank_g,
            )
        )
    return tuple(rows) or None
