"""The self-check of one collection: the batches to be checked, and the results of each layer so far.

The first batch is checked before any sum is allocated, with up to four different examples of it, so
that a layer that fails can still be treated in another way, or not at all. While the data passes
through (`growing`), one example of batches 1, 2, 4, 8 and so on is checked, and one of every batch
that calls a layer as no batch before it did. The examples to be checked follow from the batch's index alone,
and no generator, buffer or sum is changed by a check: factors have the same bits without.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from torch import nn

from catalog.analyses.analysis import LookedAt
from engine.errors import EngineError, Unwinding
from engine.gradient_identity.check import BatchCheck
from engine.gradient_identity.checked_model import Forward, Subject
from engine.gradient_identity.completeness import padding_has_no_gradient
from engine.gradient_identity.findings import LayerCheck, watch_unused, worse
from engine.gradient_identity.recorded_rows import Sketch, is_known
from engine.gradient_identity.schedule import (
    Glances,
    differs_alone,
    find_mixed,
    find_mixed_by_exchange,
    find_mixed_in_halves,
    spread_places,
)
from engine.gradient_identity.summed_rows import NO_ROWS, SummedRows
from engine.layers.layer import TreatedLayer
from engine.memory.out_of_memory import first_line
from engine.merging.merge import joined_looks
from engine.model.batches import Batch
from engine.model.state.generators import kept_generators
from engine.saved_fields import load_fields, save_fields


@dataclass
class SelfCheck:
    """The checks of one collection so far."""

    NOT_SAVED: ClassVar[Mapping[str, str]] = {
        "subject": "the model and how it is run, which every attempt has",
        "mode": "an option of the collection, which is among a checkpoint's conditions",
        "has_room": "asks the machine of the attempt",
        "rehearsed": "found again by the first check of every attempt",
        "glances": "counted again by the first check of every attempt",
        "unused": "found again by the probe of every attempt",
    }

    subject: Subject
    mode: Literal["first", "growing", "off"]
    has_room: Callable[[], bool] = lambda: True
    """Whether there is memory for the model in float64."""
    rehearsed: dict[int, dict[str, Sketch]] = field(default_factory=dict)
    """Sketches of the rows that the first check has held against plain autograd, by example and layer; found again by
    every attempt."""
    layers: dict[str, LayerCheck] = field(default_factory=dict)
    """The check of each layer, over all batches."""
    drawing: frozenset[str] = frozenset()
    """Layers whose rows change from one run to the next."""
    unseen: frozenset[str] = frozenset()
    """Parameters of no layer whose gradient is not zero."""
    largest_norm: float = 0.0
    """Norm of the largest gradient of any layer so far, which tells what is rounding beside it."""
    shapes: set[str] = field(default_factory=set)
    """Shapes in which batches have called the layers, as ``Collector.shapes`` writes them."""
    structures: set[str] = field(default_factory=set)
    """Structures that ran in the batches: graphs, and the calls of layers without their sizes."""
    new_sizes: int = 0
    """Batches that differed from those before in sizes alone."""
    looked_at: LookedAt = field(default_factory=LookedAt)
    """Batches that were looked at, and how."""
    glances: Glances = field(default_factory=Glances)
    """The batches that get a glance; found again by every attempt."""
    unused: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters that nothing was seen to use, which are watched during the passes; found again by every attempt."""

    def observe(
        self, layers: Sequence[TreatedLayer], batch: Batch, number: int, parts: Callable[[], Iterator[Batch]]
    ) -> SummedRows:
        """Choose an example of a batch by the batch's number, from 0; its rows are kept while the batch is summed.

        ``layers`` are those not known to be flawed; ``parts`` makes the groups anew in which the batch goes through the
        model. Rows are kept of no example where no batch but the first is looked at.
        """
        if self.mode == "off" or (self.mode == "first" and number > 0) or not layers:
            return NO_ROWS
        # another example at each glance
        turn = self.glances.turn(number)
        chosen = int(batch.index[(number if turn is None else turn) % batch.size])
        buffers = tuple(self.subject.model.buffers())
        return SummedRows(layers=layers, index=frozenset({chosen}), parts=parts, buffers=buffers)

    def check_first(
        self, layers: Sequence[TreatedLayer], summed: SummedRows, others: Mapping[str, nn.Parameter]
    ) -> dict[str, LayerCheck]:
        """Check ``layers``, which no hook has refused, on different examples of the first batch.

        ``summed`` has the rows of the examples, as the hooks of a pass have shown them; ``others`` are parameters that
        no layer covers, by name. ``EngineError`` if the model refuses the batch.
        """
        found = self._check(layers, summed, others)
        self.layers |= found
        if layers and not any(check.failed and check.mixes for check in found.values()):
            for name, check in self._check_others(layers, summed, in_halves=True).items():
                found[name] = worse(found.get(name), check)
        self.layers |= found
        for example, rows in summed.sketches(layers).items():
            self.rehearsed.setdefault(example, {}).update(rows)
        return found

    def allows_cutting(self, layers: Sequence[TreatedLayer], batch: Batch) -> bool:
        """Return whether the padding of the first batch may be cut off, by the gradients of some layers.

        False where the most padded example has other gradients without its padding. Layers that draw random numbers are
        left out.
        """
        some = [layer for layer in layers if layer.name not in self.drawing]
        with kept_generators(self.subject.device):
            return padding_has_no_gradient(self.subject, some, batch, self.subject.collection.seed)

    def is_due(self, number: int, shapes: AbstractSet[str], summed: SummedRows) -> tuple[bool, bool]:
        """Return whether a batch is to be checked in full, and whether it gets a glance else; note what ran in it.

        The first is true for the first batch, and in the mode `growing` for batches 1, 2, 4, 8 and so on (numbered from
        0), for those in which something ran that did not run before, and for the first, second, fourth … of those with
        new sizes alone.
        """
        if not summed.groups:
            return False, False
        if self.mode != "growing":
            return number == 0, False
        new = self._has_new_signature(shapes, summed)
        self.looked_at = replace(self.looked_at, signatures=self.looked_at.signatures + 1)
        if number & (number - 1) == 0 or new:
            return True, False
        return False, self.glances.turn(number) is not None and self.looked_at.no_glance is None

    def _has_new_signature(self, shapes: AbstractSet[str], summed: SummedRows) -> bool:
        """Whether something ran that did not run before, or as often with other sizes as asks for a check."""
        structures = summed.signatures | {shape.partition("(")[0] for shape in shapes}
        new, resized = not structures <= self.structures, not shapes <= self.shapes
        summed.is_new = new
        self.structures |= structures
        self.shapes |= shapes
        self.new_sizes += resized and not new
        return new or (resized and self.new_sizes & (self.new_sizes - 1) == 0)

    def glance_differs(self, summed: SummedRows) -> bool:
        """Take a glance: return whether outputs of an example are others beside the others.

        False too where no example can be run alone, which the record says.
        """
        reason = self._no_glance(summed)
        differs = False
        if reason is None:
            try:
                with kept_generators(self.subject.device):
                    differs = differs_alone(self.subject, summed)
            except (EngineError, Unwinding) as error:
                reason = f"an example cannot be run alone: {first_line(error)}"
        if reason is not None:
            self.looked_at = replace(self.looked_at, no_glance=reason)
        else:
            self.looked_at = replace(self.looked_at, glances=self.looked_at.glances + 1)
        return differs

    def _no_glance(self, summed: SummedRows) -> str | None:
        """Why one example's outputs say nothing."""
        if self.drawing:
            return "the model draws random numbers"
        if self.subject.task.likelihood == "model":
            return "the model's own loss is of all examples of a batch"
        if any(check.mixes for check in self.layers.values()):
            return "outputs are known to depend on other examples"
        if all(group.size == 1 for group in summed.groups):
            return "examples go through the model one at a time"
        if any(check.proof == "same_forward" and check.examples == 0 for check in self.layers.values()):
            return "examples cannot be run alone"
        return None

    def watching_unused(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a gradient of a parameter that nothing was seen to use is noticed."""
        if self.mode == "off" or not self.subject.has_gradients:
            return contextlib.nullcontext()
        return watch_unused(
            {name: each for name, each in self.unused.items() if name not in self.unseen}, self._reached
        )

    def _reached(self, name: str) -> None:
        self.unseen |= {name}

    def is_rehearsed(self, layers: Sequence[TreatedLayer], summed: SummedRows) -> bool:
        """Return whether the rows of an example are those that the first check has proven already.

        False too where the example was none of the first check's, or went through the model in another shape.
        """
        own, tolerance = summed.sketches(layers), self.subject.rounding_of_repetition
        names = [layer.name for layer in layers]
        for example, rows in own.items():
            known = self.rehearsed.get(example, {})
            if not all(name in rows and name in known for name in names):
                return False
            if not all(is_known(rows[name], known[name], tolerance) for name in names):
                return False
        return bool(own)

    def check_later(self, layers: Sequence[TreatedLayer], summed: SummedRows) -> list[str]:
        """Return the names of the layers that fail on one example of a batch that was summed; no layers run no check.

        ``layers`` are those not known to be flawed. ``EngineError`` if the model refuses the batch.
        """
        found = self._check(layers, summed, {}) if layers else {}
        if summed.is_new and layers and not any(check.failed and check.mixes for check in found.values()):
            for name, check in self._check_others(layers, summed, in_halves=False).items():
                found[name] = worse(found.get(name), check)
        self.looked_at = replace(self.looked_at, full=self.looked_at.full + bool(found))
        for name, check in found.items():
            self.layers[name] = worse(self.layers.get(name), check)
        return [name for name, check in found.items() if check.failed]

    def _check(
        self, layers: Sequence[TreatedLayer], summed: SummedRows, others: Mapping[str, nn.Parameter]
    ) -> dict[str, LayerCheck]:
        """Check each group of a batch; the worse check of a layer counts, over the examples of all groups."""
        whole: dict[str, LayerCheck] = {}
        for group in summed.groups:
            recording = summed.recording(group, layers)
            if recording is None:
                continue
            check = self._batch_check(layers, summed.forward(group), group.places)
            check.summed, check.others = recording, others
            with kept_generators(self.subject.device), group.restored():
                found = check.run()
            self.drawing |= found.draws
            self.unseen |= found.unseen
            self.largest_norm = max(self.largest_norm, found.largest_norm)
            for name, each in found.layers.items():
                whole[name] = worse(whole.get(name), each)
        return whole

    def _batch_check(self, layers: Sequence[TreatedLayer], forward: Forward, places: Sequence[int]) -> BatchCheck:
        """The check of some examples of one batch, by places in it."""
        return BatchCheck(
            subject=self.subject,
            layers=layers,
            forward=forward,
            examples=places,
            drawing=self.drawing,
            has_room=self.has_room,
            explained=any(check.mixes and check.identity != "outputs" for check in self.layers.values()),
            floor=self.largest_norm,
        )

    def _check_others(
        self, layers: Sequence[TreatedLayer], summed: SummedRows, *, in_halves: bool
    ) -> dict[str, LayerCheck]:
        """Check layers on an example that is another beside others, of a batch in which something new ran.

        Of all examples, in halves of their groups, or of a few alone.
        """
        if self._no_glance(summed) is not None and not (in_halves and self.drawing):
            mixes = not in_halves and not self.drawing and any(check.mixes for check in self.layers.values())
            return self._check_rows_of_few(layers, summed) if mixes else {}
        found: tuple[Forward, int] | None = None
        with kept_generators(self.subject.device):
            # examples that cannot be run so say nothing
            with contextlib.suppress(EngineError, Unwinding):
                if not in_halves:
                    found = find_mixed(self.subject, summed)
                elif self.drawing:
                    found = find_mixed_by_exchange(self.subject, summed)
                else:
                    found = find_mixed_in_halves(self.subject, layers, summed)
            return {} if found is None else self._batch_check(layers, found[0], (found[1],)).run().layers

    def _check_rows_of_few(self, layers: Sequence[TreatedLayer], summed: SummedRows) -> dict[str, LayerCheck]:
        """Check the rows of a few examples of each group, where outputs differ whether a layer's rows do or not."""
        found: dict[str, LayerCheck] = {}
        with kept_generators(self.subject.device), contextlib.suppress(EngineError, Unwinding):
            for part in summed.parts():
                forward = Forward(batch=part, start=summed.groups[0].start)
                for name, each in self._batch_check(layers, forward, spread_places(part.size)).run().layers.items():
                    found[name] = worse(found.get(name), each)
        return found

    def refuse_sums(self, name: str, error: float) -> LayerCheck:
        """Note that the sums of a layer are not those of its rows; ``error`` is the relative difference."""
        known = self.layers.get(name)
        proof = "alone" if known is None else known.proof
        failed = LayerCheck(error=error, identity="sums", examples=0, proof=proof, failed=True)
        self.layers[name] = worse(known, failed)
        return self.layers[name]

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """Return everything that a later attempt goes on from, as plain values."""
        return save_fields(self)

    def resumed(self, stored: Mapping[str, Any]) -> Self:
        """Return a copy at a state that ``state`` returned; what the copy finds is not found by this one."""
        return replace(self, **load_fields(type(self), stored))

    def join(self, before: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> None:
        """Take in the checks that several ranks have made since a state that was the same on all of them.

        ``states`` are the ranks', in order.
        """
        known = self.resumed(before)
        ranks = [self.resumed(state) for state in states]
        names = sorted({name for rank in ranks for name in rank.layers})
        self.layers = {
            name: _joined(known.layers.get(name), [rank.layers[name] for rank in ranks if name in rank.layers])
            for name in names
        }
        self.drawing = frozenset().union(*(rank.drawing for rank in ranks))
        self.unseen = frozenset().union(*(rank.unseen for rank in ranks))
        self.shapes = set().union(*(rank.shapes for rank in ranks))
        self.structures = set().union(*(rank.structures for rank in ranks))
        self.new_sizes = known.new_sizes + sum(rank.new_sizes - known.new_sizes for rank in ranks)
        self.looked_at = joined_looks(known.looked_at, [rank.looked_at for rank in ranks])
        self.largest_norm = max(rank.largest_norm for rank in ranks)


def _joined(known: LayerCheck | None, checks: Sequence[LayerCheck]) -> LayerCheck:
    """The check of one layer before a pass, and what each rank has added in it."""
    found = known
    for own in checks:
        if own != known:
            found = worse(found, replace(own, examples=own.examples - (0 if known is None else known.examples)))
    return checks[0] if found is None else found
