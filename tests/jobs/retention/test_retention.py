"""What is archived can be read as before, and nothing is lost on the way, on both databases."""

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, insert

from catalog.frames import layer_frame
from jobs.codec import sha256_of
from jobs.errors import ArtifactDamaged
from jobs.objects.artifacts import ArtifactFolder
from jobs.queue import attempt_endings, attempt_writes, claims
from jobs.records import LOCAL_TENANT, Artifact, Job, LayerRow
from jobs.repository.results import (
    LayerQuery,
    count_events,
    count_layers,
    events_after,
    layer_rows,
    list_artifacts,
    page_of,
    read_artifact,
)
from jobs.repository.store import delete_job, read_estimate, read_job, request_cancel
from jobs.repository.submission import submit
from jobs.retention.archive import NAME, read_contents, read_layers
from jobs.retention.object_sweep import sweep_objects
from jobs.retention.retention import archive_ended, forget_estimates
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.tables import job_events, tenants
from tests.api import seeding
from tests.conftest import Dialect
from tests.jobs.conftest import ON_BOTH, POSTGRESQL_OFTEN

LAYERS = 2 * (len(seeding.LAYERS) + 1)


@pytest.fixture(params=POSTGRESQL_OFTEN)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """SQLite by the commit, but for the tests that between them run each statement of this file."""
    chosen: Dialect = request.param
    return chosen


@pytest.fixture
def folder(tmp_path: Path) -> ArtifactFolder:
    return ArtifactFolder(tmp_path / "artifacts")


@pytest.fixture
def finished(ledger: Engine, folder: ArtifactFolder) -> Callable[[], str]:
    """``finished()``: the id of a job that is done, with rows of two analyses, files, events and a log."""
    return lambda: seeding.finished(ledger, folder.root, LOCAL_TENANT)


def job_of(engine: Engine, job_id: str) -> Job:
    job = read_job(engine, LOCAL_TENANT, job_id)
    assert job is not None
    return job


def archive_of(engine: Engine, job_id: str) -> Artifact:
    archive = read_artifact(engine, LOCAL_TENANT, job_id, NAME)
    assert archive is not None
    return archive


def every_page(read: Callable[..., Any], **chosen: Any) -> list[tuple[tuple[LayerRow, ...], str | None]]:
    pages, after = [], None
    while True:
        page = read(after=after, **chosen)
        pages.append((page.items, page.next))
        after = page.next
        if after is None:
            return pages


def untouched(engine: Engine, job_id: str) -> None:
    assert job_of(engine, job_id).archived_at is None
    assert count_layers(engine, LOCAL_TENANT, job_id) == LAYERS
    assert read_artifact(engine, LOCAL_TENANT, job_id, NAME) is None


@ON_BOTH
def test_an_archived_job_reads_page_by_page_as_it_did(ledger: Engine, folder: ArtifactFolder, finished: Any) -> None:
    job_id = finished()
    asked: list[dict[str, Any]] = [
        {"limit": 100},
        {"limit": 3},
        {"limit": 5, "kind": "capacity"},
        {"limit": 2, "sort": "trace"},
        {"limit": 3, "sort": "-effective_rank"},
        {"limit": 4, "sort": "kappa", "kind": "capacity"},
        {"limit": 100, "layer": "head.0"},
        {"limit": 100, "layer": "nobody"},
    ]
    before = [
        every_page(lambda **on: layer_rows(ledger, LOCAL_TENANT, job_id, LayerQuery(**on)), **each) for each in asked
    ]
    assert sum(len(items) for items, _ in before[0]) == LAYERS
    assert archive_ended(ledger, folder, 0, drop_files=False) == 1
    assert count_layers(ledger, LOCAL_TENANT, job_id) == 0
    archive = archive_of(ledger, job_id)
    assert [
        every_page(lambda **on: page_of(read_layers(folder, archive), LayerQuery(**on)), **each) for each in asked
    ] == before
    assert all(sha256_of(row.outcome) == row.sha256 for row in read_layers(folder, archive))


