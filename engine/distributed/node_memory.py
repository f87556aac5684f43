"""Node memory: tensors that the ranks of one node hold once, each having written a part of them.

    files    in /dev/shm, else in the folder for temporary files, with their room reserved before anyone writes
    names    gone as soon as every rank has mapped them, so that nothing is left behind however the ranks end

Ranks on several nodes have no file in common, and a node may lack room; all of them learn of that together.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from engine.distributed.group import Ranks

_FOLDERS = ("/dev/shm", None)  # noqa: S108 - reserved below a name of its own; None is the folder for temporary files
_KERNEL = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Sized:
    """Shape and dtype of a tensor that is to be held once."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of its numbers."""
        return prod(self.shape) * self.dtype.itemsize


def join_node(ranks: Ranks) -> None:
    """Settle whether all ranks run on one node.

    Args:
        ranks: The ranks, all of which call this.

    Raises:
        RankFailed: If a rank has failed.
    """
    kernels = ranks.gather(_KERNEL.read_text() if _KERNEL.exists() else None, "nodes")
    ranks.one_node = kernels[0] is not None and all(each == kernels[0] for each in kernels)


def hold_once(ranks: Ranks, sizes: Sequence[Sized]) -> list[Tensor] | None:
    """Allocate tensors that all ranks of one node map.

    What one rank writes the others read once they have exchanged anything afterwards.

    Args:
        ranks: The ranks, all of which call this with the same sizes.
        sizes: Shapes and dtypes; none may be empty.

    Returns:
        One tensor on the host for each, of zeros; None where the ranks are on several nodes, or there is no room.

    Raises:
        RankFailed: If a rank has failed.

    Memory:
        The tensors once, and not once a rank.
    """
    if not sizes:
        return []
    if not ranks.one_node:
        return None
    folder = ranks.broadcast(_reserved(sizes) if ranks.rank == 0 else None, 0, "memory of the node")
    if folder is None:
        return None
    try:
        tensors = _mapped(Path(folder), sizes)
        # in containers of their own, ranks of one machine see other folders
        if not all(ranks.gather(tensors is not None, "maps of the node's memory")):
            return None
        return tensors
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _reserved(sizes: Sequence[Sized]) -> str | None:
    """Make a file for each tensor, with its room reserved: writing to one later can no longer fail."""
    for place in _FOLDERS:
        if place is not None and not os.access(place, os.W_OK):
            continue
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix="kronoscope-", dir=place)
            try:
                for number, each in enumerate(sizes):
                    with (Path(folder) / str(number)).open("wb") as file:
                        os.posix_fallocate(file.fileno(), 0, each.size_bytes)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            return folder
    return None


def _mapped(folder: Path, sizes: Sequence[Sized]) -> list[Tensor] | None:
    """Map the files; None where this rank does not see them."""
    tensors = []
    for number, each in enumerate(sizes):
        file = folder / str(number)
        if not file.is_file() or file.stat().st_size != each.size_bytes:
            return None
        numbers = torch.from_file(str(file), shared=True, size=prod(each.shape), dtype=each.dtype)
        tensors.append(numbers.view(each.shape))
    return tensors
