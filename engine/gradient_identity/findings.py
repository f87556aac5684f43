"""Findings: the differences that the identities show of one batch, those allowed, and the result of each layer."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from engine.gradient_identity.recorded_rows import Errors
from engine.layers.coverage import DeclaredLayer, declare
from engine.layers.layer import TreatedLayer

FAILED_CHECK = "gradient_identity"
"""Reason of a layer whose rows are not the gradient of each example alone."""
MIXED_EXAMPLES = "examples_mix"
"""The same where the model's outputs for one example depend on the others."""
UNREPEATABLE = "not_repeatable"
"""The same where the same batch gives other rows when it is run again, with all generators as before."""
Proof = str
"""`alone`, `single` (batches of one example), `inputs` (no gradients), or `same_forward`."""


@dataclass(frozen=True, kw_only=True)
class LayerCheck:
    """The result of a check of one layer."""

    error: float
    """The largest relative difference."""
    identity: str
    """The identity that it is of: `completeness`, `independence`, `repetition`, `outputs` or `sums`."""
    examples: int
    """Examples held against themselves alone."""
    proof: Proof
    """The gradients that the rows were compared with."""
    failed: bool
    mixes: bool = False
    """The model's outputs for one example depend on the others."""
    tolerance: float | None = None
    """The tolerance of the check that decided, where that is above the one of float64; else None."""
    tolerance_reason: str | None = None
    """Why the tolerance is above it."""

    @property
    def why(self) -> str:
        """The identity that failed, for a layer that is not covered."""
        if self.identity == "sums":
            return (
                f"its sums differ from the rows of the first batch by {self.error:.2g} (sums of the gradient identity)"
            )
        if self.identity == "repetition":
            return (
                "the same batch, run again from the same state of the generators of torch, numpy and Python, gives "
                "other rows: the model draws from another generator, or keeps something from one call to the next"
            )
        mixing = "what the model returns for one example depends on the others"
        if self.identity == "outputs":
            far = f", by {self.error:.2g}," if math.isfinite(self.error) else ""
            return f"{mixing}{far} and with it what is pulled back of its loss"
        against = "each example alone" if self.proof != "same_forward" else "plain autograd in the same forward pass"
        if self.proof == "same_forward" and self.identity == "independence":
            against = "each example's own beside other examples"
        mixing = f"; {mixing}" if self.mixes else ""
        return f"its rows differ from {against} by {self.error:.2g} ({self.identity} of the gradient identity){mixing}"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of a check of one batch."""

    layers: dict[str, LayerCheck]
    draws: frozenset[str]
    """Layers whose rows change from one run to the next."""
    unseen: frozenset[str]
    """Names of parameters, covered by no layer, whose gradient is not zero."""
    largest_norm: float = 0.0
    """Norm of the largest layer's gradient of one example."""


def worse(before: LayerCheck | None, now: LayerCheck) -> LayerCheck:
    """Take two checks of one layer as one."""
    if before is None:
        return now
    worst = now if now.failed or now.error > before.error else before
    loosest = max(before, now, key=lambda each: each.tolerance or 0.0)
    return replace(
        worst,
        examples=before.examples + now.examples,
        tolerance=loosest.tolerance,
        tolerance_reason=loosest.tolerance_reason,
    )


def refusal(layer: TreatedLayer, check: LayerCheck) -> DeclaredLayer:
    """Turn a layer that failed its check into one that is not covered, with the numbers of the check.

    The reason is that its rows cannot be repeated, that its examples mix, or that the gradient identity failed.
    """
    reason = UNREPEATABLE if check.identity == "repetition" else MIXED_EXAMPLES if check.mixes else FAILED_CHECK
    return replace(declare(layer, reason), why=check.why)


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
    idle: frozenset[str] = frozenset()
    """Layers that no gradient reached, for which no direction is the wrong one."""
    unseen: set[str] = field(default_factory=set)
    mixing: float = 0.0
    """Largest relative difference between an example's outputs beside others and alone."""
    directions: float = 0.0
    """The same of what the loss asks to be pulled back of them."""
    largest_norm: float = 0.0
    repeats: bool = True
    """The batch, run again from the same state, has given the same rows; true where that was not asked."""

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
