"""An analysis: one entry of the menu with the way it is shown, and the envelope in which it returns its layers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from catalog.brief import Brief
from catalog.record import record
from catalog.responses.layer_record import LayerRecord, Observed

Decomposed = Literal["none", "values", "vectors"]
"""The part of a factor's eigendecomposition that is asked for: nothing, the eigenvalues, or the eigenvectors too."""


def most_decomposed(options: Iterable[Any]) -> Decomposed:
    """Return the most that several analyses ask of the eigendecomposition.

    An options record says so by a property ``decomposition``. An analysis without options is represented by its
    entry of the menu. Whatever does not say asks for the values.

    Args:
        options: One options record, or entry of the menu, per analysis.

    Returns:
        `vectors` if one of them asks for eigenvectors, else `values` if one asks for eigenvalues, else `none`.
    """
    steps: tuple[Decomposed, ...] = ("none", "values", "vectors")
    asked = [steps.index(getattr(each, "decomposition", "values")) for each in options]
    return steps[max(asked, default=0)]


Text = str | tuple[str, ...]
"""A text with fields in it, such as `of {dimension} directions`; or several, of which the first is shown whose fields
are known. A field is a path in the record, and may name its form: `{trace:4}` has 4 digits on the page,
`{passes:pass|passes}` counts what is not 0, `{gradient:=file}` shows nothing and is known where the value is `file`,
`{low:-}` is a dash where the value is null. Other forms: `percent`, `portion` (not rounded up to a whole), `part` (a
percentage that is not 0), `cosine`, `bytes`, `count` (all digits), `given` (as asked for), `unquoted` (of a JSON text),
`names` (of layers) and `some` (five of them)."""
Heading = str | tuple[str, str | None] | None
"""A heading, null without a column; or the heading for a list of one and the one for a longer list. `{}` is the key of
the list's element."""


@dataclass(frozen=True)
class Column:
    """A column of the layer table; a row without the value has a dash."""

    value: str | Callable[[Any], Any]
    """Path in the row, such as `metrics.trace`; of several, parted by `|`, the first that is not null. A function of
    the row is for the terminal alone."""
    short: Heading = None
    """Heading on a terminal."""
    heading: Heading = None
    """Heading on the page."""
    title: str = ""
    """Explanation of the heading, on the page."""
    form: Literal["number", "percent", "cosine", "magnitude", "fraction", "bytes", "text"] = "number"
    """`magnitude`: one digit on a terminal; `fraction`: there with `whole` beside it."""
    counted: str | None = None
    """Path of a count: where it is known and the value is not, the value is infinite."""
    whole: str | int | None = None
    """Path of the number, or the number, of which the page's bar shows the value's share."""
    relative: bool = False
    """Whether the page's bar compares the layers."""
    note: str | None = None
    """Text of a star on the page."""
    converging: bool = False
    """Whether a star marks the metric where `metrics.convergence` says that it has not converged."""
    optional: bool = False
    """Whether the column is left out where no row has the value."""
    each: str | None = None
    """Path of a list and of its elements' key: there is a column for each element, in which the paths begin."""


@dataclass(frozen=True)
class Figure:
    """A figure of the whole model: a card of the page, a part of the terminal's closing line, or both."""

    name: str | None = None
    """Name of the card; null where there is none."""
    value: str = ""
    """The card's number."""
    note: Text = ""
    """The line below it."""
    text: Text = ""
    """A sentence that explains it."""
    line: Text = ()
    """The part of the closing line."""
    each: str | None = None
    """Path of a list, each element of which has the figure."""
    joined: str = ""
    """The part of the closing line in which `{}` stands for those of all elements."""


def _shape(row: Any) -> str | None:  # noqa: ANN401 - a row of the results
    known = row.record is not None and row.record.in_dim is not None
    return f"{row.record.in_dim}×{row.record.out_dim}" if known else None


SHAPE = Column(_shape, "A×G")
"""Rows of A and of G; on the page every table has them."""


