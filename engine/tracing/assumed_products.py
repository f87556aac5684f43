"""Assumed products: those of linear modules that no dry run has called, where others like them are found in products.

Which expert an example goes to is for the data to say, and a few examples go to a few experts. One that they did not
choose is taken to multiply as the others of its list do; whether it does, each batch shows.
"""

from collections.abc import Container, Iterator, Mapping, Sequence

from torch import Tensor, nn

from engine.layers.layer import TreatedLayer
from engine.layers.parameter_slice import place_of
from engine.row_layout.layer_calls import list_of
from engine.tracing.batch_provenance import Rows
from engine.tracing.functional_layers import Uses
from engine.tracing.parameter_uses import Product


def assumed_products(
    layers: Sequence[TreatedLayer], uses: Sequence[Uses], watched: Mapping[str, Tensor], unplaced: Container[str]
) -> Iterator[Product]:
    """Return a product of no rows for each linear module that is taken to multiply, as no dry run has shown it.

    Args:
        layers: Treated layers.
        uses: What the watched parameters did in each dry run.
        watched: Parameters that the dry runs watched, by name.
        unplaced: Names of layers that the first batch calls with rows that are not told apart by their shape.

    Yields:
        Products of no rows.
    """
    seen = {
        place.parameter
        for use in uses
        for each in use.products
        for place in (each.weight, each.bias)
        if place is not None
    }
    lists = {list_of(name.rpartition(".")[0]) for name in seen}
    for layer in layers:
        module = layer.module
        unknown = layer.name in unplaced or list_of(layer.name) in lists
        if (
            not isinstance(module, nn.Linear)
            or layer.roles != (layer,)
            or not unknown
            or not seen.isdisjoint(layer.parameters)
        ):
            continue
        if not all(name in watched for name in layer.parameters):
            continue
        places = {name.rpartition(".")[2]: place_of(watched[name], watched[name], name) for name in layer.parameters}
        empty = module.weight.detach()[:0]
        yield Product(
            weight=places.get("weight"),
            bias=places.get("bias"),
            entered=empty,
            rows=Rows(dim=0, minor=1, size=0),
            left=empty.new_empty(0, module.out_features),
        )
