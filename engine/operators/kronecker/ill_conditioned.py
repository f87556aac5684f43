"""The report of an ill-conditioned layer: its eigenvalues reach further than the arithmetic resolves."""

from dataclasses import dataclass

import torch

_LEAST_SHARES = {torch.float64: 1e-12}
"""In float64 a solve at a condition of 1e12 keeps about three digits; of float32 none are left at its rounding."""


def least_share(dtype: torch.dtype) -> float:
    """Return the smallest eigenvalue, as a share of the largest, below which a negative power is reported."""
    return _LEAST_SHARES.get(dtype) or float(torch.finfo(dtype).eps)


@dataclass(frozen=True, kw_only=True)
class IllConditioned:
    """A layer that was raised to a negative power though ``smallest < least_share · largest``."""

    layer: str
    exponent: float
    """The power of the damped curvature M, negative."""
    smallest: float
    """The smallest eigenvalue of M, or a lower bound of it; below zero where the rounding of its factors exceeds the
    damping."""
    largest: float
    """The largest, or an upper bound of it."""
    residual: float
    """``‖M^(−α) x − v‖ / ‖v‖`` of the very product ``x = M^α v``, over the layer's numbers."""
    dtype: torch.dtype
    """Precision of the arithmetic."""

    def __str__(self) -> str:
        """Say what was seen, and what helps."""
        wider = "" if self.dtype == torch.float64 else ", or vectors in float64"
        return (
            f"layer `{self.layer}`: the smallest eigenvalue of its damped curvature, {self.smallest:.3g}, must be at "
            f"least {least_share(self.dtype):.2g} of its largest, {self.largest:.3g}; its power {self.exponent:g} has "
            f"a relative residual of {self.residual:.2g}: take a larger damping{wider}"
        )
