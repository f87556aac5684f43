"""Model state: a model is after every forward pass as it was before, and its parameters never move.

    references    what its places hold (``reachable_state``) is put back when a forward pass ends, however it ends
    contents      buffers and other tensors that were written to are written back before the next forward pass, since
                  the backward pass may still read them, and at the end
    parameters    which they are, the version of each after every forward pass, and all bits at the end

So every pass sees the model that the caller has handed over: nothing is cached in one that another reads.
"""

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError, ModelChanged
from engine.model.state.reachable_state import CONTAINERS, ModulePlace, Places, differs

_WIDTH = 63
"""Words in a row; an odd number, so that a row whose numbers all change their signs has another sum."""
_SPREAD = 0x1E3779B97F4A7C15
"""An odd number whose multiples have no pattern among their bits."""


def bit_sum(tensor: Tensor) -> int:
    """Compute an exact checksum of a tensor's bytes, read as rows of 64-bit integers.

    Sums of rows and of columns are mixed with their places and summed. One number that changes changes one sum of each
    kind; a pattern of changes that leaves all of them as they were is not detected.

    Args:
        tensor: A tensor of any shape, dtype and device.

    Returns:
        64 bits with their sign; 0 for an empty tensor, and for what is not stored densely.
    """
    return bit_sums([tensor])[0]


def bit_sums(tensors: Iterable[Tensor]) -> list[int]:
    """Compute the ``bit_sum`` of each tensor, with one wait for each device that they stand on."""
    sums = [_bit_sum(each) for each in tensors]
    whole: dict[int, int] = {}
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        whole |= zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True)
    return [whole[place] for place in range(len(sums))]


