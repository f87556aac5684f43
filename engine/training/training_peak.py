"""The peak of a training step: the most bytes that one step holds at once, with the parts that make it.

The step itself (``split_gradients``, then the optimiser's) is run on the meta device, where tensors have shapes and no
numbers, and every storage is followed from the operation that makes it until it is let go of. Before it begins there
are weights, the optimiser's moments and the images; gradients are none, as ``zero_grad`` lets go of them, and arrive as
activations go:

    peak = weights + moments + images + max over the moments of a step (what its operations made and is still held)

Of a way in chunks two chunks are run, since gradients arrive during the first, and stand during the second as during
every later one; the loss sees features of all images. Every change is a line in the size of a chunk, which runs with
chunks of two and three images show, so that these two serve chunks of any size.

The optimiser's step counts too. Torch's default on CUDA (``foreach``) holds temporaries as large as all parameters,
when activations are gone but gradients are not: ``foreach=False``, which holds those of one parameter, or
``fused=True``, which holds none, keeps the step of a large head near the peak of its passes.

On a CPU the gradient of a convolution's weight comes from oneDNN in a layout of its own, beside the one that it is
copied to. In float64 there is no oneDNN, and a convolution's input is unfolded to columns. Both count; what libraries
allocate by themselves (cuDNN's workspaces) does not. Attention writes its scores out on the meta device: enter
``simulate_device`` around a prediction for a model that has ``scaled_dot_product_attention``.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from engine.model.activation_memory import storage_identity, storage_of
from engine.model.pass_peak import StorageEvents, parts_at_peak
from engine.training.batch_statistics import BatchNormMode
from engine.training.mixed_precision import SimulatedAutocast, TrainingPrecision
from engine.training.split_gradients import Loss, slices_inputs, split_gradients
from engine.training.ways import Way

WEIGHTS = "weights"
GRADIENTS = "gradients"
MOMENTS = "optimiser moments"
IMAGES = "images"
KEPT = "kept activations"
FEATURES = "features and cotangents"
HEAD = "head and regulariser"
COPIES = "AMP copies"
UPDATE = "optimiser step"
WORKSPACE = "workspace of a convolution"
REST = "the rest"
PARTS = {
    WEIGHTS: "Σ parameters and buffers of backbone and head",
    GRADIENTS: "Σ parameters that have theirs at the peak",
    MOMENTS: "Σ state of the optimiser: AdamW and Adam 2 · parameters, SGD with momentum 1 ·",
    IMAGES: "N · (C · H · W)",
    KEPT: "what the backbone's blocks have made and is still held: N, or one chunk, · each image",
    FEATURES: "N · d, and as many cotangents once the loss is done",
    HEAD: "what head and loss have made and is still held",
    COPIES: "Σ weights cast to 16 bits that are still held",
    UPDATE: "temporaries of the optimiser's largest update",
    WORKSPACE: "on a CPU its weight once more, or in float64 N, or one chunk, · (C · k²) · (H · W) of its output",
    REST: "gradients on their way through the backbone",
}
"""Formulas of the parts by their names, in the order of a plan."""
_META, _CPU = torch.device("meta"), torch.device("cpu")
_CHUNKS = 2
_SIZES = (2, 3)
"""Sizes of a chunk that show the lines; normalisation may refuse a single image."""


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One step of a training, described by modules on the meta device."""

    model: nn.Module
    """The backbone on the meta device, images (N, …) to features (N, *feature), in the mode that it trains in."""
    loss: Loss
    """The loss of all features. All of its tensors are on the meta device."""
    images: int
    """Images N of one step."""
    image_shape: tuple[int, ...]
    """Shape of one image, e.g. (C, H, W)."""
    optimiser: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    """Makes the optimiser. ``fused`` does not run on the meta device: give ``foreach=False``, which holds no less."""
    head: nn.Module | None = None
    """The module of the loss's own parameters, if it has any."""
    batch_norm: BatchNormMode = "whole"
    dtype: torch.dtype = torch.float32
    """The images' dtype."""
    device: torch.device = _CPU
    """The device that trains."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that are trained."""
        return (self.model,) if self.head is None else (self.model, self.head)


