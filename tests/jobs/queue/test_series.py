"""A series stores a job for each checkpoint at once or none; their ends, in any order, decide what becomes of it."""

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, update

from catalog.frames import ArtifactWritten, Failed, Summarised, layer_frame
from catalog.record import plain
from jobs.codec import parse_document
from jobs.errors import JobStillActive, PieceRefused, QueueFull
from jobs.queue import attempt_endings, attempt_writes, reaper
from jobs.queue.claims import claim
from jobs.queue.division import settle_stranded
from jobs.records import LOCAL_TENANT, Claim, Job
from jobs.repository.pieces import read_pieces, read_series
from jobs.repository.results import list_artifacts
from jobs.repository.store import delete_job, read_job, request_cancel
from jobs.repository.submission import submit, submitted_earlier
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import jobs
from jobs.tenancy.quotas import require_place
from tests.api import seeding
from tests.conftest import Dialect
from tests.jobs.conftest import ON_BOTH, POSTGRESQL_OFTEN

BODY: dict[str, Any] = {
    "kind": "capacity",
    "name": "training",
    "model": {"source": "directory", "path": "/c/0"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
    "compare_curvature": {"k": [2]},
}
Make = Callable[..., str]


@pytest.fixture(params=POSTGRESQL_OFTEN)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """SQLite by the commit, but for the tests that between them run each statement of this file."""
    chosen: Dialect = request.param
    return chosen


@pytest.fixture
def made(ledger: Engine) -> Make:
    def make(count: int = 3, **changes: Any) -> str:
        series = {"model": [f"/c/{each}" for each in range(count)], "learning_rate": 0.1}
        series |= changes.pop("series", {})
        document = parse_document(json.dumps(BODY | {"series": series} | changes).encode())
        return submit(ledger, LOCAL_TENANT, document).job.id

    return make


def seen(ledger: Engine, job_id: str) -> Job:
    found = read_job(ledger, LOCAL_TENANT, job_id)
    assert found is not None
    return found


def taken(ledger: Engine, job_id: str) -> Claim:
    found = claim(ledger, job_id, "worker-1:7", secrets.token_hex(8), 3600)
    assert found is not None
    return found


def succeed(ledger: Engine, job_id: str, sizes: Sequence[int] = (3, 4)) -> None:
    """End a job whose layers `0`, `1`, … have so many rows of A; none for a comparison."""
    mine = taken(ledger, job_id)
    for place, size in enumerate(sizes):
        row = seeding.row("capacity", place, str(place), "Linear", 5 * size, [1.0] * size, [1.0] * 5)
        attempt_writes.write_layer(ledger, mine, layer_frame(row))
    attempt_writes.write_summary(
        ledger, mine, Summarised(kind=mine.kinds[0], summary=plain(seeding.summary("capacity")))
    )
    frame = ArtifactWritten(name="factors/0.safetensors", sha256="0" * 64, size_bytes=1, media_type="m")
    attempt_writes.write_artifact(ledger, mine, frame, f"tenants/{LOCAL_TENANT}/{job_id}")
    attempt_endings.finish(ledger, mine)


def fail(ledger: Engine, job_id: str, message: str = "it is not there") -> None:
    failure = Failed(category="usage", code="c", message=message, pointer="/model/path", layer=None, detail=None)
    attempt_endings.fail(ledger, taken(ledger, job_id), failure)


def checkpoints(ledger: Engine, series: str) -> list[Job]:
    return read_series(ledger, LOCAL_TENANT, series)[0]


def pairs(ledger: Engine, series: str) -> list[tuple[int, Job]]:
    return read_series(ledger, LOCAL_TENANT, series)[1]


def test_a_series_is_one_job_for_each_checkpoint_and_waits(
    ledger: Engine, made: Make, woken: Callable[[], int]
) -> None:
    series = made(12)
    assert woken() == 1
    assert seen(ledger, series).state == "waiting"
    children = checkpoints(ledger, series)
    assert [each.document["model"]["path"] for each in children] == [f"/c/{place}" for place in range(12)]
    assert {(each.state, each.document["series"], each.parent_id) for each in children} == {("queued", None, series)}
    assert [each.name for each in children][:2] == ["training · checkpoint 1 of 12", "training · checkpoint 2 of 12"]
    assert read_pieces(ledger, LOCAL_TENANT, series) == ()
    assert claim(ledger, series, "worker-1:7", "t", 60) is None


@ON_BOTH
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_neighbours_are_compared_once_all_have_ended(ledger: Engine, made: Make, order: Sequence[int]) -> None:
    series = made(3)
    children = checkpoints(ledger, series)
    for place in order:
        assert pairs(ledger, series) == []
        succeed(ledger, children[place].id)
    assert seen(ledger, series).state == "waiting"
    compared = pairs(ledger, series)
    assert [place for place, _ in compared] == [1, 2]
    for place, job in compared:
        assert job.kinds == ("compare_curvature",)
        assert job.document["factors"]["job"] == children[place].id
        options = job.document["compare_curvature"]
        assert (options["against"]["job"], options["k"]) == (children[place - 1].id, [2])
        assert list_artifacts(ledger, LOCAL_TENANT, children[place].id)  # kept until they are compared
    for _, job in reversed(compared):
        assert seen(ledger, series).state == "waiting"
        succeed(ledger, job.id, ())
    assert seen(ledger, series).state == "succeeded"
    assert [each for child in children for each in list_artifacts(ledger, LOCAL_TENANT, child.id)] == []
    progress = seen(ledger, series).progress
    assert progress is not None
    assert (progress["done"], progress["total"], progress["percent"]) == (5, 5, 100.0)


def test_a_sharded_model_is_compared_in_one_process(ledger: Engine, made: Make) -> None:
    series = made(2, world_size=2, memory={"model_sharding": "on"})
    for each in checkpoints(ledger, series):
        assert (each.document["world_size"], each.document["memory"]["model_sharding"]) == (2, "on")
        succeed(ledger, each.id)
    ((_, job),) = pairs(ledger, series)
    assert (job.document["world_size"], job.document["memory"]["model_sharding"]) == (1, "off")


def kept(ledger: Engine, series: str) -> list[bool]:
    return [bool(list_artifacts(ledger, LOCAL_TENANT, each.id)) for each in checkpoints(ledger, series)]


@pytest.mark.parametrize("running", [True, False])
def test_factors_go_with_a_cancelled_series_but_those_that_an_open_job_names(
    ledger: Engine, made: Make, running: bool
) -> None:
    series = made(4)
    children = checkpoints(ledger, series)
    for each in children[:2]:
        succeed(ledger, each.id)
    named = {**BODY, "kind": "capacity", "factors": {"job": children[1].id}, "model": None, "data": None, "task": None}
    submit(ledger, LOCAL_TENANT, parse_document(json.dumps(named).encode()))
    last = taken(ledger, children[2].id) if running else None
    request_cancel(ledger, LOCAL_TENANT, series)
    if last is not None:
        assert kept(ledger, series) == [True, True, False, False]
        attempt_endings.hand_back(ledger, last)
    assert seen(ledger, series).state == "cancelled"
    assert kept(ledger, series) == [False, True, False, False]


def test_factors_go_with_a_series_of_two_architectures(ledger: Engine, made: Make) -> None:
    series = made(3)
    children = checkpoints(ledger, series)
    running = taken(ledger, children[2].id)
    frame = ArtifactWritten(name="factors/0.safetensors", sha256="0" * 64, size_bytes=1, media_type="m")
    for each, sizes in zip(children, ((3, 4), (3, 6)), strict=False):
        succeed(ledger, each.id, sizes)
    assert seen(ledger, series).state == "failed"
    attempt_writes.write_artifact(ledger, running, frame, f"tenants/{LOCAL_TENANT}/late")
    assert kept(ledger, series) == [False, False, True]
    attempt_endings.hand_back(ledger, running)
    assert kept(ledger, series) == [False, False, False]


def test_factors_that_were_asked_for_stay(ledger: Engine, made: Make) -> None:
    series = made(2, keep=["factors"])
    for each in checkpoints(ledger, series):
        succeed(ledger, each.id)
    for _, job in pairs(ledger, series):
        succeed(ledger, job.id, ())
    assert seen(ledger, series).state == "succeeded"
    assert all(list_artifacts(ledger, LOCAL_TENANT, each.id) for each in checkpoints(ledger, series))


def test_without_overlaps_nothing_is_compared(ledger: Engine, made: Make) -> None:
    series = made(2, series={"overlaps": False})
    for each in checkpoints(ledger, series):
        assert each.document["keep"] == ["spectra"]
        succeed(ledger, each.id)
    assert (seen(ledger, series).state, pairs(ledger, series)) == ("succeeded", [])


def test_one_that_fails_leaves_a_gap(ledger: Engine, made: Make) -> None:
    series = made(5)
    for place, each in enumerate(checkpoints(ledger, series)):
        (fail if place == 2 else succeed)(ledger, each.id)
    assert [place for place, _ in pairs(ledger, series)] == [1, 4]
    # neither does a comparison that fails end the series
    (_, first), (_, second) = pairs(ledger, series)
    fail(ledger, first.id)
    succeed(ledger, second.id, ())
    assert (seen(ledger, series).state, seen(ledger, series).failure) == ("succeeded", None)


def test_where_none_succeeds_the_series_fails_with_the_first(ledger: Engine, made: Make) -> None:
    series = made(2)
    children = checkpoints(ledger, series)
    for place in (1, 0):
        fail(ledger, children[place].id, f"no folder {place}")
    failed = seen(ledger, series)
    assert (failed.state, pairs(ledger, series)) == ("failed", [])
    assert failed.failure is not None
    assert (
        failed.failure["message"] == f"no checkpoint could be measured; the first (job {children[0].id}): no folder 0"
    )


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((3, 6), "its layer `1` is Linear, 6 × 5, 30 parameters, and that of the other Linear, 4 × 5, 20 parameters"),
        ((3,), "its layer `1` is none, and that of the other Linear, 4 × 5, 20 parameters"),
        ((3, 4, 7), "its layer `2` is Linear, 7 × 5, 35 parameters, and that of the other none"),
    ],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_another_architecture_fails_it_with_the_first_difference(
    ledger: Engine, made: Make, sizes: Sequence[int], said: str, order: Sequence[int]
) -> None:
    series = made(3)
    children = checkpoints(ledger, series)
    succeed(ledger, children[order[0]].id, (3, 4) if order[0] == 0 else sizes)
    running = taken(ledger, children[2].id)
    succeed(ledger, children[order[1]].id, (3, 4) if order[1] == 0 else sizes)
    failed = seen(ledger, series)
    assert (failed.state, failed.failure and failed.failure["pointer"]) == ("failed", "/series/model/1")
    assert failed.failure is not None
    assert failed.failure["message"] == (
        "checkpoint 2 (/c/1) is of another architecture than checkpoint 1 (/c/0): "
        f"{said}; give checkpoints of one model"
    )
    # what has yet to stop is stopped, and ends without it
    assert seen(ledger, children[2].id).state == "cancelling"
    attempt_endings.hand_back(ledger, running)
    assert (seen(ledger, children[2].id).state, seen(ledger, series).state) == ("cancelled", "failed")


