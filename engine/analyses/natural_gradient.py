"""`natural_gradient`: the gradient of the mean loss times a power of the damped curvature, layer by layer."""

import math
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from catalog.analyses.analysis import LayerResult
from catalog.analyses.natural_gradient import (
    ModelDirection,
    NaturalGradientMetrics,
    NaturalGradientParams,
    NaturalGradientSummary,
)
from engine.analyses.coverage_summary import coverage
from engine.analyses.metrics.layer_direction import LayerGradient, layer_metrics, summed
from engine.analyses.metrics.loss_gradient import LossGradient, data_gradient, given_gradient, require_gradient
from engine.collect import collect_or_read
from engine.errors import UsageError
from engine.factors.factor_set import GIVEN_MATRIX, FactorSet
from engine.factors.kronecker_factors import Factors
from engine.linalg.linear_operator import Structured
from engine.measurement.finite_numbers import finite_summary
from engine.measurement.layer_measurement import Measured, measure_layers
from engine.measurement.layer_results import covered_result, uncovered_results
from engine.measurement.representation_record import branch_counts
from engine.operators.kronecker.eigenbasis import SideBasis
from engine.operators.kronecker.layer_store import KnownLayer, OperatorOptions
from engine.operators.kronecker_operator import KroneckerOperator
from engine.operators.parameter_space import ParameterSpace
from engine.workspace import Workspace

KIND = "natural_gradient"
FOLDER = "directions"
FORMAT = "kronoscope-directions/1"
_MOST_NAMED = 3


def natural_gradient(
    params: NaturalGradientParams, workspace: Workspace
) -> Generator[LayerResult, None, NaturalGradientSummary]:
    """Yield what is told of each layer's directions; the layers that are not covered follow.

    Memory:
        The gradient, the directions where they are kept, one layer's factors and eigenvectors, and its numbers some
        five times in float64; while the data's gradient is taken, the graph of a slice.
    """
    require_gradient(params, workspace)
    whole = collect_or_read(workspace)
    _require_directions(params, whole)
    run = _Run(params=params, workspace=workspace, whole=whole)
    run.take_gradient()
    for layer in measure_layers(workspace):
        workspace.ports.raise_if_cancelled()
        with workspace.machine.operation(f"natural gradient of layer {layer.facts.ordinal}", "natural_gradient"):
            metrics = run.measured(layer)
        if (KIND, layer.facts.ordinal) not in workspace.resume.completed:
            yield covered_result(KIND, layer, metrics)
        run.report()
    run.write()
    yield from uncovered_results(KIND, workspace)
    return finite_summary(run.summary(), workspace.ports.log)


def _require_directions(params: NaturalGradientParams, whole: FactorSet) -> None:
    """Refuse by name what has no direction, before anything is decomposed."""
    for facts in whole.layers:
        if facts.module == GIVEN_MATRIX:
            raise UsageError(
                "a single matrix belongs to no parameters; give the factors of a model", pointer="/factors"
            )
        if facts.representation_G == "diagonal_sketch":
            raise UsageError(
                f"layer `{facts.name}`: a sketch of its G is kept, which is near it and not it, so that no direction "
                "comes of it; collect with a larger `memory.host`, or fewer examples",
                layer=facts.name,
                pointer="/natural_gradient",
            )
        others = [power for power in params.powers if abs(power) != 1]
        if params.of == "ekfac" or not (others or params.damping == "none") or facts.representation_G == "dense":
            continue
        side = whole.load(facts.ordinal).G
        if isinstance(side, Structured) and not side.has_basis:
            asked = f"power {others[0]:g}" if others else "damping none"
            raise UsageError(
                f"layer `{facts.name}`: its G is kept as `{side.kind}`, which has no eigenvectors, and {asked} needs "
                "them; take `natural_gradient.power: 1` with damping, or `woodbury.policy: dense`",
                layer=facts.name,
                pointer="/natural_gradient/power",
            )


