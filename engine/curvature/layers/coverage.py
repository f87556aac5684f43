"""Coverage: every trainable parameter is covered by a treated layer or declared with its reason.

A parameter is counted once, by identity. Reasons:

- ``unsupported_layer``: its module belongs to no family (the row names the class);
- ``bare_parameter``: it hangs on a module that has children of its own, as a loose tensor;
- ``tied``: several modules share it, so no single layer's factors describe it;
- ``parametrised``: the weight is computed from other parameters (weight norm and its like);
- ``overridden_forward``, ``embedding_renormalised``, ``batch_statistics``: the family knows the
  class, not this variant of it;
- ``no_gradient``: the layer never ran, or its outputs never reached the loss;
- ``several_inputs``: it was called with more than one input, which changes what it computes;
- ``batch_not_first``: its positions cannot be told apart by example;
- ``needs_gradients``: `forward_only` has no gradient to build an exact block from.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from engine.curvature.layers.convolution import (
    ConvolutionLayer,
    TransposedConvolutionLayer,
    treats_convolution,
)
from engine.curvature.layers.embedding import EmbeddingLayer, treats_embedding
from engine.curvature.layers.layer import TreatedLayer
from engine.curvature.layers.linear import (
    LinearLayer,
    TransposedLinearLayer,
    is_transposed_linear,
    treats_linear,
)
from engine.curvature.layers.normalisation import (
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


@dataclass(frozen=True, kw_only=True)
class DeclaredLayer:
    """Trainable parameters of one module that are not covered, and why."""

    name: str
    module: str
    reason: str
    parameters: tuple[str, ...]
    parameter_count: int


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The model's trainable parameters, sorted into treated layers and declared ones."""

    treated: tuple[TreatedLayer, ...]
    declared: tuple[DeclaredLayer, ...]


def survey(model: nn.Module) -> Survey:
    """Sort every trainable parameter of ``model``, in the order of its modules."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():  # noqa: SLF001 - own parameters, with tied ones
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(id(module))
    treated: list[TreatedLayer] = []
    declared: list[DeclaredLayer] = []
    counted: set[int] = set()
    for name, module in model.named_modules():
        own = {
            key: parameter
            for key, parameter in module._parameters.items()  # noqa: SLF001
            if parameter is not None and parameter.requires_grad
        }
        if not own:
            continue
        tied = any(len(owners[id(parameter)]) > 1 for parameter in own.values())
        layer, reason = (None, "tied") if tied else _treat(name, module, set(own))
        if layer is not None:
            treated.append(layer)
            continue
        fresh = {key: parameter for key, parameter in own.items() if id(parameter) not in counted}
        counted.update(id(parameter) for parameter in fresh.values())
        declared.append(
            DeclaredLayer(
                name=name,
                module=type(module).__name__,
                reason=reason,
                parameters=tuple(f"{name}.{key}" if name else key for key in own),
                parameter_count=sum(parameter.numel() for parameter in fresh.values()),
            )
        )
    return Survey(treated=tuple(treated), declared=tuple(declared))


def declare(layer: TreatedLayer, reason: str) -> DeclaredLayer:
    """Declare a treated layer whose statistics could not be gathered."""
    return DeclaredLayer(
        name=layer.name,
        module=type(layer.module).__name__,
        reason=reason,
        parameters=layer.parameters,
        parameter_count=layer.parameter_count,
    )


def _treat(name: str, module: nn.Module, trainable: set[str]) -> tuple[TreatedLayer | None, str]:
    for kind, refusal in _families(module):
        if refusal is not None or "forward" in vars(module):
            # the class is known, but this one module's forward may have been replaced
            return None, refusal or "overridden_forward"
        if hasattr(module, "parametrizations"):
            return None, "parametrised"
        if not trainable <= {"weight", "bias"}:
            return None, "bare_parameter"
        return kind(name, module, "weight" in trainable, "bias" in trainable), ""
    if isinstance(module, ParametrizationList):
        return None, "parametrised"
    return None, "bare_parameter" if any(True for _ in module.children()) else "unsupported_layer"


def _families(module: nn.Module) -> Iterator[tuple[type[TreatedLayer], str | None]]:
    """The family that knows ``module``'s class, with its refusal of this variant."""
    if isinstance(module, nn.Linear):
        yield LinearLayer, treats_linear(module)
    elif is_transposed_linear(module):
        yield TransposedLinearLayer, None
    elif isinstance(module, nn.modules.conv._ConvNd):  # noqa: SLF001 - the common ancestor has no other name
        kind = TransposedConvolutionLayer if module.transposed else ConvolutionLayer
        yield kind, treats_convolution(module)
    elif isinstance(module, nn.Embedding):
        yield EmbeddingLayer, treats_embedding(module)
    elif isinstance(module, nn.LayerNorm):
        yield LayerNormLayer, treats_layer_norm(module)
    elif is_rms_norm(module):
        yield RMSNormLayer, treats_rms_norm(module)
    elif isinstance(module, (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)):  # noqa: SLF001 - likewise
        yield GroupNormLayer, treats_group_norm(module)
    elif isinstance(module, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - the common ancestor has no other name
        yield BatchNormLayer, treats_batch_norm(module)
