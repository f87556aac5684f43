"""Findings: the differences that the identities have shown of one batch, and those that are allowed."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from engine.gradient_identity.comparison import Errors, Proof
from engine.layers.layer import TreatedLayer


@contextlib.contextmanager
def watch_unused(parameters: Mapping[str, nn.Parameter], reached: Callable[[str], None]) -> Iterator[None]:
    """Say which parameters a gradient reaches; while none does, nothing is computed for them."""
    before = {name: (each.requires_grad, each.grad) for name, each in parameters.items()}
    names = {id(each): name for name, each in parameters.items()}
    handles = []

    def arrived(parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and bool((gradient != 0).any()):
            reached(names[id(parameter)])

    try:
        for each in parameters.values():
            each.grad = None
            each.requires_grad_()
            handles.append(each.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, (flag, gradient) in before.items():
            parameters[name].requires_grad_(flag)
            parameters[name].grad = gradient


@dataclass(kw_only=True)
class Findings:
    """The differences that the identities have shown of one batch, before they are judged."""

    errors: dict[str, Errors] = field(default_factory=dict)
    proof: dict[str, Proof] = field(default_factory=dict)
    draws: frozenset[str] = frozenset()
    unseen: set[str] = field(default_factory=set)
    mixing: float = 0.0
    """Largest relative difference between an example's outputs beside others and alone."""
    directions: float = 0.0
    """The same of what the loss asks to be pulled back of them."""
    largest_norm: float = 0.0

    def suspects(self, layers: Sequence[TreatedLayer], tolerance: float, *, outputs: bool) -> list[TreatedLayer]:
        """Choose the layers that are above the tolerance; all of them where the outputs are, and are to count."""
        mixing = (outputs and not self.mixing <= tolerance) or not self.directions <= tolerance
        known = [layer for layer in layers if layer.name in self.errors]
        return [layer for layer in known if mixing or not self.errors[layer.name].largest[0] <= tolerance]

    def of(self, names: Sequence[str]) -> "Findings":
        """Return the same of some layers, whose outputs are no concern of theirs."""
        return replace(self, errors={name: self.errors[name] for name in names}, mixing=0.0, directions=0.0)

    def forget(self, names: Sequence[str]) -> None:
        """Begin anew with the differences of some layers."""
        self.errors = {name: Errors() for name in names}
        self.unseen, self.mixing, self.directions, self.largest_norm = set(), 0.0, 0.0, 0.0


@dataclass(frozen=True)
class Allowance:
    """The relative differences that are allowed."""

    layers: Mapping[str, float]
    outputs: float
    decided: frozenset[str] = frozenset()
    """Layers that would have failed the tolerance of the job's precision."""
    reason: str | None = None
    """Why theirs are above those of float64."""
