"""Structure files: the semiseparable matrices of a job, a file for each layer, and an index that is written last.

    structures/{ordinal}.safetensors       tensors, by `SIDE/NAME`
    structures/structures.index.json       of each layer its name and, by side, size, orders and digest

A file may be a stranger's: what the index says of sizes and orders is held against the shapes of the tensors, on
tensors without numbers, before anything is made of them.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.artifacts import Artifacts
from engine.errors import BrokenFactors
from engine.factors.kronecker_factors import digest
from engine.semiseparable.block_sss import BlockSSS
from engine.semiseparable.semiseparable_matrix import SemiseparableMatrix
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank

FORMAT = "kronoscope-structures/1"
INDEX = "structures/structures.index.json"
KINDS: Mapping[str, type[SemiseparableMatrix]] = {kind.kind: kind for kind in (TridiagonalLowRank, BlockSSS)}
_FILE = re.compile(r"structures/[0-9]{1,9}\.safetensors")


def structure_digest(matrix: SemiseparableMatrix) -> str:
    """Return the SHA-256 over the digests of a structure's tensors, in the order of their names."""
    whole = hashlib.sha256()
    for name, tensor in sorted(matrix.tensors().items()):
        whole.update(f"{name}:{digest(tensor)}\n".encode())
    return whole.hexdigest()


def write_structures(
    artifacts: Artifacts, layer: str, ordinal: int, held: Mapping[str, SemiseparableMatrix]
) -> dict[str, Any]:
    """Write one layer's structures by side, and return the layer's entry in the index."""
    file = f"structures/{ordinal}.safetensors"
    tensors = {f"{side}/{name}": each for side, matrix in held.items() for name, each in matrix.tensors().items()}
    artifacts.save_tensors(file, tensors, {"format": FORMAT, "layer": layer})
    facts = {side: matrix.facts() | {"digest": structure_digest(matrix)} for side, matrix in held.items()}
    return {"name": layer, "file": file, "sides": facts}


def write_structure_index(artifacts: Artifacts, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write the index, after all structures: its presence says that they are complete."""
    artifacts.save_json(INDEX, {"format": FORMAT, "layers": [dict(entry) for entry in entries]})


def read_structures(artifacts: Artifacts) -> dict[str, dict[str, SemiseparableMatrix]]:
    """Read the structures of a job.

    Args:
        artifacts: A job's.

    Returns:
        Structures by layer name and side.

    Raises:
        BrokenFactors: If the index is missing, or contradicts the files in sizes, orders or digests.
    """
    try:
        layers = _layers(artifacts.load_json(INDEX))
        return {entry["name"]: _read_layer(artifacts, entry) for entry in layers}
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # the port's own errors, and whatever a stranger's table makes a reader say
        raise BrokenFactors(f"no structures can be read by {INDEX}: {type(error).__name__}: {error}") from error


def _layers(index: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if index["format"] != FORMAT:
        raise ValueError(f"its format is {str(index['format'])[:80]!r}, not {FORMAT}")
    layers: Sequence[Mapping[str, Any]] = index["layers"]
    names = {entry["name"] for entry in layers}
    if len(names) < len(layers) or not all(isinstance(name, str) and name for name in names):
        raise ValueError("a layer has no name, or that of another one")
    return layers


def _read_layer(artifacts: Artifacts, entry: Mapping[str, Any]) -> dict[str, SemiseparableMatrix]:
    file = _FILE.fullmatch(entry["file"])
    if file is None:
        raise ValueError(f"{str(entry['file'])[:80]!r} is not a file of structures")
    tensors = artifacts.load_tensors(file.group())
    if {name.partition("/")[0] for name in tensors} != set(entry["sides"]):
        raise ValueError(f"{file.group()} holds other sides than {', '.join(map(str, entry['sides']))}")
    return {str(side): _read_side(str(side), facts, tensors) for side, facts in entry["sides"].items()}


def _read_side(side: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SemiseparableMatrix:
    kind, prefix = KINDS[facts["kind"]], f"{side}/"
    own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
    shaped = kind.read({name: torch.empty_like(each, device="meta") for name, each in own.items()}, facts)
    if shaped.size != facts["size"] or set(shaped.tensors()) != set(own):
        raise ValueError(f"side {side} is said to have {facts['size']} rows and has {shaped.size}")
    matrix = kind.read(own, facts)
    if structure_digest(matrix) != facts["digest"]:
        raise ValueError(f"side {side} has other numbers than were written")
    return matrix
