"""Structure files: a layer's semiseparable matrices, as tensors `SIDE/NAME` and a table in the file's metadata.

The table has each structure's facts, such as its size and orders, and a digest over its tensors. A file may be a
stranger's: facts are held against the shapes of the file's header, on tensors without numbers, before any is read.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.errors import BrokenFactors, EngineError
from engine.factors.kronecker_factors import digest
from engine.semiseparable.block_sss import BlockSSS
from engine.semiseparable.semiseparable_matrix import SemiseparableMatrix
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank

FORMAT = "kronoscope-structures/1"
KINDS: Mapping[str, type[SemiseparableMatrix]] = {kind.kind: kind for kind in (TridiagonalLowRank, BlockSSS)}


def structure_digest(matrix: SemiseparableMatrix) -> str:
    """Return the SHA-256 over the digests of a structure's tensors, in the order of their names."""
    whole = hashlib.sha256()
    for name, tensor in sorted(matrix.tensors().items()):
        whole.update(f"{name}:{digest(tensor)}\n".encode())
    return whole.hexdigest()


def to_store(layer: str, held: Mapping[str, SemiseparableMatrix]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of one layer's structures, and the metadata that a reader needs.

    Args:
        layer: The layer's name.
        held: The structures by side.
    """
    tensors = {f"{side}/{name}": each for side, matrix in held.items() for name, each in matrix.tensors().items()}
    facts = {side: matrix.facts() | {"digest": structure_digest(matrix)} for side, matrix in held.items()}
    return tensors, {"format": FORMAT, "layer": layer, "structures": json.dumps(facts, sort_keys=True)}


def read_structures(
    metadata: Mapping[str, str],
    header: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    load: Callable[[str], Tensor],
    file: str,
) -> tuple[str, dict[str, SemiseparableMatrix]]:
    """Read the structures of one file.

    Args:
        metadata: The file's.
        header: Shape and dtype of each of its tensors.
        load: Reads one of them.
        file: The file's name, for messages.

    Returns:
        The layer's name, and its structures by side.

    Raises:
        BrokenFactors: If the file is none of these, or its table, shapes, orders or digests contradict each other.
    """
    if metadata.get("format") != FORMAT:
        raise BrokenFactors(
            f"{file} holds no structures: its format is {str(metadata.get('format'))[:80]!r}, not {FORMAT}"
        )
    try:
        table = json.loads(metadata.get("structures", ""))
        found = {str(side): _read(str(side), facts, header, load) for side, facts in table.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, EngineError) as error:
        raise BrokenFactors(f"{file} is damaged, or was never written by `compression`: {error}") from error
    return metadata.get("layer", ""), found


def _read(
    side: str,
    facts: Mapping[str, Any],
    header: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    load: Callable[[str], Tensor],
) -> SemiseparableMatrix:
    kind = KINDS[facts["kind"]]
    prefix = f"{side}/"
    own = {name.removeprefix(prefix): each for name, each in header.items() if name.startswith(prefix)}
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in own.items()}
    shaped = kind.read(empty, facts)
    if shaped.size != facts["size"] or set(shaped.tensors()) != set(own):
        raise ValueError(f"side {side} is said to have {facts['size']} rows and has {shaped.size}")
    matrix = kind.read({name: load(prefix + name) for name in own}, facts)
    if structure_digest(matrix) != facts["digest"]:
        raise ValueError(f"side {side} has other numbers than were written")
    return matrix
