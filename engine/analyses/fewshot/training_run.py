"""A training run: one step for each episode, a test on validation classes after each epoch, and the best weights kept.

Episode i draws its classes, images and masks from the seed and i alone. So a run that was killed continues from its
checkpoint (weights, moments, scale, episode) with the bits of one that was not.

Episode tests: accuracy on episodes of a split, without a graph, beside two baselines on the same episodes.

An untrained network with nearest means is far above chance, and so are the pixels themselves: a training is worth what
it adds to these.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from catalog.analyses.fewshot_training import EpisodeAccuracy, FewshotTrainingParams
from engine.analyses.costs.fewshot_training import TrainingWay
from engine.analyses.fewshot.fewshot_model import (
    Episodes,
    FewshotModel,
    baseline_slices,
    episode_loss,
    evaluated,
    first_weights,
    optimiser_of,
    terms_of,
)
from engine.analyses.spectra.search_checkpoints import SavedSearch, SearchCheckpoints
from engine.fewshot.episode_loss import EpisodeLoss, LossValues
from engine.fewshot.head import Head
from engine.fewshot.heads import ProtoNet
from engine.fewshot.regulariser import VicWeights
from engine.memory.out_of_memory import first_line, free_memory, ran_out_of_memory
from engine.model.state.generators import fold_seed, set_generators
from engine.training.mixed_precision import TrainingPrecision
from engine.training.optimiser_step import OptimiserStep
from engine.training.split_gradients import split_gradients


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


_WORK = "training"
_EPISODE_SEEDS = 2**32


@dataclass
class Clock:
    """Seconds of the parts of the steps of one attempt."""

    head: float = 0.0
    regulariser: float = 0.0
    optimiser: float = 0.0
    whole: float = 0.0

    @property
    def backbone(self) -> float:
        """Seconds that the other parts leave."""
        return max(0.0, self.whole - self.head - self.regulariser - self.optimiser)


@dataclass(kw_only=True)
class TrainingState:
    """The figures of a run so far; with the tensors all that a later attempt needs."""

    episodes: int = 0
    """Episodes that are done."""
    losses: list[float] = field(default_factory=list)
    """Mean loss of each epoch that is done."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """Loss, its parts and accuracy of each episode."""
    validation: list[dict[str, float]] = field(default_factory=list)
    """Accuracy and half of its interval on validation classes after each epoch."""
    best_epoch: int | None = None
    vic: VicWeights | None = None
    skipped: int = 0


@dataclass(kw_only=True)
class TrainingRun:
    """The training of one model by one way.

    Memory:
        As the plan of the way counts it; the kept weights are on the host.
    """

    params: FewshotTrainingParams
    model: FewshotModel
    way: TrainingWay
    precision: TrainingPrecision
    episodes: Episodes
    validation: Episodes
    checkpoints: SearchCheckpoints
    report: Callable[[int, int], None]
    """Receives the episodes that are trained or validated, and their number in all."""
    raise_if_cancelled: Callable[[], None]
    lower: Callable[[TrainingWay, str], TrainingWay]
    """Returns the way to try after one has run out of memory, with the allocator's message; raises where none is."""
    state: TrainingState = field(default_factory=TrainingState)
    clock: Clock = field(default_factory=Clock)
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Weights after the best epoch, on the host."""
    _step: OptimiserStep = field(init=False)
    _validated: int = 0
    """Validation episodes of the epoch that is being tested."""

    def __post_init__(self) -> None:
        """Begin with the penalty's first weights."""
        self.state.vic = first_weights(self.params)
        self._step = OptimiserStep(optimiser_of(self.params, self.model.trained), self.precision)

    @property
    def _total(self) -> int:
        """Training episodes of all epochs."""
        return self.params.num_epoch * self.params.n_episode

    def run(self) -> None:
        """Train from the beginning, or from the checkpoint of an earlier attempt; ``kept`` is the best model."""
        self._restore()
        self.model.train()
        while self.state.episodes < self._total:
            self.raise_if_cancelled()
            self._train(self.state.episodes)
            self.state.episodes += 1
            if self.state.episodes % self.params.n_episode == 0:
                self._end_epoch()
            self._report()
            if self.checkpoints.due():
                self.checkpoints.save(*self._saved())
        if not self.kept:
            self._keep()

    def optimiser_tensors(self) -> dict[str, Tensor]:
        """Return the optimiser's moments by place and name."""
        state = self._step.optimiser.state_dict()["state"]
        return {
            f"{place}.{name}": value
            for place, own in state.items()
            for name, value in own.items()
            if isinstance(value, Tensor)
        }

    def forget_moments(self) -> None:
        """Let go of moments and gradients, which nothing needs after the last step."""
        self._step.optimiser.state.clear()
        self._step.optimiser.zero_grad(set_to_none=True)

    def _now(self) -> float:
        """Return the seconds of a clock, once the device has done what it was given."""
        if self.episodes.device.type == "cuda":
            torch.cuda.synchronize(self.episodes.device)
        return time.perf_counter()

    def _train(self, place: int) -> None:
        begun = self._now()
        value, values = self._gradients(place)
        stepped = self._now()
        self._step.take(value, _named(place, values))
        self.clock.optimiser += self._now() - stepped
        self.state.skipped = self._step.skipped
        self.state.curve.append({"loss": float(value), **asdict(values)})
        if self.state.vic is not None and self.params.vic.dynamic:
            self.state.vic = self.state.vic.after(values.variance, values.covariance, values.cross_entropy)
        self.clock.whole += self._now() - begun

    def _gradients(self, place: int) -> tuple[Tensor, LossValues]:
        """Leave an episode's gradient in ``.grad``, by the way of the run or, where memory runs out, by a lower one."""
        buffers = [(each, each.detach().clone()) for each in self.model.buffers()]
        while True:
            try:
                return self._attempt(place)
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                said = first_line(error)
            # what the attempt held is unreachable only now, outside of its except block
            self._step.optimiser.zero_grad(set_to_none=True)
            free_memory(self.episodes.device)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            self.way = self.lower(self.way, said)

    def _attempt(self, place: int) -> tuple[Tensor, LossValues]:
        params = self.params
        set_generators((fold_seed(params.seed) * _EPISODE_SEEDS + place) % 2**64, self.episodes.device)
        loss = episode_loss(params, self.model, self.state.vic, self.way.head_slices)
        value = split_gradients(
            self.model.backbone,
            lambda features: self._timed(loss, features),
            self.episodes.read(place),
            chunk=self.way.way.chunk,
            batch_norm=params.batch_norm,
            checkpointing=self.way.way.checkpointing,
            precision=self.precision,
        )
        if loss.values is None:
            raise ValueError("the loss has terms left")
        return value, loss.values

    def _timed(self, loss: EpisodeLoss, features: Tensor) -> Iterator[Tensor]:
        """Yield the loss's terms; the time until the next one is asked for, its backward pass included, is its own."""
        slices = min(loss.slices, loss.n_way * loss.n_query)
        begun = self._now()
        for place, term in enumerate(terms_of(loss, features, self.episodes.dtype)):
            yield term
            taken = self._now() - begun
            begun += taken
            if place < slices:
                self.clock.head += taken
            else:
                self.clock.regulariser += taken

    def _end_epoch(self) -> None:
        count = self.params.n_episode
        self.state.losses.append(math.fsum(each["loss"] for each in self.state.curve[-count:]) / count)
        test = EpisodeTest(
            episodes=self.validation,
            chunk=self.way.way.chunk or self.params.images,
            head_slices=self.way.head_slices,
            precision=self.precision,
            step=self._count_validated,
        )
        accuracy, half_width = mean_and_half_width(test.accuracies(self.model))
        self._validated = 0
        earlier = [each["accuracy"] for each in self.state.validation]
        self.state.validation.append({"accuracy": accuracy, "half_width": half_width})
        if accuracy > max(earlier, default=-1.0):
            self.state.best_epoch = len(self.state.validation)
            self._keep()

    def _keep(self) -> None:
        self.kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.model.state_dict().items()}

    def _count_validated(self) -> None:
        self.raise_if_cancelled()
        self._validated += 1
        self._report()

    def _report(self) -> None:
        tested = len(self.state.validation) * self.params.test_iter + self._validated
        total = self._total + self.params.num_epoch * self.params.test_iter
        self.report(self.state.episodes + tested, total)

    def _saved(self) -> tuple[SavedSearch, dict[str, Tensor]]:
        state = self.state
        scaler = self._step.state_dict()["scaler"]
        learnt = {
            "curve": state.curve,
            "validation": state.validation,
            "losses": state.losses,
            "vic": None if state.vic is None else asdict(state.vic),
            "scaler": scaler,
        }
        counts = {"episodes": state.episodes, "best_epoch": state.best_epoch or 0, "skipped": state.skipped}
        saved = SavedSearch(finished={}, of=_WORK, chosen=self.way.chosen().training, counts=counts, learnt=learnt)
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"kept.{name}": tensor for name, tensor in self.kept.items()}
        return saved, tensors | {f"optimiser.{name}": tensor for name, tensor in self.optimiser_tensors().items()}

    def _restore(self) -> None:
        saved = self.checkpoints.find()
        if saved is None or saved.learnt is None:
            return
        tensors = self.checkpoints.tensors()
        if tensors is None:
            return
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "kept": {}, "optimiser": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        self.model.load_state_dict(parts["model"])
        self.kept = parts["kept"]
        self._restore_moments(parts["optimiser"], saved)
        learnt: Mapping[str, Any] = saved.learnt
        vic = learnt["vic"]
        self.state = TrainingState(
            episodes=saved.counts["episodes"],
            losses=list(learnt["losses"]),
            curve=list(learnt["curve"]),
            validation=list(learnt["validation"]),
            best_epoch=saved.counts["best_epoch"] or None,
            vic=None if vic is None else VicWeights(**vic),
            skipped=saved.counts["skipped"],
        )
        self.checkpoints.workspace.ports.log(
            "info", f"the training resumed after {self.state.episodes} of {self._total} episodes"
        )

    def _restore_moments(self, tensors: Mapping[str, Tensor], saved: SavedSearch) -> None:
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            place, _, moment = name.partition(".")
            moments.setdefault(int(place), {})[moment] = tensor
        groups = self._step.optimiser.state_dict()["param_groups"]
        scaler = None if saved.learnt is None else saved.learnt["scaler"]
        self._step.load_state_dict(
            {
                "optimiser": {"state": moments, "param_groups": groups},
                "scaler": scaler,
                "skipped": saved.counts["skipped"],
            }
        )


def _named(place: int, values: LossValues) -> str:
    """The name of an episode, with the parts of its loss that are not finite."""
    parts = [name for name in ("cross_entropy", "variance", "covariance") if not math.isfinite(getattr(values, name))]
    return f"episode {place}" + (f", by its {' and '.join(parts)}," if parts else "")
