"""Analysis cost: the bytes and seconds of an analysis once there are factors, and how they enter the plan of a job.

An analysis takes one layer at a time, beside what the decompositions have left. Its class foresees its own part from
shapes alone (``cost``); what these parts share stands here, with their sum.
"""

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch

from catalog import ANALYSES, PLANNED_STAGES
from engine.collection.probe import Probe, read_back_bytes
from engine.layers.layer import TreatedLayer
from engine.memory.budget import MemoryBudget
from engine.memory.plan import Budgeted, Plan, Source, Stage, Term
from engine.planning.collection.memory import correction_bytes
from engine.planning.collection.seconds import Work, with_seconds
from engine.planning.decomposition_memory import kept_as
from engine.workspace import Workspace

_AFTERWARDS = PLANNED_STAGES[PLANNED_STAGES.index("decomposition") + 1]
"""The first stage of an analysis: which of them comes first, the plan does not know."""
_JSON_NUMBER = 20
"""Characters of a float64 in a table, about."""


@dataclass(frozen=True, kw_only=True)
class KeptFiles:
    """Files that an analysis keeps."""

    name: str
    formula: str
    size_bytes: int


def with_disk(
    plan: Plan, workspace: Workspace, kept: torch.dtype, probe: Probe, files: Sequence[KeptFiles] = ()
) -> Plan:
    """Add the bytes on the disk in each stage: spilled factors, checkpoints, and kept artifacts."""
    packed = probe.packed_bytes(kept.itemsize)
    terms = []
    if len(plan.chosen.parts) > 1:
        terms += _from(plan, "collection", "laid aside", "Σ triangles, as kept", packed)
    if workspace.saves_checkpoints:
        sums = next((term.size_bytes for term in plan.terms if term.name == "accumulators"), 0)
        formula = "2 · the sums under way: the last one stands until the next is whole"
        terms.append(Term("checkpoints", formula, 2 * sums, "disk", "collection", source="estimated"))
    if plan.chosen.corrections and workspace.ports.scratch is not None and len(plan.chosen.corrections) > 1:
        size = sum(correction_bytes(layer, kept.itemsize, follows=layer.name in probe.shared) for layer in probe.layers)
        terms += _from(plan, "correction", "corrections", "Σ in² + out² + in · out", size)
    if workspace.ports.scratch is not None:
        bases = sum(term.size_bytes for term in plan.terms if term.name == "bases" and term.place == "disk")
        terms += _from(plan, _AFTERWARDS, "bases", "Σ n² as kept", bases)
    if workspace.options.keeps_factors:
        terms += _from(plan, "decomposition", "kept factors", "Σ triangles, as kept", packed)
    if "spectra" in workspace.options.keep and workspace.options.decomposition != "none":
        numbers = sum(layer.groups * (layer.in_dim + layer.out_dim) for layer in probe.layers)
        formula = f"Σ (in + out) · {_JSON_NUMBER}"
        terms += _from(plan, "decomposition", "kept spectra", formula, _JSON_NUMBER * numbers, source="estimated")
    for each in files:
        terms += _from(plan, _AFTERWARDS, each.name, each.formula, each.size_bytes)
    return replace(plan, terms=(*plan.terms, *terms))


def _from(plan: Plan, first: Stage, name: str, formula: str, size: int, *, source: Source = "exact") -> list[Term]:
    """A term for every stage of ``plan`` from ``first`` on."""
    later = PLANNED_STAGES[PLANNED_STAGES.index(first) :]
    stages = [stage for stage in plan.stages if stage in later and size]
    return [Term(name, formula, size, "disk", stage, source=source) for stage in stages]


_CARRIED = ("factors", "bases", "corrections")
"""Terms of the decompositions that stay until the job ends."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The part of one analysis in a plan."""

    terms: tuple[Term, ...] = ()
    """Bytes on the device, the host and the disk, each in a stage of the analysis."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each of its stages."""
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
    """Cost of the data, and the speed of the device."""
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
    def parameter_bytes(self) -> int:
        """Bytes of every number of the model's parameters once, covered or not; 0 without a model."""
        model = self.workspace.inputs.model
        return 0 if model is None else self.probe.dtype.itemsize * sum(each.numel() for each in model.parameters())

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
        return self.probe.packed_bytes(self.stored.itemsize)

    def stage_bytes(self, place: Budgeted, stage: str, terms: Iterable[Term]) -> int:
        """Return the bytes held at once in a stage of an analysis with more terms than the plan has so far."""
        return replace(self.plan, terms=(*self.plan.terms, *terms)).stage_bytes(place, stage)

    def carried(self, stage: str, *, bases: bool = True) -> list[Term]:
        """Return the terms of the decompositions that still stand in a stage of an analysis.

        With ``bases`` the stage comes after the decompositions, whose bases stand then.
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

        Of a layer in groups they are those of one group; the host holds ``copies`` of them.
        """
        size = read_back_bytes(layer, self.probe, self.stored)
        found = []
        if copies:
            formula = f"{copies} · (in² + out²), as kept" if copies > 1 else "in² + out², as kept"
            found.append(Term("read back", formula, copies * size, "host", stage, layer.name))
        if self.device.type == "cuda" and size:
            found.append(Term("factors on the device", "in² + out², as kept", size, "device", stage, layer.name))
        return found


def with_analyses(plan: Plan, workspace: Workspace, probe: Probe, budget: MemoryBudget, work: Work) -> Plan:
    """Add the bytes and seconds of the job's analyses to a plan up to the decompositions, and its bytes on the disk."""
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
