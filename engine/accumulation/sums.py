"""Sums: totals over examples, and their parts, by field: what decays, what a checkpoint holds, what ranks join.

A state is flat: ``field``, or ``part.field`` of a part that is a sum itself. Tensors are those that are summed into;
plain values are counts, weights and flags.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from engine.saved_fields import load_number, save_number, saved_names


class Sums:
    """The base of a layer's statistics and of their parts, all of them dataclasses."""

    DECAYED: ClassVar[Sequence[str]] = ()
    """Fields that a moving average weighs as it does examples."""
    JOINED: ClassVar[Mapping[str, Callable[[Sequence[Any]], Any]]] = {}
    """Plain fields that several ranks have, with the function of all of theirs that makes one of them."""

    def _names(self) -> tuple[str, ...]:
        kind: type = type(self)
        return saved_names(kind)

    def parts(self) -> Iterator[tuple[str, "Sums"]]:
        """Yield the parts that are sums themselves, by field."""
        for name in self._names():
            if isinstance(part := getattr(self, name), Sums):
                yield name, part

    def decay_(self, past: float) -> None:
        """Weigh everything so far less, by a moving average's factor above 0 and at most 1."""
        for name in self.DECAYED:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                value.mul_(past)
            elif value is not None:
                setattr(self, name, value * past)
        for _, part in self.parts():
            part.decay_(past)

    def join_(self, every: Sequence[Mapping[str, Any]], prefix: str = "") -> None:
        """Take over the plain values of all ranks, each as ``plain`` returned them."""
        for name, join in self.JOINED.items():
            setattr(self, name, join([load_number(each[prefix + name]) for each in every]))
        for name, part in self.parts():
            part.join_(every, f"{prefix}{name}.")

    def state(self) -> dict[str, Any]:
        """Return every saved field; the tensors are those that are summed into."""
        held: dict[str, Any] = {}
        for name in self._names():
            value = getattr(self, name)
            if isinstance(value, Sums):
                held |= {f"{name}.{own}": each for own, each in value.state().items()}
                continue
            numbers = isinstance(value, list) and all(isinstance(each, (float, type(None))) for each in value)
            if not numbers and not isinstance(value, (Tensor, bool, int, float, str, type(None))):
                raise TypeError(
                    f"`{name}` of a layer's statistics is a {type(value).__name__}, which checkpoints do not hold; "
                    "take a tensor or plain values, or name it in `NOT_SAVED` with the reason"
                )
            held[name] = value
        return held

    def plain(self) -> dict[str, Any]:
        """Return the state without its tensors, as JSON holds it."""
        return {name: save_number(value) for name, value in self.state().items() if not isinstance(value, Tensor)}

    def put_plain(self, plain: Mapping[str, Any]) -> None:
        """Put back what ``plain`` returned."""
        for entry, value in plain.items():
            self.put(entry, value, torch.device("cpu"))

    def put(self, entry: str, value: Any, device: torch.device) -> None:  # noqa: ANN401 - of any field
        """Put one entry of a state back; a tensor is copied into the one that is held, for those who hold a view of it.

        One that the field does not hold yet is put on the device.
        """
        name, _, rest = entry.partition(".")
        held = getattr(self, name)
        if rest:
            held.put(rest, value, device)
        elif not isinstance(value, Tensor):
            setattr(self, name, load_number(value))
        elif isinstance(held, Tensor) and _has_room(held, value):
            held[tuple(slice(size) for size in value.shape)].copy_(value)
        else:
            setattr(self, name, value.to(held.device if isinstance(held, Tensor) else device))

    def copied(self, **changes: Any) -> Self:  # noqa: ANN401 - of any field
        """Return the same sums with tensors of their own; parts are the same objects, unless they are changed."""
        own = {name: each for name, each in self.state().items() if isinstance(each, Tensor) and "." not in name}
        return replace(self, **{name: each.clone() for name, each in own.items()}, **changes)  # type: ignore[type-var] # a dataclass


def larger(held: Tensor | float, rows: Tensor) -> Tensor | float:
    """Return the larger of a number and the largest magnitude in a tensor, on its device, which is not waited for."""
    if not rows.numel():
        return held
    own = torch.linalg.vector_norm(rows, math.inf)
    return torch.maximum(held, own) if isinstance(held, Tensor) else own


def _has_room(held: Tensor, value: Tensor) -> bool:
    """Whether a tensor is of the kind that is held, and not larger."""
    alike = held.dtype == value.dtype and held.ndim == value.ndim
    return alike and all(size <= room for size, room in zip(value.shape, held.shape, strict=True))
