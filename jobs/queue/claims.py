"""An attempt's hold on a job: the claim, its heartbeat, everything it writes, and how it ends.

Each function is one transaction. All but ``claim`` raise ``LeaseLost``
where the job has another holder by now, or none: then the attempt's child must be killed and
nothing more be written.
"""

import contextlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Engine, Row, Table, bindparam, select, update
from sqlalchemy.dialects import postgresql, sqlite

from catalog.estimate import ESTIMATE
from catalog.frames import ArtifactWritten, Failed, LayerDone, LogLine, Planned, Started, Summarised
from catalog.memory_requirements import memory_of, planned_bytes
from catalog.record import plain
from jobs.codec import sha256_of
from jobs.devices.leases import DeviceLease, Place, correct, device_class, lease, lease_of
from jobs.lifecycle import HELD, State, ending
from jobs.metrics.counters import add, add_failure
from jobs.queue.fence import append_event, by_holder, change, fenced, move, take
from jobs.records import Claim
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.identifiers import is_id
from jobs.schema.tables import artifacts, jobs, layer_results, tenants


class _PlaceTaken(Exception):
    """Nothing of the claim stays: the job is somebody else's to take, on another device."""


_SERVED = update(tenants).values(served_at=ledger_now()).where(tenants.c.id == bindparam("served"))

Written = Literal["written", "repeated", "differs"]
"""`repeated`: the same digest stood there already; `differs`: another did, and stays."""


def claim(
    engine: Engine,
    job_id: str,
    owner: str,
    claim_token: str,
    lease_seconds: float,
    place: Place | None = None,
) -> Claim | None:
    """Take a queued job, with the device of ``place``: both or neither.

    None where it is not queued (any more), overdue, or its place has been taken.

    ``claim_token`` is random and new for each intention to claim: a claim whose reply was lost is
    tried again with the same token and recognises its own.
    """
    if not is_id(job_id):
        return None
    with contextlib.suppress(_PlaceTaken), writing(engine) as connection:
        taken = take(connection, job_id, owner[:200], claim_token, lease_seconds)
        if taken is not None:
            leased = None
            if place is not None:
                leased = lease(connection, taken, place)
                if leased is None:
                    raise _PlaceTaken
            connection.execute(_SERVED, {"served": taken.tenant_id})
            return _claim(connection, taken, leased)
        row = connection.execute(
            select(jobs).where(jobs.c.id == job_id, jobs.c.claim_token == claim_token, jobs.c.state.in_(HELD))
        ).one_or_none()
        return None if row is None else _claim(connection, row, lease_of(connection, row))
    return None


@by_holder
def heartbeat(engine: Engine, claim: Claim, lease_seconds: float) -> datetime | None:
    """Renew the lease; returns when cancellation was asked for, or None."""
    return last_heartbeat(engine, claim, lease_seconds)


def last_heartbeat(engine: Engine, claim: Claim, lease_seconds: float) -> datetime | None:
    """The same of an attempt that is letting go of its job: that it comes too late is no loss, and not counted."""
    with writing(engine) as connection:
        drawn = fenced(connection, claim)
        change(connection, drawn, {"lease_expires_at": ledger_now(lease_seconds)})
        asked_at: datetime | None = drawn.cancel_requested_at
        return asked_at


@by_holder
def write_started(engine: Engine, claim: Claim, frame: Started) -> None:
    """Keep what computes this attempt as the job's manifest."""
    with writing(engine) as connection:
        drawn = fenced(connection, claim)
        manifest = {
            "environment": plain(frame.environment),
            "document_sha256": claim.document_sha256,
            "artifacts": 0,
            "fence": claim.fence,
            "attempt": claim.attempt,
        }
        change(connection, drawn, {"manifest": manifest})
        append_event(connection, drawn, "started", {"attempt": claim.attempt, "environment": plain(frame.environment)})


@by_holder
def write_progress(engine: Engine, claim: Claim, progress: Mapping[str, Any]) -> None:
    """Show how far the attempt is: `stage, done, total, unit, layers_done, layers_total, percent`.

    The ledger adds `updated_at`. Only a new stage is an event; batches would flood the history.
    """
    with writing(engine) as connection:
        drawn = fenced(connection, claim)
        shown = plain(progress) | {"updated_at": drawn.now.isoformat()}
        change(connection, drawn, {"progress": shown})
        if drawn.progress is None or drawn.progress.get("stage") != shown.get("stage"):
            append_event(connection, drawn, "progress", shown)


