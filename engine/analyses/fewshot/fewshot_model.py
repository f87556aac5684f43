"""Few-shot models: a backbone and a head by the options of a job, their weights, and an episode as their input."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from catalog.analyses.fewshot_training import FewshotTrainingParams
from engine.errors import FewShotRefused, TrainingRefused, UsageError
from engine.factors.kronecker_factors import digest
from engine.fewshot.backbones import Backbone, Pool, make_backbone
from engine.fewshot.episode_loss import Episode, EpisodeLoss, episode
from engine.fewshot.heads import make_head
from engine.fewshot.regulariser import VicWeights
from engine.image_data import SPLITS, ImageClasses, Split
from engine.model.state.generators import fold_seed
from engine.training.mixed_precision import TrainingPrecision, choose_precision
from engine.training.optimiser_step import make_optimiser

_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's colours, as checkpoints of the backbones expect them."""

_COUNTS = ".num_batches_tracked"
"""Ending of the names of BatchNorm's counts, which enter no number."""


class WeightsRefused(UsageError):
    """Weights to begin with do not fit the model."""

    code = "wrong_weights"


class FewshotModel(nn.Module):
    """A backbone and a head.

    Args:
        params: Options of the job.
        shape: Channels, rows and columns of an image.

    Raises:
        FewShotRefused: If the backbone's last map is empty for such images.
    """

    def __init__(self, params: FewshotTrainingParams, shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, *sides = shape
        pool: Pool = "map" if params.method.startswith("CTX") else params.pool
        convolutional = params.backbone.startswith("Conv")
        self.backbone: Backbone = make_backbone(
            params.backbone,
            channels=channels,
            pool=pool,
            **({"width": params.width} if convolutional else {"stem": "feti" if params.FETI else "imagenet"}),
        )
        self.feature_shape = self.backbone.feature_shape(*sides)
        self.head = make_head(params.method, k_shot=params.k_shot, feature_shape=self.feature_shape, form=params.ctx)

    @property
    def trained(self) -> list[nn.Parameter]:
        """All parameters, in the order of the optimiser's state."""
        return list(self.parameters())

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take given weights, of backbone and head or of the backbone alone, by the names of either.

        ``WeightsRefused`` if a name is unknown or missing, or a shape is another.
        """
        whole = any(name.startswith(("backbone.", "head.")) for name in weights)
        place: nn.Module = self if whole else self.backbone
        state = {name: own for name, own in place.state_dict().items() if not name.endswith(_COUNTS)}
        given = {name for name in weights if not name.startswith("fc.") and not name.endswith(_COUNTS)}
        strange = sorted(given - state.keys())
        missing = sorted(state.keys() - weights.keys())
        if strange or missing:
            raise _refused(
                f"{len(strange)} tensors belong to no part of it ({', '.join(strange[:3]) or 'none'}) and "
                f"{len(missing)} are missing ({', '.join(missing[:3]) or 'none'})"
            )
        other = next((name for name, own in state.items() if weights[name].shape != own.shape), None)
        if other is not None:
            raise _refused(f"`{other}` is {list(weights[other].shape)}, where it has {list(state[other].shape)}")
        with torch.no_grad():
            for name, own in state.items():
                own.copy_(weights[name])


def _refused(what: str) -> WeightsRefused:
    return WeightsRefused(
        f"are those of another model than `method`, `k_shot`, `backbone`, `width`, `FETI`, `pool` and the images make: "
        f"{what}; "
        "name its own file, or change these options",
        pointer="/fewshot_training/weights",
    )


def make_model(
    params: FewshotTrainingParams, shape: tuple[int, int, int], weights: Mapping[str, Tensor] | None
) -> FewshotModel:
    """Make the model on the host, in training mode and of ``params.dtype``; the same for the same seed.

    ``shape`` is (channels, rows, columns) of an image; without ``weights``, by name, all are drawn.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold_seed(params.seed))
        model = FewshotModel(params, shape).to(torch.float64 if params.dtype == "float64" else torch.float32)
    if weights is not None:
        model.load(weights)
    return model


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors: of a line for each, in the order of the names, with its own digest."""
    lines = "".join(f"{name} {digest(tensor.detach())}\n" for name, tensor in sorted(state.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def draw_episode(place: int, params: FewshotTrainingParams, split: Split, images: ImageClasses) -> Episode:
    """Draw an episode of a split by its number; those of the splits have seeds of their own.

    ``FewShotRefused`` if the split has too few classes, or a class too few images.
    """
    seed = params.seed * len(SPLITS) + SPLITS.index(split)
    try:
        return episode(place, seed, images.sizes, params.n_way, params.k_shot, params.n_query, images.names)
    except FewShotRefused as error:
        raise FewShotRefused(f"{split}: {error}", pointer="/data") from error


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """The episodes of one split of the data, as a model's input."""

    params: FewshotTrainingParams
    split: Split
    images: ImageClasses
    device: torch.device
    dtype: torch.dtype

    def draw(self, place: int) -> Episode:
        """Draw an episode by its number."""
        return draw_episode(place, self.params, self.split, self.images)

    def read(self, place: int) -> Tensor:
        """Return an episode's images, (n_way · (k_shot + n_query), C, H, W), classes one after the other.

        Colours are brought to ImageNet's mean and deviation where there are three channels, and to [0, 1] else.
        """
        drawn = self.draw(place)
        pixels = torch.cat([self.images.read(*each) for each in zip(drawn.classes, drawn.images, strict=True)])
        # in place: images of many channels would otherwise be there three times, beyond the activations of a small net
        numbers = pixels.to(self.device).to(self.dtype).div_(255)
        if numbers.shape[1] != len(_IMAGENET[0]):
            return numbers
        mean, deviation = (
            torch.tensor(each, dtype=self.dtype, device=self.device)[:, None, None] for each in _IMAGENET
        )
        return numbers.sub_(mean).div_(deviation)


