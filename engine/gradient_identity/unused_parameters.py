"""Unused parameters: those that are called `no_gradient` stay trainable for a whole pass, which shows what is true."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from torch import nn


@contextlib.contextmanager
def watch_unused(parameters: Mapping[str, nn.Parameter], reached: Callable[[str], None]) -> Iterator[None]:
    """Say which parameters a gradient reaches; while none does, nothing is computed for them."""
    before = {name: (each.requires_grad, each.grad) for name, each in parameters.items()}
    names = {id(each): name for name, each in parameters.items()}
    handles = []

    def arrived(parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and bool((gradient != 0).any()):
            reached(names[id(parameter)])

    try:
        for each in parameters.values():
            each.grad = None
            each.requires_grad_()
            handles.append(each.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, (flag, gradient) in before.items():
            parameters[name].requires_grad_(flag)
            parameters[name].grad = gradient
