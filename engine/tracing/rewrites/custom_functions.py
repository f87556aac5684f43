"""Custom functions of a model (``torch.autograd.Function``), shown to a mode as one operation each.

Their gradient is the model's own, so that what happens inside says nothing of it; and no mode is shown
``apply``.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import CheckpointFunction

from engine.tracing.torch_functions import tensors_of

_APPLY = "apply"


@contextlib.contextmanager
def show_custom_functions(wanted: Callable[[Sequence[Tensor]], bool]) -> Iterator[None]:
    """Show custom functions to the modes while inside.

    Args:
        wanted: Whether a function of these tensors, of any shapes, is to be shown as one operation; else its inside is.

    Returns:
        A context manager; torch's ``Function.apply`` is replaced inside, and restored afterwards.
    """
    original = vars(Function)[_APPLY]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch's own
        def function(*own: Any, **named: Any) -> Any:  # noqa: ANN401 - likewise
            return original.__func__(cls, *own, **named)

        function.__name__ = f"function {cls.__name__}"
        tensors = tuple(tensors_of((args, kwargs)))
        # what is checkpointed runs a part of the model within
        if cls is CheckpointFunction or not has_torch_function(tensors) or not wanted(tensors):
            return function(*args, **kwargs)
        return handle_torch_function(function, tensors, *args, **kwargs)

    setattr(Function, _APPLY, classmethod(apply))
    try:
        yield
    finally:
        setattr(Function, _APPLY, original)