def test_the_archive_holds_the_rows_the_history_and_the_list_of_files(
    ledger: Engine, folder: ArtifactFolder, finished: Any
) -> None:
    job_id = finished()
    history = events_after(ledger, LOCAL_TENANT, job_id)
    files, was = list_artifacts(ledger, LOCAL_TENANT, job_id), job_of(ledger, job_id)
    archive_ended(ledger, folder, 0, drop_files=False)
    archive = archive_of(ledger, job_id)
    lines = [json.loads(line) for line in gzip.decompress((folder.root / archive.uri).read_bytes()).splitlines()]
    assert lines[0] == {"archive": 1, "job": job_id, "layers": LAYERS, "events": len(history)}
    told = [line["event"] for line in lines if "event" in line]
    assert [(each["seq"], each["type"], each["data"]) for each in told] == [(e.seq, e.type, e.data) for e in history]
    assert [each["at"] for each in told] == [event.at.isoformat() for event in history]
    assert [line["artifact"]["sha256"] for line in lines if "artifact" in line] == [file.sha256 for file in files]
    assert read_contents(folder, archive).layers == LAYERS
    # the files stand as they did, and the job is told as it was
    assert {*list_artifacts(ledger, LOCAL_TENANT, job_id)} == {*files, archive}
    now = job_of(ledger, job_id)
    assert now.archived_at is not None
    assert vars(now) | {"archived_at": None} == vars(was)
    # a reader who follows the events still finds how it ended
    left = events_after(ledger, LOCAL_TENANT, job_id)
    assert [event.data["state"] for event in left] == ["queued", "running", "succeeded"]
    assert {event.seq for event in left} <= {event.seq for event in history}


def test_only_what_has_ended_long_enough_ago_is_archived(
    ledger: Engine, folder: ArtifactFolder, finished: Any, document: Any
) -> None:
    done = finished()
    seeding.running(ledger, LOCAL_TENANT)
    submit(ledger, LOCAL_TENANT, document())
    failed = seeding.failed(ledger, LOCAL_TENANT)
    assert archive_ended(ledger, folder, 1, drop_files=False) == 0
    untouched(ledger, done)
    assert archive_ended(ledger, folder, 0, drop_files=False) == 2
    assert job_of(ledger, failed).failure == job_of(ledger, failed).failure is not None
    assert archive_ended(ledger, folder, 0, drop_files=False) == 0


@ON_BOTH
def test_estimates_are_forgotten_once_they_are_old_and_nothing_else_is(
    ledger: Engine, finished: Any, document: Any
) -> None:
    made, waiting = (submit(ledger, LOCAL_TENANT, document(), estimate=True).job.id for _ in range(2))
    held = claims.claim(ledger, made, "w", "t" * 32, 45)
    assert held is not None
    attempt_endings.finish(ledger, held)
    done = finished()
    assert forget_estimates(ledger, 1) == 0
    assert forget_estimates(ledger, 0) == 1
    assert read_estimate(ledger, LOCAL_TENANT, made) is None
    assert read_estimate(ledger, LOCAL_TENANT, waiting) is not None
    untouched(ledger, done)
    assert forget_estimates(ledger, 0) == 0


def test_files_go_with_the_rows_where_that_is_asked(ledger: Engine, folder: ArtifactFolder, finished: Any) -> None:
    job_id = finished()
    archive_ended(ledger, folder, 0, drop_files=True)
    archive = archive_of(ledger, job_id)
    assert list_artifacts(ledger, LOCAL_TENANT, job_id) == (archive,)
    assert len(list(read_layers(folder, archive))) == LAYERS
    assert delete_job(ledger, LOCAL_TENANT, job_id) == (archive,)


def begins_from(job_id: str) -> dict[str, Any]:
    return {"factors": {"job": job_id}, "model": None, "data": None, "task": None}


def compares_with(job_id: str) -> dict[str, Any]:
    return {"kind": "compare_curvature", "compare_curvature": {"against": {"job": job_id}}}


def adds_to(job_id: str) -> dict[str, Any]:
    return {"extends": {"job": job_id}, "model": None, "task": None}


