"""Coverage: every trainable parameter is covered by a treated layer or declared with its reason, and the share covered.

A parameter is counted once, by identity. Reasons:

- ``unsupported_layer``: its module belongs to no family (the row names the class);
- ``bare_parameter``: it hangs on a module that has children of its own, as a loose tensor;
- ``tied``: modules that use it in ways that no one layer's factors describe share it;
- ``used_elsewhere``: the model also reads them outside the calls of the modules that hold them;
- ``parametrised``: the weight is computed from other parameters (weight norm and its like);
- ``overridden_forward``, ``embedding_renormalised``, ``batch_statistics``: the family knows the
  class, not this variant of it;
- ``no_gradient``: the layer never ran, or its outputs never reached the loss (plain autograd
  finds none either);
- ``several_inputs``: it was called with more than one input, which changes what it computes;
- ``batch_not_first``: its positions cannot be separated by example;
- ``rows_unordered``: it can be measured from all rows together alone, and sums for each example are asked for;
- ``transformed``: the layer is called inside ``torch.func.vmap``, ``grad``, ``jvp`` or their like;
- ``nested_tensor``: the layer is called with a nested tensor;
- ``needs_gradients``: `forward_only` has no gradient to build an exact block from;
- ``unknown_operation``: a parameter enters an operation that is not understood (the row names it);
- ``unforeseen_use``: later data made the model use it in a way that the first example did not show;
- ``never_routed``: an expert to which the data routed no token;
- ``gradient_identity``: its rows are not the gradient of each example alone (the row has the number);
- ``examples_mix``: the same, where what the model returns for one example depends on the others;
- ``not_repeatable``: the same, where the same batch gives other rows each time: a generator of its own draws;
- ``correction_differs``: the sum of its corrected eigenvalues is not its exact trace;
- ``gradient_not_followed``: plain autograd finds a gradient that no operation was seen to bring;
- ``no_numbers``: a parameter with a dimension of zero holds nothing that could be measured;
- ``complex_numbers``: a parameter is complex, or the layer is called with complex numbers.

What a module says (``unsupported_layer``, ``bare_parameter``, ``overridden_forward``) is not the
last word: the operations of a dry run may still show the layers.

The coverage law is covered + declared = trainable, each number once. The share that a caller asks for is known three
times, each time better: from the modules alone, before anything is computed; after the dry run, which shows what is
called, and how; and after the last pass, which shows what the loss depends on.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from catalog.requests.collection import Collection
from catalog.responses.coverage import remedy_of
from catalog.responses.layer_record import WHOLE_MODEL
from engine.errors import CoverageBroken, CoverageTooLow, NothingToAnalyse
from engine.layers.convolution import ConvolutionLayer, TransposedConvolutionLayer, treats_convolution
from engine.layers.embedding import EmbeddingLayer, treats_embedding
from engine.layers.layer import COMPLEX_NUMBERS, TreatedLayer
from engine.layers.linear import LinearLayer, TransposedLinearLayer, is_transposed_linear, treats_linear
from engine.layers.normalisation import (
    BatchNormLayer,
    GroupNormLayer,
    LayerNormLayer,
    RMSNormLayer,
    is_rms_norm,
    treats_batch_norm,
    treats_group_norm,
    treats_layer_norm,
    treats_rms_norm,
)
from engine.layers.tied import merge_tied_layers
from engine.model.sharding.gathered_parameters import has_own_forward
from engine.model.state.preserve_state import in_evaluation

_OPEN = frozenset({"unsupported_layer", "bare_parameter", "overridden_forward", "parametrised", "tied"})

EXPLANATIONS = {
    "batch_not_first": "a call of it has no dimension of the examples in front, or not the rows of each: of a branch "
    "that a whole batch takes or leaves, of one example, or of rows that several have in common"
}
"""The explanation of each reason that is the same for all layers."""


@dataclass(frozen=True, kw_only=True)
class DeclaredLayer:
    """Trainable parameters of one module that are not covered, and why."""

    name: str
    module: str
    reason: str
    parameters: tuple[str, ...]
    parameter_count: int
    why: str = ""
    """An explanation of the reason, where there is more to say."""
    open: bool = False
    """The operations that the parameters enter may still show layers."""


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A second name of a covered parameter, on a module that is taken not to use it."""

    module: nn.Module
    key: str
    layer: str
    """The layer that covers it."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The model's trainable parameters, sorted into treated layers and declared ones."""

    treated: tuple[TreatedLayer, ...]
    declared: tuple[DeclaredLayer, ...]
    aliases: tuple[Alias, ...] = ()


