"""The view of a series: its checkpoints in order, their stored numbers, and the overlaps of neighbours."""

from collections.abc import Mapping
from typing import Any

from catalog.brief import Brief
from catalog.record import record
from catalog.responses.comparison import ComparedLayer, ComparedMetric
from catalog.responses.views import JobState


@record
class SeriesPoint(Brief):
    """One checkpoint."""

    model: str
    """Its path or revision."""
    job: str
    """The job that measures it."""
    state: JobState
    """The state of that job."""
    failure: str | None
    """Why it failed."""
    largest: Mapping[str, float]
    """λ_max of the whole model, by curvature: those of `spectrum`, or `kfac` by `capacity`."""
    stable_below: float | None
    """2/learning_rate: the edge of stability for λ_max of the Hessian."""


@record
class SeriesOverlap(Brief):
    """Two neighbours."""

    index: int
    """Place of the later one in `points`, from 1."""
    job: str
    """The job that compares its factors with those of the one before."""
    state: JobState
    """The state of that job."""
    failure: str | None
    """Why it failed."""
    overlaps: Mapping[str, float | None]
    """Mean overlap of the k leading eigenvectors over layers, by k: 1 where they span the same, 0 where orthogonal."""
    relative_distance: float | None
    """`‖F₁ − F₀‖ / ‖F₀‖`, F₀ that of the one before."""


@record
class SeriesView(Brief):
    """A series so far."""

    job: str
    """The series."""
    state: JobState
    """Its state."""
    points: tuple[SeriesPoint, ...]
    """The checkpoints, in order."""
    overlaps: tuple[SeriesOverlap, ...]
    """The overlaps of each two neighbours that have both succeeded, once all checkpoints have ended."""
    model: Mapping[str, Mapping[str, ComparedMetric]]
    """Every number of the checkpoints' summaries, by analysis and path; differences and ratios are to the first."""
    layers: tuple[ComparedLayer, ...]
    """The number that `metric` names, by layer; none without it."""


def largest_eigenvalues(summaries: Mapping[str, Any]) -> dict[str, float]:
    """Return λ_max of the whole model by curvature, from the summaries of a job as JSON."""
    found: dict[str, float] = {}
    for summary in summaries.values():
        model = summary.get("model")
        if isinstance(model, Mapping) and model.get("spectral_norm") is not None:
            found["kfac"] = model["spectral_norm"]
        for curvature in summary.get("curvatures") or ():
            for each in (curvature.get("largest") or ())[:1]:
                found[curvature["of"]] = each["value"]
    return found
