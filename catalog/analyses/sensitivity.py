"""`sensitivity`: how each format of each layer's weights would change the loss, and the best within bytes."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from catalog.analyses.analysis import SHAPE, Analysis, Column, Coverage, Figure, join_phrases
from catalog.brief import Brief
from catalog.record import FieldError, record

WeightFormat = Literal["int8", "int4", "int4_group", "fp8", "2:4", "low_rank"]
"""Formats of a weight: whole numbers of 8 or 4 bits with a scale for each row, or for each group of columns of a row;
8-bit floating point (E4M3) with a scale for each row; the two largest of each four columns in 16 bits; two factors of a
rank in 16 bits."""


@record
class SensitivityParams:
    """Options of the sensitivity."""

    formats: tuple[WeightFormat, ...] = ("int8", "int4", "int4_group", "fp8", "2:4")
    """Formats that are tried on each layer. `int8`, `int4`: rounded, with a scale for each row (an output, or an entry
    of a table); `int4_group`: with one for each `group` columns of a row; `fp8`: E4M3 with a scale for each row; `2:4`:
    the two largest of each four columns; `low_rank`: of `rank`. Scales and what is not rounded are counted as 16
    bits."""
    group: int = 128
    """Columns of a group of `int4_group`."""
    rank: int = 16
    """Rank of `low_rank`."""
    budget: float | None = None
    """Bytes that all weights together may take, as a share of what they take in 16 bits; null chooses nothing."""
    decomposition: ClassVar[Literal["none"]] = "none"
    """Parts of the eigendecompositions that are asked for: none, since products with A and G are all it takes."""
    needs_model: ClassVar[str] = "sensitivity"
    """The option that needs the model's weights."""

    def __post_init__(self) -> None:
        """Refuse numbers outside their meaning."""
        if not self.formats:
            raise FieldError("formats", "is empty; name at least one, such as `int4`")
        if len(set(self.formats)) != len(self.formats):
            raise FieldError("formats", "names a format twice; name each once")
        for name, least in (("group", 2), ("rank", 1)):
            if getattr(self, name) < least:
                raise FieldError(name, f"is {getattr(self, name)}; take {least} or more")
        if self.budget is not None and not (math.isfinite(self.budget) and 0 < self.budget <= 1):
            raise FieldError("budget", f"is {self.budget}; take a share of the 16-bit weights above 0 and up to 1")


@record
class FormatChange:
    """One format of one layer."""

    format: str
    """The format."""
    total_bytes: int
    """Bytes of the layer's weights in it, the bias in 16 bits."""
    relative_error: float
    """‖δW‖ over ‖W‖."""
    quadratic: float
    """½ tr(G δW A δWᵀ)."""
    linear: float
    """gᵀδW, g the gradient of the mean loss at the data's labels; 0 of an embedding, which has none."""
    predicted: float
    """Their sum: the predicted change of the mean loss."""


@record
class SensitivityMetrics(Brief):
    """One layer."""

    bytes_16: int
    """Bytes of its numbers in 16 bits."""
    changes: tuple[FormatChange, ...]
    """The formats that were tried; none of a layer that keeps its 16 bits."""
    kept_since: str | None
    """Why it keeps them; null where formats were tried."""
    least: str | None
    """The format with the smallest predicted change."""
    least_predicted: float | None
    """That change."""
    most_predicted: float | None
    """The largest change of any format."""


@record
class ChosenFormat:
    """The format of one layer within the budget."""

    layer: str
    """The layer."""
    format: str
    """The format; `16 bits` where it keeps them."""


@record
class FormatTotal:
    """One format on all layers that it was tried on."""

    format: str
    """The format."""
    layers: int
    """Layers."""
    total_bytes: int
    """Bytes of them."""
    predicted: float
    """Sum of the predicted changes."""


@record
class SensitivitySummary(Brief):
    """The whole model."""

    coverage: Coverage
    """Parameters that are covered and that are not, with reasons."""
    layers: int
    """Layers that are covered."""
    bytes_16: int
    """Bytes of all trainable parameters in 16 bits."""
    formats: tuple[FormatTotal, ...]
    """Each format on all layers."""
    budget_bytes: int | None
    """Bytes that the weights may take; null without `budget`."""
    chosen: tuple[ChosenFormat, ...] | None
    """The format of each layer with the smallest sum of predicted changes within the budget; null without one."""
    chosen_bytes: int | None
    """Bytes of the model so, parameters without a format in 16 bits."""
    chosen_predicted: float | None
    """Sum of the predicted changes."""
    slack_bytes: int | None
    """0 where the choice is the best within the budget; else it is at least as good as the best within so many bytes
    less."""


_COLUMNS = (
    SHAPE,
    Column("metrics.least", "best", "Best format", "The format with the smallest predicted change", form="text"),
    Column("metrics.least_predicted", "Δ best", "Smallest change", "Predicted change of the loss in the best format"),
    Column("metrics.most_predicted", "Δ worst", "Largest change", "Predicted change of the loss in the worst format",
           relative=True),
    Column("predicted", "Δ {}", "Δ {}", "Predicted change of the mean loss", each="metrics.changes.format"),
)  # fmt: skip
_FIGURES = (
    Figure("{format}", "{predicted:4}", "{layers:layer|layers}, {total_bytes:bytes}",
           "Predicted change of the mean loss with every layer in this format.",
           "{format} {predicted:3}", each="formats"),
    Figure("Within the budget", "{chosen_predicted:4}", "{chosen_bytes:bytes} of {budget_bytes:bytes}",
           "Predicted change of the mean loss with the chosen format of each layer.",
           "chosen {chosen_predicted:3} in {chosen_bytes:count} bytes"),
)  # fmt: skip


def _sentence(options: Mapping[str, Any]) -> str:
    formats = join_phrases([str(each) for each in options["formats"]])
    return f"the change of the mean loss, to second order by K-FAC, of each layer's weights in {formats}"


SENSITIVITY = Analysis(
    kind="sensitivity",
    title="Sensitivity",
    description="Predict how each layer's weights in fewer bits change the loss, and choose within a byte budget.",
    implementation="engine.analyses.sensitivity:Sensitivity",
    params=SensitivityParams,
    metrics=SensitivityMetrics,
    summary=SensitivitySummary,
    columns=_COLUMNS,
    figures=_FIGURES,
    sentence=_sentence,
    damped=False,
)
