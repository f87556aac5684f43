"""`influence`: how much each training example moves the loss at each query, by the damped curvature."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from catalog.analyses.analysis import SHAPE, Analysis, Column, Coverage, Figure
from catalog.brief import Brief
from catalog.record import FieldError, option, record
from catalog.requests.data_sources import DataSource
from catalog.requests.inputs import EMBEDDINGS
from catalog.requests.job import JobDocument

MAX_GROUPS = 64


@record
class InfluenceParams:
    """Options of the influence `−g_qᵀ (C + λ)⁻¹ g_n`; λ comes from `stabilisation`."""

    query: DataSource | None = None
    """The examples whose losses are explained, of any source; `data` are the training examples. Targets are theirs."""
    of: Literal["kfac", "ekfac", "ggn"] = "kfac"
    """C. `kfac`: G ⊗ A; `ekfac`: its eigenvectors with EK-FAC's eigenvalues, for `collection.ekfac`; `ggn`: the exact
    Gauss-Newton matrix of all layers together, by conjugate gradients preconditioned with G ⊗ A."""
    texts: bool | None = None
    """Whether the summary quotes the texts of what it lists, 500 characters of each; data and query must be texts."""
    top: int = 10
    """Training examples with the lowest, and as many with the highest scores, that are listed for a query."""
    listed: int = 16
    """Queries that the summary lists; the artifacts hold the scores of all."""
    groups: Mapping[str, tuple[str, ...]] = option(dict)
    """Groups of layers whose part of each score is kept too: a name of your own, with names of layers or of modules
    that hold them."""
    block: int = 32
    """Queries at once: each block is one pass over `data`, and holds vectors of all covered parameters for each."""
    tolerance: float = 1e-4
    """Relative residual at which conjugate gradients end, for `ggn`."""
    iterations: int = 100
    """Most iterations of them; what has not converged by then is given with its residual, and marked."""
    decomposition: ClassVar[Literal["none"]] = "none"
    """Parts of the eigendecompositions that rows ask for: none, since the operator makes its own."""
    needs_model: ClassVar[str] = "influence"
    """The option that needs the model's weights."""
    has_round: ClassVar[bool] = True
    """Whether a divided job has a round of its own for this analysis, in which pieces share the queries."""

    def __post_init__(self) -> None:
        """Refuse numbers outside their meaning."""
        for name, least in (("top", 1), ("listed", 1), ("block", 1), ("iterations", 1)):
            if getattr(self, name) < least:
                raise FieldError(name, f"is {getattr(self, name)}; take {least} or more")
        if not (math.isfinite(self.tolerance) and 0 < self.tolerance < 1):
            raise FieldError("tolerance", f"is {self.tolerance}; take a number between 0 and 1")
        if len(self.groups) > MAX_GROUPS:
            raise FieldError("groups", f"names {len(self.groups)} groups; at most {MAX_GROUPS} are kept")
        for name, layers in self.groups.items():
            if not (name.isprintable() and 0 < len(name) <= MAX_GROUPS and layers):
                raise FieldError("groups", f"holds {name[:40]!r}; take printable names, each with a list of layers")

    def require_document(self, document: JobDocument) -> None:
        """Refuse what the rest of the document cannot serve.

        Args:
            document: The document that these options stand in.

        Raises:
            FieldError: If there are no queries, no targets or no EK-FAC, or `data` are not all training examples.
        """
        if self.query is None:
            raise FieldError(
                "influence.query", "is missing; name the examples to explain, as `data` are (in a notebook `query=`)"
            )
        if document.task is not None and document.task.type in EMBEDDINGS:
            raise FieldError("task", f"`{document.task.type}` has no targets, and so no loss to explain; take another")
        if self.of == "ekfac" and not document.collection.ekfac:
            raise FieldError(
                "influence.of", "is `ekfac`, which is not collected; take `collection.ekfac: true`, or `of: kfac`"
            )
        if document.collection.fisher == "forward_only":
            raise FieldError(
                "collection.fisher", "is `forward_only`, which has no G; take `mc`, `type2` or `empirical`"
            )

    def require_options(self, document: JobDocument) -> None:
        """Refuse to score a part of the examples that the curvature is of.

        Args:
            document: The document that these options stand in.

        Raises:
            FieldError: If it extends an earlier collection.
        """
        if document.extends is not None:
            raise FieldError(
                "extends", "adds to factors whose examples are not all in `data`; give all of them in one job"
            )


