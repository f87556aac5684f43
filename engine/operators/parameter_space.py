"""The parameter space: all trainable numbers of a model as one vector, in one order.

The order is that of ``named_parameters()``, each parameter row by row, and a parameter that stands under several names
once. A layer's curvature is that of a matrix (out_dim, in_dim) with the bias as its last column; ``gather`` and
``scatter`` carry numbers between such matrices and the vector, by the windows that the collection kept.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.errors import BrokenFactors, UsageError
from engine.factors.factor_set import FactorSet, LayerFacts, ParameterShape
from engine.layers.parameter_slice import Window
from engine.linalg.layer_matrices import aligned

Vector = Tensor | Mapping[str, Tensor]
"""A vector of the space: flat, shape (P,), several as the columns (P, k), or one by parameter."""


@dataclass(frozen=True)
class ParameterSpace:
    """The trainable parameters of a model, in order."""

    parameters: tuple[ParameterShape, ...]

    @classmethod
    def of(cls, factors: FactorSet) -> "ParameterSpace":
        """Return the space that a factor set was collected in.

        Returns:
            Its model's parameters.

        Raises:
            BrokenFactors: If the set is from before the parameters were kept.
        """
        if factors.parameters is None:
            raise BrokenFactors(
                "the stored factors do not say which parameters the model has; collect them again", pointer="/factors"
            )
        return cls(factors.parameters)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The first number of each parameter in the vector, by name."""
        found, offset = {}, 0
        for each in self.parameters:
            found[each.name] = offset
            offset += math.prod(each.shape)
        return found

    @cached_property
    def size(self) -> int:
        """P: numbers of the vector."""
        return sum(math.prod(each.shape) for each in self.parameters)

    def flatten(self, vector: Vector) -> Tensor:
        """Return a vector as one tensor.

        Args:
            vector: Shape (P,) or (P, k), or tensors of the parameters' own shapes by name; a parameter that is left out
                is zero.

        Returns:
            Shape (P,) or (P, k), contiguous; the tensor itself where it is so already.

        Raises:
            UsageError: If its length is another one (both are named, and the parameter in which it ends), a name is
                unknown, a shape differs, or it holds no floating-point numbers.
        """
        if isinstance(vector, Tensor):
            self._require_length(vector)
            return vector.contiguous()
        if not isinstance(vector, Mapping):
            raise UsageError(
                f"the vector must be a torch.Tensor, or tensors by parameter name (got {type(vector).__name__}); "
                "convert an array with torch.as_tensor"
            )
        unknown = sorted(set(vector) - set(self.offsets))
        if unknown:
            raise UsageError(
                f"the vector names `{unknown[0]}`, which is no trainable parameter of these factors; "
                f"they are {few_names([each.name for each in self.parameters])}"
            )
        # notebooks pass whatever they hold
        given: Mapping[str, object] = vector
        for name, part in given.items():
            if not isinstance(part, Tensor) or not part.is_floating_point():
                got = part.dtype if isinstance(part, Tensor) else type(part).__name__
                raise UsageError(f"the vector's `{name}` must be a tensor of floating-point numbers (got {got})")
        parts = []
        like = next(iter(vector.values()), torch.zeros(0))
        widest = functools.reduce(torch.promote_types, (each.dtype for each in vector.values()), like.dtype)
        like = like.new_zeros(0, dtype=widest)
        for each in self.parameters:
            own = vector.get(each.name)
            if own is None:
                parts.append(like.new_zeros(math.prod(each.shape)))
            elif tuple(own.shape) != each.shape:
                raise UsageError(
                    f"the vector's `{each.name}` must have the parameter's shape {each.shape} (got {tuple(own.shape)})"
                )
            else:
                parts.append(own.detach().reshape(-1).to(like))
        return torch.cat(parts) if parts else like.new_zeros(0)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Return a flat vector by parameter.

        Args:
            flat: Shape (P,) or (P, k).

        Returns:
            Views of the parameters' own shapes, with a last dimension of k where there are columns.
        """
        columns = flat.shape[1:]
        return {
            name: part.view((*shape, *columns))
            for (name, shape), part in zip(
                ((each.name, each.shape) for each in self.parameters),
                torch.split(flat, [math.prod(each.shape) for each in self.parameters]),
                strict=True,
            )
        }

    def gather(
        self, facts: LayerFacts, flat: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Return one layer's matrices.

        Args:
            facts: The layer, whose windows are known and lie within the parameters (``require_windows``).
            flat: k vectors, shape (P, k), contiguous.
            dtype: Precision wanted; None is that of ``flat``.
            device: Where they are wanted; None is where ``flat`` is.

        Returns:
            Shape (out_dim, k, in_dim): a copy as ``layer_matrices.aligned`` makes it, or a view where the layer is one
            parameter and k is 1.
        """
        columns = flat.shape[1]
        windows = facts.windows or ()
        wanted, there = dtype or flat.dtype, device or flat.device
        if len(windows) == 1 and columns == 1:
            view = self._seen(windows[0], flat).reshape(facts.out_dim, 1, facts.in_dim)
            return view.to(there, wanted)
        like = torch.empty(0, dtype=wanted, device=there)
        matrices = aligned(facts.out_dim, columns, facts.in_dim, like=like)
        for window, part in self._parts(facts, matrices):
            part.copy_(self._seen(window, flat).reshape(part.shape))
        return matrices

    def scatter(self, facts: LayerFacts, matrices: Tensor, flat: Tensor) -> None:
        """Write one layer's matrices into vectors.

        Args:
            facts: The layer, as for ``gather``.
            matrices: Shape (out_dim, k, in_dim).
            flat: Shape (P, k), contiguous, changed in place.
        """
        for window, part in self._parts(facts, matrices):
            target = self._seen(window, flat)
            target.copy_(part.reshape(target.shape))

    def place_of(self, facts: LayerFacts, row: int, column: int) -> tuple[str, tuple[int, ...]]:
        """Return where one number of a layer's matrix stands.

        Args:
            facts: The layer, as for ``gather``.
            row: Its row of the matrix (out_dim, in_dim).

        Raises:
            ValueError: If no window holds it.
        """
        for window in facts.windows or ():
            down, across = row - window.top, column - window.left
            if not (0 <= down < window.height and 0 <= across < window.width):
                continue
            place, left = window.offset, down * window.width + across
            for size, stride in zip(reversed(window.shape), reversed(window.strides), strict=True):
                left, digit = divmod(left, size)
                place += digit * stride
            index: list[int] = []
            (shape,) = (each.shape for each in self.parameters if each.name == window.parameter)
            for size in reversed(shape):
                place, digit = divmod(place, size)
                index.append(digit)
            return window.parameter, tuple(reversed(index))
        raise ValueError(f"layer `{facts.name}` has no number at row {row} and column {column}")

    def require_windows(self, facts: LayerFacts) -> None:
        """Check that the numbers of a layer are known, and lie within the parameters.

        Raises:
            BrokenFactors: If they are not.
        """

        def broken(said: str) -> BrokenFactors:
            return BrokenFactors(f"layer `{facts.name}`: {said}", layer=facts.name, pointer="/factors")

        if facts.windows is None:
            raise broken(
                f"it is not known where the numbers of its matrix stand in {few_names(facts.parameters)}; leave the "
                "layer out, or collect the factors again"
            )
        shapes = {each.name: each.shape for each in self.parameters}
        numbers = 0
        for window in facts.windows:
            inside = (
                window.parameter in shapes
                and len(window.shape) == len(window.strides)
                and window.last < math.prod(shapes[window.parameter])
                and math.prod(window.shape) == window.height * window.width
                and window.top + window.height <= facts.out_dim
                and window.left + window.width <= facts.in_dim
            )
            if not inside:
                raise broken(f"the index places its numbers outside of `{window.parameter}`; collect the factors again")
            numbers += window.height * window.width
        if numbers != facts.in_dim * facts.out_dim:
            of = facts.in_dim * facts.out_dim
            raise broken(f"the index places {numbers} of its {of} numbers; collect the factors again")

    def _seen(self, window: Window, flat: Tensor) -> Tensor:
        """The window as a view (rows' digits, k, columns' digits), which can be reshaped to (height, k, width)."""
        columns = flat.shape[1]
        shape, strides = _split(window)
        rows = _digits_of(shape, window.height)
        offset = flat.storage_offset() + (self.offsets[window.parameter] + window.offset) * columns
        whole = (*shape[:rows], columns, *shape[rows:])
        steps = (*(each * columns for each in strides[:rows]), 1, *(each * columns for each in strides[rows:]))
        return flat.as_strided(whole, steps, offset)

    def _parts(self, facts: LayerFacts, matrices: Tensor) -> Iterator[tuple[Window, Tensor]]:
        for window in facts.windows or ():
            rows = slice(window.top, window.top + window.height)
            yield window, matrices[rows, :, window.left : window.left + window.width]

    def _require_length(self, vector: Tensor) -> None:
        if not vector.is_floating_point():
            raise UsageError(f"the vector must hold floating-point numbers (got {vector.dtype})")
        if vector.ndim in (1, 2) and vector.shape[0] == self.size:
            return
        length = vector.shape[0] if vector.ndim else 0
        within = [name for name, offset in self.offsets.items() if offset <= length]
        ends = f"; it ends within `{within[-1]}`" if within and length < self.size else ""
        raise UsageError(
            f"the vector must have shape ({self.size},) or ({self.size}, k), one number for each of the "
            f"{len(self.parameters)} trainable parameters in the order of named_parameters() "
            f"(got {tuple(vector.shape)}){ends}"
        )


def _split(window: Window) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a window in which a run of digits makes up the rows, and the rest the columns."""
    shape: list[int] = []
    strides: list[int] = []
    left = window.height
    for size, stride in zip(window.shape, window.strides, strict=True):
        if left > 1 and size > left:
            # one digit counts through rows and columns
            shape += [left, size // left]
            strides += [stride * (size // left), stride]
            left = 1
            continue
        shape.append(size)
        strides.append(stride)
        if left > 1:
            left //= size
    return tuple(shape), tuple(strides)


def _digits_of(shape: Sequence[int], height: int) -> int:
    """How many leading digits make up ``height`` rows."""
    count, rows = 0, 1
    while rows < height:
        rows *= shape[count]
        count += 1
    return count


def few_names(names: Sequence[str]) -> str:
    """Write up to five names, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
