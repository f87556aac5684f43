"""Artifact files of a job: downloads that are checked against their digests, and the memory curve."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from catalog.responses.views import ArtifactView
from kronoscope.client.connection import Connection
from kronoscope.client.errors import ClientError, DownloadFailed

MEMORY_CURVE = "memory_curve.json"


def read_memory_curve(connection: Connection, path: str, artifacts: Sequence[ArtifactView]) -> Mapping[str, Any] | None:
    """Download a job's memory curve from the address of its files; None where there is none, or it cannot be had."""
    if not any(artifact.name == MEMORY_CURVE for artifact in artifacts):
        return None
    try:
        curve: Mapping[str, Any] = json.loads(b"".join(connection.download(f"{path}/{MEMORY_CURVE}")))
    except (ClientError, ValueError):
        # the results are complete without it; `download` raises the error
        return None
    return curve


def save_artifact(connection: Connection, path: str, artifact: ArtifactView, folder: Path) -> Path:
    """Download a file into a folder, and return its path; it has its name only once its digest has been checked.

    ``DownloadFailed`` if the bytes are not those that the job recorded, or the connection broke.
    """
    root = folder.resolve()
    target = (root / artifact.name).resolve()
    if not target.is_relative_to(root):
        raise ClientError(0, "Unsafe name", f"the service names a file {artifact.name!r} outside the folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".part-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in connection.download(path, artifact.size_bytes):
                digest.update(part)
                file.write(part)
        if digest.hexdigest() != artifact.sha256:
            raise DownloadFailed(0, "Damaged file", f"{artifact.name} arrived damaged; download it again")
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target
