"""`compare_curvature`: each layer's factors beside those of another set, stored by an earlier job."""

from typing import ClassVar, Literal

from catalog.analyses.analysis import SHAPE, Analysis, Column, Coverage, Figure
from catalog.brief import Brief
from catalog.record import FieldError, record
from catalog.requests.inputs import require_job_or_path
from catalog.requests.job import JobDocument

MOST_VECTORS = 1000


@record
class AgainstReference:
    """The factors that are compared with: give `job` or `path`."""

    job: str | None = None
    """Id of a succeeded job that kept its factors."""
    path: str | None = None
    """A folder with `factors.index.json`, or the output of a run that kept its factors. A service reads what lies in
    folders that its operator lists."""

    def __post_init__(self) -> None:
        """Require exactly one of the two."""
        require_job_or_path(self.job, self.path)


@record
class CompareCurvatureParams:
    """Options of the comparison; the damping of its divergences is that of `stabilisation`."""

    against: AgainstReference | None = None
    """The second set of factors. The first is what `factors` names, or what the job collects."""
    k: tuple[int, ...] = (1, 5, 10, 50)
    """Numbers of leading eigenvectors whose spans are compared, ascending, each from 1 to 1000."""
    decomposition: ClassVar[Literal["none"]] = "none"
    """Nothing: a job keeps eigenvectors in float32, and spans are compared in float64, by bases computed anew."""

    def __post_init__(self) -> None:
        """Refuse numbers that are out of range or out of order."""
        if not self.k:
            raise FieldError("k", "is empty; name at least one number of eigenvectors, such as 10")
        for number in self.k:
            if not 1 <= number <= MOST_VECTORS:
                raise FieldError("k", f"holds {number}; take numbers from 1 to {MOST_VECTORS}")
        if list(self.k) != sorted(set(self.k)):
            raise FieldError("k", f"is {list(self.k)}; list each number once, in ascending order")

    def require_document(self, document: JobDocument) -> None:
        """Refuse a document that asks for the comparison and names nothing to compare with.

        Args:
            document: The document that these options stand in.

        Raises:
            FieldError: If there is nothing to compare with.
        """
        del document
        if self.against is None:
            raise FieldError(
                "compare_curvature.against",
                "is missing; name the second set of factors: give `compare_curvature.against` as `{job: ID}` of a job "
                "that kept its factors, or as `{path: FOLDER}`",
            )


@record
class EigenspaceOverlap:
    """The spans of the k leading eigenvectors of both sets."""

    k: int
    """Eigenvectors of each set."""
    overlap: float | None
    """`‖Uᵀ V‖_F² / k`, U and V (n, k) orthonormal: the mean squared cosine of the angles between the spans. 1: equal;
    k/n is expected of spans in random directions; 0: orthogonal. Null where a span is not determined (`why`)."""
    gap: float | None
    """(λ_k − λ_{k+1})/λ_1, the smaller of the two sets': how far rounding, or noise of the data, must move the matrix
    to turn the span; null where there is no λ_{k+1}."""
    why: str | None
    """Why `overlap` is null."""


@record
class MatrixComparison:
    """X, a matrix (n, n) of the first set, beside Y, the same of the set that it is compared with."""

    size: int
    """n."""
    overlaps: tuple[EigenspaceOverlap, ...]
    """One for each k of the request."""
    trace_log_ratio: float | None
    """ln(tr X / tr Y): the shift of the whole spectrum; null where a trace is 0."""
    largest_log_ratio: float | None
    """ln(λ_max(X) / λ_max(Y)): the shift of its upper end."""
    spectral_distance: float | None
    """`‖λ(X) − λ(Y)‖₂ / ‖Y‖_F` of the eigenvalues in order: the part of `relative_distance` that no rotation explains
    (Hoffman & Wielandt), hence at most that. Null for a product of more than 4,194,304 eigenvalues."""
    norm: float | None
    """`‖X‖_F`."""
    norm_against: float | None
    """`‖Y‖_F`."""
    distance: float | None
    """`‖X − Y‖_F`."""
    relative_distance: float | None
    """`‖X − Y‖_F / ‖Y‖_F`."""
    cosine: float | None
    """`⟨X, Y⟩ / (‖X‖_F ‖Y‖_F)`, from 0 to 1: likeness whatever the scales."""
    divergence: float | None
    """Kullback-Leibler divergence `KL(N(0, (X + λ_X I)⁻¹) ‖ N(0, (Y + λ_Y I)⁻¹))` in nats, each λ that set's own
    damping; of the product with factored damping, `(G + λ_G I) ⊗ (A + λ_A I)`."""
    reverse_divergence: float | None
    """The same with the two distributions exchanged."""
    why: str | None
    """Why numbers other than overlaps are null."""


@record
class CorrectedComparison:
    """EK-FAC's eigenvalues of both sets, each in the eigenbasis of its own factors."""

    trace_log_ratio: float | None
    """ln of the ratio of their sums, which are the exact traces."""
    spectral_distance: float | None
    """‖λ₁ − λ₂‖₂ / ‖λ₂‖₂ of all of them in order."""


