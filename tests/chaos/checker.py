"""The checker: whether a service that was attacked kept every promise, told from outside by what is left.

It trusts neither the ledger's code nor its tables of moves: the rules stand here again, in the words
of the promise, and are held against the clients' history, the ledger's rows and events, the records
of the database's own triggers (``audit``) and the digests of undisturbed runs. What became of the
files is told by ``files``.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from jobs.codec import sha256_of
from tests.chaos.division_rules import DIVISION_RULES, is_forgotten
from tests.chaos.evidence import Evidence
from tests.chaos.stack.clients import TERMINAL
from tests.chaos.stack.documents import MEASURED
from tests.chaos.stack.files import damaged_listings, strays
from tests.chaos.violation import Violation

LEGAL = {
    None: {"queued"},
    "queued": {"running", "failed", "cancelled"},
    "running": {"queued", "waiting", "cancelling", "succeeded", "failed"},
    "waiting": {"queued", "cancelling", "failed", "cancelled"},
    "cancelling": {"cancelled"},
    "succeeded": set(),
    "failed": set(),
    "cancelled": set(),
}
HELD = {"running", "cancelling"}
BY_ATTEMPTS = {"started", "progress", "plan", "layer", "artifact", "summary", "log", "crash", "digest_differs"}
"""Types of events that only the holder of a job writes."""


def check(evidence: Evidence) -> list[Violation]:
    """Every promise that was broken; none for a service as it should be."""
    rules = (
        *(_lost, _never_answered),
        *(_strangers, _unwanted_ends, _changed_ends, _ignored_cancels),
        *(_two_jobs, _two_writes, _two_tellings),
        *(_illegal_moves, _illegal_epochs, _untold_moves),
        *(_stale_writes, _stale_manifests, _stale_events),
        *(damaged_listings, strays),
        *(_rows, _artifact_values, _missing),
        *DIVISION_RULES,
    )
    return [violation for rule in rules for violation in rule(evidence)]


def _lost(evidence: Evidence) -> Iterator[Violation]:
    """Accepted, and not ended."""
    for key, ids in evidence.history.accepted.items():
        for job_id in ids:
            state = evidence.state(job_id)
            if state not in TERMINAL:
                yield Violation("lost", job_id, f"{key} was accepted, and is {state or 'not there'}")
    for entry in evidence.history.of("look", "failed"):
        yield Violation("lost", entry.job_id, f"{entry.key} was accepted, and looking at it was answered {entry.told}")


def _never_answered(evidence: Evidence) -> Iterator[Violation]:
    """Put again and again, and its fate is not known."""
    submitted = evidence.history.of("submit")
    known = {entry.key for entry in submitted if entry.outcome != "unknown"}
    for key in {entry.key for entry in submitted} - known:
        yield Violation("lost", None, f"{key} never got an answer")


def _strangers(evidence: Evidence) -> Iterator[Violation]:
    """Jobs that no client was told of."""
    told = {job_id for ids in evidence.history.accepted.values() for job_id in ids}
    for job_id in {each for each in evidence.jobs if evidence.parent(each) is None} - told:
        yield Violation("unexpected", job_id, f"no client was told of this job of {evidence.label(job_id)}")


def _unwanted_ends(evidence: Evidence) -> Iterator[Violation]:
    """No fault may cost a job more than time."""
    for job_id, job in evidence.jobs.items():
        if job["state"] == "failed":
            yield Violation("unexpected", job_id, f"failed: {job['failure']}")
        if job["state"] == "cancelled" and not {job_id, evidence.parent(job_id)} & evidence.history.cancelled:
            yield Violation("unexpected", job_id, "cancelled, and nobody asked for it")


def _changed_ends(evidence: Evidence) -> Iterator[Violation]:
    """An end that a client was told of stands."""
    for entry in evidence.history.of("look", "ok"):
        if entry.told in TERMINAL and evidence.state(entry.job_id) != entry.told:
            detail = f"a client was told {entry.told}, and it is {evidence.state(entry.job_id)}"
            yield Violation("unexpected", entry.job_id, detail)


def _ignored_cancels(evidence: Evidence) -> Iterator[Violation]:
    """Who was told `cancelling` need not ask again."""
    for entry in evidence.history.of("cancel", "ok"):
        state = evidence.state(entry.job_id)
        if entry.told in {"cancelling", "cancelled"} and state in TERMINAL - {"cancelled"}:
            yield Violation("unexpected", entry.job_id, f"its cancelling was answered {entry.told}, and it {state}")


def _two_jobs(evidence: Evidence) -> Iterator[Violation]:
    """One intention, one job."""
    intentions: dict[str | None, set[str]] = defaultdict(set)
    for job_id in evidence.jobs:
        if evidence.parent(job_id) is None:  # pieces have the document of their job
            intentions[evidence.label(job_id)].add(job_id)
    for key, ids in evidence.history.accepted.items():
        intentions[key] |= ids
    for intention, ids in intentions.items():
        if len(ids) > 1:
            yield Violation("duplicated", None, f"{intention} became {len(ids)} jobs: {', '.join(sorted(ids))}")


def _two_writes(evidence: Evidence) -> Iterator[Violation]:
    """A row is written once, and stays."""
    inserted = Counter((each.place, each.job_id, each.name) for each in evidence.writes if each.operation == "INSERT")
    for (place, job_id, name), times in inserted.items():
        if times > 1:
            yield Violation("duplicated", job_id, f"{name} of {place} was written {times} times")
    for each in evidence.writes:
        if each.operation != "INSERT" and not is_forgotten(evidence, each):
            yield Violation("duplicated", each.job_id, f"{each.operation} of {each.name} of {each.place}")


def _two_tellings(evidence: Evidence) -> Iterator[Violation]:
    """Every row is told of once in the events."""
    for job_id in evidence.jobs:
        told = Counter(
            (event["data"]["kind"], event["data"]["ordinal"])
            for event in evidence.events[job_id]
            if event["type"] == "layer"
        )
        if told != Counter((row["kind"], row["ordinal"]) for row in evidence.rows[job_id]):
            yield Violation("duplicated", job_id, f"its events tell of other rows than it has: {dict(told)}")


def _illegal_moves(evidence: Evidence) -> Iterator[Violation]:
    stood: dict[str, str | None] = {}
    for move in evidence.moves:
        if move.old_state != stood.get(move.job_id):
            yield Violation("illegal", move.job_id, f"was {stood.get(move.job_id)}, and moved from {move.old_state}")
        if move.new_state is None:
            yield Violation("illegal", move.job_id, "was deleted, and nobody asked for it")
        elif move.new_state != move.old_state and move.new_state not in LEGAL[move.old_state]:
            yield Violation("illegal", move.job_id, f"{move.old_state} to {move.new_state}")
        stood[move.job_id] = move.new_state


def _illegal_epochs(evidence: Evidence) -> Iterator[Violation]:
    """A claim begins a new epoch, and nothing else does."""
    for move in evidence.moves:
        if move.old_fence is None or move.new_fence is None:
            continue
        claimed = (move.old_state, move.new_state) == ("queued", "running")
        if move.new_fence != move.old_fence + (1 if claimed else 0):
            detail = f"epoch {move.old_fence} to {move.new_fence}, {move.old_state} to {move.new_state}"
            yield Violation("illegal", move.job_id, detail)


def _untold_moves(evidence: Evidence) -> Iterator[Violation]:
    """The events tell every move, and no other, under numbers that were drawn."""
    recorded: dict[str, list[str | None]] = defaultdict(list)
    for move in evidence.moves:
        if move.new_state != move.old_state:
            recorded[move.job_id].append(move.new_state)
    for job_id, job in evidence.jobs.items():
        if evidence.told_states(job_id) != recorded[job_id]:
            detail = f"moved through {recorded[job_id]}, and its events tell {evidence.told_states(job_id)}"
            yield Violation("illegal", job_id, detail)
        if any(event["seq"] > job["event_seq"] for event in evidence.events[job_id]):
            yield Violation("illegal", job_id, f"has events beyond {job['event_seq']}, the last number drawn")


def _stale_writes(evidence: Evidence) -> Iterator[Violation]:
    """Results are written by the holder alone."""
    for each in evidence.writes:
        if each.operation != "INSERT":
            continue
        what = f"{each.name} of {each.place} was written"
        if each.fence != each.job_fence:
            yield Violation("stale", each.job_id, f"{what} under epoch {each.fence}, the job's was {each.job_fence}")
        if each.job_state not in HELD:
            yield Violation("stale", each.job_id, f"{what} while the job was {each.job_state}")


def _stale_manifests(evidence: Evidence) -> Iterator[Violation]:
    for move in evidence.moves:
        if move.manifest_fence is not None and move.manifest_fence != move.new_fence:
            detail = f"its manifest was written under epoch {move.manifest_fence}, the job's was {move.new_fence}"
            yield Violation("stale", move.job_id, detail)


def _stale_events(evidence: Evidence) -> Iterator[Violation]:
    """What attempts tell of is told by the one whose claim came last, and only while it holds the job."""
    for job_id, events in evidence.events.items():
        attempt, held = 0, False
        for event in events:
            said = event["data"].get("attempt", attempt)
            if event["type"] == "state":
                state = event["data"]["state"]
                attempt, held = said, state == "running" or (held and state == "cancelling")
            elif event["type"] in BY_ATTEMPTS and (not held or said != attempt):
                detail = f"event {event['seq']} ({event['type']}) of attempt {said} in {attempt}, held: {held}"
                yield Violation("stale", job_id, detail)


def _rows(evidence: Evidence) -> Iterator[Violation]:
    """Rows are those of an undisturbed run, to the bit."""
    for job_id, rows in evidence.rows.items():
        for row in rows:
            key = (row["kind"], row["ordinal"])
            if sha256_of(row["outcome"]) != row["sha256"]:
                yield Violation("value", job_id, f"row {key} is not what its digest says")
            if row["sha256"] != evidence.truth(job_id).rows.get(key):
                yield Violation("value", job_id, f"row {key} is another than undisturbed")


def _artifact_values(evidence: Evidence) -> Iterator[Violation]:
    for job_id, listed in evidence.listed.items():
        for each in listed:
            name = each["name"]
            if name not in MEASURED and each["sha256"] != evidence.digest(job_id, name):
                yield Violation("value", job_id, f"{name} is another than undisturbed")
    for job_id, events in evidence.events.items():
        for event in events:
            if event["type"] == "digest_differs" and event["data"].get("name") not in MEASURED:
                yield Violation("value", job_id, f"a later attempt came to another result: {event['data']}")


def _missing(evidence: Evidence) -> Iterator[Violation]:
    """What succeeded is complete."""
    for job_id, job in evidence.jobs.items():
        if job["state"] == "succeeded":
            truth = evidence.truth(job_id)
            rows = {(row["kind"], row["ordinal"]) for row in evidence.rows[job_id]}
            files = {each["name"] for each in evidence.listed[job_id]}
            if evidence.state(evidence.parent(job_id)) == "succeeded":
                continue  # its files have gone with that
            if missing := [*(set(truth.rows) - rows), *(set(truth.artifacts) - files)]:
                yield Violation("value", job_id, f"it succeeded without {missing}")
