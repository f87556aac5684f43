"""Exact products: the curvature of the mean loss times vectors, with nothing of it approximated and none of it stored.

For outputs f with Jacobian J, over the loss terms that entered a collection, of total weight W (docs/convention.md):

=============  =================================================================================
``ggn``        ``Σ_n J_nᵀ H_n J_n / W``, H the Hessian of the summed loss with respect to f
``hessian``    ``∇²(Σ loss) / W``: the same, and ``Σ (∂L/∂f) · ∇²f / W``
``fisher``     ``Σ_n Σ_s g_ns g_nsᵀ / W``, g the gradient of example n's summed loss at labels drawn from the model
``empirical``  ``Σ_n g_n g_nᵀ / W``, g the same at the data's own labels
=============  =================================================================================

One forward pass carries all columns as tangents, and each is pulled back once; the Hessian, and models that cannot be
differentiated forward, go by second gradients.

References:
    Schraudolph (2002), Fast curvature matrix-vector products for second-order gradient descent
    Pearlmutter (1994), Fast exact multiplication by the Hessian
    Kunstner, Balles & Hennig (2019), Limitations of the empirical Fisher approximation
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from engine.collection.pass_job import PassJob
from engine.errors import NoLikelihood, UsageError
from engine.factors.factor_set import ParameterShape
from engine.model.batches import Batch
from engine.operators.blocks import Block
from engine.operators.exact.columns import Column, Sliced, apart
from engine.operators.exact.data_passes import DataPasses, Learnt
from engine.operators.exact.output_curvature import Curvature
from engine.operators.exact.routes import Routes
from engine.operators.parameter_space import ParameterSpace

__all__ = ["Curvature", "ExactCurvature"]

_REMEDY = "write the model with operations that torch can differentiate twice, or take a curvature made of factors"


@dataclass(kw_only=True)
class ExactCurvature:
    """The curvature over the examples that entered a job's factors, in the precision of its passes."""

    job: PassJob
    of: Curvature
    updates: int
    """Batches that entered the collection; with a moving average, each weighs as it does there."""
    report: Callable[[], None]
    """Called after each batch."""
    parameters: tuple[ParameterShape, ...]
    """The trainable parameters, in the order of the flat vector."""
    samples: int = 1
    """Labels drawn for each term, for ``fisher``."""
    what: str = "the product"
    """Purpose of the passes, as a warning names it."""
    remedy: str = _REMEDY
    """Remedy where the model cannot be differentiated."""
    pointer: str | None = None
    """The part of the document that asked for it."""
    passes: DataPasses = field(init=False)
    """Passes over the data, which remember at what micro-batch memory sufficed."""
    _routes: Routes = field(init=False)

    def __post_init__(self) -> None:
        """Make the passes, which keep what they learn of memory and of the model."""
        if self.of not in ("ggn", "hessian", "fisher", "empirical"):
            raise UsageError(f"of must be one of ggn, hessian, fisher, empirical (got {self.of!r})")
        if self.samples < 1:
            raise UsageError(f"samples must be at least 1 (got {self.samples})")
        self.passes = DataPasses(
            job=self.job, updates=self.updates, report=self.report, what=self.what, remedy=self.remedy,
            pointer=self.pointer, labels_drawn=self.of == "fisher",
        )  # fmt: skip
        self._routes = Routes(passes=self.passes, of=self.of, samples=self.samples if self.of == "fisher" else 1)

    @cached_property
    def _space(self) -> ParameterSpace:
        return ParameterSpace(self.parameters)

    @property
    def size(self) -> int:
        """P: numbers of the flat vector."""
        return self._space.size

    @property
    def learnt(self) -> Learnt:
        """Facts that products have learnt so far, for a later attempt."""
        return self.passes.learnt(self._routes.reason)

    @learnt.setter
    def learnt(self, learnt: Learnt) -> None:
        self.passes.take_over(learnt)
        self._routes.reason = learnt.route

    def prepared(self) -> contextlib.AbstractContextManager[None]:
        """Hold the model still, as a collection does; every product is to be asked for inside.

        The model's state, its gradients and torch's switches are as before afterwards.
        """
        return self.passes.prepared()

    def product(self, flat: Tensor) -> Tensor:
        """Multiply vectors by the curvature, in one pass over the data.

        Args:
            flat: One vector (P,) or k as columns (P, k), any floating-point dtype, on any device.

        Returns:
            The products, of the same shape and dtype and on the same device; columns are contiguous each.

        Raises:
            UsageError: If the length is another one than P.
            NoLikelihood: If the loss is the model's own.
            ModelRefused: If the model draws random numbers in evaluation, or has an operation without the derivatives.

        Memory:
            2 k vectors of P numbers on the device, 3 for k = 1; the graph of a micro-batch, and k tangents
            of what is in use.
        """
        placed = self._space.flatten(flat).to(self.job.workspace.machine.device, self.job.dtype)
        rows = placed.reshape(1, -1) if placed.ndim == 1 else placed.T.contiguous()
        del placed
        names = tuple(each.name for each in self.parameters)
        columns = []
        for row in rows:
            parts = self._space.unflatten(row)
            columns.append(Column(tangents={name: own for name, own in parts.items() if bool(own.any())}, wanted=names))
        sums = self._run(names, columns)
        # the vectors' own memory takes in the products, except where that is the caller's
        total = torch.empty_like(rows) if rows.data_ptr() == flat.data_ptr() else rows
        del columns
        for row in total:
            own = sums.pop(0)
            torch.cat([own[name].reshape(-1) for name in names], out=row)
        return (total[0] if flat.ndim == 1 else total.T).to(flat.device, flat.dtype)

    def block_products(self, blocks: Sequence[Block], vectors: Sequence[Tensor]) -> list[Tensor]:
        """Compute ``F_b v_b`` of the diagonal block of each block b, in one pass over the data.

        Args:
            blocks: Parts of the parameters, which may have numbers in common.
            vectors: One vector v_b, shape (size,), for each block, on any device.

        Returns:
            The products, shape (size,) each, in the order of ``blocks``, with the dtypes and devices of their vectors.

        Raises:
            NoLikelihood, ModelRefused: As ``product`` does.

        Memory:
            The same, with the parameters of the blocks in place of P.
        """
        device, model = self.job.workspace.machine.device, dict(self.job.model.named_parameters(remove_duplicate=False))
        columns = []
        for block, vector in zip(blocks, vectors, strict=True):
            tangents = block.split(vector.to(device, self.job.dtype), {n: p.shape for n, p in model.items()})
            columns.append(Column(tangents=tangents, wanted=tuple(tangents)))
        names = tuple(dict.fromkeys(name for column in columns for name in column.wanted))
        return [
            block.join(total).to(vector.device, vector.dtype)
            for block, total, vector in zip(blocks, self._run(names, columns), vectors, strict=True)
        ]

    # ---- one pass

    def _run(self, names: tuple[str, ...], columns: Sequence[Column]) -> list[dict[str, Tensor]]:
        """One pass: each column's product of the mean loss, by parameter."""
        if self.job.task.likelihood == "model":
            raise NoLikelihood(
                "`loss: model` is a number without a known likelihood, so its curvature is not known; name the loss",
                pointer="/task/loss",
            )
        sums: list[dict[str, Tensor]] = [{} for _ in columns]

        def compute(batch: Batch, parameters: Mapping[str, Tensor]) -> tuple[Sliced, float]:
            found = self._routes.products(batch, parameters, columns)
            return found, found.divisor

        def add(found: Sliced, weight: float) -> None:
            for total, product in zip(sums, found.products, strict=True):
                if total:
                    for name, own in product.items():
                        total[name].add_(own, alpha=weight)
                else:
                    # the first slice's own tensors take in the others: no second set of them beside a graph
                    total.update({name: own.mul_(weight) for name, own in apart(product).items()})

        divisor = self.passes.run(names, compute, add)
        for total in sums:
            for own in total.values():
                own.div_(divisor)
        return sums
