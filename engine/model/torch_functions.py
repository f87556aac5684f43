"""Torch's functions as a mode is shown them: their names, their tensors, and the operations inside them.

Memory layouts of rewritten operations: the order of the dimensions in memory that torch's own result has.

A rewrite computes the same numbers by other operations, which may leave them in another order, and a
`view` of the model's own then fails that torch's result allows.
"""

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import CheckpointFunction

_APPLY = "apply"
_IN_PLACE = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"})
VIEW_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real"})
"""Properties of a tensor that are tensors too."""
POINTWISE = frozenset(
    {"add", "radd", "iadd", "sub", "subtract", "rsub", "isub", "mul", "multiply", "rmul", "imul", "div", "divide"}
    | {"true_divide", "truediv", "rdiv", "rtruediv", "itruediv", "pow", "rpow", "ipow", "maximum", "minimum", "where"}
    | {"addcmul", "addcdiv", "lerp", "fmod", "remainder", "atan2", "hypot", "logaddexp", "copysign"}
)


"""Operations that broadcast their tensors against each other."""
CONSTANTS = frozenset({"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"})
"""Operations of a tensor that take nothing from it but where it stands and of what type it is."""
JOINS = frozenset({"cat", "concat", "concatenate", "stack"})
"""Operations that put tensors beside each other."""
QUESTIONS = frozenset(
    {Tensor.dim, Tensor.is_complex, Tensor.is_floating_point, Tensor.is_inference, Tensor.numel, Tensor.size}
    | {Tensor.stride}
)
"""Methods of a tensor that tell of its form and not of its numbers."""


@dataclass
class Operation:
    """One torch operation, as the mode is shown it."""

    func: Callable[..., Any]
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Find the tensors among the arguments."""
        self.tensors = list(tensors_of((self.args, *self.kwargs.values())))

    def run(self, change: Callable[[Tensor], Tensor] | None = None) -> Any:  # noqa: ANN401 - as torch returns
        """Run the operation.

        Args:
            change: Returns what stands in the place of a tensor, of any shape, among the arguments; None changes
                nothing.

        Returns:
            What torch's function returns.
        """
        if change is None:
            return self.func(*self.args, **self.kwargs)
        return self.func(*with_tensors(tuple(self.args), change), **with_tensors(dict(self.kwargs), change))

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Operation":
        """Return the same operation on other tensors.

        Args:
            change: Returns what stands in the place of a tensor, of any shape, among the arguments.

        Returns:
            The operation, not run.
        """
        args, kwargs = with_tensors(tuple(self.args), change), with_tensors(dict(self.kwargs), change)
        return Operation(self.func, self.name, args, kwargs)

    @property
    def writes(self) -> bool:
        """Whether it writes to its first argument, or to one given as `out`."""
        own = self.func.__name__
        return (own.endswith("_") and not own.endswith("__")) or own in _IN_PLACE or self.kwargs.get("out") is not None

    @property
    def joined_along(self) -> int:
        """The dimension along which tensors are put beside each other."""
        dim = self.kwargs.get("dim", self.args[1] if len(self.args) > 1 else 0)
        return dim if isinstance(dim, int) else 0


def operation_name(func: Callable[..., Any]) -> str:
    """Name an operation.

    Args:
        func: Torch's function or method.

    Returns:
        Its name, without what says that it is a method, private or in place.
    """
    return func.__name__.partition(".")[0].strip("_")


def hides_operations(func: Callable[..., Any]) -> bool:
    """Tell whether a function would show a mode nothing of its inside."""
    return isinstance(func, types.FunctionType) and any(
        name.startswith("has_torch_function") for name in func.__code__.co_names
    )


def reveal_operations(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without the question whether a mode is there, so that the mode sees what is inside.

    Args:
        func: Torch's function or method.

    Returns:
        A twin of the same code; any function that does not ask, itself.
    """
    if not hides_operations(func) or not isinstance(func, types.FunctionType):
        return func
    asked = {name: lambda *_: False for name in func.__code__.co_names if name.startswith("has_torch_function")}
    twin = types.FunctionType(
        func.__code__, {**func.__globals__, **asked}, func.__name__, func.__defaults__, func.__closure__
    )
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def tensors_of(tree: object) -> Iterator[Tensor]:
    """List the tensors in nested tuples, lists and mappings.

    Args:
        tree: Any object.

    Yields:
        Tensors of any shape, in order.
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            if isinstance(part, Tensor):
                yield part
            elif isinstance(part, (tuple, list, dict)):
                yield from tensors_of(part)
    elif isinstance(tree, dict):
        yield from tensors_of(tuple(tree.values()))


def with_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401
    """Replace every tensor in nested tuples, lists and mappings.

    Args:
        tree: Any object; other classes than tuple, list and dict are not entered.
        change: Returns what stands in the place of a tensor, of any shape.

    Returns:
        A tree of the same structure.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)(with_tensors(part, change) for part in tree)
    if isinstance(tree, dict):
        return {key: with_tensors(part, change) for key, part in tree.items()}
    return tree


@contextlib.contextmanager
def show_custom_functions(wanted: Callable[[Sequence[Tensor]], bool]) -> Iterator[None]:
    """Show custom functions (``torch.autograd.Function``) to the modes as one operation each while inside.

    Their gradient is the model's own, so that what happens inside says nothing of it; and no mode is shown ``apply``.

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


REARRANGED = frozenset({"matmul", "rmatmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
"""Operations whose rewrites transpose what they return."""


def layout_of(run: Callable[[Callable[[Tensor], Tensor]], Any]) -> Tensor:
    """Return the result of ``run`` without numbers.

    Args:
        run: Runs an operation with each of its tensors replaced by what the function it is given returns.

    Returns:
        A tensor on the meta device, with the shape and the strides of torch's own result.
    """
    result: Tensor = run(lambda tensor: tensor.detach().to("meta"))
    return result


def arrange_like(left: Tensor, layout: Tensor) -> Tensor:
    """Arrange a tensor in the order of other strides.

    Args:
        left: What a rewrite returned, any shape.
        layout: A tensor of that shape, with strides as torch's own result has them.

    Returns:
        The tensor itself where its order is the same, else a copy of the same shape.
    """
    if left.shape != layout.shape or _steps(left) == _steps(layout):
        return left
    order = sorted(range(layout.ndim), key=lambda dim: (layout.stride(dim), layout.shape[dim] == 1), reverse=True)
    back = sorted(range(layout.ndim), key=order.__getitem__)
    return left.permute(order).contiguous().permute(back)


def _steps(tensor: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one place."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
