"""The results of `spectrum`: one layer's record, and one of each curvature of the whole model."""

from collections.abc import Mapping

from catalog.brief import Brief
from catalog.record import record


@record
class BoundedEigenvalue:
    """An eigenvalue, and how far from it the true one may be."""

    value: float
    """The eigenvalue."""
    bound: float | None
    """The matrix has an eigenvalue within this distance of `value`; null where it is the product of eigenvalues of A
    and G above the rounding of their sums, or was collected by EK-FAC."""
    converged: bool
    """Whether the bound came below `spectrum.tolerance` before `spectrum.most_products` were made."""


@record
class EigenvalueCounts:
    """Eigenvalues of one layer counted in equal steps of log10 λ; every layer's steps are those of one lattice."""

    log10_edges: tuple[float, ...]
    """One more than counts, ascending: whole multiples of 1/`spectrum.points_per_decade`."""
    counts: tuple[int | None, ...]
    """Eigenvalues from the left edge up to the right one; null within the rounding of the factors."""
    below: int
    """Eigenvalues below the first edge whose count is not null, the zeros among them."""


@record
class LayerSpectrum:
    """The eigenvalues of one layer's block."""

    trace: float
    """Their sum."""
    largest: tuple[BoundedEigenvalue, ...]
    """The largest ones, descending, each as often as it occurs; none with `end: smallest`."""
    smallest: tuple[BoundedEigenvalue, ...]
    """The smallest ones, ascending, each as often as it occurs; none with `end: largest`."""
    zeros: int
    """Eigenvalues below the rounding of the largest, which are as good as zero."""
    density: EigenvalueCounts | None
    """Null with `density: false`, or where all eigenvalues are zero."""


@record
class SpectrumMetrics(Brief):
    """One layer."""

    form: str
    """`kronecker` (A dense), `diagonal` (A diagonal), `block` (exact block in G, A = 1) or
    `diagonal_block` (its diagonal alone)."""
    dimension: int
    """Rows of the layer's block: eigenvalues there are."""
    kfac: LayerSpectrum | None
    """Eigenvalues of G ⊗ A; null where they were not asked for, or are not known."""
    ekfac: LayerSpectrum | None
    """Eigenvalues as EK-FAC has corrected them; null where they were not asked for."""
    no_spectrum: Mapping[str, str]
    """Why one that was asked for is null, by `kfac` or `ekfac`."""
    estimated: str | None
    """How the eigenvalues of G are known where they are estimates between bounds; null where they were computed."""


@record
class DensityCurve:
    """Distribution of the magnitudes of the eigenvalues of one sign, as shares of all eigenvalues."""

    density: tuple[float | None, ...]
    """At each point, the share of all eigenvalues in a decade of |λ|, smoothed; null below `resolved_log10`."""
    density_low: tuple[float | None, ...] | None
    """Lower end of its 95 % band over the probes; null where the curve is exact."""
    density_high: tuple[float | None, ...] | None
    """Upper end of it."""
    beyond: tuple[float, ...]
    """At each point, the share of eigenvalues of this sign whose magnitude is larger."""
    beyond_low: tuple[float, ...] | None
    """Lower end of its 95 % band, which also holds what the quadrature cannot tell; null where the curve is exact."""
    beyond_high: tuple[float, ...] | None
    """Upper end of it."""
    resolved_log10: float | None
    """The point below which there is no density: of an exact matrix, `spectrum.steps` products cannot tell magnitudes
    apart there; of `kfac` and `ekfac`, magnitudes are rounding there, less than the larger dimension of a layer times ε
    of the factors' dtype times the layer's largest eigenvalue. Null where the density reaches the first point."""


@record
class LogDensity:
    """The density of log10 |λ|, the positive and the negative eigenvalues apart."""

    log10: tuple[float, ...]
    """The points, ascending: whole multiples of 1/`spectrum.points_per_decade`, one lattice for every curvature."""
    width: float
    """Standard deviation of the Gaussian that every curve is smoothed with, in decades."""
    positive: DensityCurve
    """Curve of the eigenvalues above zero."""
    negative: DensityCurve | None
    """Curve of those below zero; null where the matrix has none by its form."""


@record
class CurvatureSpectrum:
    """The spectrum of one curvature over all covered parameters."""

    of: str
    """`kfac`, `ekfac`, `ggn`, `fisher`, `empirical` or `hessian`."""
    dimension: int
    """Rows of the matrix: covered parameters."""
    largest: tuple[BoundedEigenvalue, ...] | None
    """The largest eigenvalues, descending; null where `end` is `smallest`, or a layer has no eigenvalues."""
    smallest: tuple[BoundedEigenvalue, ...] | None
    """The smallest eigenvalues, ascending: the most negative first; null where `end` is `largest`, likewise."""
    trace: float | None
    """Sum of all eigenvalues; null with `trace: none` of a matrix that is known by its products alone."""
    trace_low: float | None
    """Lower end of the trace's interval, of about 95 %; null where the trace is exact."""
    trace_high: float | None
    """Upper end of it."""
    negative_share: float | None
    """Share of eigenvalues below zero, beyond what the probes cannot tell from it; null where it is zero by the
    matrix's form, or without `density`."""
    negative_low: float | None
    """Lower end of its 95 % interval."""
    negative_high: float | None
    """Upper end of it."""
    density: LogDensity | None
    """Null with `density: false`, or where a layer has no eigenvalues."""
    missing: Mapping[str, str]
    """Why something that was asked for is null, by its name."""
    products: int
    """Products with the matrix that were made; 0 where it is known by its factors."""
    passes: int
    """Passes over the data that they took: many products share one."""
