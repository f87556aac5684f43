"""Functional linear layers: a parameter, or a slice of one, that a model multiplies by without a module.

``nn.MultiheadAttention`` keeps the projections of queries, keys and values in one parameter, a
mixture of experts keeps all its experts in one; each slice that enters a product of its own is a
layer of its own, named after the parameter.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.layers.layer import TreatedLayer
from engine.layers.linear import LinearLayer
from engine.layers.parameter_slice import Place, label_of


@dataclass(eq=False)
class FunctionalLinearLayer(LinearLayer):
    """``y = W a + b`` where W and b are places in parameters.

    An expert sees the tokens routed to it, so its A divides by those; its G divides by all loss
    terms like every other: the block of the *mean* loss sums over the routed tokens only, and what
    is missing from the sum is missing from A's count and from G's sum alike.
    """

    into: int
    """Features of ``a``."""
    out: int
    """Features of ``g``."""
    weight_place: Place | None
    """W (out, in); None where it is not trainable."""
    bias_place: Place | None
    """b (out,); None where there is none, or it is not trainable."""
    tensors: Mapping[str, Tensor]
    """The parameters, by name."""
    routed: bool = False
    """One of several alike in one parameter, of which the data choose."""

    @property
    def roles(self) -> tuple[TreatedLayer, ...]:
        """No module's call shows it."""
        return ()

    @property
    def reason_uncalled(self) -> str:
        """Experts are called by the tokens routed to them."""
        return "never_routed" if self.routed else "no_gradient"

    @property
    def watched(self) -> Mapping[str, Tensor]:
        """The parameters, of any shape, that its weight and bias are places in, by name."""
        return self.tensors

    @property
    def fan_in(self) -> int:
        """Columns of W."""
        return self.into

    @property
    def fan_out(self) -> int:
        """Rows of W."""
        return self.out

    @property
    def parameters(self) -> tuple[str, ...]:
        """Qualified names of the parameters, or of the parts of them, that it covers, weight first."""
        places = (self.weight_place, self.bias_place)
        return tuple(label_of(place, self.tensors[place.parameter]) for place in places if place is not None)

    def batch_first(self, entered: Tensor, examples: int) -> bool:
        """Tell that rows can be told apart by example: the provenance of what enters shows it, not its shape.

        Args:
            entered: The input of a product, shape (P, d_in); not looked at.
            examples: Examples N of the batch; not looked at.

        Returns:
            True.
        """
        del entered, examples
        return True
