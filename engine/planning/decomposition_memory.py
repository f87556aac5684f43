"""Decomposition memory: the bytes and seconds of the layers' decompositions, by the solvers' own figures.

Layers come one at a time: each is read back where it was spilled, and each side taken by the first
solver that fits beside everything else. The plan names that solver, so that a later attempt takes it too.
"""

from dataclasses import dataclass, replace

import torch

from catalog.record_reader import read
from engine.collection.probe import LoadedSide, Probe, loaded_sides, read_back_bytes
from engine.factors.representation import Representation, WorkloadEstimate
from engine.factors.representation_bytes import dense_head_bytes, iteration_bytes
from engine.factors.softmax_fisher import DENSE_ROWS
from engine.layers.layer import TreatedLayer
from engine.linalg.eigendecomposition import kept_dtype, rungs
from engine.linalg.eigensolvers import LARGEST, RungCost, is_on_device
from engine.linalg.spectrum_counts import COUNTS, LARGEST_STEPS
from engine.memory.budget import MemoryBudget
from engine.memory.device_speed import DeviceSpeed, typical_speed
from engine.memory.plan import Budgeted, Plan, Term
from engine.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class EigendecompositionBytes:
    """The bytes that the eigendecomposition of one matrix holds at its peak, beside the matrix itself."""

    device_bytes: int
    """On the device; 0 on a CPU."""
    host_bytes: int
    rung: str
    """The way that is taken first."""
    formula: str
    """Formula of its bytes."""
    ladder: tuple[RungCost, ...]
    """Every way, the preferred first: what is taken where less memory is free."""


def eigendecomposition_bytes(
    n: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    vectors: bool = False,
) -> EigendecompositionBytes:
    """Return the bytes that decomposing one symmetric matrix takes, by the figures that a job's plan uses.

    They are those of the solver that is tried first, with every solver and its cost.

    Args:
        n: Rows of the matrix.
        dtype: Precision that it is kept in; the arithmetic is float64.
        device: Where it stands. It need not be one of this machine's.
        vectors: Whether the eigenvectors are wanted too.

    Raises:
        TypeError: If n is not a whole number, or ``dtype`` or ``vectors`` has another type.
        ValueError: If n is not positive, or on a CPU beyond what LAPACK counts.
    """
    for name, kind, value in (("n", int, n), ("dtype", torch.dtype, dtype), ("vectors", bool, vectors)):
        read(kind, value, name)
    if n < 1:
        raise ValueError(f"n must be at least 1 (got {n})")
    ladder = rungs(n, need="vectors" if vectors else "values", device=torch.device(device), dtype=dtype)
    if not ladder:
        raise ValueError(f"n must be at most {LARGEST:,} on a CPU, beyond which LAPACK does not count (got {n:,})")
    first = ladder[0]
    return EigendecompositionBytes(
        device_bytes=first.device_bytes,
        host_bytes=first.host_bytes,
        rung=first.name,
        formula=first.formula,
        ladder=ladder,
    )


COUNTED = "counted"
"""Fallback of a side whose eigenvalues are bounded by inertia counts."""
_STARTS_A_LAYER = 1000
"""Digests, norms and the record of one layer, in starts of operations, whatever the layer."""


