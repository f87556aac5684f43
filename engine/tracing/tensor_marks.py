"""Marks: a function mode's knowledge of each tensor in the current forward pass, kept on the tensor itself.

A tensor is *derived* where it was made of watched parameters alone, and *data* where anything that
entered the model is in it; of data, a mark says where its examples are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.memory.out_of_memory import is_unexplained
from engine.model.torch_functions import CONSTANTS, JOINS, Operation, tensors_of
from engine.row_layout.layer_calls import version
from engine.tracing.batch_provenance import Rows, batch_first, rows_of_one
from engine.tracing.derived_weights import Derivation
from engine.tracing.followed_rows import follow_rows
from engine.tracing.moved_rows import (
    SCATTERS,
    STACKS,
    follow_join,
    follow_moved,
    follow_scatter,
    source_of,
    with_one,
    written_at,
)

_MARK = "kronoscope"
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Mark:
    """A record of what is known of one tensor."""

    epoch: object
    sources: frozenset[str] | None = None
    """The parameters that it was made of alone; None for data."""
    rows: Rows | None = None
    """The place of the examples in data, if that is known."""
    expansion: Tensor | None = None
    """The numbers of a repetition as an expansion, by whose strides its copies are known to be alike."""
    version: int = 0
    """Writes to the tensor until the expansion was made, or the derivation."""
    made: Derivation | None = None
    """The way in which it is linear in other derived tensors, if that is known."""


def tried(rule: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Return what a rule finds; None where it raises an error of its own, as those of its machine do not stop here."""
    try:
        return rule(*args, **kwargs)
    except Exception as error:
        if not is_unexplained(error):
            raise
        return None


class Marks:
    """The marks of one forward pass, of tensors of any shape; those of earlier passes do not count."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._epoch = object()
        self.examples = 0
        """N of the pass."""

    def begin(self, examples: int) -> None:
        """Forget all marks, for another forward pass."""
        self.examples, self._epoch = examples, object()

    def of(self, tensor: Tensor) -> Mark | None:
        """Return a tensor's mark of this pass; None where it has none."""
        mark = vars(tensor).get(_MARK)
        return mark if isinstance(mark, Mark) and mark.epoch is self._epoch else None

    def put(
        self,
        tensor: Tensor,
        sources: frozenset[str] | None = None,
        rows: Rows | None = None,
        expansion: Tensor | None = None,
        made: Derivation | None = None,
    ) -> None:
        """Mark a tensor in the place of what was known of it.

        Args:
            sources: Names of the parameters that it was made of alone; None for data.
            rows: Where the examples of data are; None where that is not known.
            expansion: The same numbers as an expansion, of the tensor's shape; None for what is not a repetition.
            made: How it is linear in other derived tensors; None where that is not known.
        """
        written = 0 if expansion is None and made is None else version(tensor)
        vars(tensor)[_MARK] = Mark(self._epoch, sources, rows, expansion, written, made)

    def made(self, tensor: Tensor) -> Derivation | None:
        """Return a tensor's derivation; None where none is known, or it or a part of it was written to since."""
        mark = self.of(tensor)
        if mark is None or mark.made is None or mark.version != version(tensor) or not mark.made.holds:
            return None
        return mark.made

    def expanded(self, tensor: Tensor) -> Tensor:
        """Return the expansion, of its shape, of a repetition not written to since; any other tensor itself."""
        mark = self.of(tensor)
        if mark is None or mark.expansion is None or mark.version != version(tensor):
            return tensor
        return mark.expansion

    def parameter(self, tensor: Tensor) -> str | None:
        """Return the name of a watched parameter; None for any other tensor."""
        return self._names.get(id(tensor))

    def sources(self, tensor: Tensor) -> frozenset[str]:
        """Return the names of the parameters that a tensor was made of alone; none for data and constants."""
        name = self.parameter(tensor)
        if name is not None:
            return frozenset({name})
        mark = self.of(tensor)
        return frozenset() if mark is None or mark.sources is None else mark.sources

    def is_data(self, tensor: Tensor) -> bool:
        """Tell whether a tensor depends on what entered the model.

        False for constants and derived tensors; True for what requires a gradient without a mark.
        """
        if self.sources(tensor):
            return False
        return tensor.requires_grad or self.of(tensor) is not None

    def rows(self, tensor: Tensor) -> Rows | None:
        """Return where the examples of data are; None where that is not known.

        Data that came out of an operation that no mode sees are taken to lead with them.
        """
        mark = self.of(tensor)
        return batch_first(tensor, self.examples) if mark is None else mark.rows

    def rows_at(self, data: Sequence[Tensor], dimensions: int) -> Rows | None:
        """Return where the examples of a result are that data are broadcast to, from the last of its ``dimensions``.

        They are those of the first data of which they are known; None where they are not known of any.
        """
        for tensor in data:
            rows = self.rows(tensor)
            if rows is not None:
                dim = rows.dim + dimensions - tensor.ndim
                return Rows(dim=dim, minor=rows.minor, size=rows.size, labels=rows.labels)
        return None

    def follow(self, operation: Operation, left: object) -> None:
        """Mark the results of an operation on data; where following it fails, as data whose examples are not known."""
        results = list(tensors_of((operation.args[0],) if operation.writes and operation.args else (left,)))
        if tried(self._follow, operation, results) is None:
            for result in results:
                self.put(result)

    def _follow(self, operation: Operation, results: Sequence[Tensor]) -> bool:
        """Mark the results of an operation on data; True once that is done."""
        data = [tensor for tensor in operation.tensors if self.of(tensor) is not None]
        if not data or (operation.name in ("to", "type_as") and operation.args[0] is not data[0]):
            # a constant that takes only its type from the data stays one
            return True
        one, moved = self.only(operation), None
        for place, result in enumerate(results):
            rows = tried(self._combined, operation, result) or self._followed_any(operation, data, result, one)
            if rows is None and one is not None:
                rows = rows_of_one(one, result, self.examples)
            if rows is None and self.examples > 1:
                if moved is None:
                    moved = tried(follow_moved, operation, self._known_rows, self.examples) or []
                rows = moved[place] if len(moved) == len(results) else None
            if operation.name not in CONSTANTS or (rows is not None and rows.labels is None):
                self.put(result, rows=rows)
        return True

    def only(self, operation: Operation) -> int | None:
        """Return the example that all data of an operation are of, as far as their rows are known."""
        data = [tensor for tensor in operation.tensors if self.of(tensor) is not None and not self.sources(tensor)]
        known = [rows for tensor in data if (rows := self.rows(tensor)) is not None]
        found = {rows.one for rows in known}
        if len(found) != 1 or self.examples == 1:
            return None
        joins = operation.name in JOINS | STACKS
        # the rows of a constant beside it, or around it, may be of others
        if (joins and len(known) < len(operation.tensors)) or (operation.writes and self.of(operation.args[0]) is None):
            return None
        return found.pop()

    def _followed_any(self, operation: Operation, data: Sequence[Tensor], left: Tensor, one: int | None) -> Rows | None:
        """Follow the rows of the first tensor of which they are known; where examples differ, of all examples'."""
        for tensor in data:
            before = self.rows(tensor)
            if before is None or (before.one is not None and one is None):
                continue
            rows = tried(follow_rows, operation, tensor, before, left, self.examples)
            if rows is not None and (one is None or rows.fits(left)):
                return with_one(rows, before, self.examples)
        # one example alone
        alone = self.examples == 1 and left.ndim > 0 and operation.tensors[0] is data[0]
        return Rows(dim=0, minor=left.shape[0], size=left.shape[0]) if alone else None

    def _known_rows(self, tensor: Tensor) -> Rows | None:
        return None if self.of(tensor) is None else self.rows(tensor)

    def _combined(self, operation: Operation, left: Tensor) -> Rows | None:
        """Return the rows of what the rows of several tensors were put into; None where there is no rule for it."""
        if operation.name in SCATTERS or operation.name == "setitem":
            return self._scattered(operation, left)
        return self._joined(operation, left) if operation.name in JOINS - {"stack"} else None

    def _joined(self, operation: Operation, left: Tensor) -> Rows | None:
        parts = [self.rows(tensor) for tensor in operation.args[0] if self.of(tensor) is not None]
        dim = operation.joined_along % left.ndim
        rows = [part for part in parts if part is not None and part.dim == dim]
        return follow_join(rows, self.examples, left.device) if len(rows) == len(operation.args[0]) else None

    def _scattered(self, operation: Operation, left: Tensor) -> Rows | None:
        """Return the rows of what other rows were put into, along the dimension of their examples."""
        args, into = operation.args, operation.args[0]
        parts = written_at(args) if operation.name == "setitem" else source_of(args, operation.kwargs)
        rows = None if parts is None else self.rows(parts[2])
        if parts is None or rows is None or self.of(parts[2]) is None:
            return None
        if rows.one is None and parts[0] % left.ndim != rows.dim + left.ndim - parts[2].ndim:
            return None
        held = self.of(into)
        if held is not None and (held.rows is None or held.rows.dim != parts[0] % left.ndim):
            # what is there already has an order that is not known
            return None
        return follow_scatter(
            rows, None if held is None else held.rows, parts[1], parts[0] % left.ndim, left, self.examples
        )


