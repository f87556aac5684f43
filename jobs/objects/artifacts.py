"""Artifacts of jobs: written in a folder of the attempt, kept as objects under their digests.

::

    root/<job id>/<fence>/<name>             staged: what an attempt's child writes; gone with the attempt
    root/<job id>/<fence>.cached/<name>      read-only names of cached files that it was given; likewise
    objects/<tenant>/<aa>/<sha256>           kept: equal bytes once for each tenant

Every attempt has a folder of its own, so a zombie can never write into what a later attempt
published. Rows name an object by its key, which is below the same root where the store is local,
and in a bucket where it is not. Rows of earlier versions name ``<job id>/<fence>/<name>``; those
files stay where they are until their job is deleted.
"""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from catalog.open_beneath import LED_ASTRAY, open_beneath
from jobs.errors import ArtifactDamaged
from jobs.objects import job_folders
from jobs.objects.local_store import LocalObjects, require_digest
from jobs.objects.object_store import ObjectStore, StoredObject
from jobs.objects.s3_store import S3Objects
from jobs.records import Artifact
from jobs.schema.identifiers import is_id
from jobs.settings import LedgerSettings

OBJECTS = "objects/"
_VIEW = ".cached"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,127}){0,5}")
_TENANT = re.compile(r"[A-Za-z0-9_-]{1,36}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ArtifactFolder:
    """The root of what attempts write, and the store that keeps it, with whose errors its calls end."""

    def __init__(self, root: Path, store: ObjectStore | None = None) -> None:
        """Set up the artifacts.

        Args:
            root: The folder in which attempts stage their files.
            store: The store that keeps them; None keeps them in the same folder.
        """
        self.root = root.absolute()
        self.store: ObjectStore = LocalObjects(self.root) if store is None else store

    def attempt_dir(self, job_id: str, fence: int, group: int | None = None) -> Path:
        """Return the folder that one attempt's child writes into, and create it if it is missing.

        The job's group is to write there; None: the job runs as this process's user. ``ArtifactDamaged`` if the id is
        malformed.
        """
        folder = self.root / self._job_part(job_id) / str(int(fence))
        while True:
            # the process that clears the attempt before may remove the job's empty folder in between
            with contextlib.suppress(FileNotFoundError):
                folder.mkdir(parents=True, exist_ok=True)
                if group is not None:
                    job_folders.give(folder.parent, group, written=False)
                    job_folders.give(folder, group, written=True)
                return folder

    def publish(self, tenant_id: str, job_id: str, fence: int, name: str, *, sha256: str, size_bytes: int) -> str:
        """Verify a staged file by what the attempt has declared, store it, and return the key to list it under.

        Its name is below the attempt's folder. ``ArtifactDamaged`` if it is missing, not a plain file, or other than
        declared.
        """
        if not _NAME.fullmatch(name):
            raise ArtifactDamaged(f"an artifact's name {name[:80]!r} is not made of plain path segments")
        key = object_key(tenant_id, sha256)
        with self.staged(job_id, fence, name) as staged:
            self.store.put(key, staged, sha256=sha256, size_bytes=size_bytes)
        return key

    def view(self, job_id: str, fence: int) -> Path:
        """Return the folder of the cached files that one attempt is given, which may not exist yet."""
        return view_of(self.root / self._job_part(job_id) / str(int(fence)))

    def new_view(self, job_id: str, fence: int, group: int | None) -> Path:
        """Return the same folder, empty; one that is there stays the one that the job's namespaces show.

        The job's group is to enter it and not to write; None: the job runs as this process's user. ``OSError`` if it
        cannot be made.
        """
        folder = self.view(job_id, fence)
        folder.mkdir(exist_ok=True)
        for each in folder.iterdir():
            if each.is_dir() and not each.is_symlink():
                job_folders.clear(each)
            else:
                each.unlink(missing_ok=True)
        if group is not None:
            # before there is anything in it, whose group would change as well
            job_folders.give(folder, group, written=False)
        return folder

    def staged(self, job_id: str, fence: int, name: str) -> BinaryIO:
        """Open what an attempt has written; a link that it put on the way could lead out of its folder.

        ``ArtifactDamaged`` if it is missing, not a plain file, or reached through a link.
        """
        relative = Path(self._job_part(job_id), str(int(fence)), name)
        try:
            with job_folders.within(self.root / relative.parts[0] / relative.parts[1]):
                descriptor = open_beneath(self.root, relative)
        except OSError as error:
            why = "is reached through a link; only plain files are artifacts"
            if error.errno not in LED_ASTRAY:
                why = f"cannot be opened ({error.strerror}); was the folder moved?"
            raise ArtifactDamaged(f"artifact {name} {why}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ArtifactDamaged(f"artifact {name} is not a plain file")
        # by its own name, for messages
        return open(name, "rb", opener=lambda *_: descriptor)

    def open(self, artifact: Artifact, first: int = 0) -> BinaryIO:
        """Open a listed file for reading from a byte on; its size is checked, its digest only by `verify`.

        ``ArtifactDamaged`` if it is missing, not a plain file, or of another size than listed.
        """
        return self.store.open(artifact.uri, artifact.size_bytes, first)

    def verify(self, artifact: Artifact) -> None:
        """Read a whole file and compare its digest; ``ArtifactDamaged`` if it is other than listed."""
        with self.open(artifact) as file:
            require_digest(file, artifact.sha256, called=artifact.uri)

    def fetch(self, artifact: Artifact, target: Path) -> None:
        """Copy or link a verified file to a path, as `ObjectStore.fetch`."""
        self.store.fetch(artifact.uri, target, sha256=artifact.sha256, size_bytes=artifact.size_bytes)

    def objects(self) -> Iterator[StoredObject]:
        """Everything that is kept, of all tenants."""
        return self.store.listing(OBJECTS)

    def clear_attempt(self, job_id: str, fence: int) -> None:
        """Delete the files that an attempt staged, and the job's folder if it is empty then.

        Missing files are not an error.
        """
        folder = self.root / self._job_part(job_id)
        job_folders.clear(self.view(job_id, fence))
        job_folders.clear(folder / str(int(fence)))
        with contextlib.suppress(OSError):
            folder.rmdir()

    def remove(self, job_id: str) -> None:
        """Delete the staged files of a deleted job, and files that rows of earlier versions named."""
        part = self._job_part(job_id)
        for each in self.store.listing(f"{part}/"):
            self.store.delete(each.key)
        job_folders.clear(self.root / part)  # a worker may be clearing it at the same time

    def _job_part(self, job_id: str) -> str:
        if not is_id(job_id):
            raise ArtifactDamaged("a folder was asked for under something that is not a job id")
        return job_id


def view_of(attempt: Path) -> Path:
    """Return the folder of the cached files that an attempt is given, beside the one that it writes to.

    It is the service's, and may not exist yet.
    """
    return attempt.with_name(f"{attempt.name}{_VIEW}")


def open_artifacts(
    settings: LedgerSettings, around: Callable[[ObjectStore], ObjectStore] = lambda store: store
) -> ArtifactFolder:
    """Open the artifacts under the operator's settings, as yet without a connection.

    ``around`` wraps the store, for instance to retry its calls.
    """
    root = settings.artifact_root
    return ArtifactFolder(root, around(LocalObjects(root) if settings.bucket is None else S3Objects(settings.bucket)))


def object_key(tenant_id: str, sha256: str) -> str:
    """Return the key of an object, ``objects/<tenant>/<aa>/<sha256>``, with the digest's first two digits.

    ``ArtifactDamaged`` if the tenant or the digest, of 64 hexadecimal digits, is malformed.
    """
    if not _TENANT.fullmatch(tenant_id) or not _SHA256.fullmatch(sha256):
        raise ArtifactDamaged("a file was declared with something that is not a SHA-256")
    return f"{OBJECTS}{tenant_id}/{sha256[:2]}/{sha256}"
