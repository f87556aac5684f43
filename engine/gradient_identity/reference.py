"""The reference: gradients of parameters by plain autograd, without any hook of a collection."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from engine.errors import ModelRefused
from engine.gradient_identity.checked_model import Forward, Subject, direction_of, run, unwritten
from engine.model.batches import Batch
from engine.model.loss_directions import drain_backward_queue, run_backward
from engine.model.state.generators import set_generators

Arrived = Callable[[nn.Parameter, Tensor], None]
"""Gets a parameter and its gradient, which is let go of afterwards."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The number ``⟨v, f(x)⟩`` whose gradient is taken."""

    forward: Forward
    """x: examples, on any device, and the state of torch's generators."""
    cotangent: Tensor
    """v, shape (N, R, C) as the outputs. Where the model computes its own loss, what a collection pulls back takes
    its place."""


def pull_back(
    subject: Subject,
    parameters: Sequence[nn.Parameter],
    objective: Objective,
    arrived: Arrived,
    *,
    at_once: bool = True,
) -> bool:
    """Pull the cotangent back to ``parameters``, and hand on each gradient as it arrives.

    The gradient of one parameter is held beside what the pass itself holds.
    """
    own, cotangent = subject.moved(objective.forward.batch), objective.cotangent
    set_generators(objective.forward.start, subject.device)
    arrivals: list[nn.Parameter] = []
    failures: list[Exception] = []

    def accumulated(parameter: nn.Parameter) -> None:
        arrivals.append(parameter)
        if at_once:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and not failures:
                try:
                    with torch._C.DisableTorchFunction():  # noqa: SLF001 - its own operations are not the model's
                        arrived(parameter, gradient)
                except Exception as error:  # noqa: BLE001 - raised below: autograd would keep the rest of the graph
                    failures.append(error)

    with (
        drain_backward_queue(subject.device),
        unwritten(subject.model),
        _trainable(parameters, accumulated),
        torch.enable_grad(),
    ):
        prediction = run(subject, own)
        if subject.task.likelihood == "model":
            cotangent = direction_of(subject, prediction, own.index)
        if prediction.outputs.requires_grad:
            with subject.returning():
                # shown tensors, torch would take its backward pass for an operation, inside which no mode is active
                run_backward(get_gradient_edge(prediction.outputs), cotangent)
        if failures:
            raise failures.pop()
        whole = {id(parameter): parameter for parameter in arrivals}
        for parameter in () if at_once else whole.values():
            if parameter.grad is not None:
                arrived(parameter, parameter.grad)
    return len(whole) < len(arrivals)


def narrowest_dtype(subject: Subject, batch: Batch) -> torch.dtype:
    """Find the narrowest precision that the model computes anything in between its inputs and its outputs.

    Libraries cast norms and attention scores to float32 whatever the model's own precision is.
    """
    results = _Results(subject.dtype)
    own = subject.moved(batch)

    def run_watched() -> None:
        # looked at last: what was widened on the way is not narrow
        with unwritten(subject.model), subject.casting(), results:
            run(replace(subject, widens=False), own)

    try:
        with torch.no_grad():
            run_watched()
    except ModelRefused:
        # a forward pass may take gradients itself
        with torch.enable_grad():
            run_watched()
    return results.narrowest


class _Results(TorchFunctionMode):
    """Notes the narrowest floating-point type that any operation returns."""

    def __init__(self, widest: torch.dtype) -> None:
        super().__init__()
        self.narrowest = widest
        self._left = False

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        # what leaves torch comes back as an operand that no operation has returned
        self._left = self._left or getattr(func, "__name__", "") in ("numpy", "__array__", "__dlpack__")
        for each in (returned, *(args if self._left else ())):
            if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()):
                self.narrowest = max(each.dtype.to_real(), self.narrowest, key=lambda dtype: torch.finfo(dtype).eps)
        return returned


@contextlib.contextmanager
def _trainable(parameters: Sequence[nn.Parameter], call: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Let ``parameters`` need gradients for the time inside, and keep none; ``call`` gets each that has got one."""
    before = [(parameter, parameter.requires_grad) for parameter in parameters]
    handles = []

    with contextlib.ExitStack() as suspended:
        try:
            for parameter in parameters:
                parameter.requires_grad_()
                suspended.enter_context(_suspend_hooks(parameter))
                handles.append(parameter.register_post_accumulate_grad_hook(call))  # type: ignore[no-untyped-call]
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter, flag in before:
                parameter.requires_grad_(flag)
                parameter.grad = None


@contextlib.contextmanager
def _suspend_hooks(parameter: nn.Parameter) -> Iterator[None]:
    """Let no hook that is registered already see the parameter's gradient for the time inside.

    During a pass, ``watch_unused`` takes away each gradient that a parameter with an unused part gets, since the pass
    computes none for its used part; the plain gradient of the used part is not for it.
    """
    hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - torch has no other way to list them
    suspended = dict(hooks or {})
    try:
        if suspended:
            hooks.clear()
        yield
    finally:
        if suspended:
            hooks.update(suspended)
