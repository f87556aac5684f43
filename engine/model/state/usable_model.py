"""Usable models: what is refused before anything is done with a model, because autograd or hooks cannot deal with it.

Torch says of each of these, somewhere in the middle of a job, what it could not do; here it is said first, with the
tensor or module that is meant and with what to do::

    a program of TorchScript or torch.export     its layers are no modules, or its mode is fixed
    a tensor without shape                       a lazy module that has seen no batch
    a tensor without numbers                     on the meta device, or with a storage that was freed
    a tensor made for inference alone            autograd keeps no versions of it
"""

import torch
from torch import Tensor, nn

from catalog.responses.layer_record import WHOLE_MODEL
from engine.distributed.sharded_tensors import is_sharded
from engine.errors import ModelRefused
from engine.model.sharding.gathered_parameters import GatheredParameter


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