@dataclass(kw_only=True)
class _Run:
    """One natural gradient under way."""

    params: NaturalGradientParams
    workspace: Workspace
    whole: FactorSet
    space: ParameterSpace = field(init=False)
    operator: KroneckerOperator = field(init=False)
    gradient: LossGradient = field(init=False)
    directions: Tensor | None = field(init=False, default=None)
    """(P, k) on the host, in the gradient's precision; None where they are not kept."""
    rows: dict[int, NaturalGradientMetrics] = field(default_factory=dict)
    _known: dict[int, KnownLayer] = field(default_factory=dict)
    _done: int = 0
    _batches: int | None = None

    def __post_init__(self) -> None:
        """Check that the factors can be used so."""
        machine, params = self.workspace.machine, self.params
        self.operator = KroneckerOperator(
            self.whole,
            OperatorOptions(
                of=params.of,
                kind=params.damping,
                stabilisation=self.workspace.options.stabilisation,
                device=machine.device,
                guard=machine.guard,
                resident_bytes=0,
                known=self._known.get,
            ),
        )
        self.space = self.operator.space

    def take_gradient(self) -> None:
        """Take the gradient, that of the data in a pass of its own."""
        workspace = self.workspace
        with workspace.machine.operation("gradient", "natural_gradient"):
            if workspace.inputs.gradient is not None:
                self._batches = 0
                self.gradient = given_gradient(workspace.inputs.gradient, self.space, workspace)
            else:
                examples, size = workspace.inputs.examples, self.whole.collection.batch_size
                self._batches = None if examples is None else -(-examples // size)
                # EK-FAC's eigenvalues are not those of the rows, and without damping they are singular
                rows = self.params.of == "kfac" and self.params.damping != "none"
                self.gradient = data_gradient(workspace, self.whole, self.space, self.report, rows=rows)
                self._batches = self._done
        if "directions" in workspace.options.keep:
            self.directions = torch.zeros(self.space.size, len(self.params.powers), dtype=self.gradient.flat.dtype)

    def report(self) -> None:
        """Report one more batch or layer."""
        self._done += 1
        total = None if self._batches is None else self._batches + len(self.whole.layers)
        self.workspace.ports.report(KIND, self._done, total, "steps")

    def measured(self, layer: Measured) -> NaturalGradientMetrics:
        """Compute one layer's directions, and keep them where that is asked for."""
        facts = layer.facts
        factors = self.whole.load(facts.ordinal)
        self._known[facts.ordinal] = KnownLayer(damping=layer.damping, bases=_bases(layer, factors, self._device))
        matrix = self.space.gather(facts, self.gradient.flat[:, None])[:, 0, :]
        inner = self.gradient.inner(facts, matrix)
        own = LayerGradient(
            facts=facts,
            operator=self.operator.layer(facts.name),
            factors=factors,
            matrix=matrix.to(self._device, torch.float64),
            inner=inner,
            curved=layer.status == "covered",
        )
        why = self.gradient.refused.get(facts.ordinal)
        if facts.representation_G == "woodbury" and inner is None and why is None:
            why = self._why_no_rows
        metrics, found = layer_metrics(own, self.params, self.space, why)
        if self.directions is not None:
            self.space.scatter(facts, found.to("cpu", self.directions.dtype), self.directions)
        self.rows[facts.ordinal] = metrics
        return metrics

    @property
    def _device(self) -> torch.device:
        return self.workspace.machine.device

    @property
    def _why_no_rows(self) -> str:
        if self.workspace.inputs.gradient is not None:
            return "the gradient is not that of the data"
        if self.params.of == "ekfac":
            return "EK-FAC's eigenvalues are not those of the rows"
        return "without damping the rows are singular"

    def write(self) -> None:
        """Write the directions by parameter, one file for each power."""
        if self.directions is None:
            return
        for column, power in enumerate(self.params.powers):
            tensors = self.space.unflatten(self.directions[:, column].contiguous())
            metadata = {
                "format": FORMAT,
                "power": repr(power),
                "of": self.params.of,
                "damping": self.params.damping,
                "gradient_sha256": self.gradient.sha256,
            }
            self.workspace.ports.artifacts.save_tensors(_artifact(power), tensors, metadata)

    def summary(self) -> NaturalGradientSummary:
        """Add up the layers, in the model's order, and warn of what rounding has spoilt."""
        rows = [self.rows[facts.ordinal] for facts in self.whole.layers]
        norm = float(self.gradient.flat.norm(dtype=torch.float64))
        covered = math.fsum(row.gradient_norm**2 for row in rows)
        uncovered = self.operator.uncovered
        share = max(1 - covered / norm**2, 0.0) if uncovered else 0.0
        coarse = [facts for facts in self.whole.layers if self.rows[facts.ordinal].below_rounding]
        if coarse:
            self._warn([(facts.name, self.rows[facts.ordinal]) for facts in coarse])
        return NaturalGradientSummary(
            coverage=coverage(self.whole),
            layers=len(rows),
            branches=branch_counts(self.whole.layers),
            of=self.params.of,
            damping=self.params.damping,
            gradient="data" if self.workspace.inputs.gradient is None else "file",
            gradient_norm=norm,
            gradient_sha256=self.gradient.sha256,
            uncovered_share=share if norm > 0 else None,
            uncovered=uncovered,
            below_rounding=tuple(facts.name for facts in coarse),
            routes=dict(Counter(row.directions[0].route for row in rows)),
            directions=tuple(
                self._of_model(place, power, rows, covered) for place, power in enumerate(self.params.powers)
            ),
        )

    def _of_model(self, place: int, power: float, rows: list[NaturalGradientMetrics], squared: float) -> ModelDirection:
        own = [row.directions[place] for row in rows]
        norm = math.sqrt(math.fsum(each.norm**2 for each in own))
        inner = math.fsum(each.inner for each in own)
        curvature = summed([each.curvature for each in own])
        residuals = [each.residual for each in own if each.residual is not None]
        return ModelDirection(
            power=power,
            norm=norm,
            cosine=inner / (math.sqrt(squared) * norm) if squared > 0 and norm > 0 else None,
            inner=inner,
            effective_step=inner / squared if squared > 0 else None,
            curvature=curvature,
            best_step=inner / curvature if curvature else None,
            residual=max(residuals, default=None),
            artifact=None if self.directions is None else _artifact(power),
        )

    def _warn(self, coarse: list[tuple[str, NaturalGradientMetrics]]) -> None:
        def said(name: str, row: NaturalGradientMetrics) -> str:
            residual = next((each.residual for each in row.directions if each.residual is not None), None)
            solved = "" if residual is None else f", residual {residual:.2g}"
            return f"`{name}` (λ/λ_max {row.damping_share or 0:.2g}{solved})"

        worst = sorted(coarse, key=lambda each: each[1].damping_share or 0.0)[:_MOST_NAMED]
        more = f" and {len(coarse) - len(worst)} more" if len(coarse) > len(worst) else ""
        self.workspace.ports.log(
            "warning",
            f"λ is less than the factors' precision resolves in {', '.join(said(*each) for each in worst)}{more}: "
            "their directions may hold the rounding of the factors; raise `stabilisation.damping`, or take "
            "`collection.dtype: float64`",
        )


def _bases(layer: Measured, factors: Factors, device: torch.device) -> dict[Literal["A", "G"], Callable[[], SideBasis]]:
    """The eigenvectors that the job has made of a layer's sides, where it has."""

    def read(side: Literal["A", "G"], size: int) -> SideBasis:
        found = layer.load_basis(side)
        if found.vectors is None:
            raise ValueError(f"layer `{layer.facts.name}`: no eigenvectors of {side} were kept")
        # the rounding of 16 bits may exceed any damping: of such factors eigenvalues below zero count as zero
        exact = found.signed is not None and (factors.A if side == "A" else factors.dense_G).element_size() > 2
        values = found.signed if exact and found.signed is not None else found.values
        values = values[values.numel() - found.vectors.shape[1] :]
        return SideBasis(values.to("cpu", torch.float64), found.vectors.to(device), size)

    sizes: dict[Literal["A", "G"], Any] = {"A": layer.facts.in_dim, "G": layer.facts.out_dim}
    spectra = {"A": layer.spectrum_A, "G": layer.spectrum_G}
    return {side: partial(read, side, size) for side, size in sizes.items() if spectra[side] is not None}


def _artifact(power: float) -> str:
    return f"{FOLDER}/{power!r}.safetensors"
