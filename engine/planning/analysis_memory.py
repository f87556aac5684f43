"""Analysis memory: the bytes that the analyses hold once there are factors, and the place where each layer is rebuilt.

Each takes one layer at a time, beside what the decompositions have left. The bytes of clipping depend on how
many eigenvalues are clipped, which is not known beforehand: the plan counts the most expensive number.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from catalog.analyses.capacity import CapacityParams
from catalog.analyses.reconstruction import ReconstructionParams
from engine.collection.probe import Probe
from engine.factors.clip_eigenvalues import PLACEMENTS, Placement, placement_bytes
from engine.factors.clipping_check import checking_bytes
from engine.factors.representation_bytes import capacitance_bytes, gram_bytes
from engine.layers.layer import TreatedLayer
from engine.linalg.eigendecomposition import kept_dtype
from engine.memory.budget import MemoryBudget
from engine.memory.plan import Plan, Stage, Term
from engine.planning.decomposition_memory import basis_dtype, kept_as, read_back_bytes
from engine.planning.disk_usage import with_disk
from engine.planning.exact_ggn_memory import probe_bytes, probes_at_once, search_bytes, search_lengths
from engine.planning.later.comparison import with_comparison
from engine.planning.later.natural_gradient import with_natural_gradient
from engine.planning.later.spectrum import with_spectrum
from engine.workspace import Workspace

Where = Literal["device", "host"]
_CARRIED = ("factors", "bases", "corrections")
"""Terms of the decompositions that stay until the job ends."""
_PRODUCTS = 2 * 8 * 2**18
"""A few chunks of products of two spectra, in float64."""
_DERIVATIVES = 3
"""Graphs of a slice that stand at once where gradients are differentiated again."""


@dataclass(frozen=True)
class Side:
    """One factor of a layer as it is rebuilt: n rows, dense, or kept as so many gradient rows, or diagonal."""

    name: Literal["A", "G"]
    size: int
    kind: Literal["dense", "rows", "diagonal"]
    rows: int = 0


@dataclass(frozen=True)
class Phase:
    """What is held at once: (what, formula, bytes) on the host, and the same on the device."""

    host: tuple[tuple[str, str, int], ...]
    device: tuple[tuple[str, str, int], ...] = ()

    def bytes(self, place: Where) -> int:
        """Return the bytes held in one place."""
        return sum(size for _, _, size in (self.host if place == "host" else self.device))


def with_later_stages(
    plan: Plan,
    workspace: Workspace,
    probe: Probe,
    budget: MemoryBudget,
) -> Plan:
    """Add the bytes of the stages that follow the decompositions, and of the disk."""
    if "capacity" in workspace.options.kinds:
        plan = _with_capacity(plan, workspace, probe)
        params = workspace.options.of("capacity") or CapacityParams()
        if params.cross_check is not None:
            plan = _with_cross_check(plan, workspace, probe.dtype, probe.layers, params, budget)
    if "reconstruction" in workspace.options.kinds:
        plan = _with_reconstruction(plan, workspace, probe, budget)
    if "natural_gradient" in workspace.options.kinds:
        plan = with_natural_gradient(plan, workspace, probe, _carried(plan, "natural_gradient"))
    if "compare_curvature" in workspace.options.kinds:
        plan = with_comparison(plan, workspace, probe, budget, _carried(plan, "compare_curvature"))
    if "spectrum" in workspace.options.kinds:
        plan = with_spectrum(plan, _carried(plan, "spectrum"), workspace, probe, budget)
    return with_disk(plan, workspace, kept_as(workspace, probe.dtype), probe)


def _with_capacity(plan: Plan, workspace: Workspace, probe: Probe) -> Plan:
    kept = kept_as(workspace, probe.dtype)
    terms = _carried(plan, "capacity")
    spectra = sum(16 * layer.groups * (layer.in_dim + layer.out_dim) for layer in probe.layers)
    terms.append(_term("spectra", "2 · Σ (in + out) · 8", spectra, "host", "capacity"))
    products = _term("products", "2 chunks of 2¹⁸ · 8", _PRODUCTS, "host", "capacity")
    terms.append(replace(products, source="estimated"))
    several = len(plan.chosen.parts) > 1
    place: Where = "device" if workspace.machine.device.type == "cuda" else "host"
    for layer in probe.layers:
        terms += _read_back(layer, probe, kept, "capacity", copies=int(several), device=workspace.machine.device)
        each = probe.kept(layer)
        if each.kind == "softmax_head":
            size = capacitance_bytes(each.rows, layer.out_dim)
            terms.append(_term("capacitance", "2 · T² · 8, and chunks", size, place, "capacity", layer.name))
        elif each.kind == "diagonal_sketch" and each.rank:
            size = gram_bytes(2 * each.rank, layer.out_dim)
            terms.append(_term("Gram matrix", "4 · (2r)² · 8, and chunks", size, place, "capacity", layer.name))
    return replace(plan, terms=(*plan.terms, *terms))


def _with_cross_check(
    plan: Plan,
    workspace: Workspace,
    dtype: torch.dtype,
    treated: Sequence[TreatedLayer],
    params: CapacityParams,
    budget: MemoryBudget,
) -> Plan:
    cuda = workspace.machine.device.type == "cuda"
    place: Where = "device" if cuda else "host"
    terms = _carried(plan, "cross_check")
    held = replace(plan, terms=(*plan.terms, *terms))
    free = budget.device_bytes if cuda else budget.host_bytes
    free -= held.stage_bytes(place, "cross_check")
    vector = sum(layer.parameter_count for layer in treated) * dtype.itemsize
    several = probes_at_once(params.cross_check_probes, vector, free)
    for term in plan.terms:
        if term.stage == "collection" and term.name in ("activations", "outputs"):
            copies = _DERIVATIVES if params.cross_check_iterations else 1
            formula = f"{copies} · ({term.formula})" if copies > 1 else term.formula
            terms.append(
                replace(
                    term,
                    stage="cross_check",
                    size_bytes=copies * term.size_bytes,
                    formula=formula,
                    source="estimated",
                )
            )
    held = replace(plan, terms=(*plan.terms, *terms))
    probing = probe_bytes(several, vector)
    ways = [(probing if cuda else 0, 0 if cuda else probing, f"(2 · {several} + 2) · P, {several} probes at once")]
    if params.cross_check_iterations:
        ladder = [
            (*search_bytes(length, vector, on_device=on_device, cuda=cuda), f"{length} Lanczos vectors of P")
            for length in search_lengths(params.cross_check_iterations)
            for on_device in ((True, False) if cuda else (False,))
        ]
        fitting = [
            each
            for each in ladder
            if held.stage_bytes("device", "cross_check") + each[0] <= budget.device_bytes
            and held.stage_bytes("host", "cross_check") + each[1] <= budget.host_bytes
        ]
        ways.append(fitting[0] if fitting else min(ladder, key=lambda each: each[0] + each[1]))
    for at, where in ((0, "device"), (1, "host")):
        most = max(ways, key=lambda way: int(way[at]))
        if most[at]:
            terms.append(_term("vectors", most[2], int(most[at]), where, "cross_check"))  # type: ignore[arg-type]
    return replace(plan, terms=(*plan.terms, *terms))


def _with_reconstruction(
    plan: Plan,
    workspace: Workspace,
    probe: Probe,
    budget: MemoryBudget,
) -> Plan:
    params = workspace.options.of("reconstruction") or ReconstructionParams()
    kept = kept_as(workspace, probe.dtype)
    terms = _carried(plan, "reconstruction")
    held = replace(plan, terms=(*plan.terms, *terms))
    beside = {place: held.stage_bytes(place, "reconstruction") for place in ("device", "host")}
    several = len(plan.chosen.parts) > 1
    placement = dict(plan.chosen.placement)
    for layer in probe.layers:
        # what streaming holds, and what is read again
        own = _read_back(
            layer, probe, kept, "reconstruction", copies=2 if several else 0, device=workspace.machine.device
        )
        read = {place: sum(term.size_bytes for term in own if term.place == place) for place in ("device", "host")}
        sides = rebuilt_sides(layer, probe, params.sides, follows=layer.name in probe.shared)
        named = plan.chosen.placement.get(layer.parts[0])
        ladder = PLACEMENTS[PLACEMENTS.index(params.placement) if params.placement in PLACEMENTS else 0 :]
        ladder = tuple(place for place in ladder if place == named) or ladder
        rebuilt = params.route == "rebuild"
        found = [
            (
                place,
                layer_phase(
                    sides, kept, place, workspace.machine.device, rebuilt=rebuilt, written=params.keep_matrices
                ),
            )
            for place in (ladder if rebuilt else ladder[:1])
        ]
        fitting = [
            each
            for each in found
            if beside["device"] + read["device"] + each[1].bytes("device") <= budget.device_bytes
            and beside["host"] + read["host"] + each[1].bytes("host") <= budget.host_bytes
        ]
        cheapest = min(found, key=lambda each: each[1].bytes("device") + each[1].bytes("host"))
        place, phase = fitting[0] if fitting else cheapest
        if rebuilt and any(side.kind == "dense" for side in sides):
            placement |= {name: placement.get(name, place) for name in layer.parts}
        terms += own
        if basis_dtype(workspace, kept) != kept_dtype(kept):
            size = max((side.size**2 for side in sides if side.kind == "dense"), default=0)
            terms.append(_term("basis as it was kept", "n² in float64", 8 * size, "host", "reconstruction", layer.name))
        for where, contents in (("host", phase.host), ("device", phase.device)):
            terms += [
                _term(name, formula, size, where, "reconstruction", layer.name)  # type: ignore[arg-type]
                for name, formula, size in contents
                if size
            ]
    return replace(plan, terms=(*plan.terms, *terms), chosen=replace(plan.chosen, placement=placement))


def rebuilt_sides(
    layer: TreatedLayer, probe: Probe, wanted: Literal["both", "A", "G"], *, follows: bool
) -> tuple[Side, ...]:
    """Return the factors of each part of a layer that are stabilised, in the order of the work."""
    found = []
    if wanted != "G" and not follows and layer.form not in ("block", "diagonal_block"):
        found.append(Side("A", layer.in_dim, "dense" if layer.form == "kronecker" else "diagonal"))
    if wanted != "A":
        each = probe.kept(layer)
        if layer.form == "diagonal_block":
            found.append(Side("G", layer.out_dim, "diagonal"))
        elif each.kind == "dense":
            found.append(Side("G", layer.out_dim, "dense"))
        elif each.kind == "woodbury":
            found.append(Side("G", layer.out_dim, "rows", each.held_rows(layer.out_dim)))
    return tuple(found)


@lru_cache(maxsize=4096)
def layer_phase(
    sides: tuple[Side, ...],
    kept: torch.dtype,
    placement: Placement,
    device: torch.device,
    *,
    rebuilt: bool,
    written: bool,
) -> Phase:
    """Return what one layer's stabilisation holds at its peak, beside its factors."""
    item, wide = kept.itemsize, kept_dtype(kept).itemsize
    phases: list[Phase] = []
    there: tuple[tuple[str, str, int], ...] = ()
    done = packed = 0
    for side in sides:
        n = side.size
        if side.kind == "dense" and rebuilt:
            on_device, on_host = placement_bytes(n, None, kept, placement, device)
            made, basis, besides = n * n * item, n * n * wide, max(on_host, checking_bytes(n, kept))
            what = ("tiles", f"of the update, or what looks at it, n = {n} of {side.name}", besides)
            there = max(there, (("update", f"n² + n · r, tiles, n = {n} of {side.name}", on_device),), key=_weight)
            packed += n * (n + 1) // 2 * item
        else:
            columns = side.rows if side.kind == "rows" else n if side.kind == "dense" else 1
            made = basis = n * columns * (wide if side.kind != "diagonal" else 8)
            what = ("tiles", "", 0)
        stabilised = ("stabilised factors", "n² as kept, of each side that is made", done + made)
        phases.append(Phase((("basis", f"n² as kept, n = {n} of {side.name}", basis), stabilised, what)))
        done += made
    if written:
        stabilised = ("stabilised factors", "in² + out², as kept", done)
        phases.append(Phase((stabilised, ("packed triangles", "(in² + out²) / 2", packed))))
    most = max(phases, key=lambda phase: phase.bytes("host"), default=Phase(()))
    return replace(most, device=there)


