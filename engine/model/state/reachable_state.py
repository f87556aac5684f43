"""Reachable state: the places and tensors that the code of a model can write to.

Reachable are the attributes of its modules and of what stands in them, whatever holds it; and what the code of its
classes names: class attributes, variables of an enclosing function or of the file, default arguments, memoised
functions; not what code of installed packages names. A counter there may be the caller's own observation, so that of
these *outer* places only what has taken in a tensor is put back.
"""

import dis
import functools
import sys
import types
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from engine.model.state.state_places import (
    CONTAINERS,
    ArrayPlace,
    ClassPlace,
    DictPlace,
    MembersPlace,
    ModulePlace,
    NamesPlace,
    Place,
)

MOST_PLACES = 20_000
"""Places at which the search ends."""
_ARRAY_BYTES = 2**20
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.Size}
)
_OWN = frozenset({*sys.stdlib_module_names, "torch", "numpy", __name__.partition(".")[0]})
"""Packages whose classes and functions keep nothing of a model."""
_PLAIN = (types.SimpleNamespace, local, UserDict, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
"""Classes of the standard library whose instances hold what a caller puts there."""
_MOVING = (Dataset, DataLoader, Sampler, torch.optim.Optimizer)
"""Classes whose objects move on by themselves while data are read."""
_GLOBAL = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"})
_Memoised = type(functools.cache(lambda: None))
_FUNCTIONS = (
    types.FunctionType, types.MethodType, functools.partial, property, staticmethod, classmethod, _Memoised,
)  # fmt: skip
_PLACES: dict[type, Callable[..., Place]] = {dict: DictPlace, **dict.fromkeys((list, deque, set), MembersPlace)}


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the variables of its file that a function's code names, with those of the functions within it."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL}
    inside = (name for each in code.co_consts if isinstance(each, types.CodeType) for name in _global_names(each))
    return tuple(sorted(own.union(inside)))


class Places:
    """The places that are reachable from a model.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: list[Place] = []
        self.tensors: list[tuple[Tensor, bool]] = []
        """Every tensor, and whether it was found in outer places alone."""
        self.generators: list[torch.Generator] = []
        self.memoised: list[Any] = []
        """Functions under ``functools.cache``."""
        self._seen: set[int] = set()
        self._inner: list[Any] = [model]
        self._outer: list[Any] = []
        while (self._inner or self._outer) and len(self.places) < MOST_PLACES:
            # what both reach is the model's
            outer = not self._inner
            value = (self._outer if outer else self._inner).pop()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._visit(value, outer=outer)

    def _reach(self, values: Iterable[Any], *, outer: bool) -> None:
        waiting = self._outer if outer else self._inner
        waiting.extend(value for value in values if type(value) not in _ATOMS)

    def _visit(self, value: Any, *, outer: bool) -> None:  # noqa: ANN401 - whatever a model refers to
        if isinstance(value, Tensor):
            self.tensors.append((value, outer))
        elif isinstance(value, CONTAINERS):
            for container, place in _PLACES.items():
                if isinstance(value, container):
                    self.places.append(place(value, outer=outer))
            self._reach(value.values() if isinstance(value, dict) else value, outer=outer)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, _FUNCTIONS):
            self._visit_function(value, outer=outer)
        elif isinstance(value, (nn.Module, *_PLAIN)) or _is_foreign(type(value)):
            self._visit_instance(value, outer=outer)
        elif _is_array(value):
            self.places.append(ArrayPlace(value, outer=outer))
        elif isinstance(value, torch.Generator):
            self.generators.append(value)

    def _visit_instance(self, value: Any, *, outer: bool) -> None:  # noqa: ANN401 - of any class
        if isinstance(value, _MOVING) or hasattr(value, "__next__"):
            return
        self._outer.append(type(value))
        if isinstance(value, nn.Module):
            place = ModulePlace(value, outer=outer)
            self.places.append(place)
            self._reach(place.children(), outer=outer)
            return
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._reach((own,), outer=outer)
        slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
        if slots:
            accesses = (partial(getattr, value), partial(setattr, value), partial(delattr, value))
            self._name(slots, *accesses, outer=outer)

    def _visit_class(self, kind: type) -> None:
        for each in kind.__mro__:
            if _is_written(each) and (each is kind or id(each) not in self._seen):
                self._seen.add(id(each))
                self.places.append(ClassPlace(each))
                self._reach(vars(each).values(), outer=True)

    def _visit_function(self, value: Any, *, outer: bool) -> None:  # noqa: ANN401 - the several kinds of functions
        if isinstance(value, types.MethodType):
            self._reach((value.__self__,), outer=outer)
            self._reach((value.__func__,), outer=True)
        elif isinstance(value, functools.partial):
            self._reach((value.func, value.args, value.keywords), outer=outer)
        elif isinstance(value, property):
            self._reach((value.fget, value.fset), outer=True)
        elif isinstance(value, (staticmethod, classmethod)):
            self._reach((value.__func__,), outer=True)
        elif isinstance(value, _Memoised):
            self.memoised.append(value)
            self._reach((value.__wrapped__,), outer=True)
        elif _is_written(value):
            self._visit_code(value)

    def _visit_code(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            self._name(
                ["cell_contents"], partial(_content, cell), partial(setattr, cell), partial(delattr, cell), outer=True
            )
        self._reach((function.__defaults__, function.__kwdefaults__, vars(function)), outer=True)
        names, variables = _global_names(function.__code__), function.__globals__
        self._name(names, variables.get, variables.__setitem__, variables.__delitem__, outer=True)

    def _name(self, names: Sequence[str], *accesses: Callable[..., Any], outer: bool) -> None:
        place = NamesPlace(names, *accesses, outer=outer)
        self.places.append(place)
        self._reach(place.take(), outer=outer)


def _is_array(value: Any) -> bool:  # noqa: ANN401 - the engine does without numpy
    """Tell whether something is a small array of numpy that is written to as it lies in memory."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.hasobject:
        return False
    return bool(value.flags.c_contiguous and value.flags.writeable and 0 < value.nbytes <= _ARRAY_BYTES)


def _content(cell: types.CellType, name: str, default: object) -> object:
    """Return what a variable of an enclosing function holds; ``default`` where it is not set."""
    del name
    try:
        return cell.cell_contents
    except ValueError:
        return default


def _slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the attributes that a class keeps in slots."""
    own = vars(kind).get("__slots__", ()) if _is_foreign(kind) else ()
    return tuple(name for name in ((own,) if isinstance(own, str) else own) if not name.startswith("__"))


def _is_foreign(value: Any) -> bool:  # noqa: ANN401 - a class or a function
    """Tell whether a class or function is neither torch's nor the standard library's."""
    return str(getattr(value, "__module__", "")).partition(".")[0] not in _OWN


def _is_written(value: Any) -> bool:  # noqa: ANN401 - a class or a function
    """Tell whether the code of a class or function is looked into: not where it belongs to an installed package."""
    return _is_foreign(value) and not _is_installed(str(value.__module__).partition(".")[0])


@functools.cache
def _is_installed(package: str) -> bool:
    path = str(getattr(sys.modules.get(package), "__file__", None) or "")
    return "site-packages" in path or "dist-packages" in path
