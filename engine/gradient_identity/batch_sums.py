"""Batch sums: what the first batch of a pass has left in each layer's A and G, held against the rows of that batch.

The rows are those that the hooks hand to the sums; each leaves two scalars behind as it passes (``row_moments``), by
which the sums are judged when the batch is done: the trace, and one seeded quadratic form. So accumulation is inside
the proof: a row that was dropped or counted twice, a divisor, a triangle, a precision, the order of columns.

Held are all kinds of sums but these: of a sketch (``diagonal_sketch``) the diagonal alone, since what the sketch leaves
out is within its bound and no fault; under `forward_only` A alone, since G is set to the identity.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.output_gradients import RowObserver
from engine.accumulation.sketched_rows import SketchRows
from engine.accumulation.tied_statistics import TiedHeadStatistics
from engine.gradient_identity.checked_model import TOLERANCES
from engine.gradient_identity.row_moments import (
    RowMoments,
    SumMoments,
    counted_rows,
    in_order_of_sums,
    of_rows,
    of_sum,
    pooled,
    seeded_numbers,
    vector_of,
)
from engine.layers.convolution import ConvolutionLayer
from engine.layers.layer import BlockLayer, Use
from engine.layers.tied import TiedHeadLayer
from engine.model.outputs import Prediction

_ROUNDINGS = 10
"""Times the precision's ε that a sum of rows may be off, beside the sum of their norms."""
_DEVIATIONS = 10
"""Times its standard deviation that the product of what a row has lost and the seeded vector may be."""
_SIDES = ("A", "G", "counts", "vectors")
"""The sums of a layer; the last two of a table that is a head's weight too."""


@contextmanager
def _apart(tensor: Tensor) -> Iterator[None]:
    """Leave the model's own modes outside: its casts, its functions and its graph."""
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),  # noqa: SLF001 - its only name
        torch.autocast(tensor.device.type, enabled=False),
    ):
        yield


