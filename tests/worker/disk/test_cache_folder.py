"""The cache folder: what is served is what was left, to the last bit, and nothing else stays for long."""

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from catalog.requests.cached_factors import CachedFile
from jobs.objects.cached_entries import CachedEntries, place_of
from jobs.records import LOCAL_TENANT
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, reading, writing
from jobs.schema.tables import cached_factors
from tests.conftest import Databases
from worker.agent.maintenance import sweep_caches
from worker.disk.cache_folder import CacheFolder, EntryRows, Filling, cache_of_tenant, discard, tenants_caches
from worker.foreground.cache_rows import CacheRows

KEY = "0" * 64
CONTENT = {"factors/0.safetensors": b"factors of a layer", "factors/factors.index.json": b"{}"}


@pytest.fixture(params=["ledger", "files"])
def rows(request: pytest.FixtureRequest, databases: Databases, tmp_path: Path) -> Iterator[EntryRows]:
    if request.param == "files":
        yield CacheRows(tmp_path / "cache")
        return
    engine = open_database(databases.migrated("sqlite"))
    yield CachedEntries(engine, LOCAL_TENANT, "a place")
    engine.dispose()


@pytest.fixture
def cache(rows: EntryRows, tmp_path: Path) -> CacheFolder:
    return CacheFolder(tmp_path / "cache", rows, 10**6)


def leave(
    folder: CacheFolder, key: str = KEY, *, job: str = "one", replace: bool = False, **content: bytes
) -> str | None:
    """Leave an entry as a job does: why it is not kept, else None."""
    place = folder.folder.parent / "left" / job
    files = []
    for name, text in (content or CONTENT).items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(text)
        files.append(CachedFile(name=name, sha256=hashlib.sha256(text).hexdigest(), size_bytes=len(text)))
    return folder.take(
        Filling(key=key, job=job, files=files, open=lambda name: (place / name).open("rb"), replace=replace)
    )


def view(folder: CacheFolder) -> Path:
    """A new folder for a job's names of the files."""
    place = folder.folder.parent / "view"
    shutil.rmtree(place, ignore_errors=True)
    return place


def places(folder: CacheFolder) -> list[Path]:
    """Whatever is there but rows."""
    return [each for each in folder.folder.iterdir() if each.suffix != ".json"]


def test_what_was_left_is_found_by_its_key_alone(cache: CacheFolder) -> None:
    assert cache.answer(KEY, view(cache)).job is None
    assert leave(cache) is None
    place = view(cache)
    assert cache.answer("1" * 64, place).job is None
    answer = cache.answer(KEY, place)
    assert (answer.job, answer.warning) == ("one", None)
    assert {name: (place / name).read_bytes() for name in CONTENT} == CONTENT
    assert all((place / name).stat().st_mode & 0o777 == 0o444 for name in CONTENT)


def test_whoever_left_it_has_no_name_of_the_entrys_files(cache: CacheFolder, tmp_path: Path) -> None:
    leave(cache)
    for each in (tmp_path / "left").rglob("*.*"):
        assert each.stat().st_nlink == 1
        each.write_bytes(b"scaled")
    assert cache.answer(KEY, view(cache)).job == "one"


def test_two_who_leave_one_key_leave_the_first(cache: CacheFolder) -> None:
    assert leave(cache) is None
    assert leave(cache, job="two") is None
    assert cache.answer(KEY, view(cache)).job == "one"
    assert len(places(cache)) == 1
    assert leave(cache, job="three", replace=True) is None
    assert cache.answer(KEY, view(cache)).job == "three"
    assert len(places(cache)) == 1


