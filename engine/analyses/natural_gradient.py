"""`natural_gradient`: the gradient of the mean loss times a power of the damped curvature, layer by layer."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from catalog.analyses.natural_gradient import (
    ModelDirection,
    NaturalGradientMetrics,
    NaturalGradientParams,
    NaturalGradientSummary,
)
from engine.analyses.costs.natural_gradient import natural_gradient_cost
from engine.analyses.layer_analysis import LayerAnalysis
from engine.analyses.metrics.layer_direction import LayerGradient, layer_metrics, summed
from engine.errors import UsageError
from engine.factors.factor_set import GIVEN_MATRIX, FactorSet
from engine.factors.kronecker_factors import Factors
from engine.linalg.eigenbasis import Eigenbasis
from engine.measurement.layer_measurement import Measured
from engine.operators.kronecker.layer_store import KnownLayer, OperatorOptions
from engine.operators.kronecker_operator import KroneckerOperator
from engine.operators.loss_gradient import data_gradient, given_gradient, require_gradient

KIND = "natural_gradient"
FOLDER = "directions"
FORMAT = "kronoscope-directions/1"
_MOST_NAMED = 3


class NaturalGradient(LayerAnalysis[NaturalGradientParams]):
    """The directions of each layer: the gradient times powers of the damped curvature.

    Memory:
        The gradient, the directions where they are kept, one layer's factors and eigenvectors, and its numbers some
        five times in float64; while the data's gradient is taken, the graph of a slice.
    """

    kind = KIND
    cost = staticmethod(natural_gradient_cost)
    _directions: Tensor | None = None
    """(P, k) on the host, in the gradient's precision; None where they are not kept."""
    _batches: int | None = None
    _steps: int = 0

    @override
    def require(self) -> None:
        require_gradient(self.workspace, named=self.params.gradient is not None)

    @override
    def prepare(self) -> None:
        _require_directions(self.params, self.whole)
        machine = self.workspace.machine
        self._known: dict[int, KnownLayer] = {}
        self._operator = KroneckerOperator(
            self.whole,
            OperatorOptions(
                of=self.params.of,
                kind=self.params.damping,
                stabilisation=self.workspace.options.stabilisation,
                device=machine.device,
                guard=machine.guard,
                resident_bytes=0,
                known=self._known.get,
            ),
        )
        self._space = self._operator.space
        self._take_gradient()

    def _take_gradient(self) -> None:
        """Take the gradient, that of the data in a pass of its own."""
        workspace = self.workspace
        with workspace.machine.operation("gradient", "natural_gradient"):
            if workspace.inputs.gradient is not None:
                self._batches = 0
                self._gradient = given_gradient(workspace.inputs.gradient, self._space, workspace)
            else:
                examples, size = workspace.inputs.examples, self.whole.collection.batch_size
                self._batches = None if examples is None else -(-examples // size)
                # EK-FAC's eigenvalues are not those of the rows, and without damping they are singular
                rows = self.params.of == "kfac" and self.params.damping != "none"
                self._gradient = data_gradient(workspace, self.whole, self._space, self._report_step, rows=rows)
                self._batches = self._steps
        if "directions" in workspace.options.keep:
            self._directions = torch.zeros(self._space.size, len(self.params.powers), dtype=self._gradient.flat.dtype)

    @override
    def report(self, done: int) -> None:
        self._report_step()

    def _report_step(self) -> None:
        """Report one more batch or layer."""
        self._steps += 1
        total = None if self._batches is None else self._batches + len(self.whole.layers)
        self.workspace.ports.report(KIND, self._steps, total, "steps")

    @override
    def layer(self, layer: Measured) -> NaturalGradientMetrics:
        facts = layer.facts
        factors = self.whole.load(facts.ordinal)
        self._known[facts.ordinal] = KnownLayer(damping=layer.damping, bases=_bases(layer, factors, self._device))
        matrix = self._space.gather(facts, self._gradient.flat[:, None])[:, 0, :]
        inner, operator = self._gradient.inner(facts, matrix), self._operator.layer(facts.name)
        # EK-FAC's eigenvalues may all be zero where A and G are not
        curved = operator.corrected is None or bool(operator.damping.joint) or bool(operator.corrected.any())
        own = LayerGradient(
            facts=facts,
            operator=operator,
            factors=factors,
            matrix=matrix.to(self._device, torch.float64),
            inner=inner,
            curved=layer.status == "covered" and curved,
        )
        why = self._gradient.refused.get(facts.ordinal)
        if facts.representation_G == "woodbury" and inner is None and why is None:
            why = self._why_no_rows
        metrics, found = layer_metrics(own, self.params, self._space, why)
        if self._directions is not None:
            self._space.scatter(facts, found.to("cpu", self._directions.dtype), self._directions)
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

    @override
    def finish(self) -> None:
        # the directions by parameter, one file for each power
        if self._directions is None:
            return
        for column, power in enumerate(self.params.powers):
            tensors = self._space.unflatten(self._directions[:, column].contiguous())
            metadata = {
                "format": FORMAT,
                "power": repr(power),
                "of": self.params.of,
                "damping": self.params.damping,
                "gradient_sha256": self._gradient.sha256,
            }
            self.workspace.ports.artifacts.save_tensors(_artifact(power), tensors, metadata)

    @override
    def summary(self) -> NaturalGradientSummary:
        rows = [self.measured[facts.ordinal] for facts in self.whole.layers]
        norm = float(self._gradient.flat.norm(dtype=torch.float64))
        covered = math.fsum(row.gradient_norm**2 for row in rows)
        uncovered = self._operator.uncovered
        share = max(1 - covered / norm**2, 0.0) if uncovered else 0.0
        coarse = [facts for facts in self.whole.layers if self.measured[facts.ordinal].below_rounding]
        if coarse:
            self._warn([(facts.name, self.measured[facts.ordinal]) for facts in coarse])
        return NaturalGradientSummary(
            coverage=self.coverage,
            layers=len(rows),
            branches=self.branches,
            of=self.params.of,
            damping=self.params.damping,
            gradient="data" if self.workspace.inputs.gradient is None else "file",
            gradient_norm=norm,
            gradient_sha256=self._gradient.sha256,
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
            artifact=None if self._directions is None else _artifact(power),
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
        side = whole.load(facts.ordinal).side_G
        if not side.has_basis:
            asked = f"power {others[0]:g}" if others else "damping none"
            raise UsageError(
                f"layer `{facts.name}`: its G is kept as `{side.kind}`, which has no eigenvectors, and {asked} needs "
                "them; take `natural_gradient.power: 1` with damping, or `woodbury.policy: dense`",
                layer=facts.name,
                pointer="/natural_gradient/power",
            )


def _bases(
    layer: Measured, factors: Factors, device: torch.device
) -> dict[Literal["A", "G"], Callable[[], Eigenbasis]]:
    """The eigenvectors that the job has made of a layer's sides, where it has."""

    def read(side: Literal["A", "G"]) -> Eigenbasis:
        found = layer.load_basis(side)
        if found.vectors is None:
            raise ValueError(f"layer `{layer.facts.name}`: no eigenvectors of {side} were kept")
        # the rounding of 16 bits may exceed any damping: of such factors eigenvalues below zero count as zero
        exact = found.signed is not None and (factors.A if side == "A" else factors.dense_G).element_size() > 2
        values = found.signed if exact and found.signed is not None else found.values
        values = values[values.numel() - found.vectors.shape[1] :]
        return Eigenbasis(values.to("cpu", torch.float64), found.vectors.to(device))

    spectra: dict[Literal["A", "G"], Tensor | None] = {"A": layer.A.spectrum, "G": layer.G.spectrum}
    return {side: partial(read, side) for side, spectrum in spectra.items() if spectrum is not None}


def _artifact(power: float) -> str:
    return f"{FOLDER}/{power!r}.safetensors"
