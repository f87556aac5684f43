"""The covered parameters within the vector of all of them: the rows of a curvature that K-FAC speaks for.

An exact curvature is a matrix over all trainable numbers in the order of ``named_parameters()``. What is compared with
K-FAC is its diagonal block over the covered ones, ``Rᵀ F R``, where R puts the others to zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.errors import UsageError
from engine.factors.factor_set import FactorSet, LayerFacts, ParameterShape
from engine.operators.blocks import block_of


@dataclass(frozen=True, kw_only=True)
class CoveredParameters:
    """Runs of covered numbers in the vector of all parameters."""

    total: int
    """P: all trainable numbers."""
    runs: tuple[tuple[int, int], ...]
    """Start and stop of each run, ascending; none touches the next."""

    @classmethod
    def of(cls, whole: FactorSet, model: nn.Module, parameters: Sequence[ParameterShape]) -> "CoveredParameters":
        """Find the covered numbers.

        Memory:
            A byte for each number.
        """
        offsets, total = {}, 0
        for each in parameters:
            offsets[each.name] = total
            total += math.prod(each.shape)
        covered = torch.zeros(total, dtype=torch.bool)
        for layer in whole.layers:
            _mark(covered, layer, model, offsets)
        steps = torch.cat([torch.zeros(1), covered.to(torch.float32), torch.zeros(1)]).diff()
        starts, stops = (steps == 1).nonzero()[:, 0].tolist(), (steps == -1).nonzero()[:, 0].tolist()
        return cls(total=total, runs=tuple(zip(starts, stops, strict=True)))

    @property
    def size(self) -> int:
        """Covered numbers."""
        return sum(stop - start for start, stop in self.runs)

    def expand(self, vectors: Tensor) -> Tensor:
        """Return ``R v`` of several vectors.

        Args:
            vectors: Shape (size, k).

        Returns:
            Shape (P, k): the tensor itself where everything is covered.
        """
        if self.size == self.total:
            return vectors
        whole = vectors.new_zeros(self.total, vectors.shape[1])
        place = 0
        for start, stop in self.runs:
            whole[start:stop] = vectors[place : place + stop - start]
            place += stop - start
        return whole

    def restrict(self, vectors: Tensor) -> Tensor:
        """Return ``Rᵀ v`` of several vectors.

        Args:
            vectors: Shape (P, k).

        Returns:
            Shape (size, k): the tensor itself where everything is covered.
        """
        if self.size == self.total:
            return vectors
        return torch.cat([vectors[start:stop] for start, stop in self.runs])


def _mark(covered: Tensor, layer: LayerFacts, model: nn.Module, offsets: dict[str, int]) -> None:
    """Mark the numbers of one layer, by its windows or by the names of its parameters."""
    if layer.windows is not None and all(window.parameter in offsets for window in layer.windows):
        for window in layer.windows:
            start = offsets[window.parameter] + window.offset
            covered.as_strided(window.shape, window.strides, start).fill_(True)
        return
    block = block_of(model, layer.name, layer.parameters, layer.parameter_count)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known = dict(model.named_parameters(remove_duplicate=False))
    if block is None:
        raise UsageError(
            f"layer `{layer.name}`: it is not known where its numbers stand in {', '.join(layer.parameters)}, so that "
            "no exact curvature can be restricted to what K-FAC covers; take `spectrum.of: kfac` alone",
            layer=layer.name,
            pointer="/spectrum/of",
        )
    for piece in block.pieces:
        offset = offsets[names[id(known[piece.parameter])]]
        covered[offset + piece.start : offset + piece.stop] = True
