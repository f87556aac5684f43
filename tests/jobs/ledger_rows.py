"""All rows of the ledger after a step, beside the model and beside the rows before the step."""

import itertools
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, select

from jobs.repository.store import list_jobs
from jobs.schema.clock import ledger_now
from jobs.schema.database import after_queueing, reading
from jobs.schema.tables import artifacts, job_events, jobs, layer_results
from tests.jobs.ledger_model import ENDED, HELD, MOVES, Job, Model
from tests.queue_order import next_claimable

STAMPS = ("created_at", "queued_at", "started_at", "cancel_requested_at", "finished_at")
WRITTEN_ONCE = (job_events, layer_results, artifacts)

Rows = dict[str, dict[str, list[Mapping[str, Any]]]]
"""By table and by job."""


class LedgerRows:
    """Looks at the whole ledger, and remembers what it saw."""

    def __init__(self, engine: Engine, tenants: tuple[str, ...]) -> None:
        self._engine = engine
        self._tenants = tenants
        self._before: Rows = {table.name: {} for table in (jobs, *WRITTEN_ONCE)}
        self._versions: dict[str, int] = {}
        self._shown: dict[str, str] = {}
        self._woken: list[int] = []
        self._queued = 0
        after_queueing(engine, lambda: self._woken.append(1))
        self._stamps: dict[tuple[str, str, int], datetime] = {}

    def compare(self, model: Model) -> None:
        """Find all as the model says, and unchanged what it does not know to have changed."""
        rows, now = self._read()
        there = {job.id for job in model.jobs()}
        assert set(rows["jobs"]) == there
        assert all(set(of_jobs) <= there for of_jobs in rows.values())
        for job in model.jobs():
            [row] = rows["jobs"][job.id]
            _compare_row(job, row, now)
            _compare_events(job, row, rows["job_events"][job.id])
            _compare_results(job, rows["layer_results"].get(job.id, []), rows["artifacts"].get(job.id, []))
            assert {each["tenant_id"] for table in rows.values() for each in table.get(job.id, [])} == {job.tenant}
            self._compare_stamps(job, row)
            if job.id in self._before["jobs"]:
                self._compare_with_before(job, rows)
        self._compare_wakeups(model)
        self._compare_what_is_shown(model)
        self._before = rows
        self._versions = {job.id: job.version for job in model.jobs()}

    def _read(self) -> tuple[Rows, datetime]:
        rows: Rows = {}
        with reading(self._engine) as connection:
            for table in (jobs, *WRITTEN_ONCE):
                of_jobs: dict[str, list[Mapping[str, Any]]] = {}
                for row in connection.execute(select(table).order_by(*table.primary_key)).mappings():
                    of_jobs.setdefault(row["id" if table is jobs else "job_id"], []).append(dict(row))
                rows[table.name] = of_jobs
            return rows, connection.execute(select(ledger_now())).scalar_one()

    def _compare_stamps(self, job: Job, row: Mapping[str, Any]) -> None:
        """A stamp is null until it is set, and changes only with what it stamps."""
        for stamp in STAMPS:
            times = job.stamps[stamp]
            assert (row[stamp] is not None) == (times > 0), f"{job} has {stamp} = {row[stamp]}"
            if times:
                assert self._stamps.setdefault((job.id, stamp, times), row[stamp]) == row[stamp], stamp
                assert row[stamp] >= self._stamps.get((job.id, stamp, times - 1), row["created_at"]), stamp

    def _compare_wakeups(self, model: Model) -> None:
        """One for each time that a job was queued since, and none for what was refused or rolled back."""
        told = [data["state"] for job in model.ever for kind, data in job.events if kind == "state"]
        queued = told.count("queued")
        assert len(self._woken) == queued - self._queued
        self._queued = queued
        self._woken.clear()

    def _compare_with_before(self, job: Job, rows: Rows) -> None:
        [before], [after] = self._before["jobs"][job.id], rows["jobs"][job.id]
        if self._versions[job.id] == job.version:
            assert before == after, f"{job} changed"
        elif before | {"lease_expires_at": None} != after | {"lease_expires_at": None}:
            assert before["event_seq"] < after["event_seq"], f"{job} changed under the number it had before"
        for table in WRITTEN_ONCE:
            earlier, later = self._before[table.name].get(job.id, []), rows[table.name].get(job.id, [])
            assert [row for row in earlier if row not in later] == [], f"{table.name} of {job} were rewritten"
            assert self._versions[job.id] != job.version or earlier == later, f"{table.name} of {job} grew"

    def _compare_what_is_shown(self, model: Model) -> None:
        """To its tenant every job and to nobody else; to workers what is queued (looked at when a state changed)."""
        states = {job.id: job.state for job in model.jobs()}
        if states == self._shown:
            return
        self._shown = states
        for tenant in self._tenants:
            shown = list_jobs(self._engine, tenant).items
            mine = [job for job in model.jobs() if job.tenant == tenant]
            assert {(job.id, job.state) for job in shown} == {(job.id, job.state) for job in mine}
            assert "secret" not in repr(shown)
        assert set(next_claimable(self._engine)) == {job.id for job in model.jobs("queued")}


def _compare_row(job: Job, row: Mapping[str, Any], now: datetime) -> None:
    said = {
        "idempotency_key": job.key,
        "state": job.state,
        "attempt": job.attempt,
        "failures": job.failures,
        "max_failures": job.max_failures,
        "fence": job.fence,
        "claim_token": job.token,
        "plan": job.plan,
        "summary": job.summary or None,
    }
    assert {name: row[name] for name in said} == said, job
    assert row["document"]["labels"] == {"name": job.document}
    assert (row["progress"] or {}).get("stage") == job.stage
    failure = row["failure"]
    assert (failure and (failure["category"], failure["code"])) == job.failure
    assert (job.failure is not None) == (job.state == "failed")
    assert job.failures <= job.max_failures
    assert (row["lease_owner"] is not None) == (row["lease_expires_at"] is not None) == (job.state in HELD)
    assert job.state not in HELD or (row["lease_expires_at"] < now) == job.silent
    manifest = row["manifest"] or {}
    assert manifest.get("environment") == job.environment
    assert manifest | (job.ended_as or {}) == manifest
    assert (row["finished_at"] is not None) == (job.state in ENDED)


def _compare_events(job: Job, row: Mapping[str, Any], events: list[Mapping[str, Any]]) -> None:
    assert [event["type"] for event in events] == [kind for kind, _ in job.events], job
    for event, (_, data) in zip(events, job.events, strict=True):
        assert event["data"] | data == event["data"], job
    numbers = [event["seq"] for event in events]
    assert all(earlier < later for earlier, later in itertools.pairwise([0, *numbers, row["event_seq"] + 1]))
    states = [event["data"]["state"] for event in events if event["type"] == "state"]
    assert all(there in MOVES[here] for here, there in itertools.pairwise(states)), states
    assert (states[0], states[-1], states.count("running")) == ("queued", row["state"], row["fence"])


def _compare_results(job: Job, layers: list[Mapping[str, Any]], files: list[Mapping[str, Any]]) -> None:
    columns = ("outcome", "sha256", "fence", "attempt")
    assert {(row["kind"], row["ordinal"]): {name: row[name] for name in columns} for row in layers} == job.layers
    assert {row["name"]: {name: row[name] for name in columns[1:]} for row in files} == job.artifacts