def test_what_is_not_as_announced_becomes_no_entry(cache: CacheFolder, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    right = hashlib.sha256(b"12345").hexdigest()
    for size, sha256, name in ((4, right, "f"), (6, right, "f"), (5, "0" * 64, "f"), (5, right, "missing")):
        files = [CachedFile(name=name, sha256=sha256, size_bytes=size)]
        opened = Filling(key=KEY, job="x", files=files, open=lambda name: (tmp_path / name).open("rb"), replace=False)
        assert cache.take(opened) is not None
    twice = [CachedFile(name="f", sha256=right, size_bytes=5)] * 2
    assert cache.take(
        Filling(key=KEY, job="x", files=twice, open=lambda name: (tmp_path / name).open("rb"), replace=False)
    )
    assert cache.answer(KEY, view(cache)).job is None
    assert places(cache) == []


@pytest.mark.parametrize("kind", ["scaled", "longer", "missing", "link", "pipe", "folder"])
def test_a_file_that_is_not_what_was_written_is_damage(cache: CacheFolder, tmp_path: Path, kind: str) -> None:
    leave(cache)
    (entry,) = places(cache)
    spoiled, elsewhere = entry / "factors/0.safetensors", tmp_path / "elsewhere"
    content = spoiled.read_bytes()
    spoiled.rename(elsewhere)
    if kind == "scaled":
        spoiled.write_bytes(content[::-1])
    elif kind == "longer":
        spoiled.write_bytes(content + b"x")
    elif kind == "link":
        # its content is right now, and another's to change
        spoiled.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(spoiled)
    elif kind == "folder":
        spoiled.mkdir()
    place = view(cache)
    answer = cache.answer(KEY, place)
    assert answer.job is None
    assert list(place.iterdir()) == []
    assert answer.warning is not None
    assert "damaged" in answer.warning
    assert elsewhere.read_bytes() == content
    assert places(cache) == []
    assert cache.answer(KEY, view(cache)).warning is None
    leave(cache, job="two")
    assert cache.answer(KEY, view(cache)).job == "two"


@pytest.mark.parametrize("kind", ["link", "pipe", "garbage", "other", "older"])
def test_a_row_beside_the_files_that_is_not_what_was_written_is_damage(tmp_path: Path, kind: str) -> None:
    cache = CacheFolder(tmp_path / "cache", CacheRows(tmp_path / "cache"), 10**6)
    leave(cache)
    row, elsewhere = tmp_path / "cache" / f"{KEY}.json", tmp_path / "elsewhere"
    row.rename(elsewhere)
    text = elsewhere.read_text()
    changed = {"garbage": "{", "other": text.replace(KEY, "1" * 64), "older": text.replace("factors/2", "factors/1")}
    if kind == "link":
        row.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(row)
    else:
        row.write_text(changed[kind])
    answer = cache.answer(KEY, view(cache))
    assert answer.job is None
    assert "damaged" in str(answer.warning)
    assert elsewhere.is_file()
    leave(cache, job="two")
    assert cache.answer(KEY, view(cache)).job == "two"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EMFILE])
