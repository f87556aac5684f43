"""Own casts: a model's casts inside its forward pass, where it is measured in another precision than it is kept in.

A float32 model casts with `.float()`, and a bfloat16 one with `.to(torch.bfloat16)`, to what its
weights already are: there that does nothing. Measured in float64 the same cast narrows, and the next
product has operands of two precisions, which torch refuses. So the dtypes that the model's own
tensors had stand for the one they were converted to; casts to any other dtype stay what they are, and
operands of two precisions meet in the wider one. Parts of the forward pass that activation checkpointing
runs again on the way back are run so too.

Only a model whose forward pass fails otherwise is run so: all others keep their numbers to the last bit.
"""

import contextlib
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_MISMATCH = re.compile(r"dtype|scalar type|mixed dtype|should be the same|result type", re.IGNORECASE)
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
"""Methods of a tensor that are casts by name."""

_FROM_OUTSIDE = ("from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack")
"""Functions whose numbers were computed elsewhere, in the precision that they come in."""


class OwnCasts(TorchFunctionMode):
    """A mode in which ``kept`` dtypes stand for ``dtype``, and operands of two precisions meet in the wider one.

    Args:
        kept: Dtypes of the model's tensors before they were converted.
        dtype: The dtype that they were converted to.
    """

    def __init__(self, kept: frozenset[torch.dtype], dtype: torch.dtype) -> None:
        super().__init__()
        self.kept, self.dtype = kept, dtype
        self.wanted = False

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if _CASTS.get(name) in self.kept and len(args) == 1 and isinstance(args[0], Tensor):
            return args[0].to(self.dtype, **(kwargs or {}))
        stated = [self._standing(value) for value in args]
        named = {key: self._standing(value) for key, value in (kwargs or {}).items()}
        try:
            return func(*stated, **named)
        except RuntimeError as error:
            meeting = None if not is_mismatch(error) else _meeting(name, [*stated, *named.values()])
            if meeting is None:
                raise
            widened = [_cast(value, meeting) for value in stated]
            return func(*widened, **{key: _cast(value, meeting) for key, value in named.items()})

    def _standing(self, value: Any) -> Any:  # noqa: ANN401 - any argument
        return self.dtype if isinstance(value, torch.dtype) and value in self.kept else value


_NARROW = frozenset(
    kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and kind.is_floating_point
) - {torch.float64}  # fmt: skip
"""Every floating-point type of this torch but the widest, those of eight bits among them."""


class AllCasts(OwnCasts):
    """A mode in which no narrower type than float64 is named: each stands for float64, and so does the default one.

    What comes from outside of torch, and what only narrower tensors enter, stays narrow.
    """

    def __init__(self) -> None:
        super().__init__(_NARROW, torch.float64)

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        returned = super().__torch_function__(func, types, args, kwargs)
        if not isinstance(returned, Tensor) or not returned.is_floating_point() or returned.dtype == self.dtype:
            return returned
        name, given = getattr(func, "__name__", ""), [*args, *(kwargs or {}).values()]
        entered = [part for value in given for part in (value if isinstance(value, (tuple, list)) else (value,))]
        narrow = any(isinstance(part, Tensor) and part.is_floating_point() for part in entered)
        if narrow or name.endswith("_") or name in _FROM_OUTSIDE or "out" in (kwargs or {}):
            return returned
        # made by the default type, or divided from whole numbers
        return returned.to(self.dtype)


_CONVERTED: "weakref.WeakKeyDictionary[nn.Module, OwnCasts]" = weakref.WeakKeyDictionary()


def note_conversion(model: nn.Module, kept: frozenset[torch.dtype], dtype: torch.dtype) -> None:
    """Remember the precision that a model is kept in, and the one that it is measured in."""
    before = _CONVERTED.get(model)
    if not kept:
        _CONVERTED.pop(model, None)
    elif before is None or (before.kept, before.dtype) != (kept, dtype):
        _CONVERTED[model] = OwnCasts(kept, dtype)


def settle_casts(model: nn.Module, trial: Callable[[], object]) -> None:
    """Find out by a trial run whether a converted model's own casts fail.

    Args:
        model: The model; one that was not converted, or whose casts are known to fail, is not run.
        trial: Runs its forward pass once. Errors of any other kind are left to the run that counts.
    """
    casts = _CONVERTED.get(model)
    if casts is None or casts.wanted:
        return
    try:
        with torch.no_grad():
            trial()
    except Exception as error:  # noqa: BLE001 - the run that counts raises it again, and says what it means
        casts.wanted = is_mismatch(error) or is_mismatch(error.__cause__)


def casts_of(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a model's forward pass runs.

    Returns:
        Its ``OwnCasts`` where a trial has shown that it needs them, else a context that does nothing.
    """
    casts = _CONVERTED.get(model)
    return casts if casts is not None and casts.wanted else contextlib.nullcontext()


def conversion_of(model: nn.Module) -> tuple[str, str] | None:
    """Return the names of the dtypes that a model's tensors were converted from, and to; None where none was."""
    casts = _CONVERTED.get(model)
    if casts is None:
        return None
    kept = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in casts.kept))
    return kept, str(casts.dtype).removeprefix("torch.")


def is_mismatch(error: BaseException | None) -> bool:
    """Tell whether torch has refused operands of two precisions."""
    return isinstance(error, RuntimeError) and _MISMATCH.search(str(error)) is not None


def _meeting(name: str, values: Sequence[Any]) -> torch.dtype | None:
    """Return the dtype in which floating operands meet: of what is written to, or the widest; None if they agree."""
    operands = [
        part
        for value in values
        for part in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(part, Tensor) and part.is_floating_point()
    ]
    dtypes = {operand.dtype for operand in operands}
    if len(dtypes) < 2:
        return None
    if name.rstrip("_") != name or name.startswith(("index_", "scatter")):
        return operands[0].dtype
    widest = operands[0].dtype
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def _cast(value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401 - any argument
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return type(value)([_cast(part, dtype) for part in value]) if type(value) in (tuple, list) else value
