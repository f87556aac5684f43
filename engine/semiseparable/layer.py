"""A linear layer whose square weight is a semiseparable matrix with trainable generators.

It has O(N r) parameters in place of N², and products of as many operations. Fewer parameters are those of this layer
alone; that a network with them is as good is for the data to say.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from engine.semiseparable.block_sss import BlockSSS
from engine.semiseparable.semiseparable_matrix import (
    MatrixRefused,
    SemiseparableMatrix,
    default_rank,
    read_whole,
    require_rank,
)
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank


class StructuredLinear(nn.Module):
    """y = A x + b, with A (N, N) held by its generators."""

    def __init__(
        self,
        features: int,
        *,
        structure: Literal["tridiagonal_lowrank", "block_sss"] = "tridiagonal_lowrank",
        rank: int | None = None,
        block: int = 16,
        bias: bool = True,
    ) -> None:
        """Draw generators so that entries of A have the variance of ``nn.Linear``'s, 1/(3N), by torch's own generator.

        Args:
            features: N, features in and out.
            structure: How A is held.
            rank: r of T + U Vᵀ, or the order of block SSS; None takes ⌈log₂ N⌉.
            block: Rows of a block, of block SSS.
            bias: Whether b is added.

        Raises:
            MatrixRefused: If a number cannot be.
        """
        super().__init__()
        features, block = read_whole(features, "features", 1), read_whole(block, "block", 1)
        order = require_rank(default_rank(features) if rank is None else rank, features)
        self.features = features
        deviation = 1 / math.sqrt(3 * features)
        # a sum of r products of two normal numbers has the variance r d⁴
        factor = math.sqrt(deviation) / order**0.25
        drawn = {
            name: torch.randn(shape) * (deviation if name in ("D", "diagonal", "lower", "upper") else factor)
            for name, shape in _shapes(structure, features, order, min(block, features)).items()
        }
        self._kind: type[SemiseparableMatrix] = TridiagonalLowRank
        self._facts: dict[str, int] = {}
        if structure == "block_sss":
            self._kind, self._facts = BlockSSS, {"size": features}
            # states keep their size from block to block
            drawn |= {name: torch.eye(order).expand_as(drawn[name]).clone() for name in ("W", "R")}
            _clear_beyond(drawn, features)
        self.generators = nn.ParameterDict(drawn)
        self.bias = nn.Parameter(torch.zeros(features)) if bias else None

    def matrix(self) -> SemiseparableMatrix:
        """Return A, whose tensors are the parameters."""
        return self._kind.read(dict(self.generators.items()), self._facts)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return A x + b for inputs (..., N), in that shape."""
        product = self.matrix().matvec(x.reshape(-1, self.features).mT).mT.reshape(x.shape)
        return product if self.bias is None else product + self.bias


def _shapes(structure: str, n: int, r: int, p: int) -> dict[str, tuple[int, ...]]:
    if structure == "tridiagonal_lowrank":
        return {"diagonal": (n,), "lower": (n - 1,), "upper": (n - 1,), "U": (n, r), "V": (n, r)}
    if structure != "block_sss":
        raise MatrixRefused(f"`structure` must be tridiagonal_lowrank or block_sss (got {structure!r})")
    m = -(-n // p)
    tall, square = (m, p, r), (m, r, r)
    return {"D": (m, p, p), "U": tall, "W": square, "V": tall, "P": tall, "R": square, "Q": tall}


def _clear_beyond(generators: dict[str, Tensor], n: int) -> None:
    """Set rows beyond N in the last block to zero: their products are cut off, and so are their gradients."""
    m, p = generators["D"].shape[:2]
    inside = (torch.arange(m * p) < n).view(m, p, 1).to(torch.float32)
    for name in ("D", "U", "V", "P", "Q"):
        generators[name] = generators[name] * inside
    generators["D"] = generators["D"] * inside.mT
