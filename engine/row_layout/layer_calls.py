"""The calls of treated layers in a dry run, and the conclusions from them.

Which layers are fed by the same tensor, which cannot tell their examples apart, which tables are
looked up once for a whole batch.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import Unwinding
from engine.layers.embedding import EmbeddingLayer
from engine.layers.layer import COMPLEX_NUMBERS, TreatedLayer
from engine.layers.linear import LinearLayer
from engine.row_layout.unbatched_inputs import disturb_last_copy, lacks_examples, spread

TRANSFORMED = "transformed"
"""Reason of what is called, or whose parameters enter operations, within a transform of ``torch.func``."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
"""The place of a module in a list of such, within its name."""


@dataclass
class Call:
    """One call of a treated layer, seen in the dry run."""

    layer: TreatedLayer
    entered: Tensor
    output: Tensor
    version: int
    """Writes to ``entered`` before this call."""
    written: int = 0
    """Writes to ``output`` before it was returned."""


def list_of(name: str) -> str:
    """Name the list that a module stands in, without numbers, as all modules at such a place of a list are."""
    return _NUMBER.sub(".*", name)


@contextlib.contextmanager
def record_calls(
    layers: tuple[TreatedLayer, ...],
    examples: int = 1,
    tables: frozenset[str] = frozenset(),
    disturb: str | None = None,
) -> Iterator[list[Call]]:
    """List every call of some layers, in order.

    Args:
        layers: Layers to watch.
        examples: Examples N of the batch.
        tables: Names of embeddings that are looked up once for a batch; what they return is spread over the examples.
        disturb: The table whose copy for the last example is disturbed; None for none.

    Returns:
        A context manager with a list that grows as calls are made. It holds their inputs and outputs until it is
        dropped.
    """
    calls: list[Call] = []

    def watch(layer: TreatedLayer) -> Any:  # noqa: ANN401 - torch's hook signature
        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:  # noqa: ANN401
            entered, output = plain_of(entered_by(args, kwargs)), plain_of(output)
            writes, instead = version(entered), None
            if layer.name in tables and lacks_examples(entered):
                instead = spread(output, entered, examples)
                entered = spread(entered, entered, examples)
                if layer.name == disturb:
                    instead = disturb_last_copy(instead)
            returned = output if instead is None else instead
            calls.append(Call(layer, entered, returned, writes, version(returned)))
            return instead

        return after

    handles = [
        module.register_forward_hook(watch(role), with_kwargs=True, prepend=True) for role, module in called(layers)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def called(layers: Iterable[TreatedLayer]) -> Iterator[tuple[TreatedLayer, nn.Module]]:
    """List the modules that are called for some layers.

    Args:
        layers: Treated layers, one of which may consist of several parts.

    Yields:
        Each part of a layer with each module that holds its parameters.
    """
    for layer in layers:
        for role in layer.roles:
            for module in (role.module, *role.also.values()):
                yield role, module


def entered_by(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the tensor, of any shape, that entered a module: the first argument, of named ones `input` or the first.

    ``TypeError`` if that argument is not a tensor.
    """
    entered = args[0] if args else kwargs.get("input", next(iter(kwargs.values())))
    if not isinstance(entered, Tensor):
        raise TypeError(f"a treated layer was called with {type(entered).__name__} instead of a tensor")
    return entered


def hidden_by(*tensors: object) -> str | None:
    """Tell why the rows of some tensors cannot be looked at.

    Args:
        tensors: What entered or left a layer.

    Returns:
        The reason as coverage names it: within a transform of ``torch.func`` a tensor stands for another, a nested one
        holds rows of several lengths, and complex rows have no A and G; None where all are plain tensors, or none.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001 - torch has no other name for it
            return TRANSFORMED
        if tensor.is_nested:
            return "nested_tensor"
        if tensor.is_complex():
            return COMPLEX_NUMBERS
    return None


def plain_of(tensor: Tensor) -> Tensor:
    """Return a tensor of which sizes can be read, in the place of one whose rows cannot be looked at.

    Args:
        tensor: What entered or left a layer.

    Returns:
        What a transform's tensor stands for, a nested one padded to one length, shape (N, T, d); any other itself.
    """
    while hidden_by(tensor) == TRANSFORMED:
        tensor = torch._C._functorch.get_unwrapped(tensor)  # noqa: SLF001 - likewise
    return torch.nested.to_padded_tensor(tensor, 0.0) if hidden_by(tensor) == "nested_tensor" else tensor


def version(tensor: Tensor) -> int:
    """Return how often a tensor, of any shape, was written to; 0 of an inference tensor, which keeps no count."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - autograd's own guard, with no other name


class InputOverwritten(Unwinding):
    """The model wrote to what had entered a layer, which its gradient was to be paired with."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__(", ".join(layers))
        self.layers = layers


def require_unwritten(entered: Tensor, read: int, layer: str) -> None:
    """Raise ``InputOverwritten`` if a layer's input, of any shape, was written to since its ``version`` was read."""
    if read != version(entered):
        raise InputOverwritten((layer,))


def find_overwritten(calls: list[Call]) -> frozenset[str]:
    """Find the layers whose input the model wrote to after their call.

    Args:
        calls: Calls of one forward pass, which has ended.
    """
    return frozenset(call.layer.name for call in calls if version(call.entered) != call.version)


def find_followers(calls: list[Call], layers: tuple[TreatedLayer, ...]) -> dict[str, str]:
    """Find the layers that are fed by the very tensor that another one is fed by.

    Only linear layers with the same column of ones share; identity of the tensor decides, unless it was written to in
    between, and never equality of its values.

    Args:
        calls: Calls of one forward pass; a layer that is called twice shares with no other.
        layers: Treated layers in the order of the model, the first of which leads, whichever is called first.

    Returns:
        By the follower's name that of its leader.
    """
    count = Counter(call.layer.name for call in calls)
    own = {call.layer.name: call for call in calls if count[call.layer.name] == 1}
    leaders: dict[tuple[int, int, bool, bool], str] = {}
    shared: dict[str, str] = {}
    for layer in layers:
        if not isinstance(layer, LinearLayer) or layer.name not in own:
            continue
        call = own[layer.name]
        leader = leaders.setdefault((id(call.entered), call.version, layer.weight, layer.bias), layer.name)
        if leader != layer.name:
            shared[layer.name] = leader
    return shared


def find_unattributed(fewer: list[Call], more: list[Call], examples: tuple[int, int]) -> frozenset[str]:
    """Find the layers whose positions do not belong to one example each.

    A layer that is called once for the whole batch (a table of positions that is then broadcast), or has the examples
    elsewhere than first, sees other sizes than in proportion to them.

    Args:
        fewer: Calls for the smaller batch, one example repeated.
        more: Calls for the larger batch, the same example repeated.
        examples: Examples of the two batches, in this order.
    """
    mixed = {
        call.layer.name
        for calls, repeated in zip((fewer, more), examples, strict=True)
        for call in calls
        if not call.layer.batch_first(call.entered, repeated)
    }
    left, right = (_sizes(calls) for calls in (fewer, more))
    return frozenset(mixed | {name for name in left | right if left[name] * examples[1] != right[name] * examples[0]})


def find_routed(copies: list[Call], different: list[Call], examples: tuple[int, int]) -> frozenset[str]:
    """Find the layers that are given the rows of some examples alone, as experts are.

    Args:
        copies: Calls for a batch of one example, repeated.
        different: Calls for a batch of different examples.
        examples: Examples of the two batches, in this order.

    Returns:
        Names of layers with a call of different examples that has not the rows of each, and of layers in the same list
        of modules as one of these, or as one that only different examples call.
    """
    known: dict[str, set[Fraction]] = {}
    for call in copies:
        known.setdefault(call.layer.name, set()).add(Fraction(call.entered.numel(), examples[0]))
    alike = {
        list_of(call.layer.name)
        for call in different
        if not call.layer.batch_first(call.entered, examples[1])
        or Fraction(call.entered.numel(), examples[1]) not in known.get(call.layer.name, ())
    }
    names = {call.layer.name for call in (*copies, *different)}
    return frozenset(name for name in names if list_of(name) in alike)


def find_shared_tables(fewer: list[Call], more: list[Call]) -> tuple[str, ...]:
    """Find the embeddings that are looked up once for a whole batch.

    Their ids had the same sizes in both batches, and never a dimension for the examples.
    """
    sizes: dict[str, list[list[int]]] = {}
    refused: set[str] = set()
    for place, calls in enumerate((fewer, more)):
        for call in calls:
            sizes.setdefault(call.layer.name, [[], []])[place].append(call.entered.numel())
            if not isinstance(call.layer, EmbeddingLayer) or not lacks_examples(call.entered):
                refused.add(call.layer.name)
    return tuple(name for name, (left, right) in sizes.items() if name not in refused and left == right)


def _sizes(calls: list[Call]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for call in calls:
        sizes[call.layer.name] += call.entered.numel()
    return sizes


@dataclass
class CallShapes:
    """Sizes with which a batch calls each layer, in terms of those of the model's inputs, since they were last taken.

    Texts of another length have another size everywhere, and still the same shape in these terms; texts as long as
    there are examples have another one, and that is where positions are mistaken for examples.
    """

    _found: set[str] = field(default_factory=set)
    _examples: int = 1
    _sizes: dict[int, str] = field(default_factory=dict)
    """Sizes that the model's inputs have, by what they are the size of."""

    def begin(self, examples: int, inputs: Sequence[Tensor]) -> None:
        """Prepare for a forward pass.

        Args:
            examples: Examples N of the batch.
            inputs: Tensors that enter the model, of any shapes; a size that is one of theirs is written as that.
        """
        self._examples = examples
        self._sizes = {size: f"in{axis}" for each in inputs for axis, size in enumerate(each.shape)}
        self._sizes[examples] = "N"

    def note(self, layer: str, number: int, entered: Tensor, *, picked: bool = False) -> None:
        """Note the shape of one call.

        Args:
            layer: Name of the called layer.
            number: How often it was called before in this pass.
            entered: Its input, of any shape.
            picked: The number of rows is decided by the data, as an expert's is, and is not written.
        """
        first, *others = entered.shape or (1,)
        sizes = ["rows" if picked else self._written(first), *map(self._written, others)]
        self._found.add(f"{layer}#{number}({','.join(sizes)})")

    def take(self) -> frozenset[str]:
        """Return what was found, and begin anew."""
        shapes, self._found = frozenset(self._found), set()
        return shapes

    def _written(self, size: int) -> str:
        name = self._sizes.get(size)
        if name is not None:
            return name
        factor = self._sizes.get(size // self._examples) if size % self._examples == 0 else None
        return str(size) if factor is None else f"N*{factor}"
