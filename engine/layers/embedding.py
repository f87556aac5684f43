"""Embedding: ``a`` is one-hot, so A is diagonal with the relative counts of the ids.

Pooling one-hot vectors first (`reduce`) would make A dense in the vocabulary; an embedding is
therefore always treated position by position, and its record says so.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import override

from engine.layers.layer import Form, TreatedLayer
from engine.layers.scaled_table import scale_of


@dataclass(eq=False)
class EmbeddingLayer(TreatedLayer):
    """``y = c · Wᵀ[id]``; the stored weight (vocabulary, d) is the convention's transpose.

    c is 1 but in subclasses that scale what they look up, where the rows are one-hot and ``c · g``.
    """

    module: nn.Embedding
    form: ClassVar[Form] = "diagonal"
    why: ClassVar[str] = "one-hot inputs make A diagonal: the relative counts of the ids"

    @override
    @property
    def fan_in(self) -> int:
        return self.module.num_embeddings

    @override
    @property
    def fan_out(self) -> int:
        return self.module.embedding_dim

    @property
    def scale(self) -> float:
        """The constant c, in the precision that the weight has now."""
        if type(self.module).forward is nn.Embedding.forward:
            return 1.0
        return scale_of(self.module) or 1.0

    @override
    def activation_rows(self, entered: Tensor) -> Tensor:
        # return the ids of every position, which stand for one-hot rows
        return entered.reshape(-1)

    @override
    def gradient_rows(self, gradient: Tensor) -> Tensor:
        # return the gradient of every position's stored vector
        rows, scale = gradient.reshape(-1, gradient.shape[-1]), self.scale
        return rows if scale == 1.0 else rows * scale

    @override
    def batch_first(self, entered: Tensor, examples: int) -> bool:
        if entered.ndim == 1:
            return entered.shape[0] % examples == 0
        return entered.shape[0] == examples


def treats_embedding(module: nn.Embedding) -> str | None:
    """Tell why an embedding cannot be treated."""
    if module.max_norm is not None or module.scale_grad_by_freq:
        return "embedding_renormalised"
    if type(module).forward is not nn.Embedding.forward and scale_of(module) is None:
        return "overridden_forward"
    return None
