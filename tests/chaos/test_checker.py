"""Every rule of the checker speaks up: evidence of a sound job, and one forgery after another in it."""

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from jobs.codec import sha256_of
from tests.chaos.audit import Move, Write
from tests.chaos.checker import check
from tests.chaos.evidence import Evidence
from tests.chaos.stack.clients import Entry, History
from tests.chaos.stack.documents import GATED, LABEL, Truth

JOB = "01900000-0000-7000-8000-000000000001"
OTHER = "01900000-0000-7000-8000-000000000002"
OUTCOME = {"metrics": {"effective_rank": 1.5}}
CONTENT = b"what was computed"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def told(action: Any, outcome: Any = "ok", job_id: str | None = JOB, state: str | None = "succeeded") -> Entry:
    return Entry(0.0, action, "first", outcome, job_id, state)


def event(seq: int, type_: str, **data: Any) -> dict[str, Any]:
    return {"seq": seq, "type": type_, "data": data, "at": datetime.now(UTC)}


def move(old: str | None, new: str | None, fences: tuple[int | None, int | None], manifest: int | None = None) -> Move:
    return Move(JOB, old, new, *fences, attempt=1, manifest_fence=manifest)


def write(place: str, name: str, fence: int = 2, operation: str = "INSERT", state: str = "running") -> Write:
    return Write(place, operation, JOB, name, fence, 2, state)


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    """A job that was taken twice and succeeded, with one row and one file."""
    uri = f"objects/tenant/{DIGEST[:2]}/{DIGEST}"
    (tmp_path / uri).parent.mkdir(parents=True)
    (tmp_path / uri).write_bytes(CONTENT)
    sound = Evidence(
        history=History([told("submit", "unknown", None), told("submit", state="queued"), told("look")]),
        truths={GATED: Truth({("capacity", 0): sha256_of(OUTCOME)}, {"factors/0.safetensors": DIGEST})},
        root=tmp_path,
        moves=[
            move(None, "queued", (None, 0)),
            move("queued", "running", (0, 1)),
            move("running", "queued", (1, 1)),
            move("queued", "running", (1, 2)),
            move("running", "running", (2, 2), 2),
            move("running", "succeeded", (2, 2)),
        ],
        writes=[write("layer_results", "capacity 0"), write("artifacts", "factors/0.safetensors")],
    )
    document = {"model": {"kwargs": {}}, "labels": {LABEL: "first"}}
    sound.jobs[JOB] = {"state": "succeeded", "document": document, "event_seq": 20, "failure": None}
    sound.events[JOB] = [
        event(1, "state", state="queued", attempt=0),
        event(2, "state", state="running", attempt=1),
        event(3, "started", attempt=1),
        event(5, "state", state="queued", attempt=1),
        event(7, "state", state="running", attempt=2),
        event(8, "started", attempt=2),
        event(9, "layer", kind="capacity", ordinal=0),
        event(11, "state", state="succeeded", attempt=2),
    ]
    sound.rows[JOB] = [{"kind": "capacity", "ordinal": 0, "outcome": OUTCOME, "sha256": sha256_of(OUTCOME)}]
    listed = {"name": "factors/0.safetensors", "uri": uri, "sha256": DIGEST, "size_bytes": len(CONTENT)}
    sound.listed[JOB] = [listed]
    return sound


def test_a_sound_job_breaks_no_promise(evidence: Evidence) -> None:
    assert check(evidence) == []


def is_still(evidence: Evidence, state: str) -> None:
    evidence.jobs[JOB] = {**evidence.jobs[JOB], "state": state}


def another_job(evidence: Evidence) -> None:
    """Of the same intention, and no client was told of it."""
    evidence.jobs[OTHER] = {**evidence.jobs[JOB], "state": "cancelled"}


def delete(evidence: Evidence) -> None:
    for kept in (evidence.jobs, evidence.rows, evidence.listed, evidence.events):
        kept.clear()


def tear(evidence: Evidence) -> None:
    (evidence.root / evidence.listed[JOB][0]["uri"]).write_bytes(CONTENT[:5])


