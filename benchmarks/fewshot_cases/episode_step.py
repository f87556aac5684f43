"""The training step of one episode, FSCT_cosine with features as vectors of the whole map, and its meters."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from engine.fewshot.backbones import make_backbone
from engine.fewshot.episode_loss import EpisodeLoss
from engine.fewshot.heads import make_head
from engine.model.pass_peak import StorageEvents
from engine.training.batch_statistics import BatchNormMode
from engine.training.mixed_precision import TrainingPrecision
from engine.training.optimiser_step import make_optimiser
from engine.training.split_gradients import split_gradients
from engine.training.training_peak import TrainingStep
from engine.training.ways import Way
from tests.memory_profile import peak_bytes


@dataclass(frozen=True, kw_only=True)
class EpisodeSize:
    """The sizes of an episode and of the images in it."""

    image_size: int = 84
    n_way: int = 5
    k_shot: int = 5
    n_query: int = 16

    @property
    def images(self) -> int:
        """Images of an episode."""
        return self.n_way * (self.k_shot + self.n_query)

    def slices_of(self, slices: int) -> Way:
        """Return the two passes in so many slices."""
        return Way(chunk=-(-self.images // slices))


def training_step(
    backbone: str,
    size: EpisodeSize,
    device: torch.device,
    batch_norm: BatchNormMode = "frozen",
    *,
    on_meta: bool = False,
) -> TrainingStep:
    """Make the step of a backbone that trains on a device, with its modules there or on the meta device."""
    with torch.device("meta") if on_meta else device:
        model = make_backbone(backbone, pool="flatten")
        head = make_head("FSCT_cosine", k_shot=size.k_shot, feature_shape=model.feature_shape(size.image_size))
    loss = EpisodeLoss(head=head, n_way=size.n_way, k_shot=size.k_shot, n_query=size.n_query)
    return TrainingStep(
        model=model,
        # head and loss at full width, as a job computes them
        loss=lambda features: loss(features.float()),
        images=size.images,
        image_shape=(3, size.image_size, size.image_size),
        optimiser=partial(make_optimiser, "AdamW", learning_rate=1e-3),
        head=head,
        batch_norm=batch_norm,
        device=device,
    )


def draw_images(step: TrainingStep, device: torch.device) -> Tensor:
    """Return images of a step, of uniform numbers."""
    return torch.rand(step.images, *step.image_shape, generator=torch.Generator().manual_seed(0)).to(device)


def parameters_of(step: TrainingStep) -> list[nn.Parameter]:
    """Return the parameters of backbone and head."""
    return [parameter for module in step.modules for parameter in module.parameters()]


def differentiate(step: TrainingStep, images: Tensor, way: Way) -> None:
    """Add the gradients of the step to ``.grad``."""
    split_gradients(
        step.model,
        step.loss,
        images,
        chunk=way.chunk,
        batch_norm=step.batch_norm,
        checkpointing=way.checkpointing,
        precision=TrainingPrecision(compute_dtype=way.compute_dtype),
    )


def activation_bytes(step: TrainingStep, images: Tensor, way: Way) -> dict[str, int]:
    """Return the most bytes that a step's gradients take beside weights, images and gradients that are there before.

    Returns:
        ``storages``: storages that operations make; ``allocated``: the same by torch's allocator, with the temporaries
        inside operations.
    """
    for parameter in parameters_of(step):
        parameter.grad = torch.zeros_like(parameter)
    events = StorageEvents()

    def work() -> None:
        with events.noted():
            differentiate(step, images, way)

    allocated = allocated_bytes(work, images.device)
    for parameter in parameters_of(step):
        parameter.grad = None
    return {"storages": max(events.held), "allocated": allocated}


def allocated_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that torch's allocator gave out at once, beyond what it had given out before."""
    if device.type != "cuda":
        return peak_bytes(work)
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the processor, or those that pass on a device."""
    if device.type != "cuda":
        begun = time.process_time()
        work()
        return time.process_time() - begun
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begun