@dataclass(eq=False)
class LayerMoments(RowObserver):
    """The moments of the rows of one layer, which an observer takes in as they pass."""

    statistics: LayerStatistics
    sides: Mapping[str, RowMoments]
    kept: Tensor | None = None
    """(P,) positions of the loss's head that count, in the forward pass under way; None where all do."""
    _block: Tensor | None = None
    """(N, n) example gradients of the direction under way, of a layer whose block is exact."""

    @classmethod
    def of(cls, statistics: LayerStatistics, numbers: Mapping[str, Tensor]) -> "LayerMoments":
        """Begin with the moments of each of a layer's allocated sums, without any row.

        ``numbers`` are what the vectors of each side are made of; a side that is not named is not held.
        """
        layer, sides = statistics.layer, {}
        shapes = {"A": (layer.groups, layer.in_dim), "G": (layer.groups, layer.out_dim)}
        if layer.form in ("block", "diagonal_block"):
            del shapes["A"]
        if isinstance(layer, TiedHeadLayer):
            shapes |= {"counts": (1, layer.fan_out), "vectors": (1, layer.fan_in)}
        for name in shapes.keys() & numbers.keys():
            vector = vector_of(numbers[name], shapes[name])
            sides[name] = RowMoments.of(vector, statistics.sums_dtype or torch.float64)
        return cls(statistics=statistics, sides=sides)

    @property
    def of_terms(self) -> bool:
        """Whether G is of the probabilities of the loss's terms, and no gradient of the head enters it."""
        return self.statistics.representation.of_terms

    @override
    def add_input_(self, use: Use) -> None:
        layer = self.statistics.layer
        with _apart(use.input):
            if self._is_lookup(use):
                self.sides["counts"].add_ids_(use.picked(use.input.reshape(-1)))
                return
            self.kept = use.kept
            if "A" not in self.sides:
                return
            side, reduce = self.sides["A"], self.statistics.sharing == "reduce"
            called = use.role or layer
            if isinstance(called, ConvolutionLayer):
                side.add_patches_(called, use, means=reduce)
            elif layer.form == "diagonal":
                side.add_ids_(counted_rows(layer, use))
            elif not reduce:
                side.add_(counted_rows(layer, use)[:, : self._width], ones=layer.bias)
            elif use.input.numel():
                rows = layer.activation_rows(use.input)
                side.add_pooled_(rows, use, mean=True, width=self._width, ones=layer.bias)

    @override
    def follow(self, use: Use) -> Callable[[Tensor], None]:
        own = use if isinstance(self.statistics.layer, BlockLayer) else use.without_input()

        def arrived(gradient: Tensor) -> None:
            with _apart(gradient):
                self._add_gradient_(own, gradient)

        return arrived

    @override
    def add_example_gradients_(self, gradients: Tensor, start: int, examples: int) -> None:
        del start, examples
        with _apart(gradients):
            self.sides["G"].add_diagonal_(gradients)

    def close(self) -> None:
        """Close one direction: the example gradients of all its calls are whole."""
        block, self._block = self._block, None
        if block is not None:
            with _apart(block):
                self._take_in_(self.sides["G"], block)

    def predicted(self, prediction: Prediction) -> None:
        """Take in the loss's terms, where G is theirs."""
        if not self.of_terms or not prediction.terms:
            return
        logits, side = prediction.outputs.detach(), self.sides["G"]
        with _apart(logits):
            counted = prediction.valid
            if self.kept is not None:
                counted = counted & self.kept.view(counted.shape[0], -1)[:, : counted.shape[1]]
            weights = counted.to(torch.float64)
            if prediction.weights is not None:
                weights = weights * prediction.weights[..., 0]
            sketched = isinstance(self.statistics.gradient_rows, SketchRows)
            side.add_probabilities_(logits[counted], weights[counted], diagonal=sketched)

    def differences(self) -> Iterator[tuple[Tensor | float, float, str]]:
        """Yield the relative difference between each sum and the rows, what its precision may explain, and its name."""
        for name, side in self.sides.items():
            found = self._summed(name)
            if found is not None:
                yield _difference(side, found), TOLERANCES[_narrower(found.dtype, side.dtype)], name
            weight = self._weight(name)
            if weight is not None:
                yield abs(weight - side.rows) / max(side.rows, 1.0), TOLERANCES[torch.float64], f"divisor of {name}"

    @property
    def _width(self) -> int:
        layer = self.statistics.layer
        return layer.groups * layer.fan_in if layer.weight else 0

    def _is_lookup(self, use: Use) -> bool:
        layer = self.statistics.layer
        return isinstance(layer, TiedHeadLayer) and use.role is layer.table

    def _add_gradient_(self, use: Use, gradient: Tensor) -> None:
        layer, side = self.statistics.layer, self.sides["G"]
        if isinstance(layer, BlockLayer):
            own = layer.example_gradients(use, gradient)
            self._block = own if self._block is None else self._block + own
            return
        if isinstance(layer, TiedHeadLayer) and use.role is layer.table:
            rows, side = layer.table.gradient_rows(gradient), self.sides["vectors"]
        elif self.of_terms:
            return
        else:
            rows = layer.gradient_rows(gradient)
        if self.statistics.sharing == "reduce" and layer.form == "kronecker" and not self._is_lookup(use):
            self._take_in_(side, rows, use)
            return
        self._take_in_(side, use.picked(rows))

    def _take_in_(self, side: RowMoments, rows: Tensor, together: Use | None = None) -> None:
        """Take in rows as they are, or added up to one for each example of a call."""
        if side is self.sides["G"] and isinstance(self.statistics.gradient_rows, SketchRows):
            side.add_diagonal_(rows if together is None else pooled(rows, together, side.dtype, mean=False))
        elif together is None:
            side.add_(rows)
        else:
            side.add_pooled_(rows, together, mean=False)

    def _summed(self, name: str) -> SumMoments | None:
        """The same of the sums; None where there is none to be held."""
        found, side = self.statistics, self.sides[name]
        if name == "A":
            # A belongs to all layers that share it: each of them holds its own rows against it
            holder = found.leader or found
            total = holder.A if holder.flaw is None else None
            if total is None:
                return None
            return of_sum(total, in_order_of_sums(holder.layer, side.vector), holder.precision.sums_rounding)
        if name == "G" and found.gradient_rows is not None:
            return of_rows(found.gradient_rows, side.vector)
        total = found.G
        if isinstance(found, TiedHeadStatistics) and name != "G":
            total = found.counts if name == "counts" else found.vectors
        return None if total is None else of_sum(total, side.vector, found.precision.sums_rounding)

    def _weight(self, name: str) -> float | None:
        """Return the divisor of a sum, where it is a count of its rows."""
        found = self.statistics
        if name == "A":
            holder = found.leader or found
            return holder.weight_A if holder.flaw is None else None
        return found.weight_counts if isinstance(found, TiedHeadStatistics) and name == "counts" else None


def _narrower(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)