def _weight(contents: tuple[tuple[str, str, int], ...]) -> int:
    return sum(size for _, _, size in contents)


def _carried(plan: Plan, stage: Stage) -> list[Term]:
    """What stands from before; bases are not there before decompositions are made."""
    names = _CARRIED if stage != "cross_check" else tuple(name for name in _CARRIED if name != "bases")
    return [
        replace(term, stage=stage)
        for term in plan.terms
        if term.stage == "decomposition" and term.layer is None and term.place != "disk" and term.name in names
    ]


def _read_back(
    layer: TreatedLayer, probe: Probe, kept: torch.dtype, stage: Stage, *, copies: int, device: torch.device
) -> list[Term]:
    """One part's factors where all wait on the disk, and on a device where they were decomposed."""
    size = read_back_bytes(layer, probe, kept)
    found = []
    if copies:
        formula = f"{copies} · (in² + out²), as kept" if copies > 1 else "in² + out², as kept"
        found.append(_term("read back", formula, copies * size, "host", stage, layer.name))
    if device.type == "cuda" and size:
        found.append(_term("factors on the device", "in² + out², as kept", size, "device", stage, layer.name))
    return found


def _term(name: str, formula: str, size: int, place: Where, stage: Stage, layer: str | None = None) -> Term:
    return Term(name=name, formula=formula, size_bytes=size, place=place, source="exact", stage=stage, layer=layer)
