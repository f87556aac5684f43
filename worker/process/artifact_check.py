"""The artifact check: whether an announced file is in the child's folder, with the announced size and digest."""

import hashlib
import os
import re
import stat
from pathlib import Path

from catalog.frames import ArtifactWritten

_CHUNK_BYTES = 2**20
_PART = re.compile(r"[\w\-][\w.\-]{0,127}", re.ASCII)


class ArtifactMismatch(ValueError):
    """The announced artifact is not what stands on the disk; it must not be listed."""


def require_artifact(root: Path, frame: ArtifactWritten) -> Path:
    """Check a file that a child announced.

    Args:
        root: The folder of the attempt's artifacts.
        frame: The announcement: name, SHA-256, size.

    Returns:
        The path of the verified file.

    Raises:
        ArtifactMismatch: If the name leaves the folder, a link is in the way, or size or digest differ.
    """
    parts = frame.name.split("/")
    if not 1 <= len(parts) <= 4 or not all(_PART.fullmatch(part) for part in parts):
        raise ArtifactMismatch(f"{frame.name[:200]!r} is not a name for an artifact")
    path = root.joinpath(*parts)
    if path.parent.resolve() != root.resolve().joinpath(*parts[:-1]):
        raise ArtifactMismatch(f"artifact {frame.name} is reached through a link")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ArtifactMismatch(f"artifact {frame.name} was announced and cannot be read: {error.strerror}") from error
    digest = hashlib.sha256()
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != frame.size_bytes:
            raise ArtifactMismatch(
                f"artifact {frame.name} has {status.st_size:,} bytes where {frame.size_bytes:,} were announced"
            )
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != frame.sha256:
        raise ArtifactMismatch(f"artifact {frame.name} has sha256 {digest.hexdigest()}, announced was {frame.sha256}")
    return path
