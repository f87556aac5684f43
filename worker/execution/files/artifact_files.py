"""Artifacts as files: the engine's port for tensors and tables, on a folder.

A file is written under a temporary name while its digest is taken, synced, and renamed into
place; only then is it announced.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import safetensors.torch
from torch import Tensor
from typing_extensions import override

from catalog.record import plain
from engine.artifacts import Artifacts, ReadOnly
from engine.memory.plan import readable_bytes
from engine.tensor_file import MEDIA_TYPE, Files, Sink, tensor_file_parts
from worker.execution.data.byte_count import no_room
from worker.execution.files.open_files import OpenFolder, ReadableFile
from worker.execution.files.safetensors_header import read_header
from worker.execution.refusal import Refusal, storable_text

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,127}(/[A-Za-z0-9][\w.\-]{0,127}){0,3}", re.ASCII)
Announce = Callable[[str, str, int, str], None]
"""``announce(name, sha256, size_bytes, media_type)``."""


class ArtifactFiles(Artifacts, Files):
    """Writes below one folder, reads from it, or from the folder of an earlier job."""

    _most_json_bytes = 512 * 2**20
    _pointer = "/factors"
    """The field of the document that what is read came from."""

    def __init__(self, root: Path, announce: Announce | None) -> None:
        """Set up the folder; nothing is written yet."""
        self._root = root
        self._announce = announce

    @override
    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self._write(name, tensor_file_parts(tensors, metadata), MEDIA_TYPE)

    @override
    def save_json(self, name: str, value: object) -> None:
        text = json.dumps(plain(value), allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
        self._write(name, [text], "application/json")

    @override
    def load_tensors(self, name: str) -> dict[str, Tensor]:
        file = self._opened(name)
        read_header(file, self._pointer)
        return safetensors.torch.load_file(file)

    @override
    def load_json(self, name: str) -> Any:
        file = self._opened(name)
        if file.stat().st_size > self._most_json_bytes:
            raise Refusal(f"{file.name} has more than {self._most_json_bytes:,} bytes", pointer=self._pointer)
        try:
            return json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise Refusal(f"{file.name} is not valid JSON", pointer=self._pointer, code="broken_factors") from error

    @override
    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name for an artifact")
        return self._root / name

    def _opened(self, name: str) -> ReadableFile:
        """The file of that name; nothing but our own process writes into the folder."""
        path = self._path(name)
        if not path.is_file():
            raise FileNotFoundError(name)
        return path

    @override
    @contextlib.contextmanager
    def writing(self, name: str, media_type: str) -> Iterator[Sink]:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                hashed = _HashedFile(file, hashes=self._announce is not None)
                yield hashed
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
            if isinstance(error, OSError) and error.filename is None:
                # a write knows no name; an operator who makes room needs to know where
                error.filename = str(path.parent)
            raise
        # the rename itself is on disk only when its folder is
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        if self._announce is not None:
            self._announce(name, hashed.digest.hexdigest(), hashed.size, media_type)

    def _write(self, name: str, parts: Iterable[bytes], media_type: str) -> None:
        with self.writing(name, media_type) as file:
            for part in parts:
                file.write(part)


class _HashedFile:
    """A file that is written once, with its digest and size."""

    def __init__(self, file: BinaryIO, *, hashes: bool) -> None:
        self._file = file
        self._hashes = hashes
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        part = memoryview(data).cast("B")
        self._file.write(part)
        if self._hashes:
            self.digest.update(part)
        self.size += part.nbytes
        return part.nbytes

    def flush(self) -> None:
        self._file.flush()


class StoredFactors(ReadOnly, ArtifactFiles):
    """Factors of an earlier job: a folder with ``factors.index.json``, named as if below ``factors/``."""

    _most_json_bytes = 64 * 2**20
    """Decoded it takes up to twenty times as much, and 10,000 layers have 15 MB."""

    def __init__(self, folder: OpenFolder, most_bytes: int = 2**62, pointer: str = "/factors") -> None:
        super().__init__(folder.path, None)
        self._pointer = pointer
        self._folder = folder
        self._most_bytes = most_bytes

    @override
    def writing(self, name: str, media_type: str) -> NoReturn:
        raise PermissionError(f"{name}: {self._source} read, never written")

    def _path(self, name: str) -> Path:
        return super()._path(name.removeprefix("factors/"))

    def _opened(self, name: str) -> ReadableFile:
        file = self._folder.file(str(self._path(name).relative_to(self._folder.path)))
        if file is None:
            raise FileNotFoundError(name)
        size = file.stat().st_size
        if size > self._most_bytes:
            raise no_room(f"{file.name} has {readable_bytes(size)}", self._most_bytes, self._pointer)
        return file


def find_factors(folder: OpenFolder, pointer: str, most_bytes: int = 2**62) -> StoredFactors:
    """Find the factors of an earlier run."""
    for candidate in (folder, folder.folder("factors"), folder.folder("artifacts/factors")):
        if candidate.file("factors.index.json") is not None:
            return StoredFactors(candidate, most_bytes, pointer.removesuffix("/path"))
    raise Refusal(
        f"{storable_text(str(folder.path))} holds no factors.index.json; give the folder that a job with "
        "`keep: [factors]` wrote",
        pointer=pointer,
        code="not_found",
    )
