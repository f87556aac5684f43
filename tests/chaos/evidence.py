"""What a campaign leaves behind, read once for the checker: rows, events, the triggers' records, files, digests."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text

from tests.chaos import audit
from tests.chaos.stack.clients import History
from tests.chaos.stack.documents import LABEL, Truth, variant_of

Row = Mapping[str, Any]
BASES = "factors/bases/"
"""Where a job leaves what its own later pieces read; it goes when the job has succeeded."""
_FOREIGN = text("SELECT jobs.id FROM jobs JOIN tenants ON tenants.id = jobs.tenant_id WHERE tenants.name = 'evil'")
_HELD = text("SELECT job_id, fence FROM device_leases ORDER BY job_id, fence")


@dataclass
class Evidence:
    """Everything there is to judge by."""

    history: History
    truths: Mapping[int, Truth]
    root: Path
    moves: list[audit.Move]
    writes: list[audit.Write]
    jobs: dict[str, Row] = field(default_factory=dict)
    events: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    rows: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    listed: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    leases: list[audit.Leased] = field(default_factory=list)
    held: list[tuple[str, int]] = field(default_factory=list)
    """Job and epoch of each lease of a device that stands at the end."""

    def truth(self, job_id: str) -> Truth:
        """What the job's document gives undisturbed; of a piece, what the first of its kind has written."""
        if self.parent(job_id) is not None:
            return Truth({}, self.first_written(job_id))
        return self.truths[variant_of(self.jobs[job_id]["document"])]

    def parent(self, job_id: str) -> str | None:
        """The divided job that a piece is of; None of any other."""
        found: str | None = self.jobs[job_id].get("parent_id") if job_id in self.jobs else None
        return found

    def pieces(self, job_id: str) -> dict[str, dict[str, Mapping[str, Any]]]:
        """The pieces of a divided job by round, each by its job's id."""
        found: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
        for each, job in self.jobs.items():
            if job.get("parent_id") == job_id:
                found[job["piece"]["round"]][each] = job["piece"]
        return found

    def kind_of(self, job_id: str) -> tuple[Any, ...]:
        """What all jobs share that must write the same: document, round and number of the piece."""
        job = self.jobs[job_id]
        piece = job.get("piece") or {}
        return variant_of(job["document"]), piece.get("round"), piece.get("index")

    def first_written(self, job_id: str) -> dict[str, str]:
        """Files that jobs of this kind have listed, each with the digest that it had when it first was."""
        found: dict[str, str] = {}
        listed = [each for each in self.writes if (each.place, each.operation) == ("artifacts", "INSERT")]
        for each in listed:
            if each.sha256 and each.job_id in self.jobs and self.kind_of(each.job_id) == self.kind_of(job_id):
                found.setdefault(each.name, each.sha256)
        return found

    def digest(self, job_id: str, name: str) -> str | None:
        """What a file of a job must have; eigenbases, which no undisturbed run lists, as they were first written."""
        found = self.truth(job_id).artifacts.get(name)
        return self.first_written(job_id).get(name) if found is None and name.startswith(BASES) else found

    def label(self, job_id: str) -> str | None:
        """The intention that the job says it is of."""
        found: str | None = self.jobs[job_id]["document"].get("labels", {}).get(LABEL)
        return found

    def state(self, job_id: str | None) -> str | None:
        job = self.jobs.get(str(job_id))
        return None if job is None else str(job["state"])

    def told_states(self, job_id: str) -> list[str]:
        """The states that the job's events tell of, in order."""
        return [event["data"]["state"] for event in self.events[job_id] if event["type"] == "state"]

    @property
    def claims(self) -> list[audit.Move]:
        """Every time that a job was taken by a worker."""
        return [move for move in self.moves if (move.old_state, move.new_state) == ("queued", "running")]

    @property
    def reclaims(self) -> int:
        """How often a job was taken that had been taken before."""
        return sum(times - 1 for times in Counter(move.job_id for move in self.claims).values())


def gather(engine: Engine, history: History, truths: Mapping[int, Truth], root: Path) -> Evidence:
    """Read the ledger and the triggers' records."""
    found = Evidence(history, truths, root, audit.moves(engine), audit.writes(engine), leases=audit.leases(engine))
    with engine.connect() as connection:
        # a tenant that attacks the others is no client whose jobs are judged
        foreign = set(connection.execute(_FOREIGN).scalars())
        found.held = [(row.job_id, row.fence) for row in connection.execute(_HELD) if row.job_id not in foreign]
        for job in connection.execute(text("SELECT * FROM jobs ORDER BY id")).mappings():
            if job["id"] not in foreign:
                found.jobs[job["id"]] = dict(job)
        for place, order, kept in (
            ("job_events", "seq", found.events),
            ("layer_results", "kind, ordinal", found.rows),
            ("artifacts", "name", found.listed),
        ):
            for row in connection.execute(text(f"SELECT * FROM {place} ORDER BY job_id, {order}")).mappings():
                if row["job_id"] not in foreign:
                    kept[row["job_id"]].append(dict(row))
    found.moves = [each for each in found.moves if each.job_id not in foreign]
    found.writes = [each for each in found.writes if each.job_id not in foreign]
    found.leases = [each for each in found.leases if each.job_id not in foreign]
    return found
