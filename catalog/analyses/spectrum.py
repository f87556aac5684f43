"""`spectrum`: eigenvalues at both ends, trace and density of K-FAC and of the curvature that it stands for."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from catalog.analyses.analysis import SHAPE, Analysis, AnalysisStage, Column, Coverage, join_phrases
from catalog.analyses.spectrum_metrics import CurvatureSpectrum, SpectrumMetrics
from catalog.brief import Brief
from catalog.record import FieldError, record
from catalog.requests.inputs import EMBEDDINGS
from catalog.requests.job import JobDocument

Curvature = Literal["kfac", "ekfac", "ggn", "fisher", "empirical", "hessian"]
EXACT: tuple[Curvature, ...] = ("ggn", "fisher", "empirical", "hessian")
"""Curvatures that are known by their products alone, each of which passes over the data."""
MAX_EIGENVALUES = 1000
MAX_PROBES = 256
MAX_STEPS = 1000
MAX_PRODUCTS = 100_000
MAX_POINTS = 1000
_DEFAULT_K = 10
_LEAST_TRACE_PRODUCTS = 6
"""The fewest products from which an interval can be computed."""


@record
class SpectrumParams:
    """Options of the spectrum analysis."""

    of: Curvature | tuple[Curvature, ...] = "kfac"
    """Which curvatures. `kfac`: G ⊗ A of every layer; `ekfac`: the same with corrected eigenvalues
    (`collection.ekfac: true`); `ggn`: the generalised Gauss-Newton matrix; `fisher`: the Fisher of labels sampled as
    the collection samples them; `empirical`: that of the data's labels; `hessian`: of the loss. The last four are the
    matrices themselves, of all covered parameters together; they need the model, and pass over the data again."""
    end: Literal["both", "largest", "smallest"] = "both"
    """Which end of the spectrum the `k` eigenvalues are of."""
    k: int | None = None
    """Number of eigenvalues at each end; null takes 10, or all of a smaller matrix."""
    density: bool = True
    """Whether the density of log10 |λ| is computed; of `ggn` and the others by `probes` random vectors."""
    probes: int = 8
    """Random vectors of the density of an exact matrix: its band narrows with their root."""
    steps: int = 40
    """Products with each of them: the more, the smaller the eigenvalues that the density tells apart."""
    points_per_decade: int = 8
    """Points of the density in each decade; it is smoothed with a Gaussian 1/4 of a decade wide, or two points."""
    decades: int = 12
    """Decades of the density below the largest eigenvalue."""
    trace: Literal["xtrace", "hutch++", "none"] = "xtrace"
    """How the trace of an exact matrix is estimated."""
    trace_products: int = 24
    """Products that this takes."""
    tolerance: float = 1e-3
    """Bound of an eigenvalue, over the largest magnitude, at which the search for it ends."""
    most_products: int = 600
    """Products after which the search for the `k` eigenvalues ends in any case, with the bounds that it has."""

    def __post_init__(self) -> None:
        """Refuse numbers outside their meaning."""
        if not self.curvatures:
            raise FieldError("of", "is empty; name at least one curvature, such as kfac or ggn")
        if len(set(self.curvatures)) != len(self.curvatures):
            raise FieldError("of", "names a curvature twice; name each once")
        if self.k is not None:
            self._require_range("k", 1, MAX_EIGENVALUES)
        self._require_range("probes", 1, MAX_PROBES)
        self._require_range("steps", 2, MAX_STEPS)
        self._require_range("points_per_decade", 1, 100)
        self._require_range("decades", 1, 40)
        self._require_range("trace_products", _LEAST_TRACE_PRODUCTS, MAX_PRODUCTS)
        self._require_range("most_products", 1, MAX_PRODUCTS)
        if self.decades * self.points_per_decade > MAX_POINTS:
            points = self.decades * self.points_per_decade
            raise FieldError("decades", f"times `points_per_decade` is {points} points; take at most {MAX_POINTS}")
        if self.density and self.exact and self.probes < 2:
            raise FieldError(
                "probes", f"is {self.probes}, of which no band can be told; take 2 or more, or `density: false`"
            )
        if not (math.isfinite(self.tolerance) and 0 < self.tolerance < 1):
            raise FieldError("tolerance", f"is {self.tolerance}; take a number between 0 and 1, such as 1e-3")
        needed = self.count * (2 if self.end == "both" else 1)
        if self.exact and self.most_products < needed:
            raise FieldError(
                "most_products",
                f"is {self.most_products}, and {needed} eigenvalues take at least as many; take more, or a smaller `k`",
            )

    def _require_range(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if not least <= value <= most:
            raise FieldError(name, f"is {value}; take {least} to {most}")

    @property
    def curvatures(self) -> tuple[Curvature, ...]:
        """The curvatures asked for, in order."""
        return (self.of,) if isinstance(self.of, str) else self.of

    @property
    def count(self) -> int:
        """Eigenvalues wanted at each end, of a matrix that has as many."""
        return _DEFAULT_K if self.k is None else self.k

    @property
    def exact(self) -> tuple[Curvature, ...]:
        """Those that are known by their products alone."""
        return tuple(each for each in self.curvatures if each in EXACT)

    @property
    def needs_model(self) -> str | None:
        """The option that factors of an earlier job cannot serve, as the document says it."""
        return f"spectrum.of: {self.exact[0]}" if self.exact else None

    def require_document(self, document: JobDocument) -> None:
        """Refuse what the rest of the document cannot serve.

        Args:
            document: The document that these options stand in.

        Raises:
            FieldError: If EK-FAC's eigenvalues are asked for and not collected, or there are no targets to take a loss
                at.
        """
        if "ekfac" in self.curvatures and document.factors is None and not document.collection.ekfac:
            raise FieldError(
                "collection.ekfac", "is false, and `spectrum.of: ekfac` needs it: give `ekfac: true`, or leave that out"
            )
        aimed = [of for of in self.exact if of in ("empirical", "hessian")]
        if aimed and document.task is not None and document.task.type in EMBEDDINGS:
            raise FieldError(
                "spectrum.of",
                f"holds `{aimed[0]}`, and `{document.task.type}` has no targets to take a loss at; take `ggn`",
            )

    @property
    def decomposition(self) -> Literal["none", "values"]:
        """The most that is needed of the factors: eigenvalues for K-FAC alone, as EK-FAC's are collected."""
        return "values" if "kfac" in self.curvatures else "none"


