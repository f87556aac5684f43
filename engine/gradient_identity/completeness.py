"""Completeness: whether ``Σ_t g_t a_tᵀ`` over a layer's rows is the gradient of its parameters by plain autograd.

Where a batch goes through in groups of like length (``padding``), the rows of a layer are those of examples without
their padding. That padding decides no output was tried before; it may still have a gradient, as the vector of a
padding token has that happens to be zero. So the most padded example of the first batch is cut, and its rows are held
against plain autograd on the example as it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.gradient_identity.checked_model import Subject
from engine.gradient_identity.gradients import LayerRows, Piece, pieces_of
from engine.gradient_identity.recorded_rows import Forward, record
from engine.gradient_identity.reference import Objective, pull_back
from engine.gradient_identity.schedule import pick_examples
from engine.layers.layer import TreatedLayer
from engine.model.batches import Batch
from engine.row_layout.length_buckets import group_by_length


def padding_has_no_gradient(subject: Subject, layers: Sequence[TreatedLayer], batch: Batch, seed: int) -> bool:
    """Return whether the most padded example of ``batch`` has the same gradients when its padding is cut off.

    Memory:
        The rows of one example, twice, and the gradient of one parameter, twice.
    """
    if not subject.has_gradients or batch.mask is None:
        return True
    *_, shortest = group_by_length(batch, subject.task)
    place = int((batch.index == shortest.index[-1]).nonzero()[0, 0])
    whole = pick_examples(batch, [place])
    cut = next(group_by_length(whole, subject.task))
    if cut.mask is None or cut.mask.shape == batch.mask[:1].shape:
        return True
    try:
        padded = Forward(batch=whole, start=seed)
        short = record(subject, layers, Forward(batch=cut, start=seed))
        cotangent = record(subject, layers, padded).cotangent
        if cotangent is None:
            return short.cotangent is None
        own = {name: LayerRows(recorder=each, example=0) for name, each in short.layers.items()}
        objective = Objective(forward=padded, cotangent=cotangent)
        errors = completeness(subject, own, {}, objective).errors
    except EngineError:
        return False
    return all(error <= subject.tolerance for error in errors.values())


_CANCELLING = 100.0


@dataclass(kw_only=True)
class _Distance:
    """How far one layer's rows are from plain gradients, summed over its parameters."""

    rows: LayerRows
    difference: float = 0.0
    """Squared norm of the difference."""
    norm: float = 0.0
    """Squared norm of the plain gradient."""

    def add(self, piece: Piece, plain: Tensor | None) -> None:
        """Add one piece, of which ``plain`` is the gradient; None is zero."""
        mine = self.rows.gradient(piece)
        if plain is None:
            self.difference += _squared(mine)
            return
        own = piece.of(plain).to(mine.dtype)
        self.norm += _squared(own)
        self.difference += _squared(mine.sub_(own))

    def relative(self, subject: Subject, negligible: float) -> float:
        """The difference over the gradient, and over what it might have been had nothing cancelled."""
        if not self.difference:
            return 0.0
        slack = _CANCELLING * subject.rounding / subject.tolerance
        scale = math.sqrt(self.norm) + slack * self.rows.magnitude() + negligible
        return math.sqrt(self.difference) / scale if scale else math.inf


def _squared(tensor: Tensor) -> float:
    """Squared Frobenius norm, the root in the tensor's own precision."""
    return float(torch.linalg.vector_norm(tensor)) ** 2


@dataclass(frozen=True, kw_only=True)
class Completeness:
    """The result of one comparison with plain autograd."""

    errors: dict[str, float]
    """Relative difference of each layer."""
    largest_norm: float
    """Norm of the largest layer's gradient."""
    unseen: frozenset[str]
    """Parameters of no layer whose gradient is not zero."""


@dataclass
class _Arrivals:
    """Compares gradients as they arrive, so that one is held at a time."""

    distances: dict[str, _Distance]
    pieces: dict[int, list[tuple[str, Piece]]]
    others: dict[int, str]
    due: set[int]
    unseen: set[str] = field(default_factory=set)

    def __call__(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        key = id(parameter)
        self.due.discard(key)
        plain = gradient if gradient.layout == torch.strided else gradient.to_dense()
        if key in self.others and bool(plain.any()):
            self.unseen.add(self.others[key])
        for name, piece in self.pieces.get(key, ()):
            self.distances[name].add(piece, plain)

    def close(self) -> None:
        """The outputs do not depend on what has not arrived."""
        for key in self.due:
            for name, piece in self.pieces.get(key, ()):
                self.distances[name].add(piece, None)


def completeness(
    subject: Subject,
    rows: Mapping[str, LayerRows],
    others: Mapping[str, nn.Parameter],
    objective: Objective,
    *,
    floor: float = 0.0,
) -> Completeness:
    """Compare ``rows`` with the gradient of ``⟨v, f(x)⟩``.

    Memory:
        The gradient of one parameter, twice.
    """
    pieces: dict[int, list[tuple[str, Piece]]] = {}
    wanted: dict[int, nn.Parameter] = {}
    for name, own in rows.items():
        for piece in pieces_of(own.recorder.layer):
            pieces.setdefault(id(piece.parameter), []).append((name, piece))
            if isinstance(piece.parameter, nn.Parameter):
                wanted[id(piece.parameter)] = piece.parameter
    uncovered = {id(each): name for name, each in others.items() if id(each) not in pieces}
    wanted |= {id(each): each for each in others.values()}

    def compared() -> _Arrivals:
        # a function that called itself would be a cycle, and hold all rows until the garbage collector came by
        for at_once in (True, False):
            distances = {name: _Distance(rows=own) for name, own in rows.items()}
            arrivals = _Arrivals(distances, pieces, uncovered, set(pieces))
            if not pull_back(subject, list(wanted.values()), objective, arrivals, at_once=at_once):
                break
        arrivals.close()
        return arrivals

    try:
        found = compared()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        found = None
    if found is None:
        # the model writes over what a weight's gradient would need: no training does so, but it can be measured
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            found = compared()
    distances = found.distances
    largest = max((math.sqrt(each.norm) for each in distances.values()), default=0.0)
    largest = max(largest, floor)
    negligible = subject.negligible(largest) / subject.tolerance
    return Completeness(
        errors={name: each.relative(subject, negligible) for name, each in distances.items()},
        largest_norm=largest,
        unseen=frozenset(found.unseen),
    )