class Marking(TorchFunctionMode):
    """A mode that keeps marks, and tells them to those who rewrite its operations; within it, theirs are shown too."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._marks = Marks(parameters)

    def is_data(self, tensor: Tensor) -> bool:
        """Tell whether a tensor depends on what entered the model, as ``Marks`` does."""
        return self._marks.is_data(tensor)

    def is_derived(self, tensor: object) -> bool:
        """Tell whether a tensor was made of the watched parameters alone."""
        return isinstance(tensor, Tensor) and bool(self._marks.sources(tensor))

    def leads(self, tensor: Tensor) -> bool:
        """Tell whether data's examples are along the first dimension, or unknown; False in a pass of one example."""
        return self._marks.examples > 1 and getattr(self._marks.rows(tensor), "dim", 0) == 0

    def rows_of(self, tensor: Tensor) -> Rows | None:
        """Return where the examples of data are; None where they are not known."""
        return self._marks.rows(tensor)

    def rows_put(self, source: Tensor, index: Tensor, left: Tensor) -> Rows | None:
        """Return the rows of a result that those of data were put into at ``index`` (K,); None where examples meet."""
        rows = self._marks.rows(source)
        return None if rows is None else follow_scatter(rows, None, index, rows.dim, left, self._marks.examples)

    def with_rows(self, tensor: Tensor, rows: Rows | None) -> Tensor:
        """Note where the examples of data are; None where that is not known."""
        self._marks.put(tensor, rows=rows)
        return tensor


def find_copies_dim(tensor: Tensor, examples: int) -> int | None:
    """Find the dimension along which a tensor holds a copy for each example.

    Copies are known by a stride of zero. None where no dimension or several hold N of them, and for one example.
    """
    sizes = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    alike = [dim for dim, (size, stride) in sizes if stride == 0 and size == examples > 1]
    return alike[0] if len(alike) == 1 else None
