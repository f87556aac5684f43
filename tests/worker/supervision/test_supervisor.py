"""One job from claim to end, with a child that does what its script says, on both databases."""

import hashlib
import json
import os
import secrets
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select, update

from catalog.requests.schedule import Schedule
from catalog.requests.uploads import DeclaredFile, UploadDocument
from jobs.codec import parse_document
from jobs.devices.leases import Place
from jobs.devices.registry import Device, Worker, register
from jobs.errors import StoreUnavailable
from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.uploads import Uploads
from jobs.queue import attempt_writes
from jobs.queue.claims import claim
from jobs.queue.reaper import reap_expired
from jobs.records import LOCAL_TENANT
from jobs.repository.results import events_after, layer_rows, list_artifacts
from jobs.repository.store import read_estimate, read_job, request_cancel, reschedule
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import after_queueing, reading, writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import jobs
from jobs.tenancy.quotas import set_quota
from worker.devices import host
from worker.process import attended_child
from worker.supervision import lease_monitor
from worker.supervision.supervisor import Supervisor

pytestmark = pytest.mark.real_programs

SQLITE_FIRST = ("sqlite", pytest.param("postgresql", marks=pytest.mark.part(of=32, by=(), per="file")))
OTHER = "0198c0de-0000-7000-8000-000000000000"
"""A tenant that has no job."""


@pytest.fixture(params=SQLITE_FIRST)
def dialect(request: pytest.FixtureRequest) -> Any:
    """SQLite, which is copied in a moment: agents and workers have their supervisors on PostgreSQL."""
    return request.param


@pytest.fixture
def supervise(ledger: Any, settings: Any, scripted: Any) -> Any:
    """Claim a job and run it to the end of the attempt, or in a thread."""

    def run(job_id: Any, *steps: Any, background: Any = False, **changes: Any) -> Any:
        chosen = settings(**changes)
        held = claim(ledger, job_id, "test", secrets.token_hex(8), chosen.ledger.lease_seconds)
        assert held is not None, "the job could not be claimed"
        supervisor = Supervisor(ledger, held, chosen, scripted(*steps))
        if not background:
            supervisor.run()
            return supervisor
        thread = threading.Thread(target=supervisor.run, daemon=True)
        thread.start()
        return supervisor, thread

    return run


class Clock:
    """What the lease watch takes for the time: the machine's clock, and what a test lets pass on top of it.

    So limits are long, and none of them runs out because the machine stood still.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, eventually: Any) -> None:
        self._eventually = eventually
        self._passed = 0.0
        self._looks = 0
        look = lease_monitor.read_claimed

        def counted(*given: Any) -> Any:
            self._looks += 1
            return look(*given)

        monkeypatch.setattr(lease_monitor, "read_claimed", counted)
        monkeypatch.setattr(lease_monitor, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + self._passed))

    def jump(self, seconds: float) -> None:
        """Let so much time pass."""
        self._passed += seconds

    def looked(self) -> None:
        """Wait for the watch to have looked at the job, and then at its clock."""
        before = self._looks
        # one look may be under way, and the one after it is done with when a third begins
        self._eventually(lambda: self._looks > before + 2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, eventually: Any) -> Clock:
    """The clock of this test's attempts."""
    return Clock(monkeypatch, eventually)


def pids_in(events: Any, job_id: Any) -> Any:
    return [pid for line in events(job_id, "log") for pid in json.loads(line.data["message"])]


