"""Strokes: an alphabet of drawn characters, for few-shot learning without a download.

    class       2 to 4 quadratic Bézier curves in the unit square, their ends at least 0.25 apart; 60 % of the curves
                after the first begin where the last one ended
    image       control points jittered by N(0, 0.03²), rotated by N(0, 0.25²) rad, scaled and sheared by up to 0.15,
                shifted by up to 0.06; a pen 0.7 to 1.3 times as wide; noise of 0.1 on each pixel

Splits are disjoint ranges of class seeds. An image follows from seed, split, class and its number alone, whatever else
is drawn. Numbers are drawn as uniform ones, normal ones are sums of those, and a drawing takes products, sums and
square roots, one operation at a time, so that machines agree on every pixel but for the cosine of an angle in float64.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from engine.errors import FewShotRefused
from engine.model.counter_rng import keyed_generator

Split = Literal["train", "validation", "test"]
_FIRST_CLASS = {"train": 0, "validation": 2**30, "test": 2**31}
_RANGE = 2**30
_MARGIN = 0.15
_APART = 0.25
_JOINED = 0.6
_POINTS = 28
"""Points of a curve that a distance is measured to."""
_PEN = 0.033
_EDGE = 0.03
"""Width of the pen's soft edge."""
_JITTER, _ROTATION, _SCALING, _SHIFT, _NOISE = 0.03, 0.25, 0.15, 0.06, 0.1
_SUMMED = 12
_PIXELS_AT_ONCE = 2**17


def alphabet(
    split: Split, classes: int, per_class: int, seed: int, *, image_size: int = 28, channels: int = 1
) -> Tensor:
    """Draw the first images of a split's first classes; the three splits have no class in common.

    ``image_size`` is height and width in pixels; ``channels`` are copies of the drawing, each with noise of its own.
    The images are (classes, per_class, channels, image_size, image_size), uint8, on the host. ``FewShotRefused`` if the
    split is unknown or a number below 1.
    """
    if min(classes, per_class) < 1:
        raise FewShotRefused(f"`classes` and `per_class` must be at least 1 (got {classes} and {per_class})")
    _require_size(image_size, channels)
    images = torch.empty(classes, per_class, channels, image_size, image_size, dtype=torch.uint8)
    for class_index in range(classes):
        images[class_index] = draw(split, class_index, range(per_class), seed, image_size=image_size, channels=channels)
    return images