def _bit_sum(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    # torch reads only what lies on a multiple of its size as a wider type
    aligned = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    words = aligned.view(torch.int64)
    square = words[: words.numel() // _WIDTH * _WIDTH].view(-1, _WIDTH)
    sums = torch.cat([square.sum(0), square.sum(1), words[square.numel() :], flat[whole:].to(torch.int64)])
    placed = sums + torch.arange(1, 1 + len(sums), device=sums.device) * _SPREAD
    # not linear, so that changes of two sums do not cancel
    return (placed >> 29).bitwise_xor_(placed).mul_(placed).sum()


_LOOKED_AT = 2**12
"""Numbers of a tensor that is compared before every forward pass, whatever its version says."""


class Contents:
    """The numbers of tensors, with a copy of them.

    Args:
        tensors: Strided tensors of any shapes.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [each for each in tensors if not each.is_meta]
        self._data = [each.data for each in self._tensors]
        self._copies = [each.detach().clone() for each in self._tensors]
        self._leaves = [each.is_leaf for each in self._tensors]
        small: dict[Any, list[int]] = {}
        for place, each in enumerate(self._tensors):
            if each.numel() <= _LOOKED_AT and each.is_contiguous():
                small.setdefault((each.dtype, each.device), []).append(place)
        self._looks = [
            ([self._data[place].view(-1) for place in own], torch.cat([self._copies[place].view(-1) for place in own]))
            for own in small.values()
        ]
        self._marks = self._marked()

    def are_there(self) -> bool:
        """Tell whether every tensor has the storage that it had."""
        return all(each.data_ptr() == mark[1] for each, mark in zip(self._tensors, self._marks, strict=True))

    def rewind(self) -> None:
        """Write the numbers back where they were written to since, in the precision that the tensors have now."""
        if self._marked() == self._marks and all(same_numbers(torch.cat(now), copy) for now, copy in self._looks):
            return
        for tensor, copy, leaf in zip(self._tensors, self._copies, self._leaves, strict=True):
            _detach_again(tensor, leaf=leaf)
            own = copy.to(tensor.dtype)
            if tensor.shape == copy.shape and not same_numbers(tensor.detach(), own):
                # autograd is to notice where the numbers were still needed
                tensor.detach().copy_(own)
        self._marks = self._marked()

    def put_back(self) -> None:
        """Give every tensor its own storage back, with its numbers."""
        for tensor, data, copy, leaf in zip(self._tensors, self._data, self._copies, self._leaves, strict=True):
            _detach_again(tensor, leaf=leaf)
            tensor.data = data
            if not same_numbers(data, copy):
                data.copy_(copy)

    def _marked(self) -> list[tuple[int, int]]:
        return [(version_of(each), each.data_ptr()) for each in self._tensors]


def _detach_again(tensor: Tensor, *, leaf: bool) -> None:
    """Take a tensor out of a graph that a write has made it a part of."""
    if leaf and not tensor.is_leaf:
        # a view cannot be; what it is a view of is
        with contextlib.suppress(RuntimeError):
            tensor.detach_()


class Watched:
    """A parameter, whose numbers must stay as they are: held against a copy, or against its checksum."""

    def __init__(self, name: str, parameter: nn.Parameter, checksum: int | None = None) -> None:
        self.name, self.parameter = name, parameter
        self._copy = parameter.detach().clone() if checksum is None else None
        self._sum = checksum
        self._version, self._dtype = version_of(parameter), parameter.dtype

    @classmethod
    def by_checksum(cls, parameters: Mapping[str, nn.Parameter]) -> "list[Watched]":
        """Watch some parameters, by name, without copies of them."""
        sums = bit_sums(parameters.values())
        return [cls(name, each, checksum) for (name, each), checksum in zip(parameters.items(), sums, strict=True)]

    @property
    def checksum(self) -> int | None:
        """The ``bit_sum`` of its numbers; None where it is not known, or something was written to them since."""
        return self._sum if (version_of(self.parameter), self.parameter.dtype) == (self._version, self._dtype) else None

    def has_moved(self, *, whatever: bool, checksum: int | None = None) -> bool:
        """Tell whether the numbers differ, and put them back where there is a copy.

        ``whatever`` looks at them even where nothing was written; ``checksum`` is their ``bit_sum`` where it is known.
        """
        version = version_of(self.parameter)
        if (version == self._version and not whatever) or self.parameter.dtype != self._dtype:
            return False
        if self._copy is None:
            moved = (bit_sum(self.parameter) if checksum is None else checksum) != self._sum
        else:
            moved = not same_numbers(self.parameter.detach(), self._copy)
            if moved and self.parameter.shape == self._copy.shape:
                self.parameter.data.copy_(self._copy)
        if not moved or self._copy is not None:
            self._version = version_of(self.parameter)
        return moved


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place; 0 for one that was made for inference alone.

    Args:
        tensor: Any tensor.
    """
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - what autograd itself compares


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same numbers, NaN among them.

    Args:
        one: A tensor of any shape.
        other: Another of the same dtype.
    """
    return torch.equal(one, other) or (one.shape == other.shape and bit_sum(one) == bit_sum(other))


_COPIED_BYTES = 2**24
"""Parameters that together have at most these are copied, so that they can be put back too."""
_LARGEST_BYTES = 2**26
"""Most bytes of a copied tensor that is neither parameter nor buffer."""
_LARGEST_OUTER_BYTES = 2**14
"""The same of one that the code of the model's classes names."""


@dataclass(frozen=True)
class _Before:
    """The references and flags at one time."""

    taken: Sequence[Sequence[Any]]
    flags: Sequence[tuple[bool, Tensor | None]]
    memoised: Sequence[int]


class ModelState:
    """The state of a model: what it is put back to after every forward pass, and at the end.

    Args:
        model: The model.
        copied: Parameters that are copied whatever their size, since something else than a forward pass writes to them.
    """

    def __init__(self, model: nn.Module, copied: Iterable[Tensor] = ()) -> None:
        self._of, places = type(model).__name__, Places(model)
        self._places, self._memoised, self._generators = places.places, places.memoised, places.generators
        self._paths = {id(module): path for path, module in model.named_modules()}
        named = dict(model.named_parameters())
        self._parameters = list(named.values())
        buffers = {id(buffer) for buffer in model.buffers()}
        self._written = [
            tensor for tensor, outer in places.tensors if _is_written(tensor, outer=outer, whole=id(tensor) in buffers)
        ]
        self._contents = self._working = Contents(self._written)
        # a table that renorms what it looks up does so in every forward pass alike
        renormed = {id(module.weight) for module in model.modules() if getattr(module, "max_norm", None) is not None}
        watched = {name: each for name, each in named.items() if _is_watched(each)}
        own = renormed.union(map(id, copied))
        self._few = sum(each.nbytes for each in watched.values()) <= _COPIED_BYTES
        self._kept = [Watched(name, each) for name, each in watched.items() if self._few or id(each) in own]
        self._unmoved = {name: each for name, each in watched.items() if id(each) not in renormed}
        self.watched: Sequence[Watched] = ()
        self._before, self._drawn = self._taken(), [each.get_state() for each in self._generators]

    @contextlib.contextmanager
    def held(self, model: nn.Module) -> Iterator[None]:
        """Hold the state: every forward pass of the model inside leaves it as it was."""
        if not self._contents.are_there():
            self._working = Contents(self._written)
        self.watched = Watched.by_checksum(self._unmoved)
        outer = _HELD.get(model)
        _HELD[model] = self
        try:
            yield
        except EngineError as error:
            # numbers that were written to are the reason of whatever did not hold
            self._require_unmoved(error)
            raise
        finally:
            _HELD.pop(model)
            if outer is not None:
                _HELD[model] = outer
        self._require_unmoved()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward pass from the state that the model had, and put back what the pass changes."""
        self._working.rewind()
        before = self._taken()
        try:
            yield
        except BaseException:
            self._put_back(before)
            raise
        moved = self._put_back(before)
        if moved:
            raise self._changed(sorted(moved), "replaces, adds or removes")
        written = [each.name for each in self.watched if each.has_moved(whatever=False)]
        if written:
            raise self._changed(written, "writes to")

    def restore(self) -> None:
        """Put everything back as it was when this state was taken."""
        self._put_back(self._before)
        self._contents.put_back()
        for each in self._kept:
            each.has_moved(whatever=True)
        for generator, drawn in zip(self._generators, self._drawn, strict=True):
            generator.set_state(drawn)

    def _require_unmoved(self, before: EngineError | None = None) -> None:
        """Require that every parameter has the bits that it had; what was raised before is the cause."""
        sums = bit_sums(each.parameter for each in self.watched)
        moved = [
            each.name
            for each, found in zip(self.watched, sums, strict=True)
            if each.has_moved(whatever=True, checksum=found)
        ]
        if moved:
            raise self._changed(moved, "writes to") from before

    def _changed(self, names: Sequence[str], does: str) -> ModelChanged:
        several = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return ModelChanged(
            f"a forward pass in evaluation mode must leave the parameters as they are, and that of `{self._of}` {does} "
            f"`{names[0]}`{several} (or another thread does); do so before the model is measured, and not in `forward`",
            layer=names[0].rpartition(".")[0] or None,
            pointer="/model",
        )

    def _taken(self) -> _Before:
        return _Before(
            [place.take() for place in self._places],
            [(each.requires_grad, each.grad) for each in self._parameters],
            [each.cache_info().currsize for each in self._memoised],
        )

    def _put_back(self, before: _Before) -> set[str]:
        """Put all references back; return the names of parameters that were others."""
        moved: set[str] = set()
        for place, taken in zip(self._places, before.taken, strict=True):
            now = place.take()
            if not differs(now, taken):
                continue
            known = set(map(id, taken))
            if place.outer and not _holds_tensor(value for value in now if id(value) not in known):
                continue
            if isinstance(place, ModulePlace) and id(place.module) in self._paths:
                moved |= place.changed_parameters(self._paths[id(place.module)], taken, now)
            place.put_back(taken)
        for parameter, (flag, gradient) in zip(self._parameters, before.flags, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for function, size in zip(self._memoised, before.memoised, strict=True):
            if function.cache_info().currsize != size and _holds_tensor(gc.get_referents(function)):
                function.cache_clear()
        return moved


def _holds_tensor(values: Iterable[Any], depth: int = 3) -> bool:
    """Tell whether there is a tensor or a module among some values, or within containers among them."""
    for value in values:
        if isinstance(value, (Tensor, nn.Module)):
            return True
        if depth and isinstance(value, CONTAINERS):
            inside = value.values() if isinstance(value, dict) else value
            if _holds_tensor(inside, depth - 1):
                return True
    return False


def _is_written(tensor: Tensor, *, outer: bool, whole: bool) -> bool:
    """Tell whether a forward pass may write to a tensor that can be copied: a buffer whatever its size."""
    if isinstance(tensor, nn.Parameter) or tensor.layout != torch.strided or nn.parameter.is_lazy(tensor):
        return False
    largest = _LARGEST_OUTER_BYTES if outer else _LARGEST_BYTES
    return whole or (tensor.nbytes <= largest and not tensor.requires_grad)


def _is_watched(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter has numbers of its own here, which gathered ones and those of a plan have not."""
    return type(parameter) is nn.Parameter and parameter.layout == torch.strided and not parameter.is_meta


_HELD: "weakref.WeakKeyDictionary[nn.Module, ModelState]" = weakref.WeakKeyDictionary()


_OWNERS_DEVICE: ContextVar[torch.device | None] = ContextVar("default device of the model's owner", default=None)


@contextlib.contextmanager
def host_by_default() -> Iterator[None]:
    """Create tensors on the host where no device is named; a model's forward pass keeps the default that stands now."""
    owners = torch.get_default_device()
    if owners.type == "cpu":
        # torch passes every call through Python where a default is set
        yield
        return
    token = _OWNERS_DEVICE.set(owners)
    try:
        with torch.device("cpu"):
            yield
    finally:
        _OWNERS_DEVICE.reset(token)


def known_checksums(model: nn.Module) -> dict[int, int]:
    """Return the ``bit_sum`` of a held model's parameters that nothing wrote to, by the identity of the parameter."""
    watched = () if (state := _HELD.get(model)) is None else state.watched
    return {id(each.parameter): found for each in watched if (found := each.checksum) is not None}


def forward_of(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return the context in which a forward pass of a model runs, by its owner's default device."""
    state, owners = _HELD.get(model), _OWNERS_DEVICE.get()
    kept = contextlib.nullcontext() if state is None else state.forward()
    return kept if owners is None else _with_default(owners, kept)


@contextlib.contextmanager
def _with_default(device: torch.device, inner: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    with device, inner:
        yield
