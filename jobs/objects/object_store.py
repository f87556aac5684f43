"""Objects: immutable bytes under a key, whether a folder or an S3 bucket keeps them.

Keys are paths of plain segments. An object appears whole or not at all, and only after its bytes
were found to be those declared. Ages are told by the store's clock: no process's own clock
decides what is old enough to be removed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from catalog.record import record

PART = ".part-"
"""How the name of a file begins that is being written."""


MARKS = "marks/"
"""Below which a store keeps notes of its own beside the objects; an old one is of a process that was killed."""


@record
class StoredObject:
    """One entry of a store's listing."""

    key: str
    size_bytes: int
    modified_at: float
    """When it was last put, in seconds of the store's clock (`ObjectStore.now`)."""


class ObjectStore(Protocol):
    """Where objects are kept."""

    def put(self, key: str, source: Path, *, sha256: str, size_bytes: int) -> None:
        """Keep a copy of a file that nobody changes any more, in place of what stood there; its age begins anew.

        Raises:
            ArtifactDamaged: If the file is missing, no plain file, or other than declared; nothing is kept then.
            StoreUnavailable: If the store does not answer.
            OSError: If a disk is full or fails; nothing is kept then.
        """

    def open(self, key: str, size_bytes: int, first: int = 0) -> BinaryIO:
        """The object's bytes from the ``first`` on.

        Raises:
            ArtifactDamaged: If it is missing, no plain file, or of another size.
            StoreUnavailable: If the store does not answer.
        """

    def fetch(self, key: str, target: Path, *, sha256: str, size_bytes: int) -> None:
        """Bring a verified copy, or a link that keeps the bytes, to where ``target`` stands complete or not at all.

        Raises:
            ArtifactDamaged: If the object is not what was declared.
            StoreUnavailable: If the store does not answer.
            OSError: If a disk is full or fails.
        """

    def listing(self, prefix: str) -> Iterator[StoredObject]:
        """All objects whose keys begin with ``prefix``, which ends with a slash or is empty.

        Raises:
            StoreUnavailable: If the store does not answer.
        """

    def delete(self, key: str, *, older_than: float | None = None) -> bool:
        """Remove one object; whether it was there and, by the store's clock, put before ``older_than``.

        Raises:
            StoreUnavailable: If the store does not answer.
        """

    def now(self) -> float:
        """The store's clock.

        Raises:
            StoreUnavailable: If the store does not answer.
            OSError: If its disk fails.
        """

    def signed_url(self, key: str, seconds: int, answers: dict[str, str]) -> str | None:
        """An address that answers GET for this object alone, for so many seconds; None where the store gives none.

        ``answers`` are headers of its answer, such as ``content-disposition``.
        """
