"""The report of an ill-conditioned layer: its smallest eigenvalue lies below the rounding of its largest."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class IllConditioned:
    """A layer that was raised to a negative power though ``smallest < eps · largest``, eps that of the arithmetic."""

    layer: str
    exponent: float
    """The power of the damped curvature M, negative."""
    smallest: float
    """The smallest eigenvalue of M, or a lower bound of it."""
    largest: float
    """The largest, or an upper bound of it."""
    residual: float
    """``‖M^(−α) x − v‖ / ‖v‖`` of the very product ``x = M^α v``, over the layer's numbers."""

    def __str__(self) -> str:
        """Say what was seen, and what helps."""
        return (
            f"layer `{self.layer}`: the smallest eigenvalue of its damped curvature, {self.smallest:.3g}, is below the "
            f"rounding of its largest, {self.largest:.3g}; its power {self.exponent:g} has a relative residual of "
            f"{self.residual:.2g}: take a larger damping, or vectors in float64"
        )