@pytest.mark.part(of=16)
@pytest.mark.parametrize("naming", [begins_from, compares_with, adds_to])
@pytest.mark.parametrize("state", ["queued", "running", "cancelling"])
def test_files_that_a_later_job_begins_from_stay_until_it_has_ended(
    ledger: Engine, folder: ArtifactFolder, finished: Any, document: Any, state: str, naming: Any
) -> None:
    needed, other = finished(), seeding.failed(ledger, LOCAL_TENANT)
    naming = document(**naming(needed))
    later = submit(ledger, LOCAL_TENANT, naming).job.id
    if state != "queued":
        assert claims.claim(ledger, later, "w", "t" * 32, 45) is not None
    if state == "cancelling":
        request_cancel(ledger, LOCAL_TENANT, later)
    assert job_of(ledger, later).state == state
    assert archive_ended(ledger, folder, 0, drop_files=True) == 1
    assert job_of(ledger, other).archived_at is not None
    untouched(ledger, needed)
    # its rows are in nobody's way
    assert archive_ended(ledger, folder, 0, drop_files=False) == 1
    assert job_of(ledger, needed).archived_at is not None


def test_files_go_once_those_that_began_from_them_have_ended_and_other_tenants_do_not_count(
    ledger: Engine, folder: ArtifactFolder, finished: Any, document: Any
) -> None:
    needed = finished()
    naming = document(factors={"job": needed}, model=None, data=None, task=None)
    with writing(ledger) as connection:
        connection.execute(insert(tenants).values(id="stranger", name="stranger", created_at=ledger_now()))
    submit(ledger, "stranger", naming)
    later = submit(ledger, LOCAL_TENANT, naming).job.id
    assert archive_ended(ledger, folder, 0, drop_files=True) == 0
    request_cancel(ledger, LOCAL_TENANT, later)
    assert archive_ended(ledger, folder, 0, drop_files=True) == 2
    assert list_artifacts(ledger, LOCAL_TENANT, needed) == (archive_of(ledger, needed),)


def test_a_job_that_comes_while_it_is_read_back_keeps_the_files_it_names(
    ledger: Engine, folder: ArtifactFolder, finished: Any, document: Any
) -> None:
    needed = finished()

    class Meanwhile(ArtifactFolder):
        """While it reads back, a job that names it is submitted."""

        def verify(self, artifact: Artifact) -> None:
            super().verify(artifact)
            submit(ledger, LOCAL_TENANT, document(factors={"job": needed}, model=None, data=None, task=None))

    assert archive_ended(ledger, Meanwhile(folder.root), 0, drop_files=True) == 0
    untouched(ledger, needed)


def test_many_archive_one_job_once(ledger: Engine, folder: ArtifactFolder, finished: Any, at_once: Any) -> None:
    job_id = finished()
    answers = at_once(6, lambda _: archive_ended(ledger, folder, 0, drop_files=False))
    assert sum(each for each in answers if isinstance(each, int)) == 1, answers
    archive = archive_of(ledger, job_id)
    assert len(list(read_layers(folder, archive))) == LAYERS
    # whoever came second wrote the same bytes, or less where the rows were gone: that is nobody's, and swept away
    sweep_objects(ledger, folder, -1)
    assert {each.key for each in folder.objects()} == {
        file.uri for file in list_artifacts(ledger, LOCAL_TENANT, job_id)
    }


@pytest.mark.parametrize("rows", [True, False])
def test_whoever_is_overtaken_while_reading_back_changes_nothing(
    ledger: Engine, folder: ArtifactFolder, finished: Any, queued: Any, *, rows: bool
) -> None:
    job_id = finished() if rows else queued()
    if not rows:  # cancelled in the queue it has no row to count
        request_cancel(ledger, LOCAL_TENANT, job_id)

    class Overtaken(ArtifactFolder):
        """While it reads back, another process archives the job."""

        def verify(self, artifact: Artifact) -> None:
            super().verify(artifact)
            assert archive_ended(ledger, folder, 0, drop_files=False) == 1

    assert archive_ended(ledger, Overtaken(folder.root), 0, drop_files=True) == 0
    assert len(list(read_layers(folder, archive_of(ledger, job_id)))) == LAYERS * rows
    assert len(list_artifacts(ledger, LOCAL_TENANT, job_id)) == (9 if rows else 1)


