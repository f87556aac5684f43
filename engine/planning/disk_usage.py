"""Disk bytes: what waits in the scratch place at each stage of a job, and what its artifacts keep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from catalog import PLANNED_STAGES
from engine.collection.probe import Probe
from engine.layers.layer import TreatedLayer
from engine.memory.plan import Plan, Source, Stage, Term
from engine.planning.collection.memory import correction_bytes
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
    """Add the bytes on the disk in each stage: spilled factors, checkpoints, and kept artifacts.

    Args:
        plan: The plan with all its stages.
        workspace: The job.
        kept: Precision that factors are kept in.
        probe: Layers and representations.
        files: What the analyses keep.

    Returns:
        The plan with these terms.
    """
    packed = packed_bytes(probe, kept)
    terms = []
    if len(plan.chosen.parts) > 1:
        terms += _from(plan, "collection", "laid aside", "Σ triangles, as kept", packed)
    if workspace.saves_checkpoints:
        sums = next((term.size_bytes for term in plan.terms if term.name == "accumulators"), 0)
        formula = "2 · the sums under way: the last one stands until the next is whole"
        terms.append(_term("checkpoints", formula, 2 * sums, "collection", source="estimated"))
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


def packed_bytes(probe: Probe, kept: torch.dtype) -> int:
    """Return the bytes of all factors as they are written.

    Args:
        probe: Layers and representations.
        kept: Precision that factors are kept in.

    Returns:
        Of triangles, of diagonals as they are, and of gradient rows.
    """
    return sum(_packed_bytes(layer, probe, kept.itemsize, follows=layer.name in probe.shared) for layer in probe.layers)


def _packed_bytes(layer: TreatedLayer, probe: Probe, item: int, *, follows: bool) -> int:
    """Of the triangles of one layer's own factors, diagonals as they are, and gradient rows."""
    sides = probe.sides(layer, follows=follows)
    rows = 0 if probe.kept(layer).kind == "dense" else probe.kept(layer).held_bytes(layer)
    return rows + layer.groups * item * sum(side * (side + 1) // 2 if dense else side for side, dense in sides)


def _from(
    plan: Plan,
    first: Stage,
    name: str,
    formula: str,
    size: int,
    *,
    source: Source = "exact",
) -> list[Term]:
    """A term for every stage of ``plan`` from ``first`` on."""
    later = PLANNED_STAGES[PLANNED_STAGES.index(first) :]
    return [_term(name, formula, size, stage, source=source) for stage in plan.stages if stage in later and size]


def _term(name: str, formula: str, size: int, stage: Stage, *, source: Source = "exact") -> Term:
    return Term(name=name, formula=formula, size_bytes=size, place="disk", source=source, stage=stage)
