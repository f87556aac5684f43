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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError, ModelChanged
from engine.model.state.reachable_state import Places
from engine.model.state.state_places import ModulePlace, differs, holds_tensor
from engine.model.state.written_tensors import Contents, Watched, bit_sums

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
        self._watched: Sequence[Watched] = ()
        self._before, self._drawn = self._taken(), [each.get_state() for each in self._generators]

    @contextlib.contextmanager
    def held(self, model: nn.Module) -> Iterator[None]:
        """Hold the state: every forward pass of the model inside leaves it as it was."""
        if not self._contents.are_there():
            self._working = Contents(self._written)
        self._watched = Watched.by_checksum(self._unmoved)
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
        written = [each.name for each in self._watched if each.has_moved(whatever=False)]
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
        sums = bit_sums(each.parameter for each in self._watched)
        moved = [
            each.name
            for each, found in zip(self._watched, sums, strict=True)
            if each.has_moved(whatever=True, checksum=found)
        ]
        if moved:
            raise self._changed(moved, "writes to") from before

    def _changed(self, names: Sequence[str], does: str) -> ModelChanged:
        several = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return ModelChanged(
            f"a forward pass in evaluation mode must leave the parameters as they are, and that of `{self._of}` {does} "
            f"`{names[0]}`{several}; do so before the model is measured, as by one forward pass, and not in `forward`",
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
            if place.outer and not holds_tensor(value for value in now if id(value) not in known):
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
            if function.cache_info().currsize != size and holds_tensor(gc.get_referents(function)):
                function.cache_clear()
        return moved


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


def forward_of(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return the context in which a forward pass of a model runs."""
    state = _HELD.get(model)
    return contextlib.nullcontext() if state is None else state.forward()
