"""The generalised Gauss-Newton matrix itself, by its products: nothing of it is approximated, and none of it is stored.

For outputs f with Jacobian J and the loss's Hessian H = S Sᵀ with respect to them, over loss terms of total
weight W (docs/convention.md), ``F = Σ_n J_nᵀ H_n J_n / W``.

- ``F v`` takes ``J v`` by two backward passes (``Jᵀ u`` is linear in u, so its own pullback is J), which ask less of a
  model than forward-mode differentiation does, and one more for ``Jᵀ (H J v)``. Where an operation's gradient has none
  of its own, torch may leave it out without a word: ``⟨u, J v⟩ = ⟨Jᵀ u, v⟩`` at a random u tells.
- ``tr F``: for signs u, independent over examples, terms and outputs, ``w = Σ_n J_nᵀ S_n u_n`` has
  ``E ‖w‖² / W = tr F``. It is Hutchinson's estimator on the side of the outputs, and one backward pass serves
  every block at once, none of which sees another's numbers. Signs are keyed by the example: batches do not matter.

References:
    Schraudolph (2002), Fast curvature matrix-vector products for second-order gradient descent
    Hutchinson (1990), A stochastic estimator of the trace of the influence matrix
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.collection.pass_job import PassJob
from engine.errors import EngineError, ModelRefused, Unwinding
from engine.memory.out_of_memory import free_memory, ran_out_of_memory
from engine.model.batches import Batch
from engine.model.counter_rng import uniforms
from engine.model.determinism import set_numerics
from engine.model.loss_directions import hessian_product, root_product
from engine.model.outputs import Prediction, predict
from engine.model.preserve_state import preserve_state
from engine.operators.blocks import Block

_SIGN_KEY = 0x5167
"""Tells the key of a sign from that of a sampled label."""
_SIGNS_AT_ONCE = 2**21
_TANGENT = -1
"""In place of a probe's number."""
_REMEDY = "leave `capacity.cross_check` out, or write it with operations that torch can differentiate twice"


