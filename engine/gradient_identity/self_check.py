"""The self-check of one collection: the batches to be checked, and the results of each layer so far.

The first batch is checked before any sum is allocated, with up to four different examples of it, so
that a layer that fails can still be treated in another way, or not at all. While the data passes
through (`growing`), one example of batches 1, 2, 4, 8 and so on is checked, and one of every batch
that calls a layer as no batch before it did. The examples to be checked follow from the batch's index alone,
and no generator, buffer or sum is changed by a check: factors have the same bits without.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from engine.gradient_identity.check import BatchCheck, pick_examples
from engine.gradient_identity.checked_model import Subject
from engine.gradient_identity.cut_padding import padding_has_no_gradient
from engine.gradient_identity.layer_check import Checked, LayerCheck
from engine.gradient_identity.schedule import FIRST_EXAMPLES, LATER_EXAMPLES
from engine.layers.layer import TreatedLayer
from engine.model.batches import Batch, tensors
from engine.saved_fields import load_fields, save_fields


@dataclass
class SelfCheck:
    """The checks of one collection so far."""

    NOT_SAVED: ClassVar[Mapping[str, str]] = {
        "subject": "the model and how it is run, which every attempt has",
        "mode": "an option of the collection, which is among a checkpoint's conditions",
        "has_room": "asks the machine of the attempt",
    }

    subject: Subject
    mode: Literal["first", "growing", "off"]
    has_room: Callable[[], bool] = lambda: True
    """Whether there is memory for the model in float64."""
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

    def check_first(
        self,
        layers: Sequence[TreatedLayer],
        batch: Batch,
        others: Mapping[str, nn.Parameter],
        count: int = FIRST_EXAMPLES,
    ) -> dict[str, LayerCheck]:
        """Check ``layers`` on different examples of the first batch.

        Args:
            layers: Those that are not known to be flawed.
            batch: The whole first batch.
            others: Parameters that no layer covers, by name.
            count: Examples that go through the model together.

        Returns:
            What was found of each layer.

        Raises:
            EngineError: If the model refuses the batch.
        """
        some = pick_examples(batch, different_examples(batch, count))
        found = self._check(layers, some, range(some.size), repeats=True, others=others)
        self.drawing |= found.draws
        self.unseen |= found.unseen
        self.largest_norm = max(self.largest_norm, found.largest_norm)
        self.layers |= found.layers
        return found.layers

    def allows_cutting(self, layers: Sequence[TreatedLayer], batch: Batch) -> bool:
        """Tell whether the padding of the first batch may be cut off, by the gradients of some layers.

        Args:
            layers: The layers; those that draw random numbers are left out.
            batch: The whole first batch.

        Returns:
            False where the most padded example has other gradients without its padding.
        """
        some = [layer for layer in layers if layer.name not in self.drawing]
        with self._generators_kept():
            return padding_has_no_gradient(self.subject, some, batch, self.subject.collection.seed)

    def is_due(self, number: int, shapes: AbstractSet[str]) -> bool:
        """Tell whether a batch is to be checked, and remember the shapes of its calls.

        Args:
            number: The batch, from 0.
            shapes: Shapes in which it has called the layers.

        Returns:
            True in the mode `growing` for batches 1, 2, 4, 8 and so on, and for those with a shape that no batch had
            before.
        """
        fresh = not shapes <= self.shapes
        self.shapes |= shapes
        if self.mode != "growing" or number == 0:
            return False
        return fresh or number & (number - 1) == 0

    def check_later(self, layers: Sequence[TreatedLayer], batch: Batch, number: int) -> list[str]:
        """Check layers on one example of a later batch.

        Args:
            layers: Layers that are not known to be flawed; none runs no check.
            batch: The whole batch.
            number: Its number in the data, from 0, which decides the example.

        Returns:
            Names of the layers that fail.

        Raises:
            EngineError: If the model refuses the batch.
        """
        if not layers:
            return []
        first = number % batch.size
        places = [first, *(place for place in range(batch.size) if place != first)][:LATER_EXAMPLES]
        found = self._check(layers, pick_examples(batch, places), [0], repeats=False, others={})
        for name, check in found.layers.items():
            self.layers[name] = _worse(self.layers.get(name), check)
        return [name for name, check in found.layers.items() if check.failed]

    def _check(
        self,
        layers: Sequence[TreatedLayer],
        batch: Batch,
        examples: Sequence[int],
        *,
        repeats: bool,
        others: Mapping[str, nn.Parameter],
    ) -> Checked:
        check = BatchCheck(
            subject=self.subject,
            layers=layers,
            batch=batch,
            examples=examples,
            seed=self.subject.collection.seed,
            drawing=self.drawing,
            repeats=repeats,
            others=others,
            has_room=self.has_room,
            explained=any(check.mixes and check.error > 0 for check in self.layers.values()),
            floor=self.largest_norm,
        )
        with self._generators_kept():
            return check.run()

    def _generators_kept(self) -> contextlib.AbstractContextManager[None]:
        devices = [self.subject.device] if self.subject.device.type == "cuda" else []
        return torch.random.fork_rng(devices=devices)

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """Return everything that a later attempt goes on from, as plain values."""
        return save_fields(self)

    def resumed(self, stored: Mapping[str, Any]) -> Self:
        """Return the same checks at another state, in objects of their own.

        Args:
            stored: What ``state`` returned.

        Returns:
            A copy; what it finds is not found by this one.
        """
        return replace(self, **load_fields(type(self), stored))

    def join(self, before: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> None:
        """Take in the checks that several ranks have made since a state that was the same on all of them.

        Args:
            before: That state.
            states: What ``state`` returns on each rank, in order.
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
        self.largest_norm = max(rank.largest_norm for rank in ranks)


def _joined(known: LayerCheck | None, checks: Sequence[LayerCheck]) -> LayerCheck:
    """The check of one layer before a pass, and what each rank has added in it."""
    found = known
    for own in checks:
        if own != known:
            found = _worse(found, replace(own, examples=own.examples - (0 if known is None else known.examples)))
    return checks[0] if found is None else found


def different_examples(batch: Batch, count: int) -> list[int]:
    """Choose examples whose inputs differ.

    Args:
        batch: The batch.
        count: Number of examples wanted.

    Returns:
        Ascending places of up to ``count`` examples; equal ones are among them where too few differ.
    """
    chosen: list[int] = []
    parts = tensors(batch.inputs)
    for place in range(batch.size):
        if len(chosen) == count:
            return chosen
        if not any(all(torch.equal(each[place], each[other]) for each in parts) for other in chosen):
            chosen.append(place)
    rest = [place for place in range(batch.size) if place not in chosen]
    return sorted(chosen + rest[: min(count, batch.size) - len(chosen)])


def _worse(before: LayerCheck | None, now: LayerCheck) -> LayerCheck:
    """Both checks of one layer as one."""
    if before is None:
        return now
    worst = now if now.failed or now.error > before.error else before
    loosest = max(before, now, key=lambda each: each.tolerance or 0.0)
    return replace(
        worst,
        examples=before.examples + now.examples,
        tolerance=loosest.tolerance,
        tolerance_reason=loosest.tolerance_reason,
    )
