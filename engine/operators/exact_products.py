"""Exact products with the generalised Gauss-Newton matrix, block by block, for the cross-check of a capacity job.

For outputs f with Jacobian J and the loss's Hessian H = S Sᵀ with respect to them, over loss terms of total
weight W (docs/convention.md), ``F = Σ_n J_nᵀ H_n J_n / W``.

- ``F_b v_b`` of every block at once: ``engine.operators.products``.
- ``tr F``: for signs u, independent over examples, terms and outputs, ``w = Σ_n J_nᵀ S_n u_n`` has
  ``E ‖w‖² / W = tr F``. It is Hutchinson's estimator on the side of the outputs, and one backward pass serves
  every block at once, none of which sees another's numbers. Signs are keyed by the example: batches do not matter.

References:
    Schraudolph (2002), Fast curvature matrix-vector products for second-order gradient descent
    Hutchinson (1990), A stochastic estimator of the trace of the influence matrix
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.collection.pass_job import PassJob
from engine.model.batches import Batch
from engine.model.loss_directions import root_product
from engine.model.outputs import predict
from engine.operators.blocks import Block
from engine.operators.exact.random_signs import signs
from engine.operators.products import ExactCurvature

_REMEDY = "leave `capacity.cross_check` out, or write it with operations that torch can differentiate twice"
_POINTER = "/capacity/cross_check"


@dataclass(kw_only=True)
class GaussNewton:
    """F over the examples that entered a job's factors, in the precision of its passes."""

    job: PassJob
    updates: int
    """Batches that entered; with a moving average, each weighs as it does there."""
    report: Callable[[], None]
    """Called after every batch."""
    _exact: ExactCurvature = field(init=False)

    def __post_init__(self) -> None:
        """Make the products, whose passes remember at what micro-batch memory sufficed."""
        self._exact = ExactCurvature(
            job=self.job, of="ggn", updates=self.updates, report=self.report, parameters=(), what="the cross-check",
            remedy=_REMEDY, pointer=_POINTER,
        )  # fmt: skip

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Hold the model still, as a collection does."""
        with self._exact.passes.prepared():
            yield

    def products(self, blocks: Sequence[Block], vectors: Sequence[Tensor]) -> list[Tensor]:
        """Compute ``F_b v_b`` of each block b in one pass over the data.

        Args:
            vectors: One vector v_b, shape (size,), for each block, on any device.

        Returns:
            The products, shape (size,) each, in the order of ``blocks`` and on the devices of their vectors.

        Raises:
            ModelRefused: If the model cannot be differentiated.

        Memory:
            Four vectors each; the graph of one micro-batch, and a tangent of what is in use for each block.
        """
        return self._exact.block_products(blocks, vectors)

    def probes(self, blocks: Sequence[Block], numbers: Sequence[int], seed: int) -> list[list[Tensor]]:
        """Compute ``w / √W`` of each block for each probe in one pass over the data.

        Its squared norm is the probe's estimate of the block's trace, and ``w`` itself points where F curves most.

        Args:
            numbers: Numbers of the probes, which key their random signs.
            seed: Seed of those signs.

        Returns:
            For each probe one vector per block, shape (size,), on the device of the passes.

        Raises:
            ModelRefused: If the model refuses a batch.

        Memory:
            ``2 · len(numbers)`` vectors of each block.
        """
        job, device = self.job, self.job.workspace.machine.device
        totals = [[torch.zeros(block.size, dtype=job.dtype, device=device) for block in blocks] for _ in numbers]

        def compute(batch: Batch, parameters: Mapping[str, Tensor]) -> tuple[list[list[Tensor]], float]:
            found: list[list[Tensor]] = []
            with torch.enable_grad():
                prediction = predict(job.model, batch, job.task)
            outputs = prediction.outputs
            if not prediction.terms or not outputs.requires_grad:
                return found, prediction.divisor
            for number in numbers:
                probe = signs(outputs, batch.index, seed, number)
                direction = root_product(prediction, probe, job.task)
                gradients = torch.autograd.grad(
                    outputs, list(parameters.values()), direction, retain_graph=number != numbers[-1],
                    materialize_grads=True,
                )  # fmt: skip
                by_name = dict(zip(parameters, gradients, strict=True))
                found.append([block.join(by_name) for block in blocks])
            return found, prediction.divisor

        def add(found: list[list[Tensor]], weight: float) -> None:
            for total, vectors in zip(totals, found, strict=False):
                for own, vector in zip(total, vectors, strict=True):
                    own.add_(vector, alpha=weight**0.5)

        names = tuple(dict.fromkeys(piece.parameter for block in blocks for piece in block.pieces))
        divisor = self._exact.passes.run(names, compute, add)
        return [[own.div_(divisor**0.5) for own in total] for total in totals]
