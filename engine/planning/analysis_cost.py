"""Analysis cost: the bytes and seconds of an analysis once there are factors, and how they enter the plan of a job.

An analysis takes one layer at a time, beside what the decompositions have left. Its class foresees its own part from
shapes alone (``cost``); what these parts share stands here, with their sum.
"""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

import torch

from catalog import ANALYSES
from engine.collection.probe import Probe
from engine.layers.layer import TreatedLayer
from engine.memory.budget import MemoryBudget
from engine.memory.plan import Budgeted, Plan, Term
from engine.planning.collection.seconds import Work, with_seconds
from engine.planning.decomposition_memory import kept_as, read_back_bytes
from engine.planning.disk_usage import KeptFiles, packed_bytes, with_disk
from engine.workspace import Workspace

_CARRIED = ("factors", "bases", "corrections")
"""Terms of the decompositions that stay until the job ends."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The part of one analysis in a plan."""

    terms: tuple[Term, ...] = ()
    """Bytes on the device, the host and the disk, each in a stage of the analysis."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of each of its stages."""
    kept: tuple[KeptFiles, ...] = ()
    """Files that stay until the job ends."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``Chosen`` that it decides."""


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A job as far as it is planned, for an analysis to add its cost to."""

    workspace: Workspace
    probe: Probe
    budget: MemoryBudget
    work: Work
    """What the data costs, and the speed of the device."""
    plan: Plan
    """Collection and decompositions, and the analyses before this one."""

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.workspace.machine.device

    @property
    def place(self) -> Budgeted:
        """The place of what the device holds: the host where it is the processor."""
        return "device" if self.device.type == "cuda" else "host"

    @property
    def stored(self) -> torch.dtype:
        """Precision that factors are kept in."""
        return kept_as(self.workspace, self.probe.dtype)

    @property
    def passes(self) -> int:
        """Passes of the collection; after several the factors are read back from the disk."""
        return len(self.plan.chosen.parts)

    @cached_property
    def packed_bytes(self) -> int:
        """Bytes of all factors as they are written: triangles, diagonals and gradient rows."""
        return packed_bytes(self.probe, self.stored)

    def stage_bytes(self, place: Budgeted, stage: str, terms: Iterable[Term]) -> int:
        """Return the bytes of a stage with more terms than the plan has so far.

        Args:
            place: Device or host.
            stage: A stage of an analysis.
            terms: What is added.

        Returns:
            Bytes held at once.
        """
        return replace(self.plan, terms=(*self.plan.terms, *terms)).stage_bytes(place, stage)

    def carried(self, stage: str, *, bases: bool = True) -> list[Term]:
        """Return the terms of the decompositions that still stand in a stage of an analysis.

        Args:
            bases: Whether it comes after the decompositions, whose bases stand then.

        Returns:
            Terms of that stage.
        """
        return [
            replace(term, stage=stage)
            for term in self.plan.terms
            if term.stage == "decomposition"
            and term.layer is None
            and term.place != "disk"
            and term.name in _CARRIED
            and (bases or term.name != "bases")
        ]

    def read_back(self, layer: TreatedLayer, stage: str, *, copies: int) -> list[Term]:
        """Return the terms of one layer's factors where all wait on the disk, and on a device where they visit it.

        Args:
            layer: A layer; of one in groups, one group.
            copies: How many of them the host holds.

        Returns:
            Terms of that layer.
        """
        size = read_back_bytes(layer, self.probe, self.stored)
        found = []
        if copies:
            formula = f"{copies} · (in² + out²), as kept" if copies > 1 else "in² + out², as kept"
            found.append(term("read back", formula, copies * size, "host", stage, layer.name))
        if self.device.type == "cuda" and size:
            found.append(term("factors on the device", "in² + out², as kept", size, "device", stage, layer.name))
        return found


def term(
    name: str, formula: str, size: int, place: Literal["device", "host", "disk"], stage: str, layer: str | None = None
) -> Term:
    """Return a term that shapes give exactly."""
    return Term(name=name, formula=formula, size_bytes=size, place=place, source="exact", stage=stage, layer=layer)


def with_analyses(plan: Plan, workspace: Workspace, probe: Probe, budget: MemoryBudget, work: Work) -> Plan:
    """Add the bytes and seconds of the job's analyses, and its bytes on the disk.

    Args:
        plan: The plan up to the decompositions.
        workspace: The job.
        probe: Layers and representations.
        budget: Bytes of each place.
        work: What the data costs.

    Returns:
        The whole plan.
    """
    plan = with_seconds(plan, work)
    kept: list[KeptFiles] = []
    for kind in ANALYSES:
        if kind not in workspace.options.kinds:
            continue
        job = PlannedJob(workspace=workspace, probe=probe, budget=budget, work=work, plan=plan)
        cost = _cost_of(kind)(workspace.options.of(kind), job)
        kept += cost.kept
        plan = replace(
            plan,
            terms=(*plan.terms, *cost.terms),
            seconds={**plan.seconds, **cost.seconds},
            chosen=replace(plan.chosen, **cost.chosen),
        )
    return with_disk(plan, workspace, kept_as(workspace, probe.dtype), probe, kept)


@cache
def _cost_of(kind: str) -> Callable[[Any, PlannedJob], Cost]:
    """The analysis's own forecast; its class stands floors above, where the catalog names it."""
    found: Callable[[Any, PlannedJob], Cost] = pkgutil.resolve_name(ANALYSES[kind].implementation).cost
    return found
