"""The record of a layer's representation: how its G is kept, and the cost of inverting it; and what was observed.

Coverage parts: the trainable parameters of a factor set, by the form in which their curvature is kept.

::

    record's branch                                         part
    eigendecomposition, woodbury, softmax_head, diagonal    block       both Kronecker factors are known whole
    block                                                   block       the block itself is
    diagonal_sketch with rows                               sketched    of G a diagonal and a sketch
    diagonal_sketch without, diagonal_block                 diagonal    of G, or of the block, the diagonal alone
    (no layer)                                              not_covered for the reason of the row

The branch ``diagonal`` is an embedding: its inputs are one-hot, so that A has no entries beside its diagonal.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from catalog.analyses.analysis import Coverage, CoverageKind, CoveragePart, ExpertTokens, NamedParameters, StarvedExpert
from catalog.responses.layer_record import Branch, LayerRecord, Observed
from engine.factors.capacitance import Factorised
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.factors.kronecker_factors import Factors
from engine.factors.low_rank import LowRank
from engine.layers.coverage import DeclaredLayer, count_by_reason
from engine.linalg.linear_operator import RowSide
from engine.memory.budget import device_bytes, resident_bytes
from engine.workspace import Workspace


def held_bytes(device: torch.device) -> tuple[int | None, int | None, int]:
    """Read the memory that is held now."""
    return (*device_bytes(device), resident_bytes())


def observe(
    begun: float,
    before: tuple[int | None, int | None, int],
    after: tuple[int | None, int | None, int],
    workspace: Workspace,
    whole: FactorSet,
    refused: tuple[str, ...] = (),
) -> Observed:
    """Record the time and memory that one layer took."""
    return Observed(
        seconds=time.perf_counter() - begun,
        allocated_before_bytes=before[0],
        allocated_after_bytes=after[0],
        reserved_before_bytes=before[1],
        reserved_after_bytes=after[1],
        host_before_bytes=before[2],
        host_after_bytes=after[2],
        not_replayed=whole.not_replayed,
        refused_rungs=refused,
        factors_from=whole.reused_from,
        measured_peak_bytes=workspace.machine.curve.stages.peak_bytes(workspace.machine.device),
    )


_BRANCHES: dict[str, Branch] = {
    "kronecker": "eigendecomposition",
    "diagonal": "diagonal",
    "block": "block",
    "diagonal_block": "diagonal_block",
    "woodbury": "woodbury",
    "softmax_head": "softmax_head",
    "diagonal_sketch": "diagonal_sketch",
}


def branch(facts: LayerFacts) -> Branch:
    """Name how a layer's curvature is represented: by what stands for G, or by the form of both sides."""
    return _BRANCHES[facts.form if facts.representation_G == "dense" else facts.representation_G]


def branch_counts(layers: Iterable[LayerFacts]) -> dict[str, int]:
    """Count the layers of each branch, in the order of first appearance; each layer has one."""
    return dict(Counter(branch(facts) for facts in layers))


def row_facts(factors: Factors, facts: LayerFacts) -> dict[str, Any]:
    """Collect the record's fields on the rows that are kept in place of G."""
    side = factors.G
    if isinstance(side, DiagonalSketch):
        rows = None if side.rows is None else side.rows.shape[0]
        return {
            "gradient_rows": rows,
            "gradient_rows_dtype": str(side.storage_dtype).removeprefix("torch.") if rows else None,
            "gradient_rows_device": facts.rows_place if rows else None,
            "sketch_bound": side.bound,
        }
    if not isinstance(side, RowSide):
        names = ("gradient_rows", "gradient_rows_dtype", "gradient_rows_device", "sketch_bound")
        return dict.fromkeys(names)
    return {
        "sketch_bound": None,
        "gradient_rows": side.count,
        "gradient_rows_dtype": str(side.storage_dtype).removeprefix("torch."),
        "gradient_rows_device": facts.rows_place,
    }


def factorise_rows(workspace: Workspace, factors: Factors, damping_g: float | None) -> Factorised | None:
    """Factorise the damped Gram matrix of a layer's T gradient rows, which takes 2 T² numbers in float64."""
    if workspace.options.decomposition == "none" or not isinstance(factors.G, LowRank) or damping_g is None:
        return None
    return factors.G.to(workspace.machine.device).factorised(damping_g, workspace.options.woodbury.eps)


def with_factorisation(rungs: tuple[str, ...] | None, taken: Factorised | None) -> tuple[str, ...] | None:
    """Append the method that inverted the damped Gram matrix to the solvers of a decomposition."""
    return rungs if taken is None else (*(rungs or ()), taken.rung)


_MOST_ROWS = 8
_MOST_NAMES = 4


