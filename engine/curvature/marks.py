"""Marks: what interception knows of each tensor in the current forward pass, kept on the tensor itself."""

from dataclasses import dataclass

from torch import Tensor

from engine.curvature.calls import version
from engine.curvature.provenance import Rows

_MARK = "kronoscope"


@dataclass(frozen=True)
class Mark:
    """What is known of one tensor."""

    epoch: object
    sources: frozenset[str] | None = None
    """The parameters that it was made of alone; None for data."""
    rows: Rows | None = None
    """Of data, where its examples are, if that is known."""
    expansion: Tensor | None = None
    """Of a repetition: the same numbers as an expansion, by whose strides its copies are known to be alike."""
    version: int = 0
    """Writes to the tensor until the expansion was made."""


class Marks:
    """The marks of one forward pass; those of earlier passes do not count."""

    def __init__(self) -> None:
        self._epoch = object()

    def begin(self) -> None:
        """Forget all marks."""
        self._epoch = object()

    def of(self, tensor: Tensor) -> Mark | None:
        """Return the tensor's mark, if it has one of this pass."""
        mark = vars(tensor).get(_MARK)
        return mark if isinstance(mark, Mark) and mark.epoch is self._epoch else None

    def put(
        self,
        tensor: Tensor,
        sources: frozenset[str] | None = None,
        rows: Rows | None = None,
        expansion: Tensor | None = None,
    ) -> None:
        """Mark ``tensor`` in the place of what was known of it."""
        written = 0 if expansion is None else version(tensor)
        vars(tensor)[_MARK] = Mark(self._epoch, sources, rows, expansion, written)

    def expanded(self, tensor: Tensor) -> Tensor:
        """Return the expansion of a repetition that has not been written to since; any other tensor itself."""
        mark = self.of(tensor)
        if mark is None or mark.expansion is None or mark.version != version(tensor):
            return tensor
        return mark.expansion


def alike_along(tensor: Tensor, examples: int) -> int | None:
    """Return the one dimension along which ``tensor`` holds ``examples`` copies; None where none or several do."""
    sizes = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    alike = [dim for dim, (size, stride) in sizes if stride == 0 and size == examples > 1]
    return alike[0] if len(alike) == 1 else None
