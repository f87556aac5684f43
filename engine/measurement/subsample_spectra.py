"""Subsample spectra: one layer's spectra and traces after ever more examples, to see whether they have converged."""

from dataclasses import dataclass

from torch import Tensor

from catalog.analyses.subsamples import NestedCapacity, NestedTraces
from engine.factors.dense import as_operator
from engine.factors.factor_files import nested_file, write_factors
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.linalg import kronecker_spectrum as spectrum
from engine.linalg.linear_operator import Operator
from engine.measurement.decompose_layer import beyond_solvers
from engine.workspace import Workspace


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

    One layer's factors at one size, and their eigenvalues, are held.
    """
    shared_a = workspace.results.of(_SharedSpectra)
    found = []
    for size in whole.nested:
        workspace.ports.raise_if_cancelled()
        factors = size.load(facts.ordinal)
        if keep_factors:
            write_factors(workspace.ports.artifacts, facts, factors, nested_file(size.eighths, facts.ordinal))
        bound_a, bound_g = size.rank_bounds[facts.ordinal]
        side_a = as_operator(factors.A, factors.scale_A, bound_a)
        side_g = as_operator(factors.G, factors.scale_G, bound_g)
        if (size.eighths, facts.leader) not in shared_a:
            shared_a[size.eighths, facts.leader] = _spectrum(workspace, side_a, facts.name)
        found.append(
            MeasuredSize(
                examples=size.examples,
                spectrum_A=shared_a[size.eighths, facts.leader],
                spectrum_G=_spectrum(workspace, side_g, facts.name),
                trace_A=side_a.trace(),
                trace_G=side_g.trace(),
                frobenius_A=side_a.frobenius_norm(),
                frobenius_G=side_g.frobenius_norm() if side_g.complete else None,
            )
        )
    return tuple(found)


def _spectrum(workspace: Workspace, side: Operator, layer: str) -> Tensor | None:
    """Return the eigenvalues alone: a basis of smaller sizes is not needed."""
    if workspace.options.decomposition == "none" or beyond_solvers(side, None):
        return None
    found = side.to(workspace.machine.device).spectrum(layer, workspace.machine.guard)
    return None if found is None else found[0]


def nested_traces(sizes: tuple[MeasuredSize, ...]) -> tuple[NestedTraces, ...] | None:
    """Return the traces at every sample size, ascending, a row per size; None where no sizes were asked for."""
    rows = tuple(
        NestedTraces(
            examples=size.examples, trace_A=size.trace_A, trace_G=size.trace_G, trace=size.trace_A * size.trace_G
        )
        for size in sizes
    )
    return rows or None


def nested_capacity(sizes: tuple[MeasuredSize, ...]) -> tuple[NestedCapacity, ...] | None:
    """Compute trace, participation ratio and effective rank at every sample size, for the analysis `capacity`.

    The sizes are ascending. A metric is None where its spectra or norms are missing; all is None where no sizes were
    asked for.
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
