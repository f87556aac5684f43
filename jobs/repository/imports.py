"""Imports of foreground runs: an uploaded folder becomes an ended job, whose results are the claim of who sent it.

Document, rows and summaries are read as strictly as a job document, each row is held against its digest and each file
against the list. Tenant and times are the service's, and nothing enters the cache of factors or the known digests.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Engine, insert, select

from catalog import ANALYSES
from catalog.analyses.analysis import Analysis, LayerResult
from catalog.field_errors import complaints
from catalog.frames import ArtifactWritten, Finished
from catalog.record import canonical_json, plain, record
from catalog.requests.job import JobDocument
from catalog.requests.uploads import RUN_ARTIFACTS, RUN_TYPES, UploadView
from jobs.codec import document_json, parse_claim, parse_document, sha256_of
from jobs.errors import DocumentRefused, UploadRefused
from jobs.objects.artifacts import ArtifactFolder, object_key
from jobs.queue.attempt_endings import coverage_marks
from jobs.queue.fence import announce, append_event
from jobs.repository.submission import insert_job
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import artifacts, jobs, layer_results

T = TypeVar("T")
_MOST_ORDINAL = 2**31 - 1
_MOST_BYTES = {"job.json": 2**20, "results.json": 32 * 2**20}
_NOTICE = "imported: a foreground run's folder was sent here, and this service has computed none of these numbers"


@record
class _ClaimedRow(LayerResult):
    """One row of a foreground run's results, with the digest of all of it but `observed`."""

    sha256: str


@record
class _ClaimedResults:
    """The results of a foreground run."""

    summary: Mapping[str, Mapping[str, Any]]
    layers: tuple[Mapping[str, Any], ...]


@record
class _ClaimedJob(Finished):
    """A foreground run that has ended, as far as a job has the same."""

    format: Literal["kronoscope.run/1"]
    state: Literal["succeeded"]
    environment: Mapping[str, str | int | Mapping[str, str] | None]
    artifacts: tuple[ArtifactWritten, ...]


def import_run(engine: Engine, folder: ArtifactFolder, tenant_id: str, upload: UploadView) -> str:
    """Store an ended job with the results of an upload, and return its id; if it was imported before, that job's.

    ``UploadRefused`` if a file, a row or a field is other than it says, with its name.
    """
    if upload.kind != "run" or not upload.complete:
        raise UploadRefused("incomplete", "this is not a complete upload of a run's folder; send the rest of it first")
    job, results = (_read(folder, tenant_id, upload, name) for name in _MOST_BYTES)
    facts = {name: job[name] for name in _ClaimedJob.__dataclass_fields__ if name in job}
    claimed = _checked(_ClaimedJob, facts, "job.json: ")
    try:
        document = parse_document(json.dumps(job.get("document")).encode())
    except DocumentRefused as error:
        raise UploadRefused("claim", f"job.json: document: {error}") from error
    for name in ("series", "shards", "reproduces"):
        if getattr(document, name) is not None:
            raise UploadRefused(
                "claim", f"job.json: document: /{name} makes it one job of several; import a run without"
            )
    summary = dict(_checked(_ClaimedResults, results, "results.json: ").summary)
    for kind, each in summary.items():
        _checked(_kind(kind, document, "results.json: summary").summary, each, f"results.json: summary/{kind}")
    rows, files = _rows(results["layers"], document), _files(claimed, upload, tenant_id)
    body, job_id, now = document_json(document), new_id(), ledger_now()
    manifest = _manifest(claimed, document, summary) | {"artifacts": len(files), "document_sha256": sha256_of(body)}
    made: dict[str, Any] = dict.fromkeys(("created_at", "queued_at", "finished_at"), now)
    made |= {
        "id": job_id,
        "tenant_id": tenant_id,
        "kind": ",".join(document.kinds),
        "name": document.name,
        "world_size": document.world_size,
    }
    made |= {"document": body, "document_sha256": sha256_of(body), "idempotency_key": (key := f"import/{upload.id}")}
    made |= {"state": "succeeded", "summary": summary, "manifest": manifest, "event_seq": 1}
    made["labels"] = body["labels"]
    own = {"job_id": job_id, "tenant_id": tenant_id}
    with writing(engine, tenant_id) as connection:
        if insert_job(connection, made) is None:
            # the answer to who sent it before was lost
            before = select(jobs.c.id).where(jobs.c.tenant_id == tenant_id, jobs.c.idempotency_key == key)
            return str(connection.execute(before).scalar_one())
        for table, values in ((layer_results, rows), (artifacts, files)):
            if values:
                connection.execute(insert(table).values([{**own, "attempt": 0, "fence": 0, **each} for each in values]))
        columns: tuple[Any, ...] = (*jobs.c, now.label("now"))
        row = connection.execute(select(*columns).where(jobs.c.id == job_id)).one()
        append_event(connection, row, "state", {"state": "succeeded", "imported": True})
        announce(connection, row, None, "succeeded")
    return job_id


