"""Preserved state: a model runs for measuring, and is left exactly as it was before.

Refused first, with the tensor or module that is meant and what to do, is what autograd or hooks cannot deal with::

    a program of TorchScript or torch.export     its layers are no modules, or its mode is fixed
    a tensor without shape                       a lazy module that has seen no batch
    a tensor without numbers                     on the meta device, or with a storage that was freed
    a tensor made for inference alone            autograd keeps no versions of it
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from catalog.responses.layer_record import WHOLE_MODEL
from engine.distributed.sharded_tensors import is_sharded
from engine.errors import ModelRefused
from engine.model.activation_memory import hook_gradient
from engine.model.dtype_casts import note_conversion
from engine.model.sharding.gathered_parameters import GatheredParameter, converted, put_back
from engine.model.state.generators import kept_generators
from engine.model.state.model_state import ModelState
from engine.model.state.own_gradients import frozen_parameters


def require_usable(model: nn.Module) -> None:
    """Require that a model's layers can be watched, and that its tensors have numbers that autograd can use.

    Raises:
        ModelRefused: If it cannot be measured; the message names the module or tensor, and the remedy.
    """
    for name, module in model.named_modules():
        why = _unwatchable(module, whole=not name)
        if why is not None:
            subject = f"the model's part `{name}`" if name else "the model"
            raise ModelRefused(f"{subject} is {why}", layer=name or None, pointer="/model")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        why = _unusable(tensor)
        if why is not None:
            raise ModelRefused(
                f"the model's tensor `{name}` {why}", layer=name.rpartition(".")[0] or WHOLE_MODEL, pointer="/model"
            )


def _unwatchable(module: nn.Module, *, whole: bool) -> str | None:
    if isinstance(module, torch.jit.ScriptModule) and (whole or not hasattr(module, "training")):
        # a scripted part of a model is declared: what stands around it can be measured
        return (
            f"a program of TorchScript ({type(module).__name__}), whose layers cannot be watched; measure the "
            "torch.nn.Module that it was made of"
        )
    if isinstance(module, torch.fx.GraphModule) and not {"train", "eval"}.isdisjoint(vars(module)):
        return (
            f"a program of torch.export ({type(module).__name__}), whose mode is fixed; measure the torch.nn.Module "
            "that was exported"
        )
    return None


def _unusable(tensor: Tensor) -> str | None:
    if nn.parameter.is_lazy(tensor):
        return "has no shape yet; call the model once on a batch before it is measured"
    if tensor.is_meta:
        return (
            "stands on the meta device, where it has a shape and no numbers; give the model its memory by "
            "`model.to_empty(device=…)`, and load its weights by `load_state_dict`"
        )
    if tensor.is_inference():
        return (
            "was made under `torch.inference_mode()`, so autograd cannot use it; build or load the model outside of "
            "it, or under `torch.no_grad()`"
        )
    if _is_freed(tensor):
        return (
            "has a storage that was freed, so that its numbers are gone; gather or load the weights before the model "
            "is measured"
        )
    return None


def _is_freed(tensor: Tensor) -> bool:
    """Whether a tensor has fewer bytes than numbers; those that are gathered on request have none between uses."""
    if tensor.layout != torch.strided or isinstance(tensor, GatheredParameter) or is_sharded(tensor):
        return False
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        # a subclass may keep its numbers elsewhere
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


@contextlib.contextmanager
def preserve_state(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Run a model in ``eval()`` without gradients of parameters that are not its own, and restore it afterwards.

    Flags, modes, weights, buffers, `.grad`s, hooks, the generators' state and what modules hold besides are as before
    afterwards, whatever happens inside; and after every forward pass, as ``model_state`` describes.

    Args:
        dtype: Precision that its floating-point parameters and buffers have inside.

    Raises:
        ModelChanged: At the end, if a parameter has other numbers than at the beginning.
    """
    contents = [
        (tensor, tensor.data)
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.is_floating_point() and tensor.dtype != dtype
    ]
    note_conversion(model, frozenset(tensor.dtype for tensor, _ in contents), dtype)
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    with (
        torch.inference_mode(mode=False),
        kept_generators(*devices),
        products_at_full_width(),
        _eager(),
        _plain(model),
        in_evaluation(model) as state,
        order_gradients(model),
        _step_by_step(model),
        frozen_parameters(model),
    ):
        try:
            for tensor, _ in contents:
                tensor.data = converted(tensor, dtype)
            with state.held(model):
                yield
        finally:
            for tensor, data in contents:
                put_back(tensor, data)


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[ModelState]:
    """Put a model into evaluation mode, and restore it afterwards: modes, weights, buffers, and what its modules hold.

    Args:
        model: The model, in any mode.

    Yields:
        What it is restored to.
    """
    modes = [(module, module.training) for module in model.modules()]
    merging = [module for module in model.modules() if _does_more_in_train(module)]
    state = ModelState(model, (own for module in merging for own in module.parameters(recurse=False)))

    def restore() -> None:
        try:
            for module, training in modes:
                if training and module in merging:
                    module.train()
        finally:
            state.restore()
            for module, training in modes:
                module.training = training

    try:
        model.eval()
        yield state
    finally:
        try:
            restore()
        except KeyboardInterrupt:
            # a second one within is not to leave the model half restored
            restore()
            raise


