"""Every rule of divided jobs and device groups speaks up: a sound job of two pieces, and one forgery after another."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.codec import sha256_of
from tests.chaos.audit import Leased, Move, Write
from tests.chaos.checker import check
from tests.chaos.evidence import Evidence
from tests.chaos.stack.clients import History
from tests.chaos.stack.documents import GATED, LABEL, Truth
from tests.chaos.test_checker import CONTENT, DIGEST, OUTCOME, event, told
from tests.chaos.test_checker import JOB as WHOLE

FIRST, SECOND, THIRD = (f"01900000-0000-7000-8000-00000000001{n}" for n in (1, 2, 3))
PIECE_DIGEST = hashlib.sha256(b"a piece").hexdigest()
FACTORS = "factors/0.safetensors"
DIVIDES, FIRST_ENDS, SECOND_ENDS = 2, 5, 6
"""Transactions."""


def move(job_id: str, old: str | None, new: str, fence: int, transaction: int) -> Move:
    before = None if old is None else fence - 1 if (old, new) == ("queued", "running") else fence
    return Move(job_id, old, new, before, fence, 1, None, transaction)


def write(job_id: str, name: str, sha256: str | None = None, place: str = "artifacts", fence: int = 1) -> Write:
    return Write(place, "INSERT", job_id, name, fence, fence, "running", sha256)


def lease(job_id: str, fence: int, transaction: int, device: str = "FAKE-0") -> Leased:
    return Leased(job_id, fence, device, "fake", transaction)


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    """A job of two ranks' devices, divided into two pieces of four examples, and merged."""
    uri = f"objects/tenant/{DIGEST[:2]}/{DIGEST}"
    (tmp_path / uri).parent.mkdir(parents=True)
    (tmp_path / uri).write_bytes(CONTENT)
    sound = Evidence(
        history=History([told("submit", state="queued"), told("look")]),
        truths={GATED: Truth({("capacity", 0): sha256_of(OUTCOME)}, {FACTORS: DIGEST})},
        root=tmp_path,
        moves=[
            move(WHOLE, None, "queued", 0, 0),
            move(WHOLE, "queued", "running", 1, 1),
            move(WHOLE, "running", "waiting", 1, DIVIDES),
            move(FIRST, None, "queued", 0, DIVIDES),
            move(SECOND, None, "queued", 0, DIVIDES),
            move(FIRST, "queued", "running", 1, 3),
            move(SECOND, "queued", "running", 1, 4),
            move(FIRST, "running", "succeeded", 1, FIRST_ENDS),
            move(SECOND, "running", "succeeded", 1, SECOND_ENDS),
            move(WHOLE, "waiting", "queued", 1, SECOND_ENDS),
            move(WHOLE, "queued", "running", 2, 7),
            move(WHOLE, "running", "succeeded", 2, 8),
        ],
        writes=[
            write(FIRST, FACTORS, PIECE_DIGEST),
            write(SECOND, FACTORS, PIECE_DIGEST),
            write(WHOLE, "capacity 0", place="layer_results", fence=2),
            write(WHOLE, FACTORS, DIGEST, fence=2),
            dataclasses.replace(write(FIRST, FACTORS, PIECE_DIGEST), operation="DELETE", job_state="succeeded"),
        ],
    )
    sound.leases = [
        *(lease(WHOLE, 1, 1), lease(WHOLE, 1, 1, "FAKE-1"), lease(FIRST, 1, 3), lease(SECOND, 1, 4, "FAKE-1")),
        *(lease(WHOLE, 2, 7), lease(WHOLE, 2, 7, "FAKE-1")),
    ]
    document = {"model": {"kwargs": {}}, "labels": {LABEL: "first"}, "shards": 2}
    job = {"state": "succeeded", "document": document, "event_seq": 20, "failure": None, "world_size": 1}
    sound.jobs[WHOLE] = job | {"parent_id": None, "piece": None, "world_size": 2}
    for index, piece in enumerate((FIRST, SECOND)):
        sound.jobs[piece] = job | {"parent_id": WHOLE, "piece": part(index)}
        sound.events[piece] = states("queued", "running", "succeeded")
    sound.events[WHOLE] = states("queued", "running", "waiting", "queued", "running", "succeeded")
    sound.events[WHOLE].insert(5, event(6, "layer", kind="capacity", ordinal=0))
    sound.rows[WHOLE] = [{"kind": "capacity", "ordinal": 0, "outcome": OUTCOME, "sha256": sha256_of(OUTCOME)}]
    sound.listed[WHOLE] = [{"name": FACTORS, "uri": uri, "sha256": DIGEST, "size_bytes": len(CONTENT)}]
    return sound


def part(index: int, **changes: Any) -> dict[str, Any]:
    begins = 4 * index
    return {"round": "collect", "index": index, "count": 2, "begin": begins, "end": begins + 4, "total": 8} | changes


def states(*names: str) -> list[dict[str, Any]]:
    return [event(number, "state", state=name) for number, name in enumerate(names, 1)]


def test_a_sound_divided_job_breaks_no_promise(evidence: Evidence) -> None:
    assert check(evidence) == []


def forged(evidence: Evidence, old: str, new: str, job_id: str, **changes: Any) -> None:
    """Change the last move of the job from one state to the other."""
    number = [(each.job_id, each.old_state, each.new_state) for each in evidence.moves[::-1]].index((job_id, old, new))
    place = len(evidence.moves) - 1 - number
    evidence.moves[place] = dataclasses.replace(evidence.moves[place], **changes)


