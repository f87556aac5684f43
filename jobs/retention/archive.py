"""A job's archive: its layer rows, events and list of files as one compressed file of JSON lines.

::

    {"archive": 1, "job": …, "layers": 2, "events": 9}      the first line: what follows
    {"layer": {"kind": …, "ordinal": …, "outcome": …}}      in the order of kind and ordinal
    {"event": {"seq": …, "at": …, "type": …, "data": …}}
    {"artifact": {"name": …, "sha256": …, "size_bytes": …}}  also of files that were not kept

The same job gives the same bytes in every process, so two that do it at once keep one object.
"""

import gzip
import hashlib
import json
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from catalog.record import canonical_json, plain, record
from jobs.errors import ArtifactDamaged
from jobs.objects.artifacts import ArtifactFolder
from jobs.records import Artifact, Event, LayerRow

NAME = "archive.jsonl.gz"
"""The archive's name among the job's artifacts."""

MEDIA_TYPE = "application/gzip"
_VERSION = 1
_CHUNK_BYTES = 2**18
_IN_MEMORY_BYTES = 2**23
"""The largest packed archive that is read in memory; a larger one is read through a temporary file."""
_MAX_LINE_BYTES = 64 * 2**20


@record
class Contents:
    """The first line of an archive, which counts the others."""

    job: str
    layers: int
    events: int


@record
class Written:
    """A file that has been written."""

    sha256: str
    size_bytes: int


def write_archive(
    path: Path, contents: Contents, layers: Iterable[LayerRow], events: Iterable[Event], files: Iterable[Artifact]
) -> Written:
    """Write an archive: gzip of one JSON object per line; equal contents give equal bytes."""
    with path.open("wb") as target:
        # neither a name nor a time in its head: they would differ between two who write the same
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=target, mtime=0) as packed:
            for line in _lines(contents, layers, events, files):
                packed.write(f"{canonical_json(line)}\n".encode())
        target.flush()
        size = target.tell()
    with path.open("rb") as written:
        return Written(sha256=hashlib.file_digest(written, "sha256").hexdigest(), size_bytes=size)


def read_contents(folder: ArtifactFolder, archive: Artifact) -> Contents:
    """Return the first line of an archive: the job, and its numbers of layers and events.

    ``ArtifactDamaged`` if the file is other than listed, or not an archive of this version.
    """
    for line in _read(folder, archive):
        if line.get("archive") != _VERSION:
            break
        return Contents(job=str(line["job"]), layers=int(line["layers"]), events=int(line["events"]))
    raise ArtifactDamaged(f"artifact {archive.name} of job {archive.job_id} is not an archive that this version reads")


def read_layers(folder: ArtifactFolder, archive: Artifact) -> Iterator[LayerRow]:
    """Yield the layer rows of an archive, by kind and ordinal; the whole file is verified before the first.

    ``ArtifactDamaged`` if the file is other than listed.
    """
    for line in _read(folder, archive):
        if "layer" in line:
            yield LayerRow(**line["layer"])
        elif "archive" not in line:
            return


def _lines(
    contents: Contents, layers: Iterable[LayerRow], events: Iterable[Event], files: Iterable[Artifact]
) -> Iterator[dict[str, Any]]:
    yield {"archive": _VERSION, **plain(contents)}
    for row in layers:
        yield {"layer": plain(row)}
    for event in events:
        yield {"event": {**plain(event), "at": event.at.isoformat()}}
    for file in files:
        fields = plain(file)
        yield {"artifact": {name: fields[name] for name in ("name", "sha256", "size_bytes", "media_type")}}


def _read(folder: ArtifactFolder, archive: Artifact) -> Iterator[dict[str, Any]]:
    """Its lines, once its digest is that of the listing: gzip's own checksum stands at an end that few read to."""
    damaged = f"artifact {archive.name} of job {archive.job_id} is not what was listed"
    digest = hashlib.sha256()
    try:
        with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) as whole:
            with folder.open(archive) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    whole.write(chunk)
            if digest.hexdigest() != archive.sha256:
                raise ArtifactDamaged(damaged)
            whole.seek(0)
            with gzip.GzipFile(fileobj=whole, mode="rb") as packed:
                while raw := packed.readline(_MAX_LINE_BYTES):
                    yield json.loads(raw)
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError, KeyError) as error:
        raise ArtifactDamaged(f"artifact {archive.name} of job {archive.job_id} cannot be unpacked") from error