@by_holder
def write_plan(engine: Engine, claim: Claim, frame: Planned) -> bool:
    """Keep the memory plan; the first one stands, since digests are promised per plan. Whether the job stays here.

    One that memory has proved wrong is replaced by what was done in its place, which later attempts must repeat.
    With it comes what the job needs where it computes, in place of what its document alone could tell. Where that is
    more than was leased, and another device could hold it, the attempt is to be handed back; and a plan that did not
    fit is kept by nobody, nor is the job tied to this class of device: a repeated write answers the same.
    """
    with writing(engine) as connection:
        drawn = fenced(connection, claim)
        stays = True
        if drawn.plan is None or frame.plan.get("planning_errors"):
            changes: dict[str, Any] = {"plan": plain(frame.plan)}
            needs = planned_bytes(frame.plan, memory_of(claim.document))
            # an estimate needs nothing of what it foresees
            if needs is not None and drawn.kind != ESTIMATE:
                changes["needs_bytes"] = needs
                # by a plan that stood before rows may have been computed: what replaces it is followed here
                stays = correct(connection, drawn, needs) or drawn.plan is not None
            if not stays:
                del changes["plan"]
            elif claim.lease is not None and drawn.device_class is None:
                changes["device_class"] = device_class(claim.lease.kind)
            change(connection, drawn, changes)
        append_event(connection, drawn, "plan", {"attempt": claim.attempt, "plan": plain(frame.plan)})
        return stays


@by_holder
def write_layer(engine: Engine, claim: Claim, frame: LayerDone) -> Written:
    """Write one layer's row, once: another digest for the same layer is an event, never an overwrite."""
    outcome = plain(frame.outcome)
    digest = sha256_of(outcome)
    key = {"job_id": claim.job_id, "kind": frame.kind, "ordinal": frame.ordinal}
    with writing(engine) as connection:
        drawn = fenced(connection, claim)
        written = _insert_once(
            connection,
            layer_results,
            key
            | {
                "tenant_id": claim.tenant_id,
                "layer": frame.layer,
                "attempt": claim.attempt,
                "fence": claim.fence,
                "sha256": digest,
                "outcome": outcome,
                "observed": plain(frame.observed),
            },
        )
        told = {"kind": frame.kind, "ordinal": frame.ordinal, "layer": frame.layer, "sha256": digest}
        if written:
            append_event(connection, drawn, "layer", told)
            return "written"
        kept = connection.execute(select(layer_results.c.sha256).filter_by(**key)).scalar_one()
        return _compare(connection, drawn, kept, told)


@by_holder
def write_artifact(engine: Engine, claim: Claim, frame: ArtifactWritten, uri: str) -> Written:
    """List a file that `ArtifactFolder.publish` has verified and placed at ``uri``; once, as a layer's row."""
    key = {"job_id": claim.job_id, "name": frame.name}
    with writing(engine) as connection:
        drawn = fenced(connection, claim)
        written = _insert_once(
            connection,
            artifacts,
            key
            | {
                "tenant_id": claim.tenant_id,
                "attempt": claim.attempt,
                "fence": claim.fence,
                "sha256": frame.sha256,
                "size_bytes": frame.size_bytes,
                "media_type": frame.media_type,
                "uri": uri,
            },
        )
        told = {"name": frame.name, "sha256": frame.sha256, "size_bytes": frame.size_bytes}
        if written:
            append_event(connection, drawn, "artifact", told)
            return "written"
        kept = connection.execute(select(artifacts.c.sha256).filter_by(**key)).scalar_one()
        return _compare(connection, drawn, kept, told)


@by_holder
def write_summary(engine: Engine, claim: Claim, frame: Summarised) -> None:
    """Keep one analysis's summary under its kind."""
    with writing(engine) as connection:
        drawn = fenced(connection, claim)
        change(connection, drawn, {"summary": (drawn.summary or {}) | {frame.kind: plain(frame.summary)}})
        append_event(connection, drawn, "summary", {"kind": frame.kind})


@by_holder
def write_log_line(engine: Engine, claim: Claim, frame: LogLine) -> None:
    """Add a line to the job's history."""
    with writing(engine) as connection:
        drawn = fenced(connection, claim)
        append_event(connection, drawn, "log", {"level": frame.level, "message": frame.message})


@by_holder
def finish(engine: Engine, claim: Claim) -> State:
    """End the job as done; it ends `cancelled` where that was asked for meanwhile."""
    with writing(engine) as connection:
        drawn = fenced(connection, claim)
        state = ending(drawn.state, "succeeded")
        names = connection.execute(select(artifacts.c.name).where(artifacts.c.job_id == claim.job_id)).all()
        manifest = (drawn.manifest or {}) | {"artifacts": len(names), "fence": claim.fence, "attempt": claim.attempt}
        move(connection, drawn, state, {"manifest": manifest})
        return state


