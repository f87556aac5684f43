"""Tensors of a checkpoint that transformers joins, splits or renames as it loads them: a mixture's experts, say.

The rules are transformers' own (``conversion_mapping``). Each group of tensors is converted on the meta device first,
so that names and shapes are known before a number is read.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import safetensors
import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

from worker.execution.files.safetensors_header import TensorEntry
from worker.execution.loader_context import LoaderContext
from worker.execution.models.checkpoint_weights import FLOATING, CheckpointFiles
from worker.execution.refusal import Refusal, names

Read = Callable[[str], Tensor]


def convert(
    found: CheckpointFiles, bare: Mapping[str, str], model: nn.Module, context: LoaderContext, pointer: str
) -> CheckpointFiles:
    """Return the files with tensors in the places that a model, on the meta device, has for them today.

    ``bare`` are the tensors' names without those of wrappers; ``Refusal`` if tensors cannot be joined or split.
    """
    state, prefix = model.state_dict(), str(model.base_model_prefix)
    transforms = get_model_conversion_mapping(model)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    entries, made = dict(found.entries), dict(found.made)
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(found.entries, key=dot_natural_key):
        candidates = (bare[name], f"{prefix}.{bare[name]}", bare[name].removeprefix(f"{prefix}."))
        place = next((state[each] for each in candidates if each in state), None)
        if place is not None and tuple(place.shape) == found.entries[name].shape:
            continue
        key, pattern = rename_source_key(bare[name], renamings, converters, prefix, state)
        # some are converted in their place: of another shape, under the same name
        if pattern is not None:
            groups.setdefault(key, (by_pattern[pattern], []))[1].append((pattern, name))
        elif place is None and key != bare[name] and key in state and key not in entries:
            entries[key] = entries.pop(name)
            made[key] = partial(_stored, found, name)
    for key, (converter, sources) in groups.items():
        make = partial(_joined, converter, key, sources, model)
        stored = [name for _, name in sources]
        # integers make no weight, and the copy of them is refused
        dtype = min({found.entries[name].dtype for name in stored} - FLOATING, default="F32")
        shapes = _shapes(make, found, sources, pointer)
        for name in stored:
            entries.pop(name, None)
        for target, shape in shapes.items():
            if target in entries:
                raise Refusal(f"`{target}` and {names(stored, 3)} are the same tensor; leave one out", pointer=pointer)
            entries[target] = TensorEntry(dtype=dtype, shape=shape)
            made[target] = partial(_part, make, found, target)
    if len(made) > len(found.made):
        context.log("info", f"{len(made)} tensors are read as transformers converts them: {names(sorted(made), 2)}")
    return replace(found, entries=entries, made=made)


def _shapes(
    make: Callable[[Read], Mapping[str, Tensor]], found: CheckpointFiles, sources: list[tuple[str, str]], pointer: str
) -> dict[str, tuple[int, ...]]:
    """Return what a group becomes, from shapes alone."""
    try:
        whole = make(lambda name: torch.empty(found.entries[name].shape, device="meta"))
    except Exception as error:
        raise Refusal(
            f"{names([name for _, name in sources], 3)} cannot be put together as this architecture has them "
            f"({type(error).__name__}: {str(error)[:200]}); take an intact checkpoint",
            pointer=pointer,
            code="wrong_shape",
        ) from error
    return {target: tuple(tensor.shape) for target, tensor in whole.items()}


def _joined(
    converter: Any,  # noqa: ANN401 - of transformers
    key: str,
    sources: list[tuple[str, str]],
    model: nn.Module,
    read: Read,
) -> Mapping[str, Tensor]:
    """Convert one group of tensors."""
    own = copy.deepcopy(converter)
    for pattern, name in sources:
        own.add_tensor(key, name, pattern, read(name))
    whole = own.convert(key, model=model, config=model.config)
    return {target: each[0] if isinstance(each, list) else each for target, each in whole.items()}


def _part(make: Callable[[Read], Mapping[str, Tensor]], found: CheckpointFiles, target: str) -> Tensor:
    return make(partial(_stored, found))[target]


def _stored(found: CheckpointFiles, name: str) -> Tensor:
    with safetensors.safe_open(found.files[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
