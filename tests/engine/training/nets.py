"""Small nets with what a split has to get right: BatchNorm, dropout, skips; and losses that couple all inputs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LABELS = torch.arange(15) % 3
CENTRES = torch.randn(3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a skip."""

    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(entering, leaving, 3, padding=1, bias=False), nn.BatchNorm2d(leaving)
        self.second, self.norm2 = nn.Conv2d(leaving, leaving, 3, padding=1, bias=False), nn.BatchNorm2d(leaving)
        self.skip = nn.Conv2d(entering, leaving, 1, bias=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.relu(self.norm(self.first(x)))
        return torch.relu(self.norm2(self.second(self.drop(inside))) + self.skip(x))


class ResidualNet(nn.Module):
    """A chain of blocks by its method, whose forward is written apart."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(2, 6, 3, padding=1), Residual(6, 6), Residual(6, 8)
        self.end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    def chain(self) -> tuple[nn.Module, ...]:
        return self.stem, self.one, self.two, self.end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.two(self.one(self.stem(x))))


def conv_block(entering: int, leaving: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    parts = nn.Conv2d(entering, leaving, 3, padding=1), norm(leaving), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(2)
    return nn.Sequential(*parts)


def conv_net(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    return nn.Sequential(conv_block(2, 6, norm), conv_block(6, 8, norm), nn.Flatten(), nn.Linear(8 * 4, 10))


def instance_net() -> nn.Sequential:
    return conv_net(nn.InstanceNorm2d)


NETS: dict[str, Callable[[], nn.Module]] = {
    "conv": conv_net,
    "residual": ResidualNet,
    "instance": instance_net,
}


def images(count: int = 15) -> Tensor:
    return torch.randn(count, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def make(net: str) -> nn.Module:
    torch.manual_seed(0)
    made = NETS[net]().double().train()
    with torch.no_grad():
        made(images(40) * 2 + 1)  # running statistics other than zero and one
    return made


class Head(nn.Module):
    """A loss with parameters and dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.classify, self.drop = nn.Linear(10, 3, dtype=torch.float64), nn.Dropout(0.4)

    def mean_cross_entropy(self, features: Tensor) -> Tensor:
        return functional.cross_entropy(self.classify(self.drop(features)), LABELS[: len(features)])

    def contrastive(self, features: Tensor) -> Tensor:
        """Every pair of features, as InfoNCE has them."""
        unit = functional.normalize(features * self.classify.weight.sum(0))
        scores = (unit @ unit.T / 0.3).fill_diagonal_(-1e9)
        same = (LABELS[:, None] == LABELS[None]).double().fill_diagonal_(0)
        return -(scores.log_softmax(1) * same).sum() / same.sum()

    def covariance(self, features: Tensor) -> Tensor:
        """Squares of what lies off the diagonal of the features' covariance."""
        centred = self.classify(features) - self.classify(features).mean(0)
        both = torch.cat((centred, 10 * (features - features.mean(0))), 1)
        covariance = both.T @ both / (len(features) - 1)
        return covariance.square().sum() - covariance.diagonal().square().sum()

    def terms(self, features: Tensor) -> Iterator[Tensor]:
        """Cross-entropy by slices of queries against means of the support, then a term of the support alone."""
        support, queries, labels = features[:6], features[6:], LABELS[6:]
        for piece in (slice(0, 4), slice(4, 8), slice(8, 9)):
            means = torch.stack([support[LABELS[:6] == each].mean(0) for each in range(3)])
            scores = -torch.cdist(self.drop(queries[piece]), means).square()
            yield functional.cross_entropy(scores, labels[piece], reduction="sum") / len(queries)
        yield 0.1 * self.classify(support).square().sum()


LOSSES = ("mean_cross_entropy", "contrastive", "covariance", "terms")


class Written(nn.Module):
    """A net of two linear maps, whose forward pass is a function of it and the inputs."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], drop: float = 0.0) -> None:
        super().__init__()
        self.a, self.h, self.written, self.drop = nn.Linear(6, 8), nn.Linear(8, 4), forward, nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.drop(self.written(self, x).tanh()))


class TimeMajor(nn.Module):
    """An LSTM without ``batch_first``, which runs over the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x.unflatten(0, (-1, 1)) if x.dim() == 2 else x)[0][:, -1]
