"""The result of a check: of one layer, and of one batch."""

from dataclasses import dataclass, replace

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