def _does_more_in_train(module: nn.Module) -> bool:
    """Tell whether a module does more in ``train`` than to set a flag: some merge weights for evaluation."""
    return getattr(module.train, "__func__", None) is not nn.Module.train


def products_at_full_width() -> contextlib.AbstractContextManager[None]:
    """Multiply at the width of the numbers: no TF32 on a device, no bfloat16 in a CPU's float32."""
    backends: Any = torch.backends
    host = [(getattr(backends.mkldnn, part, None), "fp32_precision", "ieee") for part in ("matmul", "conv", "rnn")]
    older = (backends.cuda.matmul, backends.cudnn)
    newer = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    return _switched([*host, *_device_switches(older, newer, tf32=False)])


def products_in_tf32() -> contextlib.AbstractContextManager[None]:
    """Let a CUDA device round the inputs of float32 products to TF32, for the time inside; no convolutions."""
    backends: Any = torch.backends
    return _switched(_device_switches((backends.cuda.matmul,), (backends.cuda.matmul,), tf32=True))


_Switch = tuple[Any, str, Any]
"""Object, attribute and value of a switch that decides the precision of products."""


def _device_switches(older: Sequence[Any], newer: Sequence[Any], *, tf32: bool) -> list[_Switch]:
    """List a device's switches, by the interface that the caller's own settings leave readable."""
    try:
        readable = [(place, place.allow_tf32) for place in older]
    except RuntimeError:
        # a caller has used the newer switches, and then torch refuses to read the older ones
        return [(place, "fp32_precision", "tf32" if tf32 else "ieee") for place in newer]
    return [(place, "allow_tf32", tf32) for place, _ in readable]


@contextlib.contextmanager
def _switched(switches: Sequence[_Switch]) -> Iterator[None]:
    """Set the switches that this version of torch has, and put them back afterwards."""
    present = [switch for switch in switches if hasattr(switch[0], switch[1])]
    before = [getattr(place, name) for place, name, _ in present]
    try:
        for place, name, value in present:
            setattr(place, name, value)
        yield
    finally:
        for (place, name, _), value in zip(present, before, strict=True):
            setattr(place, name, value)


@contextlib.contextmanager
def order_gradients(model: nn.Module) -> Iterator[None]:
    """Hand every batch norm its gradient in the memory order of its output.

    torch 2.13 misreads it on a CPU where dimensions of size one (a batch of one, a map one wide)
    leave that order open: the gradient of the input is then another one, without a word.

    Args:
        model: The model; its batch norms have a hook inside.

    Returns:
        A context manager; graphs made inside keep that order.
    """

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401 - torch's hook signature
        del module, args
        if isinstance(output, Tensor) and output.requires_grad:
            shape, strides = output.shape, output.stride()

            def arrived(gradient: Tensor) -> Tensor | None:
                if gradient.stride() == strides:
                    return None
                return torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)

            hook_gradient(output, arrived)

    normalising = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001 - the common ancestor has no other name
    handles = [module.register_forward_hook(after) for module in normalising]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _step_by_step(model: nn.Module) -> Iterator[None]:
    """Compute recurrent layers without cuDNN, which has no backward pass in evaluation mode, and no second derivative.

    Only while such a layer runs: convolutions keep cuDNN.
    """
    cudnn: Any = torch.backends.cudnn
    enabled = cudnn.enabled

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        del module, args
        cudnn.enabled = False

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401 - torch's hook signature
        del module, args, output
        cudnn.enabled = enabled

    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)] if enabled else []
    handles = [
        handle
        for module in recurrent
        for handle in (
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after, always_call=True),
        )
    ]
    try:
        yield
    finally:
        cudnn.enabled = enabled
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _plain(model: nn.Module) -> Iterator[None]:
    """Let attention and experts compute operation by operation: a fused kernel shows nothing of its inside."""
    configurations = {
        id(config): config
        for config in (getattr(module, "config", None) for module in model.modules())
        if isinstance(getattr(config, _EXPERTS, None), str)
    }
    experts = [(config, getattr(config, _EXPERTS)) for config in configurations.values()]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(value=False)
        for config, _ in experts:
            setattr(config, _EXPERTS, "eager")
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for config, implementation in experts:
            setattr(config, _EXPERTS, implementation)


_EXPERTS = "_experts_implementation"
"""The entry of Hugging Face's configurations that decides how a mixture of experts is computed."""


def _eager() -> contextlib.AbstractContextManager[object]:
    """Run what the caller compiled as plain Python: code traced without our hooks would pass them by."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