@record
class CompareCurvatureMetrics(Brief):
    """One layer in both sets."""

    form: str
    """`kronecker` (A dense), `diagonal` (A diagonal), `block` (exact block in G, A = 1) or `diagonal_block`."""
    A: MatrixComparison | None
    """The input factor; null where it is 1 by definition, or the layer is not compared (`why`)."""
    G: MatrixComparison | None
    """The output factor."""
    product: MatrixComparison | None
    """G ⊗ A, the layer's block, which is never formed."""
    ekfac: CorrectedComparison | None
    """Null where a set has no EK-FAC."""
    lambda_A: float | None
    """λ_A of the first set, from the mean eigenvalues and `stabilisation`."""
    lambda_G: float | None
    """The same of G."""
    lambda_A_against: float | None
    """λ_A of the set compared with."""
    lambda_G_against: float | None
    """The same of G."""
    digest_A_against: str | None
    """SHA-256 of the other set's A, as that set's index records it; the first set's stands in the row's record."""
    digest_G_against: str | None
    """The same of G."""
    why: str | None
    """Why the layer is not compared: the other set lacks it, or has it with another size."""


@record
class OptionDifference:
    """A fact of the collection in which the two sets differ."""

    option: str
    """Such as `fisher` or `seed` of `collection`; or `examples`, `updates` and `trainable_parameters`."""
    first: str
    """Its value in the first set, as JSON."""
    against: str
    """Its value in the set compared with."""


@record
class OtherSize:
    """A layer of both sets that is not of one size."""

    layer: str
    """Its name."""
    first: str
    """Rows of A × rows of G in the first set, and its form."""
    against: str
    """The same in the set compared with."""


@record
class MeanOverlap:
    """The overlap at one k, over layers."""

    k: int
    """Eigenvectors of each set."""
    overlap: float | None
    """Mean over the layers whose overlap of G ⊗ A at this k is determined."""
    layers: int
    """Number of those layers."""


@record
class CompareCurvatureSummary(Brief):
    """Both sets, over all layers that they share."""

    coverage: Coverage
    """Coverage of the first set."""
    layers: int
    """Layers that were compared."""
    overlaps: tuple[MeanOverlap, ...]
    """Mean overlap of G ⊗ A over the layers, for each k of the request."""
    distance: float | None
    """`‖F₁ − F₂‖_F` of the block-diagonal matrices of all compared layers; null where a layer's is."""
    relative_distance: float | None
    """That over ‖F₂‖_F."""
    divergence: float | None
    """Sum of the layers' divergences: of the block-diagonal Gaussians, in nats; null where a layer's is."""
    reverse_divergence: float | None
    """The same with the two exchanged."""
    farthest: str | None
    """The compared layer with the largest relative distance of G ⊗ A; null where none differs."""
    only_first: tuple[str, ...]
    """Layers that only the first set has."""
    only_against: tuple[str, ...]
    """Layers that only the set compared with has."""
    other_sizes: tuple[OtherSize, ...]
    """Layers of both sets that are not of one size, and are not compared."""
    differences: tuple[OptionDifference, ...]
    """In what the two collections differ."""
    factors_sha256: str | None
    """SHA-256 over the names and digests of the first set's layers, in their order."""
    against_sha256: str | None
    """The same of the set compared with; null where its index holds no digests."""


_COLUMNS = (
    SHAPE,
    Column("overlap", "k={}", "k = {}", "Overlap ‖Uᵀ V‖² / k of the {} leading eigenvectors of G ⊗ A in both sets: 1 "
           "where they span the same, 0 where they are orthogonal", whole=1, note="{why}",
           each="metrics.product.overlaps.k"),
    Column("metrics.product.relative_distance", "distance", "Distance",
           "‖F₁ − F₂‖ / ‖F₂‖ of G ⊗ A, by Frobenius norm; the bar compares layers", relative=True),
    Column("metrics.A.relative_distance", "of A", "of A", "‖A₁ − A₂‖ / ‖A₂‖ by Frobenius norm"),
    Column("metrics.G.relative_distance", "of G", "of G", "‖G₁ − G₂‖ / ‖G₂‖ by Frobenius norm"),
    Column("metrics.product.cosine", "cosine", "Cosine", "⟨F₁, F₂⟩ / (‖F₁‖ ‖F₂‖): likeness whatever the scales"),
    Column("metrics.product.trace_log_ratio", None, "Trace shift", "ln(tr F₁ / tr F₂)"),
    Column("metrics.product.divergence", "KL", "KL", "Kullback-Leibler divergence of the damped Gaussians, in nats",
           note="{metrics.product.why|metrics.why}"),
)  # fmt: skip
_FIGURES = (
    Figure(each="overlaps", line="{overlap} at {k:given}", joined="mean overlap of leading eigenspaces {}"),
    Figure(line=("relative distance {relative_distance}, farthest {farthest:names}",
                 "relative distance {relative_distance}")),
    Figure(line="only in the first set: {only_first:some}"),
    Figure(line="only in the set compared with: {only_against:some}"),
    Figure(line="of another size: {other_sizes.layer:some}"),
    Figure(each="differences", line="{option} {first:unquoted} against {against:unquoted}", joined="collected with {}"),
)  # fmt: skip

COMPARE_CURVATURE = Analysis(
    kind="compare_curvature",
    title="Comparison of two curvatures",
    description="Leading eigenspaces, spectra, distances and divergences of each layer's factors against a second set.",
    implementation="engine.analyses.compare_curvature:Comparison",
    params=CompareCurvatureParams,
    metrics=CompareCurvatureMetrics,
    summary=CompareCurvatureSummary,
    columns=_COLUMNS,
    figures=_FIGURES,
    sentence="the overlap of leading eigenspaces, the distance and the Kullback-Leibler divergence of each layer's "
    "factors against a second set",
)