def draw(
    split: Split,
    class_index: int,
    indices: Sequence[int],
    seed: int,
    *,
    image_size: int = 28,
    channels: int = 1,
) -> Tensor:
    """Draw some images of a class, by their numbers in it and the class's number in its split.

    ``image_size`` is height and width in pixels; ``channels`` are copies of the drawing, each with noise of its own.
    The images are (len(indices), channels, image_size, image_size), uint8, on the host. ``FewShotRefused`` if the split
    is unknown or a number out of range.
    """
    if split not in _FIRST_CLASS:
        raise FewShotRefused(f"`split` must be one of train, validation, test (got {split!r})")
    if not 0 <= class_index < _RANGE:
        raise FewShotRefused(f"`class_index` must be from 0 to {_RANGE - 1} (got {class_index})")
    _require_size(image_size, channels)
    strokes = _class_strokes(seed, _FIRST_CLASS[split] + class_index)
    at_once = max(1, _PIXELS_AT_ONCE // (image_size * image_size))
    key = f"{seed}/image/{split}/{class_index}"
    pieces = [
        _images(strokes, key, list(indices[start : start + at_once]), image_size, channels)
        for start in range(0, len(indices), at_once)
    ]
    return torch.cat(pieces) if pieces else torch.empty(0, channels, image_size, image_size, dtype=torch.uint8)


def _require_size(image_size: int, channels: int) -> None:
    if min(image_size, channels) < 1:
        raise FewShotRefused(f"`image_size` and `channels` must be at least 1 (got {image_size} and {channels})")


def _class_strokes(seed: int, number: int) -> Tensor:
    """Control points of a class, shape (strokes, 3, 2), float32: begin, middle, end."""
    generator = keyed_generator(f"{seed}/class", number)

    def point() -> Tensor:
        return _MARGIN + _uniform(2, generator) * (1 - 2 * _MARGIN)

    def uniform() -> float:
        return float(_uniform(1, generator))

    strokes: list[Tensor] = []
    for _ in range(2 + int(3 * uniform())):
        begin = strokes[-1][2] if strokes and uniform() < _JOINED else point()
        end = point()
        while float((end - begin).square().sum()) < _APART**2:
            end = point()
        strokes.append(torch.stack([begin, point(), end]))
    return torch.stack(strokes)


def _images(strokes: Tensor, key: str, indices: list[int], side: int, channels: int) -> Tensor:
    points = strokes.shape[0] * 3 * 2
    counts = [6, _SUMMED * (points + 1)]
    generators = [keyed_generator(key, index) for index in indices]
    drawn = torch.stack([_uniform(sum(counts), generator) for generator in generators])
    shape, normal = torch.split(drawn, counts, dim=1)
    normals = _sum(normal.reshape(len(indices), points + 1, _SUMMED)) - _SUMMED / 2
    jittered = strokes + _JITTER * normals[:, 1:].reshape(-1, *strokes.shape)
    moved = _moved(jittered - 0.5, normals[:, 0] * _ROTATION, 2 * shape - 1)
    radius = _PEN * (0.7 + 0.6 * shape[:, 5])
    ink = ((radius[:, None, None] - _distances(moved, side)) / _EDGE + 0.5).clamp(0, 1)
    images = torch.empty(len(indices), channels, side, side, dtype=torch.uint8)
    # one after the other: the noise of 16 channels of 512×512 takes 64 MiB
    for channel in range(channels):
        noise = torch.stack([_uniform(4 * side * side, generator) for generator in generators])
        # a sum of four uniform numbers has the variance 1/3
        grain = (_sum(noise.reshape(len(indices), side, side, 4)) - 2) * (_NOISE * math.sqrt(3))
        images[:, channel] = ((ink + grain).clamp(0, 1) * 255).round().to(torch.uint8)
    return images


def _moved(points: Tensor, angles: Tensor, drawn: Tensor) -> Tensor:
    """Points (m, strokes, 3, 2) around 0, scaled, sheared, rotated and shifted into the unit square."""
    scaled_x, scaled_y, shear = (_SCALING * drawn[:, index, None, None] for index in range(3))
    x, y = points[..., 0], points[..., 1]
    x, y = x + scaled_x * x + shear * y, y + scaled_y * y
    turned = [(math.cos(angle), math.sin(angle)) for angle in angles.tolist()]
    cosine, sine = torch.tensor(turned, dtype=torch.float32)[:, :, None, None].unbind(1)
    shift_x, shift_y = (0.5 + _SHIFT * drawn[:, index, None, None] for index in (3, 4))
    return torch.stack([cosine * x - sine * y + shift_x, sine * x + cosine * y + shift_y], dim=-1)


def _distances(strokes: Tensor, side: int) -> Tensor:
    """Distances of pixels to the nearest point of any curve, shape (m, side, side)."""
    t = torch.arange(_POINTS, dtype=torch.float32)[:, None, None, None] / (_POINTS - 1)
    begin, middle, end = strokes.unbind(2)
    curves = (1 - t) * (1 - t) * begin + 2 * t * (1 - t) * middle + t * t * end
    places = curves.transpose(1, 2).flatten(0, 1)
    centres = (torch.arange(side, dtype=torch.float32) + 0.5) / side
    across, down = ((places[..., axis, None] - centres).square() for axis in (0, 1))
    nearest = torch.full((strokes.shape[0], side, side), math.inf, dtype=torch.float32)
    for x, y in zip(across, down, strict=True):
        nearest = torch.minimum(nearest, y[:, :, None] + x[:, None, :])
    return nearest.sqrt()


def _uniform(numbers: int, generator: torch.Generator) -> Tensor:
    """Numbers from 0 to 1, in float32 whatever torch's default is."""
    return torch.rand(numbers, generator=generator, dtype=torch.float32)


def _sum(uniform: Tensor) -> Tensor:
    """Sums over the last dimension in a fixed order, whatever a machine's vectors hold."""
    total = uniform[..., 0]
    for index in range(1, uniform.shape[-1]):
        total = total + uniform[..., index]
    return total
