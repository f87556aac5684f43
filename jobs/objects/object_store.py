"""Objects: immutable bytes under a key, whether a folder or an S3 bucket keeps them.

Keys are paths of plain segments. An object appears whole or not at all, and only after its bytes
were found to be those declared. Ages are measured by the store's clock: no process's own clock
decides what is old enough to be removed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from catalog.record import record

PART = ".part-"
"""The beginning of the names of files that are being written."""


MARKS = "marks/"
"""The prefix of a store's own notes beside the objects; an old one was left by a killed process."""


Source = Path | BinaryIO
"""A file that is to be stored: by its path, or open."""


@record
class StoredObject:
    """One entry of a store's listing."""

    key: str
    size_bytes: int
    modified_at: float
    """When it was last put, in seconds of the store's clock (`ObjectStore.now`)."""


class ObjectStore(Protocol):
    """A store of objects."""

    def put(self, key: str, source: Source, *, sha256: str, size_bytes: int) -> None:
        """Store a copy of a file in place of any earlier object; its age begins anew.

        Args:
            key: The object's key.
            source: The file; whatever becomes of it meanwhile, the bytes that are stored are those declared.
            sha256: The declared digest.
            size_bytes: The declared size.

        Raises:
            ArtifactDamaged: If the file is missing, not a plain file, or other than declared; nothing is stored then.
            StoreUnavailable: If the store does not answer.
            OSError: If a disk is full or fails; nothing is stored then.
        """

    def open(self, key: str, size_bytes: int, first: int = 0) -> BinaryIO:
        """Open an object for reading.

        Args:
            key: The object's key.
            size_bytes: The listed size.
            first: The offset of the first byte to read.

        Returns:
            The bytes from there on.

        Raises:
            ArtifactDamaged: If it is missing or of another size.
            StoreUnavailable: If the store does not answer.
        """

    def fetch(self, key: str, target: Path, *, sha256: str, size_bytes: int) -> None:
        """Copy or link a verified object to a path, where it appears complete or not at all.

        Args:
            key: The object's key.
            sha256: The listed digest.
            size_bytes: The listed size.

        Raises:
            ArtifactDamaged: If it is other than listed.
            StoreUnavailable: If the store does not answer.
            OSError: If a disk is full or fails.
        """

    def listing(self, prefix: str) -> Iterator[StoredObject]:
        """List all objects below a prefix.

        Args:
            prefix: The beginning of their keys, which ends with a slash or is empty.

        Yields:
            One entry per object.

        Raises:
            StoreUnavailable: If the store does not answer.
        """

    def delete(self, key: str, *, older_than: float | None = None) -> bool:
        """Delete one object.

        Args:
            key: The object's key.
            older_than: Delete it only if it was put before this time, in seconds of the store's clock; None: in any
                case.

        Returns:
            Whether an object was deleted.

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
        """Return an address that answers GET for one object without credentials.

        Args:
            key: The object's key.
            seconds: The address is valid for so long.
            answers: Headers of the answer, such as ``content-disposition``.

        Returns:
            The address, or None if the store cannot sign.
        """
