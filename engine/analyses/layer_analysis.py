"""Layer analysis: the steps that every analysis takes, one layer after another, and what each adds to them.

::

    require     refuses its options before anything is collected
    prepare     takes what it needs of the whole set of factors
    layer       computes one layer, on the rank that the layer belongs to
    take        notes on every rank what the summary needs of it; returns the metrics of the row
    finish      writes or computes what is of all layers together
    summary     the whole model
    cost        what all this will hold and how long it will take, from shapes alone

A layer's row goes out as soon as the layer is done; one that an earlier attempt has delivered is computed for the
summary, and not given again. The rows of layers that are not covered follow.

A number that float64 cannot hold is null in a result, and the row's ``why`` names it: the square of 1e300 is one, and
so is the quotient of two numbers of 1e-310. JSON has no word for it, and a job must not end for one of its numbers.

Runs of several analyses over one collection: what one of them refuses costs the others nothing.

::

    an error of the collection, which all share        ends the job
    other data than the collection saw                 ends the job: which of them its factors are of is unknown
    a usage error of one analysis                      its refusal; the next analysis begins
    a usage error of the only one, or of every one     ends the job, with the first
    any other error                                    ends the job
    an error of a job over several ranks               ends the job: the others may wait within the same analysis
"""

import dataclasses
import math
import pkgutil
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from catalog import ANALYSES, PLANNED_STAGES
from catalog.analyses.analysis import Coverage, LayerResult, RefusedAnalysis
from catalog.responses.layer_record import LayerRecord, Observed
from engine.collect import JobFactors, collect_or_read
from engine.errors import DataDiffer, UsageError
from engine.factors.factor_set import GIVEN_MATRIX, FactorSet
from engine.layers.coverage import DeclaredLayer
from engine.measurement.divided_layers import DividedLayers, SentFiles
from engine.measurement.layer_measurement import Measured, measure_layers
from engine.measurement.representation_record import branch_counts, coverage, held_bytes, observe
from engine.planning.analysis_cost import Cost, PlannedJob
from engine.workspace import Workspace

P = TypeVar("P")
Record = TypeVar("Record")
_PLAIN = (int, float, str, type(None))
_OF_A_COLLECTION = (
    "policy", "damping_split", "lambda_A", "lambda_G", "lambda_A_relative", "lambda_G_relative", "update_freq",
    "update_index", "positions", "positions_local", "terms", "world_size", "reduction", "sent_bytes", "pieces",
    "accumulation_dtype", "accumulation_precision", "amp", "fisher", "sharing", "samples", "seed", "passes", "digest_A",
    "kappa_A", "kappa_A_clipped", "clipped_A", "scale_A", "scale_G",
)  # fmt: skip
"""Fields of a record that say nothing of a given matrix, which no collection made."""


