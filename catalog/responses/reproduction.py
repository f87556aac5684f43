"""Reproduction: a job computed again, held against the run before it, number by number.

Stages are in the order in which they are computed; the first that differs is where the two runs part. Those of a row
are its shape, factors (digests, traces, errors), spectrum (damping, condition numbers, eigenvectors), metrics, and the
rest of its record. A field that one of the two runs lacks is of another version, and not compared; a file that one of
them lacks is a difference, unless none of its files is kept any more.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

from catalog.record import canonical_json, record

Stage = Literal["layers", "factor A", "factor G", "ekfac", "spectrum", "metrics", "record", "summary", "files"]
_SHAPE = ("layer", "module", "status", "reason", "parameters", "parameter_count")
_FACTOR = re.compile(r"(?:digest|trace|scale|relative_variance|relative_standard_error)_([AG])")
_SPECTRUM = re.compile(r"(lambda|kappa|clipped|residual|rungs|digest_eigenvectors)_[AG](_.*)?")
_INPUTS = ("model_sha256", "data_sha256", "factors_sha256", "against_sha256")
_OWN_FILES = ("memory_curve.json", "job.json", "results.json", "run/job.json", "run/results.json")
_INDEX = "factors.index.json"
"""It names files that are compared and facts that rows hold, in a form that versions add facts to."""
_BASES = "factors/bases/"
_CHOICES = "parts micro_batch offload sketched activation_checkpointing corrections rungs placement search training"
_CARD = ("attention", "multiprocessors", "driver", "cublas", "cudnn", "cusolver")
"""Numerics that `not_replayed` has, and the environment of a manifest does not."""


class Run(NamedTuple):
    """A run that has ended, as its folder or the ledger has it; each row is an outcome with what was `observed`."""

    name: str
    manifest: Mapping[str, Any]
    plan: Mapping[str, Any] | None
    rows: Iterable[Mapping[str, Any]]
    summary: Mapping[str, Any]
    files: Mapping[str, str] | None
    """Digests by name; None where they are no longer kept."""


@record
class Difference:
    """A stage in which two runs differ."""

    stage: Stage
    """The stage."""
    analysis: str | None
    """The analysis; null of files."""
    layer: str | None
    """The first layer of the model that differs in this stage; null of summaries and files."""
    field: str
    """The first field that differs there; of files the name."""
    count: int
    """Layers that differ in this stage; or summaries, or files."""
    largest: float | None
    """Largest relative difference |a − b| / max(|a|, |b|) of its numbers; null where only digests or texts differ."""


@record
class Reproduction:
    """The comparison of a run with the one that it reproduces."""

    of: str
    """The job that was computed again, or the folder of the run."""
    equal: bool
    """Whether every layer, summary and file of numbers is the same, to the bit."""
    rows: int
    """Rows that were compared: one per layer and analysis."""
    differences: tuple[Difference, ...]
    """One per stage that differs, in the order in which stages are computed."""
    circumstances: tuple[str, ...]
    """The differences in the record of the two runs, equal or not, such as `threads: 1 then, 2 now`: digests of model
    and data, versions, processor, device, plan."""
    sentences: tuple[str, ...]
    """The same for a reader: the verdict, each further stage, each circumstance."""


def reason_unreproducible(
    state: str, manifest: Mapping[str, Any] | None, then: Mapping[str, Any], now: Mapping[str, Any]
) -> str | None:
    """Return why a job or run of the document ``then`` is not reproduced by the document ``now``; None where it is."""
    if state != "succeeded":
        return f"names a job that is {state}; only one that has succeeded can be reproduced"
    if not manifest or not manifest.get("environment") or "model_sha256" not in manifest:
        return "names a job of an older version, without a manifest to compare with; run its document anew"
    apart = ("reproduces", "name", "labels", "schedule")
    changed = [name for name in {**then, **now} if name not in apart and then.get(name) != now.get(name)]
    said = f"names a job with another `{', '.join(changed)}`, whose plan this one cannot follow; leave `reproduces` out"
    return said if changed else None


def name_inputs(manifest: Mapping[str, Any]) -> str:
    """Return what is added to the failure of a reproduction, whose inputs may be gone or changed."""
    digests = ", ".join(f"{each} {manifest[each]}" for each in _INPUTS if manifest.get(each))
    return f"; what is reproduced was computed from {digests}"


def compare_runs(original: Run, again: Run) -> Reproduction:
    """Hold a run against the one that it reproduces; all rows of both are kept in memory."""
    before, after = ({(row["kind"], row["ordinal"]): row for row in run.rows} for run in (original, again))
    fields = chain(_row_fields(before, after), _other_fields(original, again))
    differing = [each for each in fields if each[-2] != each[-1]]
    differences: list[Difference] = []
    sentences: list[str] = []
    for stage in get_args(Stage):
        if own := [each for each in differing if each[0] == stage]:
            _, _, analysis, layer, field, _, _ = min(own, key=lambda each: each[1])
            largest = max((number for each in own for number in _distances(*each[-2:])), default=None)
            count = len({each[3] or each[2] or each[4] for each in own})
            named = {"stage": stage, "analysis": analysis, "layer": layer, "field": field}
            differences.append(Difference(**named, count=count, largest=largest))
            where = f" of layer `{layer}`" if layer else f" of {analysis}" if analysis else ""
            much = "" if largest is None else f", largest relative difference {largest:.2g}"
            begun = "then" if sentences else f"differs from {original.name}: first"
            counted = f"{'layers' if layer else 'in all'}: {count:,}"
            sentences.append(f"{begun} {stage}{where}, `{field}` ({counted}{much})")
    shared = _shared(_circumstances(original), _circumstances(again))
    phrases = [f"{name}: {_said(then)} then, {_said(now)} now" for name, then, now in shared if then != now]
    replayed = [each for row in after.values() for each in row["observed"].get("not_replayed", ())]
    circumstances = tuple(dict.fromkeys((*phrases, *(each for each in replayed if each.startswith(_CARD)))))
    files = (_files(original), _files(again))
    compared = "" if None in files else f" and the files (in all: {len(files[0] or ()):,})"
    equal = f"equal to {original.name}: {len(after):,} rows with digests and metrics, the summaries{compared}"
    unexplained = () if circumstances or not differing else ("no recorded circumstance differs",)
    return Reproduction(
        of=original.name,
        equal=not differing,
        rows=len(after),
        differences=tuple(differences),
        circumstances=circumstances,
        sentences=(*(sentences or [equal]), *_said_of_files(*files), *circumstances, *unexplained),
    )


def _row_fields(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield stage, ordinal, analysis, layer, field and the two values of every field of the rows."""
    for kind, ordinal in {**before, **after}:
        then, now = before.get((kind, ordinal), {}), after.get((kind, ordinal), {})
        place = (ordinal, kind, (now or then)["layer"])
        yield from (("layers", *place, name, then.get(name), now.get(name)) for name in _SHAPE)
        for part in ("record", "metrics"):
            for name, *pair in _shared(then.get(part) or {}, now.get(part) or {}):
                factor = _FACTOR.fullmatch(name)
                other = "spectrum" if _SPECTRUM.fullmatch(name) else "ekfac" if "ekfac" in name else part
                yield (f"factor {factor[1]}" if factor else other, *place, name, *pair)


