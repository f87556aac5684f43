"""State places: dictionaries, lists, sets and names that a model's code can write to, and how each is put back."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, Protocol

from torch import Tensor, nn
from typing_extensions import override

_REGISTRIES = tuple(name for name, own in vars(nn.Module()).items() if isinstance(own, dict))
"""Attributes of every module in which it has parameters, buffers, submodules and hooks."""
ABSENT = object()
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
        taken = [*own, *own.values(), ABSENT]
        for registry in self._registries:
            if registry:
                taken += (registry, *registry, *registry.values(), ABSENT)
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
        if value is ABSENT:
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
        return tuple(self._read(name, ABSENT) for name in self._names)

    @override
    def put_back(self, before: Sequence[Any]) -> None:
        for name, value in zip(self._names, before, strict=True):
            now = self._read(name, ABSENT)
            if now is not value:
                if value is ABSENT:
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


def holds_tensor(values: Iterable[Any], depth: int = 3) -> bool:
    """Tell whether there is a tensor or a module among some values, or within containers among them."""
    for value in values:
        if isinstance(value, (Tensor, nn.Module)):
            return True
        if depth and isinstance(value, CONTAINERS):
            inside = value.values() if isinstance(value, dict) else value
            if holds_tensor(inside, depth - 1):
                return True
    return False
