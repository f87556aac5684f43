"""Routes: how a slice's products are computed, the cheap way first and the one that asks for less where it fails."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine.errors import EngineError, ModelRefused, Unwinding
from engine.memory.budget import free_host_bytes
from engine.memory.out_of_memory import ran_out_of_memory
from engine.model.batches import Batch
from engine.model.determinism import seed_generators
from engine.operators.exact.backward_route import BackwardRoute
from engine.operators.exact.columns import Column, Sliced
from engine.operators.exact.data_passes import DataPasses
from engine.operators.exact.forward_route import ForwardRoute, NotAdjoint, require_no_draws
from engine.operators.exact.output_curvature import Curvature

_SHARE = 4
"""Columns side by side take one part of so many of what is free; the graph is beside them."""


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
        """Multiply columns by the curvature of a slice.

        Args:
            batch: The slice, on the device.
            parameters: The parameters that the columns name, which require gradients.
            columns: The vectors.

        Returns:
            The products of the summed loss, and the divisor.

        Raises:
            ModelRefused: If the model draws random numbers, or neither route differentiates it.
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
            said = f"{type(error).__name__}: {str(error)[:500]}"
            refused = ModelRefused(
                f"the model cannot be differentiated twice: {said}; {self.passes.remedy}", pointer=self.passes.pointer
            )
            raise self._explained(refused) from error

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
