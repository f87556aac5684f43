"""The first check of a collection, and the treatment of layers that fail it.

A layer whose rows are not the gradient of each example alone, or not separable by example, is treated by the
operations that its parameters enter, in place of its module's calls, and checked again. A layer that still fails is
not covered, with the identity that failed and its number as the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from engine.accumulation.hooks import Collector
from engine.accumulation.layer_statistics import LayerStatistics
from engine.collection.collection_state import Cursor
from engine.collection.data_pass import parts_of, update
from engine.collection.normalise import foreseen_flaw
from engine.collection.pass_job import PassJob
from engine.collection.probe import ProbedModel
from engine.gradient_identity.checked_model import NoSums, Subject, unwritten, widened_bytes
from engine.gradient_identity.findings import LayerCheck, refusal
from engine.gradient_identity.schedule import Glances, different_examples, first_examples
from engine.gradient_identity.self_check import SelfCheck
from engine.gradient_identity.summed_rows import SummedRows
from engine.layers.coverage import DeclaredLayer, Survey
from engine.layers.layer import TreatedLayer
from engine.memory.out_of_memory import free_memory, ran_out_of_memory
from engine.memory.plan import Chosen
from engine.model.batches import Batch
from engine.model.determinism import DRAWN
from engine.model.state.generators import kept_generators, seed_generators
from engine.row_layout.attention_masks import MaskBroken
from engine.row_layout.layer_calls import InputOverwritten

UNEXPLAINED = "gradient_not_followed"
"""Reason of parameters with a gradient that no operation which is understood was seen to bring."""

_UNUSED = ("bare_parameter", "unsupported_layer")
"""Reasons that say where parameters stand, for want of any operation that they were seen in."""


@dataclass
class Verification:
    """The layers that failed the first check so far, and how each is treated since."""

    self_check: SelfCheck
    forced: frozenset[str] = frozenset()
    """Layers to be found in the operations, by name."""
    unplaced: frozenset[str] = frozenset()
    """Layers to be found in the operations, as the shapes of the first batch do not tell whose their rows are."""
    refused: dict[tuple[str, ...], LayerCheck] = field(default_factory=dict)
    """Checks that failed for good, by the parameters of their layers."""
    _lost: frozenset[str] = frozenset()
    """Layers of which no row was looked at in the last check, as they are not separable by example."""
    _passed: set[tuple[str, ...]] = field(default_factory=set)
    """Parameters of layers that need no further check."""

    @classmethod
    def of(cls, job: PassJob) -> "Verification":
        """Begin the verification of a job; nothing is checked yet, and no layer has failed."""
        guard, size = job.workspace.machine.guard, widened_bytes(job.model)
        on_device = job.workspace.machine.device.type == "cuda"

        def has_room() -> bool:
            return guard.fits(device_bytes=size) if on_device else guard.fits(host_bytes=size)

        mode = job.collection.self_check
        return cls(self_check=SelfCheck(subject=subject_of(job), mode=mode, has_room=has_room))

    @property
    def failed(self) -> list[str]:
        """Layers that failed a check so far, by name or by their parameters."""
        return [*self.forced, *self.unplaced, *(" ".join(names) for names in self.refused)]

    def without_refused(self, probed: ProbedModel) -> ProbedModel:
        """Leave out the layers that failed for good; the result is the same object where none failed."""
        survey, probe = probed.survey, probed.probe
        gone = {
            layer.name: self.refused[layer.parameters] for layer in survey.treated if layer.parameters in self.refused
        }
        if not gone:
            return probed
        declared = [refusal(layer, gone[layer.name]) for layer in survey.treated if layer.name in gone]
        layers = tuple(layer for layer in survey.treated if layer.name not in gone)
        return replace(
            probed,
            survey=replace(survey, treated=layers, declared=(*survey.declared, *declared)),
            probe=replace(probe, layers=layers, calls=[call for call in probe.calls if call.layer.name not in gone]),
        )

    def changes(self, probed: ProbedModel, chosen: Chosen) -> bool:
        """Check the layers that no check has passed, in the first batch as the passes let it through the model.

        It returns whether a layer failed, so that the model is to be probed anew. ``EngineError`` if the model refuses
        the first batch.
        """
        job, survey, mixed = probed.job, probed.survey, probed.probe.mixed
        if self.self_check.mode == "off":
            return False
        layers = [
            layer
            for layer in survey.treated
            if layer.parameters not in self._passed and foreseen_flaw(layer, job.collection, mixed) is None
        ]
        self.self_check.unused = _uncovered(job, survey, (*_UNUSED, "no_gradient"))
        if not layers:
            return False
        self.self_check.subject = subject_of(job)
        # whether padding may be cut is found out afterwards
        job = replace(job, micro_batch=chosen.micro_batch, cut_padding=False)
        batch = job.probed_batch()
        heard = frozenset(job.heard)
        found = self._checked(job, layers, batch, _uncovered(job, survey))
        # what plain autograd alone does without a deterministic form enters no factor
        job.heard.intersection_update(heard)
        if found and self.self_check.drawing and DRAWN not in job.heard:
            job.heard.add(DRAWN)
            job.workspace.ports.log(
                "warning",
                f"the model draws random numbers in evaluation mode: {len(self.self_check.drawing)} layers are "
                "verified within one forward pass alone, and their numbers are those of one draw for each batch",
            )
        changed = False
        for layer in layers:
            check = found.get(layer.name)
            if layer.name in self._lost - self.unplaced:
                # by its operations it is checked again
                changed = True
                continue
            if check is None or not check.failed:
                self._passed.add(layer.parameters)
                continue
            changed = True
            if layer.roles and layer.name not in self.forced and not check.mixes:
                self.forced |= {layer.name}
                self._say(job, layer, check, "it is treated by the operations that its parameters enter")
            else:
                self.refused[layer.parameters] = check
                self._say(job, layer, check, "it is not covered")
        self.unplaced |= self._lost
        return changed

    def cuts_padding(self, probed: ProbedModel) -> bool:
        """Decide whether padding is cut off: it changes no output, and has no gradient in any layer.

        The probe has shown whether padding changes an output.
        """
        job, survey, mixed = probed.job, probed.survey, probed.probe.mixed
        if not job.cut_padding or self.self_check.mode == "off":
            return job.cut_padding
        layers = [layer for layer in survey.treated if foreseen_flaw(layer, job.collection, mixed) is None]
        heard = frozenset(job.heard)
        holds = self.self_check.allows_cutting(layers, job.probed_batch())
        job.heard.intersection_update(heard)
        if not holds:
            job.workspace.ports.log(
                "warning", "padding decides no output, but has a gradient: it goes through the model"
            )
        return holds

    def _checked(
        self, job: PassJob, layers: Sequence[TreatedLayer], batch: Batch, others: dict[str, nn.Parameter]
    ) -> dict[str, LayerCheck]:
        """Check ``layers``; where memory runs out with fewer examples, then in smaller groups, as the pass will."""
        count = first_examples(batch)
        while True:
            try:
                with job.workspace.machine.operation("self-check", "collection"):
                    summed, statistics = _first_rows(job, layers, batch, different_examples(batch, count))
                    seen = [each.layer for each in statistics if each.flaw is None]
                    self._lost = frozenset(each.layer.name for each in statistics if each.flaw == "batch_not_first")
                    self.self_check.glances = _glances(layers, summed, batch.size)
                    return self.self_check.check_first(seen, summed, others)
            except Exception as error:
                group = job.micro_batch or batch.size
                if not ran_out_of_memory(error) or (count <= 1 and group <= 1):
                    raise
            # outside of the except block, whose traceback held the rows
            free_memory(job.workspace.machine.device)
            if count > 1:
                count //= 2
            else:
                job = replace(job, micro_batch=-(-group // 2))

    def _say(self, job: PassJob, layer: TreatedLayer, check: LayerCheck, consequence: str) -> None:
        job.workspace.ports.log("warning", f"layer `{layer.name}`: {check.why}; {consequence}")


def _first_rows(
    job: PassJob, layers: Sequence[TreatedLayer], batch: Batch, places: Sequence[int]
) -> tuple[SummedRows, Sequence[LayerStatistics]]:
    """Let the first batch go through the model as a pass lets it, and sum nothing."""
    index = frozenset(int(batch.index[place]) for place in places)
    statistics = tuple(NoSums(layer=layer, sharing="expand") for layer in layers)
    collector = Collector(
        statistics=statistics,
        gradients=job.collection.fisher != "forward_only",
        layout=job.layout,
    )
    cursor = Cursor(number=0)
    collector.scale = job.precision.loss_scale(cursor.loss_scale, cursor.steady)
    buffers = tuple(job.model.buffers())
    with kept_generators(job.workspace.machine.device):
        while True:
            summed = SummedRows(
                layers=layers, index=index, parts=partial(parts_of, job, batch), buffers=buffers, all_examples=[]
            )
            seed_generators(job.collection.seed)
            try:
                with unwritten(job.model), collector.attached():
                    update(job, job.moved(batch), collector, summed)
            except MaskBroken as broken:
                # the pass finds it too, and lets all of these positions count
                job = job.without_masks(broken.calls)
            except InputOverwritten as written:
                job = job.laid_out(overwritten=job.layout.overwritten | frozenset(written.layers))
            else:
                return summed, statistics
            collector.layout, collector.observers = job.layout, {}


def _glances(layers: Sequence[TreatedLayer], summed: SummedRows, examples: int) -> Glances:
    """Count what a forward pass of one example takes, and in how many batches it is worth a glance."""
    multiplications = sums = 0
    for group in summed.groups[:1]:
        for recorder in group.recorders.values():
            layer = recorder.layer
            numbers = sum(gradient.numel() for _, gradient in recorder.met) // len(group.places)
            rows = numbers // max(1, layer.fan_out * layer.groups)
            multiplications += rows * layer.fan_in * layer.fan_out * layer.groups
            sums += rows * layer.groups * (layer.fan_in**2 + layer.fan_out**2) // 2
    weights = sum(layer.fan_in * layer.fan_out * layer.groups for layer in layers if layer.weight)
    return Glances.of(multiplications, sums, max(summed.nodes, len(layers)), examples, weights=weights)


def subject_of(job: PassJob) -> Subject:
    """Describe a job's model, and how it is run, as checks take it."""
    return Subject(
        model=job.model,
        task=job.task,
        collection=job.collection,
        dtype=job.dtype,
        device=job.workspace.machine.device,
        precision=job.precision,
        layout=job.layout,
    )


def explain(row: DeclaredLayer, self_check: SelfCheck | None) -> DeclaredLayer:
    """Correct the reason of a layer that is not covered by the gradient that plain autograd measured.

    The reason is then that its gradient was not followed, or that there is none; else the same object is returned.
    ``self_check`` is None where nothing was checked.
    """
    if self_check is None or not self_check.layers or not self_check.subject.has_gradients:
        return row
    reached = not self_check.unseen.isdisjoint(row.parameters)
    if reached and row.reason == "no_gradient":
        why = "plain autograd finds a gradient, but no operation that is understood was seen to use the parameters"
        return replace(row, reason=UNEXPLAINED, why=why)
    if not reached and row.reason in _UNUSED:
        return replace(row, reason="no_gradient", why="no batch brought them any")
    return row


def _uncovered(job: PassJob, survey: Survey, reasons: Sequence[str] | None = None) -> dict[str, nn.Parameter]:
    """Trainable parameters that no layer covers, for some reasons or for any."""
    parameters = dict(job.model.named_parameters(remove_duplicate=False))
    names = [n for row in survey.declared if reasons is None or row.reason in reasons for n in row.parameters]
    return {name: parameters[name] for name in names if name in parameters}
