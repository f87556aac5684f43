"""The files of jobs on disk: ``root/<job id>/<fence>/<name>``, listed only after they were verified.

Every attempt has a folder of its own, so a zombie can never write into what a later attempt
published. Rows name files relative to the root, which may move.
"""

import hashlib
import os
import re
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from jobs.errors import ArtifactDamaged
from jobs.identifiers import is_id
from jobs.records import Artifact

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,127}){0,5}")
_CHUNK_BYTES = 2**20


class ArtifactFolder:
    """The root of all artifacts."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def attempt_dir(self, job_id: str, fence: int) -> Path:
        """The folder that one attempt's child writes into, made where it is missing."""
        folder = self.root / self._job_part(job_id) / str(int(fence))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def publish(self, job_id: str, fence: int, name: str, *, sha256: str, size_bytes: int) -> str:
        """Verify what an attempt says it has written; returns the uri to list it under.

        Raises:
            ArtifactDamaged: If the file is missing, no plain file, or other than declared.
        """
        if not _NAME.fullmatch(name):
            raise ArtifactDamaged(f"an artifact's name {name[:80]!r} is not made of plain path segments")
        uri = f"{self._job_part(job_id)}/{int(fence)}/{name}"
        self._verify(uri, sha256, size_bytes)
        return uri

    def open(self, artifact: Artifact) -> BinaryIO:
        """The file's bytes, its size checked; `verify` reads all of it.

        Raises:
            ArtifactDamaged: If it is missing, no plain file, or of another size than listed.
        """
        return self._open(artifact.uri, artifact.size_bytes)

    def verify(self, artifact: Artifact) -> None:
        """Read the whole file and compare its digest.

        Raises:
            ArtifactDamaged: If it is not what was listed.
        """
        self._verify(artifact.uri, artifact.sha256, artifact.size_bytes)

    def remove(self, job_id: str) -> None:
        """Delete all files of a job; files that are gone already are no error."""
        folder = self.root / self._job_part(job_id)
        if folder.exists():
            shutil.rmtree(folder)

    def _job_part(self, job_id: str) -> str:
        if not is_id(job_id):
            raise ArtifactDamaged("a folder was asked for under something that is no job id")
        return job_id

    def _verify(self, uri: str, sha256: str, size_bytes: int) -> None:
        digest = hashlib.sha256()
        with self._open(uri, size_bytes) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != sha256:
            raise ArtifactDamaged(f"artifact {uri} has another SHA-256 than declared: its bytes have changed")

    def _open(self, uri: str, size_bytes: int) -> BinaryIO:
        root = self.root.resolve()
        path = root / uri
        # links and pipes were not written by the artifact port: a link could lead out of the root, a pipe would hang
        if path.resolve() != path or not path.is_relative_to(root):
            raise ArtifactDamaged(f"artifact {uri} is reached through a link; only plain files are artifacts")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise ArtifactDamaged(
                f"artifact {uri} cannot be opened ({error.strerror}); was the folder moved?"
            ) from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
            os.close(descriptor)
            raise ArtifactDamaged(
                f"artifact {uri} has {status.st_size:,} bytes, {size_bytes:,} were declared; it is cut off or replaced"
            )
        return os.fdopen(descriptor, "rb")
