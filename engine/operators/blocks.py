"""Blocks: parts of the parameters, as the results name them, and their places in a flat vector.

A row of the results names its parameters by labels: ``name`` is a whole parameter, ``name[3]`` one of equal parts along
the first dimension, ``name[2:5]`` a range of rows. A block holds the same numbers as runs of each parameter, row by
row; a parameter that stands under several names is one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Consecutive numbers of one parameter, row by row."""

    parameter: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """Parameters whose diagonal block of F is examined."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Rows of the block."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    def join(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Join the block's numbers of gradients by parameter, each of its parameter's shape, to a vector (size,)."""
        return torch.cat([gradients[piece.parameter].reshape(-1)[piece.start : piece.stop] for piece in self.pieces])

    def split(self, vector: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Split a vector (size,) of the block by parameter: tensors of their ``shapes``, zero outside of the block."""
        found: dict[str, Tensor] = {}
        parts = torch.split(vector, [piece.stop - piece.start for piece in self.pieces])
        for piece, part in zip(self.pieces, parts, strict=True):
            if piece.parameter not in found:
                found[piece.parameter] = vector.new_zeros(*shapes[piece.parameter])
            found[piece.parameter].view(-1)[piece.start : piece.stop] = part
        return found


def block_of(model: nn.Module, name: str, parameters: Sequence[str], count: int) -> Block | None:
    """Find the block of F that belongs to a row of the results.

    Args:
        name: The row's layer.
        parameters: Names of the layer's parameters; ``weight[3]`` is one of equal parts along the first dimension, and
            ``weight[2:5]`` a range of its rows.
        count: Numbers that they hold together.

    Returns:
        The block; None where a part of a parameter is not a run of whole rows.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    named = [_part(label, known) for label in parameters]
    if any(base not in known for base, _ in named):
        return None
    # a tied parameter may stand under several names, and is one
    named = list({(id(known[base]), part): (base, part) for base, part in named}.values())
    whole = sum(known[base].numel() for base, _ in named)
    pieces = []
    for base, part in named:
        numbers = known[base].numel()
        rows = _rows(part, known[base], whole // max(count, 1))
        if rows is None:
            return None
        first, last, of = rows
        pieces.append(Piece(parameter=base, start=first * (numbers // of), stop=last * (numbers // of)))
    block = Block(name=name, pieces=tuple(pieces))
    return block if block.size == count else None


def _rows(part: str | None, parameter: Tensor, parts: int) -> tuple[int, int, int] | None:
    """First row, end and number of rows, of ``part``; a row is one of equal ``parts`` where it is a single one."""
    if part is None:
        return 0, 1, 1
    first, colon, last = part.partition(":")
    of = parameter.shape[0] if colon else parts
    if not first.isdigit() or (colon and not last.isdigit()) or of == 0 or parameter.numel() % of:
        return None
    return int(first), int(last) if colon else int(first) + 1, of


def joined(name: str, blocks: Iterable[Block]) -> Block:
    """Return one block of blocks that hold different numbers, which stand one after another."""
    return Block(name=name, pieces=tuple(piece for block in blocks for piece in block.pieces))


def _part(label: str, known: Mapping[str, Tensor]) -> tuple[str, str | None]:
    if label in known:
        return label, None
    base, _, part = label.rpartition("[")
    return base, part.removesuffix("]")
