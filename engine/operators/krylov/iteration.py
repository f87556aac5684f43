"""An iteration whose caller multiplies its vectors by a symmetric matrix F (n, n), and hands in the products."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from engine.errors import NonFiniteFactor, WrongShape


class Iteration(ABC):
    """A method that asks for products until it knows enough.

    ``ValueError`` if there is no row, or the precision of the vectors is neither float32 nor float64.
    """

    named: ClassVar[str]
    """Its name in messages."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        if size < 1:
            raise ValueError(f"the matrix must have at least one row (got {size})")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be float32 or float64 (got {dtype})")
        self.size = size

    @property
    @abstractmethod
    def vectors(self) -> Tensor:
        """Vectors to be multiplied next, shape (n, b); those of an exhausted space are zero."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether nothing more is asked for."""

    @property
    @abstractmethod
    def products(self) -> int:
        """Products handed in so far, one for each vector."""

    def advance(self, products: Tensor) -> None:
        """Take in the products of ``vectors``.

        Args:
            products: ``F vectors``, shape (n, b), any float dtype; left as it is.

        Raises:
            WrongShape: If the shape is not that of ``vectors``.
            NonFiniteFactor: If a number is NaN or infinite.
            ValueError: If nothing is left to be multiplied.
        """
        if self.done:
            raise ValueError(f"the {self.named} is done and takes no products; read `result()`")
        vectors = self.vectors
        if products.shape != vectors.shape:
            raise WrongShape(
                f"products must have the shape of the vectors, {tuple(vectors.shape)} (got {tuple(products.shape)}); "
                "multiply `vectors` of the same object, all its columns"
            )
        block = products.mT.to(vectors.device, torch.float64, copy=True).contiguous()
        if not bool(torch.isfinite(block).all()):
            raise NonFiniteFactor(
                "a product of the curvature with a vector holds NaN or Inf; take `collection.dtype: float64`, or scale "
                "the model's inputs or loss"
            )
        self._advance(block)

    def state(self) -> dict[str, Tensor]:
        """Return all that is needed to go on, as views that the next ``advance`` changes: save them first.

        Returns:
            Used vectors, on their device, and numbers on the host.
        """
        identity, counts = self._numbers
        return {**self._tensors(), "numbers": torch.tensor([*identity, *counts], dtype=torch.int64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state, as if this object had made the products itself.

        Args:
            state: What ``state`` gave, of an iteration of the same kind, size and options.

        Raises:
            ValueError: If the state is another one's.
        """
        numbers, (wanted, _) = state["numbers"].tolist(), self._numbers
        got = numbers[: len(wanted)]
        if got != wanted:
            raise ValueError(
                f"the state must be of this {self.named}, {wanted} (got {got}: size and options); begin anew, or "
                "restore the options that it was saved with"
            )
        self._go_on(state, numbers[len(wanted) :])

    @property
    @abstractmethod
    def _numbers(self) -> tuple[list[int], list[int]]:
        """Size and options as integers, and how far it is."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """All else of the state."""

    @abstractmethod
    def _go_on(self, state: Mapping[str, Tensor], counts: list[int]) -> None:
        """Take over tensors and counts."""

    @abstractmethod
    def _advance(self, block: Tensor) -> None:
        """Take in products as rows (b, n) of its own, float64, contiguous, on the vectors' device."""
