"""`export`: the factors of each layer in the file of another tool, with its convention written down."""

from collections.abc import Mapping
from typing import Any, Literal

from catalog.analyses.analysis import SHAPE, Analysis, Column, Coverage, Figure
from catalog.brief import Brief
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
    """The number of the model's outputs, which `laplace` needs."""

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
            if self.format == "laplace" and value is None:
                wanted = "the number of the model's outputs" if name == "outputs" else "classification or regression"
                raise FieldError(name, f"is missing; `laplace` needs {wanted}")

    @property
    def decomposition(self) -> Literal["none"]:
        """Parts of the eigendecompositions that are asked for: none; GPTQ's are those of A without the bias."""
        return "none"


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
