"""Layouts of files that other tools read: zip, npz and torch's own, with equal bytes for equal contents."""

import io
import re
import zipfile
from collections.abc import Iterable, Mapping
from typing import IO, Any, cast

import torch
from torch import Tensor

from engine.tensor_file import Sink, tensor_bytes

_MOMENT = (1980, 1, 1, 0, 0, 0)
"""The time of every member: that of the writing would make each file another one."""
_UNSAFE = re.compile(r"[^\w.\-\[\]]", re.ASCII)
_MOST_NAME_CHARACTERS = 100
_NPY = {torch.float32: "<f4", torch.float64: "<f8", torch.int64: "<i8"}


def member_name(layer: str, ordinal: int, ending: str) -> str:
    """Return the name of a layer's member, which is a file name on any system.

    Args:
        layer: The layer's name, which may hold anything.
        ordinal: Its place, by which names are told apart that are not their layer's own.
        ending: Such as `.npz`.
    """
    safe = _UNSAFE.sub("_", layer)[:_MOST_NAME_CHARACTERS]
    plain = safe == layer and safe and not safe.startswith(".")
    return f"{safe}{ending}" if plain else f"{ordinal}_{safe.lstrip('.')}{ending}"


def write_zip(file: Sink, members: Iterable[tuple[str, Iterable[bytes]]]) -> None:
    """Write a zip without compression.

    Args:
        members: Name and parts of each, in order.
    """
    with zipfile.ZipFile(cast("IO[bytes]", file), "w") as archive:
        for name, parts in members:
            with archive.open(zipfile.ZipInfo(name, _MOMENT), "w", force_zip64=True) as inner:
                for part in parts:
                    inner.write(part)


def npz_bytes(entries: Mapping[str, Tensor | str]) -> bytes:
    """Return an archive of numpy's arrays.

    Args:
        entries: Tensors of float32, float64 or int64, and texts, by name.
    """
    held = io.BytesIO()
    write_zip(held, ((f"{name}.npy", [_npy(entry)]) for name, entry in entries.items()))
    return held.getvalue()


def save_with_torch(value: Mapping[str, Any], file: Sink) -> None:
    """Write tensors, numbers, texts, lists and dictionaries so that ``torch.load`` reads them with `weights_only`.

    Args:
        value: The contents.
    """
    torch.save(value, cast("IO[bytes]", file))


def _npy(entry: Tensor | str) -> bytes:
    """An array in version 1.0 of numpy's format: a header of a multiple of 64 bytes, then the numbers row by row."""
    if isinstance(entry, str):
        described, shape, data = f"<U{len(entry)}", "()", entry.encode("utf-32-le")
    else:
        described, data = _NPY[entry.dtype], b"".join(tensor_bytes(entry))
        shape = repr(tuple(entry.shape))
    header = f"{{'descr': '{described}', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data
