"""Call shapes: the sizes with which a batch calls each layer, in terms of those of the model's inputs.

Texts of another length have another size everywhere, and still the same shape in these terms; texts as
long as there are examples have another one, and that is where positions are mistaken for examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class CallShapes:
    """The shapes since they were last taken."""

    _found: set[str] = field(default_factory=set)
    _examples: int = 1
    _sizes: dict[int, str] = field(default_factory=dict)
    """Sizes that the model's inputs have, by what they are the size of."""

    def begin(self, examples: int, inputs: Sequence[Tensor]) -> None:
        """Prepare for a forward pass.

        Args:
            examples: Examples N of the batch.
            inputs: Tensors that enter the model, of any shapes; a size that is one of theirs is written as that.
        """
        self._examples = examples
        self._sizes = {size: f"in{axis}" for each in inputs for axis, size in enumerate(each.shape)}
        self._sizes[examples] = "N"

    def note(self, layer: str, number: int, entered: Tensor, *, picked: bool = False) -> None:
        """Note the shape of one call.

        Args:
            layer: Name of the called layer.
            number: How often it was called before in this pass.
            entered: Its input, of any shape.
            picked: The number of rows is decided by the data, as an expert's is, and is not written.
        """
        first, *others = entered.shape or (1,)
        sizes = ["rows" if picked else self._written(first), *map(self._written, others)]
        self._found.add(f"{layer}#{number}({','.join(sizes)})")

    def take(self) -> frozenset[str]:
        """Return what was found, and begin anew."""
        shapes, self._found = frozenset(self._found), set()
        return shapes

    def _written(self, size: int) -> str:
        name = self._sizes.get(size)
        if name is not None:
            return name
        factor = self._sizes.get(size // self._examples) if size % self._examples == 0 else None
        return str(size) if factor is None else f"N*{factor}"
