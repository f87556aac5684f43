"""Backbones of few-shot learning: Conv4, Conv6, ResNet18 and ResNet34, each a chain of blocks.

    features(x) = pool(block_k(… block_1(x)))

A block of a Conv net is a 3×3 convolution with padding 1 and a bias, batch normalisation, ReLU, and in the first four
blocks 2×2 max pooling. A block of a ResNet is two 3×3 convolutions without bias, each normalised, beside a shortcut
that is a 1×1 convolution where the shape changes; its stem is a block too. Weights of convolutions begin at
N(0, 2/(k² · channels out)), those of normalisations at 1, and their biases at 0.

::

    stem        first convolution     then                                  map
    imagenet    7×7, stride 2         BN, ReLU, 3×3 max pooling, stride 2   as large as it comes
    feti        5×5, stride 2         BN, ReLU                              averaged to 7×7 after the last block

Names of a ResNet's tensors are those of torchvision's `resnet18` and `resnet34` without `fc`, so that their
checkpoints load.

References:
    Chen et al. (2019), A closer look at few-shot classification
    He et al. (2016), Deep residual learning for image recognition
"""

import math
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from typing_extensions import override

from engine.errors import FewShotRefused

Stem = Literal["imagenet", "feti"]
Pool = Literal["gap", "flatten", "map"]
_CONV_BLOCKS = {"Conv4": 4, "Conv6": 6}
_RESNET_BLOCKS = {"ResNet18": (2, 2, 2, 2), "ResNet34": (3, 4, 6, 3)}
NAMES = (*_CONV_BLOCKS, *_RESNET_BLOCKS)
_POOLED_BLOCKS = 4
_FETI_SIDE = 7
_WIDTHS = (64, 128, 256, 512)


class Backbone(nn.Module, ABC):
    """A feature extractor: images (m, channels, h, w) to features (m, *feature)."""

    name: str
    channels_out: int

    def __init__(self, pool: Pool) -> None:
        """Keep how a map becomes features.

        Args:
            pool: `gap` averages it to (channels,), `flatten` keeps its c·h·w numbers as one vector, `map` keeps
                (c, h, w).

        Raises:
            FewShotRefused: If ``pool`` is none of these.
        """
        super().__init__()
        if pool not in ("gap", "flatten", "map"):
            raise FewShotRefused(f"`pool` must be one of gap, flatten, map (got {pool!r})")
        self.pool: Pool = pool

    @abstractmethod
    def stages(self) -> dict[str, nn.Sequential]:
        """Return the stages by name in their order, the last of them `pool`; composed they are the forward pass."""

    def chain(self) -> tuple[nn.Module, ...]:
        """Return the blocks in their order, the last of them the pooling; composed they are the forward pass.

        Their parameters are the backbone's own, so that a block may be computed, or recomputed, by itself.
        """
        return tuple(block for stage in self.stages().values() for block in stage.children())

    def feature_shape(self, rows: int, columns: int | None = None) -> tuple[int, ...]:
        """Compute the shape of one image's features, without running anything.

        It is (channels,) for `gap`, (c·h·w,) for `flatten`, (c, h, w) for `map`. Without ``columns`` images are square.
        ``FewShotRefused`` if the map would be empty.
        """
        sides = self._map_side(rows), self._map_side(rows if columns is None else columns)
        if min(sides) < 1:
            image_size = min(rows, rows if columns is None else columns)
            smallest = next(size for size in range(image_size + 1, 1025) if self._map_side(size) >= 1)
            raise FewShotRefused(
                f"the map of {self.name} is empty for images of size {image_size}; the smallest size that works is "
                f"{smallest}"
            )
        if self.pool == "gap":
            return (self.channels_out,)
        shape = (self.channels_out, *sides)
        return shape if self.pool == "map" else (math.prod(shape),)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return the features (m, *feature) of images (m, channels, h, w)."""
        self.feature_shape(*images.shape[-2:])
        features = images
        for block in self.chain():
            features = block(features)
        return features

    @abstractmethod
    def _map_side(self, image_size: int) -> int:
        """One side of the last map, from that of the images; below 1 where it is empty."""

    def _pooling(self) -> nn.Module:
        if self.pool == "map":
            return nn.Identity()
        if self.pool == "flatten":
            return nn.Flatten()
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


class ConvBlock(nn.Module):
    """A convolution, batch normalisation, ReLU and, where asked for, 2×2 max pooling."""

    def __init__(self, channels: int, width: int, *, pooled: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2) if pooled else nn.Identity()

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return (m, width, h, w), or half of each side where pooled."""
        pooled: Tensor = self.pool(self.relu(self.bn(self.conv(x))))
        return pooled


