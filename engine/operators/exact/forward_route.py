"""The forward route: one forward pass that carries tangents, and one pullback for each column.

``u = H (J v)`` is pulled back to ``Jᵀ u``. Then ``⟨u, J v⟩ = ⟨Jᵀ u, v⟩`` must hold, which costs no more than two inner
products: it fails where an operation's derivative forward is another one than on the way back.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.collection.pass_job import PassJob
from engine.errors import ModelRefused
from engine.model.batches import Batch
from engine.model.outputs import Prediction, predict
from engine.operators.exact.attention_calls import AttentionCalls
from engine.operators.exact.columns import TANGENT, Column, Sliced, flaw, norm, signs
from engine.operators.exact.output_curvature import Curvature, OutputCurvature
from engine.operators.exact.tangents import Tangents

_FEW = 2
"""Examples of the first proof; some models take a single one for none."""


class NotAdjoint(Exception):
    """An operation's derivative forward is another one than on the way back."""


@dataclass(kw_only=True)
class _Saved:
    """Tensors that autograd saves, without the tangents that go with them."""

    tangents: Tangents
    _packed: dict[int, list["weakref.ref[Tensor]"]] = field(default_factory=dict)
    """By address; memory of a branch that led nowhere may have been given to another tensor since."""

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def holds(self, tensor: Tensor) -> bool:
        """Whether the way back reads a tensor's memory."""
        packed = self._packed.get(tensor.untyped_storage().data_ptr(), [])
        return any(own() is not None for own in packed)

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        with self.tangents.resting():
            own = tensor.detach()
        self._packed.setdefault(own.untyped_storage().data_ptr(), []).append(weakref.ref(own))
        return own, own._version  # noqa: SLF001 - torch has no public name for it

    @staticmethod
    def _unpack(packed: tuple[Tensor, int]) -> Tensor:
        own, version = packed
        if own._version != version:  # noqa: SLF001 - likewise
            raise RuntimeError(
                "a tensor that the gradient needs was modified by an inplace operation after the forward pass read it"
            )
        return own


