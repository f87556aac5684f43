"""Stroke images: the splits of the stroke alphabet, drawn when an episode asks for them."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from catalog.record import canonical_json
from catalog.requests.data_sources import StrokesData
from engine.fewshot.strokes import Split, draw
from engine.image_data import SPLITS, ImageData
from worker.execution.loader_context import LoaderContext

HELD_BYTES = 32 * 2**20
"""Most bytes of drawn images that a split holds."""


class StrokeClasses:
    """One split; what was drawn is held as far as ``HELD_BYTES`` goes, since to draw takes longer than to train."""

    def __init__(self, source: StrokesData, split: Split) -> None:
        self.source = source
        self.split: Split = split
        self.shape = source.channels, source.image_size, source.image_size
        count = int(getattr(source, f"{split}_classes"))
        self.names: Sequence[str] = [f"{split} {place}" for place in range(count)]
        self.sizes: Sequence[int] = [source.per_class] * count
        self._held: dict[tuple[int, int], Tensor] = {}

    @property
    def held_bytes(self) -> int:
        """The most bytes that are held of what was drawn."""
        return min(HELD_BYTES, sum(self.sizes) * math.prod(self.shape))

    def read(self, place: int, images: Sequence[int]) -> Tensor:
        """Draw images of one class, uint8 (n, C, H, W)."""
        source = self.source
        absent = [index for index in images if (place, index) not in self._held]
        drawn = dict(
            zip(
                absent,
                draw(self.split, place, absent, source.seed, image_size=source.image_size, channels=source.channels),
                strict=True,
            )
        )
        for index, image in drawn.items():
            if (len(self._held) + 1) * image.numel() <= HELD_BYTES:
                self._held[place, index] = image.clone()
        return torch.stack([drawn[index] if index in drawn else self._held[place, index] for index in images])


def load(source: StrokesData, context: LoaderContext) -> ImageData:
    """Return the splits; their digest is that of the options and of one image of each class."""
    splits: dict[str, StrokeClasses] = {split: StrokeClasses(source, split) for split in SPLITS}
    digest = hashlib.sha256(canonical_json(asdict(source)).encode())
    total = sum(len(split.sizes) for split in splits.values())
    done = 0
    for split in () if context.shapes_only else splits.values():
        for place in range(len(split.sizes)):
            digest.update(split.read(place, [0]).numpy().tobytes())
            context.checkpoint()
            done += 1
            context.report("data", done, total, "classes")
    return ImageData(splits=splits, sha256="" if context.shapes_only else digest.hexdigest())