class LayerAnalysis(Generic[P]):
    """One analysis of one job.

    Args:
        params: Its options; None of an analysis without any.
        workspace: The job: its model or stored factors, options, machine, ports and rows that are already delivered.
    """

    kind: ClassVar[str]
    """As the catalog names it."""
    divided: ClassVar[bool] = False
    """Whether each of several ranks computes its own layers alone, since a layer takes long."""
    whole: FactorSet
    """The factors, once they are collected or read."""
    files: SentFiles | None = None
    """The place of files that are written layer by layer, where other ranks receive them; ``prepare`` sets it."""

    def __init__(self, params: P, workspace: Workspace) -> None:
        self.params = params
        self.workspace = workspace
        self.measured: dict[int, Any] = {}
        """The metrics of the layers so far, by ordinal."""
        self.records: dict[int, LayerRecord] = {}
        """Their records, by ordinal."""

    def rows(self) -> Generator[LayerResult, None, Any]:
        """Yield each layer's row as soon as it is done.

        Returns:
            One row per covered layer, which leaves out rows of an earlier attempt, then one per layer that is not
            covered. The generator returns the summary.

        Raises:
            EngineError: As ``engine.errors`` lists.
        """
        self.begin()
        for done, (layer, (outcome, observed)) in enumerate(self._outcomes(), start=1):
            metrics = self.measured[layer.facts.ordinal] = self.take(layer, outcome)
            self.records[layer.facts.ordinal] = layer.record
            if not self._is_delivered(layer.facts.ordinal):
                yield self._row(layer, metrics, observed)
            self.report(done)
        self.finish()
        for place, declared in enumerate(self.whole.declared, start=len(self.whole.layers)):
            if not self._is_delivered(place):
                yield self._declared_row(place, declared)
        self.workspace.ports.raise_if_cancelled()
        return finite_summary(self.summary(), self.workspace.ports.log)

    def begin(self) -> None:
        """Do all that comes before the first layer; of a part of an analysis nothing else is done."""
        self.require()
        self.whole = collect_or_read(self.workspace)
        self.prepare()

    def require(self) -> None:
        """Refuse what can be refused before anything is collected."""

    def prepare(self) -> None:
        """Take what is needed of the whole set of factors, and refuse what they cannot answer."""

    def layers(self) -> Iterator[Measured]:
        """Return the covered layers in the order of the work."""
        return measure_layers(self.workspace)

    def layer(self, layer: Measured) -> Any:  # noqa: ANN401 - each analysis has its own
        """Compute one layer: its metrics, or whatever ``take`` makes them of."""
        raise NotImplementedError

    def take(self, layer: Measured, outcome: Any) -> Any:  # noqa: ANN401, ARG002 - each analysis has its own
        """Note what the summary needs of a layer besides its metrics, and return those."""
        return outcome

    def observe(self, layer: Measured, begun: float) -> Observed:  # noqa: ARG002 - where it reads the clock
        """Return what was observed of a layer whose computation began at ``begun``."""
        return layer.observed

    def report(self, done: int) -> None:
        """Report one more layer."""
        self.workspace.ports.report(self.kind, done, len(self.whole.layers), "layers")

    def finish(self) -> None:
        """Write or compute what is of all layers together."""

    def summary(self) -> Any:  # noqa: ANN401 - each analysis has its own record
        """Return the summary of the whole model."""
        raise NotImplementedError

    @staticmethod
    def cost(params: Any, job: PlannedJob) -> Cost:  # noqa: ANN401, ARG004 - each analysis has its own
        """Return the bytes and seconds that the analysis adds to a plan: none, unless it says more."""
        return Cost()

    @property
    def coverage(self) -> Coverage:
        """The trainable parameters that the rows speak for."""
        return coverage(self.whole, self.records)

    @property
    def branches(self) -> dict[str, int]:
        """Layers by branch."""
        return branch_counts(self.whole.layers)

    def _outcomes(self) -> Iterator[tuple[Measured, tuple[Any, Observed]]]:
        """Every layer with what was computed of it, on the rank that it belongs to."""
        division = DividedLayers.of(self.workspace, self.whole) if self.divided else None
        if division is None:
            return ((layer, self._computed(layer)) for layer in self.layers())
        layers = {layer.facts.ordinal: layer for layer in self.layers()}
        every = [layer.facts for layer in layers.values()]
        found = division.compute(every, lambda facts: self._computed(layers[facts.ordinal]), self.kind, self.files)
        return ((layers[facts.ordinal], outcome) for facts, outcome in found)

    def _computed(self, layer: Measured) -> tuple[Any, Observed]:
        begun = time.perf_counter()
        self.workspace.ports.raise_if_cancelled()
        stage = self.kind if self.kind in PLANNED_STAGES else None
        with self.workspace.machine.operation(f"{self.kind} of layer {layer.facts.ordinal}", stage):
            outcome = self.layer(layer)
        return outcome, self.observe(layer, begun)

    def _is_delivered(self, ordinal: int) -> bool:
        return (self.kind, ordinal) in self.workspace.resume.completed

    def _row(self, layer: Measured, metrics: object, observed: Observed) -> LayerResult:
        """The row of a covered layer; what is not finite is null, and the record's ``why`` names those numbers."""
        facts = layer.facts
        metrics, of_metrics = nullify(metrics)
        record, of_record = nullify(layer.record)
        if of_metrics or of_record:
            record = replace(record, why="; ".join(filter(None, (record.why, reason((*of_metrics, *of_record))))))
        if facts.module == GIVEN_MATRIX:
            unknown: dict[str, Any] = dict.fromkeys(_OF_A_COLLECTION)
            record = replace(record, **unknown)
        return LayerResult(
            kind=self.kind,
            ordinal=facts.ordinal,
            layer=facts.name,
            module=facts.module,
            status=layer.status,
            reason=None,
            parameters=facts.parameters,
            parameter_count=facts.parameter_count,
            metrics=metrics,
            record=record,
            observed=observed,
        )

    def _declared_row(self, ordinal: int, layer: DeclaredLayer) -> LayerResult:
        """The row of a layer that is not covered, with its reason and without metrics."""
        blank = dict.fromkeys(LayerRecord.__dataclass_fields__)
        known = {
            "branch": "declared",
            "why": layer.why or layer.reason,
            "fisher": self.whole.collection.fisher,
            "world_size": 1,
            "planned_peak_bytes": self.whole.planned_peak_bytes,
        }
        now = held_bytes(self.workspace.machine.device)
        return LayerResult(
            kind=self.kind,
            ordinal=ordinal,
            layer=layer.name,
            module=layer.module,
            status="declared",
            reason=layer.reason,
            parameters=layer.parameters,
            parameter_count=layer.parameter_count,
            metrics=None,
            record=LayerRecord(**{**blank, **known}),  # type: ignore[arg-type]
            observed=observe(time.perf_counter(), now, now, self.workspace, self.whole),
        )


