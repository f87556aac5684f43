"""Rounded products: a CPU multiplies as a device does that takes float32 in TF32, with float32 sums.

A device may round to the nearest number of 10 bits behind the leading one, or drop the other bits.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model import mixed_precision

_FIRST_FACTOR = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::baddbmm": 1}
"""Products, and the place of their first factor; what is added to them is not rounded."""
_LOST = 2**13 - 1


def to_nearest(numbers: Tensor) -> Tensor:
    """Round float32 to the nearest TF32, and to even between two."""
    bits = numbers.view(torch.int32)
    return ((bits + (_LOST >> 1) + ((bits >> 13) & 1)) & ~_LOST).view(torch.float32)


def cut(numbers: Tensor) -> Tensor:
    """Drop the bits of float32 that TF32 does not have."""
    return (numbers.view(torch.int32) & ~_LOST).view(torch.float32)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {"to nearest": to_nearest, "cut": cut}


class _Rounding(TorchDispatchMode):
    """Products within round their float32 factors."""

    def __init__(self, narrow: Callable[[Tensor], Tensor], taken: list[str]) -> None:
        super().__init__()
        self._narrow, self._taken = narrow, taken

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _FIRST_FACTOR.get(function._schema.name)
        if first is not None:
            self._taken.append(function._schema.name)
            factors = (self._narrow(each) if each.dtype == torch.float32 else each for each in args[first : first + 2])
            args = (*args[:first], *factors, *args[first + 2 :])
        return function(*args, **(kwargs or {}))


def emulate(monkeypatch: pytest.MonkeyPatch, narrow: Callable[[Tensor], Tensor]) -> list[str]:
    """Let this machine's CPU stand for a device with TF32 units, and return the products that were rounded so far."""
    taken: list[str] = []
    monkeypatch.setattr(mixed_precision, "_reason_without_tf32", lambda _: None)
    monkeypatch.setattr(mixed_precision, "products_in_tf32", lambda: _Rounding(narrow, taken))
    return taken
