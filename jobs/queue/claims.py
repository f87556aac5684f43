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
from jobs.queue.fence import append_event, by_holder, change, draw_fenced, move, take
from jobs.records import Claim
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.identifiers import is_id
from jobs.schema.tables import artifacts, jobs, layer_results, tenants


class _PlaceTaken(Exception):
    """The device was leased by another; the claim is rolled back."""


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
    """Claim a queued job and lease a device for it: both or neither.

    Args:
        engine: The ledger's database.
        job_id: The job.
        owner: The worker process, for the operator's eyes.
        claim_token: A random string, new for each intention to claim: a claim with a lost reply is repeated with the
            same token, and recognised.
        lease_seconds: The claim holds so long without a heartbeat.
        place: The device, as `next_places` found it; None for a claim without a device.

    Returns:
        The claim, or None if the job is not queued (any more) or overdue, or the device is taken.
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
    """Renew the lease of a claim.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.
        lease_seconds: The lease holds so long from now.

    Returns:
        When cancellation was asked for, or None.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    return last_heartbeat(engine, claim, lease_seconds)


def last_heartbeat(engine: Engine, claim: Claim, lease_seconds: float) -> datetime | None:
    """Renew the lease of an attempt that is about to end its job; a refusal is expected and not counted.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.
        lease_seconds: The lease holds so long from now.

    Returns:
        When cancellation was asked for, or None.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        change(connection, drawn, {"lease_expires_at": ledger_now(lease_seconds)})
        asked_at: datetime | None = drawn.cancel_requested_at
        return asked_at


@by_holder
def write_started(engine: Engine, claim: Claim, frame: Started) -> None:
    """Store the attempt's environment in the job's manifest.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.
        frame: The child's first frame.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
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
    """Store the attempt's progress; only a new stage becomes an event, since batches would flood the history.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.
        progress: `stage, done, total, unit, layers_done, layers_total, percent`; `updated_at` is added here.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        shown = plain(progress) | {"updated_at": drawn.now.isoformat()}
        change(connection, drawn, {"progress": shown})
        if drawn.progress is None or drawn.progress.get("stage") != shown.get("stage"):
            append_event(connection, drawn, "progress", shown)


@by_holder
def write_plan(engine: Engine, claim: Claim, frame: Planned) -> bool:
    """Store the memory plan, and correct the device lease by it.

    The first plan stays, since digests are promised per plan; one that ran out of memory is replaced by the plan that
    was
    carried out instead, which later attempts repeat. The plan's bytes replace those estimated from the document. Where
    they
    exceed the lease, and another device could hold the job, the attempt must be handed back: then neither the plan is
    stored nor the job bound to this class of device, and a repeated write gives the same answer.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.
        frame: The plan.

    Returns:
        Whether the attempt may continue on its device.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
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
    """Insert one layer's row; a second digest for the same layer becomes an event and never replaces the first.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.
        frame: The layer's outcome and observations.

    Returns:
        Whether the row was written, was there already, or differs from the one there.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    outcome = plain(frame.outcome)
    digest = sha256_of(outcome)
    key = {"job_id": claim.job_id, "kind": frame.kind, "ordinal": frame.ordinal}
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
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
        data = {"kind": frame.kind, "ordinal": frame.ordinal, "layer": frame.layer, "sha256": digest}
        if written:
            append_event(connection, drawn, "layer", data)
            return "written"
        kept = connection.execute(select(layer_results.c.sha256).filter_by(**key)).scalar_one()
        return _compare(connection, drawn, kept, data)


@by_holder
def write_artifact(engine: Engine, claim: Claim, frame: ArtifactWritten, uri: str) -> Written:
    """Insert the row of a file; a second digest under the same name becomes an event and never replaces the first.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.
        frame: The file's name, digest, size and media type.
        uri: The key under which `ArtifactFolder.publish` has stored the verified file.

    Returns:
        Whether the row was written, was there already, or differs from the one there.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    key = {"job_id": claim.job_id, "name": frame.name}
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
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
        data = {"name": frame.name, "sha256": frame.sha256, "size_bytes": frame.size_bytes}
        if written:
            append_event(connection, drawn, "artifact", data)
            return "written"
        kept = connection.execute(select(artifacts.c.sha256).filter_by(**key)).scalar_one()
        return _compare(connection, drawn, kept, data)


