"""Admission: refusals of valid documents that this service may not, or cannot, run.

The worker checks again when it runs the job; here the caller learns of all faults at once, by field.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Engine, select

from api.settings import Settings
from catalog import ANALYSES
from catalog.analyses.compare_curvature import AgainstReference
from catalog.analyses.export import EXPORT, left_out
from catalog.field_errors import Complaint
from catalog.record import FieldError, canonical_json
from catalog.requests.data_sources import DataFile, ImageSplits, UploadedData
from catalog.requests.extending import ExtendsReference
from catalog.requests.inputs import (
    AdaptableModel,
    DataFactory,
    DirectoryModel,
    HuggingFaceData,
    HuggingFaceModel,
    ModelFactory,
    UploadedModel,
    is_path,
)
from catalog.requests.job import FactorsReference, JobDocument
from catalog.requests.series import checkpoint_documents
from catalog.responses.reproduction import reason_unreproducible
from jobs.codec import document_json, parse_document
from jobs.errors import DocumentRefused
from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.uploads import Uploads
from jobs.repository.extended_documents import effective_document
from jobs.repository.results import every_layer_row, read_artifact
from jobs.repository.store import read_job
from jobs.scheduling.deadlines import require_in_time
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_FACTORS_INDEX = "factors/factors.index.json"


def admit(document: JobDocument, settings: Settings, engine: Engine, tenant_id: str) -> None:
    """Check a valid document against the operator's settings and the tenant's jobs.

    Args:
        document: The validated document.
        settings: The factories, folders and models that jobs may name.
        engine: The ledger's database, for the jobs that a document refers to.
        tenant_id: The caller's tenant.

    Raises:
        DocumentRefused: With a complaint for each source that this service does not take, or for the deadline.
    """
    complaints = (
        *dict.fromkeys(_all_inputs(document, settings, engine, tenant_id)),
        *_factors(document, engine, tenant_id, settings),
        *_files(document, settings, tenant_id),
        *_exported(document, engine, tenant_id),
        *_reproduced(document, engine, tenant_id),
    )
    if complaints:
        raise DocumentRefused(complaints)
    if document.schedule.deadline_at is not None:
        with reading(engine, tenant_id) as connection:
            now = connection.execute(select(ledger_now())).scalar_one()
        require_in_time(document.schedule.deadline_at, now)


def _all_inputs(document: JobDocument, settings: Settings, engine: Engine, tenant_id: str) -> Iterator[Complaint]:
    """Yield what is wrong with the inputs of a job, of the one that it extends, or of each job of a series."""
    uploads = Uploads(engine, ArtifactFolder(settings.ledger.artifact_root), tenant_id)
    effective = effective_document(engine, tenant_id, document)
    for complaint in () if document.series else _inputs(effective, settings, uploads, tenant_id):
        field = complaint.pointer[1:].replace("/", ".")
        said = f"names a job whose `{field}` {complaint.message}"
        of_model = effective is not document and field.startswith("model")
        yield replace(complaint, pointer="/extends/job", message=said) if of_model else complaint
    for place, each in enumerate(checkpoint_documents(document)):
        for complaint in _inputs(each, settings, uploads, tenant_id):
            own = complaint.pointer in ("/model/path", "/model/revision")
            yield replace(complaint, pointer=f"/series/model/{place}") if own else complaint


def _inputs(document: JobDocument, settings: Settings, uploads: Uploads, tenant_id: str) -> Iterator[Complaint]:
    asked = document.given("query")
    query = () if asked is None else ((f"{asked[0]}/query", asked[1]),)
    for name, source in (("model", document.model), ("data", document.data), *query):
        if isinstance(source, (UploadedModel, UploadedData)):
            yield from _uploaded(name, source, uploads)
        elif isinstance(source, (ModelFactory, DataFactory)):
            yield from _listed_factory(f"/{name}/factory", source.factory, settings.factories_of(tenant_id))
        elif isinstance(source, (DirectoryModel, DataFile, ImageSplits)):
            yield from _listed_path(f"/{name}/path", source.path, settings.directories_of(tenant_id))
        elif isinstance(source, (HuggingFaceModel, HuggingFaceData)):
            yield from _hub(name, source, settings, settings.directories_of(tenant_id))
    yield from _adapter(document, settings, tenant_id)


def _uploaded(name: str, source: UploadedModel | UploadedData, uploads: Uploads) -> Iterator[Complaint]:
    upload, kind = uploads.find(source.id, use=True), "model" if name == "model" else "data"
    if upload is None or upload.kind != kind:
        yield _complaint(
            f"/{name}/id", "not_found", f"is not a {kind} upload of yours; make one with `submit --upload`"
        )
    elif not upload.complete:
        yield _complaint(f"/{name}/id", "unfinished", "names an upload that is not complete; send the rest of it first")
    elif isinstance(source, UploadedData):
        try:
            source.require_fit(upload.files[0].name)
        except FieldError as error:
            yield _complaint(f"/{name}/{error.field}", "invalid_value", error.message)


def _adapter(document: JobDocument, settings: Settings, tenant_id: str) -> Iterator[Complaint]:
    model = document.model
    if not isinstance(model, AdaptableModel) or model.adapter is None:
        return
    if is_path(model.adapter):
        yield from _listed_path("/model/adapter", model.adapter, settings.directories_of(tenant_id))
        return
    named = HuggingFaceModel(source="huggingface", id=model.adapter, revision=model.adapter_revision)
    places = {"/model/id": "/model/adapter", "/model/revision": "/model/adapter_revision"}
    for complaint in _hub("model", named, settings, ()):
        yield replace(complaint, pointer=places[complaint.pointer])


def _listed_factory(pointer: str, factory: str, allowed: tuple[str, ...]) -> Iterator[Complaint]:
    if "*" not in allowed and factory not in allowed:
        yield _complaint(
            pointer,
            "not_allowed",
            "is not listed by the operator of this service (KRONOSCOPE_ALLOW_FACTORIES); "
            "`kronoscope run` takes any factory",
        )


def _listed_path(pointer: str, path: str, allowed: tuple[str, ...]) -> Iterator[Complaint]:
    if "*" in allowed:
        return
    if not Path(path).is_absolute():
        yield _complaint(
            pointer,
            "not_allowed",
            "must be an absolute path: a relative one would begin in the service's own working folder; "
            "`kronoscope run` takes any folder",
        )
        return
    real = Path(os.path.realpath(path))
    roots = [Path(os.path.realpath(root)) for root in allowed]
    if not any(real.is_relative_to(root) for root in roots):
        # the same sentence whether it exists or not: a caller learns nothing about the machine
        yield _complaint(
            pointer,
            "not_allowed",
            "is outside the folders that the operator of this service lists (KRONOSCOPE_ALLOW_DIRECTORIES); "
            "`kronoscope run` takes any folder",
        )


def _hub(
    name: str, source: HuggingFaceModel | HuggingFaceData, settings: Settings, allowed: tuple[str, ...]
) -> Iterator[Complaint]:
    if name != "model" and is_path(source.id):
        yield from _listed_path(f"/{name}/id", source.id, allowed)
        return
    if not _HUB_ID.fullmatch(source.id) or ".." in source.id:
        yield _complaint(f"/{name}/id", "invalid_value", "is not an id of the hub; write `owner/name`")
        return
    if source.revision is not None and (not _REVISION.fullmatch(source.revision) or ".." in source.revision):
        yield _complaint(f"/{name}/revision", "invalid_value", "is not the name of a branch, tag or commit")
        return
    if _in_store(settings.model_store, name, source.id):
        return
    yield _complaint(
        f"/{name}/id",
        "not_in_store",
        "is not in the model store of this service, which fetches nothing from the hub while it computes; "
        "ask its operator to fetch it, or take another source",
    )


def _in_store(store: Path, name: str, hub_id: str) -> bool:
    """Return whether a fetch step has stored it, in the layouts of the hub's own caches."""
    if name == "model":
        return (store / "hub" / f"models--{hub_id.replace('/', '--')}").is_dir()
    wanted = hub_id.replace("/", "___").casefold()
    folder = store / "datasets"
    return folder.is_dir() and any(entry.name.casefold() == wanted for entry in folder.iterdir())