def _other_fields(original: Run, again: Run) -> Iterator[tuple[Any, ...]]:
    for kind, *summaries in _shared(original.summary, again.summary):
        # the peaks of a training, with what the process held before, are those of each run
        fields = (each for each in _shared(*summaries) if not each[0].endswith("_peak_bytes"))
        yield from (("summary", 0, kind, None, *each) for each in fields)
    then, now = _files(original), _files(again)
    if then is not None and now is not None:
        yield from (("files", 0, None, None, name, then.get(name), now.get(name)) for name in {**then, **now})


def _files(run: Run) -> dict[str, str] | None:
    """Return the files that equal runs have alike: not a divided job's for its pieces, nor the folder's own."""
    if run.files is None:
        return None
    alike = (name for name in run.files if name not in _OWN_FILES and not name.endswith(_INDEX))
    return {name: run.files[name] for name in alike if not name.startswith(_BASES)}


def _said_of_files(then: Mapping[str, str] | None, now: Mapping[str, str] | None) -> list[str]:
    """Return sentences on files that were not compared, as one of the runs lacks them."""
    if then is None or now is None:
        return ["no file was compared: those of one run are no longer kept"]
    sides = (("then", then.keys() - now.keys()), ("now", now.keys() - then.keys()))
    return [
        f"files only {when}: {', '.join(sorted(names)[:3])} (in all: {len(names):,})" for when, names in sides if names
    ]


def _shared(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, then[name], now[name]) for name in then if name in now]


def _distances(then: Any, now: Any) -> Iterator[float]:  # noqa: ANN401 - JSON
    """Yield the relative differences of numbers in the same place of two values."""
    if isinstance(then, (int, float)) and isinstance(now, (int, float)) and then != now:
        yield abs(then - now) / max(abs(then), abs(now))
    elif isinstance(then, Mapping) and isinstance(now, Mapping):
        yield from (each for _, *pair in _shared(then, now) for each in _distances(*pair))
    elif isinstance(then, (list, tuple)) and isinstance(now, (list, tuple)):
        yield from (each for pair in zip(then, now, strict=False) for each in _distances(*pair))


def _circumstances(run: Run) -> dict[str, Any]:
    environment = dict(run.manifest.get("environment") or {})
    planned = {f"plan.{name}": value for name, value in (run.plan or {}).items() if name in _CHOICES.split()}
    inputs = {name: run.manifest.get(name) for name in _INPUTS}
    return {**inputs, **environment.pop("packages", {}), **environment, **planned}


def _said(value: Any) -> str:  # noqa: ANN401 - JSON
    return (value if isinstance(value, str) else canonical_json(value))[:200]
