"""The ends of an attempt: success, failure, cancellation, and the ways back into the queue.

Each function that takes a claim is one transaction and raises `LeaseLost` if the job has another
holder by now, or none: then the attempt's child must be killed and nothing more be written.

Every job computes the digest of the model that it measures. A model of the store that was exchanged, or fetched anew,
shows in the next job that measures it. The digest is the job's own claim, so it is held against those of its own tenant
alone: no tenant can make another's model look exchanged.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Row, select

from catalog.frames import Failed, Finished
from catalog.record import plain
from catalog.requests.inputs import is_path
from catalog.responses.coverage import assess_coverage
from jobs.codec import sha256_of
from jobs.lifecycle import State, ending
from jobs.metrics.counters import add, add_failure
from jobs.queue.children import draw_parent
from jobs.queue.division import forget_files_of_pieces, progress_between, tell_parent
from jobs.queue.fence import by_holder, draw_fenced, move
from jobs.records import Claim
from jobs.schema.clock import ledger_now
from jobs.schema.database import insert_into, writing
from jobs.schema.tables import artifacts, model_digests

_STORED = ("builtin", "huggingface")
"""Sources whose models lie in the store of all."""
_C = model_digests.c


def note_model(connection: Connection, claim: Claim, model_sha256: str | None) -> str | None:
    """Note the digest of a job's model, and hold it against the one that was noted before."""
    source = _source(claim.document)
    if source is None or model_sha256 is None:
        return None
    noted = select(_C.model_sha256, _C.job_id).where(_C.tenant_id == claim.tenant_id, _C.source_sha256 == source)
    before = connection.execute(noted).one_or_none()
    if before is not None and before.model_sha256 == model_sha256:
        return None
    seen = {"model_sha256": model_sha256, "job_id": claim.job_id, "seen_at": ledger_now()}
    added = insert_into(connection, model_digests).values(tenant_id=claim.tenant_id, source_sha256=source, **seen)
    connection.execute(added.on_conflict_do_update(index_elements=[_C.tenant_id, _C.source_sha256], set_=seen))
    if before is None:
        return None
    return (
        f"the model is another one than job {before.job_id} has measured under the same name: its digest was "
        f"{before.model_sha256}, and is {model_sha256}. It was fetched or trained anew since, or exchanged in the store"
    )


def _source(document: Mapping[str, Any]) -> str | None:
    """The digest of all in a document that says which weights are loaded, and how; None of a model from elsewhere."""
    model = document.get("model") or {}
    if model.get("source") not in _STORED or is_path(model.get("adapter") or ""):
        return None
    collection = document.get("collection") or {}
    return sha256_of({"model": dict(model), "task": document.get("task"), "dtype": collection.get("dtype")})


def coverage_marks(summary: Mapping[str, Any] | None, min_coverage: float | None, *, refused: bool) -> dict[str, bool]:
    """Return whether a job was done in part, and a part of its model has a diagonal alone: lists are filtered so."""
    measured = assess_coverage(summary, min_coverage)
    return {
        "partial": refused or (measured is not None and measured.status == "partial"),
        "diagonal": measured is not None and measured.percent("diagonal") > 0,
    }


@by_holder
def finish(engine: Engine, claim: Claim, frame: Finished | None = None) -> State:
    """End the job, and return its last state: succeeded, or cancelled if that was asked for meanwhile.

    The child's last frame has the digests of model and data for the manifest.
    """
    with writing(engine) as connection:
        parent = draw_parent(connection, claim.parent_id)
        drawn = draw_fenced(connection, claim)
        state = ending(drawn.state, "succeeded")
        if state == "succeeded":
            forget_files_of_pieces(connection, drawn)
        names = connection.execute(select(artifacts.c.name).where(artifacts.c.job_id == claim.job_id)).all()
        manifest = (drawn.manifest or {}) | {"artifacts": len(names), "fence": claim.fence, "attempt": claim.attempt}
        if frame is not None:
            manifest |= {name: value for name, value in plain(frame).items() if name != "frame"}
            notice = note_model(connection, claim, frame.model_sha256)
            manifest["notices"] = [*manifest["notices"], *([] if notice is None else [notice])]
        least = (claim.document.get("collection") or {}).get("min_coverage")
        manifest["coverage"] = coverage_marks(drawn.summary, least, refused=bool(manifest.get("refused")))
        move(connection, drawn, state, {"manifest": manifest})
        tell_parent(connection, parent, drawn, state)
        return state


