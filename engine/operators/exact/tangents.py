"""Tangents: a forward pass at which every operation also pushes directions of the parameters forward.

Autograd records the pass for its pullback as it always does. Below it, a mode is shown each primitive operation and
computes ``dy = Σ (∂y/∂x) dx`` beside y: linear and bilinear ones by running them on the tangents (``RULES``), all
others by torch's own forward-mode formulas. So one forward pass serves ``J v`` and ``Jᵀ u``, no tangent enters the
graph, and each is let go of with the tensor that it belongs to.

Several directions are pushed side by side, and share the pass itself. An operation without a forward derivative is
refused by torch, which names it.

References:
    Griewank & Walther (2008), Evaluating derivatives, chapter 3: forward accumulation
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.torch_functions import tensors_of, with_tensors
from engine.operators.exact.tangent_rules import LINEAR, RULES

_HELD = "_kronoscope_tangents"
_INCLUDED = torch._C._dispatch_tls_local_include_set()  # noqa: SLF001 - torch has no public name for it
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()  # noqa: SLF001 - likewise
"""The dispatcher's keys outside of any operation: with them autograd is there again within one."""

Tangent = Tensor | None


class Tangents(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that pushes tangents through every operation.

    A tensor that needs no gradient although gradients are recorded was cut off by the model (``detach``, ``no_grad``):
    it moves nothing, forward as on the way back.

    Args:
        columns: Directions that are pushed side by side.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.columns = columns
        self.narrowest: torch.dtype | None = None
        """The floating-point dtype of fewest bits that a tangent went through."""
        self._resting = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would load its compiler
        return False

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Follow no operation while inside."""
        before, self._resting = self._resting, True
        try:
            yield
        finally:
            self._resting = before

    def put(self, tensor: Tensor, tangents: Sequence[Tangent]) -> None:
        """Set a floating-point tensor's tangents: for each column one of its shape, or None where it does not move."""
        if self.narrowest is None or tensor.dtype.itemsize < self.narrowest.itemsize:
            self.narrowest = tensor.dtype
        setattr(tensor, _HELD, (self, [None if own is None else _laid_out(own, tensor) for own in tangents]))

    def of(self, tensor: Tensor) -> list[Tangent] | None:
        """Return a tensor's tangents, of its shape and strides; None where it moves in no column."""
        held = getattr(tensor, _HELD, None)
        if held is not None and held[0] is self:
            found: list[Tangent] = held[1]
            if None not in found:
                return found
        else:
            found = [None] * self.columns
        base = tensor._base  # noqa: SLF001 - what a view is of
        of_base = None if base is None else self.of(base)
        if of_base is not None and base is not None:
            # written to after the view was taken
            found = [
                _seen(tensor, base, whole) if own is None and whole is not None else own
                for own, whole in zip(found, of_base, strict=True)
            ]
        return None if all(own is None for own in found) else found

    def drop(self, tensor: Tensor) -> None:
        """Forget a tensor's tangents."""
        if hasattr(tensor, _HELD):
            delattr(tensor, _HELD)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an overload of torch's
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as torch returns
        del types
        named = kwargs or {}
        if self._resting:
            return func(*args, **named)
        moving = self._moving(args, named)
        if not moving:
            return func(*args, **named)
        kind = _kind(func)
        if kind == "writes":
            return self._written(func, args, named, moving)
        if kind == "views":
            return self._viewed(func, args, named, moving)
        return self._computed(func, args, named, moving)

    def _moving(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[int, list[Tangent]]:
        """The tangents of the operands that have any, by identity."""
        recording, moving = torch.is_grad_enabled(), {}
        for tensor in tensors_of((args, dict(named)) if named else args):
            if tensor.is_floating_point() and (tensor.requires_grad or not recording):
                own = self.of(tensor)
                if own is not None:
                    moving[id(tensor)] = own
        return moving

    def _viewed(self, func: Any, args: Sequence[Any], named: Mapping[str, Any], moving: Mapping[int, Any]) -> Any:  # noqa: ANN401
        result = func(*args, **named)
        columns = []
        for column in range(self.columns):
            own = moving[next(iter(moving))][column]
            columns.append(None if own is None else func(own, *args[1:], **named))
        if isinstance(result, Tensor):
            self.put(result, columns)
            return result
        for place, part in enumerate(result):
            self.put(part, [None if own is None else own[place] for own in columns])
        return result

    def _computed(self, func: Any, args: Sequence[Any], named: Mapping[str, Any], moving: Mapping[int, Any]) -> Any:  # noqa: ANN401
        result: Any = None
        rule = RULES.get(func)
        columns: list[tuple[Tangent, ...] | None] = []
        for column in range(self.columns):
            tangents = {key: own[column] for key, own in moving.items() if own[column] is not None}
            if not tangents:
                columns.append(None)
                continue
            found: Any = NotImplemented
            if func in LINEAR and id(args[0]) in tangents and len(moving) == 1:
                if result is None:
                    result = func(*args, **named)
                found = func(tangents[id(args[0])], *args[1:], **named)
            elif rule is not None:
                if result is None:
                    result = func(*args, **named)
                found = rule(result, tangents, args, named)
            if found is NotImplemented:
                primal, found = _dual(func, args, named, tangents)
                result = primal if result is None else result
            columns.append(tuple(found) if isinstance(found, (tuple, list)) else (found,))
        outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        for place, output in enumerate(outputs):
            own = [None if each is None else each[place] for each in columns]
            if isinstance(output, Tensor) and output.is_floating_point() and any(each is not None for each in own):
                self.put(output, own)
        return result

    def _written(self, func: Any, args: Sequence[Any], named: Mapping[str, Any], moving: Mapping[int, Any]) -> Any:  # noqa: ANN401
        """Run an operation that writes to its first operand, and write to the operand's tangents."""
        target = args[0]
        if not isinstance(target, Tensor) or _writes_beside_first(func):
            raise NotImplementedError(f"the derivative of `{func}`, which writes to an operand of its own choice")
        written: list[Tangent] = []
        for column in range(self.columns):
            tangents = {key: own[column] for key, own in moving.items() if own[column] is not None}
            if not tangents:
                written.append(None)
                continue
            copy = torch.empty_like(target).copy_(target)
            start = tangents.pop(id(target), None)
            start = torch.zeros_like(copy) if start is None else torch.empty_like(copy).copy_(start)
            replaced = [copy, *args[1:]]
            _, found = _dual(func, replaced, named, {**tangents, id(copy): start})
            written.append(found)
        result = func(*args, **named)
        if target.is_floating_point():
            for column, found in enumerate(written):
                if found is not None:
                    self._within(target, column).copy_(found)
        return result

    def _within(self, target: Tensor, column: int) -> Tensor:
        """The target's tangent, which shows whatever its base's tangent does; made of zeros where there is none."""
        own = self.of(target)
        if own is not None and own[column] is not None:
            if self._held(target) is None:
                self.put(target, own)
            return own[column]  # type: ignore[return-value]
        base = target if target._base is None else target._base  # noqa: SLF001 - what a view is of
        whole = list(self.of(base) or [None] * self.columns)
        if whole[column] is None:
            whole[column] = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=base.device).zero_()
            self.put(base, whole)
        seen = _seen(target, base, whole[column])  # type: ignore[arg-type]
        if base is not target:
            mine = list(own or [None] * self.columns)
            mine[column] = seen
            self.put(target, mine)
        return seen

    def _held(self, tensor: Tensor) -> object:
        held = getattr(tensor, _HELD, None)
        return None if held is None or held[0] is not self else held


def _dual(
    func: Any,  # noqa: ANN401 - an overload of torch's
    args: Sequence[Any],
    named: Mapping[str, Any],
    tangents: Mapping[int, Tensor],
) -> tuple[Any, Any]:
    """Run an operation by torch's forward-mode formulas; its result, and the result's tangent."""
    with (
        torch.no_grad(),
        torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED),  # noqa: SLF001 - torch has no public name for it
        forward_ad.dual_level(),
    ):

        def dual(tensor: Tensor) -> Tensor:
            own = tangents.get(id(tensor))
            if own is None:
                return tensor
            pair: Tensor = forward_ad.make_dual(tensor.detach(), own)  # type: ignore[no-untyped-call]
            return pair

        result = func(*with_tensors(tuple(args), dual), **with_tensors(dict(named), dual))
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        pairs = [_unpacked(output) for output in outputs]
    # below autograd: a tensor that autograd may take for its own
    primals = [primal.detach() if isinstance(primal, Tensor) else primal for primal, _ in pairs]
    found = [None if tangent is None else tangent.detach() for _, tangent in pairs]
    return (type(result)(primals), found) if isinstance(result, (tuple, list)) else (primals[0], found[0])


