"""`sensitivity`: the second-order change of the loss by K-FAC, of each layer's weights in each format.

For a change δW of a layer's weights the mean loss changes by about ``gᵀδW + ½ tr(G δW A δWᵀ)``, g its gradient at the
data's labels. Of a linear model under `mse` and `fisher: type2` this is the change itself.

References:
    LeCun, Denker & Solla (1990), Optimal brain damage
    Singh & Alistarh (2020), WoodFisher
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor
from typing_extensions import override

from catalog.analyses.sensitivity import (
    ChosenFormat,
    FormatChange,
    FormatTotal,
    SensitivityMetrics,
    SensitivityParams,
    SensitivitySummary,
    WeightFormat,
)
from catalog.requests.inputs import EMBEDDINGS
from engine.analyses.costs.natural_gradient import gradient_pass_terms
from engine.analyses.layer_analysis import LayerAnalysis
from engine.analyses.metrics.weight_formats import FormatChoice, choose_formats, format_bytes, in_format, states_bytes
from engine.collection.ranks.joined_job import require_one_rank
from engine.errors import UsageError
from engine.factors.factor_set import LayerFacts
from engine.measurement.layer_measurement import Measured
from engine.memory.plan import Term
from engine.operators.kronecker.layer_store import OperatorOptions
from engine.operators.kronecker_operator import KroneckerOperator
from engine.operators.loss_gradient import data_gradient
from engine.operators.parameter_space import ParameterSpace
from engine.planning.analysis_cost import Cost, PlannedJob

KIND = "sensitivity"
KEPT = "16 bits"


class Sensitivity(LayerAnalysis[SensitivityParams]):
    """The predicted change of each layer in each format, and the formats within the budget.

    Memory:
        Weights and gradient once each; of one layer its factors, and eight matrices of its numbers in float64; while
        the gradient is taken, the graph of a slice; while formats are chosen, ``states_bytes``.
    """

    kind = KIND

    @override
    def require(self) -> None:
        inputs = self.workspace.inputs
        if inputs.model is None or inputs.batches is None or inputs.task is None:
            raise UsageError(
                "stored factors hold no weights to change; give `model`, `data` and `task` in place of `factors`",
                pointer="/sensitivity",
            )
        if self.workspace.options.collection.fisher == "forward_only":
            raise UsageError(
                "`collection.fisher` is `forward_only`, which has no G, and so no change of the loss; take `mc` or "
                "`type2`",
                pointer="/collection/fisher",
            )
        require_one_rank(self.workspace, KIND)

    @override
    def prepare(self) -> None:
        inputs, machine = self.workspace.inputs, self.workspace.machine
        if inputs.model is None or inputs.task is None:
            raise ValueError("`require` asks for a model and a task")
        self._space = ParameterSpace.of(self.whole)
        tried = [facts.name for facts in self.whole.layers if _kept_since(facts) is None]
        if tried:
            options = OperatorOptions(device=machine.device, guard=machine.guard, resident_bytes=0)
            self._operator = KroneckerOperator(self.whole, options, tried)
        named = dict(inputs.model.named_parameters())
        self._weights = self._space.flatten({each.name: named[each.name].to("cpu") for each in self._space.parameters})
        self._steps = 0
        self._gradient: Tensor | None = None
        if inputs.task.type not in EMBEDDINGS:
            with machine.operation("gradient", KIND):
                found = data_gradient(self.workspace, self.whole, self._space, self._step, rows=False)
            self._gradient = found.flat
        self._require_budget()

    def _step(self) -> None:
        self._steps += 1
        examples, size = self.workspace.inputs.examples, self.whole.collection.batch_size
        self.workspace.ports.report(KIND, self._steps, None if examples is None else -(-examples // size), "batches")

    @property
    def _bytes_16(self) -> int:
        return 2 * self.whole.trainable_parameters

    @property
    def _budget_bytes(self) -> int | None:
        # as it is written: 0.29 of 100 bytes is 29, and 28 in floating point
        share = None if self.params.budget is None else Fraction(str(self.params.budget))
        return None if share is None else math.floor(share * self._bytes_16)

    def _require_budget(self) -> None:
        """Refuse a budget that no choice of formats meets: bytes follow from shapes alone."""
        budget = self._budget_bytes
        if budget is None:
            return
        least = self._bytes_16
        for facts in self.whole.layers:
            if _kept_since(facts) is None:
                sizes = [self._bytes_in(facts, name) for name in self.params.formats]
                least -= max(0, 2 * facts.parameter_count - min(sizes))
        if least > budget:
            raise UsageError(
                f"`sensitivity.budget` is {self.params.budget:g}, {budget:,} bytes, and with the smallest formats the "
                f"weights take {least:,}; take {math.ceil(1000 * least / self._bytes_16) / 1000:g} or more, or name "
                "smaller formats",
                pointer="/sensitivity/budget",
            )

    def _bytes_in(self, facts: LayerFacts, name: WeightFormat) -> int:
        bias = 2 * facts.out_dim if facts.bias else 0
        shape = facts.out_dim, facts.in_dim - facts.bias
        rows, columns = shape[::-1] if _is_table(facts) else shape
        return format_bytes(rows, columns, name, self.params) + bias

    @override
    def layer(self, layer: Measured) -> SensitivityMetrics:
        facts, reason = layer.facts, _kept_since(layer.facts)
        changes = () if reason is not None else self._changes(layer)
        least = min(changes, key=lambda each: each.predicted, default=None)
        return SensitivityMetrics(
            bytes_16=2 * facts.parameter_count,
            changes=changes,
            kept_since=reason,
            least=None if least is None else least.format,
            least_predicted=None if least is None else least.predicted,
            most_predicted=max((each.predicted for each in changes), default=None),
        )

    def _changes(self, layer: Measured) -> tuple[FormatChange, ...]:
        facts = layer.facts
        columns = facts.in_dim - facts.bias
        weights = self._matrix(facts, self._weights)[:, :columns]
        gradient = None if self._gradient is None else self._matrix(facts, self._gradient)[:, :columns]
        norm, found = float(weights.norm()), []
        for name in self.params.formats:
            # one vector of a table is a row of its parameter
            own = (
                in_format(weights.mT.contiguous(), name, self.params).mT
                if _is_table(facts)
                else in_format(weights, name, self.params)
            )
            delta = torch.zeros(facts.out_dim, 1, facts.in_dim, dtype=torch.float64, device=weights.device)
            delta[:, 0, :columns] = own - weights
            quadratic = 0.0
            if layer.status == "covered":
                quadratic = 0.5 * float((delta * self._operator.layer(facts.name).apply(delta)).sum())
            linear = 0.0 if gradient is None else float((delta[:, 0, :columns] * gradient).sum())
            found.append(
                FormatChange(
                    format=name,
                    total_bytes=self._bytes_in(facts, name),
                    relative_error=float(delta.norm()) / norm if norm > 0 else 0.0,
                    quadratic=quadratic,
                    linear=linear,
                    predicted=quadratic + linear,
                )
            )
        return tuple(found)

    def _matrix(self, facts: LayerFacts, flat: Tensor) -> Tensor:
        """The layer's matrix (out_dim, in_dim) of a vector, float64."""
        return self._space.gather(facts, flat[:, None], torch.float64, self.workspace.machine.device)[:, 0, :]

    @override
    def summary(self) -> SensitivitySummary:
        rows = [self.measured[facts.ordinal] for facts in self.whole.layers]
        budget, choice = self._budget_bytes, self._choice(rows)
        kept = self._bytes_16 - sum(row.bytes_16 for row in rows)
        return SensitivitySummary(
            coverage=self.coverage,
            layers=len(rows),
            bytes_16=self._bytes_16,
            formats=tuple(_total(name, rows) for name in self.params.formats),
            budget_bytes=budget,
            chosen=None
            if choice is None
            else tuple(
                ChosenFormat(layer=facts.name, format=_names(row)[place])
                for facts, row, place in zip(self.whole.layers, rows, choice.chosen, strict=True)
            ),
            chosen_bytes=None if choice is None else kept + choice.total_bytes,
            chosen_predicted=None if choice is None else choice.total,
            slack_bytes=None if choice is None else choice.slack_bytes,
        )

    def _choice(self, rows: Sequence[SensitivityMetrics]) -> FormatChoice | None:
        budget = self._budget_bytes
        if budget is None:
            return None
        options = [[(row.bytes_16, 0.0), *((each.total_bytes, each.predicted) for each in row.changes)] for row in rows]
        within = budget - self._bytes_16 + sum(row.bytes_16 for row in rows)
        return choose_formats(options, within, self.workspace.ports.raise_if_cancelled)

    @staticmethod
    @override
    def cost(params: SensitivityParams, job: PlannedJob) -> Cost:
        trainable = job.parameter_bytes
        terms = [*job.carried(KIND), Term("weights and gradient", "2 · P", 2 * trainable, "host", KIND)]
        task = job.workspace.inputs.task
        if task is not None and task.type not in EMBEDDINGS:
            terms += gradient_pass_terms(job, trainable, KIND)
        if params.budget is not None:
            states = states_bytes(sum(layer.groups for layer in job.probe.layers))
            terms.append(Term("states of the choice", "5 · states · layers", states, "host", KIND))
        operations = 0
        for layer in job.probe.layers:
            count = layer.in_dim * layer.out_dim
            terms += job.read_back(layer, KIND, copies=1)
            terms.append(Term("changes", "8 · in · out · 8", 64 * count, job.place, KIND, layer.name))
            operations += layer.groups * 2 * len(params.formats) * count * (layer.in_dim + layer.out_dim)
        work = job.work
        seconds = operations / work.pace.operations_per_second + work.examples * work.example_seconds
        return Cost(terms=tuple(terms), seconds={KIND: seconds})


def _kept_since(facts: LayerFacts) -> str | None:
    """Why a layer's weights keep their 16 bits; None where formats are tried on them."""
    if facts.form not in ("kronecker", "diagonal"):
        return "its parameters are no matrix"
    if facts.in_dim == facts.bias:
        return "its bias alone is trained"
    if facts.windows is None:
        return "it is not known where its numbers stand in the parameters"
    if facts.representation_G == "diagonal_sketch":
        return "a sketch of its G is kept, which is near it and not it"
    return None


def _is_table(facts: LayerFacts) -> bool:
    """Whether a layer's columns are the rows of its parameter: its A is diagonal, the counts of a table's entries."""
    return facts.form == "diagonal"


def _names(row: SensitivityMetrics) -> list[str]:
    return [KEPT, *(each.format for each in row.changes)]


def _total(name: str, rows: Sequence[SensitivityMetrics]) -> FormatTotal:
    own = [each for row in rows for each in row.changes if each.format == name]
    return FormatTotal(
        format=name,
        layers=len(own),
        total_bytes=sum(each.total_bytes for each in own),
        predicted=math.fsum(each.predicted for each in own),
    )