@dataclass(frozen=True, kw_only=True)
class TrainingPeak:
    """The bytes that a step holds at the moment when they are most."""

    way: Way
    parts: Mapping[str, int]
    """Bytes by the names of ``PARTS``, without those of none."""

    @property
    def size_bytes(self) -> int:
        """The peak: the sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Trace:
    """The record of one run of a step."""

    resident: Mapping[str, int]
    """Bytes of what is there before the step."""
    changes: tuple[int, ...]
    labels: tuple[str, ...]


class StepMemory:
    """The memory of a training step in any way, from a few runs of it on the meta device."""

    def __init__(self, step: TrainingStep) -> None:
        """Keep the step; nothing runs yet.

        Its modules are left as they were, but for gradients, which are let go of.
        """
        self.step = step
        self._traces: dict[Way, _Trace] = {}

    def peak(self, way: Way) -> TrainingPeak:
        """Predict the most bytes that the step holds at once, with their parts, if gradients are computed this way.

        A chunk is left out where ``split_gradients`` leaves it out: where it holds all images, or statistics of the
        batch couple them.
        """
        step = self.step
        sliced = way.chunk is not None and way.chunk < step.images and slices_inputs(step.model, step.batch_norm)
        taken = way if sliced else replace(way, chunk=None)
        trace = self._of_chunk(taken) or self._traced(taken)
        made = parts_at_peak(trace.changes, trace.labels)
        parts = {name: trace.resident.get(name, 0) + made.get(name, 0) for name in PARTS}
        return TrainingPeak(way=way, parts={name: size for name, size in parts.items() if size})

    def _of_chunk(self, way: Way) -> _Trace | None:
        """Draw the lines through the runs with small chunks; None where there are none, or they do not match."""
        if way.chunk is None or self.step.images < _CHUNKS * _SIZES[-1]:
            return None
        fewer, more = (self._traced(replace(way, chunk=size)) for size in _SIZES)
        if fewer.labels != more.labels:
            return None
        beyond = way.chunk - _SIZES[0]
        changes = (one + beyond * (other - one) for one, other in zip(fewer.changes, more.changes, strict=True))
        return replace(fewer, changes=tuple(changes))

    def _traced(self, way: Way) -> _Trace:
        if way not in self._traces:
            self._traces[way] = _trace(self.step, way)
        return self._traces[way]


def _trace(step: TrainingStep, way: Way) -> _Trace:
    """Run a step of all images, or of two chunks of them."""
    parameters = [parameter for module in step.modules for parameter in module.parameters()]
    buffers = [buffer for module in step.modules for buffer in module.buffers()]
    trained = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
    optimiser = step.optimiser(trained)
    _take_moments(optimiser, trained)
    images = torch.empty(step.images, *step.image_shape, dtype=step.dtype, device=_META)
    resident = {
        WEIGHTS: _storage_bytes((*parameters, *buffers)),
        MOMENTS: _storage_bytes(
            each for own in optimiser.state.values() for each in own.values() if torch.is_tensor(each)
        ),
        IMAGES: images.untyped_storage().nbytes(),
    }
    events = _StepEvents(parameters, way.compute_dtype, step.device)
    with events.followed(step.model, trained), events.noted():
        split_gradients(
            step.model,
            _WatchedLoss(step.loss, events, step.images),
            images if way.chunk is None else images[: _CHUNKS * way.chunk],
            chunk=way.chunk,
            batch_norm=step.batch_norm,
            checkpointing=way.checkpointing,
            precision=TrainingPrecision(compute_dtype=way.compute_dtype),
        )
        events.label = UPDATE
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return _Trace(resident, tuple(events.changes), tuple(events.labels))


def predict_pass(step: TrainingStep, images: int, compute_dtype: torch.dtype) -> int:
    """Predict the most bytes that a pass without a graph holds in the model's mode: images, but no weights."""
    batch = torch.empty(images, *step.image_shape, dtype=step.dtype, device=_META)
    events = _StepEvents((), compute_dtype, step.device)
    with torch.no_grad(), events.followed(step.model, ()), events.noted():
        features = step.model(batch)
        del features
    return batch.nbytes + max(events.held, default=0)


def _take_moments(optimiser: torch.optim.Optimizer, trained: Iterable[nn.Parameter]) -> None:
    """Let an optimiser make its state, as it does in its first step."""
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage_identity(storage): storage.nbytes() for storage in storages}.values())


def _workspace_bytes(func: object, args: Sequence[Any], left: Any) -> int:  # noqa: ANN401 - as torch returns
    """Return the bytes that a CPU holds beside the inputs and outputs of a convolution, there or back."""
    backward = func is torch.ops.aten.convolution_backward.default
    if not backward and func is not torch.ops.aten.convolution.default:
        return 0
    # the gradient of the output comes first, and the sizes of the bias before the stride
    outputs, (weight, _, stride, padding) = (args[0], args[2:6]) if backward else (left, args[1:5])
    if weight.dtype != torch.float64:
        return weight.numel() * weight.itemsize if backward else 0
    is_unfolded = weight[0, 0].numel() > 1 or any(each > 1 for each in stride) or any(padding)
    columns = weight[0].numel() * len(outputs) * math.prod(outputs.shape[2:])
    return columns * weight.itemsize if is_unfolded else 0