def _factors(document: JobDocument, engine: Engine, tenant_id: str, settings: Settings) -> Iterator[Complaint]:
    for pointer, reference in _references(document):
        if reference.job is None:
            yield from _listed_path(f"{pointer}/path", reference.path or "", settings.directories_of(tenant_id))
        else:
            yield from _kept_factors(f"{pointer}/job", reference.job, engine, tenant_id)


def _references(document: JobDocument) -> Iterator[tuple[str, FactorsReference | AgainstReference | ExtendsReference]]:
    """Every field that names stored factors, by its pointer."""
    if document.factors is not None:
        yield "/factors", document.factors
    if document.extends is not None:
        yield "/extends", document.extends
    compared = document.given("against")
    if compared is not None:
        yield f"/{compared[0]}/against", compared[1]


def _kept_factors(pointer: str, job_id: str, engine: Engine, tenant_id: str) -> Iterator[Complaint]:
    job = read_job(engine, tenant_id, job_id)
    if job is None:
        yield _complaint(pointer, "not_found", "is not the id of one of your jobs")
    elif job.state != "succeeded":
        yield _complaint(pointer, "not_succeeded", f"names a job that is {job.state}; wait until it has succeeded")
    elif read_artifact(engine, tenant_id, job_id, _FACTORS_INDEX) is None:
        yield _complaint(pointer, "no_factors", "names a job that kept no factors; collect them with `keep: [factors]`")


