"""Columns: vectors to be multiplied, each by parameter, and how far a product is from being adjoint.

Signs of outputs are random, and keyed by the example, so that batches do not matter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.model.counter_rng import uniforms


@dataclass(frozen=True, kw_only=True)
class Column:
    """One vector, and the rows of the product that are wanted."""

    tangents: Mapping[str, Tensor]
    """By parameter, each of its parameter's shape; a parameter that is left out does not move."""
    wanted: tuple[str, ...]
    """Parameters whose part of the product is wanted; those of ``tangents`` among them."""

    def inner(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Compute ``⟨g, v⟩``, a float64 scalar tensor, of gradients g by parameter, each of its parameter's shape."""
        parts = [_dot(gradients[name], own) for name, own in self.tangents.items()]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Sliced:
    """The summands of one slice of a batch."""

    products: Sequence[Mapping[str, Tensor]]
    """For each column the wanted parts by parameter, of the summed loss."""
    divisor: float
    """Weight of the slice's loss terms."""


def flaw(left: Tensor, right: Tensor, scale: Tensor, precision: torch.dtype) -> Tensor:
    """Return how far two sides of an adjoint identity are apart, relative to what rounding may leave.

    Args:
        left: One inner product, a float64 scalar tensor.
        right: The other one.
        scale: Product of the norms of the longer side's vectors, of which nearly orthogonal ones keep rounding alone.
        precision: The dtype of fewest bits that took part.

    Returns:
        A scalar tensor: at most 1 for a true adjoint; NaN where one side is not finite.
    """
    eps = torch.finfo(precision).eps
    size = left.abs() + right.abs() + eps**0.5 * scale
    apart: Tensor = (left - right).abs() / (eps**0.5 * size).clamp_min(torch.finfo(torch.float64).tiny)
    return apart


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients by parameter that can be written to, with copies of those that share memory.

    Autograd may return one tensor for several parameters, or part of one.
    """
    seen: set[int] = set()
    found = {}
    for name, own in tensors.items():
        storage = own.untyped_storage()
        alone = own.is_contiguous() and storage.nbytes() == own.numel() * own.itemsize
        found[name] = own if alone and storage.data_ptr() not in seen else own.clone()
        seen.add(storage.data_ptr())
    return found


def norm(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the norm, a float64 scalar tensor, of a vector that is kept by parameter, in parts of any shapes."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    parts = torch.stack([torch.linalg.vector_norm(own).double() for own in tensors.values()])
    total: Tensor = torch.linalg.vector_norm(parts)
    return total


def trained(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return parameters by any of their names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: named[name] for name in names}


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return torch.dot(left.reshape(-1), right.reshape(-1)).double()


_SIGN_KEY = 0x5167
"""Tells the key of a sign from that of a sampled label."""
_SIGNS_AT_ONCE = 2**21
TANGENT = -1
"""In place of a probe's number."""


def signs(outputs: Tensor, index: Tensor, seed: int, probe: int) -> Tensor:
    """Draw independent signs, a function of (seed, probe, example, term, output).

    Args:
        outputs: Shape (N, R, C); dtype and device are taken from it.
        index: Index of each example, shape (N,), int64.
        seed: Seed of the job.
        probe: Number of the probe.

    Returns:
        Signs, shape (N, R, C), each 1 or -1.
    """
    examples, terms, width = outputs.shape
    drawn = torch.empty(examples * terms, width, dtype=outputs.dtype, device=outputs.device)
    example = index.repeat_interleave(terms)
    term = torch.arange(terms, device=outputs.device).repeat(examples)
    component = torch.arange(width, device=outputs.device)[None, :]
    rows = max(1, _SIGNS_AT_ONCE // max(width, 1))
    for first in range(0, examples * terms, rows):
        part = slice(first, first + rows)
        uniform = uniforms(seed, _SIGN_KEY, probe, example[part, None], term[part, None], component)
        drawn[part] = torch.where(uniform < 0.5, -1.0, 1.0)
    return drawn.view(outputs.shape)
