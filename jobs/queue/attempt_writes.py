"""The writes of a running attempt into the ledger: environment, plan, progress, rows, files and log.

Each function is one transaction and raises `LeaseLost` if the job has another holder by now, or none:
then the attempt's child must be killed and nothing more be written.

The commit of a write that is not answered may have happened, so each recognises its own when it is repeated: a row by
its key, a stage of progress by that of the job, and another event by its content among those above the number `after`
of the attempt's last event that its only writer knows of.
"""

from collections.abc import Mapping
from typing import Any, Literal

from sqlalchemy import Connection, Engine, Row, Table, select

from catalog.frames import ArtifactWritten, LayerDone, LogLine, Planned, Started, Summarised
from catalog.record import plain
from catalog.requests.estimate import ESTIMATE
from catalog.requests.memory_requirements import memory_of, planned_bytes
from jobs.codec import sha256_of
from jobs.devices.leases import correct
from jobs.devices.requirements import device_class
from jobs.queue.fence import append_event, by_holder, change, draw_fenced
from jobs.records import Claim
from jobs.schema.database import insert_into, writing
from jobs.schema.identifiers import is_id
from jobs.schema.tables import artifacts, job_events, layer_results

_KEPT = "kept"
"""The field of a job's progress with what checkpoints hold: `stages`, the share of each, and `percent` of the job. It
is never shown."""

Written = Literal["written", "repeated", "differs"]
"""`repeated`: the same digest stood there already; `differs`: another did, and stays."""


@by_holder
def write_started(engine: Engine, claim: Claim, frame: Started, after: int | None = None) -> int:
    """Store the environment, from the child's first frame, in the job's manifest; return the number of its event."""
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
        environment = plain(frame.environment)
        return _append_once(connection, drawn, "started", {"attempt": claim.attempt, "environment": environment}, after)


@by_holder
def write_progress(engine: Engine, claim: Claim, progress: Mapping[str, Any]) -> None:
    """Store the attempt's progress; only a new stage becomes an event, since batches would flood the history.

    Args:
        progress: `stage, done, total, unit, layers_done, layers_total, percent, eta_seconds` and `kept`; `updated_at`
            is added here.
    """
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        shown = plain(progress) | {"updated_at": drawn.now.isoformat()}
        change(connection, drawn, {"progress": shown})
        if drawn.progress is None or drawn.progress.get("stage") != shown.get("stage"):
            append_event(connection, drawn, "progress", {name: shown[name] for name in shown if name != _KEPT})


def kept_progress(drawn: Row[Any]) -> dict[str, Any] | None:
    """Return the progress of a job that is queued again: what a checkpoint holds; None where there is none."""
    progress = drawn.progress or {}
    kept = progress.get(_KEPT)
    if kept is None:
        return None
    blank = dict.fromkeys(("stage", "done", "total", "unit", "eta_seconds"))
    return {**progress, **blank, "percent": kept["percent"], "updated_at": drawn.now.isoformat()}


def kept_stages(progress: Mapping[str, Any] | None) -> Mapping[str, float]:
    """Return the share of each stage that a job's checkpoints hold."""
    return ((progress or {}).get(_KEPT) or {}).get("stages") or {}


@by_holder
def write_plan(engine: Engine, claim: Claim, frame: Planned, after: int | None = None) -> bool:
    """Store the memory plan, correct the device lease by it, and return whether the attempt may continue on its device.

    The first plan stays, since digests are promised per plan; one that ran out of memory is replaced by the plan that
    was carried out instead, which later attempts repeat. The plan's bytes replace those estimated from the document.
    If they exceed the lease, and another device could hold the job, the attempt must be handed back: then neither the
    plan is stored nor the job bound to this class of device, and a repeated write gives the same answer.
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
        _append_once(connection, drawn, "plan", {"attempt": claim.attempt, "plan": plain(frame.plan)}, after)
        return stays


@by_holder
def write_layer(engine: Engine, claim: Claim, frame: LayerDone) -> Written:
    """Insert one layer's row, and return whether it was written, was there already, or differs from the one there.

    A second digest for the same layer becomes an event and never replaces the first.
    """
    outcome = plain(frame.outcome)
    key = {"kind": frame.kind, "ordinal": frame.ordinal}
    data = {**key, "layer": frame.layer, "sha256": sha256_of(outcome)}
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        source = str(frame.observed.get("factors_from") or "").partition(",")[0]
        if drawn.factors_from is None and is_id(source):
            change(connection, drawn, {"factors_from": source})
        stored = {"outcome": outcome, "observed": plain(frame.observed)}
        return _write_once(connection, drawn, (layer_results, key), ("layer", data), stored)


@by_holder
def write_artifact(engine: Engine, claim: Claim, frame: ArtifactWritten, uri: str) -> Written:
    """Insert a file's row, and return whether it was written, was there already, or differs from the one there.

    ``uri`` is the key under which `ArtifactFolder.publish` has stored the verified file. A second digest under the same
    name becomes an event and never replaces the first.
    """
    key = {"name": frame.name}
    data = {**key, "sha256": frame.sha256, "size_bytes": frame.size_bytes}
    with writing(engine) as connection:
        drawn, stored = draw_fenced(connection, claim), {"media_type": frame.media_type, "uri": uri}
        return _write_once(connection, drawn, (artifacts, key), ("artifact", data), stored)


@by_holder
def write_summary(engine: Engine, claim: Claim, frame: Summarised, after: int | None = None) -> int:
    """Store the summary of one analysis, and return the number of its event."""
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        change(connection, drawn, {"summary": (drawn.summary or {}) | {frame.kind: plain(frame.summary)}})
        return _append_once(connection, drawn, "summary", {"kind": frame.kind}, after)


@by_holder
def write_log_line(engine: Engine, claim: Claim, frame: LogLine, after: int | None = None) -> int:
    """Append a log line with its level to the job's events, and return the number of its event."""
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        return _append_once(connection, drawn, "log", {"level": frame.level, "message": frame.message}, after)


def _append_once(
    connection: Connection, drawn: Row[Any], event_type: str, data: Mapping[str, Any], after: int | None
) -> int:
    """Append an event, unless an equal one stands above the number ``after``, and return its number."""
    if after is not None:
        above = (job_events.c.job_id == drawn.id, job_events.c.seq > after, job_events.c.type == event_type)
        for seq, stored in connection.execute(select(job_events.c.seq, job_events.c.data).where(*above)):
            if stored == data:
                return int(seq)
    append_event(connection, drawn, event_type, data)
    return int(drawn.event_seq)


def _write_once(
    connection: Connection,
    drawn: Row[Any],
    place: tuple[Table, Mapping[str, Any]],
    event: tuple[str, Mapping[str, Any]],
    stored: Mapping[str, Any],
) -> Written:
    """Insert a row of what a locked job's attempt has made, with its event; one that is there already stays."""
    (table, key), (event_type, data) = place, event
    own = {"tenant_id": drawn.tenant_id, "attempt": drawn.attempt, "fence": drawn.fence}
    row = {"job_id": drawn.id, **own, **data, **stored}
    new = insert_into(connection, table).values(row).on_conflict_do_nothing().returning(table.c.job_id)
    if connection.execute(new).scalar_one_or_none() is not None:
        append_event(connection, drawn, event_type, data)
        return "written"
    kept = connection.execute(select(table.c.sha256).filter_by(job_id=drawn.id, **key)).scalar_one()
    if kept == data["sha256"]:
        return "repeated"
    append_event(connection, drawn, "digest_differs", {**data, "kept_sha256": kept})
    return "differs"
