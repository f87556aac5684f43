"""Artifacts as files: the engine's port for tensors and tables, on a folder.

A file is written under a temporary name while its digest is taken, synced, and renamed into
place; only then is it announced. Tensors are streamed one by one in the safetensors layout (the
library's own writer wants all of them in memory, and copies).
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from typing_extensions import override

from catalog.record import plain
from engine.memory.plan import readable_bytes
from worker.execution.files.open_files import OpenFolder, ReadableFile
from worker.execution.files.safetensors_header import read_header
from worker.execution.refusal import Refusal, storable_text

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,127}(/[A-Za-z0-9][\w.\-]{0,127}){0,3}", re.ASCII)
_PART_BYTES = 16 * 2**20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Announce = Callable[[str, str, int, str], None]
"""``announce(name, sha256, size_bytes, media_type)``."""


class ArtifactFiles:
    """Writes below one folder, reads from it, or from the folder of an earlier job."""

    _most_json_bytes = 512 * 2**20
    _pointer = "/factors"
    """The field of the document that what is read came from."""

    def __init__(self, root: Path, announce: Announce | None) -> None:
        """Set up the folder; nothing is written yet."""
        self._root = root
        self._announce = announce

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write host tensors as safetensors.

        Args:
            name: The file's name below the folder.
            tensors: Tensors by name, any shape, of a dtype that safetensors has.
            metadata: Text for the file's header.

        Memory:
            16 MiB beyond the tensors, one contiguous copy of a tensor that is not.
        """
        # wide types first keeps every tensor aligned, and names settle the rest: same tensors, same bytes
        ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
        offset = 0
        for key, tensor in ordered:
            size = tensor.numel() * tensor.element_size()
            header[key] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)

        def parts() -> Iterator[bytes]:
            yield len(text).to_bytes(8, "little") + text
            for _, tensor in ordered:
                yield from tensor_bytes(tensor)

        self._write(name, parts(), "application/vnd.safetensors")

    def save_json(self, name: str, value: object) -> None:
        """Write a table as JSON."""
        text = json.dumps(plain(value), allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
        self._write(name, [text], "application/json")

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        """Read tensors back.

        Args:
            name: The file's name below the folder.

        Returns:
            Tensors on the host by name, with the shapes and dtypes that were written.

        Raises:
            FileNotFoundError: If nothing has that name.
            Refusal: If the file is not a valid safetensors file.
        """
        file = self._opened(name)
        read_header(file, self._pointer)
        return safetensors.torch.load_file(file)

    def load_json(self, name: str) -> Any:  # noqa: ANN401 - whatever was written
        """Read a table back."""
        file = self._opened(name)
        if file.stat().st_size > self._most_json_bytes:
            raise Refusal(f"{file.name} has more than {self._most_json_bytes:,} bytes", pointer=self._pointer)
        try:
            return json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise Refusal(f"{file.name} is not valid JSON", pointer=self._pointer, code="broken_factors") from error

    def remove(self, name: str) -> None:
        """Delete a file; one that does not exist is not an error."""
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

    def _write(self, name: str, parts: Iterable[bytes], media_type: str) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        digest, size = hashlib.sha256(), 0
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                for part in parts:
                    file.write(part)
                    if self._announce is not None:
                        digest.update(part)
                    size += len(part)
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
            self._announce(name, digest.hexdigest(), size, media_type)


class StoredFactors(ArtifactFiles):
    """Factors of an earlier job: a folder with ``factors.index.json``, named as if below ``factors/``."""

    _most_json_bytes = 64 * 2**20
    """Decoded it takes up to twenty times as much, and 10,000 layers have 15 MB."""

    def __init__(self, folder: OpenFolder, most_bytes: int = 2**62, pointer: str = "/factors") -> None:
        super().__init__(folder.path, _never)
        self._pointer = pointer
        self._folder = folder
        self._most_bytes = most_bytes

    @override
    def remove(self, name: str) -> None:
        _never(name)

    def _path(self, name: str) -> Path:
        return super()._path(name.removeprefix("factors/"))

    def _opened(self, name: str) -> ReadableFile:
        file = self._folder.file(str(self._path(name).relative_to(self._folder.path)))
        if file is None:
            raise FileNotFoundError(name)
        size = file.stat().st_size
        if size > self._most_bytes:
            raise Refusal(
                f"{file.name} has {readable_bytes(size)}, and {readable_bytes(self._most_bytes)} of host memory are "
                "left to this job; give it more (`memory.host`)",
                pointer=self._pointer,
                code="budget_exceeded",
            )
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


def tensor_bytes(tensor: Tensor) -> Iterator[bytes]:
    """Yield a tensor's row-major little-endian bytes.

    Args:
        tensor: A tensor of any shape, dtype and device; of a quantised one the values that it stands for.

    Yields:
        Parts of at most 16 MiB.
    """
    # a quantised tensor seen as bytes ends the process, and a conjugated view has no bytes of its own
    values = tensor.detach().dequantize() if tensor.is_quantized else tensor.detach().resolve_conj().resolve_neg()
    flat = values.to("cpu").contiguous().flatten().view(torch.uint8)
    for start in range(0, flat.numel(), _PART_BYTES):
        yield flat[start : start + _PART_BYTES].numpy().tobytes()


def _never(*_: object) -> None:
    raise PermissionError("factors of an earlier job are read, never written")