@dataclass(kw_only=True)
class ForwardRoute:
    """Products of the curvatures that are ``Jᵀ (…) J``; ``NotAdjoint`` where they contradict the gradient."""

    job: PassJob
    of: Curvature
    samples: int
    _proven: bool = False
    """Signs of a generator's own have been pulled back once."""

    def products(self, batch: Batch, parameters: Mapping[str, Tensor], columns: Sequence[Column]) -> Sliced:
        """Multiply columns as ``Routes.products`` does."""
        if not self._proven and batch.size > _FEW:
            # few examples tell as much as many, and signs and gradients of theirs stand beside nothing large
            self._pushed(next(iter(batch.slices(_FEW))), parameters, columns)
        return self._pushed(batch, parameters, columns)

    def _pushed(self, batch: Batch, parameters: Mapping[str, Tensor], columns: Sequence[Column]) -> Sliced:
        job = self.job
        tangents = Tangents(len(columns))
        saved = _Saved(tangents=tangents)
        try:
            for name, parameter in parameters.items():
                own = [column.tangents.get(name) for column in columns]
                if any(each is not None for each in own):
                    tangents.put(parameter, own)
            autocast = job.precision.autocast(job.workspace.machine.device)
            with saved.hooks(), AttentionCalls(tangents), tangents, torch.enable_grad(), autocast:
                prediction = predict(job.model, batch, job.task)
            return self._returned(prediction, batch, parameters, columns, tangents, saved)
        finally:
            for parameter in parameters.values():
                tangents.drop(parameter)

    def _returned(
        self, prediction: Prediction, batch: Batch, parameters: Mapping[str, Tensor], columns: Sequence[Column],
        tangents: Tangents, saved: _Saved,
    ) -> Sliced:  # fmt: skip
        divisor = prediction.divisor
        nothing = [{name: torch.zeros_like(parameters[name]) for name in column.wanted} for column in columns]
        if not prediction.terms or not prediction.outputs.requires_grad:
            return Sliced(products=nothing, divisor=divisor)
        precision = tangents.narrowest or self.job.dtype
        carrier = prediction.outputs if prediction.logits is None else prediction.logits
        free = not saved.holds(carrier) and _is_computed(carrier, self.job) and carrier.dtype == self.job.dtype
        curvature = OutputCurvature(
            prediction=prediction, index=batch.index, job=self.job, of=self.of, samples=self.samples, reusable=free
        )
        del prediction
        carrier = curvature.carrier
        pushed = tangents.of(carrier) or [None] * len(columns)
        tangents.drop(carrier)
        if not self._proven or any(
            own is None and column.tangents for own, column in zip(pushed, columns, strict=True)
        ):
            self._prove(carrier, batch, parameters, columns, pushed, precision)
            self._proven = True
        products: list[Mapping[str, Tensor]] = []
        for place, column in enumerate(columns):
            own = pushed[place]
            pushed[place] = None
            if own is None:
                products.append(nothing[place])
                continue
            direction, form = curvature.product_(own.contiguous())
            size = torch.linalg.vector_norm(direction).double()
            last = place == len(columns) - 1
            if last:
                del curvature
            found = _pulled_back(carrier, parameters, column.wanted, direction, last=last)
            del direction, own
            products.append(found)
            inner = column.inner(found)
            _require(flaw(form.to(inner.device), inner, norm(found) * norm(column.tangents), precision), size)
        return Sliced(products=products, divisor=divisor)

    def _prove(
        self, carrier: Tensor, batch: Batch, parameters: Mapping[str, Tensor], columns: Sequence[Column],
        pushed: Sequence[Tensor | None], precision: torch.dtype,
    ) -> None:  # fmt: skip
        """Hold ``⟨s, J v⟩`` against ``⟨Jᵀ s, v⟩`` for random signs s, which nothing that is left out escapes."""
        rows = carrier.detach().reshape(batch.size, -1, carrier.shape[-1])
        random = signs(rows, batch.index, self.job.collection.seed, TANGENT).view(carrier.shape)
        found = _pulled_back(carrier, parameters, tuple(parameters), random, last=False)
        for column, own in zip(columns, pushed, strict=True):
            if column.tangents:
                inner = column.inner(found)
                left = torch.zeros_like(inner) if own is None else (random * own).sum().double()
                moved = {name: found[name] for name in column.tangents}
                _require(flaw(left, inner, norm(moved) * norm(column.tangents), precision), inner)


def _pulled_back(
    outputs: Tensor, parameters: Mapping[str, Tensor], names: Sequence[str], direction: Tensor, *, last: bool
) -> dict[str, Tensor]:
    found = torch.autograd.grad(
        outputs, [parameters[name] for name in names], direction, retain_graph=not last, materialize_grads=True
    )
    return dict(zip(names, found, strict=True))


def _require(flawed: Tensor, finite: Tensor) -> None:
    # what is not finite is another finding
    if bool(finite.isfinite()) and not float(flawed) <= 1:
        raise NotAdjoint


def _is_computed(tensor: Tensor, job: PassJob) -> bool:
    """Whether a tensor is a result, and neither a part of the model nor of memory that it shares."""
    storage = tensor.untyped_storage().data_ptr()
    model = (*job.model.parameters(), *job.model.buffers())
    return tensor.is_contiguous() and all(own.untyped_storage().data_ptr() != storage for own in model)


def require_no_draws(job: PassJob, batch: Batch) -> int:
    """Check that the model returns the same for the same inputs."""
    with torch.no_grad(), job.precision.autocast(job.workspace.machine.device):
        first, second = (predict(job.model, batch, job.task).outputs for _ in range(2))
    if not torch.equal(first, second):
        apart = float((first - second).abs().max())
        raise ModelRefused(
            "the model must return the same outputs for the same inputs in evaluation, for products to be those of one "
            f"matrix (two forward passes differ by up to {apart:.3g}); turn off what draws random numbers, such as "
            "dropout that does not heed `eval()`",
            pointer="/model",
        )
    return -(-first.numel() // batch.size)
