"""Factory models, which the caller's own code builds."""

from typing import Any

import torch
from torch import nn

from catalog.requests.inputs import ModelFactory, Task
from worker.execution.data.labels import class_names
from worker.execution.loaded_model import LoadedModel
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal, names, storable_text
from worker.execution.resolve import call_factory, resolve_factory

_POINTER = "/model/factory"


def load(source: ModelFactory, task: Task, context: LoaderContext) -> LoadedModel:  # noqa: ARG001 - as every loader
    """Call the caller's factory and take its module in ``eval()``."""
    factory = resolve_factory(source.factory, context.paths, context.factories, _POINTER)
    model = _called(factory, source, context)
    if not isinstance(model, nn.Module):
        raise Refusal(
            f"factory `{source.factory}` returned {type(model).__name__}; it must return a torch.nn.Module",
            pointer=_POINTER,
            code="wrong_type",
        )
    _require_writable_names(model)
    named = class_names(getattr(getattr(model, "config", None), "id2label", None))
    return LoadedModel(model=model.eval(), class_names=named, provenance=f"factory {source.factory}")


def _called(factory: Any, source: ModelFactory, context: LoaderContext) -> Any:  # noqa: ANN401 - a caller's own
    kwargs = dict(source.kwargs)
    if context.shapes_only:
        try:
            with torch.device("meta"):
                return call_factory(factory, source.factory, kwargs, _POINTER)
        except Refusal:
            context.log("info", f"factory `{source.factory}` builds nothing without numbers, so it is called with them")
    return call_factory(factory, source.factory, kwargs, _POINTER)


def _require_writable_names(model: nn.Module) -> None:
    """Rows and files carry names as they are, so one that cannot be stored cannot be measured."""
    wrong = [name for name, _ in model.named_parameters() if storable_text(name) != name]
    if wrong:
        raise Refusal(
            f"names of the model hold NUL or half of a surrogate pair: {names(wrong)}; rename those modules",
            pointer=_POINTER,
            code="invalid_name",
        )
