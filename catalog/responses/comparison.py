"""The comparison of jobs: their stored numbers beside each other, and against those of the first."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from catalog.brief import Brief
from catalog.record import canonical_json, plain, record
from catalog.responses.views import JobState, ResultsView

MOST_JOBS = 8
_MOST_LISTED = 4
"""Of a list of records, such as the largest eigenvalues, the first so many are compared."""
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
    results: Sequence[ResultsView], rows: Sequence[Iterable[Any]], kind: str | None = None, metric: str | None = None
) -> ComparisonView:
    """Compare jobs by what they have stored.

    Args:
        rows: Rows of each job: records with `kind`, `layer`, `ordinal` and `metrics`.
        kind: Only this analysis; None for all.
        metric: Only the number of this path; None for all.
    """
    found = [_by_name(row for row in of_job if kind in (None, row.kind)) for of_job in rows]
    named = [dict.fromkeys(key[1] for key in of_job) for of_job in found]
    jobs, layers = [], []
    for result, own in zip((each.job for each in results), named, strict=True):
        only = tuple(name for name in own if not all(name in others for others in named))
        jobs.append(ComparedJob(id=result.id, name=result.name, state=result.state, only=only))
    for key in _all(found):
        of_layer = [of_job.get(key) for of_job in found]
        metrics = _metrics([row and row.metrics for row in of_layer], metric)
        ordinals = tuple(row and row.ordinal for row in of_layer)
        layers.append(ComparedLayer(kind=key[0], layer=key[1], ordinals=ordinals, metrics=metrics))
    kinds = [each for each in _all([each.summary for each in results]) if kind in (None, each)]
    documents = [{name: canonical_json(value) for name, value in _leaves(plain(each.job.document))} for each in results]
    fields = {name: tuple(each.get(name) for each in documents) for name in _all(documents)}
    return ComparisonView(
        jobs=tuple(jobs),
        layers=tuple(layers),
        model={each: _metrics([result.summary.get(each) for result in results], metric) for each in kinds},
        documents={name: values for name, values in fields.items() if len(set(values)) > 1},
    )


def _all(of_jobs: Iterable[Mapping[Any, Any]]) -> list[Any]:
    return list(dict.fromkeys(key for of_job in of_jobs for key in of_job))


def _by_name(rows: Iterable[Any]) -> dict[tuple[str, str, int], Any]:
    """Return rows by analysis, name, and place among those of the same name."""
    found: dict[tuple[str, str, int], Any] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for row in sorted(rows, key=lambda each: (each.kind, each.ordinal)):
        found[row.kind, row.layer, seen[row.kind, row.layer]] = row
        seen[row.kind, row.layer] += 1
    return found


def _metrics(records: Iterable[Any], wanted: str | None) -> dict[str, ComparedMetric]:
    leaves = [dict(_leaves(plain(each))) for each in records]
    numbers = [{name: each for name, each in own.items() if type(each) in (int, float)} for own in leaves]
    made = {}
    for name in (each for each in _all(numbers) if wanted in (None, each)):
        values: list[Any] = [each.get(name) for each in numbers]
        first = values[0]
        differences = [None if None in (first, each) else each - first for each in values]
        ratios = [None if None in (first, each) or not first else each / first for each in values]
        made[name] = ComparedMetric(values=tuple(values), differences=_finite(differences), ratios=_finite(ratios))
    return made


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - JSON
    """Yield what holds no further fields, by its path; a list of bare numbers is one value."""
    records = isinstance(value, list) and value and isinstance(value[0], dict)
    parts = dict(enumerate(value[:_MOST_LISTED])) if records else value
    if not (isinstance(parts, dict) and parts):
        yield path, value
        return
    for name, each in parts.items():
        yield from _leaves(each, f"{path}.{name}".lstrip("."))


def _finite(values: Iterable[Number]) -> tuple[Number, ...]:
    return tuple(None if each is None or not math.isfinite(each) else each for each in values)
