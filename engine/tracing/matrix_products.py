"""Products of data with a watched matrix, or with one that was made of several."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.parameter_slice import Place, place_of
from engine.model.activation_memory import storage_of
from engine.model.torch_functions import Operation, tensors_of
from engine.tracing.batch_provenance import Rows, rows_of_one
from engine.tracing.derived_weights import Chain, Derivation, Joined, Picked, Sum, derivation_of, derivation_of_view
from engine.tracing.parameter_uses import Product, Sink
from engine.tracing.tensor_marks import Marking


class Multiplying(Marking):
    """Tells ``sink`` of the products that ``parameters`` enter, by themselves or through what was made of them."""

    def __init__(self, parameters: Mapping[str, Tensor], sink: Sink) -> None:
        super().__init__(parameters)
        self._parameters = dict(parameters)
        self._sink = sink
        self._graphed = True
        """Gradients are wanted of the pass."""

    def product(self, entered: Tensor, weight: Tensor, bias: Tensor | None, run: Callable[[], Tensor]) -> Any:  # noqa: ANN401 - NotImplemented where it is none
        """Show the sink the product ``entered Wᵀ + b``.

        Args:
            entered: Data, shape (…, in).
            weight: W, shape (out, in); it, or the bias, is made of watched parameters.
            bias: b, shape (out,); None for none.
            run: Computes the product without a gradient for W and b.

        Returns:
            What stands for the result, shape (…, out); NotImplemented where it is not such a product.
        """
        rows = None if self._marks.sources(entered) else self._marks.rows(entered)
        if entered.ndim == 1 and rows is not None and (rows.one is not None or self._marks.examples == 1):
            # an example's only row
            with self:
                return functional.linear(entered.unsqueeze(0), weight, bias).squeeze(0)
        if rows is not None and rows.one is not None and rows.dim == entered.ndim - 1:
            rows = rows_of_one(rows.one, entered, self._marks.examples)
        if rows is None or weight.ndim != 2 or rows.dim == entered.ndim - 1 or (bias is not None and bias.ndim != 1):
            return NotImplemented
        alike = next((dim for dim in (0, 1) if weight.stride(dim) == 0 and weight.shape[dim] > 1), None)
        if alike is not None and self._marks.sources(weight):
            return self._of_alike(entered, weight, bias, alike)
        places = [self._place(tensor) for tensor in (weight, bias)]
        others = [
            tensor for tensor, place in zip((weight, bias), places, strict=True) if tensor is not None and not place
        ]
        if any(map(self._marks.sources, others)):
            return self._of_parts(entered, weight, bias, rows)
        if any(map(self._marks.is_data, others)) or not self._sink.factorises(*places):
            return NotImplemented
        left = run()
        stands = self._sink.multiplied(Product(weight=places[0], bias=places[1], entered=entered, rows=rows, left=left))
        return self.with_rows(stands, rows)

    def _of_alike(self, entered: Tensor, weight: Tensor, bias: Tensor | None, dim: int) -> Tensor:
        """Multiply where one row of W stands for all, or one column."""
        with self:
            single = weight.narrow(dim, 0, 1)
            left = functional.linear(entered.sum(-1, keepdim=True) if dim else entered, single)
            left = left.expand(*left.shape[:-1], weight.shape[0])
            return left if bias is None else left + bias

    def _place(self, tensor: Tensor | None) -> Place | None:
        names = frozenset[str]() if tensor is None else self._marks.sources(tensor)
        if tensor is None or len(names) != 1:
            return None
        (name,) = names
        return place_of(tensor, self._parameters[name], name)

    # ---- matrices that were made of several

    def _derivation(
        self, operation: Operation, left: Tensor, leaf: Callable[[Tensor], Tensor], place: int
    ) -> Derivation | None:
        """Return how ``left``, the result at ``place``, was made of watched parameters; None if unknown."""
        if self._graphed and not torch.is_grad_enabled():
            # no gradient flows through it: what it is of the parameters is a constant
            return None
        source = operation.tensors[0]
        if len(operation.tensors) == 1 and storage_of(leaf(source)) == storage_of(left):
            made = self._marks.made(source)
            # a view of a parameter shows a place of it
            view = partial(self._shown, operation, place)
            return None if made is None else derivation_of_view(made, view, self._transposed, left)
        if place:
            return None
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - its own operations are not the model's
            return derivation_of(operation, left, leaf, self.is_derived)

    def _transposed(self, part: Tensor) -> Tensor:
        with self:
            return part.transpose(0, 1)

    def _shown(self, operation: Operation, place: int, part: Tensor) -> Tensor:
        """Return the same view of another tensor."""
        with self:
            views = list(tensors_of((operation.run(lambda _: part),)))
        return views[place]

    def _of_parts(self, entered: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows) -> Any:  # noqa: ANN401
        """Multiply by the products of what W and b were made of, or return NotImplemented."""
        if not self._splits(weight) or (bias is not None and not self._splits(bias)):
            return NotImplemented
        with self:
            left = self._multiplied(entered, weight)
            if bias is not None:
                left = left + self._added(entered, left, bias, rows)
        return self.with_rows(left, rows)

    def _splits(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` is a constant, a place in a parameter, or made of such in a way that is known."""
        if not self._marks.sources(tensor):
            return not self._marks.is_data(tensor)
        if self._place(tensor) is not None:
            return True
        made = self._marks.made(tensor)
        return made is not None and made.holds and all(map(self._splits, made.parts))

    def _multiplied(self, entered: Tensor, weight: Tensor) -> Tensor:
        """Compute ``entered Wᵀ`` by the products of what W was made of."""
        made = None if self._place(weight) is not None else self._marks.made(weight)
        if made is None:
            return functional.linear(entered, weight)
        if isinstance(made, Chain):
            first, last = made.parts
            return functional.linear(functional.linear(entered, last), first)
        if isinstance(made, Picked):
            (part,) = made.parts
            placed = entered.new_zeros(*entered.shape[:-1], part.shape[1]).index_add(-1, made.columns, entered)
            return functional.linear(placed, part).index_select(-1, made.rows)
        if isinstance(made, Joined):
            if made.dim == 0:
                return torch.cat([functional.linear(entered, part) for part in made.parts], -1)
            spans = torch.split(entered, [part.shape[1] for part in made.parts], -1)
            return _total([functional.linear(*each) for each in zip(spans, made.parts, strict=True)])
        if not isinstance(made, Sum):
            raise TypeError(f"no product is known of a {type(made).__name__}")
        terms = []
        for scale, part in zip(made.scales, made.parts, strict=True):
            own = scale.to(entered.dtype)
            if own.ndim == 0:
                terms.append(functional.linear(entered, part) * own)
            elif own.shape[0] == 1:
                terms.append(functional.linear(entered * own[0], part))
            else:
                terms.append(functional.linear(entered, part) * own[:, 0])
        return _total(terms if made.rest is None else [*terms, functional.linear(entered, made.rest)])

    def _added(self, entered: Tensor, left: Tensor, bias: Tensor, rows: Rows) -> Tensor:
        """Return what ``bias`` adds to each row of ``left``, with the gradients of the parameters in it followed."""
        place = self._place(bias)
        made = None if place is not None else self._marks.made(bias)
        if place is not None and self._sink.factorises(None, place):
            plain = bias.detach().to(left.dtype).expand(*left.shape[:-1], -1)
            stands = self._sink.multiplied(Product(weight=None, bias=place, entered=entered, rows=rows, left=plain))
            return self.with_rows(stands, rows)
        if made is None:
            return bias
        parts = [self._added(entered, left, part, rows) for part in made.parts]
        if isinstance(made, Joined):
            return torch.cat([part.expand(*left.shape[:-1], -1) for part in parts], -1)
        if not isinstance(made, Sum):
            raise TypeError("a vector is no product of matrices")
        terms = [part * scale.to(left.dtype) for scale, part in zip(made.scales, parts, strict=True)]
        return _total(terms if made.rest is None else [*terms, made.rest])


def _total(terms: Sequence[Tensor]) -> Tensor:
    total, *others = terms
    for other in others:
        total = total + other
    return total
