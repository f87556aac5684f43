"""What is promised of divided jobs, and of jobs of several ranks, held against what is left of a campaign.

A job is divided once in each round and goes on once, after the last piece of the round; each is one transaction with
what brings it about. Nothing of it is left over, and the devices of an attempt are leased together or not at all.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from tests.chaos import audit
from tests.chaos.evidence import BASES, Evidence
from tests.chaos.stack.clients import TERMINAL
from tests.chaos.violation import Violation


def is_forgotten(evidence: Evidence, write: audit.Write) -> bool:
    """Whether a row was deleted since its divided job succeeded, which had merged what is in the file."""
    if (write.place, write.operation) != ("artifacts", "DELETE") or write.job_id not in evidence.jobs:
        return False
    parent = evidence.parent(write.job_id)
    if parent is not None:
        return evidence.state(parent) == "succeeded"
    return write.name.startswith(BASES) and evidence.state(write.job_id) == "succeeded"


def _other_rounds(evidence: Evidence) -> Iterator[Violation]:
    """Each round has as many pieces as its pieces say, each of them once."""
    for job_id in evidence.jobs:
        for name, pieces in evidence.pieces(job_id).items():
            numbers = sorted(piece["index"] for piece in pieces.values())
            counts = {piece["count"] for piece in pieces.values()}
            if counts != {len(pieces)} or numbers != list(range(len(pieces))):
                detail = f"its round {name} has the pieces {numbers} of {sorted(counts)}"
                yield Violation("duplicated", job_id, detail)


def _other_examples(evidence: Evidence) -> Iterator[Violation]:
    """The pieces of a round cover the examples of the whole, each of them once."""
    for job_id in evidence.jobs:
        for name, pieces in evidence.pieces(job_id).items():
            ranges = sorted((each["begin"], each["end"]) for each in pieces.values() if each["begin"] is not None)
            ends = [0, *(end for _, end in ranges)]
            whole = {each["total"] for each in pieces.values() if each["begin"] is not None}
            if ranges and ([begin for begin, _ in ranges] != ends[:-1] or whole != {ends[-1]}):
                yield Violation("value", job_id, f"its round {name} measures {ranges} of {sorted(whole)} examples")


def _rounds_again(evidence: Evidence) -> Iterator[Violation]:
    """A job waits once for each round, and is queued by its pieces once for each."""
    waits, returns = Counter[str](), Counter[str]()
    for move in evidence.moves:
        waits[move.job_id] += (move.old_state, move.new_state) == ("running", "waiting")
        returns[move.job_id] += (move.old_state, move.new_state) == ("waiting", "queued")
    for job_id in evidence.jobs:
        rounds = len(evidence.pieces(job_id))
        if waits[job_id] != rounds or returns[job_id] > rounds:
            detail = f"waited {waits[job_id]} times and was queued again {returns[job_id]} times in {rounds} rounds"
            yield Violation("duplicated", job_id, detail)


def _early_returns(evidence: Evidence) -> Iterator[Violation]:
    """A job neither goes on nor succeeds before every piece that it has by then has succeeded."""
    stands: dict[str, dict[str, str | None]] = defaultdict(dict)
    for move in evidence.moves:
        parent = evidence.parent(move.job_id)
        if parent is not None:
            stands[parent][move.job_id] = move.new_state
        goes_on = (move.old_state, move.new_state) == ("waiting", "queued") or move.new_state == "succeeded"
        open_pieces = [each for each, state in stands[move.job_id].items() if state != "succeeded"]
        if goes_on and open_pieces:
            yield Violation("illegal", move.job_id, f"{move.old_state} to {move.new_state}, without {open_pieces}")


def _apart(evidence: Evidence) -> Iterator[Violation]:
    """Pieces begin with the division, and their job goes on or fails with the end of one: in one transaction."""
    together: dict[int, list[audit.Move]] = defaultdict(list)
    for move in evidence.moves:
        together[move.transaction].append(move)
    for move in evidence.moves:
        beside = [each for each in together[move.transaction] if evidence.parent(each.job_id) == move.job_id]
        step = (move.old_state, move.new_state)
        if step == ("waiting", "queued") and [each.new_state for each in beside] != ["succeeded"]:
            yield Violation("illegal", move.job_id, "was queued again apart from the end of its last piece")
        if step == ("waiting", "failed") and "failed" not in {each.new_state for each in beside}:
            yield Violation("illegal", move.job_id, "failed apart from its piece")
        parent = evidence.parent(move.job_id)
        if move.old_state is None and parent is not None:
            divided = [each for each in together[move.transaction] if each.job_id == parent]
            if [(each.old_state, each.new_state) for each in divided] != [("running", "waiting")]:
                yield Violation("illegal", move.job_id, "was made apart from the division of its job")


def _orphans(evidence: Evidence) -> Iterator[Violation]:
    """No piece is open once its job has ended, and none is begun."""
    ended: set[str] = set()
    for move in evidence.moves:
        if move.new_state in TERMINAL:
            ended.add(move.job_id)
        if (move.old_state, move.new_state) == ("queued", "running") and evidence.parent(move.job_id) in ended:
            yield Violation("illegal", move.job_id, "was begun after its job had ended")
    for job_id, job in evidence.jobs.items():
        parent = evidence.parent(job_id)
        if parent is not None and evidence.state(parent) in TERMINAL | {None} and job["state"] not in TERMINAL:
            yield Violation("lost", job_id, f"is {job['state']}, and its job has ended: {evidence.state(parent)}")


def _partial_leases(evidence: Evidence) -> Iterator[Violation]:
    """An attempt has as many devices as ranks, leased in the transaction that claimed it; a host is one for all."""
    leased: dict[tuple[str, int | None], list[audit.Leased]] = defaultdict(list)
    for each in evidence.leases:
        leased[each.job_id, each.fence].append(each)
    for claim in evidence.claims if evidence.leases else ():
        found = leased.pop((claim.job_id, claim.new_fence), [])
        job = evidence.jobs.get(claim.job_id)
        wanted = 1 if job is None or {each.kind for each in found} == {"host"} else job["world_size"]
        if len({each.device for each in found}) != wanted or len(found) != wanted:
            detail = f"epoch {claim.new_fence} has {len(found)} devices, and {wanted} are needed"
            yield Violation("illegal", claim.job_id, detail)
        if {each.transaction for each in found} - {claim.transaction}:
            yield Violation("illegal", claim.job_id, f"epoch {claim.new_fence} got devices apart from its claim")
    for job_id, fence in leased:
        yield Violation("illegal", job_id, f"epoch {fence} was never claimed, and had devices")


def _kept_leases(evidence: Evidence) -> Iterator[Violation]:
    """What has ended holds no device."""
    for job_id, fence in evidence.held:
        if evidence.state(job_id) in TERMINAL | {None, "waiting"}:
            yield Violation("lost", job_id, f"is {evidence.state(job_id)}, and epoch {fence} still holds a device")


DIVISION_RULES: tuple[Callable[[Evidence], Iterator[Violation]], ...] = (
    *(_other_rounds, _other_examples, _rounds_again, _early_returns, _apart, _orphans),
    *(_partial_leases, _kept_leases),
)