@by_holder
def fail(engine: Engine, claim: Claim, failure: Failed, pause_seconds: float = 0) -> State:
    """End the attempt with a failure.

    A `transient` one puts the job back into the queue until it has failed `max_failures` times, where nobody
    claims it within ``pause_seconds``; the others end it. Returns where the job went: `queued`, `failed`, or
    `cancelled` where asked for.
    """
    said = plain(failure)
    del said["frame"]
    with writing(engine) as connection:
        drawn = fenced(connection, claim)
        return record_failure(connection, drawn, said, pause_seconds)


def cancelled(engine: Engine, claim: Claim) -> State:
    """End a job whose cancellation was asked for; one that nobody cancelled goes back into the queue."""
    return hand_back(engine, claim)


@by_holder
def hand_back(engine: Engine, claim: Claim, reason: str = "handed back") -> State:
    """Return the attempt uncounted, as a drain does; a job being cancelled ends here instead."""
    with writing(engine) as connection:
        drawn = fenced(connection, claim)
        state = _returned(connection, drawn, reason)
        if state == "queued":
            add(connection, "drains")
        return state


@by_holder
def decline(engine: Engine, claim: Claim, code: str, pause_seconds: float = 0) -> State:
    """Return an attempt that this worker could not even begin: its own fault, so the job counts no failure.

    The operator's counters do. Nobody claims the job within ``pause_seconds``; it keeps its place in the queue.
    """
    with writing(engine) as connection:
        drawn = fenced(connection, claim)
        state = _returned(connection, drawn, code, pause_seconds)
        if state == "queued":
            add_failure(connection, "transient", code, ends_job=False)
        return state


def _returned(connection: Connection, drawn: Row[Any], reason: str, pause_seconds: float = 0) -> State:
    state = ending(drawn.state, "queued")
    values: dict[str, Any] = {}
    if state == "queued":
        values = {"attempt": drawn.attempt - 1, "progress": None, "not_before": _in(pause_seconds)}
    move(connection, drawn, state, values, reason=reason if state == "queued" else None)
    return state


def record_failure(
    connection: Connection, drawn: Row[Any], failure: Mapping[str, Any], pause_seconds: float = 0
) -> State:
    """Count a failure of the locked job and move it on accordingly (also for the reaper)."""
    failures = drawn.failures + 1
    again = failure["category"] == "transient" and failures < drawn.max_failures
    state = ending(drawn.state, "queued" if again else "failed")
    values: dict[str, Any] = {}
    if state != "cancelled":
        values["failures"] = failures
    if state == "failed":
        values["failure"] = dict(failure)
    if state == "queued":
        values |= {"queued_at": ledger_now(), "progress": None}
        values["not_before"] = _in(pause_seconds)
    move(connection, drawn, state, values, reason=None if state == "cancelled" else str(failure["code"]))
    if state != "cancelled":
        add_failure(connection, failure["category"], failure["code"], ends_job=state == "failed")
    return state


def _in(pause_seconds: float) -> ColumnElement[Any] | None:
    return ledger_now(pause_seconds) if pause_seconds else None


def _claim(connection: Connection, row: Row[Any], leased: DeviceLease | None) -> Claim:
    done: list[tuple[str, int]] = []
    if row.fence > 1:  # nobody has written before the first holder
        query = (
            select(layer_results.c.kind, layer_results.c.ordinal)
            .where(layer_results.c.job_id == row.id)
            .order_by(layer_results.c.kind, layer_results.c.ordinal)
        )
        done = [(kind, ordinal) for kind, ordinal in connection.execute(query)]
    return Claim(
        job_id=row.id,
        tenant_id=row.tenant_id,
        kinds=tuple(row.kind.split(",")),
        document=row.document,
        document_sha256=row.document_sha256,
        fence=row.fence,
        attempt=row.attempt,
        failures=row.failures,
        plan=row.plan,
        manifest=row.manifest,
        completed=tuple(done),
        cancel_requested_at=row.cancel_requested_at,
        deadline_at=row.deadline_at,
        lease=leased,
    )


def _insert_once(connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(table).values(dict(values)).on_conflict_do_nothing().returning(table.c.job_id)
    return connection.execute(statement).scalar_one_or_none() is not None


def _compare(connection: Connection, drawn: Row[Any], kept: str, told: Mapping[str, Any]) -> Written:
    if kept == told["sha256"]:
        return "repeated"
    append_event(connection, drawn, "digest_differs", dict(told) | {"kept_sha256": kept})
    return "differs"
