"""Disk bytes: what waits in the scratch place at each stage of a job, and what its artifacts keep."""

from dataclasses import replace

import torch

from catalog.analyses.reconstruction import ReconstructionParams
from engine.collection.probe import Probe
from engine.layers.layer import TreatedLayer
from engine.memory.plan import STAGES, Plan, Source, Stage, Term
from engine.planning.collection.memory import correction_bytes
from engine.workspace import Workspace

_JSON_NUMBER = 20
"""Characters of a float64 in a table, about."""


def with_disk(
    plan: Plan,
    workspace: Workspace,
    kept: torch.dtype,
    probe: Probe,
) -> Plan:
    """Add the bytes on the disk in each stage: spilled factors, checkpoints, and kept artifacts."""
    packed = sum(
        _packed_bytes(layer, probe, kept.itemsize, follows=layer.name in probe.shared) for layer in probe.layers
    )
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
        terms += _from(plan, "reconstruction", "bases", "Σ n² as kept", bases)
    if "factors" in workspace.options.keep or "factors" in workspace.options.kinds:
        terms += _from(plan, "decomposition", "kept factors", "Σ triangles, as kept", packed)
    if "spectra" in workspace.options.keep and workspace.options.decomposition != "none":
        numbers = sum(layer.groups * (layer.in_dim + layer.out_dim) for layer in probe.layers)
        formula = f"Σ (in + out) · {_JSON_NUMBER}"
        terms += _from(plan, "decomposition", "kept spectra", formula, _JSON_NUMBER * numbers, source="estimated")
    params = workspace.options.of("reconstruction") or ReconstructionParams()
    if "reconstruction" in workspace.options.kinds and params.keep_matrices:
        # an eigenbasis is a square where a matrix is a triangle
        size, formula = packed, "Σ triangles, as kept"
        if params.route == "eigenbasis":
            size, formula = 2 * packed, "Σ n², as kept, at most"
        terms += _from(plan, "reconstruction", "kept matrices", formula, size)
    return replace(plan, terms=(*plan.terms, *terms))


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
    later = STAGES[STAGES.index(first) :]
    return [_term(name, formula, size, stage, source=source) for stage in plan.stages if stage in later and size]


def _term(name: str, formula: str, size: int, stage: Stage, *, source: Source = "exact") -> Term:
    return Term(name=name, formula=formula, size_bytes=size, place="disk", source=source, stage=stage)