def coverage(whole: FactorSet, records: Mapping[int, LayerRecord] | None = None) -> Coverage:
    """Count by parameter what the rows cover, after the law covered + declared = trainable.

    A layer's record says its form; layers without one are in the part ``covered``.
    """
    reasons = count_by_reason(whole.declared)
    identities = [layer.gradient_identity for layer in whole.layers]
    return Coverage(
        trainable_parameters=whole.trainable_parameters,
        covered_parameters=whole.covered_parameters,
        declared_parameters=sum(reasons.values()),
        covered_share=whole.covered_parameters / max(whole.trainable_parameters, 1),
        layers_covered=len(whole.layers),
        layers_declared=len(whole.declared),
        reasons=reasons,
        gradient_identity=max((each for each in identities if each is not None), default=None),
        examples_checked=min((each.examples_checked or 0 for each in whole.layers), default=None)
        if any(each is not None for each in identities)
        else None,
        looked_at=whole.looked_at,
        parts=_parts(whole, records or {}),
        experts=expert_tokens(whole),
    )


def coverage_kind(record: LayerRecord | None) -> CoverageKind:
    """Return the part of a covered layer; ``covered`` without its record."""
    if record is None:
        return "covered"
    if record.branch == "diagonal_block":
        return "diagonal"
    if record.branch == "diagonal_sketch":
        return "sketched" if record.gradient_rows else "diagonal"
    return "block"


def _parts(whole: FactorSet, records: Mapping[int, LayerRecord]) -> tuple[CoveragePart, ...]:
    kinds: dict[CoverageKind, list[LayerFacts]] = {"block": [], "diagonal": [], "sketched": [], "covered": []}
    for facts in whole.layers:
        kinds[coverage_kind(records.get(facts.ordinal))].append(facts)
    reasons: dict[str, list[DeclaredLayer]] = {}
    for row in whole.declared:
        reasons.setdefault(row.reason, []).append(row)
    return (
        *(_part(kind, None, rows) for kind, rows in kinds.items() if rows),
        *(_part("not_covered", reason, rows) for reason, rows in reasons.items()),
    )


def _part(kind: CoverageKind, reason: str | None, rows: Iterable[LayerFacts | DeclaredLayer]) -> CoveragePart:
    listed = list(rows)
    named = () if kind in ("block", "covered") else listed[:_MOST_ROWS]
    return CoveragePart(
        kind=kind,
        reason=reason,
        parameters=sum(row.parameter_count for row in listed),
        layers=len(listed),
        named=tuple(
            NamedParameters(names=row.parameters[:_MOST_NAMES], module=row.module, why=row.why or None) for row in named
        ),
    )


_NAMED = re.compile(r"experts?(?:\.(?:expert_)?\d+(?=\.|$)|(?:\.\w+)*\[\d+\]$)", re.IGNORECASE)
_SLICE = re.compile(r"\[\d+\]$")


def expert_tokens(whole: FactorSet) -> ExpertTokens | None:
    """Return the tokens that the experts of a model were sent, and which got too few; None where it has none.

    T rows and d columns bound a rank by min(T, d); d/T times as many data, routed alike, make T = d. Under `reduce`
    rows of A are the examples with a token, those of G all examples. `docs/convention.md` says what an expert is.
    """
    sent = [(facts.name, facts.positions) for facts in whole.layers]
    sent += [(row.name, 0) for row in whole.declared if row.reason == "never_routed"]
    counts: dict[str, set[int]] = {}
    for name, tokens in sent:
        counts.setdefault(_SLICE.sub("", name), set()).add(tokens)
    named = {facts.name for facts in whole.layers if _NAMED.search(facts.name)}
    named |= {name for name, _ in sent if len(counts[_SLICE.sub("", name)]) > 1}
    experts = [facts for facts in whole.layers if facts.form == "kronecker" and facts.name in named]
    # a module without tokens is declared as one without a gradient, which one like it has
    alike = {_NAMED.sub("", facts.name) for facts in experts}
    idle = [
        row.name
        for row in whole.declared
        if row.reason == "never_routed" or (row.reason == "no_gradient" and _NAMED.sub("", row.name) in alike)
    ]
    if not experts and not idle:
        return None
    starved = sorted(filter(None, map(_starved, experts)), key=lambda each: -each.times_more)
    return ExpertTokens(
        layers=len(experts) + len(idle),
        fewest=0 if idle else min(facts.positions for facts in experts),
        most=max((facts.positions for facts in experts), default=0),
        starved=len(starved),
        most_starved=tuple(starved[:8]),
        unreached=len(idle),
        unreached_layers=tuple(idle[:64]),
    )


def _starved(layer: LayerFacts) -> StarvedExpert | None:
    sides = (("A", layer.rank_bound_A, layer.in_dim), ("G", layer.rank_bound_G, layer.out_dim))
    more, side, rows, size = max((size / (rows or size), side, rows or 0, size) for side, rows, size in sides)
    named: dict[str, Any] = {"layer": layer.name, "tokens": layer.positions, "factor": side}
    return StarvedExpert(**named, rank_bound=rows, columns=size, times_more=more) if more > 1 else None
