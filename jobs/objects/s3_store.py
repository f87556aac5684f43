"""The S3 object store: a bucket of any S3-compatible service.

An upload takes its digest while it is read, and its last part is sent only once that is the one
declared: what has another never appears in the store. The store checks a SHA-256 of every part
in turn.

S3 has no way to remove an object only if it was not put anew. So a process that removes an old one
leaves a mark of its own first, looks at the object's age *then*, and takes the mark away last;
one that puts an object looks for marks *afterwards*, waits until those are gone, looks *last* whether
the object is there, and puts it again where it is not. A process that saw the old one either had its mark
there when the marks were looked for, or was done by then: either way the last look comes after it.

A presigned URL gives its holder read access to one object for a time, without credentials. The query carries the
signature (AWS Signature Version 4): with the day's key
``k = HMAC(HMAC(HMAC(HMAC("AWS4" + secret, date), region), "s3"), "aws4_request")`` it is
``HMAC(k, "AWS4-HMAC-SHA256" ‖ time ‖ scope ‖ SHA-256(request))``, where the request is method,
path, sorted query, host and ``UNSIGNED-PAYLOAD``. obstore signs too, but nothing beyond the key:
under which name and type the store sends an object that several jobs list under different names
has to be part of what is signed.

References:
    Amazon S3 API reference, Authenticating requests: using query parameters (AWS Signature Version 4)
"""

import contextlib
import hashlib
import hmac
import io
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import quote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from jobs.errors import ArtifactDamaged, StoreUnavailable
from jobs.objects.local_store import open_plain, require_digest
from jobs.objects.object_store import MARKS, Source, StoredObject, written_beside
from jobs.s3_settings import S3Settings

_ALGORITHM = "AWS4-HMAC-SHA256"


