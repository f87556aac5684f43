"""An analysis that the menu does not have, and one row of it: what a new analysis writes to be shown."""

from catalog.analyses.analysis import Analysis, Column, Figure
from catalog.record import record


@record
class SharpnessParams:
    steps: int = 20


@record
class SharpnessMetrics:
    largest_eigenvalue: float | None
    step: float | None


@record
class SharpnessSummary:
    layers: int
    largest_eigenvalue: float | None


SHARPNESS = Analysis(
    kind="sharpness",
    title="Sharpness",
    description="The largest eigenvalue of each layer's curvature.",
    implementation="engine.analyses.sharpness:Sharpness",
    params=SharpnessParams,
    metrics=SharpnessMetrics,
    summary=SharpnessSummary,
    columns=(
        Column("metrics.largest_eigenvalue", "λ_max", "Largest eigenvalue", "The bar compares layers", relative=True),
        Column("metrics.step", "step", "Step", "Largest stable learning rate"),
    ),
    figures=(
        Figure(
            "Sharpness", "{largest_eigenvalue:4}", "of {layers:layer|layers}", line="sharpness {largest_eigenvalue}"
        ),
    ),
    sentence=lambda options: f"the largest eigenvalue of each layer's block by {options['steps']} steps",
)
ROW = {
    "kind": "sharpness", "ordinal": 0, "layer": "head", "module": "Linear", "status": "covered", "reason": None,
    "parameters": ["head.weight"], "parameter_count": 5130, "record": None, "observed": None,
    "metrics": {"largest_eigenvalue": 12.5, "step": 0.16},
}  # fmt: skip
