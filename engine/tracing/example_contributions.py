"""Contributions: the gradient of each example with respect to a tensor made of parameters, from one operation.

Where no two examples meet in ``y = f(w, x)``, the part of example n is ``y_n = f(w, x_n)``, and what its
gradient adds to that of ``w`` is ``(∂f(w, x_n)/∂w)ᵀ ∂ℓ/∂y_n``. The operation is run again on the slice of
each example alone, whatever it is, and autograd pulls the gradient back. That the slices are the
examples' is not assumed: each result is compared with its slice of ``y``.

This needs no rule for an operation, at the price of running it once more for each example; products and
normalisations, for which there is a rule, do not come here.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.model.sharding.gathering import holding
from engine.model.torch_functions import Operation, tensors_of
from engine.tracing.batch_provenance import Rows

_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)
"""Errors that an operation raises on shapes that it does not take."""
_ROUNDING = 2.0**10
"""Times the unit of rounding that an example alone may differ from its slice, relative to the largest number."""
_NUMBERS_AT_ONCE = 2**22
"""Numbers of the gradients of some examples that are made together."""


def examples_at_once(examples: int, numbers: int) -> int:
    """Return how many examples are pulled back together, so that gradients of ``numbers`` each are some 4 million."""
    return max(1, min(examples, _NUMBERS_AT_ONCE // max(numbers, 1)))


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One operation that tensors made of parameters entered beside data."""

    operation: Operation
    """With the data detached."""
    derived: tuple[Tensor, ...]
    """The tensors among its arguments that were made of parameters."""
    rows: Mapping[int, Rows]
    """Rows of its other tensors, by identity; none for a tensor that all examples share."""
    own: Mapping[int, Rows]
    """Rows of those in ``derived`` that hold a part for each example, by identity."""
    left: Tensor
    """The result, detached."""
    left_rows: Rows
    examples: int
    versions: tuple[int, ...]
    """Writes to the operation's tensors and to the result, up to now."""
    autocast: tuple[str, torch.dtype] | None

    @property
    def numbers(self) -> int:
        """Numbers of one example that are held until its gradient is there: what entered, the result, its gradient."""
        entered = sum(tensor.numel() for tensor in self.operation.tensors if id(tensor) in self.rows)
        return -(-(entered + 2 * self.left.numel()) // self.examples)

    def holds(self) -> bool:
        """Tell whether each example alone gives its slice of the result."""
        leaves = {id(tensor): tensor for tensor in self.derived}
        with torch.no_grad():
            return all(self._agrees(example, self._alone(example, leaves)) for example in range(self.examples))

    def gradients(self, gradient: Tensor, start: int, stop: int) -> list[Tensor] | None:
        """Return the gradient of each of ``derived`` by example.

        Args:
            gradient: Gradient of the result, of its shape, its examples where the result's are.
            start: The first example.
            stop: The example after the last one.

        Returns:
            One tensor (n, *shape) for each of ``derived``, n = stop − start; None where an example alone does not give
            its slice, or what entered was overwritten.
        """
        with holding(self.operation.tensors):
            return self._gradients(gradient, start, stop)

    def _gradients(self, gradient: Tensor, start: int, stop: int) -> list[Tensor] | None:
        if self._versions() != self.versions[:-1]:
            # what entered was overwritten since
            return None
        # written into place one after the other: a list of them, and then their stack, would take twice the memory
        gradients = [tensor.new_empty(stop - start, *tensor.shape) for tensor in self.derived]
        for example in range(start, stop):
            leaves = {id(tensor): tensor.detach().requires_grad_() for tensor in self.derived}
            with torch.enable_grad():
                alone = self._alone(example, leaves)
            if not self._agrees(example, alone):
                return None
            part = self.left_rows.of_example(gradient, example, self.examples)
            wanted = list(leaves.values())
            own = torch.autograd.grad(alone, wanted, part.to(alone.dtype), allow_unused=True, materialize_grads=True)
            for made, each in zip(gradients, own, strict=True):
                made[example - start] = each
        return gradients

    def _alone(self, example: int, leaves: Mapping[int, Tensor]) -> Tensor:
        """Run the operation on the slice of one example."""

        def change(tensor: Tensor) -> Tensor:
            leaf, rows = leaves.get(id(tensor)), self.rows.get(id(tensor))
            if leaf is not None:
                rows, tensor = self.own.get(id(tensor)), leaf
            return tensor if rows is None else rows.of_example(tensor, example, self.examples)

        with _as(self.autocast):
            alone: Tensor = self.operation.run(change)
        return alone

    def _agrees(self, example: int, alone: Tensor) -> bool:
        expected = self.left_rows.of_example(self.left, example, self.examples)
        if alone.shape != expected.shape:
            return False
        if alone.is_meta or int(self.left._version) != self.versions[-1]:  # noqa: SLF001 - autograd's own guard
            # the result was overwritten since, and was compared before that or cannot be
            return True
        scale = max(float(expected.abs().max()) if expected.numel() else 0.0, torch.finfo(expected.dtype).tiny)
        close = float((alone.detach() - expected).abs().max()) if expected.numel() else 0.0
        return close <= _ROUNDING * torch.finfo(expected.dtype).eps * scale

    def _versions(self) -> tuple[int, ...]:
        return tuple(int(tensor._version) for tensor in self.operation.tensors)  # noqa: SLF001 - likewise


def takes_shapes_alone(operation: Operation, derived: Sequence[Tensor]) -> bool:
    """Tell whether no gradient flows from an operation, run once more, to those of its tensors made of parameters.

    True where it takes nothing but shapes and types from them, or returns nothing that has a gradient.
    """
    leaves = {id(tensor): tensor.detach().requires_grad_() for tensor in derived}
    with torch.enable_grad():
        left = operation.run(lambda tensor: leaves.get(id(tensor), tensor))
    return not any(result.requires_grad for result in tensors_of((left,)))


def find_contribution(
    operation: Operation,
    derived: Sequence[Tensor],
    rows: Mapping[int, Rows],
    left: object,
    examples: int,
) -> Contribution | None:
    """Return what tensors made of parameters add to the result of an operation.

    Args:
        operation: An operation with its data detached.
        derived: Those of its tensors that were made of parameters, of any shapes.
        rows: Where the examples of the data among its tensors are, by identity.
        left: What it returned.
        examples: N.

    Returns:
        The contribution; None where the result is not separable by example.
    """
    if not isinstance(left, Tensor) or not left.is_floating_point():
        return None
    if torch.is_grad_enabled() and not all(tensor.requires_grad for tensor in derived):
        # made where gradients were switched off: whether one flows is for its maker to know
        return None
    kind = left.device.type
    autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
    versions = tuple(int(tensor._version) for tensor in (*operation.tensors, left))  # noqa: SLF001 - autograd's own guard
    data = next((tensor for tensor in operation.tensors if id(tensor) in rows), None)
    if data is None:
        return None
    unplaced = Contribution(
        operation=operation,
        derived=tuple(derived),
        rows=rows,
        own={},
        left=left.detach(),
        left_rows=rows[id(data)],
        examples=examples,
        versions=versions,
        autocast=autocast,
    )
    parts = dict(_parts(derived, data, rows[id(data)]))
    for own in ({}, parts) if parts else ({},):
        placed = next(_placed(replace(unplaced, own=own), rows[id(data)]), None)
        if placed is not None:
            return placed
    return None


def _parts(derived: Sequence[Tensor], data: Tensor, rows: Rows) -> Iterator[tuple[int, Rows]]:
    """Yield the tensors as long as the data where those have their examples, which could hold a part for each."""
    for tensor in derived:
        dim = rows.dim + tensor.ndim - data.ndim
        if 0 <= dim < tensor.ndim and tensor.shape[dim] == data.shape[rows.dim] > 1:
            yield id(tensor), replace(rows, dim=dim)


def _placed(plain: Contribution, rows: Rows) -> Iterator[Contribution]:
    """Yield ``plain`` with the places of the examples in its result, where the first example alone fits."""
    leaves = {id(tensor): tensor.detach().requires_grad_() for tensor in plain.derived}
    try:
        with torch.enable_grad():
            alone: object = plain._alone(0, leaves)  # noqa: SLF001 - its own module
    except _REFUSALS:
        return
    if not isinstance(alone, Tensor) or not alone.requires_grad or alone.ndim != plain.left.ndim:
        return
    examples, sizes = plain.examples, plain.left.shape
    for dim in sorted(range(alone.ndim), key=lambda dim: (dim != rows.dim, dim)):
        others = all(sizes[place] == alone.shape[place] for place in range(alone.ndim) if place != dim)
        if not others:
            continue
        if rows.labels is not None:
            at = replace(rows, dim=dim) if sizes[dim] == rows.labels.shape[0] else None
        else:
            major = rows.size // (rows.minor * examples)
            fits = sizes[dim] == alone.shape[dim] * examples and alone.shape[dim] % major == 0
            at = Rows(dim=dim, minor=alone.shape[dim] // major, size=sizes[dim]) if fits else None
        if at is not None:
            placed = replace(plain, left_rows=at)
            if placed._agrees(0, alone):  # noqa: SLF001 - likewise
                yield placed


@contextlib.contextmanager
def _as(autocast: tuple[str, torch.dtype] | None) -> Iterator[None]:
    """Compute in the precision of the forward pass, which a backward pass has left."""
    if autocast is None:
        yield
        return
    kind, dtype = autocast
    with torch.autocast(kind, dtype=dtype, cache_enabled=False):
        yield
