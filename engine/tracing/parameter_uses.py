"""Uses of parameters in a forward pass: the products they enter, and the interface that is told of them."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.layers.parameter_slice import Place
from engine.tracing.batch_provenance import Rows


@dataclass(frozen=True, kw_only=True)
class Product:
    """One product of data with a trainable matrix: ``left = entered Wᵀ + b``."""

    weight: Place | None
    bias: Place | None
    entered: Tensor
    rows: Rows
    left: Tensor


class Sink(Protocol):
    """Who is told what the parameters do."""

    def factorises(self, weight: Place | None, bias: Place | None) -> bool:
        """Whether products with a matrix and its bias are a layer of A and G."""

    def multiplied(self, product: Product) -> Tensor:
        """A matrix, or its bias, entered a product; returns what stands for its result from now on."""

    def broadcast(self, names: frozenset[str]) -> bool:
        """Parameters were broadcast over examples; returns whether their gradients are wanted."""

    def contributed(self, names: frozenset[str], numbers: int) -> bool:
        """Parameters entered an operation whose examples never meet; returns whether their gradients are wanted.

        ``numbers`` of each example are held until its gradient is there.
        """

    def expanded(self, names: frozenset[str], *, examples: int) -> bool:
        """Parameters have one dimension as long as there are ``examples``, all alike: are those the examples?"""

    def strange(self, names: frozenset[str], operation: str) -> None:
        """Parameters entered an operation that is not understood."""
