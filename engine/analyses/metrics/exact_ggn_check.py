"""The cross-check of a capacity job: the exact Gauss-Newton's trace and largest eigenvalue, layer by layer and whole.

F is that of ``ExactCurvature``, over the examples that entered the job's factors. For outputs f with Jacobian J, the
loss's Hessian S Sᵀ with respect to them and loss terms of total weight W (docs/convention.md), and for signs u that are
independent over examples, terms and outputs, ``w = Σ_n J_nᵀ S_n u_n`` has ``E ‖w‖² / W = tr F``. It is Hutchinson's
estimator on the side of the outputs, and one backward pass serves every block at once, none of which sees another's
numbers. Signs are keyed by the example: batches do not matter.

Samples of a trace are positive and skewed where few directions carry it, so the interval is Student's of the mean
taken on the logarithmic scale, ``m · exp(± t s/(m √n))``: it holds its 95 % nearer than the symmetric one.

References:
    Hutchinson (1990), A stochastic estimator of the trace of the influence matrix
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Self

import torch
from torch import Tensor

from catalog.analyses.capacity import CapacityParams
from catalog.analyses.capacity_metrics import CrossCheck
from engine.analyses.costs.capacity import probes_at_once, search_bytes, search_lengths
from engine.collection.pass_job import PassJob
from engine.collection.ranks.joined_job import pass_again
from engine.errors import NonFiniteFactor
from engine.factors.factor_set import FactorSet
from engine.linalg.lanczos import Lanczos
from engine.linalg.student import student_quantile
from engine.memory.guard import Fallback
from engine.model.batches import Batch
from engine.model.loss_directions import root_product
from engine.model.outputs import predict
from engine.operators.blocks import Block, block_of, joined
from engine.operators.exact.columns import signs
from engine.operators.products import ExactCurvature
from engine.workspace import Workspace

_REMEDY = "leave `capacity.cross_check` out, or write it with operations that torch can differentiate twice"
_POINTER = "/capacity/cross_check"
_STAGE: Literal["cross_check"] = "cross_check"


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The state that the search for one block's largest eigenvalue ended in, without the vectors that it held."""

    value: float
    residual: float
    converged: bool
    products: int

    @classmethod
    def of(cls, search: Lanczos) -> Self:
        """Keep the numbers of ``search``."""
        return cls(value=search.value, residual=search.residual, converged=search.converged, products=search.products)


@dataclass(frozen=True, kw_only=True)
class CrossChecked:
    """Samples and eigenvalues of the exact curvature, before K-FAC's numbers stand beside them."""

    samples: dict[int, list[float]]
    """Estimates of a block's trace, by ordinal."""
    searches: dict[int, Searched]
    """By ordinal; none without iterations."""
    whole: Searched | None

    def of_layer(self, ordinal: int, kronecker_trace: float, spectral_norm: float | None) -> CrossCheck | None:
        """Return one layer's record."""
        if ordinal not in self.samples:
            return None
        return _record(self.samples[ordinal], self.searches.get(ordinal), kronecker_trace, spectral_norm)

    def of_model(self, layers: Iterable[CrossCheck | None]) -> CrossCheck | None:
        """Return the model's record, beside the sum of its layers' records."""
        known = [layer for layer in layers if layer is not None]
        if not known:
            return None
        norms = [layer.kronecker_spectral_norm for layer in known]
        totals = [math.fsum(each) for each in zip(*self.samples.values(), strict=True)]
        # the largest of those that are known may not be the largest
        largest = None if None in norms else max(norm or 0.0 for norm in norms)
        return _record(totals, self.whole, math.fsum(layer.kronecker_trace for layer in known), largest)


def cross_check(params: CapacityParams, workspace: Workspace, whole: FactorSet) -> CrossChecked | None:
    """Measure traces and largest eigenvalues of the exact Gauss-Newton matrix, where the job asks for it.

    Memory:
        Twice the covered parameters for each probe of a pass, and for each vector of the Lanczos bases, which are as
        long as memory allows; the graph of a micro-batch and of its derivative.
    """
    if params.cross_check is None:
        return None
    job = pass_again(workspace, whole, "capacity.cross_check", "capacity.cross_check")
    blocks = _blocks(job, whole)
    check = _Check(job=job, whole=whole, params=params, blocks=blocks)
    return check.run()


