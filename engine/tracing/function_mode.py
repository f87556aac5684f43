"""A function mode for parameters that no treated module covers: it sees the operations they enter.

Module hooks see modules; a parameter that a model uses by itself is seen by a mode that is shown
every torch operation. A tensor made from such a parameter alone is *derived*: it is followed until
it meets the data. There it is one of these:

- a matrix in a product with the data: the place it shows of its parameter is a linear layer, and so is
  that of each parameter which it is linear in, see ``derivations``;
- a tensor that is broadcast over the examples: each example gets its own copy, whose gradient is
  that example's gradient;
- something else in an operation whose examples never meet: the operation is run again for each of
  them alone, see ``contributions``;
- something else: its parameters are declared, and the operation is named.

What the model gets is what the plain operation gives it, strides included. Where following one fails,
the plain operation is run and the parameters are declared: no error of ours becomes the model's.

The mode costs a few microseconds an operation, so it is entered only for a model that has such
parameters.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from engine.memory.out_of_memory import is_unexplained
from engine.model.activation_memory import detach_view, storage_of, watch_gradient
from engine.model.torch_functions import (
    JOINS,
    POINTWISE,
    QUESTIONS,
    REARRANGED,
    VIEW_PROPERTIES,
    Operation,
    arrange_like,
    hides_operations,
    layout_of,
    operation_name,
    reveal_operations,
    show_custom_functions,
    tensors_of,
    with_tensors,
)
from engine.row_layout.layer_calls import TRANSFORMED, hidden_by, plain_of
from engine.tracing.batch_provenance import Rows, batch_first, rows_of_one
from engine.tracing.example_contributions import find_contribution, takes_shapes_alone
from engine.tracing.matrix_products import Multiplying
from engine.tracing.parameter_uses import Sink
from engine.tracing.pullback import Arrived, Derived, Pullback, detach_data
from engine.tracing.rewrites.operator_rewrites import REWRITES, expansion_of
from engine.tracing.rewrites.recurrent_rewrites import RECURRENT
from engine.tracing.tensor_marks import find_copies_dim, tried


class ParameterUseMode(Multiplying):
    """Shows ``sink`` what ``parameters`` do while inside.

    Args:
        parameters: Those to watch, by qualified name.
        sink: Receiver of what is seen.
        proving: Run every operation without a rule for each example at once, to see whether that is possible;
            else this is seen on the way back.
    """

    def __init__(self, parameters: Mapping[str, Tensor], sink: Sink, *, proving: bool = False) -> None:
        super().__init__(parameters, sink)
        self._proving = proving
        self._pullback = Pullback(self._parameters)

    def begin(self, inputs: Sequence[Tensor], examples: int, *, graphed: bool = True) -> None:
        """Prepare for one forward pass.

        Args:
            inputs: Tensors that enter the model, shape (N, …) each.
            examples: N.
            graphed: Whether gradients are wanted of the pass.
        """
        self._marks.begin(examples)
        self._graphed = graphed
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - its own operations are not the model's
            self._pullback.begin()
        for name, leaf in self._pullback.leaves.items():
            self._marks.put(leaf, frozenset({name}))
        for tensor in inputs:
            self.enters(tensor)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a model, its custom functions included, while inside."""
        with show_custom_functions(lambda tensors: any(map(self.is_derived, tensors))), self:
            yield

    def enters(self, tensor: Tensor) -> None:
        """Take a tensor that enters the model, shape (N, …), for data whose examples lead."""
        self._marks.put(tensor, rows=batch_first(tensor, self._marks.examples))

    def arrived(self) -> list[Tensor]:
        """Return the gradients that the backward pass has brought so far, of any shapes."""
        return [each.gradient for each in self._pullback.arrived]

    def forget(self) -> None:
        """Drop what the backward pass has brought."""
        self._pullback.arrived.clear()

    def returned(self) -> Iterator[tuple[str, int, Tensor]]:
        """Close one backward pass.

        Yields:
            Name of a parameter, first example, and gradients of the examples from there on, shape (n, numbers).
        """
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - its own operations are not the model's
            if self._pullback.escaped:
                self._sink.strange(frozenset(self._pullback.escaped), "")
            for each in self._pullback.close(self._marks.examples):
                if isinstance(each, Arrived):
                    operation = "" if each.contribution is None else each.contribution.operation.name
                    self._sink.strange(each.names, operation)
                else:
                    yield each
                del each  # before the next examples' gradients are made

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in QUESTIONS or func.__name__ == "__get__":
            answer = func(*args, **(kwargs or {}))
            if not isinstance(answer, Tensor):
                return answer  # half of all that is seen
        operation = Operation(func, operation_name(func), args, kwargs or {})
        if operation.name == "backward":
            # what a checkpoint runs again within is to be seen too
            return self._opened(operation)
        within = torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 - its only name
        if within and hidden_by(*operation.tensors) == TRANSFORMED:
            names = frozenset().union(*(self._marks.sources(plain_of(tensor)) for tensor in operation.tensors))
            self._sink.strange(names, TRANSFORMED)
        sources = frozenset().union(*(self._marks.sources(tensor) for tensor in operation.tensors))
        if sources:
            return self._derive(operation, sources)
        left = operation.run()
        self._marks.follow(operation, left)
        return left

    # ---- operations on derived tensors

    def _derive(self, operation: Operation, sources: frozenset[str]) -> Any:  # noqa: ANN401
        is_property = operation.func.__name__ in ("__get__", "__set__")
        if is_property and not _is_view(operation.func):
            return operation.run()
        try:
            return self._alone(operation, sources) if is_property else self._understood(operation, sources)
        except Exception as error:
            if not is_unexplained(error):
                raise
            return self._strange(operation, sources)

    def _understood(self, operation: Operation, sources: frozenset[str]) -> Any:  # noqa: ANN401
        if hides_operations(operation.func):
            return self._opened(operation)
        if not any(self._marks.is_data(tensor) for tensor in operation.tensors):
            return self._alone(operation, sources)
        rewrite = REWRITES.get(operation.name) or RECURRENT.get(operation.name)
        if rewrite is not None and not operation.writes:
            args, kwargs = with_tensors((tuple(operation.args), dict(operation.kwargs)), self._marks.expanded)
            left = rewrite(self, *args, **kwargs)
            if left is not NotImplemented:
                return self._as_torch(operation, left)
        lifted = self._lifted(operation)
        if lifted is None:
            return self._contributed(operation, sources)
        left = operation.run(lambda tensor: lifted.get(id(tensor), tensor))
        for tensor in lifted.values():
            operation.tensors.append(tensor)
        self._marks.follow(operation, left)
        return left

    def _as_torch(self, operation: Operation, left: Any) -> Any:  # noqa: ANN401
        """Arrange a rewrite's result in the memory layout of the operation itself: the model may view it."""
        if operation.name not in REARRANGED:
            return left
        layout = layout_of(operation.run)
        with self:
            return arrange_like(left, layout)

    def _opened(self, operation: Operation) -> Any:  # noqa: ANN401
        """Run a function that would keep the operations within to itself."""
        with self:
            return reveal_operations(operation.func)(*operation.args, **operation.kwargs)

    def _alone(self, operation: Operation, sources: frozenset[str]) -> Any:  # noqa: ANN401
        """Run an operation without data: its result is derived too, unless it stands for all examples already."""
        if operation.writes:
            return self._written(operation, sources)
        left = operation.run(self._parameter_leaf)
        if any(result.is_complex() for result in tensors_of((left,))):
            return self._strange(operation, sources)
        results = [result for result in tensors_of((left,)) if result.is_floating_point()]
        if operation.name in ("detach", "data") or not results:
            return left
        expansions = self._expansions(operation, results)
        storages = {storage_of(tensor) for tensor in operation.tensors}
        if not expansions and (
            any(storage_of(result) not in storages for result in results)
            or any(self._repeats(tensor) for tensor in operation.tensors)
        ):
            over = {
                id(tensor): self._spread(tensor) for tensor in operation.tensors if self._stands_for_examples(tensor)
            }
            if over:
                with self:
                    return operation.run(lambda tensor: over.get(id(tensor), tensor))
        for place, result in enumerate(results):
            made = None if expansions else tried(self._derivation, operation, result, self._leaf, place)
            self._marks.put(result, sources, made=made)
        for result, expansion in zip(results, expansions, strict=False):
            self._marks.put(result, sources, expansion=expansion)
            self._marks.put(expansion, sources)
        return left

    def _expansions(self, operation: Operation, results: Sequence[Tensor]) -> list[Tensor]:
        """Return each result of a repetition, or of a view of one, as the same expansion; or none of them."""
        if operation.name == "repeat":
            expansion = expansion_of(self._leaf(operation.args[0]), *operation.args[1:], **operation.kwargs)
            return [] if expansion is None else [expansion]
        repeated = {storage_of(self._leaf(tensor)) for tensor in operation.tensors if self._repeats(tensor)}
        try:
            views = list(tensors_of((operation.run(self._leaf),))) if repeated else []
        except RuntimeError:
            # a repetition has views that its expansion has not
            return []
        shapes = [view.shape for view in views] == [result.shape for result in results]
        return views if shapes and all(storage_of(view) in repeated for view in views) else []

    def _written(self, operation: Operation, sources: frozenset[str]) -> Any:  # noqa: ANN401
        """Write numbers of derived tensors to a derived tensor or to a constant: autograd follows that."""
        into, base = operation.tensors[0], operation.tensors[0]._base  # noqa: SLF001 - what a view is of
        base_sources = frozenset[str]() if base is None else self._marks.sources(base)
        if (
            operation.kwargs.get("out") is not None
            or self._marks.parameter(into)
            or (base_sources and base_sources != sources)
        ):
            # what else looks at the same numbers would not be known to be made of these parameters
            return self._strange(operation, sources)
        if base is not None:
            self._marks.put(base, sources)
        left = operation.run(self._parameter_leaf)
        self._marks.put(into, sources)
        return left

    def _repeats(self, tensor: Tensor) -> bool:
        return self._marks.expanded(tensor) is not tensor

    def _contributed(self, operation: Operation, sources: frozenset[str]) -> Any:  # noqa: ANN401
        """Run an operation that is nothing else, where its examples never meet."""
        if operation.writes:
            return self._strange(operation, sources)
        rows = {id(tensor): self._marks.rows(tensor) for tensor in operation.tensors if self._marks.is_data(tensor)}
        left = operation.run(lambda tensor: tensor.detach() if self._marks.sources(tensor) else tensor)
        stands = detach_view(left) if isinstance(left, Tensor) else left
        placed = {key: each for key, each in rows.items() if each is not None}
        use = None
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - its own operations are not the model's
            again, derived = detach_data(operation, self._marks, self._leaf)
            if len(placed) == len(rows):
                pairs = zip(operation.tensors, again.tensors, strict=True)
                held = {id(plain): placed[id(own)] for own, plain in pairs if id(own) in placed}
                use = find_contribution(again, [each.tensor for each in derived], held, stands, self._marks.examples)
                use = None if use is None or (self._proving and not use.holds()) else use
            if use is None:
                if not takes_shapes_alone(again, [each.tensor for each in derived]):
                    self._sink.strange(sources, operation.name)
                self._marks.follow(operation, left)
                return left
        wanted = self._sink.contributed(sources, use.numbers)
        if not wanted or not torch.is_grad_enabled():
            return self.with_rows(left, use.left_rows)

        def arrived(gradient: Tensor) -> None:
            self._pullback.arrived.append(Arrived(derived=tuple(derived), gradient=gradient, contribution=use))

        return self.with_rows(watch_gradient(stands, arrived), use.left_rows)

    def _strange(self, operation: Operation, sources: frozenset[str]) -> Any:  # noqa: ANN401
        self._sink.strange(sources, operation.name)
        left = operation.run(lambda tensor: tensor.detach() if self._marks.sources(tensor) else tensor)
        self._marks.follow(operation, left)
        return left

    def _leaf(self, tensor: Tensor) -> Tensor:
        """Return the tensor that stands for a derived one in operations of our own."""
        return self._marks.expanded(self._parameter_leaf(tensor))

    def _parameter_leaf(self, tensor: Tensor) -> Tensor:
        name = self._marks.parameter(tensor)
        return tensor if name is None else self._pullback.leaves[name]

    # ---- broadcast over examples
    def _lifted(self, operation: Operation) -> dict[int, Tensor] | None:
        """Return a copy for each example of every derived tensor among the arguments; None if that is impossible."""
        one = None if operation.writes else self._marks.only(operation)
        if one is not None:
            # the whole operation is that example's
            derived = {id(each): self._leaf(each) for each in operation.tensors if self._marks.sources(each)}
            return {
                key: self._copies(each, rows_of_one(one, each, self._marks.examples)) for key, each in derived.items()
            }
        data = [tensor for tensor in operation.tensors if self._marks.is_data(tensor)]
        if operation.writes and not (operation.tensors[0] is data[0] and operation.name in POINTWISE):
            return None
        broadcasts = operation.name in POINTWISE or operation.name == "scaled_dot_product_attention"
        dimensions = max(tensor.ndim for tensor in operation.tensors)
        rows = self._marks.rows_at(data, dimensions)
        if rows is None:
            return None
        joins = operation.name in JOINS
        if joins and operation.joined_along % dimensions == rows.dim:
            return None
        lifted: dict[int, Tensor] = {}
        for tensor in operation.tensors:
            if not self._marks.sources(tensor):
                continue
            here = dimensions if broadcasts else tensor.ndim
            single = self._single(tensor, here, rows, alone=broadcasts or (joins and rows.size == 1))
            if single is None:
                return None
            lifted[id(tensor)] = self._copies(single, rows)
        return lifted

    def _single(self, derived: Tensor, dimensions: int, rows: Rows, *, alone: bool) -> Tensor | None:
        """Return ``derived`` with one index along the dimension of the examples; None where it has several that differ.

        A single index counts where it is ``alone``: it may stand for all examples.
        """
        single = self._leaf(derived)
        with self:
            single = single[(None,) * (dimensions - single.ndim)] if single.ndim < dimensions else single
            if rows.dim >= single.ndim:
                return None
            if single.shape[rows.dim] == 1:
                return single if alone else None
            return single.narrow(rows.dim, 0, 1) if single.stride(rows.dim) == 0 else None

    def _stands_for_examples(self, tensor: Tensor) -> bool:
        names, examples = self._marks.sources(tensor), self._marks.examples
        # one example alone is along every dimension, and along none: what several have shown decides
        if not names or (examples > 1 and find_copies_dim(self._leaf(tensor), examples) is None):
            return False
        return self._sink.expanded(names, examples=examples)

    def _spread(self, tensor: Tensor) -> Tensor:
        """Make data out of a derived tensor that stands for all examples already."""
        if self._marks.examples == 1:
            with self:
                single = self._leaf(tensor).unsqueeze(0)
            copies = self._copies(single, Rows(dim=0, minor=1, size=1)).squeeze(0)
            self._marks.put(copies, rows=batch_first(copies, 1))
        else:
            dim = find_copies_dim(self._leaf(tensor), self._marks.examples)
            if dim is None:
                raise ValueError("no dimension of this tensor is the examples'")
            with self:
                single = self._leaf(tensor).narrow(dim, 0, 1)
            copies = self._copies(single, Rows(dim=dim, minor=1, size=self._marks.examples))
        with self:
            return copies.contiguous() if self._repeats(tensor) else copies

    def _copies(self, single: Tensor, rows: Rows) -> Tensor:
        """Repeat ``single`` along the examples' dimension, each copy with its own gradient; once for one example."""
        names = self._marks.sources(single)
        wanted = self._sink.broadcast(names)
        count = rows.size if rows.labels is None else rows.labels.shape[0]
        shape = [count if dim == rows.dim and rows.one is None else -1 for dim in range(single.ndim)]
        copies = single.detach().expand(shape)
        if wanted and torch.is_grad_enabled():
            copies.requires_grad_()
            examples = self._marks.examples

            def arrived(leaf: Tensor) -> None:
                if leaf.grad is not None:
                    gradient, leaf.grad = leaf.grad, None
                    if rows.one is None:
                        gradient = rows.per_example(gradient, examples).unsqueeze(rows.dim + 1)
                    own = (Derived(tensor=single, names=names),)
                    self._pullback.arrived.append(Arrived(derived=own, gradient=gradient, example=rows.one))

            copies.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        self._marks.put(copies, rows=rows)
        return copies


def _is_view(access: Callable[..., Any]) -> bool:
    """Tell whether an access to a tensor's property returns a view of the tensor."""
    owner: Any = getattr(access, "__self__", None)
    return owner is not None and access.__name__ == "__get__" and owner.__name__ in VIEW_PROPERTIES
