"""Functional layers: those that only the operations of a dry run show, and the parameters that none can cover.

A module that no family knows, a loose parameter, a module whose parameters are used without calling
it: their uses in the dry run decide which layers they are. A parameter whose uses overlap, or are of
different kinds, or enter an operation that is not understood, stays declared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from typing_extensions import override

from engine.layers.coverage import EXPLANATIONS, DeclaredLayer, Survey, layer_name
from engine.layers.elementwise import BareLayer
from engine.layers.layer import TreatedLayer
from engine.layers.linear import FunctionalLinearLayer
from engine.layers.parameter_slice import Place, label_of, slices_of
from engine.row_layout.layer_calls import TRANSFORMED, Call, version
from engine.row_layout.row_order import Operations
from engine.tracing.parameter_uses import Product, Sink

_Key = tuple[Place | None, Place | None]


@dataclass
class Uses(Sink):
    """A record of what the watched parameters did in one dry run; a sink of ``ParameterUseMode``."""

    examples: int = 1
    """N of the run."""
    products: list[Product] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Writes to what entered each product, before it."""
    spread: set[str] = field(default_factory=set)
    """Parameters that were broadcast over examples."""
    held: dict[str, int] = field(default_factory=dict)
    """Numbers of each example that are held for operations whose examples never meet, by parameter."""
    multiplies: dict[str, int] = field(default_factory=dict)
    """Numbers that are held for products where the parameter is taken as a whole, by parameter."""
    leading: set[str] = field(default_factory=set)
    """Parameters with a dimension for the examples before any data came."""
    unknown: dict[str, str] = field(default_factory=dict)
    """The first operation that each parameter entered and that is not understood, by parameter."""

    @override
    def multiplied(self, product: Product) -> Tensor:
        self.products.append(product)
        for place in (product.weight, product.bias):
            if place is not None:
                numbers = (product.entered.numel() + 2 * product.left.numel()) // self.examples
                self.multiplies[place.parameter] = self.multiplies.get(place.parameter, 0) + numbers
        self.versions.append(version(product.entered))
        return product.left

    @override
    def factorises(self, weight: Place | None, bias: Place | None) -> bool:
        # every product may be a layer, as far as is known yet
        del weight, bias
        return True

    @override
    def contributed(self, names: frozenset[str], numbers: int) -> bool:
        for name in names:
            # held once, whichever of them is asked
            self.held[name] = self.held.get(name, 0) + (numbers if name == min(names) else 0)
        return False

    @override
    def broadcast(self, names: frozenset[str]) -> bool:
        # a dry run wants no gradients
        self.spread |= names
        return False

    @override
    def expanded(self, names: frozenset[str], *, examples: int) -> bool:
        # another number of examples shows whether the length is chance
        del examples
        self.leading |= names
        return True

    @override
    def strange(self, names: frozenset[str], operation: str) -> None:
        for name in names:
            self.unknown.setdefault(name, operation)