@by_holder
def write_summary(engine: Engine, claim: Claim, frame: Summarised) -> None:
    """Store the summary of one analysis.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.
        frame: The analysis and its summary.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        change(connection, drawn, {"summary": (drawn.summary or {}) | {frame.kind: plain(frame.summary)}})
        append_event(connection, drawn, "summary", {"kind": frame.kind})


@by_holder
def write_log_line(engine: Engine, claim: Claim, frame: LogLine) -> None:
    """Append a log line to the job's events.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.
        frame: The line and its level.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        append_event(connection, drawn, "log", {"level": frame.level, "message": frame.message})


@by_holder
def finish(engine: Engine, claim: Claim) -> State:
    """End the job as succeeded, or as cancelled if that was asked for meanwhile.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.

    Returns:
        The job's last state.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        state = ending(drawn.state, "succeeded")
        names = connection.execute(select(artifacts.c.name).where(artifacts.c.job_id == claim.job_id)).all()
        manifest = (drawn.manifest or {}) | {"artifacts": len(names), "fence": claim.fence, "attempt": claim.attempt}
        move(connection, drawn, state, {"manifest": manifest})
        return state


@by_holder
def fail(engine: Engine, claim: Claim, failure: Failed, pause_seconds: float = 0) -> State:
    """End the attempt with a failure.

    A `transient` failure returns the job to the queue until it has failed `max_failures` times; others end it.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.
        failure: The failure.
        pause_seconds: A job that returns to the queue is not claimed for so long.

    Returns:
        The job's new state: `queued`, `failed`, or `cancelled` if that was asked for.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    said = plain(failure)
    del said["frame"]
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        return record_failure(connection, drawn, said, pause_seconds)


def end_cancelled(engine: Engine, claim: Claim) -> State:
    """End a job whose cancellation was asked for; any other returns to the queue, as `hand_back` does.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.

    Returns:
        The job's new state.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    return hand_back(engine, claim)


@by_holder
def hand_back(engine: Engine, claim: Claim, reason: str = "handed back") -> State:
    """Return the job to the queue without counting the attempt, as a drain does; one being cancelled ends.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.
        reason: The reason, for the job's history.

    Returns:
        The job's new state: `queued` or `cancelled`.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        state = _returned(connection, drawn, reason)
        if state == "queued":
            add(connection, "drains")
        return state


@by_holder
def decline(engine: Engine, claim: Claim, code: str, pause_seconds: float = 0) -> State:
    """Return a job that this worker could not even start, without counting a failure of the job.

    The failure is counted in the operator's metrics; the job keeps its place in the queue.

    Args:
        engine: The ledger's database.
        claim: The claim under which the caller writes.
        code: The failure's code.
        pause_seconds: The job is not claimed for so long.

    Returns:
        The job's new state: `queued` or `cancelled`.

    Raises:
        LeaseLost: If the job has another holder by now, or none.
    """
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
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
    """Count a failure of the locked job and move it on; the reaper calls this too.

    Args:
        connection: A connection with an open transaction.
        drawn: The locked row of the job, as `draw` returned it.
        failure: The failure's fields.
        pause_seconds: A job that returns to the queue is not claimed for so long.

    Returns:
        The job's new state: `queued`, `failed` or `cancelled`.
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


def _compare(connection: Connection, drawn: Row[Any], kept: str, data: Mapping[str, Any]) -> Written:
    if kept == data["sha256"]:
        return "repeated"
    append_event(connection, drawn, "digest_differs", dict(data) | {"kept_sha256": kept})
    return "differs"