def is_decomposed(layer: Measured) -> bool:
    """Return whether an eigendecomposition was made of a layer."""
    return layer.A.spectrum is not None and layer.facts.form not in ("diagonal", "diagonal_block")


def nullify(record: Record) -> tuple[Record, tuple[str, ...]]:
    """Replace NaN and infinities by null."""
    names: list[str] = []
    return _finite(record, "", names), tuple(names)


def reason(names: tuple[str, ...]) -> str:
    """Describe the fields that were replaced."""
    listed = ", ".join(f"`{name}`" for name in names)
    return f"null, since float64 does not hold it: {listed}" if names else ""


def finite_summary(summary: Record, log: Callable[[str, str], None]) -> Record:
    """Copy a summary with null for what JSON cannot hold, and log the names of those numbers."""
    finite, names = nullify(summary)
    if names:
        log("warning", f"summary: {reason(names)}")
    return finite


def _finite(value: Any, name: str, names: list[str]) -> Any:  # noqa: ANN401 - any record's field
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else [value]
    if [part for part in parts if isinstance(part, float) and not math.isfinite(part)]:
        names.append(name)
        return None
    if not [part for part in parts if not isinstance(part, _PLAIN)]:
        # most fields, and the densities of thousands of layers
        return value
    if isinstance(value, dict):
        return {key: _finite(part, f"{name}.{key}", names) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_finite(part, f"{name}[{place}]", names) for place, part in enumerate(value)])
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    before = len(names)
    fields = {
        field.name: _finite(getattr(value, field.name), f"{name}.{field.name}".lstrip("."), names)
        for field in dataclasses.fields(value)
    }
    return value if len(names) == before else dataclasses.replace(value, **fields)


def run_analyses(
    workspace: Workspace, take_row: Callable[[LayerResult], None], take_summary: Callable[[str, Any], None]
) -> tuple[RefusedAnalysis, ...]:
    """Run the job's analyses one after another, in the order of its options.

    Args:
        workspace: The job: its model or stored factors, options, machine and ports.
        take_row: Receives each row as soon as its layer is done; of an analysis that is then refused, too.
        take_summary: Receives the kind and the summary of each analysis that is done.

    Returns:
        The analyses that were refused, in order; never all of them.

    Raises:
        EngineError: If the collection fails, or every analysis is refused; as ``engine.errors`` lists.
    """
    refused: list[RefusedAnalysis] = []
    first: UsageError | None = None
    kinds = workspace.options.kinds
    for kind in kinds:
        workspace.ports.raise_if_cancelled()
        try:
            with workspace.machine.operation(kind):
                take_summary(kind, _run(kind, workspace, take_row))
        except UsageError as error:
            shared = workspace.machine.ranks.size > 1 or workspace.results.of(JobFactors).failed
            if isinstance(error, DataDiffer) or shared:
                raise
            # its frames hold generators with their buffers and threads
            traceback.clear_frames(error.__traceback__)
            first = first or error
            refused.append(refusal(kind, error))
    if first is not None and len(refused) == len(kinds):
        raise first
    for each in refused:
        workspace.ports.log("warning", f"`{each.kind}` was refused, and the other analyses are done: {each.message}")
    return tuple(refused)


def make_analysis(kind: str, workspace: Workspace) -> LayerAnalysis[Any]:
    """Return one analysis of a job, before anything is computed."""
    analysis: type[LayerAnalysis[Any]] = pkgutil.resolve_name(ANALYSES[kind].implementation)
    return analysis(workspace.options.of(kind), workspace)


def refusal(kind: str, error: UsageError) -> RefusedAnalysis:
    """Return what a job records of an analysis that was refused."""
    return RefusedAnalysis(kind=kind, code=error.code, message=error.message, pointer=error.pointer, layer=error.layer)


def _run(kind: str, workspace: Workspace, take_row: Callable[[LayerResult], None]) -> Any:  # noqa: ANN401 - its summary
    """Pull the rows of one analysis; return its summary."""
    rows = make_analysis(kind, workspace).rows()
    while True:
        try:
            take_row(next(rows))
        except StopIteration as end:
            return end.value