@record
class InfluenceMetrics(Brief):
    """One layer."""

    gradient_norm: float
    """Root mean square, over the queries, of the norm of the query's gradient in this layer."""
    damping: float | None
    """λ of C + λI in absolute numbers."""
    self_influence: float
    """Mean over the queries of gᵀ(C + λ)⁻¹g in this layer."""
    share: float | None
    """Its part of the sum over all layers."""


@record
class ScoredExample:
    """One training example."""

    example: int
    """Its position in `data`, from 0."""
    score: float
    """The change of the query's loss with the example's weight, per unit of 1/W: negative where more of it lowers the
    loss."""
    text: str | None
    """Its text; null but for `texts`."""


@record
class QueryInfluence:
    """One query."""

    query: int
    """Its position in `query`, from 0."""
    text: str | None
    """Its text; null but for `texts`."""
    self_influence: float
    """gᵀ(C + λ)⁻¹g of its own gradient."""
    residual: float | None
    """‖(C + λ)x − g‖ / ‖g‖ of the solution, computed anew; null but for `ggn`."""
    iterations: int | None
    """Iterations of conjugate gradients; null but for `ggn`."""
    converged: bool
    """Whether the residual is within `tolerance`; true but for `ggn`."""
    lowering: tuple[ScoredExample, ...]
    """The lowest scores, in order."""
    raising: tuple[ScoredExample, ...]
    """The highest scores, in order."""


@record
class InfluenceSummary(Brief):
    """The whole model."""

    coverage: Coverage
    """Parameters that are covered and that are not, with reasons; gradients of the latter take no part."""
    layers: int
    """Layers that are covered."""
    of: str
    """C."""
    queries: int
    """Queries."""
    examples: int
    """Training examples, Q × N scores in all."""
    loss_terms: float
    """W: the weight of all loss terms. To leave an example out changes a query's loss by about −score / W."""
    query_digest: str
    """Digest over inputs and targets of the queries, whatever their order."""
    hooked_difference: float
    """Largest difference between products of queries' gradients by the training pass's route and by plain autograd, as
    a share of the two vectors' lengths: the proof, on these data, that the pass sees each example's gradient alone."""
    unconverged: int
    """Queries whose residual is above `tolerance`."""
    worst_residual: float | None
    """Largest residual; null but for `ggn`."""
    artifacts: tuple[str, ...]
    """Files of scores: `scores` (queries, examples) of each block of queries, and `scores.{group}`; float32, or float64
    with `collection.dtype: float64`."""
    listed: tuple[QueryInfluence, ...]
    """The first queries."""


_COLUMNS = (
    SHAPE,
    Column("metrics.share", "share", "Share", "Part of the queries' self-influence that is in this layer",
           form="percent", whole=1),
    Column("metrics.self_influence", "self", "Self-influence", "Mean over the queries of gᵀ(C + λ)⁻¹g"),
    Column("metrics.gradient_norm", "‖g‖", "‖g‖", "Root mean square norm of the queries' gradients"),
    Column("metrics.damping", "λ", "λ", "Damping, in absolute numbers", form="magnitude"),
)  # fmt: skip
_FIGURES = (
    Figure("Queries", "{queries:count}",
           ("{examples:count} training examples; worst residual {worst_residual:2}, {unconverged:count} unconverged",
            "{examples:count} training examples"),
           "Scores −g_qᵀ(C + λ)⁻¹g_n of every query and example; negative where more of the example lowers the loss.",
           "{queries:query|queries} against {examples:count} examples"),
    Figure(line="worst residual {worst_residual:2}"),
)  # fmt: skip


def _sentence(options: Mapping[str, Any]) -> str:
    curvature = {"kfac": "K-FAC", "ekfac": "EK-FAC", "ggn": "the Gauss-Newton matrix, by conjugate gradients"}
    return (
        "the influence of each training example on the loss of each query, with the damped inverse of "
        f"{curvature[str(options.get('of', 'kfac'))]}"
    )


INFLUENCE = Analysis(
    kind="influence",
    title="Influence",
    description="Score how much each training example moves the loss of each query example.",
    implementation="engine.analyses.influence:Influence",
    params=InfluenceParams,
    metrics=InfluenceMetrics,
    summary=InfluenceSummary,
    columns=_COLUMNS,
    figures=_FIGURES,
    sentence=_sentence,
)