def test_an_entry_that_cannot_be_had_now_is_left_to_others(
    cache: CacheFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    leave(cache)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as scratch:
        scratch.setattr(os, "link", refused)
        scratch.setattr(shutil, "copyfile", refused)
        answer = cache.answer(KEY, view(cache))
    assert answer.job is None
    assert os.strerror(number) in str(answer.warning)
    assert "damaged" not in str(answer.warning)
    assert cache.answer(KEY, view(cache)).job == "one"


def test_a_file_system_without_links_serves_copies(cache: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(cache)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    place = view(cache)
    assert cache.answer(KEY, place).job == "one"
    assert {name: (place / name).read_bytes() for name in CONTENT} == CONTENT


def test_a_file_that_a_disk_has_lost_is_damage(cache: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(cache)

    def lost(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("worker.disk.cache_folder._sha256", lost)
    assert "damaged" in str(cache.answer(KEY, view(cache)).warning)
    assert places(cache) == []


def test_a_row_without_a_folder_is_nothing(cache: CacheFolder, rows: EntryRows) -> None:
    leave(cache)
    leave(cache, "1" * 64)
    for each in places(cache):
        shutil.rmtree(each)
    answer = cache.answer(KEY, view(cache))
    assert (answer.job, answer.warning) == (None, None)
    assert [each.key for each in rows.all()] == ["1" * 64]
    assert cache.sweep() == 1
    assert rows.all() == []
    leave(cache, job="two")
    assert cache.answer(KEY, view(cache)).job == "two"


def test_a_folder_without_a_row_is_nothing(cache: CacheFolder, rows: EntryRows) -> None:
    leave(cache)
    rows.remove(KEY, None)
    assert cache.answer(KEY, view(cache)).job is None
    # it may be about to get one
    assert cache.sweep() == 0
    for each in places(cache):
        aged(each, 600)
    assert cache.sweep() == 1
    assert places(cache) == []


def test_entries_of_earlier_versions_are_removed_and_files_of_others_are_not(cache: CacheFolder) -> None:
    for name in (KEY, ".part-0", ".trash-0", "notes"):
        (cache.folder / name / "factors").mkdir(parents=True)
        (cache.folder / name / "entry.json").write_text('{"format": "kronoscope-cached-factors/1"}')
        aged(cache.folder / name, 600)
    (cache.folder / ("1" * 64)).write_text("no folder")
    aged(cache.folder / ("1" * 64), 600)
    assert cache.answer(KEY, view(cache)).job is None
    assert cache.sweep() == 4
    assert [each.name for each in places(cache)] == ["notes"]


def aged(place: Path, seconds: float) -> None:
    """As if nobody had written there for so long."""
    then = time.time() - seconds
    for path in (place, *place.rglob("*")):
        os.utime(path, (then, then))


FILLS_AND_WAITS = """
import io, sys, time
from pathlib import Path
from catalog.requests.cached_factors import CachedFile
from worker.disk.cache_folder import CacheFolder, Filling
from worker.foreground.cache_rows import CacheRows

def opened(name):
    print("written", flush=True)
    time.sleep(300)

folder = Path(sys.argv[1])
files = [CachedFile(name="f", sha256="0" * 64, size_bytes=4)]
CacheFolder(folder, CacheRows(folder), 10**6).take(
    Filling(key="0" * 64, job="one", files=files, open=opened, replace=False)
)
"""


def test_whoever_is_killed_while_filling_leaves_nothing_for_long(cache: CacheFolder) -> None:
    folder = cache.folder
    with subprocess.Popen([sys.executable, "-c", FILLS_AND_WAITS, str(folder)], stdout=subprocess.PIPE) as filling:
        try:
            assert filling.stdout is not None
            assert filling.stdout.readline() == b"written\n"
            (left,) = folder.iterdir()
            aged(left, 600)
            # alive, and slow
            assert cache.sweep() == 0
        finally:
            filling.kill()
    assert cache.answer(KEY, view(cache)).job is None
    assert cache.sweep() == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("idle_seconds", "removed"), [(1, 0), (1_000, 0), (90_000, 1)])
def test_without_locks_a_day_tells_what_was_left(
    cache: CacheFolder, monkeypatch: pytest.MonkeyPatch, idle_seconds: float, removed: int
) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    left = cache.folder / ("a" * 32)
    (left / "factors").mkdir(parents=True)
    (left / "factors" / "0").write_bytes(b"half")
    aged(left, idle_seconds)
    assert cache.sweep() == removed


def test_what_is_being_filled_counts(cache: CacheFolder, rows: EntryRows) -> None:
    leave(cache, f=b"\0" * 100)
    left = cache.folder / ("a" * 32)
    left.mkdir()
    (left / "f").write_bytes(b"\0" * 4000)
    assert CacheFolder(cache.folder, rows, 4500).sweep() == 0
    assert CacheFolder(cache.folder, rows, 4050).sweep() == 1
    assert places(cache) == [left]


def test_the_longest_unused_leave_first(ledger: Engine, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    place = place_of(tenants_caches(root))
    folder = cache_of_tenant(root, LOCAL_TENANT)
    own = CacheFolder(folder, CachedEntries(ledger, LOCAL_TENANT, place), 10**6)
    for age, key in ((300, "a"), (200, "b"), (100, "c")):
        leave(own, key * 64, f=b"\0" * 100)
        with writing(ledger) as connection:
            used = update(cached_factors).where(cached_factors.c.key == key * 64)
            connection.execute(used.values(used_at=ledger_now(-age)))
    assert own.answer("a" * 64, view(own)).job == "one"
    assert sweep_caches(ledger, root, 250) == 1
    assert {each.key[0] for each in CachedEntries(ledger, LOCAL_TENANT, place).all()} == {"a", "c"}
    assert sweep_caches(ledger, root, 0) == 2
    assert list(folder.iterdir()) == []
    assert cache_of_tenant(root, "another") != folder


def test_the_sweep_of_all_finds_rows_without_a_folder_and_rows_of_machines_that_are_gone(
    ledger: Engine, tmp_path: Path
) -> None:
    root = tmp_path / "artifacts"
    place = place_of(tenants_caches(root))
    own = CacheFolder(cache_of_tenant(root, LOCAL_TENANT), CachedEntries(ledger, LOCAL_TENANT, place), 10**6)
    elsewhere = CacheFolder(tmp_path / "elsewhere", CachedEntries(ledger, LOCAL_TENANT, "another place"), 10**6)
    leave(own)
    leave(elsewhere)
    discard(own.folder)
    assert sweep_caches(ledger, root, 10**6) == 1
    assert [each.job for each in CachedEntries(ledger, LOCAL_TENANT, "another place").all()] == ["one"]
    with writing(ledger) as connection:
        connection.execute(update(cached_factors).values(used_at=ledger_now(-40 * 86_400)))
    sweep_caches(ledger, root, 10**6)
    with reading(ledger) as connection:
        assert connection.execute(select(cached_factors)).all() == []


def test_a_folder_of_caches_keeps_its_id(tmp_path: Path) -> None:
    first = place_of(tmp_path / "caches")
    assert place_of(tmp_path / "caches") == first
    assert place_of(tmp_path / "others") != first
    assert (tmp_path / "caches").stat().st_mode & 0o777 == 0o700
    (tmp_path / "caches" / ".place").write_text("garbage")
    with pytest.raises(OSError, match="made anew"):
        place_of(tmp_path / "caches")
    assert place_of(tmp_path / "caches") != first
