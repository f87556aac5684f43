"""Uses elsewhere: parameters that a model reads besides in the calls of the modules that hold them.

A head may multiply by its table's weight without being a module, and a module may keep another's
parameter under a name of its own (BERT's prediction head, its decoder's bias), to use it or not. A
hook on the module sees none of that. A dry run shows it, in which every parameter is NaN except
while its own module is called: what stays finite has not been read elsewhere.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from engine.curvature.layers.coverage import Alias
from engine.curvature.layers.layer import TreatedLayer
from engine.errors import EngineError


def used_elsewhere(
    layers: Sequence[TreatedLayer], aliases: Sequence[Alias], run: Callable[[], object]
) -> frozenset[str]:
    """Those of ``layers`` whose parameters ``run`` reads outside their modules' calls, by name.

    ``run`` raises an ``EngineError`` where the outputs are not finite. One run where there are none;
    else the layers are halved until they are found.
    """
    if not layers:
        return frozenset()
    names = {layer.name for layer in layers}
    with _blotted(layers, [alias for alias in aliases if alias.layer in names]):
        try:
            run()
        except EngineError:
            reads = True
        else:
            return frozenset()
    if reads and len(layers) == 1:
        return frozenset(names)
    middle = len(layers) // 2
    return used_elsewhere(layers[:middle], aliases, run) | used_elsewhere(layers[middle:], aliases, run)


@contextlib.contextmanager
def _blotted(layers: Sequence[TreatedLayer], aliases: Sequence[Alias]) -> Iterator[None]:
    """NaN in the place of the layers' parameters, except while a module that holds them is called.

    Memory:
        One number a parameter: its NaN is a view that repeats it.
    """
    with contextlib.ExitStack() as stack:
        for module, key in _places(layers):
            blot = _Blot(module, key)
            stack.callback(blot.lift)
            # what hooks of the caller's do is part of the call
            for handle in (
                module.register_forward_pre_hook(blot.lift, prepend=True),
                module.register_forward_hook(blot.lay, always_call=True),
            ):
                stack.callback(handle.remove)
            blot.lay()
        for alias in aliases:
            blot = _Blot(alias.module, alias.key)
            stack.callback(blot.lift)
            blot.lay()
        yield


def _places(layers: Sequence[TreatedLayer]) -> Iterator[tuple[nn.Module, str]]:
    for role in (role for layer in layers for role in layer.roles):
        for module in (role.module, *role.also.values()):
            for key, covered in (("weight", role.weight), ("bias", role.bias)):
                if covered and isinstance(module._parameters.get(key), nn.Parameter):  # noqa: SLF001 - its own
                    yield module, key


class _Blot:
    """NaN that can stand where a parameter of a module's stands."""

    def __init__(self, module: nn.Module, key: str) -> None:
        self._own, self._key = module._parameters, key  # noqa: SLF001 - own parameters, whatever holds them too
        self._kept = self._own[key]
        if self._kept is None:
            raise ValueError(f"there is no `{key}` to stand in for")
        number = torch.full((), torch.nan, dtype=self._kept.dtype, device=self._kept.device)
        self._blot = nn.Parameter(number.expand(self._kept.shape), requires_grad=False)

    def lay(self, *_: object) -> None:
        """Put NaN there."""
        self._own[self._key] = self._blot

    def lift(self, *_: object) -> None:
        """Put the parameter back."""
        self._own[self._key] = self._kept
