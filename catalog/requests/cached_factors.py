"""Cached factors: an entry of a tenant's cache, and the collections that have none by what their document says.

The process that computes a job knows the key of its collection, and asks its parent for the entry. The parent holds
every file of it against the digests that were taken when it was published; where they stand, the job cannot write.
"""

from collections.abc import Mapping
from typing import Any

from catalog.record import record

FILLED = ".filled"
"""Folder below an attempt's artifacts in which it leaves the files of an entry to be."""


@record
class CachedFile:
    """One file of an entry."""

    name: str
    """Path below the entry, with forward slashes."""
    sha256: str
    size_bytes: int


@record
class CachedEntry:
    """A complete entry."""

    id: str
    """Name of its folder, which no other entry ever has."""
    key: str
    """The key of the collection, a SHA-256 in hexadecimal: the claim of the job that left it."""
    job: str
    """The job that left it, as the log of a later job names it."""
    files: tuple[CachedFile, ...]


def reason_uncached(document: Mapping[str, Any]) -> str | None:
    """Return why no job of a document has cached factors; None where it depends on the model that is loaded."""
    if (document.get("model") or {}).get("source") == "factory":
        return "the model is from a factory, whose code cannot be told from another's"
    if (document.get("collection") or {}).get("nested"):
        return "`collection.nested` keeps statistics beside the factors"
    if document.get("cache") == "off":
        return "`cache` is `off`"
    if document.get("reproduces"):
        return "it computes again what another job has computed"
    if document.get("factors") or document.get("extends"):
        return "it reads the factors of another job"
    return None
