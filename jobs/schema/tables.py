"""The ledger's tables. Every one of a job's carries the tenant; writers are fenced (see ``jobs.queue.fence``).

Workers, devices and what is leased of them are the operator's: see ``jobs.devices.registry``.

JSON is kept as the text it was written as (`json`, not `jsonb`): jsonb rewrites numbers, so that
1e16 comes back as an integer and -0.0 as 0.0, and a digest over the text would no longer hold.
"""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from jobs.lifecycle import STATES
from jobs.schema.clock import Moment

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

MACHINE_STATES = ("starting", "pending", "running", "ending", "ended", "failed")
"""Asked for; waiting in the launcher's queue; there; about to be given back; gone; never there."""

_Id = String(36)
_Sha256 = String(64)


def _json() -> JSON:
    return JSON(none_as_null=True)


def _tenant() -> Column[str]:
    return Column("tenant_id", _Id, ForeignKey("tenants.id"), nullable=False)


def _partial(name: str, where: str, *columns: ColumnElement[Any], unique: bool = False) -> None:
    """Add an index of the rows that fit a condition."""
    Index(name, *columns, unique=unique, postgresql_where=text(where), sqlite_where=text(where))


def _job(*, primary_key: bool = False) -> Column[str]:
    return Column("job_id", _Id, ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False, primary_key=primary_key)


tenants = Table(
    "tenants",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    Column("quotas", _json()),
    Column("created_at", Moment(), nullable=False),
    Column("served_at", Moment()),  # when a job of theirs was last claimed
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", _Id, primary_key=True),
    _tenant(),
    Column("prefix", String(32), nullable=False, unique=True),
    Column("hmac", _Sha256, nullable=False),
    Column("scopes", String(100), nullable=False),
    Column("created_at", Moment(), nullable=False),
    Column("expires_at", Moment()),
    Column("revoked_at", Moment()),
    Column("last_used_at", Moment()),  # to the minute
    Column("last_used_from", String(64)),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", _Id, primary_key=True),
    _tenant(),
    Column("kind", String(500), nullable=False),  # several kinds are joined by commas
    Column("name", String(120)),  # the caller's own
    Column("labels", _json()),  # at first those of the document, which stays as it was submitted
    Column("note", String(2000)),
    Column("document", _json(), nullable=False),
    Column("document_sha256", _Sha256, nullable=False),
    Column("idempotency_key", String(255)),
    Column("schedule", _json()),  # as it was asked for, to know a repeated request by; priority and deadline_at hold
    Column("state", String(16), nullable=False),
    Column("priority", Integer, nullable=False, server_default=text("0")),
    Column("world_size", Integer, nullable=False, server_default=text("1")),
    Column("needs_bytes", BigInteger),
    Column("device_class", String(8)),  # what its first plan was made on: the numbers are promised there alone
    Column("parent_id", _Id, ForeignKey("jobs.id", ondelete="CASCADE")),  # of a piece: the divided job
    Column("factors_from", _Id),  # the job whose factors the cache gave; no foreign key: it may be deleted meanwhile
    Column("piece", _json()),  # which part of it, as `catalog.requests.pieces.Piece`
    Column("model_factory", Text),  # what a worker must list to take it
    Column("data_factory", Text),
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    Column("failures", Integer, nullable=False, server_default=text("0")),
    Column("max_failures", Integer, nullable=False, server_default=text("5")),
    Column("fence", BigInteger, nullable=False, server_default=text("0")),
    Column("claim_token", String(64)),
    Column("event_seq", BigInteger, nullable=False, server_default=text("0")),
    Column("lease_owner", String(200)),
    Column("lease_expires_at", Moment()),
    Column("cancel_requested_at", Moment()),
    Column("cancel_requested_by", String(32)),  # prefix of the key; null in embedded mode, and of a piece
    Column("deadline_at", Moment()),
    Column("progress", _json()),
    Column("failure", _json()),
    Column("plan", _json()),
    Column("manifest", _json()),
    Column("summary", _json()),
    Column("created_at", Moment(), nullable=False),
    Column("queued_at", Moment(), nullable=False),
    Column("not_before", Moment()),  # what failed for want of something waits for it, not in the way of others
    Column("started_at", Moment()),
    Column("finished_at", Moment()),
    Column("archived_at", Moment()),
    Column("checkpoint_bytes", BigInteger),  # what its last attempt has left on disks; null until that is measured
    UniqueConstraint("tenant_id", "idempotency_key"),
    CheckConstraint(f"state IN ({', '.join(repr(state) for state in STATES)})", name="state"),
    Index(None, "tenant_id", "id"),
    Index(None, "state", "lease_expires_at"),
    Index(None, "parent_id"),
    Index(None, "tenant_id", "factors_from"),
)

