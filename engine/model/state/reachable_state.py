"""Reachable state: the places and tensors that the code of a model can write to.

Reachable are the attributes of its modules and of what stands in them, whatever holds it; and what the code of its
classes names: class attributes, variables of an enclosing function or of the file, default arguments, memoised
functions; not what code of installed packages names. A counter there may be the caller's own observation, so that of
these *outer* places only what has taken in a tensor is put back.
"""

import dis
import functools
import itertools
import sys
import types
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_
from threading import local
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

_REGISTRIES = tuple(name for name, own in vars(nn.Module()).items() if isinstance(own, dict))
"""Attributes of every module in which it has parameters, buffers, submodules and hooks."""
_ABSENT = object()
"""Stands where a name has no value."""
CONTAINERS: tuple[type[Iterable[Any]], ...] = (dict, list, deque, set, tuple, frozenset)


class Place(Protocol):
    """Something that holds references and can be given others."""

    outer: bool

    def take(self) -> Sequence[Any]:
        """Return the references that it holds now."""

    def put_back(self, before: Sequence[Any]) -> None:
        """Give it the references that it held."""


class DictPlace(Place):
    """A dictionary: its keys and values in order."""

    def __init__(self, held: dict[Any, Any], *, outer: bool) -> None:
        self.held, self.outer = held, outer

    @override
    def take(self) -> Sequence[Any]:
        return *self.held, *self.held.values()

    @override
    def put_back(self, before: Sequence[Any]) -> None:
        self.held.clear()
        for key, value in _paired(before).items():
            self.held[key] = value


class MembersPlace(Place):
    """A list, a queue or a set: its members."""

    def __init__(self, held: "list[Any] | deque[Any] | set[Any]", *, outer: bool) -> None:
        self.held, self.outer = held, outer

    @override
    def take(self) -> Sequence[Any]:
        return tuple(self.held)

    @override
    def put_back(self, before: Sequence[Any]) -> None:
        self.held.clear()
        if isinstance(self.held, set):
            self.held.update(before)
        else:
            self.held.extend(before)


class ArrayPlace(Place):
    """An array of numpy, contiguous: its bytes."""

    def __init__(self, held: Any, *, outer: bool) -> None:  # noqa: ANN401 - the engine does without numpy
        self._held, self.outer, self._known = held, outer, b""

    @override
    def take(self) -> Sequence[Any]:
        now = self._held.tobytes()
        self._known = self._known if now == self._known else now
        return (self._known,)

    @override
    def put_back(self, before: Sequence[Any]) -> None:
        self._held.data.cast("B")[:] = before[0]


class ModulePlace(Place):
    """The attributes of a module, with its parameters, buffers, submodules and hooks."""

    outer: bool

    def __init__(self, module: nn.Module, *, outer: bool) -> None:
        self.module, self.outer = module, outer
        self._own = vars(module)
        self._registries = [own for own in map(self._own.get, _REGISTRIES) if isinstance(own, dict)]

    @override
    def take(self) -> Sequence[Any]:
        own = self._own
        taken = [*own, *own.values(), _ABSENT]
        for registry in self._registries:
            if registry:
                taken += (registry, *registry, *registry.values(), _ABSENT)
        return taken

    @override
    def put_back(self, before: Sequence[Any]) -> None:
        attributes, registries = _sorted_out(before)
        for registry in self._registries:
            registry.clear()
            for key, value in registries.get(id(registry), {}).items():
                registry[key] = value
        self._own.clear()
        self._own.update(attributes)

    def children(self) -> Iterable[Any]:
        """Return what the attributes and the registries refer to."""
        known = set(map(id, self._registries))
        attributes = (value for value in self._own.values() if id(value) not in known)
        return itertools.chain(attributes, *(registry.values() for registry in self._registries))

    def changed_parameters(self, path: str, before: Sequence[Any], now: Sequence[Any]) -> set[str]:
        """Return the names of the parameters that the module, or a submodule of its, has at one of two times alone."""
        names, (here, there) = set(), (self._parameters(each) for each in (before, now))
        for key in dict.fromkeys([*here, *there]):
            name, found = f"{path}.{key}" if path else str(key), (here.get(key), there.get(key))
            if found[0] is found[1]:
                continue
            names |= {name} if any(isinstance(each, nn.Parameter) for each in found) else set()
            inside = (each.named_parameters() for each in found if isinstance(each, nn.Module))
            names |= {f"{name}.{inner}" for inner, _ in itertools.chain(*inside)}
        return names

    def _parameters(self, taken: Sequence[Any]) -> dict[Any, Any]:
        """Return the parameters and submodules among what ``take`` returned."""
        registries = _sorted_out(taken)[1]
        wanted = (self._own.get("_parameters"), self._own.get("_modules"))
        return {key: value for each in wanted for key, value in registries.get(id(each), {}).items()}


def _sorted_out(taken: Sequence[Any]) -> tuple[dict[Any, Any], dict[int, dict[Any, Any]]]:
    """Return the attributes that a ``ModulePlace`` has taken, and the content of each registry by its identity."""
    parts: list[list[Any]] = [[]]
    for value in taken:
        if value is _ABSENT:
            parts.append([])
        else:
            parts[-1].append(value)
    pairs = [_paired(parts[0]), *(_paired(part[1:]) for part in parts[1:-1])]
    return pairs[0], {id(part[0]): pair for part, pair in zip(parts[1:-1], pairs[1:], strict=True)}


def _paired(taken: Sequence[Any]) -> dict[Any, Any]:
    """Return keys and values that stand one after the other as a dictionary."""
    count = len(taken) // 2
    return dict(zip(taken[:count], taken[count:], strict=True))


class NamesPlace(Place):
    """Some names of a namespace: variables of a file, slots of an instance, the content of a closure's cell."""

    def __init__(self, names: Sequence[str], *accesses: Callable[..., Any], outer: bool) -> None:
        self._names, self.outer = names, outer
        self._read, self._write, self._delete = accesses

    @override
    def take(self) -> Sequence[Any]:
        return tuple(self._read(name, _ABSENT) for name in self._names)

    @override
    def put_back(self, before: Sequence[Any]) -> None:
        for name, value in zip(self._names, before, strict=True):
            now = self._read(name, _ABSENT)
            if now is not value:
                if value is _ABSENT:
                    self._delete(name)
                else:
                    self._write(name, value)


class ClassPlace(Place):
    """The attributes of a class."""

    outer = True

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @override
    def take(self) -> Sequence[Any]:
        own = vars(self._kind)
        return *own, *own.values()

    @override
    def put_back(self, before: Sequence[Any]) -> None:
        known = _paired(before)
        for name, value in list(vars(self._kind).items()):
            if name not in known:
                delattr(self._kind, name)
            elif value is not known[name]:
                setattr(self._kind, name, known[name])
        for name in known.keys() - vars(self._kind).keys():
            setattr(self._kind, name, known[name])


def differs(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Tell whether a place holds other references than before."""
    return len(now) != len(before) or not all(map(is_, now, before))


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
