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

    def truth(self, job_id: str) -> Truth:
        """Of the job's document."""
        return self.truths[variant_of(self.jobs[job_id]["document"])]

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
    found = Evidence(history, truths, root, audit.moves(engine), audit.writes(engine))
    with engine.connect() as connection:
        for job in connection.execute(text("SELECT * FROM jobs ORDER BY id")).mappings():
            found.jobs[job["id"]] = dict(job)
        for place, order, kept in (
            ("job_events", "seq", found.events),
            ("layer_results", "kind, ordinal", found.rows),
            ("artifacts", "name", found.listed),
        ):
            for row in connection.execute(text(f"SELECT * FROM {place} ORDER BY job_id, {order}")).mappings():
                kept[row["job_id"]].append(dict(row))
    return found