@by_holder
def fail(engine: Engine, claim: Claim, failure: Failed, pause_seconds: float = 0) -> State:
    """End the attempt with a failure, and return the job's new state: `cancelled` if that was asked for meanwhile.

    A `transient` failure returns the job to the queue until it has failed `max_failures` times, and it is not claimed
    for ``pause_seconds``; others end it.
    """
    said = plain(failure)
    del said["frame"]
    with writing(engine) as connection:
        parent = draw_parent(connection, claim.parent_id)
        drawn = draw_fenced(connection, claim)
        state = record_failure(connection, drawn, said, pause_seconds)
        tell_parent(connection, parent, drawn, state, said)
        return state


@by_holder
def hand_back(engine: Engine, claim: Claim, reason: str = "handed back") -> State:
    """Return the job to the queue without counting the attempt, as a drain does; one being cancelled ends.

    The reason is for the job's history; the new state is `queued` or `cancelled`.
    """
    return _give_back(engine, claim, reason, partial(add, counter="drains"))


@by_holder
def decline(engine: Engine, claim: Claim, code: str, pause_seconds: float = 0) -> State:
    """Return a job that this worker could not even start, without counting a failure of the job.

    The failure's code is counted in the operator's metrics; the job keeps its place in the queue, and is not claimed
    for ``pause_seconds``. The new state is `queued` or `cancelled`.
    """
    counted = partial(add_failure, category="transient", code=code, ends_job=False)
    return _give_back(engine, claim, code, counted, pause_seconds)


def _give_back(
    engine: Engine, claim: Claim, reason: str, count: Callable[[Connection], None], pause_seconds: float = 0
) -> State:
    with writing(engine) as connection:
        parent = draw_parent(connection, claim.parent_id)
        drawn = draw_fenced(connection, claim)
        state = ending(drawn.state, "queued")
        values: dict[str, Any] = {}
        if state == "queued":
            progress = progress_between(connection, drawn)
            values = {"attempt": drawn.attempt - 1, "progress": progress, "not_before": _in(pause_seconds)}
        move(connection, drawn, state, values, reason=reason if state == "queued" else None)
        tell_parent(connection, parent, drawn, state)
        if state == "queued":
            count(connection)
        return state


def record_failure(
    connection: Connection, drawn: Row[Any], failure: Mapping[str, Any], pause_seconds: float = 0
) -> State:
    """Count a failure of the locked job and move it on; the reaper calls this too.

    The new state is `queued`, where the job is not claimed for ``pause_seconds``, `failed` or `cancelled`.
    """
    failures = drawn.failures + 1
    again = failure["category"] == "transient" and failures < drawn.max_failures
    state = ending(drawn.state, "queued" if again else "failed")
    values: dict[str, Any] = {}
    if state != "cancelled":
        values["failures"] = failures
    if state == "failed":
        values["failure"] = dict(failure)
    if state == "queued":
        values |= {"queued_at": ledger_now(), "progress": progress_between(connection, drawn)}
        values["not_before"] = _in(pause_seconds)
    move(connection, drawn, state, values, reason=None if state == "cancelled" else str(failure["code"]))
    if state != "cancelled":
        add_failure(connection, failure["category"], failure["code"], ends_job=state == "failed")
    return state


def _in(pause_seconds: float) -> ColumnElement[Any] | None:
    return ledger_now(pause_seconds) if pause_seconds else None