def signed_url(
    settings: S3Settings, key: str, seconds: int, *, answers: dict[str, str], at: datetime | None = None
) -> str | None:
    """Return an address that answers GET for one object without credentials."""
    if settings.access_key_id is None or settings.secret_access_key is None:
        return None
    moment = (at or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{moment[:8]}/{settings.region}/s3/aws4_request"
    place = urlsplit(settings.public_endpoint)
    path = quote(f"{place.path}/{settings.bucket}/{settings.prefix}{key}", safe="/-_.~")
    query = {
        "X-Amz-Algorithm": _ALGORITHM,
        "X-Amz-Credential": f"{settings.access_key_id}/{scope}",
        "X-Amz-Date": moment,
        "X-Amz-Expires": str(seconds),
        "X-Amz-SignedHeaders": "host",
    }
    if settings.session_token is not None:
        query["X-Amz-Security-Token"] = settings.session_token
    query |= {f"response-{name}": value for name, value in answers.items()}
    canonical = "&".join(
        sorted(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in query.items())
    )
    request = "\n".join(["GET", path, canonical, f"host:{place.netloc}", "", "host", "UNSIGNED-PAYLOAD"])
    to_sign = "\n".join([_ALGORITHM, moment, scope, hashlib.sha256(request.encode()).hexdigest()])
    day = f"AWS4{settings.secret_access_key}".encode()
    for part in (moment[:8], settings.region, "s3", "aws4_request"):
        day = hmac.digest(day, part.encode(), "sha256")
    signature = hmac.digest(day, to_sign.encode(), "sha256").hex()
    return f"{place.scheme}://{place.netloc}{path}?{canonical}&X-Amz-Signature={signature}"


_PART_BYTES = 8 * 2**20
_MOST_PARTS = 10_000
_AT_ONCE_BYTES = 12 * _PART_BYTES
_CHUNK_BYTES = 256 * 1024
_DOOMED = f"{MARKS}doomed/"
_COMPLETED = f"{MARKS}completed/"
_CLOCK = "clock"
_MARK_SECONDS = 30.0
"""The age at which a mark is of a process that is gone: mark, two checks and a deletion take four hasty requests."""
_HASTY = {"seconds": 5.0, "retry_seconds": 2.0}
"""Four such requests have ended, one way or the other, before the mark has aged."""
_LONG_SECONDS = 60.0
"""The duration from which an upload's completion is marked: some stores report its beginning as the object's age."""
_ROUNDS = 5


class S3Objects:
    """The objects below one prefix of a bucket."""

    def __init__(self, settings: S3Settings) -> None:
        """Set up the store; it connects with the first call."""
        self._settings = settings
        keys: dict[str, Any] = {
            "access_key_id": settings.access_key_id,
            "secret_access_key": settings.secret_access_key,
            "session_token": settings.session_token,
        }
        self._config = {
            "endpoint": settings.endpoint,
            "region": settings.region,
            "checksum_algorithm": "SHA256",
            # without keys of their own, obstore finds the machine's role
            **{name: value for name, value in keys.items() if value is not None},
        }
        self._store = self._connect(seconds=300.0, retry_seconds=20.0)
        self._hasty = self._connect(**_HASTY)

    def put(self, key: str, source: Source, *, sha256: str, size_bytes: int) -> None:
        """Upload the file, and check that it outlived any removal of its predecessor (`ObjectStore.put`)."""
        for _ in range(_ROUNDS):
            self._upload(key, source, sha256, size_bytes)
            self._await_removers(key)
            found = self._find(key)
            if found is None:
                continue
            if found.size_bytes != size_bytes:
                raise ArtifactDamaged(
                    f"the store keeps {found.size_bytes:,} bytes of {Path(source.name).name}, {size_bytes:,} were sent"
                )
            return
        raise StoreUnavailable(f"the store of artifacts has lost an object {_ROUNDS} times after taking it")

    def has(self, key: str, size_bytes: int) -> bool:
        """Ask for the object's head alone (`ObjectStore.has`)."""
        found = self._find(key)
        return found is not None and found.size_bytes == size_bytes

    def open(self, key: str, size_bytes: int, first: int = 0) -> BinaryIO:
        """Open a stream of the object, begun before this returns (`ObjectStore.open`)."""
        if first >= size_bytes > 0:
            raise ValueError(f"an object of {size_bytes:,} bytes was opened at {first:,}")
        with _translated(f"artifact {key}"):
            options: Any = {"range": {"offset": first}} if first else {}
            answer = obstore.get(self._store, key, options=options)
            found = answer.meta["size"]
            if found != size_bytes:
                raise ArtifactDamaged(
                    f"artifact {key} has {found:,} bytes, {size_bytes:,} were declared; it is cut off or replaced"
                )
            return io.BufferedReader(_Stream(iter(answer.stream(min_chunk_size=_CHUNK_BYTES)), key), _CHUNK_BYTES)

    def fetch(self, key: str, target: Path, *, sha256: str, size_bytes: int) -> None:
        """Download the object and verify its digest (`ObjectStore.fetch`)."""
        digest = hashlib.sha256()
        with written_beside(target) as part:
            with self.open(key, size_bytes) as stream, part.open("wb") as file:
                while chunk := stream.read(_CHUNK_BYTES):
                    _require_name(file, key)
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != sha256:
                raise ArtifactDamaged(f"artifact {key} has another SHA-256 than declared: its bytes have changed")
            part.replace(target)

    def listing(self, prefix: str) -> Iterator[StoredObject]:
        """List all objects, page by page (`ObjectStore.listing`)."""
        with _translated(prefix):
            for page in obstore.list(self._store, prefix.rstrip("/") or None):
                for each in page:
                    yield _stored(each)

    def delete(self, key: str, *, older_than: float | None = None) -> bool:
        """Delete the object, under a mark if its age counts (`ObjectStore.delete`)."""
        if older_than is None:
            return self._remove(self._store, key)
        mark = f"{_DOOMED}{key}/{uuid.uuid4().hex}"
        with _translated(key):
            obstore.put(self._hasty, mark, b"")
        removed = self._age(key) < older_than and self._remove(self._hasty, key)
        # a request that got no answer may still arrive: its mark stays then, and ages
        self._remove(self._store, mark)
        return removed

    def now(self) -> float:
        """The store's clock: when it says that something was put just now."""
        with _translated(_CLOCK):
            obstore.put(self._store, _CLOCK, b"")
            return obstore.head(self._store, _CLOCK)["last_modified"].timestamp()

    def signed_url(self, key: str, seconds: int, answers: dict[str, str]) -> str | None:
        """Return an address that answers GET for this object alone (`ObjectStore.signed_url`)."""
        return signed_url(self._settings, key, seconds, answers=answers)

    def _connect(self, *, seconds: float, retry_seconds: float) -> S3Store:
        return S3Store(
            self._settings.bucket,
            prefix=self._settings.prefix.rstrip("/") or None,
            config=cast("Any", self._config),
            client_options={
                "allow_http": self._settings.endpoint.startswith("http:"),
                "connect_timeout": timedelta(seconds=5),
                "timeout": timedelta(seconds=seconds),
            },
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=retry_seconds)},
        )

    def _upload(self, key: str, source: Source, sha256: str, size_bytes: int) -> None:
        began, called = time.monotonic(), Path(source.name).name
        with open_plain(source, size_bytes, called=called) as file, _translated(key):
            if size_bytes <= _PART_BYTES:
                # what is sent is what was verified, whatever is written into the file meanwhile
                content = file.read(_PART_BYTES + 1)
                require_digest(io.BytesIO(content), sha256, called=called)
                obstore.put(self._store, key, content, use_multipart=False)
            else:
                size = _part_bytes(size_bytes)
                obstore.put(
                    self._store,
                    key,
                    _verified_parts(file, size, sha256, called=called),
                    use_multipart=True,
                    chunk_size=size,
                    max_concurrency=max(1, _AT_ONCE_BYTES // size),
                )
            if time.monotonic() - began >= _LONG_SECONDS:
                obstore.put(self._store, f"{_COMPLETED}{key}", b"")

    def _await_removers(self, key: str) -> None:
        """Wait for deletions that may have seen the object's predecessor; marks of killed processes are deleted."""
        deadline = time.monotonic() + _MARK_SECONDS
        before = self._removers(key)
        while before and (left := before & self._removers(key)):
            if time.monotonic() > deadline:
                for mark in left:
                    self._remove(self._store, mark)
                return
            time.sleep(0.1)

    def _removers(self, key: str) -> set[str]:
        return {each.key for each in self.listing(f"{_DOOMED}{key}/")}

    def _age(self, key: str) -> float:
        """Return when the object was put last, for a deletion; infinity where there is none."""
        found = self._find(key, self._hasty)
        if found is None:
            return math.inf
        completed = self._find(f"{_COMPLETED}{key}", self._hasty)
        return max(each.modified_at for each in (found, completed) if each is not None)

    def _find(self, key: str, store: S3Store | None = None) -> StoredObject | None:
        try:
            with _translated(key):
                return _stored(obstore.head(store or self._store, key))
        except ArtifactDamaged:
            return None

    def _remove(self, store: S3Store, key: str) -> bool:
        """S3 itself does not tell whether there was anything."""
        try:
            with _translated(key):
                obstore.delete(store, key)
        except ArtifactDamaged:
            return False
        return True


class _Stream(io.RawIOBase):
    """The rest of an object, chunk by chunk."""

    def __init__(self, chunks: Iterator[bytes], key: str) -> None:
        self._chunks = chunks
        self._key = key
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - as declared above it
        if not self._left:
            with _translated(f"artifact {self._key}"):
                self._left = bytes(next(self._chunks, b""))
        taken = self._left[: len(buffer)]
        buffer[: len(taken)] = taken
        self._left = self._left[len(taken) :]
        return len(taken)


def _stored(found: Mapping[str, Any]) -> StoredObject:
    return StoredObject(key=found["path"], size_bytes=found["size"], modified_at=found["last_modified"].timestamp())


def _part_bytes(size_bytes: int) -> int:
    """Return the least size of parts with which 10,000 of them hold the file."""
    return max(_PART_BYTES, -(-size_bytes // (_MOST_PARTS - 1)))


def _verified_parts(file: BinaryIO, part_bytes: int, sha256: str, *, called: str) -> Iterator[bytes]:
    """A file's bytes; the last part follows only if the digest over all of them is right, else the upload ends."""
    digest = hashlib.sha256()
    held = b""
    while part := file.read(part_bytes):
        _require_name(file, called)
        digest.update(part)
        if held:
            yield held
        held = part
    if digest.hexdigest() != sha256:
        raise ArtifactDamaged(f"artifact {called} has another SHA-256 than declared: its bytes have changed")
    yield held


def _require_name(file: BinaryIO, called: str) -> None:
    """An attempt that asked for gigabytes, and is gone since, has cleared its folder: not all need be sent."""
    if os.fstat(file.fileno()).st_nlink == 0:
        raise ArtifactDamaged(f"artifact {called} was removed on its way; the attempt that it is of has ended")


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """The store's own words name hosts and requests: they stay in the cause, for the operator's log."""
    try:
        yield
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise StoreUnavailable("the bucket of KRONOSCOPE_ARTIFACTS does not exist; make it") from error
        raise ArtifactDamaged(f"{what} cannot be opened: the store has no such object") from error
    except BaseError as error:
        raise StoreUnavailable(
            f"the store of artifacts does not answer as it should ({type(error).__name__})"
        ) from error
