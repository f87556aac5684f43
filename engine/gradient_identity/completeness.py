"""Completeness: whether ``Σ_t g_t a_tᵀ`` over a layer's rows is the gradient of its parameters by plain autograd.

Recorded rows make gradients of parameters, ``∇_W ℓ_n = Σ_t g_nt a_ntᵀ``, in the arrangement in which W is stored.

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
from engine.gradient_identity.checked_model import Forward, Subject, record
from engine.gradient_identity.recorded_rows import RowRecorder
from engine.gradient_identity.reference import Objective, pull_back
from engine.gradient_identity.schedule import pick_examples
from engine.layers.embedding import EmbeddingLayer
from engine.layers.layer import BlockLayer, TreatedLayer, Use, of_examples
from engine.layers.linear import FunctionalLinearLayer
from engine.layers.parameter_slice import Place
from engine.layers.tied import TiedHeadLayer
from engine.model.batches import Batch
from engine.row_layout.length_buckets import group_by_length


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A parameter, or the part of one, that a layer covers."""

    parameter: Tensor
    kind: str
    """`weight` or `bias`, or the parameter's own name where the layer has neither."""
    place: Place | None = None
    """The part; None is all of it."""

    def of(self, gradient: Tensor) -> Tensor:
        """Return the part's numbers of a gradient of the whole parameter, of its shape.

        It is the gradient itself, or a view of the part's shape; a copy where the strides differ from the parameter's.
        """
        if self.place is None:
            return gradient
        like = self.parameter
        if gradient.stride() != like.stride():
            gradient = torch.empty_strided(
                like.shape, like.stride(), dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
        # the gradient may be a part of another, that of what was joined
        offset = int(gradient.storage_offset()) + self.place.offset
        return gradient.as_strided(self.place.shape, self.place.strides, offset)


def pieces_of(layer: TreatedLayer) -> tuple[Piece, ...]:
    """List the parameters, or parts of them, that a layer covers.

    Weight comes before bias; for a bare parameter, the parameters of the layer by name.
    """
    if isinstance(layer, FunctionalLinearLayer):
        places = (("weight", layer.weight_place), ("bias", layer.bias_place))
        return tuple(
            Piece(parameter=layer.tensors[place.parameter], kind=kind, place=place)
            for kind, place in places
            if place is not None
        )
    if not layer.roles:
        return tuple(Piece(parameter=parameter, kind=name) for name, parameter in layer.watched.items())
    module = layer.head.module if isinstance(layer, TiedHeadLayer) else layer.module
    wanted = (("weight", layer.weight), ("bias", layer.bias))
    return tuple(Piece(parameter=getattr(module, kind), kind=kind) for kind, own in wanted if own)


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """Rows of one layer: those of one example, or those of a whole batch."""

    recorder: RowRecorder
    example: int | None
    """None is the whole batch."""

    def gradient(self, piece: Piece) -> Tensor:
        """Compute the gradient of a parameter of the layer, or of a part of one, from these rows.

        It is a new tensor, zero where no call uses the piece. ``ValueError`` if the piece does not belong to the layer.
        One gradient of it is held, and the rows of one call.
        """
        layer = self.recorder.layer
        shape = piece.parameter.shape if piece.place is None else torch.Size(piece.place.shape)
        if self.recorder.example_gradients is not None:
            return self._bare(piece, shape)
        total: Tensor | None = None
        for use, gradient in self.recorder.met:
            part = self._part(layer, piece, use, gradient)
            if part is not None:
                total = part.reshape(shape) if total is None else total + part.reshape(shape)
        if total is None:
            return torch.zeros(shape, dtype=piece.parameter.dtype, device=piece.parameter.device)
        return total

    def magnitude(self) -> float:
        """Return ``Σ_t ‖g_t‖ ‖[a_t 1]‖``, the largest norm that the gradient could have if nothing in it cancelled."""
        layer, total = self.recorder.layer, 0.0
        for use, gradient in self.recorder.met:
            if isinstance(layer, BlockLayer):
                continue
            a, g = self._rows(layer, use, gradient)
            norms = torch.linalg.vector_norm(g.flatten(1), dim=1).double()
            inputs = torch.ones_like(norms)
            if a is not None and a.is_floating_point():
                own = torch.linalg.vector_norm(a.flatten(1), dim=1).double()
                inputs = (own.square() + int(layer.bias)).sqrt()
            total += float((norms * inputs).sum())
        return total

    def _bare(self, piece: Piece, shape: torch.Size) -> Tensor:
        gradients = self.recorder.example_gradients
        if gradients is None:
            raise ValueError("nothing was recorded")
        own = gradients.sum(0) if self.example is None else gradients[self.example].clone()
        start = 0
        for name, parameter in self.recorder.layer.watched.items():
            if name == piece.kind:
                return own[start : start + parameter.numel()].view(shape)
            start += parameter.numel()
        raise ValueError(f"`{piece.kind}` is none of the layer's")

    def _part(self, layer: TreatedLayer, piece: Piece, use: Use, gradient: Tensor) -> Tensor | None:
        if isinstance(layer, BlockLayer):
            return self._block(layer, piece, use, gradient)
        role = use.role or layer
        a, g = self._rows(layer, use, gradient)
        if piece.kind == "bias":
            # a table has none
            return None if isinstance(role, EmbeddingLayer) else g.sum(0)
        if a is None:
            return None
        if isinstance(role, EmbeddingLayer):
            table = g.new_zeros(role.fan_in, role.fan_out)
            return table.index_add_(0, a, g)
        groups = layer.groups
        rows_a, rows_g = (
            rows.reshape(rows.shape[0], groups, rows.shape[1] // groups).transpose(0, 1) for rows in (a.to(g.dtype), g)
        )
        return layer.as_stored(rows_g.transpose(1, 2) @ rows_a)

    def _block(self, layer: BlockLayer, piece: Piece, use: Use, gradient: Tensor) -> Tensor:
        if self.example is not None:
            use, gradient = _one_example(use, gradient, self.example)
        both = layer.example_gradients(use, gradient).sum(0)
        width = layer.fan_out
        if piece.kind == "bias":
            return both[-width:]
        return both[:width]

    def _rows(self, layer: TreatedLayer, use: Use, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        """``a`` (P, d_in), None where the weight is frozen, and ``g`` (P, d_out) of the positions that count."""
        chosen = use.kept
        if self.example is not None:
            if use.owners is None:
                use, gradient = _one_example(use, gradient, self.example)
                chosen = use.kept
            else:
                own = use.owners == self.example
                chosen = own if chosen is None else own & chosen
        if layer.weight:
            a, g = layer.pair(use, gradient)
        else:
            a, g = None, layer.gradient_rows(gradient)
        if chosen is not None:
            a, g = None if a is None else a[chosen], g[chosen]
        return a, g


def _one_example(use: Use, gradient: Tensor, example: int) -> tuple[Use, Tensor]:
    span = example, example + 1
    part = of_examples(gradient, use.examples, *span)
    if use.entered is None:
        kept = None if use.kept is None else of_examples(use.kept, use.examples, *span)
        return Use(entered=None, examples=1, kept=kept, role=use.role), part
    return use.of_examples(*span), part


def padding_has_no_gradient(subject: Subject, layers: Sequence[TreatedLayer], batch: Batch, seed: int) -> bool:
    """Return whether the most padded example of ``batch`` has the same gradients when its padding is cut off.

    The rows of one example and the gradient of one parameter are held twice.
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
    """Compare ``rows`` with the gradient of ``⟨v, f(x)⟩``; it holds the gradient of one parameter twice."""
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
