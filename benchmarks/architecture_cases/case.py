"""A case of the architecture table: a model with random weights, its examples, and what they are a task of."""

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

EXAMPLES = 6
BATCH_SIZE = 4
SPREAD = 0.6
"""Standard deviation that is added to each weight, times the root of its fan-in."""
PACKAGES = ("transformers", "timm", "diffusers", "peft", "torch_geometric")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    model: nn.Module
    inputs: Any
    """A tensor, a tuple or a mapping of tensors; dimension 0 is the examples."""
    targets: Tensor
    task: str
    loss: str | None = None
    """Null takes the task's usual one."""
    alone: bool = True
    """Whether an example can be taken out of the batch; nodes of one graph cannot."""
    random: bool = False
    """Whether the model draws random numbers in `eval()`, so that no number can be compared."""
    prompted: bool = False
    """Whether virtual tokens precede the first one, so that its target is a loss term too."""
    padded: Callable[[str], bool] = field(default=lambda _: True)
    """Whether the positions of a module, by name, are those of the attention mask."""


Builder = Callable[[], Case]


def enlivened(model: nn.Module, seed: int = 0) -> nn.Module:
    """Add noise to every weight, bias and running statistic of ``model``, in float64 and `eval()`, and return it.

    Initial weights hide errors: biases and adapters are zero, scales are one, layer scales are 1e-6.
    """
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in {id(each): each for each in model.parameters()}.values():
            if parameter.numel() == 0:
                continue
            width = parameter.numel() // parameter.shape[0] if parameter.ndim > 1 else 9
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=SPREAD / max(width, 1) ** 0.5)
        for name, buffer in model.named_buffers():
            noise = torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
            if name.endswith("running_mean"):
                buffer.copy_(noise - 0.5)
            elif name.endswith("running_var"):
                buffer.copy_(noise + 0.5)
    return model


def tokens(*shape: int, vocabulary: int = 31, lowest: int = 5) -> Tensor:
    """Random ids, above those that tokenizers reserve."""
    return torch.randint(lowest, vocabulary, shape)


def mask(length: int, lengths: tuple[int, ...] = (9, 4, 6, 3, 9, 5)) -> Tensor:
    """An attention mask of examples of these lengths, padded at the end to ``length``."""
    return (torch.arange(length)[None] < torch.tensor(lengths)[:, None]).long()


def normal(*shape: int) -> Tensor:
    """Random numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters under all of their names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def without_data(model: nn.Module, *words: str) -> nn.Module:
    """``model`` with the parameters frozen whose names hold one of ``words``."""
    for name, parameter in model.named_parameters():
        if any(word in name for word in words):
            parameter.requires_grad_(requires_grad=False)
    return model


class _Widened(types.ModuleType):
    """``torch`` as a model's source sees it, its float32 another name of float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - torch's own
        return getattr(torch, name)


@contextmanager
def widened() -> Iterator[None]:
    """Let casts to float32 in the packages' own sources keep float64, which rounding would hide errors behind."""
    wide = _Widened("torch")
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in PACKAGES and vars(module).get("torch") is torch
    ]
    own = Tensor.float
    for module in modules:
        module.torch = wide  # type: ignore[attr-defined]
    Tensor.float = lambda tensor: tensor if tensor.dtype == torch.float64 else own(tensor)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.float = own  # type: ignore[method-assign]
        for module in modules:
            module.torch = torch  # type: ignore[attr-defined]


def taken(tree: Any, place: int) -> Any:  # noqa: ANN401 - as ``Case.inputs``
    """Example ``place`` of every tensor in ``tree``, as a batch of one."""
    if isinstance(tree, Tensor):
        return tree[place : place + 1]
    if isinstance(tree, Mapping):
        return {name: taken(value, place) for name, value in tree.items()}
    return tuple(taken(value, place) for value in tree)
