"""Episode tests: accuracy on episodes of a split, without a graph, beside two baselines on the same episodes.

An untrained network with nearest means is far above chance, and so are the pixels themselves: a training is worth what
it adds to these.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from catalog.analyses.fewshot_training import EpisodeAccuracy
from engine.analyses.fewshot.fewshot_model import Episodes, FewshotModel, baseline_slices, evaluated
from engine.fewshot.episode_loss import EpisodeLoss
from engine.fewshot.head import Head
from engine.fewshot.heads import ProtoNet
from engine.training.mixed_precision import TrainingPrecision


@dataclass(frozen=True, kw_only=True)
class EpisodeTest:
    """A test of models on the same episodes of one split."""

    episodes: Episodes
    chunk: int
    """Images that pass through a backbone at once; they do not see each other in evaluation mode."""
    head_slices: int
    """Slices that the queries pass through the model's own head in."""
    precision: TrainingPrecision
    step: Callable[[], None]
    """Called after each episode."""

    def accuracies(self, model: FewshotModel) -> list[float]:
        """Return the accuracy of a model on each episode."""
        return self._run(model, model.backbone, model.head, self.head_slices)

    def untrained(self, model: FewshotModel) -> list[float]:
        """Return the accuracy of the nearest mean of a model's features on each episode."""
        return self._run(model, model.backbone, ProtoNet(), baseline_slices(self.episodes.params))

    def pixels(self) -> list[float]:
        """Return the accuracy of the nearest mean of the images' own numbers on each episode."""
        flat = nn.Flatten()
        return self._run(flat, flat, ProtoNet(), baseline_slices(self.episodes.params))

    def _run(self, model: nn.Module, features: nn.Module, head: Head, slices: int) -> list[float]:
        params = self.episodes.params
        loss = EpisodeLoss(head=head, n_way=params.n_way, k_shot=params.k_shot, n_query=params.n_query, slices=slices)
        found = []
        with evaluated(model), torch.no_grad():
            for place in range(params.test_iter):
                images = self.episodes.read(place)
                found.append(loss.accuracy(self._features(features, images).to(images.dtype)))
                self.step()
        return found

    def _features(self, backbone: nn.Module, images: Tensor) -> Tensor:
        with self.precision.autocast(images.device):
            return torch.cat([backbone(piece) for piece in torch.split(images, self.chunk)])


def mean_and_half_width(accuracies: Sequence[float]) -> tuple[float, float]:
    """Return the mean over episodes, and 1.96 s/√episodes."""
    count = len(accuracies)
    mean = sum(accuracies) / count
    deviation = math.sqrt(sum((each - mean) ** 2 for each in accuracies) / max(count - 1, 1))
    return mean, 1.96 * deviation / math.sqrt(count)


def compared(
    split: str, trained: Sequence[float], pixels: Sequence[float], untrained: Sequence[float]
) -> EpisodeAccuracy:
    """Return the accuracies on one split's episodes side by side."""
    figures = [figure for each in (trained, pixels, untrained) for figure in mean_and_half_width(each)]
    names = ("accuracy", "half_width", "pixels", "pixels_half_width", "untrained", "untrained_half_width")
    return EpisodeAccuracy(split=split, episodes=len(trained), **dict(zip(names, figures, strict=True)))
