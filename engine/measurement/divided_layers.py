"""Divided layers: each of several ranks decomposes and measures its own layers, and the others get what comes of it.

owner      by longest processing time first over n³ of what is decomposed; layers that share an A have one owner
results    spectra, metrics and records go to every rank, so that all come to the same summaries
files      go to the ranks that keep files: rank 0 of a job, every rank of a notebook
bases      go to every rank where an analysis reads those of other layers than its own

No rank waits for another before it has done all of its own layers; then they are sent, layer by layer.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from engine.artifacts import Artifacts
from engine.distributed.group import Ranks
from engine.distributed.longest_first import divide_longest_first
from engine.distributed.transfers import Label, hand_over
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.workspace import Workspace

T = TypeVar("T")
_SENT = "sent"


def decomposition_cost(facts: LayerFacts, *, own_a: bool) -> float:
    """Return what the decompositions of a layer cost."""
    sides = [facts.in_dim] if own_a and facts.form == "kronecker" else []
    if facts.representation_G != "dense":
        sides.append(min(facts.rank_bound_G or facts.out_dim, facts.out_dim))
    elif facts.form != "diagonal_block":
        sides.append(facts.out_dim)
    return float(sum(side**3 for side in sides))


def layer_units(layers: Iterable[LayerFacts]) -> list[tuple[float, tuple[LayerFacts, ...]]]:
    """Return the layers that stay together, since they share an A or are groups of one layer, with their cost.

    Units are in the order of their first layers.
    """
    units: dict[int | str, list[LayerFacts]] = {}
    places: dict[int, int | str] = {}
    for facts in layers:
        whole = facts.name.rpartition("[")[0] if facts.name.endswith("]") else ""
        place = places.get(facts.shared_A_with, facts.shared_A_with) if facts.shared_A_with is not None else None
        place = place if place is not None else whole or facts.ordinal
        places[facts.ordinal] = place
        units.setdefault(place, []).append(facts)
    return [
        (sum(decomposition_cost(facts, own_a=facts.shared_A_with is None) for facts in unit), tuple(unit))
        for unit in units.values()
    ]


def divide_layers(layers: Iterable[LayerFacts], workers: int) -> dict[int, int]:
    """Divide layers over workers by the cost of their decompositions."""
    units = layer_units(layers)
    owners = divide_longest_first([cost for cost, _ in units], workers)
    return {facts.ordinal: owner for (_, unit), owner in zip(units, owners, strict=True) for facts in unit}


@dataclass(kw_only=True)
class DividedLayers:
    """The layers of one job over its ranks, seen from one of them."""

    workspace: Workspace
    ranks: Ranks
    owners: Mapping[int, int]
    """Rank that measures each layer, by ordinal."""
    keepers: tuple[int, ...]
    """Ranks that keep files."""

    @classmethod
    def of(cls, workspace: Workspace, whole: FactorSet) -> "DividedLayers | None":
        """Return the division of a job's layers, which every rank makes alike; None where there is one rank.

        ``RankFailed`` if a rank has failed.
        """
        ranks = workspace.machine.ranks
        if ranks.size == 1:
            return None
        known = workspace.results.of(_Division)
        if known.found is None:
            keeps = ranks.gather(workspace.ports.keeps_files, "ranks that keep files")
            known.found = cls(
                workspace=workspace,
                ranks=ranks,
                owners=divide_layers(whole.layers, ranks.size) if whole.owners is None else whole.owners,
                keepers=tuple(rank for rank, each in enumerate(keeps) if each),
            )
        return known.found

    @property
    def needs_bases(self) -> bool:
        """Whether every rank reads the bases of all layers."""
        options = self.workspace.options
        return options.decomposition == "vectors" and not options.layerwise

    def is_own(self, facts: LayerFacts) -> bool:
        """Return whether a layer is this rank's."""
        return self.owners[facts.ordinal] == self.ranks.rank

    def compute(
        self,
        layers: Sequence[LayerFacts],
        compute: Callable[[LayerFacts], T],
        operation: str,
        files: "SentFiles | None" = None,
    ) -> Iterator[tuple[LayerFacts, T]]:
        """Compute something of every layer on its owner, and hand it to all.

        ``layers`` are all layers, in one order on every rank; ``compute`` is called with this rank's, and what it
        returns can be pickled. ``operation`` names it in messages. ``files`` are written by ``compute`` and handed over
        with the results.

        Raises:
            RankFailed: If a rank has failed; its own error on that rank.
            RankTimedOut: If a rank does not come in time.
        """
        with self.ranks.guarding():
            own: dict[int, T] = {}
            for facts in layers:
                if self.is_own(facts):
                    with contextlib.nullcontext() if files is None else files.of(facts.ordinal):
                        own[facts.ordinal] = compute(facts)
                    self.ranks.sign()
            for facts in layers:
                found = self._share(facts, own.pop(facts.ordinal, None), operation)
                if files is not None:
                    files.hand_over(facts, self)
                yield facts, found

    def _share(self, facts: LayerFacts, outcome: T | None, operation: str) -> T:
        found: T = self.ranks.broadcast(outcome, self.owners[facts.ordinal], f"{operation} of layer {facts.ordinal}")
        return found

    def send(
        self, facts: LayerFacts, tensors: Mapping[str, Tensor] | None, operation: str, receivers: Sequence[int]
    ) -> dict[str, Tensor] | None:
        """Send host tensors, by name, of a layer's owner to other ranks; ``RankFailed`` if a rank has failed.

        Owner and receivers return them, on the host; other ranks return None, as all do where nothing was sent.
        ``tensors`` is None on other ranks than the owner, or where there is nothing to send. ``receivers`` are in one
        order on every rank; the owner may be among them.
        """
        owner = self.owners[facts.ordinal]
        shapes = None if tensors is None else [(name, tuple(each.shape), each.dtype) for name, each in tensors.items()]
        known = self.ranks.broadcast(shapes, owner, f"{operation} of layer {facts.ordinal}")
        if known is None:
            return None
        found = {}
        for name, shape, dtype in known:
            own = tensors[name] if tensors is not None else torch.empty(0, dtype=dtype)
            arrived = hand_over(self.ranks, own, owner, receivers, shape, Label(facts.name, operation))
            if arrived is not None:
                found[name] = arrived
        return found or None