def _difference(side: RowMoments, found: SumMoments) -> Tensor:
    """The relative difference (), where the rows are; 0 where a number is beyond the range of its precision."""
    if not side.squares.numel():
        return side.squares.new_zeros(())
    squares, forms = side.squares, side.forms
    summed = found.squares.to(squares.device), found.forms.to(squares.device)
    # products below the smallest normal number are lost on either side
    underflow = torch.finfo(side.dtype).tiny * (side.rows + 1) * side.vector.shape[1]
    # and what rounding e leaves of rows that cancel: 2 e s is at most a tolerance of s² and e² over it
    precision = _narrower(found.dtype, side.dtype)
    rounding = torch.as_tensor(side.pooled, dtype=torch.float64) * (_ROUNDINGS * torch.finfo(precision).eps) ** 2
    lost = underflow + rounding / TOLERANCES[precision]
    # of products that take r + d for a row r, |d| at most e |r|: r² is off by 2 e + e² of itself, and (r·v)² by
    # 2 (r·v)(d·v) + (d·v)², where the variance of d·v over v is |d|²
    e, deviating = found.rounding, (_DEVIATIONS * found.rounding) ** 2 * squares
    off = [((summed[0] - squares).abs() - (2 * e + e * e) * squares - lost) / (squares + lost)]
    allowed = 2 * (forms * deviating).sqrt() + deviating + _DEVIATIONS**2 * lost
    off.append(((summed[1] - forms).abs() - allowed) / (squares + forms + lost))
    if found.mirroring is not None:
        off.append(found.mirroring.to(squares.device))
    # beyond the range: of sums and of rows that are kept this ends the job, with its remedy
    finite = torch.stack([squares, forms, *summed]).isfinite().all()
    return torch.where(finite, torch.stack(off).clamp_min(0).max(), 0.0)


def _known(differences: Sequence[Tensor | float]) -> list[float]:
    """Read numbers of which some are on a device, with one wait for each."""
    known = [each if isinstance(each, float) else 0.0 for each in differences]
    waiting: dict[torch.device, list[int]] = {}
    for place, each in enumerate(differences):
        if isinstance(each, Tensor):
            waiting.setdefault(each.device, []).append(place)
    for places in waiting.values():
        read = torch.stack([torch.as_tensor(differences[place]) for place in places]).tolist()
        for place, number in zip(places, read, strict=True):
            known[place] = number
    return known


@dataclass(kw_only=True)
class BatchSums:
    """The moments of the rows of one batch, of all layers of a pass."""

    layers: Mapping[str, LayerMoments]
    examples: int = 0
    """Examples of the groups so far."""
    divisor: float = 0.0
    """Loss terms of the groups so far, by their weights."""
    gradients: bool = True
    """False under `forward_only`."""

    @classmethod
    def of(
        cls, all_statistics: Sequence[LayerStatistics], seed: int, device: torch.device, *, gradients: bool
    ) -> "BatchSums":
        """Begin with the moments of each layer that is not known to be flawed, without any row.

        The sums are those of the layers of the pass, zero so far; the seed is the job's, the device that of the passes.
        ``gradients`` says whether gradients enter.
        """
        held = [name for name in _SIDES if gradients or name in ("A", "counts")]
        numbers = {name: seeded_numbers(seed, _SIDES.index(name), device) for name in held}
        moments = (LayerMoments.of(found, numbers) for found in all_statistics if found.flaw is None)
        return cls(layers={each.statistics.layer.name: each for each in moments}, gradients=gradients)

    def beside(self, observers: Mapping[str, Sequence[RowObserver]]) -> dict[str, Sequence[RowObserver]]:
        """Return the observers of each layer, with those of the sums behind them."""
        return dict(observers) | {name: (*observers.get(name, ()), each) for name, each in self.layers.items()}

    def begin(self, examples: int) -> None:
        """Prepare for one group."""
        self.examples += examples
        for each in self.layers.values():
            each.kept = None

    def predicted(self, prediction: Prediction) -> None:
        """Take in the outputs that a group's loss is made of."""
        self.divisor += prediction.divisor
        if self.gradients:
            for each in self.layers.values():
                each.predicted(prediction)

    def close(self) -> None:
        """Close one direction, or the last one."""
        for each in self.layers.values():
            each.close()

    def failed(self, examples: int) -> dict[str, tuple[float, str]]:
        """Find the layers with sums that are not those of the rows.

        It returns, by layer, the relative difference, and the sum that it is of; ``examples`` are those of the whole
        batch.
        """
        self.close()
        missing = (abs(self.examples - examples) / examples, 0.0, "examples")
        held = [
            (name, *each)
            for name, layer in self.layers.items()
            if layer.statistics.flaw is None
            for each in (*layer.differences(), self._terms(layer.statistics), missing)
        ]
        found: dict[str, tuple[float, str]] = {}
        for (name, _, tolerance, side), error in zip(held, _known([each[1] for each in held]), strict=True):
            if not error <= tolerance:
                found[name] = max(found.get(name, (-1.0, "")), (error, side))
        return found

    def _terms(self, statistics: LayerStatistics) -> tuple[float, float, str]:
        differing = abs(statistics.weight_G - self.divisor)
        return differing / (abs(self.divisor) or 1.0), TOLERANCES[torch.float64], "loss terms"