def leave(evidence: Evidence, place: str) -> None:
    (evidence.root / place).parent.mkdir(parents=True, exist_ok=True)
    (evidence.root / place).write_bytes(CONTENT[:5])


FORGERIES: dict[str, tuple[str, Callable[[Evidence], Any]]] = {
    "still running": ("lost", lambda e: is_still(e, "running")),
    "gone": ("lost", delete),
    "looked at in vain": ("lost", lambda e: e.history.add(told("look", "failed", state="404"))),
    "never answered": ("lost", lambda e: e.history.add(Entry(0.0, "submit", "second", "unknown"))),
    "nobody's": ("unexpected", another_job),
    "failed": ("unexpected", lambda e: is_still(e, "failed")),
    "cancelled unasked": ("unexpected", lambda e: is_still(e, "cancelled")),
    "ended otherwise": ("unexpected", lambda e: e.history.add(told("look", state="cancelled"))),
    "cancelled in vain": ("unexpected", lambda e: e.history.add(told("cancel", state="cancelling"))),
    "two of one label": ("duplicated", another_job),
    "two of one key": ("duplicated", lambda e: e.history.add(told("submit", job_id=OTHER))),
    "inserted twice": ("duplicated", lambda e: e.writes.append(write("layer_results", "capacity 0"))),
    "overwritten": ("duplicated", lambda e: e.writes.append(write("layer_results", "capacity 0", operation="UPDATE"))),
    "told twice": ("duplicated", lambda e: e.events[JOB].insert(7, event(10, "layer", kind="capacity", ordinal=0))),
    "back from its end": ("illegal", lambda e: e.moves.append(move("succeeded", "running", (2, 2)))),
    "a leap": ("illegal", lambda e: e.moves.append(move("queued", "failed", (2, 2)))),
    "deleted": ("illegal", lambda e: e.moves.append(move("succeeded", None, (2, None)))),
    "an epoch of its own": ("illegal", lambda e: e.moves.insert(5, move("running", "running", (2, 3)))),
    "moved untold": ("illegal", lambda e: e.events[JOB].pop(3)),
    "an undrawn number": ("illegal", lambda e: e.events[JOB].append(event(21, "note"))),
    "an old epoch's row": ("stale", lambda e: e.writes.append(write("layer_results", "capacity 1", fence=1))),
    "after the end": ("stale", lambda e: e.writes.append(write("artifacts", "late", state="succeeded"))),
    "an old manifest": ("stale", lambda e: e.moves.insert(5, move("running", "running", (2, 2), 1))),
    "an old attempt's word": ("stale", lambda e: e.events[JOB].insert(6, event(8, "plan", attempt=1))),
    "a word from the queue": ("stale", lambda e: e.events[JOB].insert(4, event(6, "progress"))),
    "a torn file": ("artifact", tear),
    "a missing file": ("artifact", lambda e: (e.root / e.listed[JOB][0]["uri"]).unlink()),
    "a torn object": ("artifact", lambda e: leave(e, f"objects/tenant/aa/{'a' * 64}")),
    "a torn staged file": ("artifact", lambda e: leave(e, f"{JOB}/1/factors/0.safetensors")),
    "a stranger's file": ("artifact", lambda e: leave(e, f"{OTHER}/1/factors/0.safetensors")),
    "another outcome": ("value", lambda e: e.rows[JOB][0].update(outcome={"metrics": {"effective_rank": 1.25}})),
    "another digest": ("value", lambda e: e.rows[JOB][0].update(sha256="0" * 64)),
    "another file": ("value", lambda e: e.listed[JOB][0].update(sha256="0" * 64)),
    "two results": ("value", lambda e: e.events[JOB].insert(7, event(10, "digest_differs", ordinal=0))),
    "incomplete": ("value", lambda e: e.rows.clear()),
}
"""Which promise each breaks."""


@pytest.mark.parametrize("forgery", FORGERIES)
def test_each_broken_promise_is_told(evidence: Evidence, forgery: str) -> None:
    promise, forge = FORGERIES[forgery]
    forge(evidence)
    assert promise in {each.promise for each in check(evidence)}