def join_phrases(parts: Sequence[str]) -> str:
    """Return phrases as a list in a sentence."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


@record
class AnalysisStage:
    """A stage that an analysis reports while it works."""

    name: str
    planned: str | None = None
    """The stage of the plan that holds its bytes and seconds; null where it takes next to nothing of its own."""
    share: float = 1.0
    """Part of the analysis's progress, beside that of its other stages."""
    before_decomposition: bool = False
    """Whether it comes before any factor is decomposed."""
    announced_by: tuple[str, ...] = ()
    """Path in the plan of what stands there only if this stage will come; empty where it always does."""


@record
class Analysis:
    """An analysis that can be asked for. Everything else about it is derived from this entry."""

    kind: str
    title: str
    description: str
    implementation: str
    """`package.module:Class` of the engine, a ``LayerAnalysis``; the child that runs the job resolves it."""
    params: type | None
    """Options, in a block named after the kind; none where the common blocks say it all."""
    metrics: type
    """Results of one layer."""
    summary: type
    """Results of the whole job."""
    decomposition: Decomposed = "values"
    """What is asked of the factors where there are no options to say so."""
    inputs: tuple[str, ...] = ("model", "data", "task")
    """Blocks of the document that it computes from. One that takes no model collects nothing, and stands alone."""
    data_sources: tuple[str, ...] = (
        "builtin", "huggingface", "file", "upload", "synthetic", "factory"
    )  # fmt: skip
    """Sources of data that it reads."""
    estimate: str = "engine.estimate:estimate"
    """`package.module:callable` of the engine that plans a job of it from shapes alone."""
    unit: str = "layer"
    """The noun that a row is of."""
    stages: tuple[AnalysisStage, ...] = ()
    """In order; the one that is named after the kind goes through the layers. Empty: that one alone."""
    layerwise: bool = False
    """Whether it reads of each layer no more than the rank has that the layer belongs to."""
    keeps_factors: bool = False
    """Whether it keeps the factors whether or not `keep` names them."""
    offers: tuple[str, ...] = ()
    """Artifacts that `keep` may name only where this analysis is asked for."""
    takes_matrix: Literal["symmetric", "any"] | None = None
    """The single matrices of files that it takes in place of a model's factors; null where it takes none."""
    columns: tuple[Column, ...] = ()
    """Columns of its layers; without any, they are named after the first numbers of `metrics`."""
    figures: tuple[Figure, ...] = ()
    """Figures of its summary; without any, the page has a card for each number of `summary`."""
    sentence: str | Callable[[Mapping[str, Any]], str] = ""
    """What is computed, as a noun phrase of the methods paragraph; or a function that says it of the options."""
    works: Callable[[Mapping[str, Any]], tuple[str, ...]] | None = None
    """BibTeX entries of what it uses, by its options; null for those of a collection."""
    log_row: Callable[[Mapping[str, Any]], str] | None = None
    """Text of a row in the log, by its metrics; null for the log of a layer's curvature."""
    log_summary: Callable[[Mapping[str, Any]], str] | None = None
    """Closing text of the log, by the summary; null for that of a collection."""
    damped: bool = True
    """Whether damping enters it; a page shows one that it does not enter after the others."""
    opens: bool = False
    """Whether a page opens the layers of this analysis first."""

    @property
    def collects(self) -> bool:
        """Whether it measures the curvature of a model that it is given."""
        return "model" in self.inputs


@record
class LayerResult(Brief, shown=("kind", "layer", "module", "status", "reason", "parameter_count", "metrics")):
    """One row of the results."""

    kind: str
    ordinal: int
    """Position in the model, from 0; declared layers follow the covered ones."""
    layer: str
    """Qualified module name."""
    module: str
    """Class of the module."""
    status: Literal["covered", "zero_curvature", "declared"]
    """`declared`: this layer's parameters are trainable and not covered, for the reason given."""
    reason: str | None
    parameters: tuple[str, ...]
    parameter_count: int
    metrics: Any
    """The analysis's own record; null for a declared layer."""
    record: LayerRecord
    observed: Observed


