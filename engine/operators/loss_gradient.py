"""The gradient that a job's directions are made of: that of the data's mean loss, or one of the caller's own.

The inputs behind the gradient rows that a layer's G is kept as: C of the data's own gradient ``V = Sᵀ C``.

While the gradient is taken, every call of the layer shows the rows that entered it and, later, the gradient of its
output. Each gradient row is held against the next row that G keeps: the two are the same number for number, up to what
storing has rounded, or the layer's rows are not those of these examples in this order, and the general route is taken.
Rows of zero add nothing to the gradient and are passed over on both sides. At the end ``Sᵀ C`` itself is held against
the gradient that autograd has.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.accumulation.output_gradients import watch_gradient
from engine.artifacts import load_sealed, save_sealed
from engine.collection.parameter_windows import list_parameters
from engine.collection.pass_job import PassJob
from engine.collection.ranks.joined_job import require_one_rank
from engine.errors import UsageError, WrongShape
from engine.factors.factor_set import FactorSet, LayerFacts, ParameterShape
from engine.factors.kronecker_factors import digest
from engine.factors.low_rank import LowRank
from engine.layers.coverage import survey_layers
from engine.layers.layer import TreatedLayer
from engine.memory.plan import readable_bytes
from engine.operators.data_gradient import GradientPass
from engine.operators.parameter_space import ParameterSpace, few_names
from engine.row_layout.layer_calls import entered_by
from engine.workspace import Workspace

_STORED = 8.0
"""Times ε of the storage that a row may differ by, of its length."""
_COMPUTED = 1e-4
"""The change of a row in float32 that another order of additions may bring, as a share of its length."""
_GRADIENT = 1e-2
"""The distance of ``Sᵀ C`` of 16-bit rows from the gradient that is allowed, as a share of its length."""


class RowInputs:
    """C of one layer, gathered row by row while the gradient is taken.

    Memory:
        T · in_dim numbers in the precision of the passes, and the rows of one slice.
    """

    def __init__(self, facts: LayerFacts, layer: TreatedLayer, rows: LowRank, dtype: torch.dtype) -> None:
        """Begin with zeros.

        Args:
            layer: Its module, as the survey treats it.
            rows: G, on the host.
            dtype: Precision of the passes.
        """
        self.facts = facts
        self.inner = torch.zeros(rows.count, facts.in_dim, dtype=dtype)
        """C but for 1/√w and the weight of a term, shape (T, in_dim), on the host."""
        self.why: str | None = None
        """Why the rows are not matched; None so far."""
        self._layer, self._rows = layer, rows
        norms = torch.linalg.vector_norm(rows.rows.to(torch.float32), dim=1) * rows.scales.to(torch.float32)
        self._places: Tensor = torch.nonzero(norms).flatten()
        """Rows that are not zero."""
        self._next = 0
        self._examples = 0
        self._arrived: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the layer while inside."""
        handle = self._layer.module.register_forward_hook(self._after, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            handle.remove()
            self._arrived.clear()

    def begin(self, examples: int) -> None:
        """Prepare for examples that go through the model together.

        Args:
            examples: How many.
        """
        self._examples = examples
        self._arrived.clear()

    def take(self, weight: float, *, weighed: bool) -> None:
        """Hold the slice's rows against those of G, and keep their inputs.

        Args:
            weight: Of the batch, as in the factors.
            weighed: Whether loss terms have weights of their own, so that rows of the gradient are no rows of G.
        """
        arrived, self._arrived = self._arrived, []
        if weighed:
            self._refuse("loss terms are weighed, and a row of the gradient is no multiple of a row of G")
        for gradients, inputs in arrived:
            if self.why is None:
                self._match(gradients, inputs, weight)

    def finished(self, gradient: Tensor, divisor: float) -> Tensor | None:
        """Return C of ``V = Sᵀ C``, or None where the rows are not matched, for the reason in ``why``.

        Args:
            gradient: V as autograd has it, shape (out_dim, in_dim), on the host.
            divisor: W.

        Returns:
            Shape (T, in_dim), in the precision of the passes.
        """
        if self.why is None and self._next < self._places.numel():
            self._refuse(f"G keeps {self._places.numel() - self._next} rows that the data's gradient does not have")
        if self.why is not None:
            return None
        inner = self.inner.mul_(math.sqrt(self._rows.weight) / divisor)
        wide = gradient.to(torch.float64)
        differs = float((self._rows.combine(inner.to(torch.float64)) - wide).norm())
        if differs > _GRADIENT * float(wide.norm()):
            self._refuse(f"the gradient made of them differs from the loss's by {differs / float(wide.norm()):.2g}")
            return None
        return inner

    def _refuse(self, why: str) -> None:
        self.why = self.why or why
        self._arrived.clear()

    def _after(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        if self.why is not None or not torch.is_grad_enabled():
            return None
        entered = entered_by(args, kwargs)
        if not self._layer.batch_first(entered, self._examples):
            self._refuse("the examples do not come first in its input")
            return None
        # a layer may be written to afterwards, and what the gradient meets must be what entered
        plain = self._layer.activation_rows(entered.detach().clone())
        return watch_gradient(output, partial(self._arrive, plain))

    def _arrive(self, inputs: Tensor, gradient: Tensor) -> None:
        if self.why is None:
            self._arrived.append((self._layer.gradient_rows(gradient.detach()), inputs))

    def _match(self, gradients: Tensor, inputs: Tensor, weight: float) -> None:
        """Hold rows of the gradient (P, out) against the next rows of G, and keep their inputs (P, in)."""
        if gradients.shape[0] != inputs.shape[0]:
            self._refuse("its positions in the input and in the output differ")
            return
        rows = gradients.to("cpu", torch.float64).mul_(math.sqrt(weight))
        norms = rows.norm(dim=1)
        some = torch.nonzero(norms).flatten()
        places = self._places[self._next : self._next + some.numel()]
        if places.numel() < some.numel():
            self._refuse("G keeps fewer rows than the data's gradient has: they were made one, or pooled")
            return
        kept = self._rows.rows[places].to(torch.float64) * self._rows.scales[places, None].to("cpu")
        allowed = max(_STORED * torch.finfo(self._rows.rows.dtype).eps, _COMPUTED)
        if bool(((rows[some] - kept).norm(dim=1) > allowed * norms[some]).any()):
            self._refuse("they are not those of the data's gradient, in its order")
            return
        own = inputs.to("cpu", self.inner.dtype)[some]
        wide = self.inner[:, : own.shape[1]] if self._layer.weight else self.inner[:, :0]
        wide[places] = own.mul(math.sqrt(weight))[:, : wide.shape[1]]
        if self._layer.bias:
            self.inner[places, -1] = math.sqrt(weight)
        self._next += some.numel()


def row_inputs(
    factors: FactorSet, treated: Sequence[TreatedLayer], dtype: torch.dtype, fits: Callable[[int], bool]
) -> tuple[dict[int, RowInputs], dict[int, str]]:
    """Return what gathers the inputs of every layer whose G is kept as gradient rows, where so many bytes ``fits``.

    Watchers by ordinal; and for every other layer whose G is kept so, why there is none.
    """
    known = {layer.name: layer for layer in treated}
    found: dict[int, RowInputs] = {}
    refused: dict[int, str] = {}
    held = 0
    for facts in factors.layers:
        if facts.representation_G != "woodbury":
            continue
        layer = known.get(facts.name)
        size = facts.positions * facts.in_dim * dtype.itemsize
        if factors.collection.fisher != "empirical":
            refused[facts.ordinal] = (
                f"G is kept of `fisher: {factors.collection.fisher}`, in whose rows the data's gradient does not lie"
            )
        elif facts.sharing != "expand":
            refused[facts.ordinal] = "positions are pooled before they enter G (`sharing: reduce`)"
        elif layer is None or layer.groups > 1 or layer.also or len(layer.roles) > 1 or facts.form != "kronecker":
            refused[facts.ordinal] = "it is no module of its own, called by itself"
        elif not fits(held + size):
            refused[facts.ordinal] = f"the inputs of its rows take {size} bytes more than are free"
        else:
            rows = factors.load(facts.ordinal).G
            if isinstance(rows, LowRank):
                found[facts.ordinal] = RowInputs(facts, layer, rows, dtype)
                held += size
    return found, refused


POINTER = "/natural_gradient/gradient"
_KEPT = "natural_gradient/gradient.json"


@dataclass(kw_only=True)
class LossGradient:
    """A gradient, and what is known of how it came about."""

    flat: Tensor
    """(P,) in the canonical order, on the host."""
    divisor: float = 1.0
    """W of the data's gradient."""
    rows: dict[int, RowInputs] = field(default_factory=dict)
    """Inputs behind the gradient rows of layers, by ordinal."""
    refused: dict[int, str] = field(default_factory=dict)
    """Why there are none, by ordinal, of the other layers that keep gradient rows."""

    @property
    def sha256(self) -> str:
        """SHA-256 over dtype, length and bytes."""
        return digest(self.flat)

    def inner(self, facts: LayerFacts, matrix: Tensor) -> Tensor | None:
        """Return C of a layer whose gradient is ``Uᵀ C / √w`` of the rows that its G is kept as, and let go of it.

        Args:
            matrix: Its gradient, shape (out_dim, in_dim).

        Returns:
            Shape (T, in_dim); None where there is none, for the reason in ``refused`` if the layer keeps rows.
        """
        watched = self.rows.pop(facts.ordinal, None)
        if watched is None:
            return None
        found = watched.finished(matrix, self.divisor)
        if watched.why is not None:
            self.refused[facts.ordinal] = watched.why
        return found


def require_gradient(workspace: Workspace, *, named: bool) -> None:
    """Refuse a gradient that does not fit the model, before anything is collected.

    Args:
        workspace: The job.
        named: Whether the options name a file.
    """
    given = workspace.inputs.gradient
    if given is None and named:
        raise UsageError(
            "`natural_gradient.gradient` names a file, which is read by jobs alone; in a notebook give the gradient to "
            "`kronoscope.local.operator(…).power(-α)`",
            pointer=POINTER,
        )
    if given is None and (workspace.inputs.model is None or workspace.inputs.batches is None):
        raise UsageError(
            "stored factors hold neither a model nor data to take the gradient of; give `natural_gradient.gradient`",
            pointer=POINTER,
        )
    if given is None:
        require_one_rank(workspace, "natural_gradient.gradient")
    if given is not None and workspace.inputs.model is not None:
        require_fit(given, list_parameters(workspace.inputs.model))


def require_fit(gradient: Mapping[str, Tensor], parameters: Sequence[ParameterShape]) -> None:
    """Check a caller's gradient against the trainable parameters.

    Args:
        gradient: Tensors by parameter.
        parameters: The parameters, in the canonical order.

    Raises:
        WrongShape: If a name is unknown or missing, or a shape differs; both lengths are named.
        UsageError: If a tensor holds no floating-point numbers, or NaN or Inf.
    """
    shapes = {each.name: each.shape for each in parameters}
    wanted, got = (sum(map(math.prod, each)) for each in (shapes.values(), (own.shape for own in gradient.values())))
    lengths = f"the gradient holds {got:,} numbers, and the trainable parameters {wanted:,}"
    unknown = sorted(set(gradient) - set(shapes))
    if unknown:
        raise WrongShape(
            f"the gradient's `{unknown[0]}` is no trainable parameter of the model; the parameters are "
            f"{few_names(list(shapes))} ({lengths})",
            pointer=POINTER,
        )
    for name, shape in shapes.items():
        if name not in gradient:
            raise WrongShape(
                f"the gradient has no tensor `{name}` of shape {shape}; give one for each trainable parameter, of "
                f"zeros where there is no gradient ({lengths})",
                pointer=POINTER,
            )
        own = gradient[name]
        if tuple(own.shape) != shape:
            raise WrongShape(
                f"the gradient's `{name}` must have the parameter's shape {shape} (got {tuple(own.shape)}); {lengths}",
                pointer=POINTER,
            )
        if not own.is_floating_point():
            raise UsageError(
                f"the gradient's `{name}` must hold floating-point numbers (got {own.dtype}); save it as float32",
                pointer=POINTER,
            )
        bad = own.numel() - int(torch.isfinite(own).sum())
        if bad:
            raise UsageError(
                f"the gradient's `{name}` holds {bad} NaN or infinite numbers of {own.numel()}; give finite ones",
                pointer=POINTER,
            )


def given_gradient(gradient: Mapping[str, Tensor], space: ParameterSpace, workspace: Workspace) -> LossGradient:
    """Return a caller's gradient, the same one in every attempt.

    Args:
        gradient: Tensors by parameter.
        space: The parameters, in order.
        workspace: The job, whose scratch place remembers which gradient its first attempt had.

    Returns:
        The gradient, in float32 or wider.

    Raises:
        UsageError: If it does not fit the parameters, or is another than that of an earlier attempt.
    """
    require_fit(gradient, space.parameters)
    dtype = torch.float64 if any(own.dtype == torch.float64 for own in gradient.values()) else torch.float32
    found = LossGradient(flat=space.flatten({name: own.to(dtype) for name, own in gradient.items()}))
    scratch = workspace.ports.scratch
    if scratch is not None and workspace.saves_checkpoints:
        try:
            before = load_sealed(scratch, _KEPT)["sha256"]
        except FileNotFoundError:
            save_sealed(scratch, _KEPT, {"sha256": found.sha256})
            before = found.sha256
        if before != found.sha256:
            raise UsageError(
                "the gradient in the file is another than when this job began, and some rows are of the first one; put "
                "it back, or submit a new job",
                pointer=POINTER,
            )
    return found


def data_gradient(
    workspace: Workspace, factors: FactorSet, space: ParameterSpace, report: Callable[[], None], *, rows: bool
) -> LossGradient:
    """Return the gradient of the data's mean loss.

    Memory:
        Twice the parameters, the graph of a slice, and T · in_dim numbers of each layer that keeps gradient rows.
    """
    job = PassJob.again(workspace, factors)
    watched: dict[int, RowInputs] = {}
    refused: dict[int, str] = {}
    if rows:
        treated = survey_layers(job.model, factors.collection).treated
        watched, refused = row_inputs(
            factors, treated, job.dtype, lambda size: workspace.machine.guard.fits(host_bytes=size)
        )
        for watcher in watched.values():
            size = watcher.inner.numel() * watcher.inner.element_size()
            workspace.ports.log("debug", f"layer `{watcher.facts.name}`: {readable_bytes(size)} of its rows' inputs")
    names = [each.name for each in space.parameters]
    run = GradientPass(
        job=job, names=names, updates=factors.updates, report=report, watchers=tuple(watched.values())
    ).run()
    return LossGradient(flat=space.flatten(run.by_name), divisor=run.divisor, rows=watched, refused=refused)