class ConvNet(Backbone):
    """A chain of ConvBlocks, of which the first four halve each side."""

    def __init__(self, name: str, *, width: int = 64, pool: Pool = "gap", channels: int = 3) -> None:
        """Draw the weights by torch's own generator, of the four blocks of `Conv4` or the six of `Conv6`.

        ``width`` is the channels of each block. ``FewShotRefused`` if a number is below 1, or ``pool`` is unknown.
        """
        super().__init__(pool)
        if width < 1 or channels < 1:
            raise FewShotRefused(f"`width` and `channels` must be at least 1 (got {width} and {channels})")
        self.name, self.channels_out = name, width
        widths = (channels, *[width] * _CONV_BLOCKS[name])
        self.blocks = nn.ModuleList(
            ConvBlock(before, after, pooled=index < _POOLED_BLOCKS)
            for index, (before, after) in enumerate(pairwise(widths))
        )
        _draw_weights(self)

    @override
    def stages(self) -> dict[str, nn.Sequential]:
        stages = {f"block{index}": nn.Sequential(block) for index, block in enumerate(self.blocks, 1)}
        return {**stages, "pool": nn.Sequential(self._pooling())}

    @override
    def _map_side(self, image_size: int) -> int:
        return image_size >> _POOLED_BLOCKS


class BasicBlock(nn.Module):
    """Two normalised 3×3 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels != width:
            projection = nn.Conv2d(channels, width, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(width))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return (m, width, ⌈h/stride⌉, ⌈w/stride⌉)."""
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        shortcut = x if self.downsample is None else self.downsample(x)
        joined: Tensor = self.relu(inner + shortcut)
        return joined


class ResNet(Backbone):
    """A stem and four layers of BasicBlocks, of 64, 128, 256 and 512 channels."""

    def __init__(
        self,
        name: str,
        *,
        stem: Stem = "imagenet",
        pool: Pool = "gap",
        channels: int = 3,
    ) -> None:
        """Draw the weights by torch's own generator.

        `ResNet18` has (2, 2, 2, 2) blocks, `ResNet34` (3, 4, 6, 3). The module's table has the stems.
        ``FewShotRefused`` if ``channels`` is below 1, or ``stem`` or ``pool`` is unknown.
        """
        super().__init__(pool)
        if stem not in ("imagenet", "feti"):
            raise FewShotRefused(f"`stem` must be one of imagenet, feti (got {stem!r})")
        if channels < 1:
            raise FewShotRefused(f"`channels` must be at least 1 (got {channels})")
        self.name, self.stem, self.channels_out = name, stem, _WIDTHS[-1]
        kernel, padding = (7, 3) if stem == "imagenet" else (5, 1)
        self.conv1 = nn.Conv2d(channels, 64, kernel, stride=2, padding=padding, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stem == "imagenet" else nn.Identity()
        first, second, third, fourth = _RESNET_BLOCKS[name]
        self.layer1 = _layer(64, _WIDTHS[0], first, stride=1)
        self.layer2 = _layer(_WIDTHS[0], _WIDTHS[1], second, stride=2)
        self.layer3 = _layer(_WIDTHS[1], _WIDTHS[2], third, stride=2)
        self.layer4 = _layer(_WIDTHS[2], _WIDTHS[3], fourth, stride=2)
        _draw_weights(self)

    @override
    def stages(self) -> dict[str, nn.Sequential]:
        last = self._pooling()
        if self.stem == "feti":
            last = nn.Sequential(nn.AdaptiveAvgPool2d(_FETI_SIDE), last)
        return {
            "stem": nn.Sequential(nn.Sequential(self.conv1, self.bn1, self.relu, self.maxpool)),
            **{name: getattr(self, name) for name in ("layer1", "layer2", "layer3", "layer4")},
            "pool": nn.Sequential(last),
        }

    @override
    def _map_side(self, image_size: int) -> int:
        if self.stem == "feti":
            # 5×5 with padding 1 leaves nothing of images below 3, and the average makes any map 7×7
            return _FETI_SIDE if image_size >= 3 else 0
        side = image_size
        for _ in range(5):
            side = (side + 1) // 2
        return side


def make_backbone(
    name: str,
    *,
    width: int = 64,
    stem: Stem = "imagenet",
    pool: Pool = "gap",
    channels: int = 3,
) -> Backbone:
    """Make a `Conv4`, `Conv6`, `ResNet18` or `ResNet34` in training mode, with weights drawn by torch's own generator.

    A Conv net has ``width`` channels in its blocks and no stem but `imagenet`; a ResNet has 64 to 512 channels.
    ``FewShotRefused`` if the name is unknown, or an option is not one of that backbone.
    """
    if name in _CONV_BLOCKS:
        if stem != "imagenet":
            raise FewShotRefused(f"`stem` {stem} is one of ResNets, and {name} has none")
        return ConvNet(name, width=width, pool=pool, channels=channels)
    if name in _RESNET_BLOCKS:
        if width != _WIDTHS[0]:
            raise FewShotRefused(f"`width` is one of Conv nets, and {name} begins at {_WIDTHS[0]} (got {width})")
        return ResNet(name, stem=stem, pool=pool, channels=channels)
    raise FewShotRefused(f"`backbone` must be one of {', '.join(NAMES)} (got {name!r})")


def _layer(channels: int, width: int, blocks: int, *, stride: int) -> nn.Sequential:
    first = BasicBlock(channels, width, stride)
    return nn.Sequential(first, *(BasicBlock(width, width, 1) for _ in range(blocks - 1)))


def _draw_weights(backbone: nn.Module) -> None:
    """Draw N(0, 2/(k² · channels out)) for convolutions; torch's own start of a normalisation is 1 and 0 already."""
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, 0.0, math.sqrt(2 / (math.prod(module.kernel_size) * module.out_channels)))
