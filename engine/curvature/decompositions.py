"""Decompositions: what a plan holds and takes while one layer's factors are decomposed, by the ladder's own figures.

Layers come one at a time: each is read back where it was laid aside, and each side taken by the first
rung that fits beside everything else. The plan names that rung, so that a later attempt takes it too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from engine.curvature.eigenbasis import rungs
from engine.curvature.eigensolvers import RungCost
from engine.curvature.layer_bytes import DryRun
from engine.curvature.layers.layer import TreatedLayer
from engine.memory.budget import MemoryBudget
from engine.memory.plan import Plan, Term
from engine.workspace import Workspace


def with_decompositions(
    plan: Plan,
    workspace: Workspace,
    dtype: torch.dtype,
    treated: Sequence[TreatedLayer],
    seen: DryRun,
    shared: dict[str, str],
    budget: MemoryBudget,
) -> Plan:
    """``plan`` with the terms of every layer's decompositions, and the rungs that they begin with."""
    storage = workspace.collection.storage_dtype
    kept = dtype if storage is None else getattr(torch, storage)
    several = len(plan.chosen.parts) > 1
    cuda = workspace.device.type == "cuda"
    # without terms of its own the stage holds what is held throughout
    held = {place: plan.stage_bytes(place, "decomposition") for place in ("device", "host")}
    terms: list[Term] = []
    begun: dict[str, tuple[str, str]] = dict(plan.chosen.rungs)
    bases = 0
    for layer in treated:
        sides = _sides(layer, follows=layer.name in shared)
        dense_g = seen.kept(layer).kind == "dense"
        read = sum(_bytes(size, kept, dense=dense) for _, size, dense, _ in sides) if several else 0
        taken: dict[str, RungCost] = {}
        for side, size, dense, own in sides:
            if not dense or not own or (side == "G" and not dense_g) or workspace.decomposition == "none":
                continue
            ladder = rungs(size, need=workspace.decomposition, device=workspace.device, dtype=kept)
            if workspace.decomposition == "vectors":
                bases += layer.groups * size * size * (8 if kept == torch.float64 else 4)
            copy = _bytes(size, kept, dense=True) if cuda else 0
            fitting = [
                each
                for each in ladder
                if held["device"] + copy + each.device_bytes <= budget.device_bytes
                and held["host"] + read + each.host_bytes <= budget.host_bytes
            ]
            named = plan.chosen.rung(layer.name, side)
            replayed = [each for each in ladder if each.name == named]
            if ladder:
                cheapest = min(ladder, key=lambda each: each.device_bytes + each.host_bytes)
                taken[side] = (replayed or fitting or [cheapest])[0]
        if taken:
            for name in layer.parts:
                begun.setdefault(name, tuple(taken[side].name if side in taken else "" for side in "AG"))  # type: ignore[arg-type]
        terms += _terms(layer, taken, read, kept, {side: size for side, size, _, _ in sides}, cuda=cuda)
    if bases and workspace.scratch is None:
        terms.append(_term("bases", "Σ n² as kept", bases, "host", None))
    elif bases:
        terms.append(_term("bases", "Σ n² as kept", bases, "disk", None))
    return replace(plan, terms=(*plan.terms, *terms), chosen=replace(plan.chosen, rungs=begun))


def _terms(
    layer: TreatedLayer, taken: dict[str, RungCost], read: int, kept: torch.dtype, sizes: dict[str, int], *, cuda: bool
) -> list[Term]:
    found = []
    if read:
        found.append(_term("read back", "in² + out², as kept", read, "host", layer.name))
    if not taken:
        return found
    # one side after the other
    side, cost = max(taken.items(), key=lambda item: item[1].device_bytes + item[1].host_bytes)
    if cost.host_bytes:
        found.append(
            _term(cost.name, f"{cost.formula}, n = {sizes[side]} of {side}", cost.host_bytes, "host", layer.name)
        )
    if cuda:
        copy = _bytes(sizes[side], kept, dense=True)
        found.append(_term("factor on the device", "n², as kept", copy, "device", layer.name))
    if cost.device_bytes:
        found.append(
            _term(cost.name, f"{cost.formula}, n = {sizes[side]} of {side}", cost.device_bytes, "device", layer.name)
        )
    return found


def _term(name: str, formula: str, size: int, place: Literal["device", "host", "disk"], layer: str | None) -> Term:
    return Term(
        name=name, formula=formula, size_bytes=size, place=place, source="exact", stage="decomposition", layer=layer
    )


def _bytes(size: int, kept: torch.dtype, *, dense: bool) -> int:
    return (size * size if dense else size) * kept.itemsize


def _sides(layer: TreatedLayer, *, follows: bool) -> list[tuple[Literal["A", "G"], int, bool, bool]]:
    """(side, rows, whether dense, whether decomposed for this layer) of one layer's factors as they are loaded."""
    sides: list[tuple[Literal["A", "G"], int, bool, bool]] = [
        ("G", layer.out_dim, layer.form != "diagonal_block", True)
    ]
    if layer.form not in ("block", "diagonal_block"):
        sides.append(("A", layer.in_dim, layer.form == "kronecker", not follows))
    return sides
