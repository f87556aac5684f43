"""Whatever submitters, holders, zombies and reapers do in whatever order, the ledger is as the model says.

After every step all rows of all jobs are compared with `ledger_model`, and with themselves before the step: what the
model does not know to have changed is the same to the bit, such as after a refused write or at the end of a job.

KRONOSCOPE_TEST_EXAMPLES=2000 plays that many games, other ones every time, in place of the suite's few.
"""

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Engine, update

from catalog.frames import LogLine, Planned, Started, Summarised
from catalog.requests.job import JobDocument
from jobs.errors import IdempotencyConflict, JobNotFound, JobStillActive, LeaseLost
from jobs.queue import attempt_endings, attempt_writes, claims
from jobs.queue.crash_signatures import record_crash
from jobs.queue.reaper import reap_expired
from jobs.records import LOCAL_TENANT
from jobs.repository.results import count_layers, events_after, layer_rows, list_artifacts
from jobs.repository.store import delete_job, read_job, request_cancel
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.tables import jobs
from jobs.tenancy.api_keys import create_key, verify_key
from tests.jobs.ledger_model import ENDED, Hold, Job, Model
from tests.jobs.ledger_rows import LedgerRows
from tests.jobs.ledger_writes import WRITES, frame_of_failure, frame_of_file, frame_of_layer, overtaken

EXAMPLES = int(os.environ.get("KRONOSCOPE_TEST_EXAMPLES", "0"))
GAMES = settings(
    max_examples=EXAMPLES or 8,
    stateful_step_count=20,
    deadline=None,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=list(HealthCheck),
)
LEASE_SECONDS = 3600.0  # none runs out by itself
MOST_JOBS = 3
PAST_MOVES = 25
ZOMBIE = "a_zombie_tries_everything"
Move = tuple[Any, ...]
"""A method's name, and what there is to choose from for each of its arguments."""

TOLD = ("that it lives", "its start", "its stage", "a summary", "a line", "a plan", "a corrected plan")
MAX_FAILURES = (1, 2, 3)
ASKED = ("looks around", "cancels", "deletes")
KEYS = (None, "key", "other-key")
FIRST = ("beats", "finishes", "hands back", "is cancelled", "changes")
ENDINGS = ("transient", "hands back", "crashes", "finishes", "transient", "hands back", "crashes", "usage", "fatal")

HAPPENED = (
    "a submission repeated",
    "a key taken by another document",
    "a key of a deleted job used again",
    "a claim whose reply was lost",
    "a job claimed again",
    "a zombie beside a new holder",
    "a zombie of an ended job",
    "a zombie of a deleted job",
    "a row of another digest",
    "a plan that memory proved wrong",
    "a crash repeated",
    "an attempt failed once too often",
    "a silent job failed once too often",
    "a holder heard before the reaper",
    "a new holder before the reaper",
    "a held job cancelled",
)
"""Each must have happened in the games, or they showed nothing."""


def one_of(moves: Iterable[Move]) -> st.SearchStrategy[tuple[Any, ...]]:
    """A move that has something to choose from, with its arguments."""
    return st.one_of(
        st.tuples(st.just(name), *map(st.sampled_from, choices)) for name, *choices in moves if all(choices)
    )


