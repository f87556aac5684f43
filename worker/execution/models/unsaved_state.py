"""State that a model's constructor fills by itself, always alike, so that a checkpoint may leave it out.

``transformers`` does not save the sinusoidal positions of a Marian model, and asks no base model for the zeros that a
head adds. Never a parameter that is trained: without its numbers the model would be another.
"""

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

_SINUSOIDAL = "SinusoidalPositionalEmbedding"


def unsaved_numbers(model: nn.Module) -> int:
    """Return the numbers in frozen parameters that files may lack."""
    return sum(weight.numel() for _, weight, _ in _frozen_positions(model))


def unsaved_state(model: nn.Module) -> frozenset[str]:
    """Return the state of a built, unfilled model that files may lack: what the constructor always puts there."""
    left = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    zeros = [
        name
        for name, buffer in model.named_buffers()
        if any(each.search(name) for each in left) and not bool(buffer.count_nonzero())
    ]
    positions = [name for name, weight, make in _frozen_positions(model) if torch.equal(weight, make())]
    return frozenset((*zeros, *positions))


def _frozen_positions(model: nn.Module) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
    """Yield the name of each frozen table of sinusoidal positions, its numbers, and what makes them anew."""
    for name, module in model.named_modules():
        make = getattr(module, "create_weight", None)
        if type(module).__name__.endswith(_SINUSOIDAL) and isinstance(module, nn.Embedding) and callable(make):
            weight = module.weight
            if not weight.requires_grad:
                yield f"{name}.weight", weight, make
