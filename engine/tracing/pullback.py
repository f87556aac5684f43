"""The pullback from gradients of tensors made of parameters to those of the parameters, by example.

Every use of a derived tensor brings its gradient by example: of a copy for each example, or of the
result of an operation that is run again (see ``contributions``). Autograd takes it back through the
operations that made the derived tensor. The gradient of one example is the sum over all uses, so uses
of the same parameters are taken together, a few examples at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.layers.parameter_slice import place_of
from engine.memory.out_of_memory import is_unexplained
from engine.model.torch_functions import Operation
from engine.tracing.example_contributions import Contribution, examples_at_once
from engine.tracing.tensor_marks import Marks


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A tensor made of parameters alone."""

    tensor: Tensor
    names: frozenset[str]
    """Names of the parameters."""


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """The gradient of one use."""

    derived: tuple[Derived, ...]
    gradient: Tensor
    """By example (N, *shape) of the one ``derived``, or of the result of ``contribution``."""
    contribution: Contribution | None = None
    example: int | None = None
    """The one example that ``gradient`` is of, with no dimension for it; None where it is by example."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all parameters that the tensors were made of."""
        return frozenset().union(*(each.names for each in self.derived))

    def of_examples(self, start: int, stop: int) -> Tensor:
        """Return the gradients of the examples from ``start`` to ``stop``, shape (stop − start, *shape).

        Zeros for the others of a use by one example alone.
        """
        if self.example is None:
            return self.gradient[start:stop]
        gradients = self.gradient.new_zeros(stop - start, *self.gradient.shape)
        gradients[self.example - start] = self.gradient
        return gradients


def detach_data(
    operation: Operation, marks: Marks, leaf: Callable[[Tensor], Tensor]
) -> tuple[Operation, list[Derived]]:
    """Bring an operation into a form that outlives the forward pass.

    Args:
        operation: An operation of derived tensors and data, of any shapes.
        marks: Marks of the pass.
        leaf: What stands for a derived tensor in operations of our own.

    Returns:
        The operation with its data detached, and its derived tensors, each once.
    """
    plain: dict[int, Tensor] = {}
    derived: list[Derived] = []
    for tensor in operation.tensors:
        if id(tensor) not in plain:
            names = marks.sources(tensor)
            plain[id(tensor)] = leaf(tensor) if names else tensor.detach()
            if names:
                derived.append(Derived(tensor=plain[id(tensor)], names=names))
    return operation.with_tensors(lambda tensor: plain[id(tensor)]), derived


class Pullback:
    """Gradients of parameters, by name, from those of what was made of them."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self.arrived: list[Arrived] = []
        self.leaves: dict[str, Tensor] = {}
        """Leaves that the derived tensors of one forward pass are made of, by parameter."""
        self.escaped: set[str] = set()
        """Parameters that a gradient reached by a way on which nothing was seen."""

    def begin(self) -> None:
        """Prepare for one forward pass."""
        self.arrived.clear()
        self.escaped.clear()
        self.leaves = {name: parameter.detach().requires_grad_() for name, parameter in self._parameters.items()}
        for name, leaf in self.leaves.items():
            leaf.register_post_accumulate_grad_hook(partial(self._escape, name))  # type: ignore[no-untyped-call]

    def _escape(self, name: str, leaf: Tensor) -> None:
        leaf.grad = None
        self.escaped.add(name)

    def close(self, examples: int) -> Iterator[tuple[str, int, Tensor] | Arrived]:
        """Close one backward pass.

        Args:
            examples: Examples N of the pass.

        Yields:
            Name of a parameter, first example, and gradients of the examples from there on, shape (n, numbers); in
            their place a use that is not the operation of each example alone.

        Memory:
            Three times the gradients of a few examples, of those parameters together that were used together.
        """
        arrived, self.arrived = self.arrived, []
        for names, together in _connected(arrived):
            step = examples_at_once(examples, sum(self._parameters[name].numel() for name in names))
            for start in range(0, examples, step):
                totals: dict[str, Tensor] = {}
                for each in together:
                    if not self._add_(totals, each, start, min(start + step, examples)):
                        yield each
                while totals:
                    name = next(iter(totals))
                    yield name, start, totals.pop(name)

    def _add_(self, totals: dict[str, Tensor], arrived: Arrived, start: int, stop: int) -> bool:
        """Add what one use gives the examples from ``start`` to ``stop``; False where it gives nothing that holds."""
        if arrived.example is not None and not start <= arrived.example < stop:
            return True
        parts: Sequence[Tensor] | None = [arrived.of_examples(start, stop)]
        if arrived.contribution is not None:
            parts = arrived.contribution.gradients(arrived.gradient, start, stop)
        if parts is None:
            return False
        try:
            own = [
                each
                for derived, gradient in zip(arrived.derived, parts, strict=True)
                for each in self._pulled_back(derived, gradient)
            ]
        except RuntimeError as error:
            if not is_unexplained(error):
                raise
            # what the parameters were made into has no graph, or a function of the model's own failed in it
            return False
        for name, part in own:
            totals[name] = totals[name].add_(part) if name in totals else part
        return True

    def _pulled_back(self, derived: Derived, gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Gradients with respect to the parameters from that of what was made of them, (n, *shape)."""
        names = sorted(derived.names)
        place = place_of(derived.tensor, self._parameters[names[0]], names[0]) if len(names) == 1 else None
        if place is not None:
            alike = [1 + dim for dim, stride in enumerate(place.strides) if stride == 0]
            summed = gradient.sum(alike, keepdim=True) if alike else gradient
            count = self._parameters[names[0]].numel()
            total = gradient.new_zeros(gradient.shape[0], count)
            total.as_strided(summed.shape, (count, *place.strides), place.offset).add_(summed)
            yield names[0], total
            return
        leaves = [self.leaves[name] for name in names]
        # one after the other: what a model writes itself need not know of batches of gradients
        gradients: dict[str, Tensor] = {}
        for place_in, each in enumerate(gradient):
            own = torch.autograd.grad(derived.tensor, leaves, each, retain_graph=True, allow_unused=True)
            for name, part in zip(names, own, strict=True):
                if part is not None:
                    if name not in gradients:
                        gradients[name] = part.new_zeros(gradient.shape[0], part.numel())
                    gradients[name][place_in] = part.flatten()
        yield from gradients.items()


def _connected(arrived: Sequence[Arrived]) -> Iterator[tuple[frozenset[str], list[Arrived]]]:
    """Uses of the same parameters, directly or through others, with the names of those."""
    groups: list[tuple[frozenset[str], list[Arrived]]] = []
    for each in arrived:
        apart = [group for group in groups if group[0].isdisjoint(each.names)]
        joined = [group for group in groups if not group[0].isdisjoint(each.names)]
        names = each.names.union(*(own for own, _ in joined))
        groups = [*apart, (names, [*(one for _, own in joined for one in own), each])]
    yield from groups