def _blocks(job: PassJob, whole: FactorSet) -> dict[int, Block]:
    found = {}
    for layer in whole.layers:
        block = block_of(job.model, layer.name, layer.parameters, layer.parameter_count)
        if block is None:
            job.workspace.ports.log(
                "warning",
                f"layer `{layer.name}` is not cross-checked: no run of whole rows of {', '.join(layer.parameters)}",
            )
        else:
            found[layer.ordinal] = block
    return found


@dataclass(kw_only=True)
class _Check:
    job: PassJob
    whole: FactorSet
    params: CapacityParams
    blocks: dict[int, Block]
    _done: int = 0
    _total: int | None = None
    _matrix: ExactCurvature = field(init=False)

    def run(self) -> CrossChecked:
        """Probe the traces, then search for the largest eigenvalues from where the first probe points."""
        workspace, ordinals = self.job.workspace, tuple(self.blocks)
        self._matrix = exact_ggn(self.job, self.whole.updates, self._report)
        if not ordinals:
            return CrossChecked(samples={}, searches={}, whole=None)
        at_once = self._probes_at_once()
        passes = -(-self.params.cross_check_probes // at_once) + self.params.cross_check_iterations
        if workspace.inputs.examples is not None:
            self._total = passes * -(-workspace.inputs.examples // self.job.collection.batch_size)
        with workspace.machine.operation("cross-check", _STAGE), self._matrix.prepared():
            samples, starts = self._probed(at_once)
            searches: dict[int, Searched] = {}
            if self.params.cross_check_iterations:
                searches = self._searched(starts)
        if self._total is not None:
            workspace.ports.report(_STAGE, self._total, self._total, "batches")
        return CrossChecked(
            samples=dict(zip(ordinals, samples, strict=True)),
            searches={ordinal: searches[ordinal] for ordinal in ordinals if searches},
            whole=searches.get(-1),
        )

    def _report(self) -> None:
        self._done += 1
        self.job.workspace.ports.report(_STAGE, self._done, self._total, "batches")

    @property
    def _vector_bytes(self) -> int:
        """One vector of every layer."""
        return sum(block.size for block in self.blocks.values()) * self.job.dtype.itemsize

    def _probes_at_once(self) -> int:
        guard = self.job.workspace.machine.guard
        free = guard.free_bytes("device" if self.job.workspace.machine.device.type == "cuda" else "host")
        return probes_at_once(self.params.cross_check_probes, self._vector_bytes, free)

    def _probed(self, at_once: int) -> tuple[list[list[float]], list[Tensor]]:
        """Estimates of each block's trace, and the first probe's vectors."""
        blocks = tuple(self.blocks.values())
        samples: list[list[float]] = [[] for _ in blocks]
        starts: list[Tensor] = []
        for first in range(0, self.params.cross_check_probes, at_once):
            numbers = range(first, min(first + at_once, self.params.cross_check_probes))
            for vectors in trace_probes(self._matrix, blocks, numbers, self.job.collection.seed):
                for block, own, vector in zip(blocks, samples, vectors, strict=True):
                    own.append(_finite(float(vector.double().square().sum()), block))
                starts = starts or vectors
        return samples, starts

    def _searched(self, starts: list[Tensor]) -> dict[int, Searched]:
        """Lanczos of every block in step, and of the model under the key -1: one pass advances all of them."""
        iterations = self.params.cross_check_iterations
        guard, device = self.job.workspace.machine.guard, self.job.workspace.machine.device
        places = [("device", device)] if device.type == "cuda" else []
        places.append(("host", torch.device("cpu")))
        rungs = []
        for length in search_lengths(iterations):
            for name, place in places:
                on_device, on_host = search_bytes(
                    length, self._vector_bytes, on_device=name == "device", cuda=device.type == "cuda"
                )
                rungs.append(
                    Fallback(
                        name=f"{length} vectors on the {name}",
                        formula=f"2 · {length} · P and 9 P around them, P = {self._vector_bytes} bytes of parameters",
                        device_bytes=on_device,
                        host_bytes=on_host,
                        run=partial(self._search, starts, length, place),
                    )
                )
        return guard.run_with_fallbacks(
            rungs, what="the search for the largest eigenvalues", layer=None, stage=_STAGE
        ).value

    def _search(self, starts: list[Tensor], length: int, place: torch.device) -> dict[int, Searched]:
        blocks = {**self.blocks, -1: joined("the model", self.blocks.values())}
        vectors = [*starts, torch.cat(starts)]
        searches = {
            ordinal: Lanczos(start=vector.to(place), length=length)
            for ordinal, vector in zip(blocks, vectors, strict=True)
        }
        del vectors
        for _ in range(self.params.cross_check_iterations):
            active = [ordinal for ordinal, search in searches.items() if not search.converged]
            if not active:
                break
            products = self._matrix.block_products(
                [blocks[ordinal] for ordinal in active], [searches[ordinal].vector for ordinal in active]
            )
            for ordinal, product in zip(active, products, strict=True):
                searches[ordinal].advance(product)
                _finite(searches[ordinal].value, blocks[ordinal])
        # the bases are let go of: factors are decomposed next
        return {ordinal: Searched.of(search) for ordinal, search in searches.items()}


def exact_ggn(job: PassJob, updates: int, report: Callable[[], None]) -> ExactCurvature:
    """Return F over the examples that entered a job's factors, in the precision of its passes.

    With a moving average each of the ``updates`` weighs as it does there; ``report`` is called after every batch.
    """
    return ExactCurvature(
        job=job, of="ggn", updates=updates, report=report, parameters=(), what="the cross-check", remedy=_REMEDY,
        pointer=_POINTER,
    )  # fmt: skip


def trace_probes(
    exact: ExactCurvature, blocks: Sequence[Block], numbers: Sequence[int], seed: int
) -> list[list[Tensor]]:
    """Compute ``w / √W`` (size,) of each block for each probe in one pass over the data, on the device of the passes.

    Its squared norm is the probe's estimate of the block's trace, and ``w`` itself points where F curves most.
    ``numbers`` and ``seed`` key the random signs of the probes. ``ModelRefused`` if the model refuses a batch. It holds
    ``2 · len(numbers)`` vectors of each block.
    """
    job, device = exact.job, exact.job.workspace.machine.device
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
    divisor = exact.passes.run(names, compute, add)
    return [[own.div_(divisor**0.5) for own in total] for total in totals]


def _finite(value: float, block: Block) -> float:
    if not math.isfinite(value):
        raise NonFiniteFactor(
            f"layer `{block.name}`: the exact curvature exceeds the precision of the passes; "
            "take `collection.dtype: float64`, or scale the model's inputs or loss",
            layer=block.name,
        )
    return value


def _record(
    samples: Sequence[float], search: Searched | None, kronecker_trace: float, spectral_norm: float | None
) -> CrossCheck:
    trace = math.fsum(samples) / len(samples)
    low, high = interval(samples)
    return CrossCheck(
        trace=trace,
        trace_low=low,
        trace_high=high,
        kronecker_trace=kronecker_trace,
        trace_ratio=kronecker_trace / trace if trace > 0 else None,
        probes=len(samples),
        top_eigenvalue=None if search is None else search.value,
        top_residual=None if search is None else search.residual,
        top_converged=None if search is None else search.converged,
        kronecker_spectral_norm=spectral_norm,
        iterations=0 if search is None else search.products,
    )


def interval(samples: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 95 % confidence interval of the mean on the logarithmic scale, ``m · exp(± t s/(m √n))``."""
    count = len(samples)
    if count < 2:
        return None, None
    mean = math.fsum(samples) / count
    if mean == 0:
        return 0.0, 0.0
    variance = math.fsum((sample - mean) ** 2 for sample in samples) / (count - 1)
    spread = math.exp(student_quantile(count - 1) * math.sqrt(variance / count) / mean)
    return mean / spread, mean * spread
