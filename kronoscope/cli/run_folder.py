"""The folder of a foreground run, read as the results of a job: `job.json` and `results.json`."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from catalog import DOCUMENT
from catalog.record import FieldError, canonical_json, plain
from catalog.record_reader import read
from catalog.responses.coverage import assess_coverage
from catalog.responses.views import ResultsView
from kronoscope.client.responses import Layer, build_layer, build_results

_FORMAT = "kronoscope.run/1"
_MANIFEST = (
    "environment",
    "model_sha256",
    "data_sha256",
    "factors_sha256",
    "against_sha256",
    "examples",
    "refused",
    "reading",
    "adapters",
    "reproduction",
)


class NoRun(ValueError):
    """A folder that holds no results of a run; the message says what to do."""


def read_run(folder: Path) -> tuple[ResultsView, list[Layer]]:
    """Read what a run has written."""
    job, results = read_json(folder, "job.json"), read_json(folder, "results.json")
    if job.get("format") != _FORMAT:
        raise NoRun(f"{folder / 'job.json'} is not of the format {_FORMAT}; give the folder of a `kronoscope run`")
    try:
        record = read(DOCUMENT, job["document"], "document")
    except FieldError as error:
        raise NoRun(f"{folder / 'job.json'} holds a document that this version does not read: {error}") from error
    # as a service stores it: what is computed, not when, and not what it is called
    document = {name: value for name, value in plain(record).items() if name not in ("name", "schedule")}
    summary = results.get("summary") or {}
    coverage = assess_coverage(summary, record.collection.min_coverage)
    view = {
        "id": str(folder),
        "state": job["state"],
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
    made = build_results(
        {
            "job": view,
            "summary": summary,
            "manifest": {name: job[name] for name in _MANIFEST if name in job},
            "artifacts": job.get("artifacts") or [],
        }
    )
    return made, [build_layer(row) for row in results.get("layers") or ()]


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
