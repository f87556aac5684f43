"""The stabilised factor: one side of a layer, rebuilt where that fits, as its clipped eigenbasis, or as an operator."""

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from catalog.analyses.reconstruction import ReconstructedSide
from engine.factors.clipping.clip_eigenvalues import PLACEMENTS, Clipped, Placement, placement_bytes, stabilise_
from engine.factors.clipping.clipping_check import ClippingCheck, check_clipping, checking_bytes, relative_difference
from engine.factors.dense import as_operator
from engine.factors.kronecker_factors import digest
from engine.linalg.damping import clipping_floor
from engine.linalg.eigenbasis import ClippedSide, Eigenbasis
from engine.linalg.linear_operator import Operator
from engine.measurement.layer_measurement import Measured
from engine.memory.guard import Fallback
from engine.workspace import Workspace

_NO_CURVATURE = ClippingCheck(smallest=0.0, largest=0.0, relative_error=0.0, found_by="eigenvalues")


@dataclass(frozen=True, kw_only=True)
class Made:
    """A stabilised side with its record."""

    side: ReconstructedSide
    content: Tensor | ClippedSide | None
    """The matrix (n, n) or diagonal (n,), its scale not in it; what it is applied through; None for neither."""


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


def rebuild(
    workspace: Workspace,
    decomposed: DecomposedFactor,
    kappa_max: float,
    wish: Literal["auto", "device", "panels", "host"],
) -> Made:
    """Clip the spectrum of a factor, left as it is, at the first placement that fits, and check the result.

    The job's guard chooses the placement, beginning with ``wish`` (``auto`` takes the plan's), and follows its earlier
    plan. ``kappa_max`` is the condition number to clip at, above 1. The clipped matrix (n, n), or diagonal (n,), has
    the factor's dtype. A copy of the factor, from which a lower rung begins where memory runs out halfway, is held
    beside what ``placement_bytes`` says.

    Raises:
        ValueError: If a matrix comes without its eigenvectors.
        NonFiniteFactor: If factor or basis hold NaN or Inf.
        OutOfMemory: If no placement fits.
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
    side = _side("matrix", done, float(values.sum()), (came_out.smallest, came_out.largest), decomposed.scale)
    made = replace(
        side,
        placement=done.placement,
        rungs=found.taken,
        found_by=came_out.found_by,
        relative_error=came_out.relative_error,
        digest=digest(matrix),
    )
    return Made(content=matrix, side=made)


def in_eigenbasis(
    values: Tensor,  # (n,) ascending; of a diagonal side in the order of its entries
    vectors: Tensor | None,  # (n, n), or (n, r) of the r largest
    kappa_max: float,
    dtype: torch.dtype,
    *,
    kind: str,
) -> Made:
    """Keep a side as its clipped eigenbasis; its scale is in the eigenvalues, and no matrix is rebuilt.

    ``kappa_max`` is the condition number to clip at, above 1. Eigenvalues are in float64, vectors are kept in
    ``dtype``; a diagonal side has none. ``kind`` names the side's form in the record, such as ``matrix`` or
    ``diagonal``. ``NonFiniteFactor`` if the eigenvalues hold NaN or Inf.
    """
    basis = Eigenbasis(values if vectors is None else values[values.numel() - vectors.shape[1] :], vectors)
    kept = basis.clip(kappa_max, dtype)
    ordered = torch.sort(values).values
    below = ordered[ordered < kept.floor]
    done = Clipped(
        size=values.numel(),
        clipped=below.numel(),
        update="none",
        floor=kept.floor,
        largest=float(ordered[-1]),
        mass=float((kept.floor - below).sum()),
        precision=str(dtype).removeprefix("torch."),
        placement="host",
    )
    side = _side(kind, done, float(ordered.sum()), (max(float(ordered[0]), kept.floor), done.largest))
    return Made(content=kept, side=replace(side, update="eigenbasis", digest=_basis_digest(kept)))


def clip_structured(layer: Measured, side: Operator, kappa_max: float) -> Made:
    """Clip a layer's G (out_dim, out_dim) at ``λ_max / kappa_max`` without making it dense; ``kappa_max`` is above 1.

    The eigenvalues of G were computed, or counted between bounds. The result is an eigenbasis of gradient rows, or of a
    small softmax head; an operator of a wide one, or of a sketch; neither where only the diagonal is known.
    """
    if side.has_basis and layer.G.spectrum is not None:
        basis = layer.load_basis("G")
        dtype = torch.float64 if side.storage_dtype == torch.float64 else torch.float32
        return in_eigenbasis(basis.values, basis.vectors, kappa_max, dtype, kind=side.kind)
    values = layer.G.spectrum if layer.G.counted is None else layer.G.counted.values
    if values is None:
        return not_stabilised(side.size, side.kind, "only its diagonal and trace are kept")
    kept = side.clip(kappa_max, layer.facts.name, max(float(values[-1]), 0.0))
    below = values[values < kept.floor]
    done = Clipped(
        size=side.size,
        clipped=int(below.numel()) if layer.clipping_G.clipped is None else layer.clipping_G.clipped,
        update="none",
        floor=kept.floor,
        largest=max(float(values[-1]), 0.0),
        mass=float((kept.floor - below).sum()),
        precision="float64",
        placement="host",
    )
    made = _side(side.kind, done, side.trace(), (max(float(values[0]), kept.floor), done.largest))
    own = hashlib.sha256(f"{side.digest()} {kept.floor!r}".encode()).hexdigest()
    return Made(content=kept, side=replace(made, update="operator", digest=own))


def not_stabilised(size: int, kind: str, why: str) -> Made:
    """Return a side without content, as its spectrum is not known, with the reason in its record.

    Every number of the record but the size is None. ``kind`` names the side's form, ``why`` is a part of a sentence.
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
    done = replace(stabilise_(diagonal, values, None, kappa_max), precision="float64")
    wide, truth = diagonal.to(torch.float64), factor.to(torch.float64).clamp_min(done.floor)
    side = _side("diagonal", done, float(values.sum()), (float(wide.min()), float(wide.max())), decomposed.scale)
    made = replace(
        side,
        placement="host",
        found_by="eigenvalues",
        relative_error=relative_difference(wide, truth),
        digest=digest(diagonal),
    )
    return Made(content=diagonal, side=made)


def _side(
    kind: str, done: Clipped, trace: float, reached: tuple[float, float], scale: float = 1.0
) -> ReconstructedSide:
    """The record of a side whose extreme eigenvalues are what was ``reached``; no other argument holds the scale."""
    return ReconstructedSide(
        size=done.size,
        kind=kind,
        clipped=done.clipped,
        unclipped=done.size - done.clipped,
        update=done.update,
        why=None,
        precision=done.precision,
        placement=None,
        rungs=(),
        floor=done.floor * scale,
        floor_reached=reached[0] * scale,
        kappa_reached=reached[1] / reached[0] if reached[0] > 0 else None,
        found_by="construction",
        trace=trace * scale,
        mass=done.mass * scale,
        mass_share=done.mass / trace if trace > 0 else None,
        relative_error=None,
        smallest=None,
        digest=None,
    )


def _basis_digest(side: Eigenbasis) -> str:
    """Over the digests of values and vectors."""
    hashed = hashlib.sha256(digest(side.values).encode())
    if side.vectors is not None:
        hashed.update(digest(side.vectors).encode())
    return hashed.hexdigest()
