"""Recipes of the scripts that circulate: the loop that accumulates over episodes, and accuracies with and without."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.fewshot_cases.episode_step import (
    EpisodeSize,
    allocated_bytes,
    draw_images,
    parameters_of,
    seconds_of,
    training_step,
)
from engine.fewshot.backbones import make_backbone
from engine.fewshot.episode_loss import EpisodeLoss, episode
from engine.fewshot.heads import make_head
from engine.fewshot.strokes import Split, alphabet
from engine.training.mixed_precision import TrainingPrecision
from engine.training.optimiser_step import OptimiserStep, make_optimiser
from engine.training.split_gradients import split_gradients
from engine.training.training_peak import TrainingStep
from engine.training.ways import Way

_SEED = 4040


def circulating_loop(
    losses: Iterable[Callable[[], Tensor]], optimiser: torch.optim.Optimizer, steps: int, first: Literal[0, 1] = 0
) -> list[int]:
    """Train as the scripts do: an optimiser's step in every iteration whose number is a multiple of ``steps``.

    Args:
        losses: The loss of each episode, computed when called.
        optimiser: The optimiser.
        steps: ``gradient_accumulation_steps``.
        first: The number of the first iteration: 0 for `i % steps`, 1 for `(i + 1) % steps`.

    Returns:
        Episodes whose gradients entered each step. Their sum is less than all where the last gradients are dropped.
    """
    entered, waiting = [], 0
    for number, loss in enumerate(losses, first):
        (loss() / steps).backward()  # type: ignore[no-untyped-call]
        waiting += 1
        if number % steps == 0:
            optimiser.step()
            optimiser.zero_grad()
            entered.append(waiting)
            waiting = 0
    return entered


def entered_episodes(episodes: int, steps: int) -> dict[str, list[int]]:
    """Return how many of so many episodes enter each step, by both forms of the loop."""
    weight = nn.Parameter(torch.ones(1))
    found: dict[str, list[int]] = {}
    firsts: tuple[Literal[0, 1], ...] = (0, 1)
    for form, first in zip(("i % steps", "(i + 1) % steps"), firsts, strict=True):
        optimiser = torch.optim.SGD([weight], lr=0.1)
        found[form] = circulating_loop([lambda: weight.square().sum()] * episodes, optimiser, steps, first)
    return found


def measure_loop(
    backbone: str, size: EpisodeSize, several: Sequence[int], episodes: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Run the circulating loop with each number of steps, once for its bytes and once for its seconds.

    Returns:
        By the number of steps: bytes beyond weights, moments and images at the peak, seconds of an episode, and the
        median seconds of the optimiser's step, which is all that more steps leave out.
    """
    step = training_step(backbone, size, device)
    images, parameters = draw_images(step, device), parameters_of(step)
    optimiser = step.optimiser(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    update = statistics.median(seconds_of(optimiser.step, device) for _ in range(5))
    optimiser.zero_grad()
    losses = [partial(_undivided_loss, step, images)] * episodes
    found: dict[str, dict[str, float]] = {str(steps): {"optimiser_seconds": update} for steps in several}
    for steps in several:
        # gradients stand from the third episode on
        found[str(steps)]["bytes"] = allocated_bytes(partial(circulating_loop, losses[:3], optimiser, steps), device)
        optimiser.zero_grad()
    for steps in several:
        loop = partial(circulating_loop, losses, optimiser, steps)
        found[str(steps)]["seconds_an_episode"] = seconds_of(loop, device) / episodes
        optimiser.zero_grad()
    return found


def _undivided_loss(step: TrainingStep, images: Tensor) -> Tensor:
    return torch.stack(list(step.loss(step.model(images)))).sum()


@dataclass(frozen=True, kw_only=True)
class Strokes:
    """Sizes of the trainings on strokes."""

    size: EpisodeSize = field(default_factory=lambda: EpisodeSize(image_size=28))
    width: int = 16
    classes: tuple[int, int] = (64, 20)
    """Classes to train and to test on."""
    per_class: int = 24
    episodes: int = 100
    tests: int = 100
    learning_rate: float = 2e-3

    def images_of(self, split: Split) -> Tensor:
        """Draw the images of a split's classes, (classes, per_class, 1, side, side), uint8."""
        classes = self.classes[split == "test"]
        return alphabet(split, classes, self.per_class, _SEED, image_size=self.size.image_size)

    def draw(self, images: Tensor, number: int, seed: int) -> Tensor:
        """Return the images of an episode, in [0, 1]."""
        size = self.size
        drawn = episode(number, seed, [self.per_class] * len(images), size.n_way, size.k_shot, size.n_query)
        pixels = [images[label, list(which)] for label, which in zip(drawn.classes, drawn.images, strict=True)]
        return torch.cat(pixels).float() / 255


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to train."""

    name: str
    way: Way = field(default_factory=Way)
    steps: int = 1
    """Episodes of an optimiser's step, by the circulating loop."""
    dtype: torch.dtype = torch.float32
    beside: str
    """The training that it is compared with."""


def recipes_of(sliced: Way, slices: int, narrow: torch.dtype | None) -> tuple[Recipe, ...]:
    """Return the trainings: in float64, where slices change nothing, and in float32, where rounding is chance."""
    exact, wide = "undivided, float64", "undivided, float32"
    trainings = [
        Recipe(name=exact, dtype=torch.float64, beside=exact),
        Recipe(name=f"{slices} slices, float64", way=sliced, dtype=torch.float64, beside=exact),
        Recipe(name=wide, beside=exact),
        Recipe(name=f"the circulating loop, {slices} steps", steps=slices, beside=wide),
    ]
    if narrow is not None:
        trainings += [
            Recipe(name="AMP", way=Way(compute_dtype=narrow), beside=wide),
            Recipe(name=f"AMP, {slices} slices", way=Way(chunk=sliced.chunk, compute_dtype=narrow), beside=wide),
        ]
    return tuple(trainings)


def train(recipe: Recipe, strokes: Strokes, images: Tensor, device: torch.device) -> tuple[nn.Module, EpisodeLoss]:
    """Train a Conv4 with FSCT_cosine and frozen statistics from the same weights on the same episodes."""
    size, way = strokes.size, recipe.way
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = make_backbone("Conv4", width=strokes.width, channels=1, pool="flatten")
        head = make_head("FSCT_cosine", k_shot=size.k_shot, feature_shape=model.feature_shape(size.image_size))
    model, head = model.to(device, recipe.dtype), head.to(device, recipe.dtype)
    loss = EpisodeLoss(head=head, n_way=size.n_way, k_shot=size.k_shot, n_query=size.n_query)
    parameters = [*model.parameters(), *head.parameters()]
    optimiser = make_optimiser("AdamW", parameters, learning_rate=strokes.learning_rate, weight_decay=1e-5)
    step = OptimiserStep(optimiser)
    for number in range(strokes.episodes):
        value = split_gradients(
            model,
            lambda features: loss(features.to(recipe.dtype)),
            strokes.draw(images, number, _SEED).to(device, recipe.dtype),
            chunk=way.chunk,
            batch_norm="frozen",
            precision=TrainingPrecision(compute_dtype=way.compute_dtype),
        )
        if number % recipe.steps == 0:
            step.take(value)
    return model.eval(), loss


def compare_accuracies(
    strokes: Strokes, slices: int, narrow: torch.dtype | None, device: torch.device
) -> dict[str, Any]:
    """Return accuracies of recipes on the same test episodes, in percent, each beside another training.

    Returns:
        By the name of the recipe: accuracy, and how far it is beyond the other, each with half of its 95 % interval
        over test episodes; the largest difference of two weights, relative to the largest weight.
    """
    learned, unknown = strokes.images_of("train"), strokes.images_of("test")
    tests = [strokes.draw(unknown, number, _SEED + 1).to(device) for number in range(strokes.tests)]
    found: dict[str, Any] = {}
    trained: dict[str, tuple[Tensor, list[float]]] = {}
    for recipe in recipes_of(strokes.size.slices_of(slices), slices, narrow):
        model, loss = train(recipe, strokes, learned, device)
        autocast = TrainingPrecision(compute_dtype=recipe.way.compute_dtype).autocast(device)
        accuracies = []
        for images in tests:
            with torch.no_grad(), autocast:
                features = model(images.to(recipe.dtype))
            accuracies.append(100 * loss.accuracy(features.to(recipe.dtype)))
        weights = torch.cat([each.detach().double().flatten() for each in model.parameters()])
        trained[recipe.name] = weights, accuracies
        other, others = trained[recipe.beside]
        found[recipe.name] = {
            "accuracy": _interval(accuracies),
            "beside": recipe.beside,
            "beyond": _interval([one - two for one, two in zip(accuracies, others, strict=True)]),
            "weights_apart": float((weights - other).abs().max() / other.abs().max()),
        }
    return found


def _interval(values: Sequence[float]) -> dict[str, float]:
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return {"mean": mean, "half_width": 1.96 * math.sqrt(spread / len(values))}