def third(evidence: Evidence, index: int = 2, **changes: Any) -> None:
    """One piece more than the round has, made and done with the others."""
    evidence.jobs[THIRD] = {**evidence.jobs[FIRST], "piece": part(index, **changes)}
    evidence.events[THIRD] = evidence.events[FIRST]
    evidence.moves[5:5] = [
        *(move(THIRD, None, "queued", 0, DIVIDES), move(THIRD, "queued", "running", 1, 9)),
        move(THIRD, "running", "succeeded", 1, 10),
    ]
    evidence.leases.append(lease(THIRD, 1, 9))
    evidence.writes.append(write(THIRD, FACTORS, PIECE_DIGEST))


def piece_ends(evidence: Evidence, state: str) -> None:
    """The second piece ends otherwise, and its job goes on as if nothing were."""
    evidence.jobs[SECOND] = {**evidence.jobs[SECOND], "state": state}
    evidence.events[SECOND] = states("queued", "running", state)
    forged(evidence, "running", "succeeded", SECOND, new_state=state)


def returns_early(evidence: Evidence) -> None:
    """With the first piece."""
    moved = evidence.moves.pop(9)
    evidence.moves.insert(8, dataclasses.replace(moved, transaction=FIRST_ENDS))


def waits_again(evidence: Evidence) -> None:
    """Divided in the same round once more, with no piece more."""
    evidence.moves[10:10] = [
        *(move(WHOLE, "queued", "running", 2, 20), move(WHOLE, "running", "waiting", 2, 21)),
        move(WHOLE, "waiting", "queued", 2, SECOND_ENDS),
    ]


def cancelled_first(evidence: Evidence) -> None:
    """The job was cancelled while it waited, and a piece begun after that."""
    del evidence.moves[9:]
    begun = evidence.moves.pop(6)
    evidence.moves[6:6] = [move(WHOLE, "waiting", "cancelled", 1, 30), begun]


def another_file(evidence: Evidence) -> None:
    """A piece of the same kind of another job lists another file."""
    evidence.jobs[WHOLE] = {**evidence.jobs[WHOLE], "state": "cancelled"}
    uri = evidence.listed[WHOLE][0]["uri"]
    evidence.listed[FIRST] = [{"name": FACTORS, "uri": uri, "sha256": DIGEST, "size_bytes": len(CONTENT)}]


FORGERIES: dict[str, tuple[str, str, Callable[[Evidence], Any]]] = {
    "a piece too many": ("duplicated", "has the pieces [0, 1, 2] of [2]", third),
    "a piece twice": ("duplicated", "has the pieces [0, 1, 1]", lambda e: third(e, 1)),
    "examples twice": ("value", "measures [(0, 4), (2, 8)]", lambda e: e.jobs[SECOND]["piece"].update(begin=2)),
    "examples left out": ("value", "measures [(0, 4), (4, 7)]", lambda e: e.jobs[SECOND]["piece"].update(end=7)),
    "divided twice": ("duplicated", "waited 2 times", waits_again),
    "on before the last piece": ("illegal", f"waiting to queued, without ['{SECOND}']", returns_early),
    "on without a piece": ("illegal", f"without ['{SECOND}']", lambda e: piece_ends(e, "cancelled")),
    "on by itself": (
        *("illegal", "apart from the end of its last piece"),
        lambda e: forged(e, "waiting", "queued", WHOLE, transaction=40),
    ),
    "failed by itself": (
        *("illegal", "failed apart from its piece"),
        lambda e: forged(e, "waiting", "queued", WHOLE, new_state="failed"),
    ),
    "a piece made later": (
        *("illegal", "apart from the division"),
        lambda e: e.moves.__setitem__(4, dataclasses.replace(e.moves[4], transaction=41)),
    ),
    "an orphan": ("lost", "is queued, and its job has ended", lambda e: e.jobs[SECOND].update(state="queued")),
    "begun too late": ("illegal", "was begun after its job had ended", cancelled_first),
    "a row of a piece": ("value", "is another than undisturbed", lambda e: e.rows.update({FIRST: e.rows[WHOLE]})),
    "another file of a piece": ("value", "is another than undisturbed", another_file),
    "a file gone too early": ("duplicated", "DELETE", lambda e: e.jobs[WHOLE].update(state="failed")),
    "one device of two": ("illegal", "has 1 devices, and 2 are needed", lambda e: e.leases.pop()),
    "one device twice": (
        *("illegal", "has 2 devices, and 2 are needed"),
        lambda e: e.leases.__setitem__(-1, lease(WHOLE, 2, 7)),
    ),
    "a device too late": (
        *("illegal", "apart from its claim"),
        lambda e: e.leases.__setitem__(-1, lease(WHOLE, 2, 42, "FAKE-1")),
    ),
    "a device unclaimed": ("illegal", "was never claimed", lambda e: e.leases.append(lease(FIRST, 9, 9))),
    "a device kept": ("lost", "still holds a device", lambda e: e.held.append((SECOND, 1))),
    "a word while waiting": (
        *("stale", "(progress)"),
        lambda e: e.events[WHOLE].insert(3, event(3, "progress")),
    ),
}
"""Which promise each breaks, and what the checker says."""


@pytest.mark.parametrize("forgery", FORGERIES)
def test_each_broken_promise_of_a_division_is_told(evidence: Evidence, forgery: str) -> None:
    promise, detail, forge = FORGERIES[forgery]
    forge(evidence)
    found = check(evidence)
    assert [each for each in found if each.promise == promise and detail in each.detail], list(map(str, found))
