"""The stabilised factor: one side of a layer, rebuilt where that fits, or as its clipped eigenbasis."""

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from catalog.analyses.reconstruction import ReconstructedSide
from engine.factors.clipping.clip_eigenvalues import PLACEMENTS, Clipped, Placement, placement_bytes, stabilise_
from engine.factors.clipping.clipped_operator import ClippedOperator
from engine.factors.clipping.clipping_check import ClippingCheck, check_clipping, checking_bytes, relative_difference
from engine.factors.dense import as_operator
from engine.factors.kronecker_factors import digest
from engine.linalg.damping import clipping_floor
from engine.linalg.eigenbasis import Eigenbasis
from engine.memory.guard import Fallback
from engine.workspace import Workspace

_NO_CURVATURE = ClippingCheck(smallest=0.0, largest=0.0, relative_error=0.0, found_by="eigenvalues")


@dataclass(frozen=True, kw_only=True)
class Made:
    """A stabilised side with its record."""

    side: ReconstructedSide
    content: Tensor | Eigenbasis | ClippedOperator | None
    """The matrix (n, n) or diagonal (n,), its scale not in it; the eigenbasis; what a wide head is applied through;
    None where there is none of them."""


@dataclass(frozen=True, kw_only=True)
class DecomposedFactor:
    """A dense factor of one layer with its eigendecomposition, as it is stored: without its scale."""

    layer: str
    factor: Tensor
    """(n, n), or (n,) of a diagonal one."""
    scale: float
    values: Tensor
    """(n,) float64, ascending."""
    vectors: Tensor | None
    """(n, n), one eigenvector a column; None of a diagonal one."""


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """A stabilised side as it came out; its scale is not in the eigenvalues."""

    kind: str
    smallest: float
    largest: float
    relative_error: float | None
    found_by: str
    digest: str
    rungs: tuple[str, ...] = ()


def rebuild(
    workspace: Workspace,
    decomposed: DecomposedFactor,
    kappa_max: float,
    wish: Literal["auto", "device", "panels", "host"],
) -> Made:
    """Clip the spectrum of a factor at the first placement that fits, and check the result.

    Args:
        workspace: The job, whose guard chooses the placement and whose earlier plan is followed.
        decomposed: The factor with its eigendecomposition; it is left as it is.
        kappa_max: Condition number to clip at, above 1.
        wish: Placement to begin with; ``auto`` takes the plan's.

    Returns:
        The clipped matrix, shape (n, n), or diagonal, shape (n,), in the factor's dtype, and its record.

    Raises:
        ValueError: If a matrix comes without its eigenvectors.
        NonFiniteFactor: If factor or basis hold NaN or Inf.
        OutOfMemory: If no placement fits.

    Memory:
        A copy of the factor, from which a lower rung begins where memory runs out halfway; and as
        ``placement_bytes`` says.
    """
    factor, values, vectors = decomposed.factor, decomposed.values, decomposed.vectors
    layer = decomposed.layer
    if as_operator(factor).is_diagonal:
        return _clipped_diagonal(decomposed, kappa_max)
    if vectors is None:
        raise ValueError(f"layer `{layer}`: a matrix is stabilised by its eigenvectors, and none were made")
    size, largest = factor.shape[0], float(values[-1])
    clipped = int((values < clipping_floor(largest, kappa_max)).sum())
    chosen = workspace.resume.chosen if workspace.results.plan is None else workspace.results.plan.chosen
    planned = None if chosen is None else chosen.placement.get(layer)
    rungs = []
    for place in PLACEMENTS:
        on_device, on_host = placement_bytes(size, clipped, factor.dtype, place, workspace.machine.device)
        rungs.append(
            Fallback(
                name=place,
                formula="n² + n · r on the device, and tiles" if place == "device" else "tiles",
                device_bytes=on_device,
                # a copy of the factor besides; what came out is looked at when tiles are gone
                host_bytes=factor.numel() * factor.element_size() + max(on_host, checking_bytes(size, factor.dtype)),
                run=partial(_attempt, workspace, decomposed, kappa_max, place),
            )
        )
    found = workspace.machine.guard.run_with_fallbacks(
        rungs,
        what="the stabilised factor",
        layer=layer,
        stage="reconstruction",
        begin=planned if wish == "auto" else wish,
    )
    matrix, done = found.value
    came_out = check_clipping(matrix, values, vectors, done.floor) if largest > 0 else _NO_CURVATURE
    outcome = _Outcome(
        kind="matrix",
        smallest=came_out.smallest,
        largest=came_out.largest,
        relative_error=came_out.relative_error,
        found_by=came_out.found_by,
        digest=digest(matrix),
        rungs=found.taken,
    )
    return Made(content=matrix, side=_side(done, values, decomposed.scale, outcome))