class LedgerMachine(RuleBasedStateMachine):
    def __init__(
        self, ledger: Engine, tenants: tuple[str, str], documents: dict[str, JobDocument], happened: Counter[str]
    ) -> None:
        super().__init__()
        self.ledger = ledger
        self.tenants = tenants
        self.documents = documents
        self.happened = happened
        self.model = Model()
        self.rows = LedgerRows(ledger, tenants)
        self.tried: set[tuple[Any, ...]] = set()

    def teardown(self) -> None:
        with writing(self.ledger) as connection:
            connection.execute(jobs.delete())

    @invariant()
    def the_ledger_is_as_the_model_says(self) -> None:
        self.rows.compare(self.model)

    def moves(self) -> Iterator[Move]:
        """Who could do what now."""
        model, holders = self.model, self.model.holders()
        keys = KEYS if len(model.jobs()) < MOST_JOBS else ()
        yield "somebody_submits", self.tenants, "ab", keys, MAX_FAILURES
        yield "a_tenant_asks", model.remembered(), ASKED
        yield "a_worker_claims", model.jobs("queued")
        yield "a_worker_claims", model.remembered(), ("anew", "repeating")
        yield "the_holder_tells", holders, TOLD, (1, 2)
        yield "the_holder_writes", holders, ("a layer", "a file"), (0, 1), (1, 2)
        yield "the_holder_ends", holders, ENDINGS, (6, 9)
        yield "the_holder_falls_silent", holders
        yield "a_zombie_tries_everything", [hold for hold in model.zombies() if hold.standing not in self.tried]
        yield "a_reaper_comes", model.silent()
        yield "somebody_comes_before_the_reaper", holders, FIRST

    @initialize(moves=st.integers(0, PAST_MOVES), max_failures=st.sampled_from((2, 3)))
    def there_is_a_past(self, moves: int, max_failures: int) -> None:
        """Most games begin in the middle: what takes many moves to come about is played first, or a part of it."""
        past: list[Move] = [
            ("somebody_submits", self.tenants[0], "b", "key", 1),
            ("a_worker_claims", 0),
            ("the_holder_falls_silent", 0),
            ("a_reaper_comes", 0),
            ("a_tenant_asks", 0, "deletes"),
            ("somebody_submits", self.tenants[0], "a", "key", max_failures),
            ("somebody_submits", self.tenants[0], "b", "key", 1),
            ("somebody_submits", self.tenants[0], "a", "key", max_failures),
            ("a_worker_claims", 1),
            ("the_holder_tells", 1, "a plan", 1),
            ("the_holder_writes", 1, "a layer", 0, 1),
            ("the_holder_ends", 1, "crashes", 9),
            ("a_worker_claims", 1),
            ("a_worker_claims", 1, "repeating"),
            ("the_holder_tells", 2, "a corrected plan", 2),
            ("the_holder_writes", 2, "a layer", 0, 2),
            ("the_holder_ends", 2, "crashes", 9),
            ("somebody_submits", self.tenants[0], "a", None, 3),
            ("a_worker_claims", 2),
            ("somebody_comes_before_the_reaper", 3, "beats"),
            ("somebody_comes_before_the_reaper", 3, "changes"),
            ("a_zombie_tries_everything", 3),
            ("the_holder_writes", 4, "a layer", 0, 1),
            ("the_holder_writes", 4, "a layer", 0, 2),
            ("a_tenant_asks", 2, "cancels"),
        ]
        assert len(past) == PAST_MOVES
        for name, who, *arguments in past[:moves]:
            of_a_hold = name.startswith("the_holder") or name in ("somebody_comes_before_the_reaper", ZOMBIE)
            there = self.model.holds if of_a_hold else self.model.ever
            getattr(self, name)(there[who] if isinstance(who, int) else who, *arguments)
            self.rows.compare(self.model)

    # were each move a rule, Hypothesis would leave most of them out of most games, and these would stand still
    @rule(move=st.runner().flatmap(lambda machine: one_of(machine.moves())))
    def somebody(self, move: tuple[Any, ...]) -> None:
        name, *arguments = move
        getattr(self, name)(*arguments)

    # --- those who submit -------------------------------------------------------------------------------------------

    def somebody_submits(self, tenant: str, document: str, key: str | None, max_failures: int) -> None:
        earlier = self.model.stored_by(tenant, key)
        if earlier is not None and earlier.document != document:
            self.happened["a key taken by another document"] += 1
            with pytest.raises(IdempotencyConflict, match=earlier.id):
                submit(self.ledger, tenant, self.documents[document], key)
            return
        submitted = submit(self.ledger, tenant, self.documents[document], key)
        if earlier is not None:
            self.happened["a submission repeated"] += 1
            assert (submitted.created, submitted.job.id) == (False, earlier.id)
            assert submitted.job == read_job(self.ledger, tenant, earlier.id)
            return
        assert submitted.created
        assert submitted.job.id not in {job.id for job in self.model.ever}
        self.happened["a key of a deleted job used again"] += any(
            key is not None and (job.tenant, job.key) == (tenant, key) for job in self.model.ever
        )
        self.model.ever.append(Job(len(self.model.ever) + 1, submitted.job.id, tenant, key, document, max_failures))
        with writing(self.ledger) as connection:
            connection.execute(update(jobs).where(jobs.c.id == submitted.job.id).values(max_failures=max_failures))

    def a_tenant_asks(self, job: Job, what: str) -> None:
        if what == "looks around" or job.deleted:
            self.ask_in_vain(
                job.tenant if job.deleted else next(each for each in self.tenants if each != job.tenant), job
            )
        elif what == "cancels":
            self.happened["a held job cancelled"] += job.state == "running"
            assert request_cancel(self.ledger, job.tenant, job.id).state == job.cancel()
        elif job.state in ENDED:
            assert {artifact.name for artifact in delete_job(self.ledger, job.tenant, job.id)} == set(job.artifacts)
            job.deleted = True
        else:
            with pytest.raises(JobStillActive, match=job.state):
                delete_job(self.ledger, job.tenant, job.id)

    def ask_in_vain(self, tenant: str, job: Job) -> None:
        assert read_job(self.ledger, tenant, job.id) is None
        assert layer_rows(self.ledger, tenant, job.id).items == ()
        assert count_layers(self.ledger, tenant, job.id) == 0
        assert list_artifacts(self.ledger, tenant, job.id) == events_after(self.ledger, tenant, job.id) == ()
        for act in (request_cancel, delete_job):
            with pytest.raises(JobNotFound):
                act(self.ledger, tenant, job.id)

    # --- those who claim --------------------------------------------------------------------------------------------

    def a_worker_claims(self, job: Job, how: str = "anew") -> None:
        token = (how == "repeating" and job.last_token) or secrets.token_hex(8)
        self.happened["a claim whose reply was lost"] += job.state in ("running", "cancelling") and token == job.token
        self.happened["a job claimed again"] += job.state == "queued" and job.fence > 0
        answer = job.claim(token)
        got = claims.claim(self.ledger, job.id, "worker", token, LEASE_SECONDS)
        if answer == "dropped":
            assert got is None
            return
        assert got is not None
        assert (got.job_id, got.tenant_id, got.fence, got.attempt) == (job.id, job.tenant, job.fence, job.attempt)
        assert (got.failures, got.plan, got.completed) == (job.failures, job.plan, tuple(sorted(job.layers)))
        assert (got.cancel_requested_at is None) == (not job.stamps["cancel_requested_at"])
        if answer == "taken":
            self.model.holds.append(Hold(job, job.fence, got))

    def the_holder_tells(self, hold: Hold, what: str, n: int) -> None:
        if what == "that it lives":
            asked_at = claims.heartbeat(self.ledger, hold.claim, LEASE_SECONDS)
            assert (asked_at is not None) == bool(hold.job.stamps["cancel_requested_at"])
            hold.job.renew()
        elif what == "its start":
            attempt_writes.write_started(self.ledger, hold.claim, Started(environment={"threads": n}))
            hold.job.start({"threads": n})
        elif what == "its stage":
            attempt_writes.write_progress(self.ledger, hold.claim, {"stage": f"stage {n}"})
            hold.job.go_on(f"stage {n}")
        elif what == "a summary":
            attempt_writes.write_summary(self.ledger, hold.claim, Summarised(kind=f"kind {n}", summary={"layers": n}))
            hold.job.sum_up(f"kind {n}", {"layers": n})
        elif what == "a line":
            attempt_writes.write_log_line(self.ledger, hold.claim, LogLine(level="info", message=str(n)))
            hold.job.tell("log", message=str(n))
        else:
            corrected = what == "a corrected plan"
            self.happened["a plan that memory proved wrong"] += corrected and hold.job.plan is not None
            plan: dict[str, Any] = {"micro_batch": n} | ({"planning_errors": [{"rung": n}]} if corrected else {})
            attempt_writes.write_plan(self.ledger, hold.claim, Planned(plan=plan))
            hold.job.take_plan(plan)

    def the_holder_writes(self, hold: Hold, what: str, ordinal: int, value: int) -> None:
        if what == "a layer":
            written = attempt_writes.write_layer(self.ledger, hold.claim, frame_of_layer(ordinal, value))
            assert written == hold.job.take_layer("capacity", ordinal, {"trace": value})
        else:
            name, sha256 = f"spectra/{ordinal}", f"{value}" * 64
            written = attempt_writes.write_artifact(
                self.ledger, hold.claim, frame_of_file(name, sha256), f"{hold.fence}/{name}"
            )
            assert written == hold.job.take_artifact(name, sha256)
        self.happened["a row of another digest"] += written == "differs"

    def the_holder_ends(self, hold: Hold, how: str, signal: int = 9) -> None:
        if how == "crashes":
            again = record_crash(self.ledger, hold.claim, {"signal": signal})
            assert again == hold.job.crashed({"signal": signal})
            self.happened["a crash repeated"] += again
            self.rows.compare(self.model)
            how = "transient"
        if how == "finishes":
            assert attempt_endings.finish(self.ledger, hold.claim) == hold.job.finish()
        elif how == "hands back":
            assert attempt_endings.hand_back(self.ledger, hold.claim) == hold.job.hand_back()
        else:
            ended = hold.job.fail(how, "told")
            assert attempt_endings.fail(self.ledger, hold.claim, frame_of_failure(how)) == ended
            self.happened["an attempt failed once too often"] += how == "transient" and ended == "failed"

    def a_zombie_tries_everything(self, hold: Hold) -> None:
        self.tried.add(hold.standing)
        self.happened["a zombie beside a new holder"] += hold.job.holds(hold.job.fence)
        self.happened["a zombie of an ended job"] += hold.job.state in ENDED and not hold.job.deleted
        self.happened["a zombie of a deleted job"] += hold.job.deleted
        for write in WRITES.values():
            with pytest.raises(LeaseLost, match=f"fence {hold.fence};"):
                write(self.ledger, hold.claim)

    # --- those who look after the queue -----------------------------------------------------------------------------

    def the_holder_falls_silent(self, hold: Hold) -> None:
        with writing(self.ledger) as connection:
            silent = update(jobs).where(jobs.c.id == hold.job.id)
            connection.execute(silent.values(lease_expires_at=ledger_now(-1)))
        hold.job.silent = True
        hold.job.version += 1

    def a_reaper_comes(self, *_: Job) -> None:
        silent = self.model.silent()
        assert reap_expired(self.ledger) == self.model.reap()
        self.happened["a silent job failed once too often"] += any(job.state == "failed" for job in silent)

    def somebody_comes_before_the_reaper(self, hold: Hold, act: str) -> None:
        """The reaper has seen who is silent; before it takes them, one of them is not silent any more, or another's."""
        job = hold.job
        self.the_holder_falls_silent(hold)
        self.rows.compare(self.model)
        seen = {each: each.fence for each in self.model.silent()}

        def come() -> None:
            if act == "beats":
                self.happened["a holder heard before the reaper"] += 1
                self.the_holder_tells(hold, "that it lives", 1)
            elif act == "finishes":
                self.the_holder_ends(hold, "finishes")
            elif act == "hands back":
                self.the_holder_ends(hold, "hands back")
            elif act == "is cancelled":
                self.a_tenant_asks(job, "cancels")
            else:  # another reaper comes, and then another worker
                self.a_reaper_comes()
                self.a_worker_claims(job)
                self.happened["a new holder before the reaper"] += job.holds(hold.fence + 1)

        with overtaken(come):
            taken = reap_expired(self.ledger)
        left = [each for each, fence in seen.items() if each.holds(fence) and each.silent]
        for each in left:
            each.fail("transient", "worker_lost")
        assert taken == len(left)
        self.happened["a silent job failed once too often"] += any(each.state == "failed" for each in left)


@pytest.mark.parametrize("dialect", ["postgresql", pytest.param("sqlite", marks=pytest.mark.part(of=4, by=()))])
def test_the_ledger_plays_every_game_as_the_model_does(ledger: Engine, document: Callable[..., JobDocument]) -> None:
    others = verify_key(ledger, "a secret of the server", create_key(ledger, "a secret of the server", "others"))
    assert others is not None
    tenants = (LOCAL_TENANT, others.tenant_id)
    documents = {name: document(labels={"name": name}) for name in "ab"}
    happened: Counter[str] = Counter()
    # what is drawn changes with any constant of the code, so the rarest moves are played once for certain
    certain = LedgerMachine(ledger, tenants, documents, happened)
    certain.there_is_a_past(PAST_MOVES, 3)
    certain.teardown()
    run_state_machine_as_test(lambda: LedgerMachine(ledger, tenants, documents, happened), settings=GAMES)
    assert [name for name in HAPPENED if not happened[name]] == []
