"""The gradient that a job's directions are made of: that of the data's mean loss, or one of the caller's own."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.artifacts import load_sealed, save_sealed
from engine.collection.parameter_windows import list_parameters
from engine.collection.pass_job import PassJob
from engine.collection.ranks.joined_job import require_one_rank
from engine.errors import UsageError, WrongShape
from engine.factors.factor_set import FactorSet, LayerFacts, ParameterShape
from engine.factors.kronecker_factors import digest
from engine.layers.coverage import survey_layers
from engine.memory.plan import readable_bytes
from engine.operators.data_gradient import GradientPass, RowInputs, row_inputs
from engine.operators.parameter_space import ParameterSpace, few_names
from engine.workspace import Workspace

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