KILLED = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import event
from jobs.retention import retention
from jobs.objects.artifacts import ArtifactFolder
from jobs.schema.database import open_database

url, root, where = sys.argv[1:]
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
engine = open_database(url)
if where == "put":
    ArtifactFolder.verify = die
else:
    event.listen(engine, "after_cursor_execute",
        lambda connection, cursor, statement, *_: statement.startswith("INSERT INTO artifacts") and die())
retention.archive_ended(engine, ArtifactFolder(Path(root)), 0, drop_files=True)
"""


@pytest.mark.parametrize("where", ["put", "before the commit"])
def test_a_process_killed_in_between_loses_nothing(
    ledger: Engine, ledger_url: str, folder: ArtifactFolder, finished: Any, where: str
) -> None:
    job_id = finished()
    command = [sys.executable, "-c", KILLED, ledger_url, str(folder.root), where]
    killed = subprocess.run(command, env=dict(os.environ), capture_output=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    untouched(ledger, job_id)
    assert archive_ended(ledger, folder, 0, drop_files=False) == 1
    assert len(list(read_layers(folder, archive_of(ledger, job_id)))) == LAYERS


@ON_BOTH
def test_an_archive_that_does_not_read_back_takes_nothing_away_and_holds_up_no_other(
    ledger: Engine, folder: ArtifactFolder, finished: Any
) -> None:
    class Rotten(ArtifactFolder):
        """Its disk turns a bit over in what is kept of the first job."""

        def publish(self, tenant_id: str, job_id: str, *args: Any, **more: Any) -> str:
            uri = super().publish(tenant_id, job_id, *args, **more)
            if job_id == first:
                path = self.root / uri
                raw = bytearray(path.read_bytes())
                raw[len(raw) // 2] ^= 1
                path.write_bytes(raw)
            return uri

    first, second = finished(), finished()
    with pytest.raises(ArtifactDamaged):
        archive_ended(ledger, Rotten(folder.root), 0, drop_files=True)
    untouched(ledger, first)
    assert job_of(ledger, second).archived_at is not None


@ON_BOTH
def test_jobs_with_a_file_of_the_archives_name_hold_up_no_other(
    ledger: Engine, folder: ArtifactFolder, document: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.retention.retention._AT_ONCE", 2)

    def ended(*names: str) -> str:
        claim = seeding.claimed(ledger, LOCAL_TENANT)
        for name in names:
            seeding.artifact(ledger, folder, claim, name, b"theirs", "application/gzip")
        attempt_endings.finish(ledger, claim)
        return claim.job_id

    first = [ended(NAME) for _ in range(3)]
    behind = [ended() for _ in range(3)]
    with pytest.raises(ArtifactDamaged, match=NAME):
        archive_ended(ledger, folder, 0, drop_files=False)
    assert [job_of(ledger, each).archived_at is None for each in behind] == [False, False, True]
    for each in first:
        assert job_of(ledger, each).archived_at is None
        assert archive_of(ledger, each).size_bytes == len(b"theirs")


def test_jobs_at_fault_are_read_once(ledger: Engine, folder: ArtifactFolder, finished: Any) -> None:
    claim = seeding.claimed(ledger, LOCAL_TENANT)
    seeding.artifact(ledger, folder, claim, NAME, b"theirs", "application/gzip")
    attempt_endings.finish(ledger, claim)
    at_fault: set[str] = set()
    with pytest.raises(ArtifactDamaged, match=claim.job_id):
        archive_ended(ledger, folder, 0, drop_files=False, at_fault=at_fault)
    assert at_fault == {claim.job_id}
    other = finished()
    assert archive_ended(ledger, folder, 0, drop_files=False, at_fault=at_fault) == 1
    assert job_of(ledger, other).archived_at is not None


def test_who_names_factors_is_found_out_once_for_all_jobs(ledger: Engine, folder: ArtifactFolder) -> None:
    """Once for each ended job it would take minutes among ten thousands, in every round."""
    plans: list[str] = []

    def explain(connection: Connection, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT jobs.id") and "AS later" in statement:
            raw = connection.connection.dbapi_connection
            assert raw is not None
            cursor = raw.cursor()
            how = "EXPLAIN QUERY PLAN " if ledger.dialect.name == "sqlite" else "EXPLAIN "
            cursor.execute(how + statement, parameters)
            plans.append("\n".join(str(row[-1]) for row in cursor.fetchall()))

    event.listen(ledger, "before_cursor_execute", explain)
    archive_ended(ledger, folder, 0, drop_files=True)
    assert len(plans) == 1
    assert "later" in plans[0]
    assert "CORRELATED" not in plans[0]
    if ledger.dialect.name == "postgresql":
        assert "hashed SubPlan" in plans[0]


def test_what_was_written_meanwhile_is_not_removed_unarchived(
    ledger: Engine, folder: ArtifactFolder, finished: Any
) -> None:
    job_id = finished()

    class Busy(ArtifactFolder):
        """While it reads back, a row comes."""

        def verify(self, artifact: Artifact) -> None:
            super().verify(artifact)
            values = {"job_id": job_id, "tenant_id": LOCAL_TENANT, "seq": 9_999, "type": "log", "data": {}}
            with writing(ledger) as connection:
                connection.execute(insert(job_events).values(at=ledger_now(), **values))

    events = count_events(ledger, LOCAL_TENANT, job_id)
    assert archive_ended(ledger, Busy(folder.root), 0, drop_files=True) == 0
    untouched(ledger, job_id)
    assert count_events(ledger, LOCAL_TENANT, job_id) == events + 1
    assert archive_ended(ledger, folder, 0, drop_files=True) == 1


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_archive_is_an_error_and_no_page(
    ledger: Engine, folder: ArtifactFolder, finished: Any, damage: str
) -> None:
    job_id = finished()
    archive_ended(ledger, folder, 0, drop_files=False)
    archive = archive_of(ledger, job_id)
    whole = (folder.root / archive.uri).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    damaged = bytes(flipped) if damage == "flip" else whole[: len(whole) // 2]
    (folder.root / archive.uri).write_bytes(damaged)
    with pytest.raises(ArtifactDamaged):
        next(read_layers(folder, archive))
    with pytest.raises(ArtifactDamaged):
        read_contents(folder, archive)


def test_rows_of_more_than_a_page_are_archived_whole(ledger: Engine, folder: ArtifactFolder) -> None:
    claim = seeding.claimed(ledger, LOCAL_TENANT)
    for ordinal in range(105):
        attempt_writes.write_layer(ledger, claim, layer_frame(seeding.declared("capacity", ordinal, f"l{ordinal}")))
    attempt_endings.finish(ledger, claim)
    archive_ended(ledger, folder, 0, drop_files=False)
    rows = list(read_layers(folder, archive_of(ledger, claim.job_id)))
    assert [row.ordinal for row in rows] == list(range(105))


@ON_BOTH
def test_files_of_pieces_stay_until_their_job_has_ended(ledger: Engine, folder: ArtifactFolder) -> None:
    parent, held = seeding.divided(ledger, LOCAL_TENANT, 2)
    for each in held:
        seeding.artifact(ledger, folder, each, "factors/a.bin", b"sums", "x/y")
        attempt_endings.finish(ledger, each)
    pieces = [each.job_id for each in held]
    assert archive_ended(ledger, folder, 0, drop_files=True) == 0
    sweep_objects(ledger, folder, 0)
    for each in pieces:
        (file,) = list_artifacts(ledger, LOCAL_TENANT, each)
        folder.verify(file)
    request_cancel(ledger, LOCAL_TENANT, parent)
    assert archive_ended(ledger, folder, 0, drop_files=True) == 3
    assert all(list_artifacts(ledger, LOCAL_TENANT, each) == (archive_of(ledger, each),) for each in pieces)
    delete_job(ledger, LOCAL_TENANT, parent)
    assert [read_job(ledger, LOCAL_TENANT, each) for each in pieces] == [None, None]
    sweep_objects(ledger, folder, 0)
    assert list(folder.objects()) == []
