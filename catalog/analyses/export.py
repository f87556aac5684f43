"""`export`: the factors of each layer in the file of another tool, with its convention written down."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from catalog.analyses.analysis import SHAPE, Analysis, Column, Coverage, Figure
from catalog.brief import Brief
from catalog.field_errors import near_names
from catalog.record import FieldError, record

ExportFormat = Literal["gptq", "corda", "laplace", "kronfluence", "mom2"]
"""Tools whose files can be written."""
EXPORT_FILES: Mapping[ExportFormat, str] = {
    "gptq": "gptq.safetensors",
    "corda": "corda.pt",
    "laplace": "laplace.pt",
    "kronfluence": "kronfluence.zip",
    "mom2": "mom2.zip",
}
"""The file of each format; as an artifact it lies below `export/`."""
_MOST_PATTERNS = 1000


@record
class ExportParams:
    """Options of the export."""

    format: ExportFormat = "gptq"
    """`gptq`: the Hessian 2·A of GPTQ and the Cholesky factor of its damped inverse; `corda`: A, as PEFT's CorDA reads
    it; `laplace`: the Kronecker factors of laplace-torch; `kronfluence`: its sums and counts; `mom2`: the second
    moments of ROME and MEMIT."""
    without: tuple[str, ...] = ()
    """Layers to leave out, by name; `*` stands for any characters. Without it a layer that the format cannot hold is
    refused by name."""
    likelihood: Literal["classification", "regression"] | None = None
    """That of laplace-torch, which `laplace` needs: `classification` for factors of `cross_entropy`, `regression` for
    those of `mse`."""
    outputs: int | None = None
    """The number of the model's outputs, which `laplace` needs; left out, it is that of the head, where the factors
    show it."""
    decomposition: ClassVar[Literal["none"]] = "none"
    """Parts of the eigendecompositions that are asked for: none; GPTQ's are those of A without the bias."""

    def __post_init__(self) -> None:
        """Refuse options that contradict the format."""
        if len(self.without) > _MOST_PATTERNS:
            raise FieldError("without", f"holds {len(self.without)} names; take at most {_MOST_PATTERNS}, with `*`")
        if "" in self.without:
            raise FieldError("without", "holds an empty name; give names of layers")
        if self.outputs is not None and self.outputs < 1:
            raise FieldError("outputs", f"is {self.outputs}; give the number of the model's outputs, 1 or more")
        for name, value in (("outputs", self.outputs), ("likelihood", self.likelihood)):
            if self.format != "laplace" and value is not None:
                raise FieldError(
                    name, f"is an option of `format: laplace`, and `{self.format}` is asked for; leave it out"
                )
        if self.format == "laplace" and self.likelihood is None:
            raise FieldError("likelihood", "is missing; `laplace` needs classification or regression")


def left_out(without: Sequence[str], layers: Sequence[str]) -> set[str]:
    """Return the names of the layers that an export leaves out.

    Args:
        without: `export.without`.
        layers: Names of all layers that are covered.

    Raises:
        FieldError: If a name fits none of the layers, or no layer remains.
    """
    for pattern in without:
        if not any(is_named(name, (pattern,)) for name in layers):
            raise FieldError(
                "without",
                f"holds {pattern[:200]!r}, which is the name of no layer that is covered; give names of layers, or "
                f"leave it out{near_names(pattern, layers)}",
            )
    named = {name for name in layers if is_named(name, tuple(without))}
    if without and len(named) == len(layers):
        raise FieldError("without", f"leaves no layer to export: it fits all {len(layers)}; leave out fewer")
    return named


def is_named(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a layer's name is one of these, in which `*` stands for any characters."""
    return any(_fits_one(name, pattern.split("*")) for pattern in patterns)


def _fits_one(name: str, parts: list[str]) -> bool:
    """Whether a name is these parts with anything between them; in one go, however many there are."""
    first, *others = parts
    if not others:
        return name == first
    if not name.startswith(first):
        return False
    place = len(first)
    for part in others[:-1]:
        found = name.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return len(name) - len(others[-1]) >= place and name.endswith(others[-1])


@record
class ExportMetrics(Brief):
    """One layer."""

    entries: tuple[str, ...]
    """Names in the file; empty of a layer that was to be left out."""
    count: float | None
    """Positions that A is the mean over; null of factors that do not say."""
    cut_share: float | None
    """Share of the Frobenius norm that the format has no place for: of A in the bias's row and column, of a block
    between its parameters; null where nothing is cut off."""
    damping: float | None
    """λ of GPTQ: the smallest with which H + λ I has a condition number within `stabilisation.kappa_max`."""
    condition: float | None
    """Condition number of GPTQ's H before that; null where it is singular."""


@record
class ExportSummary(Brief):
    """The whole file."""

    coverage: Coverage
    """Parameters that are covered and that are not, with reasons."""
    format: str
    """`export.format`."""
    file: str
    """The artifact."""
    layers: int
    """Layers in the file."""
    left_out: int
    """Layers that were to be left out."""
    total_bytes: int
    """Bytes of the tensors in the file."""
    convention: str
    """The meaning of its numbers."""


_COLUMNS = (
    SHAPE,
    Column("metrics.count", "positions", "Positions", "Positions that A is the mean over"),
    Column("metrics.damping", "λ", "λ", "Damping of GPTQ's Hessian, the smallest that holds the condition number",
           optional=True),
    Column("metrics.condition", "κ", "κ before", "Condition number of GPTQ's Hessian before the damping",
           optional=True),
    Column("metrics.cut_share", "cut off", "Cut off", "Share of the norm that the format has no place for",
           "percent", optional=True),
)  # fmt: skip
_FIGURES = (
    Figure("Exported", "{layers}", "{left_out} left out", "{convention}",
           "{layers:layer|layers} in {file}"),
    Figure("Size", "{total_bytes:bytes}", "{format}", "Bytes of the tensors in the file."),
)  # fmt: skip


def _sentence(options: Mapping[str, Any]) -> str:
    return f"the factors in the format of {options['format']}"


EXPORT = Analysis(
    kind="export",
    title="Export",
    description="Write the factors as a file that GPTQ, CorDA, laplace-torch, kronfluence, ROME or MEMIT reads.",
    implementation="engine.analyses.export:Export",
    params=ExportParams,
    metrics=ExportMetrics,
    summary=ExportSummary,
    columns=_COLUMNS,
    figures=_FIGURES,
    sentence=_sentence,
    damped=False,
)