def test_a_layer_that_one_did_not_cover_is_the_same_layer(ledger: Engine, made: Make) -> None:
    series = made(2)
    first, second = checkpoints(ledger, series)
    succeed(ledger, first.id)
    mine = taken(ledger, second.id)
    for place, size in enumerate((3, 4)):
        row = seeding.row("capacity", place, str(place), "Linear", 5 * size, [1.0] * size, [1.0] * 5)
        if place:  # nothing was collected for it
            bare = seeding.declared("capacity", place, str(place))
            row = type(row)(**{**vars(bare), "module": "Linear", "parameter_count": 20})
        attempt_writes.write_layer(ledger, mine, layer_frame(row))
    attempt_endings.finish(ledger, mine)
    assert [place for place, _ in pairs(ledger, series)] == [1]


def test_a_series_is_cancelled_and_deleted_as_a_whole(ledger: Engine, made: Make) -> None:
    series = made(3)
    children = checkpoints(ledger, series)
    succeed(ledger, children[0].id)
    running = taken(ledger, children[1].id)
    assert request_cancel(ledger, LOCAL_TENANT, series).state == "cancelling"
    assert [each.state for each in checkpoints(ledger, series)] == ["succeeded", "cancelling", "cancelled"]
    with pytest.raises(JobStillActive):
        delete_job(ledger, LOCAL_TENANT, series)
    attempt_endings.hand_back(ledger, running)
    assert seen(ledger, series).state == "cancelled"
    with pytest.raises(PieceRefused):
        delete_job(ledger, LOCAL_TENANT, children[0].id)
    delete_job(ledger, LOCAL_TENANT, series)
    assert read_job(ledger, LOCAL_TENANT, children[0].id) is None


