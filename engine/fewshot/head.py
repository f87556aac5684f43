"""The head of a few-shot model: scores of queries from a support.

Full width: tensors in float32 or wider, computed with autocast off.

Sums of squares reach 1.7e7 in a penalty, and the largest number of float16 is 65504; so penalties, cosines, distances
and losses are computed at full width, whatever the model computes in.
"""

import contextlib
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

Attention = Literal["softmax", "cosine"]
EPSILON = 1e-6
"""The least norm that a cosine divides by; a vector below it has the cosine 0 with itself at 0, and not NaN."""


class Head(nn.Module, ABC):
    """Scores of queries for each class; queries do not see each other."""

    @abstractmethod
    @override
    def forward(self, support: Tensor, queries: Tensor) -> Tensor:
        """Return the scores.

        Args:
            support: Features of the support, shape (n_way, k_shot, *feature), any float dtype.
            queries: Features of the queries, shape (m, *feature).

        Returns:
            Logits, shape (m, n_way), in float32 or wider.

        Raises:
            FewShotRefused: If the head cannot take features of this shape, or so many shots.
        """


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor of 16 bits in float32, and any other as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a device computes in the precision of its tensors."""
    if device.type == "meta":
        # torch has no such cast there
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
