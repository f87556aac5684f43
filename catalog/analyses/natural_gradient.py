"""`natural_gradient`: the gradient of the mean loss times a power of the damped curvature, layer by layer."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from catalog.analyses.analysis import Analysis, Column, Coverage, Figure, join_phrases
from catalog.brief import Brief
from catalog.record import FieldError, record
from catalog.requests.inputs import EMBEDDINGS, require_path
from catalog.requests.job import JobDocument

MAX_POWERS = 8
MOST_POWER = 4.0
"""Beyond it λ^(−α) of the smallest damping there is would leave float64."""


@record
class GradientFile:
    """A gradient of your own, in place of that of the data."""

    path: str
    """A `.safetensors` file with one tensor for each trainable parameter, of its name and shape. A service reads what
    lies in folders that its operator lists."""

    def __post_init__(self) -> None:
        """Refuse an empty path."""
        require_path("path", self.path)


@record
class NaturalGradientParams:
    """Options of the natural gradient `d = F^(−α) g`; λ comes from `stabilisation`."""

    power: float | tuple[float, ...] = 1.0
    """α, or a list of them: 1 is the natural gradient, 0.5 divides by the root of the curvature as Adam does."""
    of: Literal["kfac", "ekfac"] = "kfac"
    """`kfac`: F = G ⊗ A; `ekfac`: its eigenvectors with EK-FAC's eigenvalues, for `collection.ekfac`."""
    damping: Literal["exact", "factored", "none"] = "exact"
    """The matrix that λ of `stabilisation` is added to. `exact`: F + λI; `factored`: (G + λ_G I) ⊗ (A + λ_A I), the
    approximation that optimisers take; `none`: F alone, which must not be singular where α is positive."""
    gradient: GradientFile | None = None
    """A gradient to take in place of that of the data; `factors:` hold no data, and need one."""

    def __post_init__(self) -> None:
        """Refuse powers outside their meaning, and a damping that EK-FAC does not have."""
        powers = self.powers
        if not 1 <= len(powers) <= MAX_POWERS:
            raise FieldError("power", f"must list 1 to {MAX_POWERS} numbers (got {len(powers)})")
        for power in powers:
            if not math.isfinite(power) or not 0 < abs(power) <= MOST_POWER:
                raise FieldError(
                    "power",
                    f"must be a finite number from −{MOST_POWER:g} to {MOST_POWER:g} other than 0, which leaves the "
                    f"gradient as it is (got {power})",
                )
        if len(set(powers)) != len(powers):
            raise FieldError("power", f"must list each number once (got {', '.join(f'{each:g}' for each in powers)})")
        if self.of == "ekfac" and self.damping == "factored":
            raise FieldError(
                "damping",
                "is `factored`, and EK-FAC's eigenvalues belong to no product of two factors; take `exact`",
            )

    @property
    def powers(self) -> tuple[float, ...]:
        """Every α, in the order in which they were asked for."""
        given = self.power if isinstance(self.power, (tuple, list)) else (self.power,)
        return tuple(float(each) for each in given)

    @property
    def solves(self) -> bool:
        """Whether solves with A + λ_A I and G + λ_G I are all that is needed."""
        return self.damping == "factored" and self.powers == (1.0,)

    @property
    def decomposition(self) -> Literal["none", "vectors"]:
        """The most that is needed of eigendecompositions: EK-FAC brings its eigenvectors along, solves need none."""
        return "none" if self.of == "ekfac" or self.solves else "vectors"

    @property
    def exact_vectors(self) -> bool:
        """Whether eigenvectors are kept in float64: rounded ones limit a power to an error of 1e-7 times κ."""
        return self.decomposition == "vectors"

    @property
    def needs_gradient(self) -> str | None:
        """The field that is missing where the gradient is taken of the data."""
        return "natural_gradient.gradient" if self.gradient is None else None

    def require_document(self, document: JobDocument) -> None:
        """Refuse what the rest of the document cannot serve.

        Args:
            document: The document that these options stand in.

        Raises:
            FieldError: If there is nothing to take the gradient of, or EK-FAC is not collected.
        """
        if document.factors is not None and self.gradient is None:
            raise FieldError(
                "natural_gradient.gradient",
                "is missing, and `factors` hold neither a model nor data to take the gradient of: give "
                "`gradient: {path: FILE.safetensors}`, or `model`, `data` and `task` in place of `factors`",
            )
        if document.task is not None and document.task.type in EMBEDDINGS and self.gradient is None:
            raise FieldError(
                "natural_gradient.gradient",
                f"is missing, and `{document.task.type}` has no targets to take the gradient of a loss at: give "
                "`gradient: {path: FILE.safetensors}`, or a task with targets",
            )
        if document.factors is None and self.of == "ekfac" and not document.collection.ekfac:
            raise FieldError(
                "natural_gradient.of",
                "is `ekfac`, which is not collected; take `collection.ekfac: true`, or `of: kfac`",
            )


