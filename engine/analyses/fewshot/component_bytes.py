"""Component bytes: what autograd keeps of each part of a step, planned from shapes and counted on the first episode.

The same function counts on the meta device and on the real one: a forward pass block by block, in which each storage
that autograd packs counts once, parameters not at all. Under checkpointing a block keeps its input alone. The seconds
of the steps that are the backbone's are divided among its stages by the time that each took in that pass.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from engine.analyses.costs.fewshot_training import TrainingPlans, TrainingWay
from engine.analyses.fewshot.fewshot_model import FewshotModel, episode_loss, first_weights, terms_of
from engine.analyses.fewshot.training_run import TrainingRun
from engine.model.activation_memory import storage_identity, storage_of
from engine.training.batch_statistics import freeze_statistics
from engine.training.mixed_precision import SimulatedAutocast


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part of a training."""

    name: str
    module: str
    parameters: tuple[str, ...]
    parameter_count: int
    planned_bytes: int | None = None
    measured_bytes: int | None = None
    output_shape: tuple[int, ...] | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Bytes by the names of the parts, with what else one pass shows."""

    sizes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    seconds: Mapping[str, float]


def count_components(run: TrainingRun, plans: TrainingPlans, images: Tensor | None) -> list[Component]:
    """Return the parts of a training with their bytes: those of the plan, and those of an episode's images.

    They are the backbone's stages, head, regulariser where there is one, and optimiser. The training stands before its
    first step, and its state is left as it was. The plans have the model on the meta device. ``images`` of an episode
    are on the training's device; None counts nothing. One block's activations and one slice of the head are held.
    """
    shape = (plans.params.images, *plans.shape)
    planned = _counted(plans.model, run.way, plans, torch.empty(shape, dtype=plans.dtype, device="meta"))
    found = None if images is None else _counted(run.model, run.way, plans, images)
    backbone = run.model.backbone
    parts: dict[str, tuple[str, nn.Module | None]] = {
        f"backbone.{name}": (type(stage[0]).__name__, stage) for name, stage in backbone.stages().items()
    }
    parts["head"] = (type(run.model.head).__name__, run.model.head)
    if plans.params.penalised:
        parts["regulariser"] = ("variance and covariance", None)
    rows = []
    for name, (module, holder) in parts.items():
        own = (
            {} if holder is None else {one: each for one, each in run.model.named_parameters() if _within(each, holder)}
        )
        rows.append(
            Component(
                name=name,
                module=module,
                parameters=tuple(own),
                parameter_count=sum(each.numel() for each in own.values()),
                planned_bytes=planned.sizes[name],
                measured_bytes=None if found is None else found.sizes[name],
                output_shape=planned.shapes.get(name),
                seconds=0.0 if found is None else found.seconds.get(name, 0.0),
            )
        )
    return rows


def with_taken(components: list[Component], run: TrainingRun, planned_moments: int) -> list[Component]:
    """Return the components with the seconds of the run, and the optimiser's row with its moments."""
    forward = sum(each.seconds for each in components if each.name.startswith("backbone.")) or 1.0
    taken = {"head": run.clock.head, "regulariser": run.clock.regulariser}
    rows = [
        replace(each, seconds=taken.get(each.name, run.clock.backbone * each.seconds / forward)) for each in components
    ]
    moments = sum(tensor.nbytes for tensor in run.optimiser_tensors().values())
    optimiser = Component(
        name="optimiser",
        module=run.params.optimiser,
        parameters=(),
        parameter_count=0,
        planned_bytes=planned_moments,
        measured_bytes=moments if run.state.episodes else None,
        seconds=run.clock.optimiser,
    )
    return [*rows, optimiser]


def _within(parameter: nn.Parameter, module: nn.Module) -> bool:
    return any(parameter is each for each in module.parameters())


def _counted(model: FewshotModel, way: TrainingWay, plans: TrainingPlans, images: Tensor) -> Counted:
    """Count what one pass of the images of a slice, and the loss of as many features as there are, would keep."""
    params, buffers = plans.params, [(each, each.detach().clone()) for each in model.buffers()]
    sizes: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    seconds: dict[str, float] = {}
    weights = frozenset(storage_of(each) for each in model.parameters())
    slice_of = images[: way.way.chunk or len(images)]
    cuda = images.device.type == "cuda"
    narrow = way.way.compute_dtype.itemsize == 2 and images.is_meta
    try:
        with (
            torch.random.fork_rng(devices=[images.device] if cuda else []),
            freeze_statistics(model, wanted=params.batch_norm == "frozen"),
            SimulatedAutocast(way.way.compute_dtype) if narrow else plans.precision.autocast(images.device),
        ):
            inputs, packed_before = slice_of, False
            for name, stage in model.backbone.stages().items():
                begun = time.perf_counter()
                total = 0
                for block in stage.children():
                    packed, left = _packed(partial(block, inputs), weights)
                    own = storage_of(inputs)
                    if packed_before:
                        packed.pop(own, None)
                    total += inputs.nbytes if way.way.checkpointing else sum(packed.values())
                    packed_before = not way.way.checkpointing and storage_of(left) in packed
                    inputs = left.detach().requires_grad_(left.is_floating_point())
                if cuda:
                    torch.cuda.synchronize(images.device)
                sizes[f"backbone.{name}"] = total
                shapes[f"backbone.{name}"] = tuple(inputs.shape[1:])
                seconds[f"backbone.{name}"] = time.perf_counter() - begun
        features = inputs.new_zeros((params.images, *inputs.shape[1:])).requires_grad_()
        sizes |= _loss_bytes(model, way, plans, features)
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return Counted(sizes=sizes, shapes=shapes, seconds=seconds)


def _loss_bytes(model: FewshotModel, way: TrainingWay, plans: TrainingPlans, features: Tensor) -> dict[str, int]:
    params = plans.params
    loss = episode_loss(params, model, first_weights(params), way.head_slices, first=1)
    weights = frozenset((*(storage_of(each) for each in model.parameters()), storage_of(features)))
    terms = terms_of(loss, features, plans.dtype)
    packed, _term = _packed(lambda: next(terms), weights)
    sizes = {"head": sum(packed.values())}
    if params.penalised:
        packed, _term = _packed(lambda: next(terms), weights)
        sizes["regulariser"] = sum(packed.values())
    return sizes


def _packed(make: Callable[[], Tensor], weights: frozenset[int]) -> tuple[dict[int, int], Tensor]:
    """Return the bytes of each storage that autograd packs while something is made, by identity; and what was made."""
    found: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and storage_of(tensor) not in weights:
            storage = tensor.untyped_storage()
            alive.append(storage)
            found[storage_identity(storage)] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = make()
    return found, made
