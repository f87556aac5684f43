"""Derived weights: matrices that are linear in parameters, whose products are then products of those parameters.

For ``M = Σ_k C_k ∘ T_k + M₀``, whose C_k are one number, one number a row r or one a column s,

    ``M x = Σ_k r_k ∘ (T_k (s_k ∘ x)) + M₀ x``

and the rows of T_k in it are ``s ∘ a`` and ``r ∘ g``. For ``M = L R`` they are those of R in ``R x``, and of L in
``L (R x)``; joined matrices are as many products. So a scaled weight, a low-rank pair that is merged into
another weight, and weights that are joined for one product all keep factors of their own, exactly.

That an operation is of the first kind is not read from its name: its Jacobian is tried on two vectors. What
leaves the numbers of a weight alone, or passes their gradient straight through (``nan_to_num``, ``where``, a
cast, a rounded copy), is then of it too. The vectors come from a generator of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.torch_functions import Operation
from engine.row_layout.layer_calls import version

_CORNER = 16
"""Numbers of each dimension that are looked at before all of them are."""
_ROUNDING = 16.0
"""Times the unit of rounding that a Jacobian's entries may differ from the constant they are taken for."""
_PRODUCTS = frozenset({"matmul", "mm", "rmatmul"})
_PICKS = frozenset({"flip", "fliplr", "flipud", "roll", "index_select", "getitem", "rot90"})
_JOINS = frozenset({"cat", "concat", "concatenate"})
View = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Derivation:
    """A record of how one derived tensor was made."""

    parts: tuple[Tensor, ...]
    """Matrices, or vectors, derived or constant."""
    versions: tuple[int, ...]
    """Writes to each of them, until then."""

    @property
    def holds(self) -> bool:
        """Whether nothing was written to its parts since."""
        return self.versions == tuple(map(version, self.parts))


@dataclass(frozen=True, kw_only=True)
class Sum(Derivation):
    """A sum ``Σ_k C_k ∘ T_k + M₀``."""

    scales: tuple[Tensor, ...]
    """C_k: shape (), (rows, 1) or (1, columns)."""
    rest: Tensor | None
    """M₀; None where that is rounding."""


@dataclass(frozen=True, kw_only=True)
class Chain(Derivation):
    """A product ``L R``."""


@dataclass(frozen=True, kw_only=True)
class Joined(Derivation):
    """Matrices or vectors beside each other."""

    dim: int


@dataclass(frozen=True, kw_only=True)
class Picked(Derivation):
    """A matrix in another order, ``T[rows][:, columns]``."""

    rows: Tensor
    columns: Tensor


def derivation_of(
    operation: Operation, left: Tensor, leaf: View, is_derived: Callable[[Tensor], bool]
) -> Derivation | None:
    """Return how an operation made a tensor of derived tensors and constants.

    Args:
        operation: Not one that writes.
        left: What it returned, of any shape.
        leaf: What stands for a derived tensor in operations of our own.
        is_derived: Whether a tensor was made of parameters.

    Returns:
        The derivation; None where the operation is not of these kinds.

    Memory:
        A few times the numbers of ``left``.
    """
    if operation.name in _PRODUCTS:
        factors = tuple(map(leaf, operation.tensors))
        factors = factors[::-1] if operation.name == "rmatmul" else factors
        flat = all(factor.ndim == 2 for factor in factors)
        return Chain(parts=factors, versions=_versions(factors)) if flat else None
    if operation.name in _JOINS:
        joined = tuple(map(leaf, operation.tensors))
        return Joined(parts=joined, versions=_versions(joined), dim=operation.joined_along % left.ndim)
    parts = tuple({id(tensor): leaf(tensor) for tensor in operation.tensors if is_derived(tensor)}.values())
    if operation.name in _PICKS:
        return _picked(operation, left, parts[0], leaf)
    if any(part.shape != left.shape or part.dtype != left.dtype for part in parts):
        return None
    return _sum(operation, left, parts, leaf)


def derivation_of_view(made: Derivation, view: View, transposed: View, left: Tensor) -> Derivation | None:
    """Return how a view of a derived tensor is made of views of its parts.

    Args:
        made: How the tensor was made.
        view: The same view of another tensor, followed.
        transposed: The transpose of a matrix, followed.
        left: The view, of any shape.

    Returns:
        The view's derivation; None where it is not such views.
    """
    if isinstance(made, Sum):
        parts = tuple(map(view, made.parts))
        scales = [
            _structured(view(scale.expand(part.shape))) if scale.ndim else scale
            for scale, part in zip(made.scales, made.parts, strict=True)
        ]
        if any(scale is None for scale in scales):
            return None
        rest = None if made.rest is None else view(made.rest)
        own = tuple(scale for scale in scales if scale is not None)
        return Sum(parts=parts, versions=_versions(parts), scales=own, rest=rest)
    if isinstance(made, Picked):
        return None
    flat = left.ndim == 2 and all(part.ndim == 2 for part in made.parts)
    places = torch.empty_strided(_shape(made), (_shape(made)[1], 1), device="meta") if flat else None
    if places is None or view(places).shape != places.mT.shape or view(places).stride() != places.mT.stride():
        return None
    parts = tuple(map(transposed, made.parts))
    if isinstance(made, Joined):
        return Joined(parts=parts, versions=_versions(parts), dim=1 - made.dim)
    return Chain(parts=parts[::-1], versions=_versions(parts[::-1]))