def test_a_commit_without_a_reply_leaves_one_event(
    ledger: Any, submitted: Any, supervise: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write is repeated; its twin is a job whose every commit is answered."""
    steps = (
        ["started"], ["log", "same"], ["log", "same"], ["plan", {"device_peak_bytes": 10}],
        ["progress", "collection", 1, 2, "batches"], ["layer", 0], ["layer", 1], ["artifact", "spectra/0.json", "{}"],
        ["summary"], ["finish"],
    )  # fmt: skip
    append, commit = attempt_writes.append_event, ledger.dialect.do_commit
    lost: list[Any] = []

    def append_and_lose(connection: Any, drawn: Any, kind: str, data: Any) -> None:
        append(connection, drawn, kind, data)
        if lost[-1:] != [(kind, data)]:
            lost.append((kind, data))
            connection.connection.info["loses"] = True

    def commit_and_lose(connection: Any) -> None:
        commit(connection)
        if connection.info.pop("loses", False):
            raise ledger.dialect.loaded_dbapi.OperationalError("the reply is lost")

    def history(job_id: str) -> list[Any]:
        supervise(job_id, *steps)
        assert (job(job_id).state, job(job_id).attempt) == ("succeeded", 1)
        told = [(each.type, dict(each.data)) for each in events_after(ledger, LOCAL_TENANT, job_id)]
        return [(kind, {name: data[name] for name in data if name != "updated_at"}) for kind, data in told]

    answered = history(submitted())
    monkeypatch.setattr(attempt_writes, "append_event", append_and_lose)
    monkeypatch.setattr(ledger.dialect, "do_commit", commit_and_lose)
    assert history(submitted()) == answered
    assert {kind for kind, _ in lost} == {"log", "started", "plan", "progress", "layer", "artifact", "summary"}


def test_a_whole_job(ledger: Any, submitted: Any, supervise: Any, job: Any, settings: Any) -> None:
    job_id = submitted()
    supervise(
        job_id,
        ["started"], ["plan", {"device_peak_bytes": 10}], ["progress", "collection", 1, 2, "batches"],
        ["progress", "capacity", 0, 2], ["layer", 0, "conv"], ["artifact", "spectra/0.json", "{}"],
        ["layer", 1, "fc"], ["progress", "capacity", 2, 2], ["summary"], ["finish"],
    )  # fmt: skip
    done = job(job_id)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 1, 0)
    assert done.manifest["environment"] == {"device": "cpu", "threads": 1}
    assert done.plan == {"device_peak_bytes": 10, "threads": 1}
    assert done.needs_bytes == 12  # a tenth stays free beside the peak
    assert done.summary == {"capacity": {"layers": 1, "branches": {"eigendecomposition": 2}}}
    assert done.progress["stage"] == "capacity"
    assert (done.progress["layers_done"], done.progress["layers_total"], done.progress["percent"]) == (2, 2, 100.0)
    rows = layer_rows(ledger, LOCAL_TENANT, job_id).items
    assert [(row.ordinal, row.layer, row.observed["seconds"]) for row in rows] == [(0, "conv", 0.1), (1, "fc", 0.1)]
    (artifact,) = list_artifacts(ledger, LOCAL_TENANT, job_id)
    with ArtifactFolder(settings().ledger.artifact_root).open(artifact) as file:
        assert file.read() == b"{}"


def test_a_refused_analysis_stands_in_the_manifest(submitted: Any, supervise: Any, job: Any) -> None:
    job_id = submitted()
    refused = {"kind": "spectrum", "code": "usage", "message": "give more", "pointer": None, "layer": "fc"}
    supervise(job_id, ["layer", 0, "conv"], ["summary"], ["finish", 8, [refused]])
    done = job(job_id)
    assert (done.state, done.failure) == ("succeeded", None)
    assert done.manifest["refused"] == [refused]
    assert done.manifest["examples"] == 8


def test_every_layer_is_said_in_one_line_that_carries_the_job(submitted: Any, supervise: Any, log_lines: Any) -> None:
    job_id = submitted()
    supervise(job_id, ["layer", 0, "con\u2028v\n{"], ["say", "\x1b[31m"], ["summary"], ["finish"])
    said = [line for line in log_lines() if line["level"] == "info"]
    (line,) = [each for each in said if each.get("layer") == "con\u2028v\n{"]
    assert (line["job"], line["attempt"], line["fence"]) == (job_id, 1, 1)
    for symbol in ("λ_G=", "policy=", "T=", "κ_A=", "κ_G="):
        assert symbol in line["event"]
    assert any("eigendecomposition=2" in each["event"] for each in said)


def test_the_child_is_told_what_is_allowed_and_nothing_secret(
    submitted: Any, supervise: Any, events: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("KRONOSCOPE_KEY_SECRET", "canary")
    monkeypatch.setenv("DATABASE_URL", "canary")
    job_id = submitted()
    supervise(
        job_id, ["echo_assignment"], ["echo_environment"], ["finish"],
        allowed_factories=("a.b:c", f"{OTHER}=a.b:theirs"), threads=3,
        allowed_directories=("/srv/models", "local=/srv/own", f"{OTHER}=/srv/theirs"),
    )  # fmt: skip
    told, environment = [json.loads(line.data["message"]) for line in events(job_id, "log")]
    assert told["document"]["kind"] == "capacity"
    assert told["allowed"] == {"factories": ["a.b:c"], "directories": ["/srv/models", "/srv/own"]}
    assert (told["threads"], told["completed"], told["offline"], told["estimate"]) == (3, [], True, False)
    assert "canary" not in json.dumps([told, environment])


def test_an_estimate_is_planned_and_nothing_of_the_job_is_done(
    ledger: Any, supervise: Any, events: Any, tmp_path: Any
) -> None:
    body = {
        "kind": "capacity",
        "model": {"source": "builtin", "name": "digits_mlp"},
        "data": {"source": "builtin", "name": "digits"},
        "task": {"type": "classification"},
    }
    asked = submit(ledger, LOCAL_TENANT, parse_document(json.dumps(body).encode()), estimate=True).job.id
    steps = (["echo_assignment"], ["progress", "model", 0, 1], ["plan", {"host_peak_bytes": 10}])
    supervise(asked, *steps, ["kill_self_once", str(tmp_path / "died")], ["finish"])
    supervise(asked, *steps, ["kill_self_once", str(tmp_path / "died")], ["finish"])
    made = read_estimate(ledger, LOCAL_TENANT, asked)
    assert made is not None
    assert (made.state, made.kinds, made.attempt) == ("succeeded", ("plan",), 2)
    assert made.plan == {"host_peak_bytes": 10, "threads": 1}
    # what the plan foresees is the job's need, not the estimate's
    assert made.needs_bytes is None
    assert read_job(ledger, LOCAL_TENANT, asked) is None
    told = [json.loads(line.data["message"]) for line in events(asked, "log")]
    assert [(each["estimate"], each["document"]["kind"]) for each in told] == [(True, "capacity")] * 2


@pytest.mark.parametrize(("category", "state"), [("usage", "failed"), ("fatal", "failed"), ("transient", "queued")])
def test_a_failure_goes_where_its_category_says(
    submitted: Any, supervise: Any, job: Any, category: Any, state: Any
) -> None:
    job_id = submitted()
    supervise(job_id, ["fail", category])
    done = job(job_id)
    assert (done.state, done.failures) == (state, 1)
    if state == "failed":
        assert done.failure["message"] == "the script says so"
        assert "detail" not in done.failure


def test_a_transient_failure_ends_at_the_limit(submitted: Any, supervise: Any, job: Any) -> None:
    job_id = submitted()
    for _ in range(job(job_id).max_failures):
        assert job(job_id).state == "queued"
        supervise(job_id, ["fail", "transient"])
    assert (job(job_id).state, job(job_id).failures) == ("failed", 5)


def test_a_crash_is_tried_again_and_keeps_what_was_done(
    ledger: Any, submitted: Any, supervise: Any, job: Any, tmp_path: Any
) -> None:
    job_id = submitted()
    steps = (["layer", 0], ["kill_self_once", str(tmp_path / "died")], ["layer", 1], ["finish"])
    supervise(job_id, *steps)
    assert (job(job_id).state, job(job_id).failures) == ("queued", 1)
    supervise(job_id, *steps)
    assert (job(job_id).state, job(job_id).attempt) == ("succeeded", 2)
    assert [row.attempt for row in layer_rows(ledger, LOCAL_TENANT, job_id).items] == [1, 2]


PLANNED = {
    "pace": "measured",
    "device_peak_bytes": 1,
    "host_peak_bytes": 1,
    "stages": {"collection": {"seconds": 80.0}, "capacity": {"seconds": 20.0}},
}


@pytest.mark.parametrize("end", ["kill", "drain"])
def test_what_a_checkpoint_holds_stays_done_between_two_attempts(
    submitted: Any, supervise: Any, job: Any, events: Any, eventually: Any, tmp_path: Any, end: str
) -> None:
    job_id = submitted()
    batches = [["progress", "collection", 5, 10, "batches", True], ["progress", "collection", 8, 10, "batches"]]
    steps = (["plan", PLANNED], ["progress", "data", 0, None, "sources"], *batches)
    if end == "kill":
        supervise(job_id, *steps, ["kill_self"])
    else:
        supervisor, thread = supervise(job_id, *steps, ["log", "here"], ["wait_for_sigterm"], background=True)
        eventually(lambda: events(job_id, "log"))
        supervisor.stop("drain")
        thread.join(240)
    queued = job(job_id)
    assert (queued.state, queued.progress["percent"], queued.progress["stage"]) == ("queued", 40.0, None)
    # the next attempt looks for its inputs first, and then finds the checkpoint
    supervise(job_id, ["progress", "data", 0, None, "sources"], ["kill_self_once", str(tmp_path / "died")])
    assert job(job_id).progress["percent"] == 40.0
    steps = (["progress", "data", 0, None, "sources"], ["progress", "collection", 5, 10, "batches"])
    supervise(job_id, *steps, ["fail", "transient", "unavailable"])
    assert job(job_id).progress["percent"] == 40.0
    # or does not find it
    supervise(job_id, ["progress", "collection", 1, 10, "batches"], ["fail", "usage", "unknown_field"])
    ended = job(job_id)
    assert (ended.state, ended.progress["percent"]) == ("failed", 8.0)
    assert not [event for event in events(job_id, "progress") if "kept" in event.data]


def test_the_same_crash_twice_is_poison(submitted: Any, supervise: Any, job: Any, events: Any) -> None:
    job_id = submitted()
    steps = (["progress", "capacity", 0, 5], ["layer", 0], ["kill_self"])
    supervise(job_id, *steps)
    assert job(job_id).state == "queued"
    supervise(job_id, *steps)  # the row is there already, so the child sends none; the place is the same
    done = job(job_id)
    assert (done.state, done.failures) == ("failed", 2)
    assert done.failure["code"] == "crashed"
    assert "SIGKILL" in done.failure["message"]
    assert "capacity/0" in done.failure["message"]
    assert [event.data["signature"] for event in events(job_id, "crash")] == [
        {"signal": "SIGKILL", "stage": "capacity", "layer": "capacity/0"}
    ] * 2


def test_a_kill_for_want_of_memory_is_called_that(
    submitted: Any, supervise: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submitted()
    for state in ("queued", "failed"):
        # what the kernel counts before the child is started, and after it died
        monkeypatch.setattr(attended_child, "oom_kills", iter([3, 4]).__next__)
        supervise(job_id, ["kill_self"])
        assert job(job_id).state == state
    failure = job(job_id).failure
    assert (failure["category"], failure["code"], failure["pointer"]) == ("fatal", "oom", "/memory/host")
    assert "for want of memory" in failure["message"]


@pytest.mark.parametrize("code", ["rank_lost", "oom"])
def test_a_rank_that_ends_twice_in_the_same_way_and_place_is_poison(
    submitted: Any, supervise: Any, job: Any, events: Any, code: str
) -> None:
    """What the launcher of the ranks says; it need not have begun."""
    job_id = submitted()
    for state in ("queued", "failed"):
        supervise(job_id, ["fail", "transient", code, "rank 1 of 2"])
        assert job(job_id).state == state
    assert (job(job_id).failure["category"], job(job_id).failure["code"]) == ("fatal", code)
    assert [event.data["signature"]["signal"] for event in events(job_id, "crash")] == ["for operators"] * 2


def test_a_failed_device_is_tried_again_in_a_new_process_and_twice_at_one_place_is_poison(
    submitted: Any, supervise: Any, job: Any
) -> None:
    job_id, begun = submitted(), ["progress", "capacity", 0, 5]
    supervise(job_id, begun, ["layer", 0], ["fail", "transient", "device_lost"])
    supervise(job_id, begun, ["layer", 1], ["fail", "transient", "device_lost"])
    assert (job(job_id).state, job(job_id).failures) == ("queued", 2)
    supervise(job_id, begun, ["layer", 1], ["fail", "transient", "device_lost"])
    failure = job(job_id).failure
    assert (job(job_id).state, job(job_id).failures) == ("failed", 3)
    assert (failure["category"], failure["code"]) == ("fatal", "device_lost")
    assert failure["message"] == "the script says so"


def test_a_child_that_makes_no_progress_is_stopped_and_tried_again(
    submitted: Any, supervise: Any, job: Any, ended: Any, events: Any, eventually: Any, clock: Clock
) -> None:
    job_id, begun = submitted(), ["progress", "capacity", 0, 5]
    for attempt in (1, 2):
        steps = (begun, ["layer", 0], ["pids"], ["sleep", 600])
        _, thread = supervise(job_id, *steps, background=True, no_progress_seconds=3600)
        eventually(lambda: len(events(job_id, "log")) == attempt)  # noqa: B023 - called before it changes
        clock.jump(3500)
        clock.looked()
        assert (job(job_id).state, job(job_id).attempt) == ("running", attempt)
        clock.jump(200)
        thread.join(240)
        assert job(job_id).failures == attempt
        assert ended(pids_in(events, job_id), 0)
    failure = job(job_id).failure
    assert (failure["category"], failure["code"]) == ("fatal", "no_progress")
    assert "after layer capacity/0" in failure["message"]


def test_whatever_a_child_says_is_progress(
    submitted: Any, supervise: Any, job: Any, events: Any, eventually: Any, clock: Clock, tmp_path: Any
) -> None:
    job_id = submitted()
    talk = [step for number in range(3) for step in (["log", "still here"], ["wait_for", str(tmp_path / str(number))])]
    _, thread = supervise(job_id, *talk, ["finish"], background=True, no_progress_seconds=3600)
    for number in range(3):
        eventually(lambda: len(events(job_id, "log")) > number)  # noqa: B023 - called before it changes
        clock.jump(3500)
        clock.looked()
        (tmp_path / str(number)).touch()
    thread.join(240)
    assert job(job_id).state == "succeeded"


def test_an_attempt_has_its_limit_however_much_it_says(
    ledger: Any, submitted: Any, supervise: Any, job: Any, events: Any, eventually: Any, clock: Clock, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lease_monitor, "STOP_GRACE_SECONDS", 0.5)
    job_id = submitted()
    talk = [step for number in range(3000) for step in (["log", f"still here {number}"], ["sleep", 0.1])]
    given = {"attempt_seconds": 3600, "no_progress_seconds": 7200}
    _, thread = supervise(job_id, ["ignore_sigterm"], ["layer", 0], *talk, background=True, **given)
    eventually(lambda: events(job_id, "log"))
    clock.jump(3500)
    clock.looked()
    assert job(job_id).state == "running"
    clock.jump(200)
    thread.join(240)
    failure = job(job_id).failure
    assert (job(job_id).state, failure["category"], failure["code"]) == ("failed", "usage", "timeout")
    assert "KRONOSCOPE_ATTEMPT_LIMIT" in failure["message"]
    assert len(layer_rows(ledger, LOCAL_TENANT, job_id).items) == 1


def test_two_different_crashes_are_bad_luck(submitted: Any, supervise: Any, job: Any) -> None:
    job_id = submitted()
    supervise(job_id, ["layer", 0], ["kill_self"])
    supervise(job_id, ["layer", 1], ["kill_self"])
    supervise(job_id, ["started"], ["layer", 1], ["exit", 1])
    assert (job(job_id).state, job(job_id).failures) == ("queued", 3)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("raw", ["garbage\n", '{"frame": "layer", "kind": 3}\n', '{"frame": "progress", "stage": 1}\n'])
def test_a_child_that_loses_its_mind_has_crashed(
    submitted: Any, supervise: Any, job: Any, events: Any, raw: Any
) -> None:
    job_id = submitted()
    supervise(job_id, ["raw", raw], ["sleep", 600])
    assert (job(job_id).state, job(job_id).failures) == ("queued", 1)
    assert events(job_id, "crash")[0].data["signature"]["signal"] == "malformed frame"


def test_frames_that_no_row_can_hold_are_a_crash_and_not_an_end_of_the_worker(
    submitted: Any, supervise: Any, job: Any
) -> None:
    job_id = submitted()
    frame = {"frame": "layer", "kind": "k" * 500, "ordinal": "zero", "layer": "x", "outcome": [], "observed": None}
    supervise(job_id, ["raw", json.dumps(frame) + "\n"], ["sleep", 600])
    assert (job(job_id).state, job(job_id).failures) == ("queued", 1)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("name", ["../../escape", "/etc/passwd", "a//b", "missing.json"])
def test_an_artifact_that_is_not_there_is_never_listed(
    ledger: Any, submitted: Any, supervise: Any, job: Any, name: Any
) -> None:
    job_id = submitted()
    announced = {"frame": "artifact", "name": name, "sha256": "0" * 64, "size_bytes": 1, "media_type": "x/y"}
    supervise(job_id, ["raw", json.dumps(announced) + "\n"], ["sleep", 600])
    assert (job(job_id).state, job(job_id).failures) == ("queued", 1)
    assert list_artifacts(ledger, LOCAL_TENANT, job_id) == ()


def test_an_artifact_whose_bytes_differ_is_never_listed(ledger: Any, submitted: Any, supervise: Any, job: Any) -> None:
    job_id = submitted()
    supervise(job_id, ["artifact", "spectra/0.json", "one", "two"], ["sleep", 600])
    assert job(job_id).state == "queued"
    assert list_artifacts(ledger, LOCAL_TENANT, job_id) == ()


def test_cancel_stops_the_child_at_its_checkpoint(
    ledger: Any, submitted: Any, supervise: Any, job: Any, events: Any, eventually: Any, ended: Any
) -> None:
    job_id = submitted()
    _, thread = supervise(job_id, ["pids"], ["wait_for_sigterm"], background=True)
    eventually(lambda: events(job_id, "log"))
    request_cancel(ledger, LOCAL_TENANT, job_id)
    thread.join(240)
    assert job(job_id).state == "cancelled"
    assert ended(pids_in(events, job_id), 0)


def test_a_child_that_will_not_stop_is_killed_after_its_grace(
    ledger: Any, submitted: Any, supervise: Any, job: Any, events: Any, eventually: Any, ended: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lease_monitor, "STOP_GRACE_SECONDS", 0.5)
    job_id = submitted()
    _, thread = supervise(job_id, ["ignore_sigterm"], ["pids"], ["sleep", 600], background=True)
    eventually(lambda: events(job_id, "log"))
    request_cancel(ledger, LOCAL_TENANT, job_id)
    thread.join(240)
    assert job(job_id).state == "cancelled"
    assert ended(pids_in(events, job_id), 0)


def test_a_drain_hands_the_job_back_uncounted(
    ledger: Any, submitted: Any, supervise: Any, job: Any, events: Any, eventually: Any
) -> None:
    job_id = submitted()
    supervisor, thread = supervise(job_id, ["layer", 0], ["pids"], ["wait_for_sigterm"], background=True)
    eventually(lambda: events(job_id, "log"))
    woken: list[int] = []
    after_queueing(ledger, lambda: woken.append(1))
    supervisor.stop("drain")
    thread.join(240)
    assert (job(job_id).state, job(job_id).attempt, job(job_id).failures) == ("queued", 0, 0)
    assert woken == [1]
    supervise(job_id, ["layer", 0], ["layer", 1], ["finish"])
    assert (job(job_id).state, job(job_id).attempt) == ("succeeded", 1)


def test_the_deadline_ends_the_job(
    submitted: Any, supervise: Any, job: Any, events: Any, eventually: Any, clock: Clock
) -> None:
    job_id = submitted(schedule={"within": "1h"})
    _, thread = supervise(job_id, ["log", "begun"], ["wait_for_sigterm"], background=True)
    eventually(lambda: events(job_id, "log"))
    clock.jump(3000)
    clock.looked()
    assert job(job_id).state == "running"
    clock.jump(700)
    thread.join(240)
    assert job(job_id).state == "failed"
    assert job(job_id).failure["code"] == "deadline_exceeded"


def test_a_running_job_is_given_more_time_and_less(
    ledger: Any, submitted: Any, supervise: Any, job: Any, events: Any, eventually: Any, clock: Clock
) -> None:
    job_id = submitted(schedule={"within": "1h"})
    _, thread = supervise(job_id, ["log", "begun"], ["wait_for_sigterm"], background=True)
    eventually(lambda: events(job_id, "log"))
    reschedule(ledger, LOCAL_TENANT, job_id, Schedule(within="3h"))
    clock.looked()
    clock.jump(3700)
    clock.looked()
    assert job(job_id).state == "running"
    reschedule(ledger, LOCAL_TENANT, job_id, Schedule(within="1s"))
    thread.join(240)
    assert job(job_id).failure["code"] == "deadline_exceeded"


def test_a_stop_that_nobody_asked_for_is_a_failure_like_any_other(
    submitted: Any, supervise: Any, job: Any, events: Any, eventually: Any
) -> None:
    job_id = submitted()
    _, thread = supervise(job_id, ["pids"], ["wait_for_sigterm"], background=True)
    eventually(lambda: events(job_id, "log"))
    os.kill(pids_in(events, job_id)[0], signal.SIGTERM)
    thread.join(240)
    assert (job(job_id).state, job(job_id).failures) == ("queued", 1)


def test_a_lost_lease_kills_the_child_and_writes_nothing(
    ledger: Any, submitted: Any, supervise: Any, job: Any, events: Any, eventually: Any, ended: Any
) -> None:
    job_id = submitted()
    _, thread = supervise(job_id, ["ignore_sigterm"], ["pids"], ["sleep", 600], background=True)
    eventually(lambda: events(job_id, "log"))

    def taken_away() -> bool:
        """Unless a heartbeat comes in between."""
        with writing(ledger) as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(lease_expires_at=ledger_now(-1)))
        return reap_expired(ledger) == 1

    eventually(taken_away)
    before = job(job_id)
    thread.join(240)
    assert ended(pids_in(events, job_id), 0)
    assert job(job_id) == before
    assert (before.state, before.failures) == ("queued", 1)


def test_heartbeats_keep_the_lease_of_a_child_that_says_nothing(
    ledger: Any, submitted: Any, supervise: Any, job: Any, eventually: Any, tmp_path: Any
) -> None:
    job_id = submitted()
    _, thread = supervise(job_id, ["wait_for", str(tmp_path / "go")], ["finish"], background=True, lease_seconds=60)

    def leased_until() -> Any:
        with reading(ledger) as connection:
            return connection.execute(select(jobs.c.lease_expires_at)).scalar_one()

    for _ in range(3):
        before = leased_until()
        eventually(lambda: leased_until() > before + timedelta(seconds=0.4))  # noqa: B023 - called before it changes
    assert reap_expired(ledger) == 0
    (tmp_path / "go").touch()
    thread.join(240)
    assert (job(job_id).state, job(job_id).attempt) == ("succeeded", 1)


def test_plan_and_threads_of_the_first_attempt_stand(submitted: Any, supervise: Any, job: Any, events: Any) -> None:
    job_id = submitted()
    supervise(job_id, ["plan", {"peak_bytes": 10}], ["fail", "transient"], threads=3)
    supervise(job_id, ["echo_assignment"], ["plan", {"peak_bytes": 99}], ["finish"], threads=1)
    told = json.loads(events(job_id, "log")[0].data["message"])
    assert told["threads"] == 3
    assert told["plan"] == job(job_id).plan == {"peak_bytes": 10, "threads": 3}


def test_threads_of_a_job_without_a_plan_stand_too(submitted: Any, supervise: Any, events: Any) -> None:
    """Factors that are stored need none; the fake child says that it has one thread."""
    job_id = submitted()
    supervise(job_id, ["fail", "transient"])
    supervise(job_id, ["echo_assignment"], ["finish"])
    told = json.loads(events(job_id, "log")[0].data["message"])
    assert (told["threads"], told["choose_threads"]) == (1, False)


@pytest.mark.part(of=16, by=("given",))
@pytest.mark.parametrize(
    ("given", "said", "kept"),
    [(None, 1, 1), (None, 10**9, None), (None, 0, None), (None, True, None), (None, "1", None), (3, 1, 3)],
)
def test_a_child_chooses_no_more_threads_than_it_is_given(
    submitted: Any, supervise: Any, job: Any, given: int | None, said: Any, kept: int | None
) -> None:
    job_id = submitted()
    supervise(job_id, ["plan", {"threads": said}], ["finish"], threads=given)
    assert job(job_id).plan == {"threads": kept or len(os.sched_getaffinity(0))}


@pytest.mark.parametrize("slots", [1, 4])
def test_beside_a_gpu_each_of_several_slots_has_its_part_of_the_hosts_memory(
    ledger: Any, settings: Any, scripted: Any, submitted: Any, events: Any, slots: int
) -> None:
    chosen = settings(slots=slots)
    gpu = Device(uuid="GPU-a", kind="cuda", name="GPU", capacity_bytes=2**34)
    here = Worker(id=new_id(), node="n", process_space="s", version="0", slots=slots, factories=())
    register(ledger, here, [gpu], 3600)
    job_id = submitted()
    place = Place(job_id=job_id, worker_id=here.id, device_uuids=(gpu.uuid,))

    def bounds(*steps: Any) -> dict[str, int]:
        held = claim(ledger, job_id, "test", secrets.token_hex(8), 20, place=place)
        assert held is not None
        Supervisor(ledger, held, chosen, scripted(["echo_assignment"], *steps)).run()
        told: dict[str, int] = json.loads(events(job_id, "log")[-1].data["message"])["bounds"]
        return told

    part = {"host_bytes": host("n").capacity_bytes // slots, "host_shared_by": slots} if slots > 1 else {}
    assert bounds(["plan", {"device_peak_bytes": 10}], ["fail", "transient"]) == {"device_bytes": 2**34} | part
    # what the first attempt planned is done, however much of the host it takes
    assert bounds(["finish"]) == {"device_bytes": 2**34}


def test_what_the_child_says_is_kept_for_the_operator_only(
    ledger: Any, submitted: Any, supervise: Any, job: Any
) -> None:
    job_id = submitted()
    supervise(job_id, ["say", "Traceback: secret path"], ["kill_self"])
    supervise(job_id, ["say", "Traceback: secret path"], ["kill_self"])
    assert "secret path" not in json.dumps(dict(job(job_id).failure))
    with reading(ledger) as connection:
        kept = connection.execute(select(jobs.c.failure).where(jobs.c.id == job_id)).scalar_one()
    assert kept["detail"] == "Traceback: secret path"


def test_factors_of_an_earlier_job_are_laid_out(submitted: Any, supervise: Any, job: Any, events: Any) -> None:
    earlier = submitted(kind="factors")
    supervise(earlier, ["artifact", "factors/0.safetensors", "tensor"], ["fail", "transient"])
    supervise(earlier, ["artifact", "factors/factors.index.json", "{}"], ["finish"])
    assert job(earlier).state == "succeeded"
    later = submitted(model=None, data=None, task=None, factors={"job": earlier})
    supervise(later, ["echo_factors"], ["finish"])
    told = json.loads(events(later, "log")[0].data["message"])
    assert told == {"0.safetensors": "tensor", "factors.index.json": "{}"}


def test_two_sets_of_factors_are_laid_out_apart(submitted: Any, supervise: Any, job: Any, events: Any) -> None:
    first, second = submitted(kind="factors"), submitted(kind="factors")
    for each, text in ((first, "[1]"), (second, "[2]")):
        supervise(each, ["artifact", "factors/factors.index.json", text], ["finish"])
    for against, text in ((second, "[2]"), (first, "[1]")):
        later = submitted(
            kind="compare_curvature",
            model=None,
            data=None,
            task=None,
            factors={"job": first},
            compare_curvature={"against": {"job": against}},
        )
        supervise(later, ["echo_factors"], ["echo_against"], ["finish"])
        told = [json.loads(each.data["message"]) for each in events(later, "log")]
        assert told == [{"factors.index.json": "[1]"}, {"factors.index.json": text}]
        assert job(later).state == "succeeded"
    # beside a model of its own there is the second set alone
    collecting = submitted(kind="compare_curvature", compare_curvature={"against": {"job": second}})
    supervise(collecting, ["echo_assignment"], ["echo_against"], ["finish"])
    assignment, told_against = (json.loads(each.data["message"]) for each in events(collecting, "log"))
    assert (assignment["factors_path"], told_against) == (None, {"factors.index.json": "[2]"})


def test_an_extended_job_is_laid_out_with_what_says_how_it_was_collected(
    submitted: Any, supervise: Any, events: Any
) -> None:
    first = submitted(kind="factors")
    supervise(first, ["artifact", "factors/factors.index.json", "[1]"], ["finish"])
    bare = {"kind": "factors", "model": None, "task": None}
    second = submitted(**bare, extends={"job": first})
    supervise(second, ["echo_extended"], ["artifact", "factors/factors.index.json", "[2]"], ["finish"])
    third = submitted(**bare, extends={"job": second})
    supervise(third, ["echo_extended"], ["finish"])
    model = {"name": "digits_mlp", "source": "builtin"}
    # the factors are the named job's, the options those of the first of the chain
    for job_id, text in ((second, "[1]"), (third, "[2]")):
        told = json.loads(events(job_id, "log")[0].data["message"])
        assert told == [{"factors.index.json": text}, model, None]


def test_an_uploaded_model_is_laid_out_for_those_that_extend_its_job(
    ledger: Any, submitted: Any, supervise: Any, job: Any, events: Any, settings: Any
) -> None:
    uploads = Uploads(ledger, ArtifactFolder(settings().ledger.artifact_root), LOCAL_TENANT)
    file = DeclaredFile(name="config.json", size_bytes=2, sha256=hashlib.sha256(b"{}").hexdigest())
    upload_id = uploads.declare(UploadDocument(kind="model", files=(file,)), None)
    with uploads.writer(upload_id, "config.json") as part:
        part.write(b"{}")
    sent = uploads.find(upload_id)
    assert sent is not None
    uploads.complete(sent)
    extended = submitted(kind="factors", model={"source": "upload", "id": upload_id})
    supervise(extended, ["artifact", "factors/factors.index.json", "[]"], ["finish"])
    bare = {"kind": "factors", "model": None, "task": None}
    for _ in range(2):
        later = submitted(**bare, extends={"job": extended})
        supervise(later, ["echo_upload"], ["artifact", "factors/factors.index.json", "[]"], ["finish"])
        assert json.loads(events(later, "log")[0].data["message"]) == {"config.json": "{}"}
        extended = later
    uploads.remove(upload_id)
    gone = submitted(**bare, extends={"job": extended})
    supervise(gone, ["finish"])
    failure = job(gone).failure
    assert (failure["code"], failure["pointer"]) == ("not_found", "/extends/job")
    assert failure["message"] == "names a job with a model that is deleted; upload it again"


def test_a_second_set_that_is_not_there_is_the_callers_to_mend(submitted: Any, supervise: Any, job: Any) -> None:
    kept, without = submitted(kind="factors"), submitted()
    supervise(kept, ["artifact", "factors/factors.index.json", "{}"], ["finish"])
    supervise(without, ["finish"])
    later = submitted(
        kind="compare_curvature",
        model=None,
        data=None,
        task=None,
        factors={"job": kept},
        compare_curvature={"against": {"job": without}},
    )
    supervise(later, ["finish"])
    failure = job(later).failure
    assert (job(later).state, failure["code"]) == ("failed", "factors_unavailable")
    assert (failure["pointer"], failure["message"][:36]) == (
        "/compare_curvature/against/job", "names a job that kept no factors; ru",
    )  # fmt: skip


def test_damaged_factors_of_an_earlier_job_are_not_computed_with(
    ledger: Any, submitted: Any, supervise: Any, job: Any, settings: Any
) -> None:
    earlier = submitted(kind="factors")
    supervise(earlier, ["artifact", "factors/factors.index.json", "{}"], ["finish"])
    (artifact,) = list_artifacts(ledger, LOCAL_TENANT, earlier)
    stored = settings().ledger.artifact_root / artifact.uri
    for harm, state in (
        (lambda: stored.write_text("[]"), "has changed in"),
        (stored.unlink, "is missing or cut off in"),
    ):
        harm()
        later = submitted(model=None, data=None, task=None, factors={"job": earlier})
        supervise(later, ["finish"])
        failure = job(later).failure
        assert (job(later).state, failure["code"], failure["pointer"]) == ("failed", "artifact_damaged", "/factors/job")
        assert f"factors/factors.index.json {state} the service's store; run that job again" in failure["message"]


def test_a_file_beyond_the_quota_ends_the_job_and_what_was_done_stays(
    ledger: Any, submitted: Any, supervise: Any, job: Any, settings: Any
) -> None:
    assert set_quota(ledger, "local", 10)
    job_id = submitted()
    supervise(job_id, ["layer", 0], ["artifact", "a.json", "12345678"], ["artifact", "b.json", "123"], ["finish"])
    ended = job(job_id)
    assert (ended.state, ended.failure["category"], ended.failure["code"]) == ("failed", "usage", "disk_quota")
    assert "8 of the 10 bytes that they may and 3 more do not fit" in ended.failure["message"]
    assert [each.ordinal for each in layer_rows(ledger, LOCAL_TENANT, job_id).items] == [0]
    assert [each.name for each in list_artifacts(ledger, LOCAL_TENANT, job_id)] == ["a.json"]
    folder = ArtifactFolder(settings().ledger.artifact_root)
    assert [each.size_bytes for each in folder.objects()] == [8]
    # the same bytes again take no more room
    again = submitted()
    supervise(again, ["artifact", "c.json", "12345678"], ["finish"])
    assert job(again).state == "succeeded"


def test_what_an_attempt_staged_goes_with_it(submitted: Any, supervise: Any, settings: Any) -> None:
    root = settings().ledger.artifact_root
    for last in (["finish"], ["fail", "usage"], ["kill_self"]):
        supervise(submitted(), ["artifact", "a.json", "{}"], last)
        assert [each.name for each in root.iterdir() if not each.name.startswith(".")] == ["objects"]


def test_factors_that_are_not_there_are_the_callers_to_mend(submitted: Any, supervise: Any, job: Any) -> None:
    earlier = submitted()
    for _ in range(2):
        later = submitted(model=None, data=None, task=None, factors={"job": earlier})
        supervise(later, ["finish"])
        assert (job(later).state, job(later).failure["pointer"]) == ("failed", "/factors/job")
        if job(earlier).state == "queued":
            supervise(earlier, ["finish"])


def test_an_attempt_that_is_to_stop_waits_for_no_store(
    submitted: Any, supervise: Any, job: Any, eventually: Any, log_lines: Any, monkeypatch: Any
) -> None:
    def away(*_: object, **__: object) -> str:
        raise StoreUnavailable("the store does not answer")

    monkeypatch.setattr(ArtifactFolder, "publish", away)
    job_id = submitted()
    supervisor, thread = supervise(job_id, ["artifact", "a.json", "{}"], ["wait_for_sigterm"], background=True)
    eventually(lambda: [line for line in log_lines() if "store of artifacts does not answer" in line["event"]])
    supervisor.stop("drain")
    thread.join(240)
    assert not thread.is_alive()
    assert (job(job_id).state, job(job_id).attempt, job(job_id).failures) == ("queued", 0, 0)


def test_one_that_is_to_stop_before_it_has_a_child_gets_none(submitted: Any, supervise: Any, job: Any) -> None:
    job_id = submitted()
    supervisor, thread = supervise(job_id, ["sleep", 600], background=True)
    supervisor.stop("drain")  # however far it is
    thread.join(240)
    assert not thread.is_alive()
    assert (job(job_id).state, job(job_id).attempt, job(job_id).failures) == ("queued", 0, 0)


def test_whatever_a_heartbeat_stumbles_over_the_next_one_is_made(
    submitted: Any, supervise: Any, job: Any, eventually: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    told: list[int] = []
    beat = lease_monitor.heartbeat

    def stumbling(*given: Any) -> Any:
        told.append(len(told))
        if len(told) < 3:
            raise ValueError("nobody thought of this")
        return beat(*given)

    monkeypatch.setattr(lease_monitor, "heartbeat", stumbling)
    job_id = submitted()
    _, thread = supervise(job_id, ["wait_for", str(tmp_path / "go")], ["finish"], background=True, lease_seconds=60)
    eventually(lambda: len(told) > 4)
    (tmp_path / "go").touch()
    thread.join(240)
    assert (job(job_id).state, job(job_id).attempt) == ("succeeded", 1)
