"""Reconstruction, its bytes and seconds, and the place where each layer is rebuilt.

The bytes of clipping depend on how many eigenvalues are clipped, which is not known beforehand: the plan counts the
most expensive number.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from catalog.analyses.reconstruction import ReconstructionParams
from engine.collection.probe import Probe
from engine.factors.clipping.clip_eigenvalues import PLACEMENTS, Placement, placement_bytes
from engine.factors.clipping.clipping_check import EXACT_ROWS, checking_bytes
from engine.layers.layer import TreatedLayer
from engine.linalg.eigendecomposition import kept_dtype
from engine.memory.device_speed import typical_speed
from engine.memory.plan import BUDGETED, Budgeted, Term
from engine.planning.analysis_cost import Cost, KeptFiles, PlannedJob
from engine.planning.decomposition_memory import basis_dtype

_STAGE = "reconstruction"
_STARTS_A_SIDE = 2000
"""Starts of operations for one rebuilt factor, whatever its size."""
_LANCZOS_BYTES = 32 * 5 * 12
"""For each number of a factor: 32 steps with five products each, of which every number is read and widened."""


@dataclass(frozen=True)
class Side:
    """One factor of a layer as it is rebuilt: n rows, dense, or kept as so many gradient rows, or diagonal."""

    name: Literal["A", "G"]
    size: int
    kind: Literal["dense", "rows", "diagonal"]
    rows: int = 0


@dataclass(frozen=True)
class Phase:
    """The memory held at once: (name, formula, bytes) on the host, and the same on the device."""

    host: tuple[tuple[str, str, int], ...]
    device: tuple[tuple[str, str, int], ...] = ()

    def bytes(self, place: Budgeted) -> int:
        """Return the bytes held in one place."""
        return sum(size for _, _, size in (self.host if place == "host" else self.device))


def reconstruction_cost(params: ReconstructionParams, job: PlannedJob) -> Cost:
    """Return the bytes and the seconds of the reconstruction, and the placement of every layer."""
    kept, device, budget = job.stored, job.device, job.budget
    rebuilt = params.route == "rebuild"
    terms = job.carried(_STAGE)
    beside = {place: job.stage_bytes(place, _STAGE, terms) for place in BUDGETED}
    placement = dict(job.plan.chosen.placement)
    for layer in job.probe.layers:
        # what streaming holds, and what is read again
        own = job.read_back(layer, _STAGE, copies=2 if job.passes > 1 else 0)
        read = {place: sum(each.size_bytes for each in own if each.place == place) for place in BUDGETED}
        sides = rebuilt_sides(layer, job.probe, params.sides, follows=layer.name in job.probe.shared)
        named = placement.get(layer.parts[0])
        places = PLACEMENTS[PLACEMENTS.index(params.placement) if params.placement in PLACEMENTS else 0 :]
        places = tuple(place for place in places if place == named) or places
        phases = [
            (place, layer_phase(sides, kept, place, device, rebuilt=rebuilt, written=params.keep_matrices))
            for place in (places if rebuilt else places[:1])
        ]
        fitting = [
            each
            for each in phases
            if beside["device"] + read["device"] + each[1].bytes("device") <= budget.device_bytes
            and beside["host"] + read["host"] + each[1].bytes("host") <= budget.host_bytes
        ]
        cheapest = min(phases, key=lambda each: each[1].bytes("device") + each[1].bytes("host"))
        place, phase = fitting[0] if fitting else cheapest
        if rebuilt and any(side.kind == "dense" for side in sides):
            placement |= {name: placement.get(name, place) for name in layer.parts}
        terms += own
        if basis_dtype(job.workspace, kept) != kept_dtype(kept):
            size = max((side.size**2 for side in sides if side.kind == "dense"), default=0)
            terms.append(Term("basis as it was kept", "n² in float64", 8 * size, "host", _STAGE, layer.name))
        for where, contents in (("host", phase.host), ("device", phase.device)):
            terms += [
                Term(name, formula, size, where, _STAGE, layer.name)  # type: ignore[arg-type]
                for name, formula, size in contents
                if size
            ]
    seconds = {_STAGE: _seconds(params, job, placement)}
    return Cost(terms=tuple(terms), seconds=seconds, kept=_files(params, job), chosen={"placement": placement})


def _files(params: ReconstructionParams, job: PlannedJob) -> tuple[KeptFiles, ...]:
    if not params.keep_matrices:
        return ()
    # an eigenbasis is a square where a matrix is a triangle
    size, formula = job.packed_bytes, "Σ triangles, as kept"
    if params.route == "eigenbasis":
        size, formula = 2 * size, "Σ n², as kept, at most"
    return (KeptFiles(name="kept matrices", formula=formula, size_bytes=size),)


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


def _seconds(params: ReconstructionParams, job: PlannedJob, placement: dict[str, str]) -> float:
    probe, work, kept, cuda = job.probe, job.work, job.stored, job.place == "device"
    host = typical_speed(torch.device("cpu")) if cuda else work.pace
    total = 0.0
    for layer in probe.layers:
        place = placement.get(layer.parts[0])
        pace = host if place in (None, "host") else work.pace
        for side in rebuilt_sides(layer, probe, params.sides, follows=layer.name in probe.shared):
            if side.kind != "dense":
                continue
            n = side.size
            # the basis comes back, the result is written
            each = n * n * 1.5 * kept.itemsize / work.pace.disk_bytes_per_second
            if params.route == "rebuild":
                # two thirds of n columns at most, on one triangle; in float64 a product takes twice as long
                each += 2 / 3 * n**3 * (2 if place == "host" else 1) / pace.operations_per_second
                if cuda and place != "host":
                    each += (3 if place == "device" else 8) * n * n * kept.itemsize / pace.bytes_per_second
                if n <= EXACT_ROWS:
                    each += host.eigen_seconds(3 * n**3, n) + 4 * n**3 / host.operations_per_second
                else:
                    each += _LANCZOS_BYTES * n * n / host.held_bytes_per_second
            total += layer.groups * (each + _STARTS_A_SIDE * work.pace.seconds_an_operation)
    return total