def survey(model: nn.Module) -> Survey:
    """Sort every trainable parameter of a model into treated layers and declared ones."""
    own, aliases = _own_parameters(model)
    treated: list[TreatedLayer] = []
    declared: list[DeclaredLayer] = []
    for bundle in _bundles(own):
        layers, reasons = _covering(bundle)
        treated += layers
        counted: set[int] = set()
        for (name, module, parameters), reason in zip(bundle, reasons, strict=True):
            if reason is None:
                continue
            fresh = {id(each): each.numel() for each in parameters.values() if id(each) not in counted}
            counted.update(fresh)
            declared.append(
                DeclaredLayer(
                    name=layer_name(name),
                    module=type(module).__name__,
                    reason=reason,
                    parameters=tuple(_qualified(name, key) for key in parameters),
                    parameter_count=sum(fresh.values()),
                    open=reason in _OPEN,
                )
            )
    declared += _unmeasurable(model)
    covering = {parameter: layer.name for layer in treated for parameter in layer.parameters}
    names = {
        id(parameter): covering[_qualified(name, key)]
        for name, _, parameters in own
        for key, parameter in parameters.items()
        if _qualified(name, key) in covering
    }
    spare = (Alias(module=module, key=key, layer=names[at]) for module, key, at in aliases if at in names)
    return Survey(treated=tuple(treated), declared=tuple(declared), aliases=tuple(spare))


def layer_name(path: str) -> str:
    """Return the name of the layer that a module is, by the module's path: that of the model itself is empty."""
    return path or WHOLE_MODEL


