"""A store of artifacts that takes connections and answers nothing: an attempt that is told to stop leaves it alone."""

import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, update

from jobs.errors import StoreUnavailable
from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.local_store import LocalObjects
from jobs.objects.s3_store import S3Objects
from jobs.objects.scratch import Scratch
from jobs.objects.scratch_store import MANIFEST
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT, Claim, Event
from jobs.repository.results import events_after, list_artifacts
from jobs.repository.store import read_job, request_cancel
from jobs.retention.object_sweep import sweep_objects
from jobs.s3_settings import S3Settings
from jobs.schema.database import writing
from jobs.schema.tables import jobs
from tests.held_store import HeldStore, held_store
from tests.machine.stopwatch import Stopwatch, until
from worker.process.child_process import STOP_GRACE_SECONDS
from worker.supervision import checkpoint_upload, retrying_object_store
from worker.supervision.retrying_object_store import UPLOAD_SECONDS, RetryingObjectStore
from worker.supervision.supervisor import Supervisor

PROMPT_SECONDS = 100
"""Far from the 300 s of a request to a silent store, and from what is waited for where a test makes it long."""
LONG_SECONDS = 600.0

NOWHERE = S3Settings(
    bucket="bucket",
    prefix="",
    region="us-east-1",
    endpoint="http://127.0.0.1:1",
    public_endpoint="http://127.0.0.1:1",
    access_key_id="key",
    secret_access_key="secret",
)


@pytest.fixture
def dialect() -> str:
    """Which database it is makes no difference to a store."""
    return "sqlite"


@pytest.fixture
def silent() -> Iterator[HeldStore]:
    """A listener behind which there is nothing."""
    with held_store() as store:
        yield store


@pytest.fixture
def held(s3_url: str) -> Iterator[HeldStore]:
    """A listener before a real store; it lets everything pass until it is told otherwise."""
    with held_store(s3_url) as store:
        store.release()
        yield store


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is announced is put for a moment after the stop."""
    monkeypatch.setattr(retrying_object_store, "UPLOAD_SECONDS", 0.3)


class Attempt:
    """One attempt in a thread of its own."""

    def __init__(self, ledger: Engine, held: Claim, settings: Any, command: list[str]) -> None:
        self.ledger = ledger
        self.job_id = held.job_id
        self.supervisor = Supervisor(ledger, held, settings, command)
        self._thread = threading.Thread(target=self.supervisor.run, daemon=True)
        self._thread.start()

    def seconds_left(self) -> float:
        """How long it takes to end."""
        watch = Stopwatch()
        self._thread.join(240)
        assert not self._thread.is_alive()
        return watch.seconds()

    def left(self) -> tuple[str, int, int]:
        """State, counted attempts and failures of the job."""
        job = read_job(self.ledger, LOCAL_TENANT, self.job_id)
        assert job is not None
        return job.state, job.attempt, job.failures

    def events(self, *kinds: str) -> list[Event]:
        """The job's, of these kinds."""
        return [each for each in events_after(self.ledger, LOCAL_TENANT, self.job_id) if each.type in kinds]

    def listed(self) -> list[str]:
        """The names of the job's artifacts."""
        return [each.name for each in list_artifacts(self.ledger, LOCAL_TENANT, self.job_id)]


@pytest.fixture
def attempt(ledger: Engine, settings: Any, scripted: Any) -> Callable[..., Attempt]:
    """``attempt(job, bucket, steps)``: begun in a thread, its files kept in the bucket."""

    def begin(job_id: str, bucket: S3Settings | None, *steps: Any) -> Attempt:
        chosen = settings()
        chosen = chosen.model_copy(update={"ledger": chosen.ledger.model_copy(update={"bucket": bucket})})
        claimed = claim(ledger, job_id, "test", secrets.token_hex(8), chosen.ledger.lease_seconds)
        assert claimed is not None
        return Attempt(ledger, claimed, chosen, scripted(*steps))

    return begin


@pytest.fixture
def uploading(
    submitted: Any, attempt: Callable[..., Attempt], held: HeldStore, bucket: S3Settings, tmp_path: Path
) -> Attempt:
    """One whose child has announced an artifact, which a store that went silent is being sent."""
    gate = tmp_path / "gate"
    steps = (["log", "begun"], ["wait_for", str(gate)], ["artifact", "a.json", "{}"], ["wait_for_sigterm"])
    begun = attempt(submitted(), through(held, bucket), *steps)
    until(lambda: begun.events("log"))
    held.hold()
    gate.touch()
    assert held.asked.wait(240)
    return begun


def through(store: HeldStore, bucket: S3Settings = NOWHERE) -> S3Settings:
    return bucket.model_copy(update={"endpoint": store.url, "public_endpoint": store.url})


def _drain(attempt: Attempt) -> None:
    attempt.supervisor.stop("drain")


def _cancel(attempt: Attempt) -> None:
    request_cancel(attempt.ledger, LOCAL_TENANT, attempt.job_id)