_partial("ix_jobs_waiting", "state = 'queued'", jobs.c.tenant_id, jobs.c.priority.desc(), jobs.c.queued_at, jobs.c.id)

_partial("ix_jobs_retained", "finished_at IS NOT NULL AND archived_at IS NULL", jobs.c.finished_at)

_partial("ix_jobs_overdue", "state = 'queued' AND deadline_at IS NOT NULL", jobs.c.deadline_at)

job_events = Table(
    "job_events",
    metadata,
    _job(primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    _tenant(),
    Column("at", Moment(), nullable=False),
    Column("type", String(40), nullable=False),
    Column("data", _json(), nullable=False),
)

layer_results = Table(
    "layer_results",
    metadata,
    _job(primary_key=True),
    Column("kind", String(40), primary_key=True),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    _tenant(),
    Column("layer", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("sha256", _Sha256, nullable=False),
    Column("outcome", _json(), nullable=False),
    Column("observed", _json(), nullable=False),
)

artifacts = Table(
    "artifacts",
    metadata,
    _job(primary_key=True),
    Column("name", String(500), primary_key=True),
    _tenant(),
    Column("attempt", Integer, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("sha256", _Sha256, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("media_type", String(200), nullable=False),
    Column("uri", Text, nullable=False),
    Index(None, "tenant_id", "uri"),
)

upload_files = Table(
    "upload_files",
    metadata,
    Column("upload_id", _Id, primary_key=True),
    Column("name", String(128), primary_key=True),
    _tenant(),
    Column("kind", String(8), nullable=False),
    Column("sha256", _Sha256, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),  # reserved in the tenant's quota from the declaration on
    Column("uri", Text, nullable=False),  # key of the object that it becomes
    Column("changed_at", Moment(), nullable=False),  # declared, sent to, or named by a job
    Column("stored_at", Moment()),
    Column("completed_at", Moment()),  # of all files of the upload at once
    Index(None, "tenant_id", "uri"),
)

cached_factors = Table(
    "cached_factors",
    metadata,
    Column("id", _Id, primary_key=True),  # name of the entry's folder
    _tenant(),
    Column("place", _Id, nullable=False),  # which folder of caches it is in (``jobs.objects.cached_entries``)
    Column("key", _Sha256, nullable=False),
    Column("job_id", _Id, nullable=False),  # no foreign key: it outlives the job that left it
    Column("files", _json(), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("left_at", Moment(), nullable=False),
    Column("used_at", Moment(), nullable=False),
    UniqueConstraint("tenant_id", "place", "key"),
)

workers = Table(
    "workers",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("node", String(200), nullable=False),
    Column("process_space", String(300), nullable=False),  # within it a process's number means the same process
    Column("version", String(40), nullable=False),
    Column("slots", Integer, nullable=False),
    Column("factories", _json(), nullable=False),
    Column("started_at", Moment(), nullable=False),
    Column("seen_at", Moment(), nullable=False),
    Column("expires_at", Moment(), nullable=False),  # silent for longer it is counted on no more
    Column("isolation", _json()),  # which walls between jobs and worker hold there, as it measured at its start
    Column("machine_id", _Id),  # of those that `jobs.autoscale` started: the row of `machines`
    Column("paused", String(300)),  # why it takes no jobs at the moment; null where it does
)

machines = Table(
    "machines",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("scope", String(200), nullable=False),  # the launcher's queue that it was started in
    Column("class_name", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("handle", String(200)),  # the launcher's own name of it
    Column("note", Text, nullable=False),  # why it was started, or why it could not be
    Column("asked_at", Moment(), nullable=False),
    Column("changed_at", Moment(), nullable=False),
    Column("joined_at", Moment()),  # when its worker registered
    CheckConstraint(f"state IN ({', '.join(repr(state) for state in MACHINE_STATES)})", name="state"),
    Index(None, "scope", "class_name", "asked_at"),
)

machine_classes = Table(
    "machine_classes",
    metadata,
    Column("scope", String(200), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("kind", String(8), nullable=False),  # of its devices
    Column("device_bytes", BigInteger, nullable=False),  # what one job may have there
    Column("devices", Integer, nullable=False),
    Column("jobs_per_device", Integer, nullable=False),
    Column("ceiling", Integer, nullable=False),
    Column("factories", _json(), nullable=False),
    Column("seen_at", Moment(), nullable=False),  # when `jobs.autoscale` last offered it
)

devices = Table(
    "devices",
    metadata,
    Column("uuid", String(100), primary_key=True),
    Column("node", String(200), nullable=False),
    Column("kind", String(8), nullable=False),
    Column("name", String(200), nullable=False),
    Column("capacity_bytes", BigInteger, nullable=False),
    Column("foreign_bytes", BigInteger, nullable=False, server_default=text("0")),  # held there by others than jobs
    Column("foreign_at", Moment()),  # when that was last read: while a job is there it cannot be
    Column("lease_seq", BigInteger, nullable=False, server_default=text("0")),  # drawing it locks the device
    Column("reserved_job_id", _Id),
    Column("seen_at", Moment(), nullable=False),
    CheckConstraint("kind IN ('cuda', 'fake', 'host')", name="kind"),
)

worker_devices = Table(
    "worker_devices",
    metadata,
    Column("worker_id", _Id, ForeignKey("workers.id", ondelete="CASCADE"), primary_key=True),
    Column("device_uuid", String(100), ForeignKey("devices.uuid", ondelete="CASCADE"), primary_key=True),
    Index(None, "device_uuid"),
)

job_users = Table(
    "job_users",
    metadata,
    # never given twice: which user of the machines its attempts run as (``jobs.queue.claims``)
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    _tenant(),
    Column("job_id", _Id, ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False, unique=True),
    sqlite_autoincrement=True,
)

model_digests = Table(
    "model_digests",
    metadata,
    Column("tenant_id", _Id, ForeignKey("tenants.id"), primary_key=True),
    Column(
        "source_sha256", _Sha256, primary_key=True
    ),  # of the document's model block, and what else decides its weights
    Column("model_sha256", _Sha256, nullable=False),
    Column("job_id", _Id, nullable=False),  # which may be deleted meanwhile
    Column("seen_at", Moment(), nullable=False),
)

device_leases = Table(
    "device_leases",
    metadata,
    # no foreign key: it stands until the processes are gone, whatever becomes of the job's row meanwhile
    Column("job_id", _Id, primary_key=True),
    Column("fence", BigInteger, primary_key=True, autoincrement=False),
    _tenant(),
    # one row for each device of the attempt
    Column("device_uuid", String(100), ForeignKey("devices.uuid"), primary_key=True),
    Column("bytes", BigInteger, nullable=False),
    Column("whole", Boolean, nullable=False),  # no other is let onto the device
    Column("worker_id", _Id, nullable=False),
    Column("process_space", String(300), nullable=False),
    Column("guardian_pid", Integer),
    Column("guardian_started", BigInteger),
    Column("leased_at", Moment(), nullable=False),
    Column("draining_at", Moment()),  # since when no process may write for the job, though its processes may live
    Index(None, "device_uuid"),
)

_partial("ix_device_leases_whole", "whole", device_leases.c.device_uuid, unique=True)

counters = Table(
    "counters",
    metadata,
    Column("name", String(40), primary_key=True),
    Column("label", String(80), primary_key=True),
    Column("shard", Integer, primary_key=True, autoincrement=False),
    Column("value", BigInteger, nullable=False),
    Column("changed_at", Moment(), nullable=False),
)

proof_keys = Table(
    "proof_keys",
    metadata,
    # the tables' owner alone reads it: what proves a declared tenant (``jobs.schema.tenant_declaration``)
    Column("role", String(63), primary_key=True),
    Column("secret", String(64), nullable=False),
)