@ON_BOTH
def test_the_jobs_of_a_series_count_in_the_quota_and_all_fit_or_none(ledger: Engine, made: Make) -> None:
    made(3)
    with reading(ledger) as connection:
        require_place(connection, LOCAL_TENANT, (5, 10**9))
        require_place(connection, LOCAL_TENANT, (8, 10**9), (4, 100))
        with pytest.raises(QueueFull, match="4 of your jobs wait, of 7 that may, and these are 4 jobs"):
            require_place(connection, LOCAL_TENANT, (7, 10**9), (4, 100))
        characters = sum(len(json.dumps(each)) for each in connection.execute(select(jobs.c.document)).scalars())
        with pytest.raises(QueueFull, match="bytes"):
            require_place(connection, LOCAL_TENANT, (100, 2 * characters), (4, 2 * characters))


def test_nothing_is_stored_where_a_part_cannot_be(ledger: Engine, made: Make) -> None:
    """The transaction that stores the series stores its jobs: where it fails, there is neither."""

    class Torn(Exception):
        pass

    def tear(*_: Any) -> None:
        raise Torn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jobs.queue.series.insert_children", tear)
        with pytest.raises(Torn):
            made(3)
    with reading(ledger) as connection:
        assert connection.execute(select(func.count()).select_from(jobs)).scalar_one() == 0


