"""The files of an attacked service: listed ones are what is listed, and no other bears a final name for long.

A file that is being written has a name that begins with a dot. What bears a final name is whole: an
object's name is its digest, and what an attempt has staged is what an undisturbed run writes.
"""

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import safetensors
from safetensors import SafetensorError
from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from tests.chaos.evidence import BASES, Evidence
from tests.chaos.stack.documents import MEASURED
from tests.chaos.violation import Violation
from tests.machine.stopwatch import Stopwatch

_LOCKS = ".objects"
_WORKERS = ".workers"
_CACHES, _PLACE = ".factor-cache", ".place"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def damaged_listings(evidence: Evidence) -> Iterator[Violation]:
    """Listed files that a reader cannot have as they were listed."""
    for job_id, listed in evidence.listed.items():
        for each in listed:
            fault = _fault(evidence.root / each["uri"], each["sha256"], each["size_bytes"])
            if fault is not None:
                yield Violation("artifact", job_id, f"{each['name']} {fault}")


def strays(evidence: Evidence) -> Iterator[Violation]:
    """Files under a final name that are torn."""
    listed = {evidence.root / each["uri"] for rows in evidence.listed.values() for each in rows}
    for path in final_files(evidence.root):
        if path in listed:
            continue
        shown = path.relative_to(evidence.root).as_posix()
        if _DIGEST.fullmatch(path.name):
            if _sha256(path) != path.name:
                yield Violation("artifact", None, f"{shown} is torn, under its final name")
            continue
        job_id, _, name = shown.split("/", 2)
        if job_id not in evidence.jobs:
            yield Violation("artifact", None, f"{shown} belongs to no job")
        elif not _is_whole(path, *_expected(evidence, job_id, name)):
            yield Violation("artifact", job_id, f"{shown} is torn, under its final name")


def final_files(root: Path) -> list[Path]:
    """Files that a reader could take for an artifact."""
    return [path for path in _files(root) if not any(part.startswith(".") for part in path.relative_to(root).parts)]


def unlisted(engine: Engine, root: Path) -> list[Path]:
    """Files that no row names, whatever their names; there may be some until the next clean-up."""
    with engine.connect() as connection:
        listed = {root / uri for uri in connection.execute(text("SELECT uri FROM artifacts")).scalars()}
    # the lock of a killed worker stays until the others have looked at it for long enough
    ours = [path for path in _files(root) if path.parent not in (root / _LOCKS, root / _WORKERS)]
    # the name of the folder of caches stays as long as the folder does
    return [path for path in ours if path not in listed and path != root / _CACHES / _PLACE]


def _files(root: Path) -> Iterator[Path]:
    """Whatever lies there, while a clean-up may be taking folders away: `Path.rglob` would stumble over one."""
    for folder, _, names in os.walk(root):
        yield from (Path(folder) / name for name in names)


class Reader:
    """Verifies every listed file over and over while the service is attacked, as a client might at any time."""

    def __init__(self, engine: Engine, root: Path) -> None:
        self.violations: set[Violation] = set()
        self.verified = 0
        self._engine = engine
        self._root = root
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._read, name="reader", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()

    def _read(self) -> None:
        last = False
        while not last:
            last = self._enough.wait(0.5)  # and once more when all is done
            with contextlib.suppress(SQLAlchemyError), self._engine.connect() as connection:
                for row in connection.execute(text("SELECT job_id, name, uri, sha256, size_bytes FROM artifacts")):
                    fault = _fault(self._root / row.uri, row.sha256, row.size_bytes)
                    self.verified += 1
                    if fault is not None:
                        self.violations.add(Violation("artifact", row.job_id, f"{row.name} {fault}"))


def await_sweep(engine: Engine, root: Path, seconds: float) -> Iterator[Violation]:
    """What is nobody's even after the clean-ups."""
    watch = Stopwatch()
    while (left := unlisted(engine, root)) and watch.seconds() < seconds:
        time.sleep(0.2)
    for path in left:
        yield Violation("artifact", None, f"{path.relative_to(root)} is nobody's, and was not swept away")


def _fault(path: Path, sha256: str, size_bytes: int) -> str | None:
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"is listed, and cannot be read ({type(error).__name__})"
    if len(content) != size_bytes or hashlib.sha256(content).hexdigest() != sha256:
        return f"is listed with {size_bytes} bytes, and is another file of {len(content)}"
    return None


def _expected(evidence: Evidence, job_id: str, name: str) -> tuple[str | None, bool]:
    """The digest of a staged or laid out file; and whether none may be known, as of a piece that listed nothing."""
    whole = evidence.parent(job_id) or job_id
    folder, _, rest = name.partition("/")
    if folder == "divided":
        return evidence.digest(whole, rest), False
    if folder == "pieces":
        place, _, rest = rest.partition("/")
        for pieces in evidence.pieces(whole).values():
            for each, piece in pieces.items():
                if place == f"{piece['round']}-{piece['index']}":
                    return evidence.digest(each, rest), False
        return None, False
    return evidence.digest(job_id, name), whole != job_id or name.startswith(BASES)


def _is_whole(path: Path, sha256: str | None, may_be_unknown: bool) -> bool:
    with contextlib.suppress(FileNotFoundError):  # its attempt has just cleared it away
        unknown = sha256 is None and may_be_unknown
        return _can_be_read(path) if path.name in MEASURED or unknown else sha256 == _sha256(path)
    return True


def _can_be_read(path: Path) -> bool:
    content = path.read_bytes()
    with contextlib.suppress(ValueError, SafetensorError):
        if path.suffix == ".safetensors":
            safetensors.deserialize(content)
        else:
            json.loads(content)
        return True
    return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
