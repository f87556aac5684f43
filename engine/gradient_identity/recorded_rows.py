"""Recorded rows of each layer, of all examples or of a few, and the differences between those of two recordings."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from engine.accumulation.output_gradients import RowObserver
from engine.layers.layer import TreatedLayer, Use, of_examples
from engine.row_layout.layer_calls import require_unwritten, version


@dataclass(eq=False)
class RowRecorder(RowObserver):
    """Keeps the rows of one layer in one forward and backward pass: those of all examples, or of a few."""

    layer: TreatedLayer
    places: tuple[int, ...] | None = None
    """The examples whose rows are kept, each numbered by its place here; None keeps those of all."""
    weight: float = 1.0
    """Factor of the direction that is pulled back: rows are those of the sum over directions."""
    uses: list[Use] = field(default_factory=list)
    """Calls whose inputs enter A, in order."""
    met: list[tuple[Use, Tensor]] = field(default_factory=list)
    """Calls with the gradients of their outputs, in the order of their arrival."""
    example_gradients: Tensor | None = None
    """(N, numbers) of a parameter that enters no product."""
    _again: list[int] | None = None
    """Calls that this direction may have run again, as a reentrant checkpoint does; None in the first direction."""

    def begin_direction(self, weight: float, *, first: bool) -> None:
        """Prepare for the gradients of one direction."""
        self.weight, self._again = weight, None if first else list(range(len(self.met)))

    @property
    def reached(self) -> bool:
        """Whether a gradient arrived."""
        return bool(self.met) or self.example_gradients is not None

    @property
    def picks(self) -> bool:
        """Whether rows were picked: the rows of one example have no order of their own then."""
        return any(use.owners is not None for use in self.uses)

    @override
    def add_input_(self, use: Use) -> None:
        self.uses.append(self._kept(use))

    @override
    def follow(self, use: Use) -> Callable[[Tensor], None]:
        kept, read = self._kept(use), version(use.input)
        number: int | None = None

        def arrived(gradient: Tensor) -> None:
            nonlocal number
            if self.places is None:
                require_unwritten(use.input, read, self.layer.name)
            own = gradient if self.places is None else _cut(gradient, use, self.places)
            number = self._recomputed(kept) if number is None else number
            if number is None:
                number = len(self.met)
                self.met.append((kept, own if self.weight == 1 else own * self.weight))
            else:
                self.met[number] = kept, self.met[number][1] + self.weight * own

        return arrived

    @override
    def add_example_gradients_(self, gradients: Tensor, start: int, examples: int) -> None:
        places = range(examples) if self.places is None else self.places
        if self.example_gradients is None:
            self.example_gradients = gradients.new_zeros(len(places), gradients.shape[1])
        for number, place in enumerate(places):
            if start <= place < start + gradients.shape[0]:
                self.example_gradients[number] += self.weight * gradients[place - start]

    def _recomputed(self, kept: Use) -> int | None:
        """Find the call that was run again for another direction: the first one with the same input."""
        for place, known in enumerate(self._again or ()):
            if torch.equal(self.met[known][0].input, kept.input):
                return (self._again or []).pop(place)
        return None

    def _kept(self, use: Use) -> Use:
        if self.places is None:
            return use
        entered, owners = _cut(use.input, use, self.places), None
        if use.owners is not None:
            own = [torch.full_like(use.owners[use.owners == place], n) for n, place in enumerate(self.places)]
            owners = torch.cat(own)
        kept = None if use.kept is None else _cut(use.kept[:, None], use, self.places)[:, 0]
        return Use(entered=entered, examples=len(self.places), kept=kept, owners=owners, role=use.role)


@dataclass(eq=False)
class GradientSketch(RowObserver):
    """Sums up, in two numbers for each of N examples, the gradients that arrive at the outputs of one layer."""

    examples: int
    """N."""
    weight: float = 1.0
    """Factor of the direction that is pulled back."""
    form: Tensor | float = 0.0
    """(N,) a multilinear form of each call's gradient, of seeded vectors, over all calls."""
    square: Tensor | float = 0.0
    """(N,) the squared norm, over all calls and directions."""

    @override
    def add_input_(self, use: Use) -> None:
        del use

    @override
    def follow(self, use: Use) -> Callable[[Tensor], None]:
        owners, examples = use.owners, use.examples

        def arrived(gradient: Tensor) -> None:
            rows = gradient if owners is None else gradient.reshape(-1, gradient.shape[-1])
            own = rows if owners is not None else rows.reshape(examples, -1, *rows.shape[1:])
            form, square = own, torch.linalg.vector_norm(own.flatten(1), dim=1).square()
            for size in reversed(own.shape[1:]):
                form = form @ _vector(size, own)
            if owners is not None:
                form, square = (each.new_zeros(examples).index_add_(0, owners, each) for each in (form, square))
            self._add(form, square)

        return arrived

    @override
    def add_example_gradients_(self, gradients: Tensor, start: int, examples: int) -> None:
        whole = gradients.new_zeros(2, examples)
        whole[:, start : start + len(gradients)] = torch.stack(
            (gradients @ _vector(gradients.shape[1], gradients), torch.linalg.vector_norm(gradients, dim=1).square())
        )
        self._add(*whole)

    def _add(self, form: Tensor, square: Tensor) -> None:
        self.form, self.square = self.form + self.weight * form, self.square + square


