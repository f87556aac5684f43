"""Published files are copies that no job has open, and links that a job makes are not followed."""

import contextlib
import ctypes
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.errors import ArtifactDamaged
from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.local_store import LocalObjects
from jobs.objects.scratch_store import _linked
from jobs.records import LOCAL_TENANT
from jobs.schema.identifiers import new_id

CONTENT = b"what was computed"
SECRET = b"what the service alone may read"
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_HERE = -100  # AT_FDCWD


@pytest.fixture
def folder(tmp_path: Path) -> ArtifactFolder:
    return ArtifactFolder(tmp_path / "artifacts")


def publish(folder: ArtifactFolder, job: str, name: str, content: bytes = CONTENT) -> Path:
    digest = hashlib.sha256(content).hexdigest()
    key = folder.publish(LOCAL_TENANT, job, 1, name, sha256=digest, size_bytes=len(content))
    return folder.root / key


@contextlib.contextmanager
def exchanging(one: Path, other: Path) -> Iterator[None]:
    """Two names that mean each other's file, back and forth, as fast as the kernel does it."""
    rename = ctypes.CDLL(None, use_errno=True).renameat2
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_whoever_wrote_a_file_cannot_change_what_was_published(folder: ArtifactFolder) -> None:
    job = new_id()
    staged = folder.attempt_dir(job, 1) / "table.json"
    staged.write_bytes(CONTENT)
    second = staged.with_name("second")
    os.link(staged, second)
    with staged.open("r+b") as open_for_writing:
        kept = publish(folder, job, "table.json")
        open_for_writing.write(SECRET[: len(CONTENT)])
        second.write_bytes(b"x")
    assert kept.read_bytes() == CONTENT
    assert kept.stat().st_nlink == 1
    assert kept.stat().st_ino != staged.stat().st_ino


def test_a_store_links_nothing_that_it_is_given(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    store = LocalObjects(tmp_path / "root")
    store.put("a/b", source, sha256=hashlib.sha256(CONTENT).hexdigest(), size_bytes=len(CONTENT))
    source.write_bytes(b"y" * len(CONTENT))
    assert (tmp_path / "root/a/b").read_bytes() == CONTENT


@pytest.mark.parametrize("depth", ["file", "folder"])
def test_a_link_in_the_place_of_a_file_or_folder_is_never_followed(
    folder: ArtifactFolder, tmp_path: Path, depth: str
) -> None:
    job = new_id()
    place = folder.attempt_dir(job, 1)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "table.json").write_bytes(SECRET)
    (place / "factors").mkdir()
    (place / "factors" / "table.json").write_bytes(CONTENT)
    inner = Path("factors") if depth == "folder" else Path("factors/table.json")
    link = place / "link"
    link.symlink_to(tmp_path / "private" / inner.relative_to("factors"))
    taken = 0
    with exchanging(place / inner, link):
        for _ in range(300):
            with contextlib.suppress(ArtifactDamaged):
                # whoever declares the secret's digest gets it only if it is what is read
                publish(folder, job, "factors/table.json", SECRET)
                taken += 1
    assert taken == 0


def test_a_folder_exchanged_for_a_link_puts_nothing_into_a_copy_of_the_scratch(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "tensors").write_bytes(SECRET)
    scratch = tmp_path / "scratch"
    (scratch / "checkpoint").mkdir(parents=True)
    (scratch / "checkpoint" / "tensors").write_bytes(CONTENT)
    (scratch / "link").symlink_to(tmp_path / "private")
    seen = set()
    with exchanging(scratch / "checkpoint", scratch / "link"):
        for number in range(300):
            place = tmp_path / f"copy{number}"
            place.mkdir()
            seen |= {path.read_bytes() for path in _linked(scratch, place).values()}
    assert seen == {CONTENT}
