"""Image data: images of several splits by class, of which episodes are drawn, and weights to begin with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""Splits of the data, in the order in which a training comes to them."""


class ImageClasses(Protocol):
    """Images of one split by class, of which episodes are drawn."""

    @property
    def names(self) -> Sequence[str]:
        """A name for each class, which no other split has."""

    @property
    def sizes(self) -> Sequence[int]:
        """Images of each class."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of an image."""

    @property
    def held_bytes(self) -> int:
        """The most bytes that are held of images that were read."""

    def read(self, place: int, images: Sequence[int]) -> Tensor:
        """Read images of one class.

        Args:
            place: The class, by its place in ``names``.
            images: Their numbers within the class.

        Returns:
            uint8 (n, C, H, W), on the host.
        """


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """The images of a job."""

    splits: Mapping[str, ImageClasses]
    """By the names of ``SPLITS``; no two share a class, and all images have one shape."""
    sha256: str
    """Digest of the images; empty where a plan is made of shapes alone."""
    weights: Mapping[str, Tensor] | None = None
    """Weights by name, on the host, that a training begins with; None draws them."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of an image."""
        return self.splits["train"].shape
