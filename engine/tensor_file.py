"""Streamed files: tensors one by one in the safetensors layout, and the port for files of other kinds.

The library's own writer wants all tensors in memory, and copies.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

MEDIA_TYPE = "application/vnd.safetensors"
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


class Sink(Protocol):
    """A file that is written from its beginning to its end."""

    def write(self, data: bytes, /) -> int:
        """Write bytes; returns their count."""

    def flush(self) -> None:
        """Hand on what was written."""


class Files(Protocol):
    """A place for files of other kinds than ``Artifacts`` knows."""

    def writing(self, name: str, media_type: str) -> AbstractContextManager[Sink]:
        """Write a file, atomically.

        Args:
            name: Name of the file.
            media_type: Its type, such as `application/zip`.

        Returns:
            A context with the file, which is kept unless it ends with an error.
        """


def tensor_file_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """Return the bytes of a safetensors file.

    Args:
        tensors: Tensors by name, any shape, of a dtype that safetensors has.
        metadata: Text for the file's header.

    Returns:
        Parts of at most 16 MiB, after the header. Equal tensors give equal bytes, in whatever order they come.

    Memory:
        16 MiB beyond the tensors, one contiguous copy of a tensor that is not.
    """
    # wide types first keeps every tensor aligned, and names settle the rest
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
    begin = len(text).to_bytes(8, "little") + text
    return itertools.chain([begin], *(tensor_bytes(tensor) for _, tensor in ordered))


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
