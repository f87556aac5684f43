"""Own gradients: those that a model takes of its own parameters within a pass.

Fast weights step along one in ``forward``, and a function that computes its inside again takes them on the way back.
Passes run with parameters that need no gradient, since none is wanted of them, so that such a model raises. The
parameters of a model that does so are given the need that they have outside, for the rest of the job; a gradient that
arrives at one of them and that nothing waits for is let go of at once.
"""

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from engine.errors import EngineError

_ASKED = re.compile(r"(does not|doesn't) require grad|differentiated Tensor.* not have been used in the graph")
"""Words of torch's errors where a gradient is asked for, or waited for, of what needs none.

The second are those of the leaf in a parameter's place outside of its module's calls, while its layer is watched.
"""
_TAKERS: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models that take own gradients, also in passes that begin later."""
T = TypeVar("T")


@dataclass(eq=False)
class _Frozen:
    """The parameters of a model that is held."""

    trainable: list[nn.Parameter]
    """Those that need gradients outside."""
    handles: list[RemovableHandle] = field(default_factory=list)

    def give(self) -> None:
        """Let them need gradients inside too."""
        for each in self.trainable:
            each.requires_grad_()
            self.handles.append(each.register_post_accumulate_grad_hook(_let_go))  # type: ignore[no-untyped-call]

    def take_back(self) -> None:
        """Let them need none again."""
        while self.handles:
            self.handles.pop().remove()
        for each in self.trainable:
            each.requires_grad_(False)


_FROZEN: "weakref.WeakKeyDictionary[nn.Module, _Frozen]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """Hold a model's parameters without gradients, and without the need of any unless it takes some itself.

    The flags are not put back.
    """
    if model in _FROZEN:
        # as an outer one holds them
        yield
        return
    frozen = _FROZEN[model] = _Frozen([each for each in model.parameters() if each.requires_grad])
    try:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            # a gradient has its parameter's type, which may change
            parameter.grad = None
        if model in _TAKERS:
            frozen.give()
        yield
    finally:
        frozen.take_back()
        _FROZEN.pop(model)


@contextlib.contextmanager
def needing_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let some parameters of a held model need gradients while inside."""
    before = [(parameter, parameter.requires_grad) for parameter in parameters]
    try:
        for parameter, _ in before:
            parameter.requires_grad_()
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


def takes_own_gradients(model: nn.Module) -> bool:
    """Tell whether the parameters of a model need gradients during passes."""
    return model in _TAKERS


def asks_for_gradients(error: BaseException) -> bool:
    """Tell whether a model raised since it asked for gradients that a pass does not give.

    Args:
        error: What it raised, or an error whose cause that is.
    """
    said: BaseException | None = error
    while said is not None and not _ASKED.search(str(said)):
        said = said.__cause__
    return said is not None


def lacks_own_gradients(model: nn.Module, error: BaseException) -> bool:
    """Tell the same of a model whose parameters can be given gradients, as they need none yet."""
    return model not in _TAKERS and asks_for_gradients(error)


def with_own_gradients(model: nn.Module, run: Callable[[], T]) -> T:
    """Run something with a held model, and again with gradients of its parameters where it takes some itself.

    Args:
        model: The model, within ``frozen_parameters``; passes that begin later find it as this leaves it.
        run: Runs the model; it can be called twice.
    """
    frozen = _FROZEN[model]
    _TAKERS.discard(model)
    frozen.take_back()
    try:
        return run()
    except (EngineError, RuntimeError) as error:
        if not lacks_own_gradients(model, error):
            raise
    # outside of the except block, whose traceback holds the tensors of that run
    _TAKERS.add(model)
    frozen.give()
    return run()


def _let_go(parameter: Tensor) -> None:
    """Drop a gradient, unless another hook waits for it."""
    if len(parameter._post_accumulate_grad_hooks or ()) == 1:  # noqa: SLF001 - torch has no other way to list them
        parameter.grad = None