def with_decompositions(
    plan: Plan,
    workspace: Workspace,
    probe: Probe,
    budget: MemoryBudget,
    pace: DeviceSpeed,
) -> Plan:
    """Add the bytes and seconds of every layer's decompositions, and the solvers that they begin with."""
    kept, need = kept_as(workspace, probe.dtype), workspace.options.decomposition
    several = len(plan.chosen.parts) > 1
    cuda = workspace.machine.device.type == "cuda"
    on_host = typical_speed(torch.device("cpu")) if cuda else pace
    foreseen = WorkloadEstimate(
        calls=probe.calls,
        seen=probe.examples,
        outputs=probe.outputs,
        examples=workspace.inputs.foreseen_examples(workspace.machine.ranks),
    )
    sides_of = {layer.name: loaded_sides(layer, probe, follows=layer.name in probe.shared) for layer in probe.layers}
    terms: list[Term] = []
    if need == "vectors":
        bases = sum(
            layer.groups * side.size**2 * basis_dtype(workspace, kept).itemsize
            for layer in probe.layers
            for side in sides_of[layer.name]
            if side.own and side.kind == "dense"
        )
        if bases:
            terms.append(
                Term(
                    "bases",
                    "Σ n² as kept",
                    bases,
                    "host" if workspace.ports.scratch is None else "disk",
                    "decomposition",
                )
            )
    # without terms of its own the stage holds what is held throughout
    beside = replace(plan, terms=(*plan.terms, *terms))
    held = {place: beside.stage_bytes(place, "decomposition") for place in ("device", "host")}
    begun: dict[str, tuple[str, str]] = dict(plan.chosen.rungs)
    seconds = 0.0
    for layer in probe.layers:
        loaded = read_back_bytes(layer, probe, kept)
        # both sides are sent, whichever is decomposed
        read, sent = loaded if several else 0, loaded if cuda else 0
        taken: dict[LoadedSide, RungCost] = {}
        each = _STARTS_A_LAYER * pace.seconds_an_operation
        for side in sides_of[layer.name]:
            if side.kind == "rows" and need != "none":
                room = budget.device_bytes - held["device"] - sent if cuda else budget.host_bytes - held["host"] - read
                planned = plan.chosen.rung(layer.parts[0], side.name)
                rows, took = _of_rows(probe.kept(layer), side.size, planned, room, pace, cuda=cuda)
                each += took
                if rows is not None:
                    taken[side] = rows
            if side.kind != "dense" or not side.own or need == "none":
                continue
            bound = foreseen.rank_bound(layer, workspace.options.collection, side.name)
            ladder = rungs(side.size, need=need, device=workspace.machine.device, dtype=kept, rank_bound=bound)
            fitting = [
                rung
                for rung in ladder
                if held["device"] + sent + rung.device_bytes <= budget.device_bytes
                and held["host"] + read + rung.host_bytes <= budget.host_bytes
            ]
            named = plan.chosen.rung(layer.parts[0], side.name)
            replayed = [rung for rung in ladder if rung.name == named]
            cheapest = sorted(ladder, key=lambda rung: rung.device_bytes + rung.host_bytes)
            # what is beyond the host is collected all the same where it does not fit on the device
            if usable := replayed or fitting or (cheapest if side.size <= LARGEST else []):
                cost = taken[side] = usable[0]
                where = pace if cost.device_bytes else on_host
                each += where.eigen_seconds(cost.seconds_flops, side.size)
        seconds += layer.groups * each
        names = {side.name: cost.name for side, cost in taken.items()}
        begun = {name: (names.get("A", ""), names.get("G", "")) for name in (layer.parts if taken else ())} | begun
        terms += _terms(layer, taken, read, sent)
    return replace(
        plan,
        terms=(*plan.terms, *terms),
        chosen=replace(plan.chosen, rungs=begun),
        seconds={**plan.seconds, "decomposition": seconds},
    )


def beyond_solvers(probe: Probe, plan: Plan) -> str:
    """Name the factors that no eigensolver takes: larger than LAPACK counts, and with no rung of the device planned."""
    first = {layer.name: layer.parts[0] for layer in probe.layers}
    found = [
        f"{side.name} of `{layer.name}` ({side.size} rows)"
        for layer in probe.layers
        for side in loaded_sides(layer, probe, follows=False)
        if side.kind == "dense"
        and side.size > LARGEST
        and not is_on_device(
            plan.chosen.rung(
                first[probe.shared.get(layer.name, layer.name) if side.name == "A" else layer.name], side.name
            )
        )
    ]
    if not found:
        return ""
    return f"no eigensolver takes more than {LARGEST} rows, so the eigenvalues of {', '.join(found)} stay unknown"


def is_beyond_solvers(size: int, workspace: Workspace, dtype: torch.dtype) -> bool:
    """Tell whether no eigensolver takes a dense factor: LAPACK does not count so far, nor has the device the memory."""
    machine, need = workspace.machine, workspace.options.decomposition
    if size <= LARGEST:
        return False
    ladder = rungs(
        size, need="values" if need == "none" else need, device=machine.device, dtype=kept_as(workspace, dtype)
    )
    return not any(0 < rung.device_bytes <= machine.budget.device_bytes for rung in ladder)