@record
class RefusedAnalysis:
    """An analysis that could not be done where others of its job were: their results stand without it."""

    kind: str
    """The analysis."""
    code: str
    """Stable name of the failure."""
    message: str
    """What must hold, what was found and the remedy."""
    pointer: str | None
    """JSON pointer into the document, where a field is to blame."""
    layer: str | None
    """The layer that it was refused for, where it was one."""


@record
class LookedAt:
    """In how many batches the self-check looked at what ran, over all passes and ranks."""

    signatures: int = 0
    """Batches whose calls and graph were compared with those of the batches before."""
    glances: int = 0
    """Batches of which one example's outputs were held against the example alone."""
    full: int = 0
    """Batches of which one example's rows were held against plain autograd."""
    no_glance: str | None = None
    """Why batches got no glance; null where they did."""


CoverageKind = Literal["block", "diagonal", "sketched", "covered", "not_covered"]
"""The form in which the curvature of parameters is kept. `block`: all of their layer's block, as two Kronecker factors
or as it is; `diagonal`: of the block, or of its factor G, the diagonal alone; `sketched`: G as a diagonal and a sketch;
`covered`: one of these, of a job that does not say which; `not_covered`: none."""


@record
class NamedParameters:
    """Parameters of one layer, or of one module that is not covered, by name."""

    names: tuple[str, ...]
    """Qualified names, four at most."""
    module: str
    """Class of the module."""
    why: str | None
    """The operation that keeps them from a fuller form, or why there is none; null where the reason says so."""


@record
class CoveragePart:
    """Trainable parameters that are covered in one form, or not covered for one reason."""

    kind: CoverageKind
    """The form."""
    reason: str | None
    """Why they are not covered; null for those that are."""
    parameters: int
    """The count of their numbers."""
    layers: int
    """Layers, or rows of what is not covered, that they are in."""
    named: tuple[NamedParameters, ...]
    """Those of the first eight of these layers or rows; empty for `block` and `covered`."""


@record
class StarvedExpert:
    """An expert's layer with a factor that fewer rows entered than it has columns: singular by counting."""

    layer: str
    """Its name."""
    tokens: int
    """Positions that its router sent to it."""
    factor: str
    """`A` or `G`: the one that lacks the most."""
    rank_bound: int
    """The most that the factor's rank can be: the rows that entered it."""
    columns: int
    """Columns of the factor, that of ones included."""
    times_more: float
    """The factor by which more data, routed alike, bring as many rows as columns."""


@record
class ExpertTokens:
    """The tokens that experts were sent; those of each stand in its layers' records, as `positions`."""

    layers: int
    """Layers of experts, with those that no token reached."""
    fewest: int
    """Tokens of the layer that got the fewest."""
    most: int
    """Tokens of the layer that got the most."""
    starved: int
    """Layers that tokens reached, but too few for full rank."""
    most_starved: tuple[StarvedExpert, ...]
    """The first eight of them, the one that needs the most data first."""
    unreached: int
    """Layers that no token reached."""
    unreached_layers: tuple[str, ...]
    """The first 64 of them by name."""


@record
class Coverage(Brief):
    """Every trainable parameter is covered or declared; nothing is skipped silently."""

    trainable_parameters: int
    """All trainable parameters."""
    covered_parameters: int
    """Those of covered layers."""
    declared_parameters: int
    """Those that no layer covers."""
    covered_share: float
    """Covered over trainable parameters."""
    layers_covered: int
    """Layers that are covered."""
    layers_declared: int
    """Rows of layers that are not covered."""
    reasons: Mapping[str, int]
    """Declared parameters by reason."""
    gradient_identity: float | None
    """The largest relative difference, over all covered layers, between the rows of an example and its gradient
    alone; null where `collection.self_check` is `off` or the factors came without a model."""
    examples_checked: int | None
    """Examples that the layer with the fewest was held against; 0 where a model draws random numbers."""
    looked_at: LookedAt | None
    """Batches that the self-check looked at, and how; null where `examples_checked` is."""
    parts: tuple[CoveragePart, ...] | None = None
    """The same parameters by the form in which their curvature is kept, and by reason; null in older summaries."""
    experts: ExpertTokens | None = None
    """The tokens that each expert was sent; null of a model without experts, and in older summaries."""
