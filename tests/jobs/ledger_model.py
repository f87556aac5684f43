"""What the ledger promises, in plain Python: a list of jobs, no SQL, no clock and no second process.

It is written from the design and imports nothing of `jobs`, so that the two cannot be wrong in the same way.
Each method says what the ledger must answer, and changes the model where the ledger must have changed.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOVES: dict[str, set[str]] = {
    "queued": {"running", "cancelled"},
    "running": {"queued", "cancelling", "succeeded", "failed"},
    "cancelling": {"cancelled"},
    "succeeded": set(),
    "failed": set(),
    "cancelled": set(),
}
HELD = ("running", "cancelling")
ENDED = ("succeeded", "failed", "cancelled")


def digest(outcome: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of an outcome of integers and plain letters."""
    return hashlib.sha256(json.dumps(outcome, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(eq=False, repr=False)
class Job:
    """One job. `version` grows with every change, so that a job of the same version must be the same to the bit."""

    number: int
    id: str
    tenant: str
    key: str | None
    document: str
    max_failures: int
    state: str = "queued"
    attempt: int = 0
    failures: int = 0
    fence: int = 0
    token: str | None = None
    last_token: str | None = None
    silent: bool = False
    """Whether its lease has run out; the holder keeps the job until a reaper comes."""
    stage: str | None = None
    environment: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    ended_as: dict[str, Any] | None = None
    failure: tuple[str, str] | None = None
    crash: dict[str, Any] | None = None
    layers: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    artifacts: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stamps: Counter[str] = field(default_factory=lambda: Counter(created_at=1, queued_at=1))
    """How often each stamp was set; one that was never set is null."""
    version: int = 0
    deleted: bool = False

    def __post_init__(self) -> None:
        self.tell("state", state="queued", attempt=0)

    def __repr__(self) -> str:
        return f"job {self.number}"

    def holds(self, fence: int) -> bool:
        """Whether who claimed it under that fence may still write."""
        return not self.deleted and self.state in HELD and self.fence == fence

    def tell(self, event: str, **data: Any) -> None:
        """Append to the history."""
        self.version += 1
        self.events.append((event, data))

    def move(self, state: str) -> None:
        """Go to ``state`` with all that belongs to it."""
        assert state in MOVES[self.state], f"the model itself goes from {self.state} to {state}"
        self.state = state
        if state not in HELD:
            self.token, self.silent = None, False
        if state in ENDED:
            self.stamps["finished_at"] += 1
        self.tell("state", state=state, attempt=self.attempt)

    def end(self, wanted: str) -> str:
        """End the attempt; a job that is being cancelled ends cancelled, whatever was wanted."""
        self.move("cancelled" if self.state == "cancelling" else wanted)
        if self.state == "queued":
            self.stage = None
        return self.state

    def claim(self, token: str) -> str:
        """`taken`, `recognised` (a claim whose reply was lost), or `dropped`."""
        if self.deleted:
            return "dropped"
        if self.state == "queued":
            self.attempt += 1
            self.fence += 1
            self.stage = None
            self.stamps["started_at"] = 1
            self.move("running")
            self.token = self.last_token = token
            return "taken"
        if self.state not in HELD or self.token != token:
            return "dropped"
        self.renew()  # who asks counts the lease from this question on
        return "recognised"

    def renew(self) -> None:
        """Hear from the holder."""
        self.silent = False
        self.version += 1

    def start(self, environment: dict[str, Any]) -> None:
        """Take the attempt's environment."""
        self.environment = environment
        self.tell("started", attempt=self.attempt)

    def go_on(self, stage: str) -> None:
        """Take progress: only a new stage is an event."""
        if stage == self.stage:
            self.version += 1
        else:
            self.stage = stage
            self.tell("progress", stage=stage)

    def take_plan(self, plan: dict[str, Any]) -> None:
        """Keep the first plan, unless memory proved it wrong."""
        if self.plan is None or plan.get("planning_errors"):
            self.plan = plan
        self.tell("plan", plan=plan)

    def take_layer(self, kind: str, ordinal: int, outcome: dict[str, Any]) -> str:
        """Keep the first row of a layer."""
        row = {"outcome": outcome, "sha256": digest(outcome), "fence": self.fence, "attempt": self.attempt}
        return self._keep(self.layers, (kind, ordinal), row, "layer", kind=kind, ordinal=ordinal)

    def take_artifact(self, name: str, sha256: str) -> str:
        """Keep the first row of a file."""
        row = {"sha256": sha256, "fence": self.fence, "attempt": self.attempt}
        return self._keep(self.artifacts, name, row, "artifact", name=name)

    def _keep(self, rows: dict[Any, Any], key: Any, row: dict[str, Any], event: str, **told: Any) -> str:
        kept = rows.setdefault(key, row)
        if kept is row:
            self.tell(event, sha256=row["sha256"], **told)
            return "written"
        if kept["sha256"] == row["sha256"]:
            self.version += 1  # the number of the write is drawn, though nothing is told
            return "repeated"
        self.tell("digest_differs", sha256=row["sha256"], kept_sha256=kept["sha256"], **told)
        return "differs"

    def sum_up(self, kind: str, summary: dict[str, Any]) -> None:
        """Keep an analysis's summary under its kind."""
        self.summary = self.summary | {kind: summary}
        self.tell("summary", kind=kind)

    def crashed(self, signature: dict[str, Any]) -> bool:
        """Keep a crash; True where the crash before was the same."""
        again, self.crash = self.crash == signature, signature
        self.tell("crash", signature=signature)
        return again

    def finish(self) -> str:
        """End the attempt as done."""
        self.ended_as = {"artifacts": len(self.artifacts), "fence": self.fence, "attempt": self.attempt}
        return self.end("succeeded")

    def fail(self, category: str, code: str) -> str:
        """End the attempt with a failure that counts, unless the job is being cancelled."""
        if self.state == "cancelling":
            return self.end("cancelled")
        self.failures += 1
        if category == "transient" and self.failures < self.max_failures:
            self.stamps["queued_at"] += 1
            return self.end("queued")
        self.failure = (category, code)
        return self.end("failed")

    def hand_back(self) -> str:
        """Return the attempt uncounted; a job keeps its place in the queue."""
        if self.state == "running":
            self.attempt -= 1
        return self.end("queued")

    def cancel(self) -> str:
        """Be asked to stop: at once, or by way of the holder; an ended job stays as it is."""
        if self.state in ("queued", "running"):
            self.stamps["cancel_requested_at"] = 1
            self.move("cancelled" if self.state == "queued" else "cancelling")
        return self.state


@dataclass(frozen=True, eq=False, repr=False)
class Hold:
    """What somebody who once claimed a job keeps, whether or not it still counts."""

    job: Job
    fence: int
    claim: Any
    """As the ledger gave it out."""

    def __repr__(self) -> str:
        return f"the holder of {self.job} under fence {self.fence}"

    @property
    def valid(self) -> bool:
        """Whether it may still write."""
        return self.job.holds(self.fence)

    @property
    def standing(self) -> tuple[int, int, str, int, bool]:
        """Where it stands towards the job; nothing else can make a difference to what it may write."""
        return (self.job.number, self.fence, self.job.state, self.job.fence, self.job.deleted)


class Model:
    """All jobs that ever were, and everybody who ever claimed one."""

    def __init__(self) -> None:
        self.ever: list[Job] = []
        self.holds: list[Hold] = []

    def jobs(self, *states: str) -> list[Job]:
        """The jobs that are there, or those in one of ``states``."""
        return [job for job in self.ever if not job.deleted and (not states or job.state in states)]

    def holders(self) -> list[Hold]:
        """Who may write."""
        return [hold for hold in self.holds if hold.valid]

    def remembered(self) -> list[Job]:
        """The jobs that are there, and the last one that was."""
        return self.jobs() + [job for job in self.ever if job.deleted][-1:]

    def zombies(self) -> list[Hold]:
        """Who may not write any more, to a job that is remembered."""
        remembered = self.remembered()
        return [hold for hold in self.holds if not hold.valid and hold.job in remembered]

    def stored_by(self, tenant: str, key: str | None) -> Job | None:
        """The job that this key of this tenant belongs to."""
        return next((job for job in self.jobs() if key is not None and (job.tenant, job.key) == (tenant, key)), None)

    def silent(self) -> list[Job]:
        """Jobs that a reaper must take."""
        return [job for job in self.jobs(*HELD) if job.silent]

    def reap(self) -> int:
        """Take every silent job away; how many that were."""
        taken = self.silent()
        for job in taken:
            job.fail("transient", "worker_lost")
        return len(taken)