def test_a_key_stores_a_series_once(ledger: Engine) -> None:
    document = parse_document(json.dumps(BODY | {"series": {"model": ["/c/0", "/c/1"]}}).encode())
    first, again = (submit(ledger, LOCAL_TENANT, document, "one-and-the-same") for _ in range(2))
    assert (first.job.id, first.created, again.created) == (again.job.id, True, False)
    assert len(checkpoints(ledger, first.job.id)) == 2
    assert submitted_earlier(ledger, LOCAL_TENANT, document, "one-and-the-same") is not None


def test_an_overdue_checkpoint_ends_as_any_other(ledger: Engine, made: Make) -> None:
    series = made(2)
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.parent_id == series).values(deadline_at=ledger_now(-1)))
    assert reaper.end_overdue(ledger) == 2
    assert seen(ledger, series).state == "failed"


def test_a_series_whose_jobs_ended_without_it_goes_on(ledger: Engine, made: Make) -> None:
    """As where a process of an earlier version has ended them."""
    series = made(2)
    first, second = checkpoints(ledger, series)
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == first.id).values(state="failed"))
    assert settle_stranded(ledger) == 0  # the other is still to come
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == second.id).values(state="succeeded"))
    assert settle_stranded(ledger) == 1
    assert seen(ledger, series).state == "succeeded"