def _read(folder: ArtifactFolder, tenant_id: str, upload: UploadView, name: str) -> dict[str, Any]:
    file = next((each for each in upload.files if each.name == name), None)
    if file is None or file.size_bytes > _MOST_BYTES[name]:
        size = "is missing" if file is None else f"has {file.size_bytes:,} bytes"
        raise UploadRefused("claim", f"{name} {size}; it is needed, with at most {_MOST_BYTES[name]:,} bytes")
    with folder.store.open(object_key(tenant_id, file.sha256), file.size_bytes) as content:
        try:
            return parse_claim(content.read())
        except DocumentRefused as error:
            raise UploadRefused("claim", f"{name}: {error}") from error


def _checked(shape: type[T], value: object, where: str) -> T:
    try:
        return TypeAdapter(shape).validate_json(canonical_json(value), strict=True)
    except ValidationError as error:
        first = complaints(map(dict, error.errors(include_url=False)), shape)[0]
        raise UploadRefused("claim", f"{where}{first.pointer} {first.message}") from error


def _kind(kind: str, document: JobDocument, where: str) -> Analysis:
    if kind not in document.kinds:
        raise UploadRefused("claim", f"{where}/{kind} is of an analysis that the document does not ask for")
    return ANALYSES[kind]


def _rows(layers: Iterable[Mapping[str, Any]], document: JobDocument) -> list[dict[str, Any]]:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for place, raw in enumerate(layers):
        where = f"results.json: layers/{place}"
        row = _checked(_ClaimedRow, raw, where)
        outcome = {name: value for name, value in raw.items() if name not in ("observed", "sha256")}
        where += f", {row.kind} of {row.layer}:"
        if sha256_of(outcome) != row.sha256:
            raise UploadRefused("claim", f"{where} the row is not the one that its SHA-256 is of; import it unchanged")
        analysis = _kind(row.kind, document, where)
        if (row.kind, row.ordinal) in rows or not 0 <= row.ordinal <= _MOST_ORDINAL:
            raise UploadRefused("claim", f"{where} {row.ordinal} is no place of a layer, or it stands twice")
        if row.metrics is not None:
            _checked(analysis.metrics, raw["metrics"], f"{where} metrics")
        stored = {name: raw[name] for name in ("kind", "ordinal", "layer", "sha256", "observed")}
        rows[row.kind, row.ordinal] = {**stored, "outcome": outcome}
    return list(rows.values())


def _files(claimed: _ClaimedJob, upload: UploadView, tenant_id: str) -> list[dict[str, Any]]:
    """The rows of the artifacts, which must be those of the run's list, under types of our own.

    `job.json` and `results.json` are kept beside them, so that the rows that they became count in the quota.
    """
    listed = {each.name: (each.sha256, each.size_bytes) for each in claimed.artifacts}
    others = (each for each in upload.files if each.name not in _MOST_BYTES)
    sent = {each.name.removeprefix(RUN_ARTIFACTS): (each.sha256, each.size_bytes) for each in others}
    for name in sorted({*listed, *sent}):
        if listed.get(name) != sent.get(name):
            why = "was not sent" if name not in sent else "is not listed" if name not in listed else "is another file"
            raise UploadRefused("claim", f"artifacts/{name} {why}, by job.json; import a folder as it was written")
    own = {f"run/{each.name}": (each.sha256, each.size_bytes) for each in upload.files if each.name in _MOST_BYTES}
    if taken := sorted({*own} & {*sent}):
        raise UploadRefused("claim", f"artifacts/{taken[0]} has a name that an import gives; call that file otherwise")
    rows: list[dict[str, Any]] = []
    for name, (sha256, size) in {**sent, **own}.items():
        media_type = RUN_TYPES[f".{name.rpartition('.')[2]}"]
        row = {"name": name, "sha256": sha256, "size_bytes": size, "media_type": media_type}
        rows.append({**row, "uri": object_key(tenant_id, sha256)})
    return rows


def _manifest(claimed: _ClaimedJob, document: JobDocument, summary: Mapping[str, Any]) -> dict[str, Any]:
    coverage = coverage_marks(summary, document.collection.min_coverage, refused=bool(claimed.refused))
    facts = {name: value for name, value in plain(claimed).items() if name not in ("frame", "format", "state")}
    marks = {"imported": True, "notices": [_NOTICE, *claimed.notices], "coverage": coverage}
    return {**facts, **marks, "attempt": 0, "fence": 0}
