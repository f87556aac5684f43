"""Routes: how a slice's products are computed, the cheap way first and the one that asks for less where it fails.

The backward route is J v by a pullback of the pullback, which asks for second gradients and for no forward derivative.
For a direction u of the outputs, ``s = ⟨Jᵀ u, v⟩`` is linear in u, so that ``∂s/∂u = J v``; and ``∂s/∂θ`` at a fixed
``u = ∇L`` is what the curvature of the outputs themselves adds to the loss's Hessian:

    Hessian v = Jᵀ H (J v) + ∂⟨Jᵀ ∇L, v⟩/∂θ

The Hessian goes this way; the other curvatures do where an operation has no forward derivative, or another one than its
gradient (a rounding whose gradient passes straight through).

References:
    Pearlmutter (1994), Fast exact multiplication by the Hessian
    Schraudolph (2002), Fast curvature matrix-vector products for second-order gradient descent
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.collection.pass_job import PassJob
from engine.errors import EngineError, ModelRefused, Unwinding
from engine.memory.budget import free_host_bytes
from engine.memory.out_of_memory import ran_out_of_memory
from engine.model.batches import Batch
from engine.model.loss_directions import loss_gradient
from engine.model.outputs import Prediction, predict
from engine.model.state.generators import seed_generators
from engine.operators.exact.attention_calls import AttentionCalls
from engine.operators.exact.columns import TANGENT, Column, Sliced, flaw, norm, signs
from engine.operators.exact.data_passes import DataPasses
from engine.operators.exact.forward_route import ForwardRoute, NotAdjoint, require_no_draws
from engine.operators.exact.output_curvature import Curvature, OutputCurvature

_SHARE = 4
"""Columns side by side take one part of so many of what is free; the graph is beside them."""


@dataclass(frozen=True, kw_only=True)
class BackwardRoute:
    """Products of any curvature."""

    job: PassJob
    of: Curvature
    samples: int
    remedy: str
    """Remedy where the model cannot be differentiated twice."""
    pointer: str | None

    def products(self, batch: Batch, parameters: Mapping[str, Tensor], columns: Sequence[Column]) -> Sliced:
        """Multiply columns as ``Routes.products`` does."""
        job = self.job
        calls = AttentionCalls()
        with calls, torch.enable_grad():
            with job.precision.autocast(job.workspace.machine.device):
                prediction = predict(job.model, batch, job.task)
            # as the collection does: the loss in the precision of the sums
            prediction = replace(prediction, outputs=prediction.outputs.to(job.dtype), logits=None)
            if not prediction.terms or not prediction.outputs.requires_grad:
                nothing = [{name: torch.zeros_like(parameters[name]) for name in own.wanted} for own in columns]
                return Sliced(products=nothing, divisor=prediction.divisor)
            found = [
                self._product(prediction, batch, parameters, column, calls.narrowest or job.dtype) for column in columns
            ]
        return Sliced(products=found, divisor=prediction.divisor)

    def _product(
        self,
        prediction: Prediction,
        batch: Batch,
        parameters: Mapping[str, Tensor],
        column: Column,
        precision: torch.dtype,
    ) -> dict[str, Tensor]:
        if not column.tangents:
            # a vector of zeros: the search has exhausted the space, or the block of a smaller matrix is padded
            return {name: torch.zeros_like(parameters[name]) for name in column.wanted}
        job, outputs = self.job, prediction.outputs
        true_hessian = self.of == "hessian"
        direction = (
            loss_gradient(prediction, job.task)
            if true_hessian
            else signs(outputs.detach(), batch.index, job.collection.seed, TANGENT)
        )
        # J v is the same at any direction; another one than zero shows whether it is J v
        direction = direction.requires_grad_()
        names = tuple(column.tangents)
        wanted = {name: parameters[name] for name in column.wanted}
        moving = [parameters[name] for name in names]
        gradients = torch.autograd.grad(outputs, moving, direction, create_graph=True, materialize_grads=True)
        inner = _column_inner(dict(zip(names, gradients, strict=True)), column)
        if not inner.requires_grad:
            # the column does not reach the outputs
            return {name: torch.zeros_like(own) for name, own in wanted.items()}
        second = [*wanted.values()] if true_hessian else []
        pushed, *bent = torch.autograd.grad(
            inner, [direction, *second], materialize_grads=True, allow_unused=True, retain_graph=True
        )
        self._require_adjoint(inner.detach(), direction.detach(), pushed, gradients, column, precision)
        del gradients, inner
        curvature = OutputCurvature(
            prediction=prediction,
            index=batch.index,
            job=job,
            of="ggn" if true_hessian else self.of,
            samples=self.samples,
            reusable=False,
        )
        product, _ = curvature.product_(pushed.detach().contiguous())
        found = torch.autograd.grad(outputs, list(wanted.values()), product, retain_graph=True, materialize_grads=True)
        if true_hessian:
            found = tuple(own + each for own, each in zip(found, bent, strict=True))
        return dict(zip(wanted, found, strict=True))

    def _require_adjoint(
        self,
        inner: Tensor,
        direction: Tensor,
        pushed: Tensor,
        gradients: Sequence[Tensor],
        column: Column,
        precision: torch.dtype,
    ) -> None:
        """Check ``⟨u, J v⟩ = ⟨Jᵀ u, v⟩``: torch leaves out without a word what has no second gradient."""
        left = (direction * pushed).sum().double()
        of_gradients = norm(dict(enumerate(own.detach() for own in gradients)))  # type: ignore[arg-type]
        broken = flaw(left, inner.double(), of_gradients * norm(column.tangents), precision)
        if not float(broken) <= 1:
            first = next(iter(column.tangents))
            raise ModelRefused(
                f"the model cannot be differentiated twice: an operation between `{first}` and the outputs has a "
                f"gradient without a gradient of its own; {self.remedy}",
                pointer=self.pointer,
            )


def _column_inner(gradients: Mapping[str, Tensor], column: Column) -> Tensor:
    """Compute ``⟨g, v⟩``, differentiable in g."""
    return torch.stack([(gradients[name] * own).sum() for name, own in column.tangents.items()]).sum()


@dataclass(kw_only=True)
class Routes:
    """The way that products go, which a model decides once."""

    passes: DataPasses
    of: Curvature
    samples: int = 1
    reason: str | None = None
    """Why products go the backward route; None where they need not."""
    _forward: ForwardRoute = field(init=False)
    _backward: BackwardRoute = field(init=False)
    _per_example: int | None = field(init=False, default=None)
    """Numbers of the outputs of one example; None before the model has run."""

    def __post_init__(self) -> None:
        """Make both routes."""
        passes = self.passes
        self._forward = ForwardRoute(job=passes.job, of=self.of, samples=self.samples)
        self._backward = BackwardRoute(
            job=passes.job, of=self.of, samples=self.samples, remedy=passes.remedy, pointer=passes.pointer
        )

    def products(self, batch: Batch, parameters: Mapping[str, Tensor], columns: Sequence[Column]) -> Sliced:
        """Multiply columns by the curvature of a slice of the summed loss, on the device.

        ``parameters`` are those that the columns name, which require gradients. ``ModelRefused`` if the model draws
        random numbers, or an operation cannot be differentiated this way.
        """
        if self._per_example is None:
            self._per_example = require_no_draws(self.passes.job, batch)
        at_once = self._at_once(batch, columns)
        products: list[Mapping[str, Tensor]] = []
        divisor = 0.0
        for first in range(0, len(columns), at_once):
            found = self._together(batch, parameters, columns[first : first + at_once])
            products += found.products
            divisor = found.divisor
        return Sliced(products=products, divisor=divisor)

    def _at_once(self, batch: Batch, columns: Sequence[Column]) -> int:
        """Columns that go through the model side by side; each has outputs of its own, as wide as a vocabulary."""
        machine = self.passes.job.workspace.machine
        cuda = machine.device.type == "cuda"
        free = machine.guard.free_bytes("device" if cuda else "host")
        # without a budget the host still has an end
        free = free if cuda else min(free, free_host_bytes())
        numbers = 2 * (self._per_example or 0) * batch.size
        moving = max((sum(own.numel() for own in column.tangents.values()) for column in columns), default=0)
        each = (numbers + 2 * moving) * self.passes.job.dtype.itemsize
        return max(1, min(len(columns), free // (_SHARE * max(each, 1))))

    def _together(self, batch: Batch, parameters: Mapping[str, Tensor], columns: Sequence[Column]) -> Sliced:
        if self.of != "hessian" and self.reason is None:
            found = self._forward_products(batch, parameters, columns)
            if found is not None:
                return found
            seed_generators(self.passes.job.collection.seed)
            self.passes.job.workspace.ports.log(
                "info", f"products go by second gradients, at about twice the time: {self.reason}"
            )
        try:
            return self._backward.products(batch, parameters, columns)
        except (EngineError, Unwinding) as error:
            raise self._explained(error) from error
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            raise self._explained(self.passes.refusal(error)) from error

    def _forward_products(
        self, batch: Batch, parameters: Mapping[str, Tensor], columns: Sequence[Column]
    ) -> Sliced | None:
        try:
            return self._forward.products(batch, parameters, columns)
        except NotAdjoint:
            self.reason = "an operation's forward derivative is another one than its gradient"
        except (EngineError, Unwinding) as error:
            cause = error.__cause__
            if not isinstance(error, ModelRefused) or not isinstance(cause, (NotImplementedError, RuntimeError)):
                raise
            self.reason = _said(cause)
        except (NotImplementedError, RuntimeError) as error:
            if ran_out_of_memory(error):
                raise
            self.reason = _said(error)
        return None

    def _explained(self, error: Exception) -> Exception:
        if self.reason is None or not isinstance(error, ModelRefused):
            return error
        return ModelRefused(f"{error.message} (nor forward: {self.reason})", layer=error.layer, pointer=error.pointer)


def _said(error: BaseException) -> str:
    return str(error).splitlines()[0][:300]
