"""Trackers: the results of a job as a table, a run of MLflow, or an offline run of Weights & Biases.

A metric is `kind/name`, at the step that is its layer's place in the model; `layers.csv` has the names of the layers.
A job that failed or was cancelled is written with what it has left, under its state.
"""

import csv
import importlib
import itertools
import re
import shlex
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from catalog.record import plain
from catalog.responses.layer_record import TABLE_COLUMNS, table_cell
from catalog.responses.views import ResultsView
from kronoscope.cli.exit_codes import FATAL, SHORT_ID, USAGE, end_as, end_run, fail
from kronoscope.cli.extras import require_extra
from kronoscope.cli.job_source import find_job, is_folder
from kronoscope.cli.output import result_console
from kronoscope.cli.run_folder import read_run
from kronoscope.client.client import Client
from kronoscope.client.responses import Layer

TRACKERS = ("csv", "mlflow", "wandb")
_FACTORS = "factors/"
_MOST_CHARACTERS = 500
_AT_ONCE = {"metrics": 1_000, "params": 100}
_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_RUN_HEADER, _RUN_BLOCK, _FRAGMENT, _LAST_FRAGMENTS = 7, 32_768, struct.Struct("<IHB"), (1, 4)
"""The format of an offline run of W&B: after a header a log of LevelDB, of records in fragments within blocks."""


def track(source: str, to: str, output: str, url: str | None) -> None:
    """Write the results of a job, or of a run's folder, to a file, a tracker's folder or its address.

    Ends the command with the job's own end, where that is another than success.
    """
    if to != "csv":
        require_extra(to, command=f"kronoscope export {source} --to {to}")
    with tempfile.TemporaryDirectory() as made:
        found, rows, files = _read(source, url, None if to == "csv" else Path(made))
        try:
            if to == "csv":
                _replace_table(Path(output), found, rows)
            else:
                _write_table(Path(made) / "layers.csv", found, rows)
                listed = {"layers.csv": Path(made) / "layers.csv", **files}
                {"mlflow": _mlflow, "wandb": _wandb}[to](found, rows, listed, output)
        except OSError as error:
            fail(USAGE, [f"--output {output}: {error.strerror or error}; name a place that you may write"])
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises
            fail(FATAL, [f"{to} did not take the run: {error}"])
    left = "" if found.job.state == "succeeded" else f": {len(rows):,} rows of a job that is {found.job.state}"
    result_console().print(f"{to} in {output}{left}", soft_wrap=True)
    if left:
        (end_run if is_folder(source) else end_as)(found.job, len(rows))


def _read(source: str, url: str | None, folder: Path | None) -> tuple[ResultsView, list[Layer], dict[str, Path]]:
    """Return the results, the rows, and the files but those of the factors; without a folder no files are fetched."""
    if is_folder(source):
        found, rows = read_run(Path(source))
        _require_end(found, source)
        root = (Path(source) / "artifacts").resolve()
        paths = {each.name: (root / each.name).resolve() for each in found.artifacts}
        return found, rows, {name: path for name, path in _small(paths) if path.is_relative_to(root)}
    with Client(url) as client:
        found = client.results(find_job(client, source))
        _require_end(found, found.job.id[-SHORT_ID:])
        rows = list(client.layers(found.job.id))
        listed = _small({each.name: each for each in found.artifacts} if folder is not None else {})
        return found, rows, {name: client.download(found.job.id, each, Path(str(folder))) for name, each in listed}


def _small(files: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, each) for name, each in files.items() if not name.startswith(_FACTORS))


def _require_end(found: ResultsView, name: str) -> None:
    if not found.job.ended:
        on = f"run DOCUMENT -o {shlex.quote(name)}" if is_folder(name) else f"watch {name}"
        remedy = f"export it once it has ended (`kronoscope {on}`)"
        fail(USAGE, [f"{name} is {found.job.state}, with the layers so far alone; {remedy}"])
    if found.job.document.get("series") is not None:
        fail(USAGE, [f"{name} is a series, which has no layers; export its jobs (`kronoscope results {name}`)"])


def _replace_table(path: Path, found: ResultsView, rows: Iterable[Layer]) -> None:
    """Write the table beside its place, and move it there whole; what is not a file, such as a pipe, is written to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        _write_table(path, found, rows)
        return
    target = path.resolve()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as made:
        _write_table(Path(made) / "layers.csv", found, rows)
        (Path(made) / "layers.csv").replace(target)


def _write_table(path: Path, found: ResultsView, rows: Iterable[Layer]) -> None:
    state = {"job_state": found.job.state}
    lines = [
        {name: getattr(row, name) for name in TABLE_COLUMNS} | state | dict(_numbers(plain(row.metrics)))
        for row in rows
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        columns = dict.fromkeys((*TABLE_COLUMNS, *state, *(name for line in lines for name in line)))
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({name: table_cell(each) for name, each in line.items()} for line in lines)


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
    """The facts that a run is found by: the job, its state, and the digests of document, model and data."""
    manifest = found.manifest or {}
    digests = {name: str(value) for name, value in manifest.items() if name.endswith("_sha256") and value}
    return {"job": found.job.id, "state": found.job.state, "document_sha256": found.job.document_sha256, **digests}


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
    end = "KILLED"
    try:
        for what, every in parts.items():
            for first in range(0, len(every), _AT_ONCE[what]):
                tracker.log_batch(run, **{what: every[first : first + _AT_ONCE[what]]})
        for name, path in files.items():
            tracker.log_artifact(run, str(path), str(Path(name).parent) if "/" in name else None)
        end = _STATUS[found.job.state]
    finally:  # a run that took a part alone does not stand there as one under way
        tracker.set_terminated(run, end)


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
    run.finish(exit_code=int(found.job.state != "succeeded"))
    wandb.teardown()  # ends the process that writes the run, which says nothing of a disk that is full
    path, record = Path(run.settings.sync_file), importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    records = read_run_records(path.read_bytes())
    if not records or not record.FromString(records[-1]).HasField("exit"):
        raise RuntimeError(f"{path} ends before the run does, as on a disk that is full; make room, and export again")


def read_run_records(content: bytes) -> list[bytes]:
    """Return the records of an offline run of W&B, in order, up to one that is cut off."""
    place, parts, records = _RUN_HEADER, b"", []
    while place + _FRAGMENT.size <= len(content):
        left = _RUN_BLOCK - place % _RUN_BLOCK
        if left < _FRAGMENT.size:
            place += left
            continue
        _, length, kind = _FRAGMENT.unpack_from(content, place)
        place += _FRAGMENT.size + length
        if place > len(content):
            break
        parts += content[place - length : place]
        if kind in _LAST_FRAGMENTS:
            records.append(parts)
            parts = b""
    return records