@record
class LayerDirection:
    """`d = F^(−α) g` of one layer, F damped; the step of an optimiser is against it."""

    power: float
    """α."""
    norm: float
    """‖d‖."""
    cosine: float | None
    """gᵀd / (‖g‖ ‖d‖); null where either is zero."""
    inner: float
    """gᵀd = gᵀF^(−α)g."""
    effective_step: float | None
    """gᵀd / gᵀg: the learning rate with which plain gradient descent would go as far along g as a step of 1 goes along
    −d; null where g is zero."""
    curvature: float | None
    """dᵀF d with F undamped: a step of η changes the model's outputs by a Kullback–Leibler divergence of about
    η² dᵀF d / 2, so √(2δ / dᵀF d) is the step within a trust region of δ."""
    best_step: float | None
    """gᵀd / dᵀF d: the step along −d at which −η gᵀd + η² dᵀF d / 2 is least; null where d has no curvature."""
    largest: float
    """The number of d that is largest in magnitude, with its sign."""
    largest_parameter: str | None
    """The parameter that it stands in; null where d is zero."""
    largest_index: tuple[int, ...] | None
    """Its index in that parameter."""
    residual: float | None
    """‖F d − g‖ / ‖g‖ with F damped, for α = 1; null for another α, and where g is zero."""
    route: Literal["rows", "eigenvectors", "solves", "zero"]
    """How it was computed. `rows`: pushed through the gradient rows that G is kept as; `eigenvectors` of A and G;
    `solves` with A and G; `zero`: the layer has neither curvature nor a gradient."""


@record
class NaturalGradientMetrics(Brief):
    """One layer."""

    gradient_norm: float
    """‖g‖ of the layer's covered numbers."""
    damping: float | None
    """λ of F + λI in absolute numbers; null with another damping than `exact`."""
    damping_share: float | None
    """λ over the largest eigenvalue of F, or the smaller of λ_A over that of A and λ_G over that of G for `factored`;
    null without damping or curvature."""
    below_rounding: bool
    """Whether λ is less than what the factors' precision resolves: `damping_share` below its ε. Where it is, directions
    with eigenvalues near λ may hold the rounding of the factors, however small the residual."""
    why_not_rows: str | None
    """Why the gradient was not pushed through the gradient rows of G, where G is kept as such; null elsewhere."""
    directions: tuple[LayerDirection, ...]
    """One for each α."""


@record
class ModelDirection:
    """`d = F^(−α) g` of all covered layers together."""

    power: float
    """α."""
    norm: float
    """‖d‖."""
    cosine: float | None
    """gᵀd / (‖g‖ ‖d‖), g being that of the covered numbers."""
    inner: float
    """gᵀd = gᵀF^(−α)g, the sum over layers."""
    effective_step: float | None
    """gᵀd / gᵀg."""
    curvature: float | None
    """dᵀF d with F undamped, the sum over layers; null where that of one is not known."""
    best_step: float | None
    """gᵀd / dᵀF d."""
    residual: float | None
    """Largest over layers; null for another α than 1."""
    artifact: str | None
    """File of the direction by parameter; null without `keep: [directions]`."""