@dataclass(kw_only=True)
class GaussNewton:
    """F over the examples that entered a job's factors, in the precision of its passes."""

    job: PassJob
    updates: int
    """Batches that entered; with a moving average, each weighs as it does there."""
    report: Callable[[], None]
    """Called after every batch."""
    _micro_batch: int | None = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the micro-batch of the collection."""
        self._micro_batch = self.job.micro_batch

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Hold the model still, as a collection does."""
        job = self.job
        with (
            preserve_state(job.model, job.dtype),
            set_numerics(job.numerics, job.heard),
            _twice_differentiable(job.model),
        ):
            yield

    def products(self, blocks: Sequence[Block], vectors: Sequence[Tensor]) -> list[Tensor]:
        """Compute ``F_b v_b`` of each block b in one pass over the data.

        Args:
            blocks: The blocks.
            vectors: One vector v_b, shape (size,), for each block, on any device.

        Returns:
            The products, shape (size,) each, in the order of ``blocks`` and on the devices of their vectors.

        Raises:
            ModelRefused: If the model cannot be differentiated twice.

        Memory:
            One vector each; the graph of one micro-batch twice over, and the gradients of the blocks' parameters.
        """
        totals = [torch.zeros_like(vector, device=self.job.workspace.machine.device) for vector in vectors]
        placed = [vector.to(self.job.workspace.machine.device) for vector in vectors]
        flaws = torch.zeros(len(blocks), dtype=self.job.dtype, device=self.job.workspace.machine.device)

        def enter(prediction: Prediction, index: Tensor, parameters: dict[str, Tensor], weight: float) -> None:
            tangent = _signs(prediction.outputs, index, self.job.collection.seed, _TANGENT)
            found = [
                _product(block, vector, tangent, prediction, parameters, self.job)
                for block, vector in zip(blocks, placed, strict=True)
            ]
            for place, (product, flaw) in enumerate(found):
                totals[place].add_(product, alpha=weight)
                flaws[place] = torch.maximum(flaws[place], flaw)

        divisor = self._pass(blocks, enter)
        self._require_adjoint(blocks, flaws.tolist())
        return [total.div_(divisor).to(vector.device) for total, vector in zip(totals, vectors, strict=True)]

    def probes(self, blocks: Sequence[Block], numbers: Sequence[int], seed: int) -> list[list[Tensor]]:
        """Compute ``w / √W`` of each block for each probe in one pass over the data.

        Its squared norm is the probe's estimate of the block's trace, and ``w`` itself points where F curves most.

        Args:
            blocks: The blocks.
            numbers: Numbers of the probes, which key their random signs.
            seed: Seed of those signs.

        Returns:
            For each probe one vector per block, shape (size,), on the device of the passes.

        Raises:
            ModelRefused: If the model refuses a batch.

        Memory:
            ``2 · len(numbers)`` vectors of each block.
        """
        device = self.job.workspace.machine.device
        totals = [[torch.zeros(block.size, dtype=self.job.dtype, device=device) for block in blocks] for _ in numbers]

        def enter(prediction: Prediction, index: Tensor, parameters: dict[str, Tensor], weight: float) -> None:
            # all of them before any is added: a slice that runs out of memory enters again
            found = []
            for number in numbers:
                probe = _signs(prediction.outputs, index, seed, number)
                direction = root_product(prediction, probe, self.job.task)
                gradients = _pulled_back(prediction.outputs, parameters, direction, last=number == numbers[-1])
                found.append([block.join(gradients) for block in blocks])
            for total, vectors in zip(totals, found, strict=True):
                for own, vector in zip(total, vectors, strict=True):
                    own.add_(vector, alpha=weight**0.5)

        divisor = self._pass(blocks, enter)
        return [[own.div_(divisor**0.5) for own in total] for total in totals]

    def _pass(
        self, blocks: Sequence[Block], enter: Callable[[Prediction, Tensor, dict[str, Tensor], float], None]
    ) -> float:
        """Let every batch of the collection ``enter``; the total weight of the loss terms."""
        job, collection = self.job, self.job.collection
        names = {piece.parameter for block in blocks for piece in block.pieces}
        parameters: dict[str, Tensor] = {
            name: parameter for name, parameter in job.model.named_parameters(remove_duplicate=False) if name in names
        }
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        divisor, update = 0.0, 0
        # a model that draws numbers in evaluation mode draws those of the collection
        torch.manual_seed(collection.seed)
        try:
            for place, arrived in enumerate(job.stream()):
                job.workspace.ports.raise_if_cancelled()
                if place % collection.update_freq == 0:
                    past = 1.0 if collection.ema_decay is None else collection.ema_decay
                    weight = past ** (self.updates - 1 - update)
                    divisor += weight * self._entered(job.moved(arrived), parameters, weight, enter)
                    update += 1
                self.report()
        finally:
            for parameter in parameters.values():
                parameter.requires_grad_(False)
        return divisor

    def _require_adjoint(self, blocks: Sequence[Block], flaws: Sequence[float]) -> None:
        # also where they are not finite
        broken = [
            block
            for block, flaw in zip(blocks, flaws, strict=True)
            if not flaw <= torch.finfo(self.job.dtype).eps ** 0.5
        ]
        if broken:
            raise ModelRefused(
                "the model cannot be differentiated twice: an operation between the parameters of "
                f"`{broken[0].name}` and the outputs has a gradient without a gradient of its own; {_REMEDY}",
                layer=broken[0].name,
                pointer="/capacity/cross_check",
            )

    def _entered(
        self,
        batch: Batch,
        parameters: dict[str, Tensor],
        weight: float,
        enter: Callable[[Prediction, Tensor, dict[str, Tensor], float], None],
    ) -> float:
        """Let the slices of one batch enter; halve them where memory runs out."""
        exhausted = False
        size = min(self._micro_batch or batch.size, batch.size)
        if size < batch.size:
            return sum(self._entered(part, parameters, weight, enter) for part in batch.slices(size))
        state = torch.get_rng_state()
        try:
            with torch.enable_grad():
                prediction = predict(self.job.model, batch, self.job.task)
                if prediction.terms and prediction.outputs.requires_grad:
                    enter(prediction, batch.index, parameters, weight)
                return prediction.divisor
        except (EngineError, Unwinding):
            raise
        except Exception as error:
            exhausted = ran_out_of_memory(error) and batch.size > 1
            if not exhausted:
                if ran_out_of_memory(error):
                    raise
                raise ModelRefused(
                    f"the model cannot be differentiated twice: {type(error).__name__}: {str(error)[:500]}; {_REMEDY}",
                    pointer="/capacity/cross_check",
                ) from error
        # outside of the except block, whose traceback holds the graph
        free_memory(self.job.workspace.machine.device)
        torch.set_rng_state(state)
        self._micro_batch = -(-batch.size // 2)
        self.job.workspace.ports.log(
            "warning", f"the cross-check ran out of memory; it goes on with {self._micro_batch} examples at a time"
        )
        return self._entered(batch, parameters, weight, enter)


def _product(
    block: Block, vector: Tensor, tangent: Tensor, prediction: Prediction, parameters: dict[str, Tensor], job: PassJob
) -> tuple[Tensor, Tensor]:
    """``Σ_n J_nᵀ H_n J_n v`` of the examples behind ``prediction``, and how far ``J`` is from the adjoint of ``Jᵀ``."""
    outputs = prediction.outputs
    own = {piece.parameter: parameters[piece.parameter] for piece in block.pieces}
    # J v is the same at any u; another u than zero shows whether it is J v
    tangent = tangent.clone().requires_grad_()
    gradients = torch.autograd.grad(outputs, list(own.values()), tangent, create_graph=True, materialize_grads=True)
    inner = block.inner(dict(zip(own, gradients, strict=True)), vector)
    if not inner.requires_grad:
        # the block does not reach the outputs
        return torch.zeros_like(vector), inner.detach().abs()
    (pushed,) = torch.autograd.grad(inner, tangent, materialize_grads=True)
    precision = torch.finfo(job.dtype)
    norms = torch.stack([torch.linalg.vector_norm(gradient.detach()) for gradient in gradients])
    # the last summand is what rounding may leave of a product of vectors that are nearly orthogonal
    size = torch.linalg.vector_norm(pushed) + inner.detach().abs()
    size += precision.eps**0.5 * torch.linalg.vector_norm(norms) * torch.linalg.vector_norm(vector)
    flaw = (inner.detach() - (tangent.detach() * pushed).sum()).abs() / size.clamp_min(precision.tiny)
    del gradients, inner
    direction = hessian_product(prediction, pushed, job.task)
    return block.join(_pulled_back(outputs, own, direction, last=False)), flaw


def _pulled_back(outputs: Tensor, parameters: dict[str, Tensor], direction: Tensor, *, last: bool) -> dict[str, Tensor]:
    found = torch.autograd.grad(
        outputs, list(parameters.values()), direction, retain_graph=not last, materialize_grads=True
    )
    return dict(zip(parameters, found, strict=True))


def _signs(outputs: Tensor, index: Tensor, seed: int, probe: int) -> Tensor:
    """Independent signs (N, R, C), a function of (seed, probe, example, term, output)."""
    examples, terms, width = outputs.shape
    signs = torch.empty(examples * terms, width, dtype=outputs.dtype, device=outputs.device)
    example = index.repeat_interleave(terms)
    term = torch.arange(terms, device=outputs.device).repeat(examples)
    component = torch.arange(width, device=outputs.device)[None, :]
    rows = max(1, _SIGNS_AT_ONCE // max(width, 1))
    for first in range(0, examples * terms, rows):
        part = slice(first, first + rows)
        drawn = uniforms(seed, _SIGN_KEY, probe, example[part, None], term[part, None], component)
        signs[part] = torch.where(drawn < 0.5, -1.0, 1.0)
    return signs.view(outputs.shape)


@contextlib.contextmanager
def _twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Keep the model from what has no second gradient: fused attention, cuDNN's recurrent layers, sparse rows."""
    sparse = [module for module in model.modules() if getattr(module, "sparse", None) is True]
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    before = torch.backends.cudnn.enabled
    try:
        torch.backends.cudnn.enabled = before and not recurrent
        for module in sparse:
            module.sparse = False  # type: ignore[assignment]
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cudnn.enabled = before
        for module in sparse:
            module.sparse = True  # type: ignore[assignment]