def find_candidates(
    model: nn.Module,
    survey: Survey,
    called: set[TreatedLayer],
    mixed: frozenset[str],
    forced: frozenset[str] = frozenset(),
) -> dict[str, Tensor]:
    """Return the trainable parameters whose layers the operations may show, by name.

    Args:
        survey: Its survey; the open rows among those declared are candidates.
        called: Treated layers of which a module was called; those that were not are candidates.
        mixed: Names of layers that cannot tell their examples apart by the shape of what enters them: candidates too.
        forced: Names of layers that are candidates whatever else is known of them.

    Returns:
        Parameters of any shape, each under one of its names.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rows = [row for row in survey.declared if row.open]
    layers = [
        layer
        for layer in survey.treated
        if layer.name in forced
        or ((layer.name in mixed or called.isdisjoint(layer.roles)) and not layer.also and layer.roles == (layer,))
    ]
    names = [name for row in rows for name in row.parameters] + [name for layer in layers for name in layer.parameters]
    # under one name each
    own = {id(parameters[name]): name for name in reversed(names) if name in parameters}
    return {name: parameters[name] for name in names if name in own.values()}


def add_functional_layers(
    model: nn.Module,
    survey: Survey,
    watched: Mapping[str, Tensor],
    uses: tuple[Uses, ...],
    mixed: frozenset[str],
    forced: frozenset[str] = frozenset(),
) -> Survey:
    """Return a survey with the layers that operations show in the place of what they cover.

    Args:
        survey: Its survey by modules.
        watched: Parameters of any shape that the dry runs watched, by name.
        uses: What they did in each dry run.
        mixed: Names of layers that cannot tell their examples apart.
        forced: Names of layers that are never kept: they are covered by their operations, or declared.

    Returns:
        The survey in the order of the model's modules.
    """
    findings = _Found(dict(model.named_modules()), watched, uses)
    layers = list(findings.layers())
    covered = {name for layer in layers for name in layer.watched}
    treated: list[TreatedLayer] = list(layers)
    declared: list[DeclaredLayer] = []
    for layer in survey.treated:
        refused = layer.name not in mixed and not findings.refused.keys().isdisjoint(layer.parameters)
        if covered.isdisjoint(layer.parameters) and not refused and layer.name not in forced:
            treated.append(layer)
        else:
            rest = tuple(name for name in layer.parameters if name not in covered)
            reason = "batch_not_first" if layer.name in mixed else "no_gradient"
            declared += findings.left_over(layer.name, type(layer.module).__name__, reason, rest)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    numbers = {id(parameters[name]) for name in covered}
    for row in survey.declared:
        if row.open and all(id(parameters[name]) in numbers for name in row.parameters):
            continue
        # a second name of a parameter is none of those watched
        rest = tuple(name for name in row.parameters if name in watched and name not in covered)
        if row.open and (not covered.isdisjoint(row.parameters) or any(name in findings.refused for name in rest)):
            declared += findings.left_over(row.name, row.module, row.reason, rest)
        else:
            declared.append(row)
    declared += findings.gaps(layers)
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    names = {id(module): name for name, module in model.named_modules()}
    treated.sort(key=lambda layer: order[names[id(layer.module)]])
    return replace(survey, treated=tuple(treated), declared=tuple(declared))


def operations_of(survey: Survey, watched: Mapping[str, Tensor]) -> Operations:
    """Return what passes follow of the parameters, of any shape, that dry runs ``watched``; ``survey`` has the layers.

    What only modules' calls show is not followed.
    """
    by_calls = {name for layer in survey.treated if not layer.watched for name in layer.parameters}
    linear = [layer for layer in survey.treated if isinstance(layer, FunctionalLinearLayer)]
    return Operations(
        parameters={name: each for name, each in watched.items() if name not in by_calls},
        places=frozenset((layer.weight_place, layer.bias_place) for layer in linear),
        whole={layer.parameter: layer.leading for layer in survey.treated if isinstance(layer, BareLayer)},
    )


def calls_of(uses: Uses, survey: Survey) -> list[Call]:
    """Return the products of a dry run as calls of the layers they are.

    Args:
        uses: What the watched parameters did in it.
        survey: The survey that holds these layers.

    Returns:
        Calls in the order of the run; products that are no layer of their own are left out.
    """
    layers = {
        (layer.weight_place, layer.bias_place): layer
        for layer in survey.treated
        if isinstance(layer, FunctionalLinearLayer)
    }
    return [
        Call(layers[product.weight, product.bias], product.entered, product.left, before)
        for product, before in zip(uses.products, uses.versions, strict=True)
        if (product.weight, product.bias) in layers
    ]


class _Found:
    """The findings of all dry runs together about each parameter."""

    def __init__(self, modules: Mapping[str, nn.Module], watched: Mapping[str, Tensor], uses: tuple[Uses, ...]) -> None:
        self._modules, self._watched = modules, watched
        self._keys: dict[_Key, tuple[int, int]] = {}
        for product in (product for use in uses for product in use.products):
            widths = product.entered.shape[-1], product.left.shape[-1]
            self._keys.setdefault((product.weight, product.bias), widths)
        self._bare = set().union(*(use.spread.union(use.held) for use in uses))
        self._held = {
            name: max(use.held.get(name, 0) + use.multiplies.get(name, 0) for use in uses)
            for name in set().union(*({*use.held, *use.multiplies} for use in uses))
        }
        self._leading = set.intersection(*(use.leading for use in uses))
        self._routed = self._complete()
        self.refused: dict[str, tuple[str, str]] = {}
        """Reason and explanation of each parameter that cannot be covered, by name."""
        for use in uses:
            for name, operation in use.unknown.items():
                unknown = "unknown_operation", f"it enters `{operation}`, which is not understood"
                self.refused[name] = (TRANSFORMED, "") if operation == TRANSFORMED else unknown
            for name in use.leading - self._leading:
                self.refused[name] = "unknown_operation", "its uses change with the number of examples"
        self._join()

    def _complete(self) -> set[_Key]:
        """Add the slices that the dry run did not choose: experts to which no token of it was routed."""
        routed: set[_Key] = set()
        for (weight, bias), widths in list(self._keys.items()):
            number = self._slices(weight)
            if weight is None or number is None or (bias is not None and self._slices(bias) != number):
                continue
            at = weight.offset // weight.count
            if bias is not None and bias.offset // bias.count != at:
                continue
            for other in range(number):
                key = (
                    weight.moved((other - at) * weight.count),
                    None if bias is None else bias.moved((other - at) * bias.count),
                )
                self._keys.setdefault(key, widths)
                routed.add(key)
        return routed

    def _slices(self, place: Place | None) -> int | None:
        return None if place is None else slices_of(place, self._watched[place.parameter])

    def _join(self) -> None:
        """Take parameters whose uses overlap, or are of several kinds, as a whole."""
        for name, parameter in self._watched.items():
            seen = torch.zeros(parameter.numel(), dtype=torch.int16)
            for place in {place for key in self._keys for place in key if place is not None}:
                if place.parameter == name:
                    place.mark_(seen)
            # a matrix with several biases, or with and without one, or a bias of several matrices
            own = [[key[side] for key in self._keys if key[side] and key[side].parameter == name] for side in (0, 1)]  # type: ignore[union-attr]
            if bool((seen > 1).any()) or any(len(places) > len(set(places)) for places in own):
                self._bare.add(name)
        apart = self._bare | set(self.refused)
        while True:
            # a matrix and its bias are a layer together, or each is taken as a whole
            more = {
                place.parameter
                for key in self._keys
                for place in key
                if place is not None and any(other and other.parameter in apart for other in key)
            } - apart
            if not more:
                return
            self._bare |= more
            apart |= more

    def layers(self) -> Iterator[TreatedLayer]:
        """Yield the layers that are covered, parameter by parameter."""
        for name, parameter in self._watched.items():
            if name in self.refused:
                continue
            if name in self._bare:
                yield self._whole(name, parameter)
                continue
            keys = [key for key in self._keys if (key[0] or key[1]).parameter == name]  # type: ignore[union-attr]
            for weight, bias in sorted(keys, key=lambda key: (key[0] or key[1]).offset):  # type: ignore[union-attr]
                into, out = self._keys[weight, bias]
                places = [place for place in (weight, bias) if place is not None]
                yield FunctionalLinearLayer(
                    name=label_of(places[0], parameter).removesuffix(".weight"),
                    module=self._owner(name),
                    weight=weight is not None,
                    bias=bias is not None,
                    into=into,
                    out=out,
                    weight_place=weight,
                    bias_place=bias,
                    routed=(weight, bias) in self._routed,
                    tensors={place.parameter: self._watched[place.parameter] for place in places},
                )

    def _whole(self, name: str, parameter: Tensor) -> BareLayer:
        return BareLayer(
            name=name.removesuffix(".weight"),
            module=self._owner(name),
            weight=True,
            bias=False,
            parameter=name,
            count=parameter.numel(),
            leading=name in self._leading,
            tensors={name: parameter},
            held=self._held.get(name),
        )

    def _owner(self, name: str) -> nn.Module:
        return self._modules[name.rpartition(".")[0]]

    def left_over(self, name: str, module: str, reason: str, rest: tuple[str, ...]) -> Iterator[DeclaredLayer]:
        """Yield rows for the parameters ``rest`` of a module, one for each reason."""
        by_reason: dict[tuple[str, str], list[str]] = {}
        for parameter in rest:
            usual = reason, EXPLANATIONS.get(reason, "")
            by_reason.setdefault(self.refused.get(parameter, usual), []).append(parameter)
        for (why, explained), names in by_reason.items():
            yield DeclaredLayer(
                name=name,
                module=module,
                reason=why,
                parameters=tuple(names),
                parameter_count=sum(self._watched[parameter].numel() for parameter in names),
                open=True,
                why=explained,
            )

    def gaps(self, layers: list[TreatedLayer]) -> Iterator[DeclaredLayer]:
        """Yield rows for the numbers of covered parameters that are in no layer."""
        places: dict[str, set[Place]] = {}
        for layer in layers:
            if isinstance(layer, FunctionalLinearLayer):
                for place in (layer.weight_place, layer.bias_place):
                    if place is not None:
                        places.setdefault(place.parameter, set()).add(place)
        for name, own in places.items():
            missing = self._watched[name].numel() - sum(place.count for place in own)
            if missing:
                yield DeclaredLayer(
                    name=layer_name(name.rpartition(".")[0]),
                    module=type(self._owner(name)).__name__,
                    reason="no_gradient",
                    parameters=(name,),
                    parameter_count=missing,
                    why="a part of it that no operation of the dry run used",
                )