class _StepEvents(StorageEvents):  # type: ignore[no-untyped-call]
    """Storages of a step, each labelled with the part that it belongs to.

    Numbers that are asked for are zero and flags true, which is that what is computed twice agrees.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], compute_dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(REST)
        self._on_cpu = device.type == "cpu"
        self._weights = {storage_of(parameter) for parameter in parameters}
        self._precision = TrainingPrecision(compute_dtype=compute_dtype)
        self._contexts: list[contextlib.AbstractContextManager[object]] = []
        """Those of the model's modules that are running, each in the one before it."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:  # noqa: SLF001 - its only name
            return True if args[0].dtype == torch.bool else 0
        left = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten._to_copy.default and storage_of(args[0]) in self._weights:  # noqa: SLF001 - likewise
            self.relabel(left, COPIES)
        if self._on_cpu and (workspace := _workspace_bytes(func, args, left)):
            self._note(workspace, WORKSPACE)
            self._note(-workspace, WORKSPACE)
        return left

    @contextlib.contextmanager
    def followed(self, model: nn.Module, trained: Iterable[nn.Parameter]) -> Iterator[None]:
        """Label what the model's modules make, which run under autocast, and gradients as they arrive."""
        handles = [
            parameter.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]
            for parameter in trained
        ]
        for module in model.modules():
            handles += [
                module.register_forward_pre_hook(self._enter),
                # checkpointing leaves a block by an exception once all that it needs is there
                module.register_forward_hook(self._leave, always_call=True),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arrive(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.relabel(parameter.grad, GRADIENTS)

    def _enter(self, *_: object) -> None:
        # a block that is computed again runs after its autocast has been left
        missing = not self._contexts and not SimulatedAutocast.is_active()
        self._contexts.append(self._precision.autocast(_META) if missing else contextlib.nullcontext())
        self._contexts[-1].__enter__()
        self.label = KEPT

    def _leave(self, *_: object) -> None:
        self._contexts.pop().__exit__(None, None, None)
        if not self._contexts:
            self.label = REST


class _WatchedLoss:
    """A loss that labels what it makes, and sees features of all images where only some were computed."""

    def __init__(self, loss: Loss, events: _StepEvents, images: int) -> None:
        self._loss = loss
        self._events = events
        self._images = images

    def __call__(self, features: Tensor) -> Tensor | Iterable[Tensor]:
        events = self._events
        events.relabel(features, FEATURES)
        if features.requires_grad:
            features.register_hook(self._arrive)  # type: ignore[no-untyped-call]
            features.register_post_accumulate_grad_hook(self._hold)  # type: ignore[no-untyped-call]
        events.label = FEATURES
        rows = features
        if len(features) < self._images:
            rows = _OfAll.apply(features, self._images)  # type: ignore[no-untyped-call]
        events.label = HEAD
        terms = self._loss(rows)
        return terms if isinstance(terms, Tensor) else self._labelled(terms)

    def _labelled(self, terms: Iterable[Tensor]) -> Iterator[Tensor]:
        for term in terms:
            yield term
            del term
            self._events.label = HEAD
        self._events.label = REST

    def _arrive(self, cotangent: Tensor) -> None:
        """The gradient has passed the loss: what follows is the backbone's."""
        self._events.relabel(cotangent, FEATURES)
        self._events.label = REST

    def _hold(self, features: Tensor) -> None:
        """Hold as much as the features of the other images take, as long as these are held."""
        if features.grad is not None:
            self._events.relabel(features.grad, FEATURES)
        if len(features) < self._images and not hasattr(features, "others"):
            self._events.label = FEATURES
            features.others = features.new_empty(self._images - len(features), *features.shape[1:])  # type: ignore[attr-defined]
            self._events.label = REST


class _OfAll(torch.autograd.Function):
    """Features of all images in place of those of some, whose cotangents are the first rows of all cotangents."""

    @staticmethod
    @override
    def forward(ctx: Any, features: Tensor, images: int) -> Tensor:
        ctx.some = len(features)
        return features.new_empty(images, *features.shape[1:])

    @staticmethod
    @override
    def backward(ctx: Any, cotangents: Tensor) -> tuple[Tensor, None]:
        return cotangents[: ctx.some], None
