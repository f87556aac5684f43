"""The folder of a foreground run, read as the results of a job: `job.json` and `results.json`."""

import contextlib
import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from catalog import DOCUMENT
from catalog.record import FieldError, canonical_json, plain
from catalog.record_reader import read
from catalog.responses.coverage import assess_coverage
from catalog.responses.views import ResultsView
from kronoscope.client.errors import ClientError
from kronoscope.client.responses import Layer, build_layer, build_results, build_summary

_FORMAT = "kronoscope.run/1"
_MANIFEST: Mapping[str, type] = {
    "environment": dict,
    "model_sha256": str,
    "data_sha256": str,
    "factors_sha256": str,
    "against_sha256": str,
    "examples": int,
    "refused": list,
    "reading": dict,
    "adapters": list,
    "reproduction": dict,
}
"""The fields of a manifest with their kinds; each may be null, or missing."""


class NoRun(ValueError):
    """A folder that holds no results of a run; the message says what to do."""


def read_run(folder: Path) -> tuple[ResultsView, list[Layer]]:
    """Read what a run has written; ``NoRun`` if it has not ended, or one of its files is damaged."""
    job = read_json(folder, "job.json")
    if job.get("format") != _FORMAT:
        raise NoRun(f"{folder / 'job.json'} is not of the format {_FORMAT}; give the folder of a `kronoscope run`")
    stated = _require(folder / "job.json", job, "document", dict)
    state = _require(folder / "job.json", job, "state", str)
    if state == "running" and not (folder / "results.json").exists():
        raise NoRun(_unfinished(folder))
    results = read_json(folder, "results.json")
    try:
        record = read(DOCUMENT, stated, "document")
    except FieldError as error:
        raise NoRun(f"{folder / 'job.json'} holds a document that this version does not read: {error}") from error
    # as a service stores it: what is computed, not when, and not what it is called
    document = {name: value for name, value in plain(record).items() if name not in ("name", "schedule")}
    summary = _require(folder / "results.json", results, "summary", dict)
    for kind in summary:
        _require(folder / "results.json", summary, kind, dict, "summary.")
    rows = _require(folder / "results.json", results, "layers", list)
    with _damage_of(folder / "results.json", "summary"):
        coverage = assess_coverage(summary, record.collection.min_coverage)
        for kind, each in summary.items():
            build_summary(kind, each)
    view = {
        "id": str(folder),
        "state": state,
        "kinds": list(record.kinds),
        "document": document,
        "labels": document["labels"],
        "document_sha256": hashlib.sha256(canonical_json(document).encode()).hexdigest(),
        "coverage": None if coverage is None else plain(coverage),
        "refused": job.get("refused") or [],
        "notices": job.get("notices") or [],
        "failure": job.get("failure"),
        "plan": job.get("plan"),
        "started_at": job.get("started_at"),
        "finished_at": job.get("finished_at"),
    }
    _require_seal(folder / "results.json", "summary", summary, job.get("summary_sha256"))
    _require_manifest(folder / "job.json", job)
    with _damage_of(folder / "job.json"):
        made = build_results(
            {
                "job": view,
                "summary": summary,
                "manifest": {name: job[name] for name in _MANIFEST if name in job},
                "artifacts": job.get("artifacts") or [],
            }
        )
    layers = []
    for place, row in enumerate(rows):
        with _damage_of(folder / "results.json", f"layers[{place}]"):
            layers.append(build_layer(row))
        outcome = {name: value for name, value in row.items() if name not in ("observed", "sha256")}
        _require_seal(folder / "results.json", f"layers[{place}]", outcome, row.get("sha256"))
    return made, layers


_JSON_NAMES: Mapping[type, str] = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}
_REMEDY = "the file is damaged: run the document again, or restore the file from a copy"


def _require(file: Path, value: Mapping[str, Any], name: str, kind: type, prefix: str = "") -> Any:  # noqa: ANN401 - JSON
    """Return a field of a file that must be of a kind of JSON."""
    found = value.get(name)
    if not isinstance(found, kind):
        got = f"got {json.dumps(found):.60}" if name in value else "it is missing"
        raise NoRun(f"{file}: `{prefix}{name}` must be {_JSON_NAMES[kind]} ({got}); {_REMEDY}")
    return found


def _require_seal(file: Path, field: str, value: object, sha256: object) -> None:
    """Refuse numbers that are not those of the digest that was recorded, where one was."""
    if sha256 is not None and hashlib.sha256(canonical_json(value).encode()).hexdigest() != sha256:
        raise NoRun(f"{file}: `{field}` is not what the run wrote, by its SHA-256; {_REMEDY}")


def _require_manifest(file: Path, job: Mapping[str, Any]) -> None:
    """Refuse a manifest whose parts are of other kinds than those that are read of it."""
    for name, kind in _MANIFEST.items():
        if job.get(name) is not None:
            _require(file, job, name, kind)
    environment = job.get("environment") or {}
    for name, kind in (("packages", dict), ("threads", int)):
        if environment.get(name) is not None:
            _require(file, environment, name, kind, "environment.")
    for place, adapter in enumerate(job.get("adapters") or ()):
        _require(file, {f"adapters[{place}]": adapter}, f"adapters[{place}]", dict)


@contextlib.contextmanager
def _damage_of(file: Path, field: str | None = None) -> Iterator[None]:
    """Name the file, and the field where it is known, of what cannot be read as a part of a run."""
    where = f"{file}: `{field}`" if field else f"{file}"
    try:
        yield
    except ClientError as error:
        # the reader takes it for an answer of a service
        fault = error.detail.removeprefix("an answer of the service ").removesuffix("; check the address")
        raise NoRun(f"{where} {fault}; {_REMEDY}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise NoRun(f"{where} cannot be read ({error}); {_REMEDY}") from error


def _unfinished(folder: Path) -> str:
    """Return a sentence on a run that has begun and has no results yet."""
    again = f"`kronoscope run DOCUMENT -o {shlex.quote(str(folder))}`"
    return f"the run in {folder} has not ended: it still computes, or it was killed, and {again} goes on with it"


def read_json(folder: Path, name: str) -> Mapping[str, Any]:
    """Read one of the files of a run."""
    try:
        value = json.loads((folder / name).read_bytes())
    except FileNotFoundError as error:
        raise NoRun(
            f"{folder} holds no {name}; give the folder that `kronoscope run` was given as --output, once it has ended"
        ) from error
    except (OSError, ValueError) as error:
        raise NoRun(f"{folder / name} cannot be read: {error}") from error
    if not isinstance(value, Mapping):
        raise NoRun(f"{folder / name} is not a JSON object; give the folder of a `kronoscope run`")
    return value