def _qualified(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


_Own = tuple[str, nn.Module, dict[str, nn.Parameter]]
"""A module's name, the module, and its own trainable parameters."""


def _own_parameters(model: nn.Module) -> tuple[list[_Own], list[tuple[nn.Module, str, int]]]:
    """Every module with trainable parameters; and second names of parameters, by identity.

    A module of no family that holds what one of a known family holds too (BERT's head keeps its
    decoder's bias) is taken not to use it itself; a dry run shows whether that is so.
    """
    families = {id(module) for module in model.modules() if any(True for _ in _families(module))}
    held = {
        id(parameter)
        for module in model.modules()
        if id(module) in families
        for parameter in module._parameters.values()  # noqa: SLF001 - own parameters, with tied ones
        if parameter is not None
    }
    own: list[_Own] = []
    aliases: list[tuple[nn.Module, str, int]] = []
    for name, module in model.named_modules():
        trainable = {
            key: parameter
            for key, parameter in module._parameters.items()  # noqa: SLF001 - likewise
            if parameter is not None and parameter.requires_grad and _unmeasured(parameter) is None
        }
        if id(module) not in families:
            spare = [key for key, parameter in trainable.items() if id(parameter) in held]
            aliases += [(module, key, id(trainable.pop(key))) for key in spare]
        if trainable:
            own.append((name, module, trainable))
    return own, aliases


_UNMEASURED = {
    "no_numbers": "a dimension of each is zero",
    COMPLEX_NUMBERS: "A and G are second moments of real numbers",
}


def _unmeasured(parameter: nn.Parameter) -> str | None:
    """Tell why a parameter is none that any layer could cover, by what it holds."""
    if not parameter.numel():
        return "no_numbers"
    return COMPLEX_NUMBERS if parameter.is_complex() else None


def _unmeasurable(model: nn.Module) -> Iterator[DeclaredLayer]:
    """Yield rows for the trainable parameters that no layer could cover, those of one module and reason in one."""
    counted: set[int] = set()
    for name, module in model.named_modules():
        own = {key: each for key, each in module._parameters.items() if each is not None and each.requires_grad}  # noqa: SLF001 - likewise
        for reason, why in _UNMEASURED.items():
            rows = {key: each for key, each in own.items() if _unmeasured(each) == reason}
            if not rows:
                continue
            fresh = {id(each): each.numel() for each in rows.values() if id(each) not in counted}
            counted.update(fresh)
            yield DeclaredLayer(
                name=layer_name(name),
                module=type(module).__name__,
                reason=reason,
                parameters=tuple(_qualified(name, key) for key in rows),
                parameter_count=sum(fresh.values()),
                why=why,
            )


def _bundles(own: list[_Own]) -> list[list[_Own]]:
    """Join modules that share parameters, directly or through others; each bundle stands where its first one does."""
    bundles: dict[int, list[int]] = {}
    holders: dict[int, int] = {}
    for place, (_, _, parameters) in enumerate(own):
        touched = sorted({holders[id(parameter)] for parameter in parameters.values() if id(parameter) in holders})
        into = touched[0] if touched else place
        bundles[into] = sorted([*(each for key in touched for each in bundles.pop(key)), place])
        for each in bundles[into]:
            holders |= {id(parameter): into for parameter in own[each][2].values()}
    return [[own[place] for place in bundles[first]] for first in sorted(bundles)]


def _covering(bundle: list[_Own]) -> tuple[tuple[TreatedLayer, ...], list[str | None]]:
    """Return the layers that cover ``bundle``, or each module's reason why none does."""
    treated = [_treat(name, module, set(parameters)) for name, module, parameters in bundle]
    layers = [layer for layer, _ in treated if layer is not None]
    if len(bundle) == 1:
        return tuple(layers), [None if layers else reason for _, reason in treated]
    rows = merge_tied_layers(layers) if len(layers) == len(bundle) else None
    return (rows or ()), [None if rows else "tied" for _ in bundle]


def declare(layer: TreatedLayer, reason: str) -> DeclaredLayer:
    """Declare a treated layer whose statistics could not be gathered.

    Args:
        reason: One of the reasons above.

    Returns:
        A row with the layer's parameters and their count.
    """
    return DeclaredLayer(
        name=layer.name,
        module=type(layer.module).__name__,
        reason=reason,
        parameters=layer.parameters,
        parameter_count=layer.parameter_count,
        why=EXPLANATIONS.get(reason, ""),
    )


def _treat(name: str, module: nn.Module, trainable: set[str]) -> tuple[TreatedLayer | None, str]:
    for kind, refusal in _families(module):
        if refusal is not None or has_own_forward(module) or type(module).__call__ is not nn.Module.__call__:
            # the class is known, but this one module's forward may have been replaced, or may not be what is called
            return None, refusal or "overridden_forward"
        if hasattr(module, "parametrizations"):
            return None, "parametrised"
        if not trainable <= {"weight", "bias"}:
            return None, "bare_parameter"
        return kind(layer_name(name), module, "weight" in trainable, "bias" in trainable, prefix=name), ""
    if isinstance(module, ParametrizationList):
        return None, "parametrised"
    return None, "bare_parameter" if any(True for _ in module.children()) else "unsupported_layer"


def _families(module: nn.Module) -> Iterator[tuple[type[TreatedLayer], str | None]]:
    """Yield the family that knows ``module``'s class, with its refusal of this variant."""
    if isinstance(module, nn.Linear):
        yield LinearLayer, treats_linear(module)
    elif is_transposed_linear(module):
        yield TransposedLinearLayer, None
    elif isinstance(module, nn.modules.conv._ConvNd):  # noqa: SLF001 - the common ancestor has no other name
        kind = TransposedConvolutionLayer if module.transposed else ConvolutionLayer
        yield kind, treats_convolution(module)
    elif isinstance(module, nn.Embedding):
        yield EmbeddingLayer, treats_embedding(module)
    elif isinstance(module, nn.EmbeddingBag) and module.max_norm is not None:
        # any other bag is a lookup and a sum, which the operations show
        yield EmbeddingLayer, "embedding_renormalised"
    elif isinstance(module, nn.LayerNorm):
        yield LayerNormLayer, treats_layer_norm(module)
    elif is_rms_norm(module):
        yield RMSNormLayer, treats_rms_norm(module)
    elif isinstance(module, (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)):  # noqa: SLF001 - likewise
        yield GroupNormLayer, treats_group_norm(module)
    elif isinstance(module, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - the common ancestor has no other name
        yield BatchNormLayer, treats_batch_norm(module)


def survey_layers(model: nn.Module, collection: Collection) -> Survey:
    """Survey a model as it will be measured, in evaluation, and leave its modes as they were.

    Args:
        model: The model, in any mode.
        collection: Its ``min_coverage`` is held against what can be covered at best.

    Raises:
        NothingToAnalyse: If no layer can be treated.
        CoverageTooLow: If less can be covered than ``collection`` asks.
        CoverageBroken: If the survey does not add up.
    """
    # batch norm is treated by its running statistics, which only evaluation mode uses
    with in_evaluation(model):
        result = survey(model)
    possible = [row for row in result.declared if row.open]
    if not result.treated and not possible:
        reasons = sorted(count_by_reason(result.declared)) or ["no trainable parameter"]
        raise NothingToAnalyse(
            f"the model ({type(model).__name__}) has no layer that can be treated: {', '.join(reasons)}; "
            "give one with weights that are trained (`requires_grad`)",
            pointer="/model",
        )
    closed = [row for row in result.declared if not row.open]
    require_coverage(count_trainable_numbers(model), (*result.treated, *possible), closed, collection)
    return result


def nothing_covered(model: nn.Module, declared: Sequence[DeclaredLayer]) -> NothingToAnalyse:
    """Return the error that no layer of a model is covered, with each reason and what would cover its parameters.

    Args:
        declared: Its parameters that are not covered, which are all of them.
    """
    first = {row.reason: row for row in sorted(declared, key=lambda row: (row.reason, not row.why))[::-1]}
    reasons = [f"{reason} ({row.why})" if row.why else reason for reason, row in sorted(first.items())]
    remedies = [remedy for reason in sorted(first) if (remedy := remedy_of(reason)) is not None]
    said = "; ".join([", ".join(reasons), *remedies])
    return NothingToAnalyse(
        f"no layer of the model ({type(model).__name__}) could be measured: {said}", pointer="/model"
    )


def count_trainable_numbers(model: nn.Module) -> int:
    """Count the trainable numbers of a model."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_by_reason(declared: Iterable[DeclaredLayer]) -> dict[str, int]:
    """Count the numbers that each reason declares, in the order in which the reasons first come."""
    counts: Counter[str] = Counter()
    for layer in declared:
        counts[layer.reason] += layer.parameter_count
    return dict(counts)


def require_coverage(
    trainable: int,
    covered: Iterable[TreatedLayer | DeclaredLayer],
    declared: Iterable[DeclaredLayer],
    collection: Collection,
) -> None:
    """Require that covered and declared numbers are all trainable ones, and that enough are covered.

    Args:
        trainable: Trainable numbers of the model.
        covered: Layers that are covered, or may still be.
        declared: Rows of those that are not.
        collection: Its ``min_coverage`` is the share asked for, between 0 and 1; None asks for none.

    Raises:
        CoverageTooLow: If the covered share is below ``collection.min_coverage``; the message names the share, the
            reasons with their counts, and the remedy.
        CoverageBroken: If the parts do not add up to ``trainable``.
    """
    numbers = sum(layer.parameter_count for layer in covered)
    reasons = count_by_reason(declared)
    if numbers + sum(reasons.values()) != trainable:
        raise CoverageBroken(
            f"{numbers} covered and {sum(reasons.values())} declared numbers are not the {trainable} trainable ones: "
            "a fault of Kronoscope's; please report the model"
        )
    wanted, share = collection.min_coverage, numbers / max(trainable, 1)
    if wanted is None or share >= wanted:
        return
    missing = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
    # cut, not rounded: what is not whole must not read 100.00%
    percent = math.floor(share * 10_000) / 100
    raise CoverageTooLow(
        f"{percent:.2f}% of the {trainable:,} trainable numbers can be covered, but `min_coverage` asks for "
        f"{wanted:.2%}; not covered: {missing}; lower `min_coverage`, or freeze what "
        "need not be measured (`requires_grad_(False)`)",
        pointer="/collection/min_coverage",
    )
