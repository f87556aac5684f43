"""Hooked model: the hooks on modules and the watch over parameters, attached together and removed together."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from engine.accumulation.layer_statistics import LayerStatistics
from engine.layers.layer import TreatedLayer
from engine.row_layout.layer_calls import called
from engine.tracing.function_mode import ParameterUseMode
from engine.tracing.shared_parameters import StandIn, install_stand_ins


@contextlib.contextmanager
def hooked(
    statistics: Sequence[LayerStatistics],
    after: Callable[[LayerStatistics, TreatedLayer], Any],
    use_mode: ParameterUseMode | None,
) -> Iterator[None]:
    """Watch layers while inside."""
    # before the caller's own hooks, which may put something else in the output's place
    handles = [
        module.register_forward_hook(after(each, role), with_kwargs=True, prepend=True)
        for each in statistics
        for role, module in called((each.layer,))
    ]
    by_name = {each.layer.name: each for each in statistics}

    def arrived(stand_in: StandIn, leaf: Tensor) -> None:
        leaf.grad = None
        by_name[stand_in.layer].flaw = by_name[stand_in.layer].flaw or "unforeseen_use"

    try:
        with install_stand_ins([each.layer for each in statistics]) as stand_ins:
            # removed again: a leaf and its hook hold each other, and with them the statistics
            handles += [each.when_reached(partial(arrived, each)) for each in stand_ins]
            with use_mode.watching() if use_mode else contextlib.nullcontext():
                yield
            for stand_in in stand_ins:
                if stand_in.replaced:
                    arrived(stand_in, stand_in.leaf)
    finally:
        for handle in handles:
            handle.remove()