@record
class SpectrumSummary(Brief):
    """The whole model."""

    coverage: Coverage
    """Parameters that are covered and that are not, with reasons: every curvature is that of the covered ones."""
    layers: int
    """Layers that are covered."""
    curvatures: tuple[CurvatureSpectrum, ...]
    """Each curvature that was asked for, in the order of `of`."""


_COLUMNS = (
    SHAPE,
    Column("metrics.kfac.trace|metrics.ekfac.trace", "trace", "Trace",
           "Sum of the eigenvalues of the layer's block; the bar compares layers", relative=True),
    *(Column(f"metrics.kfac.{end}.0.value|metrics.ekfac.{end}.0.value", heading, heading,
             f"{end.capitalize()} eigenvalue of the layer's block")
      for end, heading in (("largest", "λ_max"), ("smallest", "λ_min"))),
    Column("metrics.kfac.zeros|metrics.ekfac.zeros", "zeros", "Zeros",
           "Eigenvalues below the rounding of the largest; the bar is their share", whole="metrics.dimension"),
)  # fmt: skip
_NAMES = {
    "kfac": "K-FAC",
    "ekfac": "EK-FAC",
    "ggn": "the generalised Gauss-Newton matrix",
    "fisher": "the Fisher information of sampled labels",
    "empirical": "the empirical Fisher",
    "hessian": "the Hessian of the loss",
}


def _sentence(options: Mapping[str, Any]) -> str:
    of = options["of"]
    named = [_NAMES.get(each, each) for each in ([of] if isinstance(of, str) else of)]
    end = {"both": "at each end", "largest": "from the largest on", "smallest": "from the smallest on"}[options["end"]]
    density = ", trace and density" if options["density"] else " and trace"
    count = "" if options["k"] is None else f"{options['k']} "
    return f"{count}eigenvalues {end}{density} of {join_phrases(named)}"


SPECTRUM = Analysis(
    kind="spectrum",
    title="Spectrum",
    description="Eigenvalues at both ends, trace and density of K-FAC, of the exact Gauss-Newton matrix, Fisher or "
    "Hessian.",
    implementation="engine.analyses.spectrum:Spectrum",
    params=SpectrumParams,
    metrics=SpectrumMetrics,
    summary=SpectrumSummary,
    stages=(
        AnalysisStage(name="spectrum", share=0.1),
        AnalysisStage(name="products", planned="spectrum", share=0.9, announced_by=("search",)),
    ),
    columns=_COLUMNS,
    sentence=_sentence,
)
