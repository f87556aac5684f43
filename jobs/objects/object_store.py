"""Objects: immutable bytes under a key, whether a folder or an S3 bucket keeps them.

Keys are paths of plain segments. An object appears whole or not at all, and only after its bytes
were found to be those declared. Ages are measured by the store's clock: no process's own clock
decides what is old enough to be removed.
"""

import contextlib
import uuid
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


@contextlib.contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """Give a temporary name for a file beside its target; what still has it at the end is removed."""
    part = target.with_name(f"{PART}{uuid.uuid4().hex}")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


@record
class StoredObject:
    """One entry of a store's listing."""

    key: str
    size_bytes: int
    modified_at: float
    """When it was last put, in seconds of the store's clock (`ObjectStore.now`)."""


class ObjectStore(Protocol):
    """A store of objects by key; a digest and a size are those that were declared when one was put, and are listed.

    Every call but ``signed_url`` raises ``StoreUnavailable`` if the store does not answer, and ``OSError`` if a disk is
    full or fails: nothing is stored then.
    """

    def put(self, key: str, source: Source, *, sha256: str, size_bytes: int) -> None:
        """Store a copy of a file in place of any earlier object; its age begins anew.

        Whatever becomes of the file meanwhile, the bytes that are stored are those declared. ``ArtifactDamaged`` if it
        is missing, not a plain file, or other than declared; nothing is stored then.
        """

    def has(self, key: str, size_bytes: int) -> bool:
        """Return whether an object of this length is there; its digest is not computed."""

    def open(self, key: str, size_bytes: int, first: int = 0) -> BinaryIO:
        """Open an object for reading from a byte on; ``ArtifactDamaged`` if it is missing or of another size."""

    def fetch(self, key: str, target: Path, *, sha256: str, size_bytes: int) -> None:
        """Copy or link a verified object to a path, where it appears complete or not at all.

        ``ArtifactDamaged`` if it is other than listed.
        """

    def listing(self, prefix: str) -> Iterator[StoredObject]:
        """List all objects whose keys begin with a prefix, which ends with a slash or is empty."""

    def delete(self, key: str, *, older_than: float | None = None) -> bool:
        """Delete one object, and return whether there was one to delete.

        Only if it was put before ``older_than``, in seconds of the store's clock; None: in any case.
        """

    def now(self) -> float:
        """The store's clock."""

    def signed_url(self, key: str, seconds: int, answers: dict[str, str]) -> str | None:
        """Return an address that answers GET for one object without credentials, for so many seconds.

        ``answers`` are headers of the answer, such as ``content-disposition``. None if the store cannot sign.
        """
