"""One factor of a layer, stabilised: rebuilt where it fits, or kept as its clipped eigenbasis, and looked at."""

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from catalog.reconstruction import ReconstructedSide
from engine.factors.clip_eigenvalues import PLACEMENTS, Clipped, Placement, placement_bytes, stabilise_
from engine.factors.clipped_inverse import StabilisedSide
from engine.factors.clipped_operator import ClippedOperator
from engine.factors.clipping_check import Reached, checking_bytes, reached, relative_difference
from engine.factors.kronecker_factors import digest
from engine.memory.guard import Rung
from engine.workspace import Workspace

_NO_CURVATURE = Reached(smallest=0.0, largest=0.0, relative_error=0.0, found_by="eigenvalues")


@dataclass(frozen=True, kw_only=True)
class Made:
    """A stabilised side, and what is said of it."""

    side: ReconstructedSide
    content: Tensor | StabilisedSide | ClippedOperator | None
    """The matrix (n, n) or diagonal (n,), its scale not in it; the eigenbasis; what a wide head is applied through;
    None where there is none of them."""


def rebuilt(
    workspace: Workspace,
    factor: Tensor,  # (n, n), or (n,) the diagonal; left as it is
    values: Tensor,  # (n,) ascending, of the factor as it is stored
    vectors: Tensor | None,  # (n, n); none of a diagonal
    kappa_max: float,
    wish: Literal["auto", "device", "panels", "host"],
    *,
    layer: str,
    scale: float,
) -> Made:
    """Stabilise ``factor`` at the first place of the ladder that fits, and look at what came out.

    Memory:
        A copy of the factor, from which a lower rung begins where memory runs out halfway; and as
        ``placement_bytes`` says.
    """
    if factor.ndim == 1:
        return _clipped_diagonal(factor, values, kappa_max, scale)
    if vectors is None:
        raise ValueError(f"layer `{layer}`: a matrix is stabilised by its eigenvectors, and none were made")
    size, largest = factor.shape[0], float(values[-1])
    clipped = int((values < max(largest, 0.0) / kappa_max).sum())
    chosen = workspace.resume.chosen if workspace.results.plan is None else workspace.results.plan.chosen
    planned = None if chosen is None else chosen.placement.get(layer)
    rungs = []
    for place in PLACEMENTS:
        on_device, on_host = placement_bytes(size, clipped, factor.dtype, place, workspace.machine.device)
        rungs.append(
            Rung(
                name=place,
                formula="n² + n · r on the device, and tiles" if place == "device" else "tiles",
                device_bytes=on_device,
                # a copy of the factor besides; what came out is looked at when tiles are gone
                host_bytes=factor.numel() * factor.element_size() + max(on_host, checking_bytes(size, factor.dtype)),
                run=partial(_attempt, workspace, factor, values, vectors, kappa_max, place),
            )
        )
    found = workspace.machine.guard.descend(
        rungs,
        what="the stabilised factor",
        layer=layer,
        stage="reconstruction",
        begin=planned if wish == "auto" else wish,
    )
    matrix, done = found.value
    came_out = reached(matrix, values, vectors, done.floor) if largest > 0 else _NO_CURVATURE
    positive = came_out.smallest > 0
    return Made(
        content=matrix,
        side=_side(
            done,
            values,
            scale,
            kind="matrix",
            rungs=found.taken,
            placement=done.placement,
            precision=done.precision,
            floor_reached=came_out.smallest * scale,
            kappa_reached=came_out.largest / came_out.smallest if positive else None,
            found_by=came_out.found_by,
            relative_error=came_out.relative_error,
            digest=digest(matrix),
        ),
    )


def in_eigenbasis(
    values: Tensor,  # (n,) ascending; of a diagonal side in the order of its entries
    vectors: Tensor | None,  # (n, n), or (n, r) of the r largest
    kappa_max: float,
    dtype: torch.dtype,
    *,
    kind: str,
) -> Made:
    """Keep a side as its eigenbasis, clipped; its scale stands in the values."""
    kept = StabilisedSide.of(values, vectors, kappa_max, dtype)
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
        precision="float64",
        placement="host",
    )
    smallest = max(float(ordered[0]), kept.floor)
    return Made(
        content=kept,
        side=_side(
            done,
            ordered,
            1.0,
            kind=kind,
            update="eigenbasis",
            rungs=(),
            placement=None,
            precision=str(dtype).removeprefix("torch."),
            floor_reached=smallest,
            kappa_reached=largest / smallest if smallest > 0 else None,
            found_by="construction",
            relative_error=None,
            digest=_basis_digest(kept),
        ),
    )


def not_stabilised(size: int, kind: str, why: str) -> Made:
    """A side whose spectrum is not to be had."""
    blank = dict.fromkeys(ReconstructedSide.__dataclass_fields__)
    known = {"size": size, "kind": kind, "update": "not stabilised", "why": why, "rungs": ()}
    return Made(content=None, side=ReconstructedSide(**{**blank, **known}))  # type: ignore[arg-type]


def _attempt(
    workspace: Workspace, factor: Tensor, values: Tensor, vectors: Tensor, kappa_max: float, placement: Placement
) -> tuple[Tensor, Clipped]:
    # a copy: an attempt that runs out of memory halfway leaves the factor to the next one as it was
    matrix = factor.clone()
    done = stabilise_(matrix, values, vectors, kappa_max, placement=placement, device=workspace.machine.device)
    return matrix, done


def _clipped_diagonal(factor: Tensor, values: Tensor, kappa_max: float, scale: float) -> Made:
    diagonal = factor.clone()
    done = stabilise_(diagonal, values, None, kappa_max)
    wide, truth = diagonal.to(torch.float64), factor.to(torch.float64).clamp_min(done.floor)
    smallest, largest = float(wide.min()), float(wide.max())
    return Made(
        content=diagonal,
        side=_side(
            done,
            values,
            scale,
            kind="diagonal",
            rungs=(),
            placement="host",
            precision="float64",
            floor_reached=smallest * scale,
            kappa_reached=largest / smallest if smallest > 0 else None,
            found_by="eigenvalues",
            relative_error=relative_difference(wide, truth),
            digest=digest(diagonal),
        ),
    )


def _side(  # noqa: PLR0913 - the fields that differ
    done: Clipped,
    values: Tensor,
    scale: float,
    *,
    kind: str,
    rungs: tuple[str, ...],
    placement: str | None,
    precision: str,
    floor_reached: float,
    kappa_reached: float | None,
    found_by: str,
    relative_error: float | None,
    digest: str,
    update: str | None = None,
) -> ReconstructedSide:
    trace = float(values.sum())
    return ReconstructedSide(
        size=done.size,
        kind=kind,
        clipped=done.clipped,
        unclipped=done.size - done.clipped,
        update=update or done.update,
        why=None,
        precision=precision,
        placement=placement,
        rungs=rungs,
        floor=done.floor * scale,
        floor_reached=floor_reached,
        kappa_reached=kappa_reached,
        found_by=found_by,
        trace=trace * scale,
        mass=done.mass * scale,
        mass_share=done.mass / trace if trace > 0 else None,
        relative_error=relative_error,
        smallest=None,
        digest=digest,
    )


def _basis_digest(side: StabilisedSide) -> str:
    """Over the digests of values and vectors."""
    hashed = hashlib.sha256(digest(side.values).encode())
    if side.vectors is not None:
        hashed.update(digest(side.vectors).encode())
    return hashed.hexdigest()
