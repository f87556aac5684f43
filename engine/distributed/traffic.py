"""Traffic: bytes that one rank sends and receives, by layer and operation, and bytes that it holds afterwards.

A byte counts where it leaves for another rank, or comes from one; what a rank keeps for itself moves nowhere.
Protocol (counts, outcomes, first batches) is not counted: it does not grow with the layers' sizes.
"""

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Moved:
    """Bytes of one operation on one layer."""

    sent: int = 0
    received: int = 0


@dataclass
class Traffic:
    """Bytes of one rank in one job."""

    moved: dict[tuple[str, str], Moved] = field(default_factory=lambda: defaultdict(Moved))
    """By layer and operation."""
    held: dict[tuple[str, str], int] = field(default_factory=dict)
    """Bytes that stay with this rank after a reduction, by layer and side."""
    reductions: dict[str, str] = field(default_factory=dict)
    """How each layer's G was reduced."""
    positions: dict[str, int] = field(default_factory=dict)
    """Positions of this rank alone that entered each layer's A."""

    def count(self, layer: str, operation: str, *, sent: int, received: int) -> None:
        """Add the bytes of one transfer.

        Args:
            layer: The layer's name.
            operation: Name of the operation.
            sent: Bytes that leave for other ranks.
            received: Bytes that come from them.
        """
        moved = self.moved[layer, operation]
        moved.sent += sent
        moved.received += received

    def sent_of(self, layer: str) -> int:
        """Return the bytes that a layer's reductions have sent.

        Args:
            layer: The layer's name.

        Returns:
            Bytes of all its operations.
        """
        return sum(moved.sent for (name, _), moved in self.moved.items() if name == layer)

    def total(self, operation: str | None = None) -> Moved:
        """Return the bytes of all layers.

        Args:
            operation: The only operation that counts; None counts all.

        Returns:
            The sums of bytes sent and received.
        """
        found = [moved for (_, name), moved in self.moved.items() if operation in (None, name)]
        return Moved(sum(each.sent for each in found), sum(each.received for each in found))
