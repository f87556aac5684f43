"""The head of a few-shot model: scores of queries from a support."""

from abc import ABC, abstractmethod
from typing import Literal

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
