"""The pass job: a model with its data and task, and how passes over the data run it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.collection.ranks.turns import numbered
from engine.collection.subsamples import Sizes
from engine.errors import DataDiffer, EmptyData, ModelRefused
from engine.factors.factor_set import FactorSet
from engine.factors.representation import Representation
from engine.gradient_identity.self_check import SelfCheck
from engine.layers.layer import TreatedLayer
from engine.model.batches import Batch, make_batches
from engine.model.class_targets import find_class_axis
from engine.model.determinism import Numerics
from engine.model.example_digests import EnteredExamples
from engine.model.mixed_precision import Precision, choose_precision
from engine.model.output_selection import output_of
from engine.model.outputs import call_model
from engine.model.state.generators import seed_generators
from engine.model.state.preserve_state import preserve_state
from engine.row_layout.attention_masks import Key
from engine.row_layout.row_order import Layout
from engine.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class PassJob:
    """The parts of a workspace that passes need, all present."""

    workspace: Workspace
    model: nn.Module
    task: Task
    collection: Collection
    dtype: torch.dtype
    numerics: Numerics
    heard: set[str]
    """Operations without a deterministic form that this attempt has heard of."""
    micro_batch: int | None = None
    """Examples that go through the model at once; None is the whole batch."""
    offload: bool = False
    """The sums stand on the host."""
    precision: Precision = field(default_factory=Precision)
    layout: Layout = field(default_factory=Layout)
    sizes: Sizes | None = None
    """Smaller sample sizes to keep."""
    representations: Mapping[str, Representation] = field(default_factory=dict)
    """How the layers keep their G; dense where a layer is not named."""
    head: TreatedLayer | None = None
    """The linear layer whose outputs are the loss's logits, if there is one."""
    cut_padding: bool = False
    """Padding decides nothing, so it need not go through the model."""
    first_check: SelfCheck | None = None
    """Checks of the first batch, which those of the collection's state begin with; None where nothing is checked."""
    shared_first: Batch | None = None
    """The first batch that all ranks look at; None where this is the only one."""
    probed: list[EnteredExamples] = field(default_factory=list)
    """The first batches that were read before any pass, each by its digest."""
    entered: EnteredExamples | None = None
    """The examples that entered the collection, which a later pass must see again; None where that is not known."""

    @classmethod
    def of(cls, workspace: Workspace, device: torch.device) -> "PassJob":
        """Return what passes need as far as the document says it, before the probe finds the row layout.

        The device is the one that numerics and precision are chosen for; a plan's tensors stand on another.
        ``ValueError`` if model, batches or task are missing.
        """
        inputs, collection = workspace.inputs, workspace.options.collection
        if inputs.model is None or inputs.task is None or inputs.batches is None:
            raise ValueError("a workspace without stored factors needs a model, batches and a task")
        return cls(
            workspace=workspace,
            model=inputs.model,
            task=inputs.task,
            collection=collection,
            dtype=torch.float64 if collection.dtype == "float64" else torch.float32,
            numerics=Numerics.here(device, workspace.resume.numerics),
            heard=set(),
            precision=choose_precision(collection.amp, device, collection.precision),
        )

    @classmethod
    def again(cls, workspace: Workspace, whole: FactorSet) -> "PassJob":
        """Return what passes need over the examples of a collection once more, without autocast."""
        dtype = torch.float64 if whole.collection.dtype == "float64" else torch.float32
        job = replace(cls.of(workspace, workspace.machine.device), collection=whole.collection, dtype=dtype)
        return replace(job, precision=Precision(), micro_batch=whole.micro_batch, entered=whole.entered).settled()

    def batches(self) -> Iterator[Batch]:
        """The data, anew, in batches on the device."""
        return (self.moved(batch) for batch in self.stream())

    def stream(self) -> Iterator[Batch]:
        """The data, anew, in batches where the caller has them."""
        chunks = self.workspace.inputs.batches() if self.workspace.inputs.batches is not None else iter(())
        ranks, size = self.workspace.machine.ranks, self.collection.batch_size
        if ranks.size > 1:
            yield from make_batches(numbered(chunks, ranks, size), size, may_be_empty=True)
            return
        try:
            yield from make_batches(chunks, size)
        except EmptyData as empty:
            if self.probed or self.entered is not None:
                raise _read_once() from empty
            raise

    def whole_stream(self) -> Iterator[Batch]:
        """The whole data, of which this may be a part, anew, in batches where the caller has them."""
        part = self.workspace.inputs.part
        return self.stream() if part is None else make_batches(part.batches(), self.collection.batch_size)

    def probed_batch(self) -> Batch:
        """The batch that the model is probed with, where the caller has it: the first of all data."""
        if self.shared_first is not None:
            return self.shared_first
        return self.noted(next(self.whole_stream()))

    def noted(self, first: Batch) -> Batch:
        """Note the digest of a first batch that is read before the passes; a plan's, of shapes alone, has none."""
        if self.workspace.machine.device.type != "meta":
            self.probed.append(EnteredExamples().added(self.moved(first), self.task, None))
        return first

    def require_readable_again(self, first: EnteredExamples | None, batches: int) -> None:
        """Raise ``DataDiffer`` if data do not begin anew at every pass: one began with another batch than was seen."""
        if not self.probed or self.workspace.inputs.part is not None:
            return
        other = first not in (*self.probed, None)
        if not batches or (other and next(self.stream(), None) is None):
            raise _read_once()

    def enter(self, entered: EnteredExamples, batch: Batch, update: int) -> EnteredExamples:
        """Add a batch, on the device as ``moved`` returned it, that is about to enter to those that have.

        ``update`` is its number among the batches of all ranks that enter.
        """
        # a moving average weighs batches by their order, and smaller sample sizes are the first ones
        ordered = self.collection.ema_decay is not None or self.collection.nested
        return entered.added(batch, self.task, update if ordered else None)

    def require_entered(self, before: EnteredExamples | None, entered: EnteredExamples, what: str) -> EnteredExamples:
        """Return what entered the first pass; ``DataDiffer``, with both figures, if something else entered this one."""
        if before is None:
            return entered
        before.require(entered, what)
        if before.keyed != entered.keyed and self.collection.fisher == "mc":
            self.workspace.ports.notice(
                f"the examples came in another order to {what} than to the first pass: their indices, by which "
                "`fisher: mc` draws labels, are others, so that it used another draw of the same labels; give the "
                "data in one order, or each example an index of its own",
            )
        return before

    def with_class_axis(self, batch: Batch) -> "PassJob":
        """Return the same job with the dimension of the classes decided, for all batches, by the first one.

        The batch is on the device, with the model as passes need it. The result is the job itself where outputs leave
        no choice. ``EngineError`` if the model refuses the batch, or two readings are left.
        """
        task, few = self.task, next(batch.slices(2))
        if not task.leaves_class_axis:
            return self
        try:
            with torch.no_grad():
                outputs = call_model(self.model, few, labelled=False)
        except ModelRefused:
            # a forward pass may take gradients itself, or want the whole batch
            few = batch
            with torch.enable_grad():
                outputs = call_model(self.model, few, labelled=False)
        shape = output_of(outputs, task, "logits").shape
        if len(shape) < 3 or shape[0] != few.size:
            return self
        axis = find_class_axis(torch.Size((batch.size, *shape[1:])), batch, task, self.model)
        self.workspace.ports.log(
            "info", f"outputs of shape (N, {str(tuple(shape[1:]))[1:]} have classes on dimension {axis}"
        )
        return replace(self, task=replace(task, class_axis=axis))

    def settled(self) -> "PassJob":
        """Return the job with what its first batch decides (``with_class_axis``), where no probe has decided it."""
        if not self.task.leaves_class_axis or self.workspace.results.plan is not None:
            return self
        with preserve_state(self.model, self.dtype):
            seed_generators(self.collection.seed)
            return self.with_class_axis(self.moved(self.probed_batch()))

    def without_masks(self, calls: frozenset[Key]) -> "PassJob":
        """Return the same job with the mask not laid on some calls; padding is not cut either where there are any."""
        masking, cut = self.layout.masking.without(calls), self.cut_padding and not calls
        return replace(self.laid_out(masking=masking), cut_padding=cut)

    def laid_out(self, **changes: Any) -> "PassJob":  # noqa: ANN401 - the fields of a layout
        """Return the same job with parts of its layout replaced."""
        return replace(self, layout=replace(self.layout, **changes))

    def moved(self, batch: Batch) -> Batch:
        """Copy a batch, which the model may write to, to the device, in the precision of the passes."""
        return batch.to(self.workspace.machine.device, self.dtype)


def _read_once() -> DataDiffer:
    return DataDiffer(
        "the data can be read only once, and must begin anew at every pass: the first batch was read to look at the "
        "model, and is gone; give a list, or a callable that makes a new iterable each time it is called",
        pointer="/data",
    )