def _take_away(attempt: Attempt) -> None:
    """As another worker does that claims the job after the lease."""
    with writing(attempt.ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == attempt.job_id).values(fence=jobs.c.fence + 1))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("end", "left"), [(_drain, ("queued", 0, 0)), (_cancel, ("cancelled", 1, 0)), (_take_away, ("running", 1, 0))]
)
def test_an_attempt_that_is_over_leaves_its_upload_alone(
    uploading: Attempt, held: HeldStore, bucket: S3Settings, tmp_path: Path,
    end: Callable[[Attempt], None], left: tuple[str, int, int],
) -> None:  # fmt: skip
    end(uploading)
    assert uploading.seconds_left() < PROMPT_SECONDS
    assert uploading.left() == left
    moves = uploading.events("state")

    # what was left alone arrives: an object that nobody lists, and no word of it in the ledger
    held.release()
    folder = ArtifactFolder(tmp_path / "artifacts", S3Objects(bucket))
    until(lambda: list(folder.objects()))
    until(lambda: not [each for each in threading.enumerate() if each.name == "store"])
    assert uploading.listed() == []
    assert uploading.events("state", "artifact") == moves
    assert sweep_objects(uploading.ledger, folder, 3600) == 0
    assert sweep_objects(uploading.ledger, folder, -60) == 1


def test_an_upload_that_ends_soon_after_the_stop_is_listed(
    uploading: Attempt, held: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying_object_store, "UPLOAD_SECONDS", LONG_SECONDS)
    _drain(uploading)
    threading.Timer(0.5, held.release).start()
    uploading.seconds_left()
    assert uploading.left() == ("queued", 0, 0)
    assert uploading.listed() == ["a.json"]


@pytest.mark.usefixtures("impatient")
def test_before_there_is_a_child_no_silent_store_is_waited_for(
    submitted: Any, attempt: Callable[..., Attempt], silent: HeldStore
) -> None:
    job_id = submitted()
    begun = attempt(job_id, through(silent), ["finish"])
    assert silent.asked.wait(240)  # for the checkpoint of an earlier attempt
    _drain(begun)
    assert begun.seconds_left() < PROMPT_SECONDS
    assert begun.left() == ("queued", 0, 0)


@pytest.mark.usefixtures("impatient")
def test_a_job_that_has_ended_holds_no_slot_until_its_checkpoints_are_cleared(
    submitted: Any, attempt: Callable[..., Attempt], held: HeldStore, bucket: S3Settings, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    begun = attempt(submitted(), through(held, bucket), ["log", "begun"], ["wait_for", str(gate)], ["finish"])
    until(lambda: begun.events("log"))
    held.hold()
    gate.touch()
    assert held.asked.wait(240)
    assert begun.seconds_left() < PROMPT_SECONDS
    assert begun.left() == ("succeeded", 1, 0)


def test_factors_that_no_child_will_read_are_not_waited_for(
    submitted: Any,
    attempt: Callable[..., Attempt],
    held: HeldStore,
    bucket: S3Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retrying_object_store, "UPLOAD_SECONDS", LONG_SECONDS)  # what an upload would be waited for
    earlier = submitted(kind="factors")
    files = (["artifact", "factors/0.safetensors", "tensor"], ["artifact", "factors/factors.index.json", "{}"])
    first = attempt(earlier, bucket, *files, ["finish"])
    first.seconds_left()
    assert first.left()[0] == "succeeded"
    later = submitted(model=None, data=None, task=None, factors={"job": earlier})
    held.hold()
    begun = attempt(later, through(held, bucket), ["finish"])
    assert held.asked.wait(240)
    _drain(begun)
    assert begun.seconds_left() < PROMPT_SECONDS
    assert begun.left() == ("queued", 0, 0)


@pytest.mark.usefixtures("impatient")
def test_a_folder_that_hangs_is_left_alone_too(
    submitted: Any, attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def hanging(*_: object) -> None:
        asked.set()
        answered.wait(LONG_SECONDS)

    monkeypatch.setattr("jobs.objects.local_store.os.fsync", hanging)  # as one does on a file server that is gone
    job_id = submitted()
    begun = attempt(job_id, None, ["artifact", "a.json", "{}"], ["wait_for_sigterm"])
    assert asked.wait(240)
    _drain(begun)
    try:
        assert begun.seconds_left() < PROMPT_SECONDS
    finally:
        answered.set()
    assert begun.left() == ("queued", 0, 0)


@pytest.mark.usefixtures("impatient")
def test_the_last_checkpoint_is_copied_for_what_is_left_of_the_stop(
    submitted: Any, attempt: Callable[..., Attempt], held: HeldStore, bucket: S3Settings,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(checkpoint_upload, "_LAST_COPY_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(checkpoint_upload, "_LATEST_COPY_SECONDS", 1)
    job_id = submitted()
    begun = attempt(job_id, through(held, bucket), ["log", "begun"], ["wait_for_sigterm"])
    until(lambda: begun.events("log"))
    held.hold()
    manifest = Scratch(tmp_path / "artifacts").attempt_folder(job_id, 1) / MANIFEST
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    assert held.asked.wait(240)
    _drain(begun)
    assert begun.seconds_left() < PROMPT_SECONDS
    assert begun.left() == ("queued", 0, 0)


def test_what_is_waited_for_after_a_stop_leaves_time_to_hand_the_job_back_within_ten_seconds() -> None:
    assert UPLOAD_SECONDS < STOP_GRACE_SECONDS < checkpoint_upload._LATEST_COPY_SECONDS <= 9


def test_a_store_for_which_no_thread_is_to_be_had_is_asked_again(tmp_path: Path, monkeypatch: Any) -> None:
    def none_left(_: object) -> None:
        raise RuntimeError("can't start new thread")

    going_on: Any = SimpleNamespace(lost=threading.Event(), left=lambda _: 60.0)
    store = RetryingObjectStore(LocalObjects(tmp_path), None, going_on)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        with pytest.raises(StoreUnavailable, match="no thread"):
            store.now()
    assert store.now() > 0
