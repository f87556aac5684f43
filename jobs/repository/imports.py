"""Imports of foreground runs: an uploaded folder becomes an ended job, whose results are the claim of who sent it.

Document, rows and summaries are read as strictly as a job document, each row is held against its digest and each file
against the list. Tenant and times are the service's, and nothing enters the cache of factors or the known digests.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Engine, insert

from catalog import ANALYSES
from catalog.analyses.analysis import LayerResult
from catalog.field_errors import complaints
from catalog.frames import Finished
from catalog.record import canonical_json, plain, record
from catalog.requests.job import JobDocument
from catalog.requests.uploads import RUN_ARTIFACTS, RUN_TYPES, UploadView
from catalog.responses.coverage import assess_coverage
from jobs.codec import document_json, parse_claim, parse_document, sha256_of
from jobs.errors import DocumentRefused, UploadRefused
from jobs.objects.artifacts import ArtifactFolder, object_key
from jobs.repository.submission import insert_job
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import artifacts, job_events, layer_results

T = TypeVar("T")
_MOST_BYTES = {"job.json": 2**20, "results.json": 32 * 2**20}
_NOTICE = "imported: a foreground run's folder was sent here, and this service has computed none of these numbers"


@record
class _ClaimedRow(LayerResult):
    """One row of a foreground run's results, with the digest of all of it but `observed`."""

    sha256: str


@record
class _Claimed(Finished):
    """The facts of a run that a manifest has."""

    environment: Mapping[str, str | int | Mapping[str, str] | None]


def import_run(engine: Engine, folder: ArtifactFolder, tenant_id: str, upload: UploadView) -> str:
    """Store an ended job with the results of an upload; the same upload again is the same job.

    Args:
        engine: The ledger's database.
        folder: The artifacts, which hold the upload's files.
        upload: The upload.

    Returns:
        The id of the job.

    Raises:
        UploadRefused: If a file, a row or a field is other than it says, with its name.
    """
    if upload.kind != "run" or not upload.complete:
        raise UploadRefused("incomplete", "this is not a complete upload of a run's folder; send the rest of it first")
    job, results = (_read(folder, tenant_id, upload, name) for name in _MOST_BYTES)
    if job.get("format") != "kronoscope.run/1" or job.get("state") != "succeeded":
        raise UploadRefused("claim", "job.json is not of a run that has succeeded; import its folder once it has")
    try:
        document = parse_document(json.dumps(job.get("document")).encode())
    except DocumentRefused as error:
        raise UploadRefused("claim", f"job.json: document: {error}") from error
    rows, summary = _rows(results, document), _summary(results, document)
    files = [{**each, "uri": object_key(tenant_id, each["sha256"])} for each in _files(job, upload)]
    body, job_id = document_json(document), new_id()
    manifest = _manifest(job, document, summary) | {"artifacts": len(files), "document_sha256": sha256_of(body)}
    made: dict[str, Any] = {
        "id": job_id,
        "tenant_id": tenant_id,
        "kind": ",".join(document.kinds),
        "name": document.name,
    }
    made |= {"document": body, "document_sha256": sha256_of(body), "world_size": document.world_size, "event_seq": 1}
    made["labels"] = body["labels"]
    made |= {"state": "succeeded", "summary": summary, "manifest": manifest, "idempotency_key": f"import/{upload.id}"}
    made |= dict.fromkeys(("created_at", "queued_at", "finished_at"), ledger_now())
    own = {"job_id": job_id, "tenant_id": tenant_id}
    event = {**own, "seq": 1, "type": "state", "data": {"state": "succeeded", "imported": True}, "at": ledger_now()}
    with writing(engine, tenant_id) as connection:
        if insert_job(connection, made) is None:
            raise UploadRefused("imported", "this folder was imported before; delete that job to import it anew")
        for table, values in ((layer_results, rows), (artifacts, files)):
            if values:
                connection.execute(insert(table).values([{**own, "attempt": 0, "fence": 0, **each} for each in values]))
        connection.execute(insert(job_events).values(event))
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


def _rows(results: Mapping[str, Any], document: JobDocument) -> list[dict[str, Any]]:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for place, raw in enumerate(results.get("layers") or ()):
        where = f"results.json: layers/{place}"
        row = _checked(_ClaimedRow, raw, where)
        outcome = {name: value for name, value in raw.items() if name not in ("observed", "sha256")}
        where += f", {row.kind} of {row.layer}:"
        if sha256_of(outcome) != row.sha256:
            raise UploadRefused("claim", f"{where} the row is not the one that its SHA-256 is of; import it unchanged")
        if row.kind not in document.kinds or (row.kind, row.ordinal) in rows:
            raise UploadRefused("claim", f"{where} the document asks for no such row, or it stands twice")
        if row.metrics is not None:
            _checked(ANALYSES[row.kind].metrics, raw["metrics"], f"{where} metrics")
        rows[row.kind, row.ordinal] = {name: raw[name] for name in ("kind", "ordinal", "layer", "sha256", "observed")}
        rows[row.kind, row.ordinal]["outcome"] = outcome
    return list(rows.values())


def _summary(results: Mapping[str, Any], document: JobDocument) -> dict[str, Any]:
    summary = dict(results.get("summary") or {})
    for kind, each in summary.items():
        if kind not in document.kinds:
            raise UploadRefused("claim", f"results.json: summary/{kind} is of an analysis that was not asked for")
        _checked(ANALYSES[kind].summary, each, f"results.json: summary/{kind}")
    return summary


def _files(job: Mapping[str, Any], upload: UploadView) -> list[dict[str, Any]]:
    """The rows of the artifacts, which must be those of the run's list, under types of our own."""
    names = ("sha256", "size_bytes")
    listed = {str(each["name"]): tuple(each[name] for name in names) for each in job.get("artifacts") or ()}
    sent = {each.name.removeprefix(RUN_ARTIFACTS): (each.sha256, each.size_bytes)
            for each in upload.files if each.name not in _MOST_BYTES}  # fmt: skip
    other = next((name for name in sorted({*listed, *sent}) if listed.get(name) != sent.get(name)), None)
    if other is not None:
        why = "was not sent" if other not in sent else "is not listed" if other not in listed else "is another file"
        raise UploadRefused(
            "claim", f"artifacts/{other} {why}, by the list in job.json; import a folder as it was written"
        )
    types = {name: next(type_ for suffix, type_ in RUN_TYPES.items() if name.endswith(suffix)) for name in sent}
    return [
        {"name": name, "media_type": types[name], **dict(zip(names, each, strict=True))} for name, each in sent.items()
    ]


def _manifest(job: Mapping[str, Any], document: JobDocument, summary: Mapping[str, Any]) -> dict[str, Any]:
    facts = {name: job[name] for name in _Claimed.__dataclass_fields__ if name in job}
    claimed = _checked(_Claimed, facts, "job.json: ")
    measured = assess_coverage(summary, document.collection.min_coverage)
    coverage = {"partial": bool(claimed.refused) or (measured is not None and measured.status == "partial"),
                "diagonal": measured is not None and measured.percent("diagonal") > 0}  # fmt: skip
    manifest = {name: value for name, value in plain(claimed).items() if name != "frame"}
    return {
        **manifest,
        "imported": True,
        "notices": [_NOTICE, *claimed.notices],
        "coverage": coverage,
        "attempt": 0,
        "fence": 0,
    }
