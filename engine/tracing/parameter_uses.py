"""Uses of parameters in a forward pass: the products they enter, and the interface that receives them."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from engine.layers.layer import TreatedLayer
from engine.layers.parameter_slice import Place, place_of
from engine.row_layout.layer_calls import list_of
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
    """A receiver of what the watched parameters do."""

    def factorises(self, weight: Place | None, bias: Place | None) -> bool:
        """Decide whether products with a matrix, its bias, or both are a layer of A and G, here or in another pass."""

    def multiplied(self, product: Product) -> Tensor:
        """Receive a product that a matrix, or its bias, entered.

        Returns:
            What stands for its result from now on, of the result's shape (…, out).
        """

    def broadcast(self, names: frozenset[str]) -> bool:
        """Receive names of parameters that were broadcast over the examples; return whether gradients are wanted."""

    def contributed(self, names: frozenset[str], numbers: int) -> bool:
        """Receive parameters that entered an operation whose examples never meet; return whether gradients are wanted.

        ``numbers`` of each example are held until its gradient is there; for one of the parameters.
        """

    def expanded(self, names: frozenset[str], *, examples: int) -> bool:
        """Receive parameters with one dimension as long as there are examples, along which all is alike.

        Returns whether the dimension is that of the examples.
        """

    def strange(self, names: frozenset[str], operation: str) -> None:
        """Receive parameters that entered an operation that is not understood."""


def assumed_products(
    layers: Sequence[TreatedLayer], products: Iterable[Product], watched: Mapping[str, Tensor], unplaced: Container[str]
) -> Iterator[Product]:
    """Yield a product of no rows for each linear module that no dry run called, as one of its list is in a product.

    A few examples go to a few experts. One that they did not choose is taken to multiply as the others of its list do;
    the self-check of the batches that choose it decides whether it does.

    Args:
        products: The products that the dry runs showed.
        watched: Parameters that the dry runs watched, by name.
        unplaced: Names of layers that the first batch calls with rows that their shape does not tell apart.
    """
    seen = {place.parameter for each in products for place in (each.weight, each.bias) if place is not None}
    lists = {list_of(name.rpartition(".")[0]) for name in seen}
    for layer in layers:
        module, names = layer.module, layer.parameters
        is_unknown = seen.isdisjoint(names) and all(name in watched for name in names)
        is_assumed = layer.name in unplaced or list_of(layer.name) in lists
        if not (isinstance(module, nn.Linear) and layer.roles == (layer,) and is_unknown and is_assumed):
            continue
        places = {name.rpartition(".")[2]: place_of(watched[name], watched[name], name) for name in names}
        empty = module.weight.detach()[:0]
        yield Product(
            weight=places.get("weight"),
            bias=places.get("bias"),
            entered=empty,
            rows=Rows(dim=0, minor=1, size=0),
            left=empty.new_empty(0, module.out_features),
        )