def in_eigenbasis(
    values: Tensor,  # (n,) ascending; of a diagonal side in the order of its entries
    vectors: Tensor | None,  # (n, n), or (n, r) of the r largest
    kappa_max: float,
    dtype: torch.dtype,
    *,
    kind: str,
) -> Made:
    """Keep a side as its clipped eigenbasis; its scale is in the eigenvalues.

    Args:
        values: Eigenvalues, shape (n,), float64, ascending; of a diagonal side its entries, in their order.
        vectors: Eigenvectors, shape (n, n), or (n, r) of the r largest eigenvalues; None of a diagonal side.
        kappa_max: Condition number to clip at, above 1.
        dtype: Precision that the vectors are kept in.
        kind: Name of the side's form in the record, such as ``matrix`` or ``diagonal``.

    Returns:
        The eigenbasis, which no matrix was rebuilt from, and its record.

    Raises:
        NonFiniteFactor: If the eigenvalues hold NaN or Inf.
    """
    kept = Eigenbasis.of(values, vectors, kappa_max, dtype)
    ordered = torch.sort(values).values
    below = ordered < kept.floor
    largest = float(ordered[-1])
    done = Clipped(
        size=values.numel(),
        clipped=int(below.sum()),
        update="none",
        floor=kept.floor,
        largest=largest,
        mass=float((kept.floor - ordered[below]).sum()),
        precision=str(dtype).removeprefix("torch."),
        placement="host",
    )
    smallest = max(float(ordered[0]), kept.floor)
    outcome = _Outcome(
        kind=kind,
        smallest=smallest,
        largest=largest,
        relative_error=None,
        found_by="construction",
        digest=_basis_digest(kept),
    )
    # no update was summed, and so it has no place
    side = replace(_side(done, ordered, 1.0, outcome), update="eigenbasis", placement=None)
    return Made(content=kept, side=side)


def not_stabilised(size: int, kind: str, why: str) -> Made:
    """Return a side whose spectrum is not known, with the reason in its record.

    Args:
        size: Rows of the side.
        kind: Name of its form in the record.
        why: The reason, as a part of a sentence.

    Returns:
        A side without content; every number of its record but the size is None.
    """
    blank = dict.fromkeys(ReconstructedSide.__dataclass_fields__)
    known = {"size": size, "kind": kind, "update": "not stabilised", "why": why, "rungs": ()}
    return Made(content=None, side=ReconstructedSide(**{**blank, **known}))  # type: ignore[arg-type]


def _attempt(
    workspace: Workspace, decomposed: DecomposedFactor, kappa_max: float, placement: Placement
) -> tuple[Tensor, Clipped]:
    # a copy: an attempt that runs out of memory halfway leaves the factor to the next one as it was
    matrix, values, vectors = decomposed.factor.clone(), decomposed.values, decomposed.vectors
    done = stabilise_(matrix, values, vectors, kappa_max, placement=placement, device=workspace.machine.device)
    return matrix, done


def _clipped_diagonal(decomposed: DecomposedFactor, kappa_max: float) -> Made:
    factor, values = decomposed.factor, decomposed.values
    diagonal = factor.clone()
    done = replace(stabilise_(diagonal, values, None, kappa_max), precision="float64", placement="host")
    wide, truth = diagonal.to(torch.float64), factor.to(torch.float64).clamp_min(done.floor)
    outcome = _Outcome(
        kind="diagonal",
        smallest=float(wide.min()),
        largest=float(wide.max()),
        relative_error=relative_difference(wide, truth),
        found_by="eigenvalues",
        digest=digest(diagonal),
    )
    return Made(content=diagonal, side=_side(done, values, decomposed.scale, outcome))


def _side(done: Clipped, values: Tensor, scale: float, outcome: _Outcome) -> ReconstructedSide:
    trace = float(values.sum())
    return ReconstructedSide(
        size=done.size,
        kind=outcome.kind,
        clipped=done.clipped,
        unclipped=done.size - done.clipped,
        update=done.update,
        why=None,
        precision=done.precision,
        placement=done.placement,
        rungs=outcome.rungs,
        floor=done.floor * scale,
        floor_reached=outcome.smallest * scale,
        kappa_reached=outcome.largest / outcome.smallest if outcome.smallest > 0 else None,
        found_by=outcome.found_by,
        trace=trace * scale,
        mass=done.mass * scale,
        mass_share=done.mass / trace if trace > 0 else None,
        relative_error=outcome.relative_error,
        smallest=None,
        digest=outcome.digest,
    )


def _basis_digest(side: Eigenbasis) -> str:
    """Over the digests of values and vectors."""
    hashed = hashlib.sha256(digest(side.values).encode())
    if side.vectors is not None:
        hashed.update(digest(side.vectors).encode())
    return hashed.hexdigest()
