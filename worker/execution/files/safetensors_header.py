"""Check the header of a safetensors file before any library reads it, and read tensors by their places in it.

The library accepts strange names, duplicate names and headers of any length (a 59 MB one took it
13 s); so the rules are applied here, on at most 8 MiB of JSON, before a byte of data is touched.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.execution.files.open_files import OpenFile, ReadableFile
from worker.execution.refusal import Refusal, is_storable, no_constant, unique_keys

MAX_HEADER_BYTES = 8 * 2**20
MAX_TENSORS = 20_000
MAX_RANK = 8
_MOST = 2**62
# transformers 5 saves a buffer of ESM under a name with `*`
_NAME = re.compile(r"[\w.\-/*]{1,512}", re.ASCII)
ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32",
    "F32": "float32", "F64": "float64", "I64": "int64", "U64": "uint64", "C64": "complex64",
}  # fmt: skip
"""Types of torch by their names in a file's header."""
_FOREIGN = {
    b"PK\x03\x04": "a zip archive (such as a PyTorch checkpoint)",
    b"\x80": "a pickle",
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUM": "a NumPy file",
}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor as the header declares it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    """Its first byte in the file."""

    @property
    def numbers(self) -> int:
        """Elements it holds."""
        return math.prod(self.shape)


def read_header(path: ReadableFile, pointer: str) -> dict[str, TensorEntry]:
    """Return dtype, shape and place of each tensor of a safetensors file by its name, after every check."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length < 2:
            raise _broken(path, f"is too short for safetensors ({size} bytes)", pointer)
        if length > min(MAX_HEADER_BYTES, size - 8):
            # only here: a true header's length may begin with any of these bytes
            foreign = next((what for magic, what in _FOREIGN.items() if start.startswith(magic)), None)
            if foreign is not None:
                raise _broken(path, f"is {foreign}, not safetensors; save the tensors with safetensors", pointer)
            raise _broken(path, f"declares a header of {length:,} bytes; the file has {size:,}, at most "
                          f"{MAX_HEADER_BYTES:,} are read; save the tensors with safetensors", pointer)  # fmt: skip
        raw = file.read(length)
    try:
        # decoded here: from bytes json would guess UTF-16 and UTF-32 too
        header = json.loads(raw.decode(), object_pairs_hook=unique_keys, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise _broken(path, "has a header that is not JSON in UTF-8, or names a tensor twice", pointer) from error
    if not isinstance(header, dict):
        raise _broken(path, "has a header that is not a JSON object", pointer)
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _is_texts(metadata):
        raise _broken(path, "has a `__metadata__` that is not an object of texts", pointer)
    if not header:
        raise _broken(path, "holds no tensors", pointer)
    if len(header) > MAX_TENSORS:
        raise _broken(path, f"holds {len(header):,} tensors; at most {MAX_TENSORS:,} are read", pointer)
    return _entries(path, header, 8 + length, size, pointer)


def read_rows(file: OpenFile, entry: TensorEntry, start: int, stop: int, pointer: str) -> Tensor:
    """Read some rows of a tensor; the library would map the whole file, for which a job may have no room."""
    row_bytes = ELEMENT_BYTES[entry.dtype] * math.prod(entry.shape[1:])
    found = file.read_at(entry.begin + start * row_bytes, (stop - start) * row_bytes)
    if len(found) < (stop - start) * row_bytes:
        raise _broken(file, "became shorter while it was read; give it once it is whole", pointer)
    dtype: torch.dtype = getattr(torch, _DTYPES[entry.dtype])
    return torch.frombuffer(found, dtype=dtype).reshape(stop - start, *entry.shape[1:])


def _entries(
    path: ReadableFile, header: dict[str, Any], data_begin: int, size: int, pointer: str
) -> dict[str, TensorEntry]:
    """Check what the header says of each tensor; their bytes lie from ``data_begin`` to the end of the file."""
    found: dict[str, TensorEntry] = {}
    spans = []
    for name, value in header.items():
        if not _NAME.fullmatch(name) or ".." in name or name.startswith("/"):
            raise _broken(path, f"holds a tensor named {name[:80]!r}; names are letters, digits and ._-/*", pointer)
        entry, begin, end = _entry(path, name, value, data_begin, pointer)
        if end - begin != entry.numbers * ELEMENT_BYTES[entry.dtype]:
            raise _broken(path, f"gives `{name}` {end - begin:,} bytes for shape {list(entry.shape)}", pointer)
        found[name] = entry
        spans.append((begin, end))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise _broken(path, f"has a hole or an overlap at byte {position:,} of its data", pointer)
        position = end
    if position != size - data_begin:
        raise _broken(
            path, f"holds {size - data_begin:,} bytes of data where its header declares {position:,}", pointer
        )
    return found


def _entry(
    path: ReadableFile,
    name: str,
    value: Any,  # noqa: ANN401 - decoded JSON
    data_begin: int,
    pointer: str,
) -> tuple[TensorEntry, int, int]:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"must describe `{name}` by dtype, shape and data_offsets alone", pointer)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise _broken(path, f"gives `{name}` the dtype {str(dtype)[:40]!r}; save it as one of {known}", pointer)
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_count, shape)):
        raise _broken(path, f"gives `{name}` a shape that cannot be", pointer)
    if math.prod(number for number in shape if number) >= _MOST:
        # the library multiplies them one by one, and a 0 at the end comes too late
        raise _broken(path, f"gives `{name}` a shape that cannot be", pointer)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise _broken(path, f"gives `{name}` data_offsets that are not two whole numbers", pointer)
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=data_begin + offsets[0]), offsets[0], offsets[1]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_texts(value: object) -> bool:
    """Whether it is an object of texts that UTF-8 can hold, as the library asks."""
    if not isinstance(value, dict):
        return False
    return all(isinstance(text, str) and is_storable(text) for pair in value.items() for text in pair)


def _broken(path: ReadableFile, what: str, pointer: str) -> Refusal:
    return Refusal(f"{path.name} {what}", pointer=pointer, code="broken_safetensors")
