"""Both stores keep the same promises: whole or not at all, verified, found damaged, removed only when old."""

import hashlib
import io
import os
import shutil
import threading
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

import obstore
import pytest
from obstore.store import S3Store

from jobs.errors import ArtifactDamaged, SettingsInvalid, StoreUnavailable
from jobs.objects.local_store import LocalObjects, open_plain, require_digest
from jobs.objects.object_store import MARKS, ObjectStore, StoredObject
from jobs.objects.s3_store import S3Objects, signed_url
from jobs.s3_settings import S3Settings
from jobs.settings import LedgerSettings
from tests.machine.stopwatch import until

KEY = "objects/local/ab/abcd"


class Kept:
    """A store, and its bytes from behind."""

    def __init__(self, store: ObjectStore, folder: Path, raw: S3Store | None) -> None:
        self.store = store
        self.folder = folder
        self._raw = raw

    def put(self, content: bytes, key: str = KEY, declared: bytes | None = None) -> None:
        source = self.folder / "staged"
        source.unlink(missing_ok=True)  # a folder keeps the very file
        source.write_bytes(content)
        told = content if declared is None else declared
        self.store.put(key, source, sha256=hashlib.sha256(told).hexdigest(), size_bytes=len(told))

    def read(self, size_bytes: int, first: int = 0) -> bytes:
        with self.store.open(KEY, size_bytes, first) as file:
            return file.read()

    def fetch(self, content: bytes) -> Path:
        target = self.folder / "fetched"
        self.store.fetch(KEY, target, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
        return target

    def replace(self, content: bytes) -> None:
        """What a failing disk, or somebody with the store's keys, does."""
        if self._raw is None:
            (self.folder / "store" / KEY).write_bytes(content)
        else:
            obstore.put(self._raw, KEY, content)

    def keys(self) -> set[str]:
        return {each.key for each in self.store.listing("objects/")}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that stands still for some seconds answers afterwards, and who left a mark then is not gone."""
    monkeypatch.setattr("jobs.objects.s3_store._HASTY", {"seconds": 60.0, "retry_seconds": 30.0})
    monkeypatch.setattr("jobs.objects.s3_store._MARK_SECONDS", 600.0)


@pytest.fixture(params=["folder", "s3"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    if request.param == "folder":
        return Kept(LocalObjects(tmp_path / "store"), tmp_path, None)
    bucket: S3Settings = request.getfixturevalue("bucket")
    return Kept(S3Objects(bucket), tmp_path, behind(bucket))


def behind(bucket: S3Settings) -> S3Store:
    config = {"endpoint": bucket.endpoint, "access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}
    return S3Store(bucket.bucket, prefix=bucket.prefix, config=config, client_options={"allow_http": True})  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 5, 20 * 2**20], ids=["empty", "small", "several parts"])
def test_an_object_comes_back_as_it_was_put(kept: Kept, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    kept.put(content)
    assert kept.read(size) == content
    if size:
        assert kept.read(size, size // 2) == content[size // 2 :]
    assert kept.fetch(content).read_bytes() == content
    (found,) = kept.store.listing("objects/")
    assert (found.key, found.size_bytes) == (KEY, size)
    assert abs(kept.store.now() - found.modified_at) < 600


@pytest.mark.parametrize("size", [5, 20 * 2**20], ids=["small", "several parts"])
def test_a_file_that_is_not_as_declared_never_appears(kept: Kept, size: int) -> None:
    content = bytes(size)
    for declared in (b"\1" + content[1:], content[:-1], content + b"x"):
        with pytest.raises(ArtifactDamaged):
            kept.put(content, declared=declared)
        assert kept.keys() == set()
    kept.put(content)
    with pytest.raises(ArtifactDamaged):
        kept.put(b"\1" + content[1:], declared=content)
    assert kept.read(size) == content


def test_a_file_that_is_none_is_not_put(kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"x")
    for source in (tmp_path / "absent", tmp_path / "link", tmp_path):
        with pytest.raises(ArtifactDamaged):
            kept.store.put(KEY, source, sha256=hashlib.sha256(b"x").hexdigest(), size_bytes=1)
    assert kept.keys() == set()


def test_one_flipped_byte_is_found_and_what_is_damaged_is_not_fetched(kept: Kept) -> None:
    content = b"spectrum" * 100_000
    assert not kept.store.has(KEY, len(content))
    kept.put(content)
    assert kept.store.has(KEY, len(content))
    damaged = bytearray(content)
    damaged[400_000] ^= 1
    kept.replace(bytes(damaged))
    with pytest.raises(ArtifactDamaged, match="SHA-256"):
        kept.fetch(content)
    assert sorted(each.name for each in kept.folder.iterdir() if each.name != "store") == ["staged"]
    kept.replace(content[:-1])
    assert not kept.store.has(KEY, len(content))
    for act in (lambda: kept.read(len(content)), lambda: kept.fetch(content)):
        with pytest.raises(ArtifactDamaged, match="799,999 bytes, 800,000 were declared"):
            act()
    kept.put(content)
    assert kept.fetch(content).read_bytes() == content


def test_what_is_not_there_is_said_to_be_damaged(kept: Kept) -> None:
    with pytest.raises(ArtifactDamaged, match="cannot be opened"):
        kept.read(5)
    assert not kept.store.delete(KEY, older_than=kept.store.now() + 60)


def test_only_what_is_old_is_removed_and_putting_begins_its_age_anew(kept: Kept) -> None:
    kept.put(b"content")
    now = kept.store.now()
    assert not kept.store.delete(KEY, older_than=now - 60)
    assert kept.read(7) == b"content"
    assert kept.store.delete(KEY, older_than=now + 60)
    assert kept.keys() == set()
    assert set(kept.store.listing(MARKS)) == set()


class LateRemover(S3Objects):
    """Has seen the object old, and sends its request to remove it when it is let go."""

    def __init__(self, bucket: S3Settings) -> None:
        super().__init__(bucket)
        self._seen, self._go = threading.Event(), threading.Event()
        limit = self.now() + 60
        self._thread = threading.Thread(target=lambda: self.delete(KEY, older_than=limit))
        self._thread.start()
        assert self._seen.wait(120)

    def _remove(self, *args: Any) -> bool:
        if args[-1] == KEY:
            self._seen.set()
            assert self._go.wait(240)
        return super()._remove(*args)

    def end(self) -> None:
        self._go.set()
        self._thread.join(240)


class Putting(S3Objects):
    """Puts an object in a thread of its own."""

    def __init__(self, bucket: S3Settings, kept: Kept) -> None:
        super().__init__(bucket)
        self._looks = 0
        here = Kept(self, kept.folder, None)
        self._thread = threading.Thread(target=lambda: here.put(b"content"))
        self._thread.start()

    def _removers(self, key: str) -> set[str]:
        found = super()._removers(key)
        self._looks += 1
        return found

    def get_on(self) -> None:
        """Let it come as far as it comes: it looks for marks again and again, or waits for nobody and has ended."""
        until(lambda: self._looks > 2 or not self._thread.is_alive())

    def end(self) -> None:
        self._thread.join(240)


def test_whoever_puts_while_it_is_being_removed_still_has_it_afterwards(bucket: S3Settings, tmp_path: Path) -> None:
    """The remover has seen the object old; before its request to remove it arrives, somebody puts it anew."""
    kept = Kept(S3Objects(bucket), tmp_path, None)
    kept.put(b"content")
    remover = LateRemover(bucket)
    putting = Putting(bucket, kept)
    putting.get_on()
    remover.end()
    putting.end()
    assert kept.read(7) == b"content"


def test_a_remover_that_ends_before_its_mark_is_looked_for_is_noticed_all_the_same(
    bucket: S3Settings, tmp_path: Path
) -> None:
    remover: list[LateRemover] = []

    class Overtaken(S3Objects):
        def _upload(self, *args: Any) -> None:
            super()._upload(*args)
            while remover:
                remover.pop().end()

    kept = Kept(Overtaken(bucket), tmp_path, None)
    kept.put(b"content")
    remover.append(LateRemover(bucket))
    kept.put(b"content")
    assert kept.read(7) == b"content"


def test_an_object_that_is_lost_every_time_is_not_said_to_be_kept(bucket: S3Settings, tmp_path: Path) -> None:
    class Losing(S3Objects):
        def _upload(self, key: str, *args: Any) -> None:
            super()._upload(key, *args)
            self.delete(key)

    with pytest.raises(StoreUnavailable, match="lost"):
        Kept(Losing(bucket), tmp_path, None).put(b"content")


def test_a_remover_that_ends_leaves_the_mark_of_another(bucket: S3Settings, tmp_path: Path) -> None:
    kept = Kept(S3Objects(bucket), tmp_path, None)
    kept.put(b"content")
    late = LateRemover(bucket)
    assert kept.store.delete(KEY, older_than=kept.store.now() + 60)
    putting = Putting(bucket, kept)
    putting.get_on()
    late.end()
    putting.end()
    assert kept.read(7) == b"content"
    assert set(kept.store.listing(MARKS)) == set()


def test_a_mark_of_a_remover_that_was_killed_holds_nobody_up_for_good(
    bucket: S3Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.objects.s3_store._MARK_SECONDS", 0.5)
    kept = Kept(S3Objects(bucket), tmp_path, None)
    (tmp_path / "mark").touch()
    mark = f"{MARKS}doomed/{KEY}/{'0' * 32}"
    kept.store.put(mark, tmp_path / "mark", sha256=hashlib.sha256(b"").hexdigest(), size_bytes=0)
    kept.put(b"content")
    assert kept.read(7) == b"content"
    assert set(kept.store.listing(MARKS)) == set()


@pytest.mark.parametrize("long", [True, False])
def test_an_upload_that_took_long_is_as_old_as_its_completion(
    bucket: S3Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, long: bool
) -> None:
    class Aws(S3Objects):
        """Tells of an object of many parts when its upload began: two hours before its end."""

        def _find(self, key: str, *args: Any) -> StoredObject | None:
            found = super()._find(key, *args)
            return replace(found, modified_at=found.modified_at - 7200) if found is not None and key == KEY else found

    monkeypatch.setattr("jobs.objects.s3_store._LONG_SECONDS", 0.0 if long else 60.0)
    kept = Kept(Aws(bucket), tmp_path, None)
    kept.put(b"content")
    assert kept.store.delete(KEY, older_than=kept.store.now() - 3600) is not long


def test_a_file_has_no_more_parts_than_a_store_takes(
    bucket: S3Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.objects.s3_store._MOST_PARTS", 2)
    kept = Kept(S3Objects(bucket), tmp_path, None)
    content = bytes(range(256)) * (20 * 2**12 + 1)
    kept.put(content)
    # the store tells by an object's tag in how many parts it came
    tag = str(obstore.head(behind(bucket), KEY)["e_tag"])
    assert int(tag.strip('"').rpartition("-")[2]) <= 2
    assert kept.fetch(content).read_bytes() == content


def test_a_link_to_an_old_file_is_not_swept_while_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(LocalObjects(tmp_path / "store"), tmp_path, None)
    limit = kept.store.now() - 3600

    def verified(*args: Any, **more: Any) -> None:
        for each in list(kept.store.listing("objects/")):
            if each.modified_at < limit:
                kept.store.delete(each.key, older_than=limit)
        require_digest(*args, **more)

    monkeypatch.setattr("jobs.objects.local_store.require_digest", verified)
    source = tmp_path / "source"
    source.write_bytes(b"content")
    os.utime(source, (limit - 3600, limit - 3600))
    kept.store.put(KEY, source, sha256=hashlib.sha256(b"content").hexdigest(), size_bytes=7)
    assert kept.read(7) == b"content"


def test_a_file_that_is_removed_while_it_is_sent_is_not_sent_to_its_end(
    bucket: S3Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(S3Objects(bucket), tmp_path, None)

    def opened(path: Path, *args: Any, **more: Any) -> BinaryIO:
        file = open_plain(path, *args, **more)
        path.unlink()
        return file

    monkeypatch.setattr("jobs.objects.s3_store.open_plain", opened)
    with pytest.raises(ArtifactDamaged, match="removed"):
        kept.put(bytes(range(256)) * (20 * 2**12))
    assert kept.keys() == set()
    kept.put(b"small enough to be read at once")
    assert kept.keys() == {KEY}


def test_a_file_that_is_removed_while_it_is_brought_is_not_brought_to_its_end(
    bucket: S3Settings, tmp_path: Path
) -> None:
    target = tmp_path / "attempt" / "input"
    target.parent.mkdir()

    class Cleared(io.BytesIO):
        """Has its reader's folder removed as soon as there is something to write there."""

        def read(self, size: int | None = -1, /) -> bytes:
            shutil.rmtree(target.parent, ignore_errors=True)
            return super().read(size)

    class Slow(S3Objects):
        def open(self, key: str, size_bytes: int, first: int = 0) -> BinaryIO:
            return streams[0]

    content = bytes(2**20)
    streams = [Cleared(content)]
    with pytest.raises(ArtifactDamaged, match="removed"):
        Slow(bucket).fetch(KEY, target, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
    assert not target.parent.exists()


def test_a_store_that_does_not_answer_is_tried_again_later(bucket: S3Settings, tmp_path: Path) -> None:
    absent = S3Settings(**{**vars(bucket), "bucket": "no-such-bucket"})
    kept = Kept(S3Objects(absent), tmp_path, None)
    with pytest.raises(StoreUnavailable, match="bucket"):
        kept.put(b"content")
    nobody = S3Settings(**{**vars(bucket), "endpoint": "http://127.0.0.1:1"})
    with pytest.raises(StoreUnavailable):
        next(iter(S3Objects(nobody).listing("")))


# --- signed addresses


EXAMPLE = S3Settings(
    bucket="examplebucket",
    prefix="",
    region="us-east-1",
    endpoint="https://s3.amazonaws.com",
    public_endpoint="https://s3.amazonaws.com",
    access_key_id="AKIAIOSFODNN7EXAMPLE",
    secret_access_key="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
)


@pytest.mark.parametrize("token", [None, "a session/token=="])
@pytest.mark.parametrize("prefix", ["", "pre/fix/"])
def test_an_address_is_signed_as_obstore_signs_it(prefix: str, token: str | None) -> None:
    settings = S3Settings(**{**vars(EXAMPLE), "prefix": prefix, "session_token": token})
    config = {
        "endpoint": settings.endpoint,
        "region": settings.region,
        "access_key_id": settings.access_key_id,
        "secret_access_key": settings.secret_access_key,
        **({} if token is None else {"session_token": token}),
    }
    theirs = obstore.sign(
        S3Store(settings.bucket, prefix=prefix or None, config=config),  # type: ignore[arg-type]
        "GET",
        "objects/a b/ü~x",
        timedelta(seconds=300),
    )
    query = parse_qs(urlsplit(theirs).query)
    at = datetime.strptime(query["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    ours = signed_url(settings, "objects/a b/ü~x", 300, answers={}, at=at)
    assert ours is not None
    assert parse_qs(urlsplit(ours).query) == query
    assert urlsplit(ours)[:3] == urlsplit(theirs)[:3]


def test_what_the_store_answers_is_part_of_what_is_signed(bucket: S3Settings, tmp_path: Path) -> None:
    kept = Kept(S3Objects(bucket), tmp_path, None)
    kept.put(b"content")
    name = "attachment; filename*=UTF-8''sp%C3%A9.json"
    url = kept.store.signed_url(KEY, 60, {"content-disposition": name, "content-type": "application/json"})
    assert url is not None
    with urllib.request.urlopen(url, timeout=300) as answer:
        assert answer.read() == b"content"
        assert answer.headers["content-disposition"] == name
        assert answer.headers["content-type"] == "application/json"
    other = signed_url(bucket, KEY, 60, answers={"content-disposition": "inline"})
    assert other is not None
    assert parse_qs(urlsplit(other).query)["X-Amz-Signature"] != parse_qs(urlsplit(url).query)["X-Amz-Signature"]


def test_without_a_key_of_its_own_nothing_is_signed() -> None:
    bare = S3Settings(**{**vars(EXAMPLE), "access_key_id": None, "secret_access_key": None})
    assert signed_url(bare, KEY, 60, answers={}) is None
    assert LocalObjects(Path("/nowhere")).signed_url(KEY, 60, {}) is None


# --- settings


def read(**environ: str) -> LedgerSettings:
    return LedgerSettings.from_environment({"DATABASE_URL": "sqlite:////l.db", **environ})


def test_a_bucket_is_named_where_the_folder_was(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hidden\n")
    found = read(
        KRONOSCOPE_ARTIFACTS="s3://measured/kronoscope",
        KRONOSCOPE_S3_ENDPOINT="http://minio:9000/",
        KRONOSCOPE_STAGING="/var/staging",
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY_FILE=str(tmp_path / "secret"),
        AWS_REGION="eu-central-1",
    )
    assert found.artifact_root == Path("/var/staging")
    assert found.bucket == S3Settings(
        bucket="measured",
        prefix="kronoscope/",
        region="eu-central-1",
        endpoint="http://minio:9000",
        public_endpoint="http://minio:9000",
        access_key_id="key",
        secret_access_key="hidden",
    )
    assert "hidden" not in repr(found)
    plain = read(KRONOSCOPE_ARTIFACTS="s3://measured", AWS_DEFAULT_REGION="eu-north-1").bucket
    assert plain is not None
    assert (plain.prefix, plain.endpoint) == ("", "https://s3.eu-north-1.amazonaws.com")
    assert read(KRONOSCOPE_ARTIFACTS="/data/artifacts").bucket is None


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"KRONOSCOPE_ARTIFACTS": "s3://"}, "s3://bucket/prefix"),
        ({"KRONOSCOPE_ARTIFACTS": "s3://b/../x"}, "s3://bucket/prefix"),
        ({"KRONOSCOPE_ARTIFACTS": "gs://bucket"}, "s3://bucket/prefix"),
        ({"KRONOSCOPE_ARTIFACTS": "s3://bucket", "KRONOSCOPE_S3_ENDPOINT": "minio:9000"}, "https://minio"),
        ({"KRONOSCOPE_ARTIFACTS": "s3://bucket", "AWS_ACCESS_KEY_ID": "key"}, "one is missing"),
    ],
)
def test_settings_that_name_no_store_are_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsInvalid, match=said):
        read(**environ)
