"""Embedding: ``a`` is one-hot, so A is diagonal with the relative counts of the ids.

Pooling one-hot vectors first (`reduce`) would make A dense in the vocabulary; an embedding is
therefore always treated position by position, and its record says so.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

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

    @property
    def fan_in(self) -> int:
        """Size of the vocabulary."""
        return self.module.num_embeddings

    @property
    def fan_out(self) -> int:
        """Width of a vector."""
        return self.module.embedding_dim

    @property
    def scale(self) -> float:
        """The constant c, in the precision that the weight has now."""
        if type(self.module).forward is nn.Embedding.forward:
            return 1.0
        return scale_of(self.module) or 1.0

    def activation_rows(self, entered: Tensor) -> Tensor:
        """Return the ids of every position, which stand for one-hot rows.

        Args:
            entered: Ids, any shape, int64 or int32.

        Returns:
            Ids, shape (P,).
        """
        return entered.reshape(-1)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Return the gradient of every position's stored vector.

        Args:
            gradient: Gradient of the module's output, shape (…, d).

        Returns:
            One row per position, shape (P, d), multiplied by the scale c.
        """
        rows, scale = gradient.reshape(-1, gradient.shape[-1]), self.scale
        return rows if scale == 1.0 else rows * scale

    def batch_first(self, entered: Tensor, examples: int) -> bool:
        """Tell whether ids can be told apart by example.

        Args:
            entered: Ids, any shape.
            examples: Examples N of the batch.

        Returns:
            True for the shapes (N, …) and (N · l,).
        """
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