class _Division:
    """The division of one job, once it is made."""

    def __init__(self) -> None:
        self.found: DividedLayers | None = None


@dataclass(kw_only=True)
class SentFiles(Artifacts):
    """Files of layers, which their owners write, and those ranks receive that keep files.

    Until they are handed over they are in the owner's scratch place, or in memory where there is none.
    """

    division: DividedLayers
    places: Sequence[Artifacts]
    """Places where this rank writes them, if it keeps files; as many on every rank."""
    _layer: int = -1
    _written: dict[int, list[tuple[str, Mapping[str, str] | None, object]]] = field(default_factory=dict)
    """By layer: name, metadata, and the tensors or the table; of tensors in the scratch place nothing."""

    @contextlib.contextmanager
    def of(self, ordinal: int) -> Iterator[None]:
        """Take what is written inside as the files of the layer with this ordinal."""
        self._layer = ordinal
        self._written[ordinal] = []
        yield

    @property
    def _keeps(self) -> bool:
        return self.division.ranks.rank in self.division.keepers

    @property
    def _others(self) -> bool:
        return any(rank != self.division.ranks.rank for rank in self.division.keepers)

    @override
    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        for place in self.places if self._keeps else ():
            place.save_tensors(name, tensors, metadata)
        if not self._others:
            return
        scratch = self.division.workspace.ports.scratch
        if scratch is not None:
            scratch.save_tensors(f"{_SENT}/{name}", tensors, {})
        self._written[self._layer].append((name, metadata, None if scratch is not None else dict(tensors)))

    @override
    def save_json(self, name: str, value: object) -> None:
        for place in self.places if self._keeps else ():
            place.save_json(name, value)
        if self._others:
            self._written[self._layer].append((name, None, value))

    @override
    def load_tensors(self, name: str) -> dict[str, Tensor]:
        return self.places[0].load_tensors(name)

    @override
    def load_json(self, name: str) -> Any:
        return self.places[0].load_json(name)

    @override
    def remove(self, name: str) -> None:
        for place in self.places:
            place.remove(name)

    def hand_over(self, facts: LayerFacts, division: DividedLayers) -> None:
        """Send a layer's files to the ranks that keep any; those write them."""
        mine = self._written.pop(facts.ordinal, []) if division.is_own(facts) else None
        listed = (
            None
            if mine is None
            else [(name, metadata, None if metadata is not None else body) for name, metadata, body in mine]
        )
        files = division.ranks.broadcast(listed, division.owners[facts.ordinal], f"files of layer {facts.ordinal}")
        scratch, receives = division.workspace.ports.scratch, self._keeps and mine is None
        for place, (name, metadata, table) in enumerate(files):
            if metadata is None:
                for target in self.places if receives else ():
                    target.save_json(name, table)
                continue
            tensors: Any = None
            if mine is not None:
                tensors = mine[place][2] if scratch is None else scratch.load_tensors(f"{_SENT}/{name}")
            arrived = division.send(facts, tensors, "files", division.keepers)
            for target in self.places if receives and arrived is not None else ():
                target.save_tensors(name, arrived or {}, metadata)
            if mine is not None and scratch is not None:
                scratch.remove(f"{_SENT}/{name}")