def episode_loss(
    params: FewshotTrainingParams,
    model: FewshotModel,
    weights: VicWeights | None,
    slices: int,
    *,
    first: int | None = None,
) -> EpisodeLoss:
    """Return the loss of one episode's features; of ``first`` slices of the queries alone, where bytes are counted."""
    return EpisodeLoss(
        head=model.head,
        n_way=params.n_way,
        k_shot=params.k_shot,
        n_query=params.n_query,
        vic=None if weights is None else (weights, params.vic.threshold),
        on_attention=params.use_vic_on_attention,
        slices=slices,
        first=first,
    )


def terms_of(loss: EpisodeLoss, features: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Return the terms of an episode's loss; head and penalty compute in full width, whatever the backbone does."""
    return loss(features.to(dtype))


def training_precision(params: FewshotTrainingParams, device: torch.device) -> TrainingPrecision:
    """Return what the passes compute in on a device; float64 stays as it is, and says so."""
    if params.use_amp and params.dtype == "float64":
        return TrainingPrecision(reason="`dtype: float64` asks for more than 16 bits")
    try:
        return choose_precision(params.use_amp, device, params.amp_dtype)
    except TrainingRefused as error:
        raise TrainingRefused(str(error), pointer="/fewshot_training/amp_dtype") from error


def optimiser_of(params: FewshotTrainingParams, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimiser of a job's options."""
    return make_optimiser(
        params.optimiser,
        parameters,
        learning_rate=params.learning_rate,
        weight_decay=params.weight_decay,
        momentum=params.momentum,
    )


def first_weights(params: FewshotTrainingParams) -> VicWeights | None:
    """Return the penalty's weights of the first episode; None without a penalty."""
    return VicWeights(params.vic.alpha, params.vic.beta, params.vic.gamma) if params.penalised else None


def head_slices(params: FewshotTrainingParams) -> int:
    """Return the slices of queries that the head takes: one where the penalty is on all of its outputs."""
    queries = params.n_way * params.n_query
    return 1 if params.use_vic_on_attention else min(params.gradient_accumulation_steps, queries)


def baseline_slices(params: FewshotTrainingParams) -> int:
    """Return the slices of queries in the nearest mean: their differences to all classes are then no more than images.

    Pixels are many: 320 queries of 84×84×3 by 20 classes at once would be 1 GiB.
    """
    return params.n_way


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