@record
class NaturalGradientSummary(Brief):
    """The whole model."""

    coverage: Coverage
    """Parameters that are covered and that are not, with reasons."""
    layers: int
    """Layers that are covered."""
    branches: Mapping[str, int]
    """Covered layers by `branch`: they add up to `layers`."""
    of: str
    """`natural_gradient.of`."""
    damping: str
    """`natural_gradient.damping`."""
    gradient: Literal["data", "file"]
    """Source of the gradient: the data with their labels, or a file."""
    gradient_norm: float
    """‖g‖ of all trainable numbers."""
    gradient_sha256: str
    """SHA-256 of g as one vector, in the order of `named_parameters()`."""
    uncovered_share: float | None
    """Share of ‖g‖² in numbers that no layer covers, where the direction is zero; null where g is zero."""
    uncovered: tuple[str, ...]
    """Parameters of which some numbers are not covered."""
    below_rounding: tuple[str, ...]
    """Layers whose λ is less than what the factors' precision resolves."""
    routes: Mapping[str, int]
    """Layers by route of the first α."""
    directions: tuple[ModelDirection, ...]
    """One for each α."""


_EACH = "metrics.directions.power"
_COLUMNS = (
    Column("metrics.gradient_norm", "‖g‖", "‖g‖", "Length of the gradient"),
    Column("norm", ("‖d‖", "‖d‖ α={}"), ("‖d‖", None), "Length of the direction d = F^(−α) g", each=_EACH),
    Column("cosine", ("cos", "cos α={}"), ("Cosine", "Cos α={}"), "gᵀd / (‖g‖ ‖d‖): how far the curvature turns the "
           "gradient", form="cosine", whole=1, each=_EACH),
    Column("effective_step", ("step", "step α={}"), ("Step", "Step α={}"), "gᵀd / gᵀg: the learning rate with which "
           "plain gradient descent goes as far along g", each=_EACH),
    Column("largest", None, ("Largest number", None), "The number of d that is largest in magnitude; its place is in "
           "the note", note="{largest_parameter}[{largest_index}]", each=_EACH),
    Column("residual", "residual", ("Residual", "Residual α={}"), "‖F d − g‖ / ‖g‖ with F damped, for α = 1",
           form="magnitude", optional=True, each=_EACH),
)  # fmt: skip
_FIGURES = (
    Figure("Gradient", "{gradient_norm:4}", ("{gradient:=file}norm, of a file", "norm, of the mean loss"),
           ("{uncovered_share:part} of its square is in parameters that no layer covers, where there is no direction.",
            "Every trainable number has a direction."), "‖g‖ {gradient_norm}"),
    Figure("α = {power}", "{cosine:cosine}", "cosine to the gradient; gᵀF^(−α)g = {inner:3}", "Norm {norm:3}; a step "
           "of 1 goes as far along the gradient as plain descent with a learning rate of {effective_step:3}.",
           ("α = {power:given}: cosine {cosine:cosine}, gᵀd {inner}", "α = {power:given}: cosine –, gᵀd {inner}"),
           each="directions"),
    Figure(line="{uncovered_share:part} of ‖g‖² in parameters that are not covered, where there is no direction"),
    Figure(line="λ below the precision of the factors in {below_rounding:layer|layers}"),
)  # fmt: skip


def _sentence(options: Mapping[str, Any]) -> str:
    given = options["power"]
    powers = [f"{power:g}" for power in (given if isinstance(given, (list, tuple)) else [given])]
    gradient = "the gradient of the mean loss" if options["gradient"] is None else "a given gradient"
    damped = {"exact": "F + λI", "factored": "(G + λ_G I) ⊗ (A + λ_A I)", "none": "F, undamped"}[options["damping"]]
    of = "F = G ⊗ A" if options["of"] == "kfac" else "F of EK-FAC"
    return f"{gradient} times the power −α of {damped}, with {of} and α = {join_phrases(powers)}"


NATURAL_GRADIENT = Analysis(
    kind="natural_gradient",
    title="Natural gradient",
    description="The loss gradient times a power of the damped curvature: norms, angles, steps, and the direction.",
    implementation="engine.analyses.natural_gradient:NaturalGradient",
    params=NaturalGradientParams,
    metrics=NaturalGradientMetrics,
    summary=NaturalGradientSummary,
    offers=("directions",),
    columns=_COLUMNS,
    figures=_FIGURES,
    sentence=_sentence,
)
