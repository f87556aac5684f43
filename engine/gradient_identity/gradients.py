"""Gradients of parameters from recorded rows: ``∇_W ℓ_n = Σ_t g_nt a_ntᵀ`` in the arrangement in which W is stored."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.gradient_identity.recorded_rows import RowRecorder
from engine.layers.embedding import EmbeddingLayer
from engine.layers.functional_linear import FunctionalLinearLayer
from engine.layers.layer import BlockLayer, TreatedLayer, Use, of_examples
from engine.layers.parameter_slice import Place
from engine.layers.tied import TiedHeadLayer


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A parameter, or the part of one, that a layer covers."""

    parameter: Tensor
    kind: str
    """`weight` or `bias`, or the parameter's own name where the layer has neither."""
    place: Place | None = None
    """The part; None is all of it."""

    def of(self, gradient: Tensor) -> Tensor:
        """Return the part's numbers of a gradient of the whole parameter.

        Args:
            gradient: Gradient of the parameter, of its shape.

        Returns:
            The gradient itself, or a view of the part's shape; a copy where the strides differ from the parameter's.
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

    Returns:
        Weight before bias; for a bare parameter, the parameters of the layer by name.
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
        """Compute the gradient of one piece from these rows.

        Args:
            piece: A parameter of the layer, or a part of one.

        Returns:
            A new tensor of the piece's shape; zeros where no call uses it.

        Raises:
            ValueError: If the piece does not belong to the layer.

        Memory:
            One gradient of the piece, and the rows of one call.
        """
        layer = self.recorder.layer
        shape = piece.parameter.shape if piece.place is None else torch.Size(piece.place.shape)
        if self.recorder.example_gradients is not None:
            return self._bare(piece, shape)
        total: Tensor | None = None
        for use, gradient in self._calls():
            part = self._part(layer, piece, use, gradient)
            if part is not None:
                total = part.reshape(shape) if total is None else total + part.reshape(shape)
        if total is None:
            return torch.zeros(shape, dtype=piece.parameter.dtype, device=piece.parameter.device)
        return total

    def magnitude(self) -> float:
        """Return ``Σ_t ‖g_t‖ ‖[a_t 1]‖``, the largest norm that the gradient could have if nothing in it cancelled."""
        layer, total = self.recorder.layer, 0.0
        for use, gradient in self._calls():
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

    def _calls(self) -> Iterator[tuple[Use, Tensor]]:
        yield from self.recorder.met

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
