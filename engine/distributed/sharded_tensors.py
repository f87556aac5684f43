"""Sharded tensors: parameters of which this process holds a part (FSDP2, tensor parallelism)."""

import sys

from torch import Tensor

from engine.errors import ModelRefused


def require_whole(name: str, tensor: Tensor) -> None:
    """Refuse a ``DTensor``, whose numbers stand on several ranks.

    Args:
        name: Its name in the model.
        tensor: A parameter or buffer.

    Raises:
        ModelRefused: If it is one. Where nobody has imported ``torch.distributed.tensor`` there is none, and the import
            takes long.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        raise ModelRefused(
            f"the model's tensor `{name}` is sharded over ranks (DTensor), which is not supported yet; measure the "
            "model before it is sharded, each rank with a whole copy",
            layer=name.rpartition(".")[0],
            pointer="/model",
        )