def kept_as(workspace: Workspace, dtype: torch.dtype) -> torch.dtype:
    """Return the precision that factors are kept in."""
    storage = workspace.options.collection.storage_dtype
    kept: torch.dtype = dtype if storage is None else getattr(torch, storage)
    return kept


def basis_dtype(workspace: Workspace, factor: torch.dtype) -> torch.dtype:
    """Return the precision that eigenvectors are kept in until the job ends.

    ``torch.float64`` where the factor is kept so, or where an analysis asks for exact vectors; else ``torch.float32``.
    """
    if workspace.options.asks("exact_vectors"):
        return torch.float64
    return kept_dtype(factor)


def _of_rows(
    kept: Representation,
    size: int,
    planned: str | None,
    room: int,
    pace: DeviceSpeed,
    *,
    cuda: bool,
) -> tuple[RungCost | None, float]:
    """The rung by which the eigenvalues of a side of rows are had, and its seconds where the job computes."""
    if kept.kind == "woodbury":
        return None, _gram_seconds(kept.gram_rows(size), size, pace)
    if kept.kind not in ("softmax_head", "diagonal_sketch"):
        raise TypeError(f"no solver is planned for the eigenvalues of a side kept as {kept.kind}")
    dense = _rows_cost(kept, size, cuda=cuda)
    if dense is not None and (planned == dense.name or (not planned and dense.device_bytes + dense.host_bytes <= room)):
        return dense, pace.eigen_seconds(dense.seconds_flops, size)
    return _counting_cost(kept, size, cuda=cuda), _counting_seconds(kept, size, pace)


def _rows_cost(kept: Representation, size: int, *, cuda: bool) -> RungCost | None:
    """Return the cost of the dense matrix of a small softmax head; None where it is never made."""
    if kept.kind != "softmax_head" or size > DENSE_ROWS:
        return None
    needed = dense_head_bytes(size)
    return RungCost(
        name="dense",
        formula="2 · n² · 8",
        device_bytes=needed if cuda else 0,
        host_bytes=0 if cuda else needed,
        seconds_flops=5.0 * size**3,
    )


def _counting_cost(kept: Representation, size: int, *, cuda: bool) -> RungCost:
    """Return the cost of bounding the eigenvalues by inertia counts, besides the Gram matrices of every such side."""
    needed = iteration_bytes(size, LARGEST_STEPS) if kept.gram_rows(size) else 0
    return RungCost(
        name=COUNTED,
        formula=f"{LARGEST_STEPS + 8} · n · 8",
        device_bytes=needed if cuda else 0,
        host_bytes=0 if cuda else needed,
        seconds_flops=0.0,
    )


def _counting_seconds(kept: Representation, size: int, pace: DeviceSpeed) -> float:
    """Return the seconds of a Gram matrix and its eigenvalues for each count, and of products for the largest."""
    rows = kept.gram_rows(size)
    # in float64 a product takes twice as long; signs differ, so that both triangles are made
    operations = COUNTS * 4 * size * rows**2 + LARGEST_STEPS * 8 * size * rows
    return operations / pace.operations_per_second + COUNTS * pace.eigen_seconds(5 * rows**3, rows)


def _gram_seconds(rows: int, size: int, pace: DeviceSpeed) -> float:
    """Return the seconds of the eigenvalues of ``rows`` gradient rows, by their Gram matrix."""
    # in float64 a product takes twice as long
    return 4 * size * rows**2 / pace.operations_per_second + pace.eigen_seconds(5 * rows**3, rows)


def _terms(layer: TreatedLayer, taken: dict[LoadedSide, RungCost], read: int, sent: int) -> list[Term]:
    sizes: list[tuple[str, str, int, Budgeted]] = [
        ("read back", "in² + out², as kept", read, "host"),
        ("factors on the device", "in² + out², as kept", sent, "device"),
    ]
    if taken:
        # one side after the other
        side, cost = max(taken.items(), key=lambda item: item[1].device_bytes + item[1].host_bytes)
        formula = f"{cost.formula}, n = {side.size} of {side.name}"
        sizes += [(cost.name, formula, cost.host_bytes, "host"), (cost.name, formula, cost.device_bytes, "device")]
    return [Term(*each, "decomposition", layer.name) for each in sizes if each[2]]
