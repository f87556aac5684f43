"""The records that the ledger returns: frozen, and independent of database rows."""

from collections.abc import Mapping
from dataclasses import field
from datetime import datetime
from typing import Any, Literal

from catalog.record import record
from jobs.devices.leases import DeviceLease
from jobs.lifecycle import TERMINAL, State

LOCAL_TENANT = "local"
"""Id and name of the one tenant of embedded mode; the first migration creates it."""

Scope = Literal["read", "submit", "admin"]


@record
class Job:
    """One job as its tenant sees it."""

    id: str
    tenant_id: str
    name: str | None
    labels: Mapping[str, str]
    note: str | None
    kinds: tuple[str, ...]
    document: Mapping[str, Any]
    document_sha256: str
    idempotency_key: str | None
    state: State
    priority: int
    world_size: int
    needs_bytes: int | None
    attempt: int
    """Claims so far; a drained claim is returned."""
    failures: int
    max_failures: int
    fence: int
    event_seq: int
    """Grows with every write, so `(id, event_seq)` names a version of the job."""
    cancel_requested_at: datetime | None
    cancel_requested_by: str | None
    """Prefix of the API key that asked for it; None in embedded mode, and of a piece, which ends with its job."""
    deadline_at: datetime | None
    progress: Mapping[str, Any] | None
    failure: Mapping[str, Any] | None
    """`category, code, message, pointer, layer`; the operator's `detail` stays in the database."""
    plan: Mapping[str, Any] | None
    manifest: Mapping[str, Any] | None
    summary: Mapping[str, Any] | None
    created_at: datetime
    queued_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    archived_at: datetime | None
    """When its rows left the ledger for its archive."""
    parent_id: str | None
    """The divided job that this one computes a piece of; None of a job that was submitted."""
    piece: Mapping[str, Any] | None
    """The piece, with the fields of `catalog.requests.pieces.Piece`."""

    @property
    def ended(self) -> bool:
        """Whether the job is in a terminal state."""
        return self.state in TERMINAL


@record
class Submitted:
    """The answer to a submission."""

    job: Job
    created: bool
    """False where the idempotency key brought back an earlier job."""


@record
class JobPage:
    """Jobs, newest first."""

    items: tuple[Job, ...]
    next: str | None
    """Give it as ``before`` to read on; null at the end."""


@record
class LayerRow:
    """One stored layer result."""

    kind: str
    ordinal: int
    layer: str
    attempt: int
    fence: int
    sha256: str
    """Over the canonical JSON of ``outcome``."""
    outcome: Mapping[str, Any]
    """Everything reproducible: `catalog.analyses.analysis.LayerResult` without `observed`."""
    observed: Mapping[str, Any]


@record
class LayerPage:
    """Layer rows in the order asked for."""

    items: tuple[LayerRow, ...]
    next: str | None
    """Give it as ``after`` to read on; null at the end."""


@record
class Artifact:
    """One file of a job."""

    job_id: str
    name: str
    sha256: str
    size_bytes: int
    media_type: str
    uri: str
    """Key in the store of artifacts."""


@record
class Event:
    """One line of a job's history."""

    seq: int
    at: datetime
    type: str
    data: Mapping[str, Any]


@record
class Claim:
    """The right to write to a job, as long as its fence stands."""

    job_id: str
    tenant_id: str
    kinds: tuple[str, ...]
    document: Mapping[str, Any]
    document_sha256: str
    fence: int
    claim_token: str
    """Drawn for this claim: a database that lost a commit in a failover may hand out one fence twice."""
    attempt: int
    failures: int
    plan: Mapping[str, Any] | None
    """Fixed by the first attempt that planned; later attempts follow it."""
    manifest: Mapping[str, Any] | None
    """The environment of the last attempt that started."""
    completed: tuple[tuple[str, int], ...]
    """`(kind, ordinal)` of the layers that have rows already."""
    cancel_requested_at: datetime | None
    deadline_at: datetime | None
    lease: DeviceLease | None = None
    """The lease of its devices; None where no device was asked for."""
    world_size: int = 1
    """The ranks of the attempt."""
    parent_id: str | None = None
    """The divided job that this one computes a piece of."""
    piece: Mapping[str, Any] | None = None
    """The piece, with the fields of `catalog.requests.pieces.Piece`."""
    percent: float = 0.0
    """How far the job is: not 0 where the attempt goes on after its pieces."""
    kept: Mapping[str, float] = field(default_factory=dict)
    """The share of each stage, from 0 to 1, that a checkpoint of an earlier attempt holds."""
    user_number: int = 0
    """The job's user, counted from the first user that the operator sets aside for jobs (`jobs.queue.claims`)."""


@record
class Caller:
    """The holder of a valid key."""

    tenant_id: str
    scopes: frozenset[Scope]
    key: str | None = None
    """Prefix of the key; null in embedded mode, which asks for none."""

    def may(self, scope: Scope) -> bool:
        """Return whether the key carries a scope that a route asks for; `admin` carries all."""
        return scope in self.scopes or "admin" in self.scopes
