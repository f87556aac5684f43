"""The record of a layer's representation: how its G is kept, and the cost of inverting it; and what was observed."""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from catalog.responses.layer_record import Branch, Observed
from engine.factors.capacitance import Factorised
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.factors.kronecker_factors import Factors
from engine.factors.low_rank import LowRank
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
    """Count the layers of each branch; each layer has one.

    Args:
        layers: Covered layers.

    Returns:
        Counts by branch, in the order of first appearance.
    """
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
    """Factorise the damped Gram matrix of a layer's gradient rows.

    Memory:
        2 T² numbers in float64, for T rows.
    """
    if workspace.options.decomposition == "none" or not isinstance(factors.G, LowRank) or damping_g is None:
        return None
    return factors.G.to(workspace.machine.device).factorised(damping_g, workspace.options.woodbury.eps)


def with_factorisation(rungs: tuple[str, ...] | None, taken: Factorised | None) -> tuple[str, ...] | None:
    """Append the method that inverted the damped Gram matrix to the solvers of a decomposition."""
    return rungs if taken is None else (*(rungs or ()), taken.rung)
