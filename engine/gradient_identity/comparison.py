"""Comparison: the differences between the rows of two recordings."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.gradient_identity.recorded_rows import ExampleRows, Recording
from engine.layers.coverage import DeclaredLayer, declare
from engine.layers.layer import TreatedLayer

FAILED_CHECK = "gradient_identity"
"""Reason of a layer whose rows are not the gradient of each example alone."""
MIXED_EXAMPLES = "examples_mix"
"""The same where the model's outputs for one example depend on the others."""
Proof = str
"""`alone`, `single` (batches of one example), `inputs` (no gradients), or `same_forward`."""


@dataclass(frozen=True, kw_only=True)
class LayerCheck:
    """The result of a check of one layer."""

    error: float
    """The largest relative difference."""
    identity: str
    """The identity that it is of: `completeness`, `independence` or `sums`."""
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
        mixing = "what the model returns for one example depends on the others"
        if self.mixes and self.error == 0:
            return f"{mixing}, and with it the gradient of its loss"
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


@dataclass
class Errors:
    """Largest relative differences of one layer so far."""

    completeness: float = 0.0
    independence: float = 0.0

    def raise_to(self, identity: str, value: float) -> None:
        """Note one more difference."""
        if math.isnan(value):
            value = math.inf
        setattr(self, identity, max(getattr(self, identity), value))

    @property
    def largest(self) -> tuple[float, str]:
        """The larger difference, and the identity that it belongs to."""
        return max((self.completeness, "completeness"), (self.independence, "independence"))


def compare_rows(errors: Errors, together: ExampleRows, alone: ExampleRows, *, floor: float) -> None:
    """Note how far one example's rows in a batch are from those in another recording."""
    picks = together.recorder.picks
    for own, theirs in ((ExampleRows.inputs, 0.0), (ExampleRows.gradients, floor)):
        # a call that none of an example's rows enter is not a call of the example alone
        mine, plain = ([rows.reshape(-1) for rows in own(side) if rows.numel()] for side in (together, alone))
        if own is ExampleRows.gradients and not (mine and plain):
            # no gradient at all is one of zeros
            rest = [rows for rows in (*mine, *plain) if bool(rows.any())]
            errors.raise_to("independence", max((relative(rows, rows, theirs) for rows in rest), default=0.0))
            continue
        if [rows.numel() for rows in mine] != [rows.numel() for rows in plain]:
            errors.raise_to("independence", math.inf)
            continue
        widths = [rows.shape[-1] for rows in own(together) if rows.numel()] if picks else []
        for place, (a, b) in enumerate(zip(mine, plain, strict=True)):
            error = _difference(a, b, theirs)
            if error and picks:
                # who picks rows may pick those of one example in another order, which no sum depends on
                a, b = (_sorted(rows.view(-1, widths[place])) for rows in (a, b))  # noqa: PLW2901
                error = min(error, _difference(a, b, theirs))
            errors.raise_to("independence", error)


def _difference(a: Tensor, b: Tensor, floor: float) -> float:
    return relative(a - b, b, floor) if a.is_floating_point() else float((a != b).any())


def _sorted(rows: Tensor) -> Tensor:
    """Rows (T, d) in an order that depends on their numbers alone."""
    weights = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=torch.float64).sin()
    return rows[(rows.to(torch.float64) @ weights).argsort()]


Sketch = tuple[tuple[int, float, float], ...]
"""Size, Frobenius norm and bilinear form of each call's input and gradient."""


def sketch(rows: ExampleRows) -> Sketch:
    """Sum up one example's rows in few numbers, by which they are known again."""
    found = []
    for each in (*rows.inputs(), *rows.gradients()):
        if not each.numel():
            found.append((0, 0.0, 0.0))
            continue
        real = torch.view_as_real(each) if each.is_complex() else each
        wide = real if real.is_floating_point() else real.to(torch.float64)
        matrix = wide.reshape(-1, wide.shape[-1]) if wide.ndim else wide.reshape(1, 1)
        left, right = (torch.arange(1.0, 1 + size, device=wide.device).sin_().to(wide.dtype) for size in matrix.shape)
        found.append((each.numel(), float(torch.linalg.vector_norm(matrix)), float(left @ (matrix @ right))))
    return tuple(found)


def is_known(own: Sketch, known: Sketch, tolerance: float) -> bool:
    """Tell whether rows are those that were seen before, by their sketches."""
    if [each[0] for each in own] != [each[0] for each in known]:
        return False
    return all(
        abs(norm - before) <= tolerance * before and abs(form - earlier) <= tolerance * before
        for (_, norm, form), (_, before, earlier) in zip(own, known, strict=True)
    )


def is_finite(recording: Recording) -> bool:
    """Tell whether all gradients of a recording are finite."""
    arrived = [gradient for each in recording.layers.values() for _, gradient in each.met]
    arrived += [each.example_gradients for each in recording.layers.values() if each.example_gradients is not None]
    return all(bool(gradient.isfinite().all()) for gradient in arrived)


def relative(difference: Tensor, plain: Tensor, floor: float = 0.0) -> float:
    """Compute ``‖difference‖ / (‖plain‖ + floor)``.

    Args:
        difference: A tensor of any shape.
        plain: The tensor that it is relative to, of any shape.
        floor: Norm that is added, not negative.

    Returns:
        The quotient; 0 where the difference is zero, and infinite where only the denominator is.
    """
    size = float(torch.linalg.vector_norm(difference))
    if size == 0:
        return 0.0
    scale = float(torch.linalg.vector_norm(plain))
    return size / (scale + floor) if scale + floor > 0 else math.inf


def refusal(layer: TreatedLayer, check: LayerCheck) -> DeclaredLayer:
    """Turn a layer that failed its check into one that is not covered.

    Args:
        check: Its failed check.

    Returns:
        The layer with the reason that its examples mix, or that the gradient identity failed, and the numbers of the
        check.
    """
    return replace(declare(layer, MIXED_EXAMPLES if check.mixes else FAILED_CHECK), why=check.why)
