"""Shared inputs: a check that layers that shared one A in the dry run are still fed by one tensor."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from engine.errors import Unwinding
from engine.row_layout.layer_calls import version


class SharingBroken(Unwinding):
    """Layers that shared their input with another in the dry run no longer do."""

    def __init__(self, followers: tuple[str, ...]) -> None:
        super().__init__(", ".join(followers))
        self.followers = followers


@dataclass(frozen=True)
class _Entered:
    """The last input of a sharing layer."""

    tensor: "weakref.ref[Tensor]"
    version: int
    masked: bool


@dataclass
class Sharing:
    """Compares the inputs of layers that share A, in every batch."""

    _pairs: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """(follower, leader) of every pair that a layer belongs to."""
    _seen: dict[str, _Entered] = field(default_factory=dict)

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> "Sharing":
        """Make the check of some pairs of layers.

        Args:
            pairs: Names of a follower and its leader, whose A the follower shares.

        Returns:
            A check that has seen no call yet.
        """
        sharing = cls()
        for pair in pairs:
            for name in pair:
                sharing._pairs.setdefault(name, []).append(pair)
        return sharing

    def begin(self) -> None:
        """Prepare for one batch."""
        self._seen.clear()

    def check(self, name: str, entered: Tensor, *, masked: bool) -> None:
        """Compare the input of a layer with what the layers that share its A were called with.

        Args:
            name: Name of the layer.
            entered: Its input, of any shape; only its identity counts.
            masked: Whether a mask is laid on this call.

        Raises:
            SharingBroken: If that was another tensor, the same one since overwritten, one of which other positions
                count, or a second call.
        """
        again = name in self._seen
        self._seen[name] = _Entered(weakref.ref(entered), version(entered), masked)
        broken = tuple(
            follower for follower, leader in self._pairs.get(name, ()) if again or self._differ(follower, leader)
        )
        if broken:
            raise SharingBroken(broken)

    def end(self) -> None:
        """Close one batch.

        Raises:
            SharingBroken: If only one of two layers that share A was called.
        """
        broken = tuple(
            follower
            for name, pairs in self._pairs.items()
            for follower, leader in pairs
            if name == follower and (follower in self._seen) != (leader in self._seen)
        )
        if broken:
            raise SharingBroken(broken)

    def _differ(self, left: str, right: str) -> bool:
        one, other = self._seen.get(left), self._seen.get(right)
        if one is None or other is None:
            return False  # not yet called; ``end`` looks again
        return one.tensor() is not other.tensor() or (one.version, one.masked) != (other.version, other.masked)
