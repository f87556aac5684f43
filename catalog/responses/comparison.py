"""The comparison of jobs: their stored numbers beside each other, and against those of the first."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from catalog.brief import Brief
from catalog.record import canonical_json, record
from catalog.responses.views import JobState, JobView

MOST_JOBS = 8
_MOST_LISTED = 4
"""Most records of a list, such as the largest eigenvalues, that are compared."""
Number = float | None


@record
class ComparedJob(Brief):
    """One of the jobs."""

    id: str
    """Its id; of a foreground run its folder."""
    name: str | None
    """The caller's own name of it."""
    state: JobState
    """One that has not ended is compared by what it has so far."""
    only: tuple[str, ...]
    """Layers that it has and another of the jobs has not, by name."""


@record
class ComparedMetric(Brief):
    """One number, of each job in their order."""

    values: tuple[Number, ...]
    """As stored; null where a job has none."""
    differences: tuple[Number, ...]
    """The value less the first job's."""
    ratios: tuple[Number, ...]
    """The value over the first job's; null where that is 0."""


@record
class ComparedLayer(Brief):
    """One layer by one analysis."""

    kind: str
    """The analysis."""
    layer: str
    """Its name."""
    ordinals: tuple[int | None, ...]
    """Its position in each job's model; null where a job has no such layer."""
    metrics: Mapping[str, ComparedMetric]
    """Every number that one of the jobs has, by its path in the row's metrics: `trace`, `kfac.largest.0.value`."""


@record
class ComparisonView(Brief):
    """Jobs beside each other; the first is the reference."""

    jobs: tuple[ComparedJob, ...]
    """In the order in which they were asked for."""
    layers: tuple[ComparedLayer, ...]
    """Every layer that one of them has."""
    model: Mapping[str, Mapping[str, ComparedMetric]]
    """Every number of the summaries, by analysis and path."""
    documents: Mapping[str, tuple[str | None, ...]]
    """Fields that differ, by path (`collection.seed`), as JSON; null where a document has no such field."""


def compare(
    jobs: Sequence[tuple[JobView, Mapping[str, Any]]],
    rows: Sequence[Iterable[Any]],
    kind: str | None = None,
    metric: str | None = None,
) -> ComparisonView:
    """Compare jobs by what they have stored.

    Args:
        jobs: Each with its summaries by analysis.
        rows: Rows of each job: records with `kind`, `layer`, `ordinal` and `metrics`.
        kind: Only this analysis; None for all.
        metric: Only the number of this path; None for all.
    """
    found = [_by_name((row for row in of_job if kind in (None, row.kind)), metric) for of_job in rows]
    named = [dict.fromkeys(key[1] for key in of_job) for of_job in found]
    compared, layers = [], []
    for (job, _), own in zip(jobs, named, strict=True):
        only = tuple(name for name in own if not all(name in others for others in named))
        compared.append(ComparedJob(id=job.id, name=job.name, state=job.state, only=only))
    for key in _all(found):
        of_layer: list[tuple[int | None, dict[str, Any]]] = [of_job.get(key, (None, {})) for of_job in found]
        ordinals, metrics = tuple(ordinal for ordinal, _ in of_layer), _metrics([numbers for _, numbers in of_layer])
        layers.append(ComparedLayer(kind=key[0], layer=key[1], ordinals=ordinals, metrics=metrics))
    summaries = [summary for _, summary in jobs]
    kinds = [each for each in _all(summaries) if kind in (None, each)]
    # labels may have been edited since the document was submitted
    asked = [{**job.document, "labels": job.labels} for job, _ in jobs]
    documents = [{name: canonical_json(value) for name, value in _leaves(each)} for each in asked]
    fields = {name: tuple(each.get(name) for each in documents) for name in _all(documents)}
    return ComparisonView(
        jobs=tuple(compared),
        layers=tuple(layers),
        model={each: _metrics([_numbers(summary.get(each), metric) for summary in summaries]) for each in kinds},
        documents={name: values for name, values in fields.items() if len(set(values)) > 1},
    )


def _all(of_jobs: Iterable[Mapping[Any, Any]]) -> list[Any]:
    return list(dict.fromkeys(key for of_job in of_jobs for key in of_job))


def _by_name(rows: Iterable[Any], metric: str | None) -> dict[tuple[str, str, int], tuple[int, dict[str, Any]]]:
    """Return place and numbers of rows by analysis, name, and place among those of the same name."""
    # of each row no more is held than that: there may be thousands
    kept = [(row.kind, row.ordinal, row.layer, _numbers(row.metrics, metric)) for row in rows]
    found: dict[tuple[str, str, int], tuple[int, dict[str, Any]]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for kind, ordinal, layer, numbers in sorted(kept, key=lambda each: each[:2]):
        found[kind, layer, seen[kind, layer]] = ordinal, numbers
        seen[kind, layer] += 1
    return found


def _numbers(record: Any, wanted: str | None) -> dict[str, Any]:  # noqa: ANN401 - a record, or JSON
    leaves = ((name, value) for name, value in _leaves(record) if wanted in (None, name))
    return {name: value for name, value in leaves if type(value) in (int, float)}


def _metrics(numbers: Sequence[Mapping[str, Any]]) -> dict[str, ComparedMetric]:
    made = {}
    for name in _all(numbers):
        values: list[Any] = [each.get(name) for each in numbers]
        first = values[0]
        differences = [None if None in (first, each) else each - first for each in values]
        ratios = [None if None in (first, each) or not first else each / first for each in values]
        made[name] = ComparedMetric(values=tuple(values), differences=_finite(differences), ratios=_finite(ratios))
    return made


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - a record, or JSON
    """Yield what holds no further fields, by its path; a list of bare numbers is one value."""
    parts = vars(value) if is_dataclass(value) else value
    if isinstance(parts, (list, tuple)) and parts and (isinstance(parts[0], dict) or is_dataclass(parts[0])):
        parts = dict(enumerate(parts[:_MOST_LISTED]))
    if not (isinstance(parts, Mapping) and parts):
        yield path, value
        return
    for name, each in parts.items():
        yield from _leaves(each, f"{path}.{name}".lstrip("."))


def _finite(values: Iterable[Number]) -> tuple[Number, ...]:
    return tuple(None if each is None or not math.isfinite(each) else each for each in values)
