"""Trackers: the results of a job as a table, a run of MLflow, or an offline run of Weights & Biases.

A metric is `kind/name`, at the step that is its layer's place in the model; `layers.csv` has the names of the layers.
"""

import csv
import importlib
import itertools
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from catalog.record import plain
from catalog.responses.views import ResultsView
from kronoscope.cli.exit_codes import FATAL, USAGE, fail
from kronoscope.cli.extras import require_extra
from kronoscope.cli.job_source import find_job, is_folder
from kronoscope.cli.run_folder import read_run
from kronoscope.client.client import Client
from kronoscope.client.responses import Layer

TRACKERS = ("csv", "mlflow", "wandb")
_FACTORS = "factors/"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MOST_CHARACTERS = 500
_AT_ONCE = {"metrics": 1_000, "params": 100}


def track(source: str, to: str, output: str, url: str | None) -> None:
    """Write the results of a job, or of a run's folder, to a file, a tracker's folder or its address."""
    if to != "csv":
        require_extra(to, command=f"kronoscope export {source} --to {to}")
    with tempfile.TemporaryDirectory() as made:
        found, rows, files = _read(source, url, None if to == "csv" else Path(made))
        table = Path(output) if to == "csv" else Path(made) / "layers.csv"
        try:
            table.parent.mkdir(parents=True, exist_ok=True)
            _write_table(table, rows)
            if to != "csv":
                {"mlflow": _mlflow, "wandb": _wandb}[to](found, rows, {"layers.csv": table, **files}, output)
        except OSError as error:
            fail(USAGE, [f"--output {output}: {error.strerror or error}; name a place that you may write"])
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises
            fail(FATAL, [f"{to} did not take the run: {error}"])


def _read(source: str, url: str | None, folder: Path | None) -> tuple[ResultsView, list[Layer], dict[str, Path]]:
    """Return the results, the rows, and the files but those of the factors; without a folder no files are fetched."""
    if is_folder(source):
        found, rows = read_run(Path(source))
        root = (Path(source) / "artifacts").resolve()
        paths = {each.name: (root / each.name).resolve() for each in found.artifacts}
        return found, rows, {name: path for name, path in _small(paths) if path.is_relative_to(root)}
    with Client(url) as client:
        found = client.results(find_job(client, source))
        rows = list(client.layers(found.job.id))
        listed = _small({each.name: each for each in found.artifacts} if folder is not None else {})
        return found, rows, {name: client.download(found.job.id, each, Path(str(folder))) for name, each in listed}


def _small(files: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, each) for name, each in files.items() if not name.startswith(_FACTORS))


def _write_table(path: Path, rows: Iterable[Layer]) -> None:
    fixed = ("kind", "ordinal", "layer", "module", "status", "reason", "parameter_count")
    lines = [{name: getattr(row, name) for name in fixed} | dict(_numbers(plain(row.metrics))) for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, dict.fromkeys((*fixed, *(name for line in lines for name in line))))
        writer.writeheader()
        # a name of a layer that begins so would be computed by a spreadsheet
        quoted = ({name: f"'{each}" if str(each).startswith(_FORMULA) and isinstance(each, str) else each
                   for name, each in line.items()} for line in lines)  # fmt: skip
        writer.writerows(quoted)


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:  # noqa: ANN401 - JSON
    """Yield the numbers of nested objects by their paths; lists, words and flags are left out."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, f"{name}/{key}" if name else str(key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield re.sub(r"[^\w./ -]", "_", name), value


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - JSON
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _texts(each, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield re.sub(r"[^\w./ -]", "_", name)[:250], str(value)[:_MOST_CHARACTERS]


def _facts(found: ResultsView) -> dict[str, str]:
    """The facts that a run is found by: the job, and the digests of document, model and data."""
    manifest = found.manifest or {}
    digests = {name: str(value) for name, value in manifest.items() if name.endswith("_sha256") and value}
    return {"job": found.job.id, "document_sha256": found.job.document_sha256, **digests}


def _document(found: ResultsView) -> dict[str, Any]:
    """The document with the labels as they are now."""
    return {**found.job.document, "labels": dict(found.job.labels)}


def _metrics(found: ResultsView, rows: list[Layer]) -> Iterator[tuple[str, float, int]]:
    """Yield name, value and step."""
    for row in sorted(rows, key=lambda row: row.ordinal):
        yield from ((f"{row.kind}/{name}", value, row.ordinal) for name, value in _numbers(plain(row.metrics)))
    yield from ((f"summary/{name}", value, 0) for name, value in _numbers(plain(found.summary)))


def _mlflow(found: ResultsView, rows: list[Layer], files: Mapping[str, Path], output: str) -> None:
    entities, mlflow = importlib.import_module("mlflow.entities"), importlib.import_module("mlflow")
    folder = None if "://" in output else Path(output).absolute()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    tracker = mlflow.MlflowClient(output if folder is None else f"sqlite:///{folder / 'mlflow.db'}")
    place = None if folder is None else (folder / "artifacts").as_uri()
    known = tracker.get_experiment_by_name("kronoscope")
    experiment = tracker.create_experiment("kronoscope", place) if known is None else known.experiment_id
    tags = {f"kronoscope.{name}": value for name, value in _facts(found).items()}
    run = tracker.create_run(experiment, tags=tags, run_name=found.job.name or found.job.id).info.run_id
    now = int(time.time() * 1000)
    parts = {"metrics": [entities.Metric(name, value, now, step) for name, value, step in _metrics(found, rows)],
             "params": [entities.Param(*each) for each in dict(_texts(_document(found), "")).items()]}  # fmt: skip
    for what, every in parts.items():
        for first in range(0, len(every), _AT_ONCE[what]):
            tracker.log_batch(run, **{what: every[first : first + _AT_ONCE[what]]})
    for name, path in files.items():
        tracker.log_artifact(run, str(path), str(Path(name).parent) if "/" in name else None)
    tracker.set_terminated(run)


def _wandb(found: ResultsView, rows: list[Layer], files: Mapping[str, Path], output: str) -> None:
    wandb = importlib.import_module("wandb")
    Path(output).mkdir(parents=True, exist_ok=True)
    config = {"document": _document(found), **_facts(found)}
    quiet, named = wandb.Settings(silent=True, console="off"), found.job.name or found.job.id
    run = wandb.init(project="kronoscope", name=named, mode="offline", dir=output, config=config, settings=quiet)
    for step, here in itertools.groupby(_metrics(found, rows), key=lambda each: each[2]):
        logged = {name: value for name, value, _ in here if not name.startswith("summary/")}
        if logged:
            run.log(logged, step=step)
    run.summary.update({name: value for name, value, _ in _metrics(found, rows) if name.startswith("summary/")})
    kept = wandb.Artifact(re.sub(r"[^\w.-]", "_", f"kronoscope-{found.job.id}")[:120], type="kronoscope")
    for name, path in files.items():
        kept.add_file(str(path), name=name)
    run.log_artifact(kept)
    run.finish()
