"""The store of artifacts as one attempt sees it: calls wait for the store while the attempt goes on, and hardly longer.

A store that is silent, or takes gigabytes, holds its caller for minutes, and an attempt that is asked
to stop has seconds. So a thread of its own makes each call. One that outlasts the attempt is
left alone, and its answer is dropped: it writes nothing into the ledger, and what it puts after
all is an object that no row names.
"""

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from jobs.errors import LeaseLost, StoreUnavailable
from jobs.objects.object_store import ObjectStore, Source, StoredObject
from jobs.records import Claim
from worker.supervision.lease_monitor import LeaseWatch

T = TypeVar("T")

UPLOAD_SECONDS = 6.0
"""After a stop: time for what the child announced before it, or on its way to its checkpoint; less than its grace."""

_LOOK_SECONDS = 0.1


class Interrupted(Exception):
    """The attempt is to end, and the store of artifacts has not answered: it is not waited for."""


class RetryingObjectStore:
    """A store with calls that raise `Interrupted` if the attempt was asked to stop, and `LeaseLost` if it is over.

    The files of a stopped attempt may be put for `UPLOAD_SECONDS`; reads end at once.
    """

    def __init__(self, store: ObjectStore, claim: Claim, watch: LeaseWatch) -> None:
        self._store = store
        self._claim = claim
        self._watch = watch

    def put(self, key: str, source: Source, *, sha256: str, size_bytes: int) -> None:
        """Store the file; an upload that is not waited for goes on, and may fail unseen."""
        self._await(lambda: self._store.put(key, source, sha256=sha256, size_bytes=size_bytes), UPLOAD_SECONDS)

    def has(self, key: str, size_bytes: int) -> bool:
        """Return whether the object is there."""
        return self._await(lambda: self._store.has(key, size_bytes), 0)

    def open(self, key: str, size_bytes: int, first: int = 0) -> BinaryIO:
        """Open a stream; each of its reads is a call that can be interrupted."""
        stream = self._await(lambda: self._store.open(key, size_bytes, first), 0)
        return io.BufferedReader(_Stream(stream, self._await))

    def fetch(self, key: str, target: Path, *, sha256: str, size_bytes: int) -> None:
        """Copy or link the object to a path."""
        self._await(lambda: self._store.fetch(key, target, sha256=sha256, size_bytes=size_bytes), 0)

    def listing(self, prefix: str) -> Iterator[StoredObject]:
        """List all objects below a prefix in one call, since an attempt lists its own job's alone."""
        return iter(self._await(lambda: list(self._store.listing(prefix)), UPLOAD_SECONDS))

    def delete(self, key: str, *, older_than: float | None = None) -> bool:
        """Delete one object."""
        return self._await(lambda: self._store.delete(key, older_than=older_than), UPLOAD_SECONDS)

    def now(self) -> float:
        """The store's clock."""
        return self._await(self._store.now, UPLOAD_SECONDS)

    def signed_url(self, key: str, seconds: int, answers: dict[str, str]) -> str | None:
        """Return a signed address, for which the store itself is not asked."""
        return self._store.signed_url(key, seconds, answers)

    def _await(self, call: Callable[[], T], seconds: float) -> T:
        """The call's answer, unless the attempt was stopped so many seconds ago and there is none."""
        self._require_attempt(seconds)
        answer: Future[T] = Future()
        try:
            threading.Thread(target=_answer, args=(answer, call), name="store", daemon=True).start()
        except RuntimeError as error:
            raise StoreUnavailable("no thread is to be had to ask the store of artifacts") from error
        while not wait((answer,), _LOOK_SECONDS).done:
            self._require_attempt(seconds)
        return answer.result()

    def _require_attempt(self, seconds: float) -> None:
        if self._watch.lost.is_set():
            raise LeaseLost(self._claim.job_id, self._claim.fence)
        if self._watch.left(seconds) <= 0:
            raise Interrupted


class _Stream(io.RawIOBase):
    """An object's bytes."""

    def __init__(self, stream: BinaryIO, await_: Callable[[Callable[[], bytes], float], bytes]) -> None:
        self._stream = stream
        self._await = await_

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - as declared above it
        size = len(buffer)
        read = self._await(lambda: self._stream.read(size), 0)
        buffer[: len(read)] = read
        return len(read)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def _answer(answer: "Future[Any]", call: Callable[[], Any]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is raised where the answer is waited for, or nowhere
        answer.set_exception(error)