def _vector(size: int, like: Tensor) -> Tensor:
    """Numbers of unit variance, the same each time."""
    return torch.arange(1, size + 1, device=like.device, dtype=torch.float64).sin_().mul_(math.sqrt(2)).to(like.dtype)


def _cut(tensor: Tensor, use: Use, places: Sequence[int]) -> Tensor:
    """A copy of the rows of some examples, one example behind the other."""
    if use.owners is None:
        return torch.cat([of_examples(tensor, use.examples, place, place + 1) for place in places])
    rows = tensor.reshape(-1, tensor.shape[-1])
    return torch.cat([rows[use.owners == place] for place in places])


@dataclass(frozen=True, kw_only=True)
class ExampleRows:
    """The rows of one example in the recording of one layer."""

    recorder: RowRecorder
    example: int
    """Place in the batch."""
    has_gradients: bool = True
    """Something was pulled back: the inputs of calls without a gradient do not count then."""

    def inputs(self) -> Iterator[Tensor]:
        """Yield the example's part of each call's input, of its shape, or (rows, d_in) where rows were picked."""
        for use in [use for use, _ in self.recorder.met] if self.has_gradients else self.recorder.uses:
            if use.owners is None:
                yield use.of_examples(self.example, self.example + 1).input
            else:
                entered = use.input
                yield entered.reshape(-1, entered.shape[-1])[use.owners == self.example]

    def gradients(self) -> Iterator[Tensor]:
        """Yield the example's part of each output's gradient, of its shape, or (rows, d_out) where rows were picked."""
        for use, gradient in self.recorder.met:
            if use.owners is None:
                yield of_examples(gradient, use.examples, self.example, self.example + 1)
            else:
                yield gradient.reshape(-1, gradient.shape[-1])[use.owners == self.example]
        if self.recorder.example_gradients is not None:
            yield self.recorder.example_gradients[self.example]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The rows of some layers in one forward and backward pass."""

    layers: dict[str, RowRecorder]
    outputs: Tensor
    """(N, R, C), detached."""
    cotangent: Tensor | None
    """The vector that was pulled back, of the shape of ``outputs``; None where none was."""
    examples: int
    """N of the outputs."""
    direction: Tensor | None = None
    """Vector that the loss itself would pull back of these outputs, where another was; None for `type2`."""
    places: tuple[int, ...] | None = None
    """Places in the outputs of the examples whose rows are kept, in order; None where those of all are."""

    def of(self, tensor: Tensor, number: int) -> Tensor:
        """Take one example's part of the outputs, or of the cotangent; a loss of the model's own is of all.

        It is a view, or the tensor itself; ``number`` is that of the example among those whose rows are kept.
        """
        if tensor.shape[0] != self.examples:
            return tensor
        place = number if self.places is None else self.places[number]
        return tensor[place : place + 1]

    def largest_input(self) -> float:
        """Return the norm of the largest input of any call of the first example."""
        every = (rows for name in self.layers for rows in self.rows(name, 0).inputs())
        real = (rows for rows in every if rows.is_floating_point() and rows.numel())
        return max((float(torch.linalg.vector_norm(rows)) for rows in real), default=0.0)

    def rows(self, layer: str, example: int) -> ExampleRows:
        """Return the rows of one example."""
        return ExampleRows(recorder=self.layers[layer], example=example, has_gradients=self.cotangent is not None)


@dataclass
class Errors:
    """Largest relative differences of one layer so far."""

    completeness: float = 0.0
    independence: float = 0.0

    def raise_to(self, identity: str, value: float) -> None:
        """Note one more difference."""
        if math.isnan(value):
            value = math.inf
        setattr(self, identity, max(getattr(self, identity), value))

    @property
    def largest(self) -> tuple[float, str]:
        """The larger difference, and the identity that it belongs to."""
        return max((self.completeness, "completeness"), (self.independence, "independence"))


def compare_rows(
    errors: Errors, together: ExampleRows, alone: ExampleRows, *, floor: float, floor_of_inputs: float = 0.0
) -> None:
    """Note how far one example's rows in a batch are from those in another recording; the floors as of ``relative``."""
    picks = together.recorder.picks
    for own, theirs in ((ExampleRows.inputs, floor_of_inputs), (ExampleRows.gradients, floor)):
        # a call that none of an example's rows enter is not a call of the example alone
        mine, plain = ([rows.reshape(-1) for rows in own(side) if rows.numel()] for side in (together, alone))
        if own is ExampleRows.gradients and not (mine and plain):
            # no gradient at all is one of zeros
            rest = [rows for rows in (*mine, *plain) if bool(rows.any())]
            errors.raise_to("independence", max((relative(rows, rows, theirs) for rows in rest), default=0.0))
            continue
        if [rows.numel() for rows in mine] != [rows.numel() for rows in plain]:
            errors.raise_to("independence", math.inf)
            continue
        widths = [rows.shape[-1] for rows in own(together) if rows.numel()] if picks else []
        for place, (a, b) in enumerate(zip(mine, plain, strict=True)):
            error = _difference(a, b, theirs)
            if error and picks:
                # who picks rows may pick those of one example in another order, which no sum depends on
                a, b = (_sorted(rows.view(-1, widths[place])) for rows in (a, b))  # noqa: PLW2901
                error = min(error, _difference(a, b, theirs))
            errors.raise_to("independence", error)