def _files(document: JobDocument, settings: Settings, tenant_id: str) -> Iterator[Complaint]:
    """Files that options of an analysis name: a gradient, or weights to begin with."""
    for name, field in (("gradient", "gradient/path"), ("weights", "weights")):
        given = document.given(name)
        if given is not None:
            path = getattr(given[1], "path", given[1])
            yield from _listed_path(f"/{given[0]}/{field}", path, settings.directories_of(tenant_id))


def _exported(document: JobDocument, engine: Engine, tenant_id: str) -> Iterator[Complaint]:
    """Names of layers to leave out that the job's layers do not have, or that leave none of them."""
    without = getattr(getattr(document, EXPORT.kind, None), "without", ())
    if EXPORT.kind not in document.kinds or not without or document.factors is None or document.factors.job is None:
        return
    layers = _layers(engine, tenant_id, document.factors.job)
    if not layers:
        return
    try:
        left_out(without, layers)
    except FieldError as error:
        yield _complaint(f"/{EXPORT.kind}/{error.field}", "invalid_value", error.message)


def _layers(engine: Engine, tenant_id: str, job_id: str) -> list[str]:
    """Return the names of a job's covered layers; none where its rows do not tell: they are archived, or not whole."""
    job = read_job(engine, tenant_id, job_id)
    refused = [] if job is None else [each.get("kind") for each in (job.manifest or {}).get("refused") or ()]
    kinds = [] if job is None else [each for each in job.kinds if each in ANALYSES and each not in refused]
    kind = next((each for each in kinds if ANALYSES[each].unit == "layer"), None)
    rows = () if kind is None else every_layer_row(engine, tenant_id, job_id)
    return [row.layer for row in rows if row.kind == kind and row.outcome.get("status") != "declared"]


def _reproduced(document: JobDocument, engine: Engine, tenant_id: str) -> Iterator[Complaint]:
    if document.reproduces is None:
        return
    job = read_job(engine, tenant_id, document.reproduces)
    if job is None:
        yield _complaint("/reproduces", "not_found", "is not the id of one of your jobs")
    elif job.parent_id is not None:
        yield _complaint("/reproduces", "piece", f"names a piece of job {job.parent_id}; reproduce that one")
    else:
        # read anew, with the defaults of this version
        then = document_json(parse_document(canonical_json(job.document).encode()))
        why = reason_unreproducible(job.state, job.manifest, then, document_json(document))
        if why is not None:
            yield _complaint("/reproduces", "not_reproducible", why)


def _complaint(pointer: str, code: str, message: str) -> Complaint:
    return Complaint(pointer=pointer, code=code, message=message)