def _shape(made: Derivation) -> tuple[int, int]:
    if isinstance(made, Joined):
        sizes = [
            sum(part.shape[dim] for part in made.parts) if dim == made.dim else made.parts[0].shape[dim]
            for dim in (0, 1)
        ]
        return sizes[0], sizes[1]
    return made.parts[0].shape[0], made.parts[-1].shape[1]


def _versions(parts: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(map(version, parts))


def _picked(operation: Operation, left: Tensor, part: Tensor, leaf: View) -> Picked | None:
    """Return ``left`` as rows and columns of ``part``, not much fewer of them."""
    if left.ndim != 2 or part.ndim != 2 or not 2 * left.numel() >= part.numel() > 0 or part.is_meta:
        return None
    count, width = part.shape
    numbers = torch.arange(count * width, device=part.device).view(count, width)
    places: Tensor = operation.run(lambda tensor: numbers if leaf(tensor) is part else tensor)
    rows, columns = places[:, 0] // width, places[0] % width
    if not torch.equal(places, rows[:, None] * width + columns):
        return None
    return Picked(parts=(part,), versions=_versions((part,)), rows=rows, columns=columns)


def _sum(operation: Operation, left: Tensor, parts: Sequence[Tensor], leaf: View) -> Sum | None:
    """Return ``left`` as a sum of ``parts``, by two products with the transposed Jacobian."""
    own = {id(part): part.detach().requires_grad_() for part in parts}
    drawing = [left.device] if left.is_cuda else []
    with torch.enable_grad(), torch.random.fork_rng(drawing):
        again = operation.run(lambda tensor: own.get(id(leaf(tensor)), tensor))
    if not again.requires_grad or again.is_meta:
        return None
    eps = _ROUNDING * torch.finfo(left.dtype).eps
    leaves, probe = list(own.values()), _probe(again, seed=0)
    first = torch.autograd.grad(again, leaves, probe, retain_graph=True, allow_unused=True, materialize_grads=True)
    # most functions show in a corner that they are not linear, before anything more of their size is made
    if any(_constant(_corner(pulled) / _corner(probe), eps) is None for pulled in first):
        return None
    scales = [_constant(pulled / probe, eps) for pulled in first]
    probe = _probe(again, seed=1)
    second = torch.autograd.grad(again, leaves, probe, allow_unused=True, materialize_grads=True)
    terms: list[tuple[Tensor, Tensor]] = []
    rest, size = left.detach().clone(), left.detach().abs()
    for part, scale, pulled in zip(parts, scales, second, strict=True):
        wanted = None if scale is None else scale * probe
        if scale is None or wanted is None or not bool(((pulled - wanted).abs() <= eps * wanted.abs()).all()):
            return None
        if bool(scale.any()):
            terms.append((scale, part))
            rest -= scale * part.detach()
            size += (scale * part.detach()).abs()
    if not terms:
        return None
    is_rounding = bool((rest.abs() <= eps * size).all())
    chosen = tuple(part for _, part in terms)
    return Sum(
        parts=chosen,
        versions=_versions(chosen),
        scales=tuple(scale for scale, _ in terms),
        rest=None if is_rounding else rest,
    )


def _probe(like: Tensor, seed: int) -> Tensor:
    """Numbers of both signs, none of them near zero: 0.5 to 1.5 in magnitude."""
    generator = torch.Generator(like.device).manual_seed(seed)
    drawn = torch.empty(like.shape, dtype=like.dtype, device=like.device).uniform_(-1.0, 1.0, generator=generator)
    return drawn.add_(drawn.sign().add_(drawn == 0), alpha=0.5)


def _corner(entries: Tensor) -> Tensor:
    """A few numbers of each dimension."""
    return entries[tuple(slice(0, _CORNER) for _ in entries.shape)]


def _constant(entries: Tensor, eps: float) -> Tensor | None:
    """Return one number, one a row or one a column that all ``entries`` are, up to rounding; None if none is."""
    if not entries.numel():
        return None
    dims: tuple[tuple[int, ...], ...] = (tuple(range(entries.ndim)),)
    if entries.ndim == 2:
        dims += ((1,), (0,))
    for along in dims:
        mean = entries.mean(along, keepdim=True)
        if bool(((entries - mean).abs() <= eps * mean.abs()).all()):
            return mean.reshape(()) if len(along) == entries.ndim else mean
    return None


def _structured(scale: Tensor) -> Tensor | None:
    """Reduce ``scale`` to one number a row (rows, 1) or one a column (1, columns); None where it is neither."""
    alike = [size == 1 or stride == 0 for size, stride in zip(scale.shape, scale.stride(), strict=True)]
    if scale.ndim != 2 or not any(alike):
        return None
    return scale[:, :1] if alike[1] else scale[:1]