def _difference(a: Tensor, b: Tensor, floor: float) -> float:
    return relative(a - b, b, floor) if a.is_floating_point() else float((a != b).any())


def _sorted(rows: Tensor) -> Tensor:
    """Rows (T, d) in an order that depends on their numbers alone."""
    weights = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=torch.float64).sin()
    return rows[(rows.to(torch.float64) @ weights).argsort()]


Sketch = tuple[tuple[int, float, float], ...]
"""Size, Frobenius norm and bilinear form of each call's input and gradient."""


def sketch(rows: ExampleRows) -> Sketch:
    """Sum up one example's rows in few numbers, by which they are known again."""
    found = []
    for each in (*rows.inputs(), *rows.gradients()):
        if not each.numel():
            found.append((0, 0.0, 0.0))
            continue
        real = torch.view_as_real(each) if each.is_complex() else each
        wide = real if real.is_floating_point() else real.to(torch.float64)
        matrix = wide.reshape(-1, wide.shape[-1]) if wide.ndim else wide.reshape(1, 1)
        left, right = (torch.arange(1.0, 1 + size, device=wide.device).sin_().to(wide.dtype) for size in matrix.shape)
        found.append((each.numel(), float(torch.linalg.vector_norm(matrix)), float(left @ (matrix @ right))))
    return tuple(found)


def is_known(own: Sketch, known: Sketch, tolerance: float) -> bool:
    """Tell whether rows are those that were seen before, by their sketches."""
    if [each[0] for each in own] != [each[0] for each in known]:
        return False
    return all(
        abs(norm - before) <= tolerance * before and abs(form - earlier) <= tolerance * before
        for (_, norm, form), (_, before, earlier) in zip(own, known, strict=True)
    )


def is_finite(recording: Recording) -> bool:
    """Tell whether all gradients of a recording are finite."""
    arrived = [gradient for each in recording.layers.values() for _, gradient in each.met]
    arrived += [each.example_gradients for each in recording.layers.values() if each.example_gradients is not None]
    return all(bool(gradient.isfinite().all()) for gradient in arrived)


def relative(difference: Tensor, plain: Tensor, floor: float = 0.0) -> float:
    """Compute ``‖difference‖ / (‖plain‖ + floor)`` of tensors of any shape; the floor is not negative.

    It is 0 where the difference is zero, and infinite where only the denominator is.
    """
    size = float(torch.linalg.vector_norm(difference))
    if size == 0:
        return 0.0
    scale = float(torch.linalg.vector_norm(plain))
    return size / (scale + floor) if scale + floor > 0 else math.inf