def _unpacked(output: Any) -> tuple[Any, Tangent]:  # noqa: ANN401 - any output
    if not isinstance(output, Tensor):
        return output, None
    pair = forward_ad.unpack_dual(output)  # type: ignore[no-untyped-call]
    tangent = pair.tangent
    return pair.primal, None if tangent is None or tangent._is_zerotensor() else tangent  # noqa: SLF001 - no public name


def _laid_out(tangent: Tensor, tensor: Tensor) -> Tensor:
    """The tangent in the memory layout of its tensor, so that every view of one is a view of the other."""
    if tangent.stride() == tensor.stride() and tangent.dtype == tensor.dtype:
        return tangent
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tangent)  # fmt: skip


def _seen(view: Tensor, base: Tensor, whole: Tensor) -> Tensor:
    offset = view.storage_offset() - base.storage_offset() + whole.storage_offset()
    return whole.as_strided(view.shape, view.stride(), offset)


_KINDS: dict[Any, str] = {}


def _kind(func: Any) -> str:  # noqa: ANN401 - torch's overloads have no public type
    """Whether an operation writes to an operand, returns a view of one, or computes something new."""
    kind = _KINDS.get(func)
    if kind is None:
        schema = func._schema  # noqa: SLF001 - torch has no public name for it
        writes = any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments)
        views = any(each.alias_info is not None for each in schema.returns)
        kind = _KINDS[func] = "writes" if writes else "views" if views else "computes"
    return kind


def _writes_beside_first(func: Any) -> bool:  # noqa: ANN401 - likewise
    arguments = func._schema.arguments  # noqa: SLF001 - likewise
    return any(each.alias_info is not None and each.alias_info.is_write for each in arguments[1:])
