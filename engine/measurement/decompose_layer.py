"""Decomposed factors: each factor's spectrum, and its basis where an analysis asks for it, computed once for a job.

A decomposition is stored under the factor's digest, with the solvers that were tried: in the scratch place,
where another attempt of the job finds it, or in memory where there is none. Values are kept in
float64. Vectors are computed in float64 and kept in float32, which is what a stabilised inverse needs
(applied through them it is good to 1e-6 at a condition of 1e6), unless the factor itself is kept in
float64 or the job takes powers of the curvature through them (``basis_dtype``).
"""

import errno
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from engine.factors.dense import Dense
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.factors.low_rank import LowRank
from engine.linalg.eigendecomposition import Decomposition, decompose, rungs
from engine.linalg.eigensolvers import LARGEST, Need, is_on_device
from engine.linalg.linear_operator import Operator, Structured
from engine.linalg.spectrum_counts import Counted
from engine.measurement.divided_layers import DividedLayers
from engine.measurement.prefetch import Arrived
from engine.measurement.stored_decompositions import (
    OF_PIECES,
    DamagedDecomposition,
    mark_device,
    marked_rung,
    read_decomposition,
    write_decomposition,
)
from engine.memory.plan import readable_bytes
from engine.planning.decomposition_memory import COUNTED, basis_dtype
from engine.workspace import Workspace

_WORTH_KEEPING = 512
"""Rows from which values alone are stored: below, they are computed again as fast as they are read."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One factor of a layer, measured."""

    digest: str
    trace: float
    frobenius: float | None
    """None where only the diagonal is kept."""
    scale: float
    rank_bound: int | None
    found: Decomposition | None
    """Without its vectors."""
    spectrum: Tensor | None
    """Eigenvalues with the scale multiplied in; None where none were asked for, or none are to be had."""
    counted: Counted | None
    """The same between bounds, of a side that is never made dense and has no ``spectrum``."""
    entry_rounding: float = 0.0
    """Eigenvalues below it cannot be told from zero, since what is stored of the factor is rounded; see ``rounded``."""

    @property
    def rungs(self) -> tuple[str, ...] | None:
        """Rungs that were tried, the last of which gave the eigenvalues; None where there are none."""
        return self.found.rungs if self.found is not None else None if self.counted is None else (COUNTED,)

    @property
    def largest(self) -> float:
        """The largest eigenvalue, or what it cannot exceed."""
        if self.spectrum is not None:
            return float(self.spectrum[-1])
        if self.counted is not None:
            return float(self.counted.values[-1])
        return self.trace if self.frobenius is None else self.frobenius


def measure_side(
    workspace: Workspace, whole: FactorSet, facts: LayerFacts, arrived: Arrived, side: Literal["A", "G"]
) -> Side:
    """Compute digest, norms and spectrum of one factor."""
    scale = arrived.factors.scale_A if side == "A" else arrived.factors.scale_G
    bound = facts.rank_bound_A if side == "A" else facts.rank_bound_G
    there = arrived.side(side, bound)
    # those of the device first: what leaves it is hashed meanwhile
    norms = there.trace(), there.frobenius_norm() if there.complete else None
    own = arrived.digest(side)
    found = read_or_decompose(workspace, facts, there, side, _name(own, bound))
    counted = None
    if found is None and workspace.options.decomposition != "none":
        counted = there.counted(workspace.options.stabilisation.kappa_max)
    return Side(
        digest=own,
        trace=norms[0],
        frobenius=norms[1],
        scale=scale,
        rank_bound=bound,
        found=found,
        spectrum=None if found is None else found.values * scale,
        counted=counted,
        entry_rounding=rounded(there, *norms, _lost_in_sums(whole)),
    )


_LOST = 100.0
"""Multiples of the smallest normal number of float32, below which sums of products lose digits one after another."""


def underflow(layer: str, summed: str, trace: float, size: int, *, zero: bool) -> str | None:
    """Describe the digits that float32 sums of products have lost below its smallest normal number; None of none.

    ``trace`` is that of the sums, such as `moments of A`, over ``size`` numbers; ``zero`` says that one of 0 is right.
    """
    least = torch.finfo(torch.float32).smallest_normal
    if trace >= _LOST * least * size or (trace == 0 and zero):
        return None
    return (
        f"layer `{layer}`: the {summed} average {trace / size:.1g}, and float32 holds less than {least:.1g} "
        "with fewer digits or none; take `collection.dtype: float64`"
    )


def rounded(side: Operator, trace: float, frobenius_norm: float | None, summed: float = 0.0) -> float:
    """Return how far rounding may have moved a side's eigenvalues: that of what is stored, and the solver's own.

    An eigenvalue that was computed and is smaller may be zero, as that of a softmax head is, whose G has rows that add
    up to zero. With u = ε/2 of what is stored, s for ``summed`` and ε that of float64, which is decomposed,

        matrix           (u + s + n ε) ‖M‖_F            by Weyl's inequality for eigenvalues
        gradient rows    (u + s)² tr M + n ε ‖M‖_F      by the same for singular values, whose squares they are
        probabilities    n ε ‖M‖_F                      rounded ones are a softmax's, too

    and 0 of a diagonal, whose entries have all of their digits. The n − T zeros of T gradient rows are exact, so that
    the shifts of the T others add up to as much as those of n: theirs is larger by ``√(n/T)``.

    Args:
        side: The side; 0 is returned for what has no eigenvalues.
        trace: Its trace, with the scale.
        frobenius_norm: Its norm, with the scale; None where it is not known.
        summed: Share of an entry that adding up batches may have lost.

    Returns:
        In the unit of the eigenvalues.

    References:
        Golub & Van Loan (2013), Matrix computations, 8.1, 8.3 and 8.6
    """
    size = side.size
    if side.is_diagonal or size == 1 or frobenius_norm is None:
        return 0.0
    stored = torch.finfo(side.storage_dtype).eps / 2 + summed
    solver = size * torch.finfo(torch.float64).eps * frobenius_norm
    if isinstance(side, LowRank):
        return (stored**2 * trace + solver) * math.sqrt(size / min(max(side.count, 1), size))
    if side.kind == "softmax_head":
        return solver
    return stored * frobenius_norm + solver if side.kind == "dense" else 0.0


def _lost_in_sums(whole: FactorSet) -> float:
    """Return the share of an entry that adding up batches may have lost: measured, it grows as their number's root."""
    return (1.5 + 0.25 * math.sqrt(whole.updates)) * torch.finfo(getattr(torch, whole.collection.dtype)).eps


def keep_spectra(workspace: Workspace, facts: LayerFacts, side_a: Side, side_g: Side) -> None:
    """Write the eigenvalues of one layer, and the bounds of those that were counted, as ``spectra/{ordinal}.json``."""
    if side_a.spectrum is None and side_g.spectrum is None and side_g.counted is None:
        return
    table: dict[str, Any] = {"layer": facts.name, "ordinal": facts.ordinal, "form": facts.form}
    for name, side in (("A", side_a), ("G", side_g)):
        known = side.spectrum if side.counted is None else side.counted.values
        table[name] = None if known is None else known.tolist()
    if side_g.counted is not None:
        table |= {"G_lower": side_g.counted.lower.tolist(), "G_upper": side_g.counted.upper.tolist()}
    workspace.ports.artifacts.save_json(f"spectra/{facts.ordinal}.json", table)


def refused_rungs(sides: Mapping[str, Side]) -> tuple[str, ...]:
    """Describe the solvers that were passed over: they would not have fitted, or an earlier attempt ended in one."""
    made = [(name, side.found) for name, side in sides.items() if side.found is not None]
    ended = (
        f"{name}: those of the device, as an earlier attempt ended in {found.ended_in}"
        for name, found in made
        if found.ended_in is not None
    )
    unfit = (
        f"{name}: {each.name} needs {readable_bytes(each.needed)} of {each.place} memory, "
        f"{readable_bytes(each.free)} free"
        for name, found in made
        for each in found.refused
    )
    return (*ended, *unfit)


def least_precise(*sides: Side) -> str | None:
    """Return the precision of the less precise of several decompositions."""
    return min((side.found.precision for side in sides if side.found is not None), default=None)


def read_or_decompose(
    workspace: Workspace, facts: LayerFacts, there: Dense | Structured, side: Literal["A", "G"], name: str
) -> Decomposition | None:
    """Return the spectrum of one factor: read back where it was stored, or computed and stored.

    Memory is as ``eigendecomposition.rungs`` says, and the basis once more as it is stored.
    """
    need = workspace.options.decomposition
    if need == "none":
        return None
    planned = _planned_rung(workspace, facts.name, side)
    if planned == COUNTED or beyond_solvers(there, planned):
        return None
    known = _read(workspace, name, vectors=False) or _of_piece(workspace, facts, name)
    if known is not None and (known.vectors is not None or need == "values"):
        return replace(known, vectors=None)
    if isinstance(there, Dense):
        found: Decomposition | None = _decompose(
            workspace, facts.name, f"the eigendecomposition of {side}", there, name, planned
        )
    else:
        found = there.decompose(facts.name, need=need, guard=workspace.machine.guard)
    if found is None:
        return None
    _write(workspace, name, found, there.storage_dtype)
    return replace(found, vectors=None)


def _decompose(
    workspace: Workspace, layer: str, what: str, factor: Dense, name: str, planned: str | None
) -> Decomposition:
    """Decompose one factor; where an earlier attempt ended in a solver of the device, from the first of the host on."""
    there, scratch = factor.stored, workspace.ports.scratch
    need: Need = "vectors" if workspace.options.decomposition == "vectors" else "values"
    solve = partial(
        decompose,
        there,
        layer,
        host=factor.host,
        need=need,
        rank_bound=factor.rank_bound,
        guard=workspace.machine.guard,
        what=what,
    )
    costs = rungs(there.shape[0], need=need, device=there.device, dtype=there.dtype, rank_bound=factor.rank_bound)
    ladder = [] if factor.is_diagonal else [rung.name for rung in costs]
    first = planned if planned in ladder else next(iter(ladder), None)
    on_host = next((rung for rung in ladder if not is_on_device(rung)), None)
    if scratch is None or on_host is None or first is None or not is_on_device(first):
        return solve(begin=planned)
    ended_in = marked_rung(scratch, name)
    if ended_in is None:
        with mark_device(scratch, name, first):
            return solve(begin=planned)
    workspace.ports.log(
        "warning",
        f"{what} of layer `{layer}` begins with `{on_host}`: an earlier attempt of the job ended in {ended_in}",
    )
    return replace(solve(begin=on_host), ended_in=ended_in)


def beyond_solvers(side: Operator, planned: str | None) -> bool:
    """Tell whether a matrix has more rows than LAPACK's integers count, and no device with the memory was planned."""
    matrix = side.kind == "dense" and not side.is_diagonal
    return matrix and side.size > LARGEST and not is_on_device(planned)


def load_basis(workspace: Workspace, side: Side) -> Decomposition:
    """Read one side's eigenvectors back, on the host; the basis is held as it is stored."""
    if side.found is not None and side.found.rungs == ("diagonal",):
        return replace(side.found, values=side.found.values * side.scale)
    found = _read(workspace, _name(side.digest, side.rank_bound), vectors=True)
    if found is None or found.vectors is None:
        raise ValueError("no basis was laid aside: `Workspace.decomposition` does not ask for vectors")
    signed = None if found.signed is None else found.signed * side.scale
    return replace(found, values=found.values * side.scale, signed=signed)


def share_bases(division: DividedLayers, facts: LayerFacts, sides: Sequence[Side]) -> None:
    """Store the eigenvectors of a layer on every rank, as its owner has them.

    One basis is held, and once more on its way.
    """
    workspace, everyone = division.workspace, range(division.ranks.size)
    for side in sides:
        if side.found is None or side.found.rungs == ("diagonal",):
            continue
        name = _name(side.digest, side.rank_bound)
        stored = _read(workspace, name, vectors=True) if division.is_own(facts) else None
        rows = None if stored is None or stored.vectors is None else {"rows": stored.vectors.mT}
        arrived = division.send(facts, rows, "bases", everyone)
        if arrived is not None and not division.is_own(facts):
            _write(workspace, name, replace(side.found, vectors=arrived["rows"].mT), arrived["rows"].dtype)


def _name(digest: str, rank_bound: int | None) -> str:
    """Equal factors with equal zeros have one spectrum."""
    return f"bases/{digest}-{rank_bound}"


def _planned_rung(workspace: Workspace, layer: str, side: Literal["A", "G"]) -> str | None:
    chosen = workspace.resume.chosen if workspace.results.plan is None else workspace.results.plan.chosen
    return None if chosen is None else chosen.rung(layer, side)


def _write(workspace: Workspace, name: str, found: Decomposition, dtype: torch.dtype) -> None:
    vectors = None if found.vectors is None else found.vectors.to("cpu", basis_dtype(workspace, dtype))
    kept = replace(found, vectors=vectors, refused=(), ended_in=None)
    if workspace.ports.scratch is None:
        if vectors is not None:
            _held(workspace)[name] = kept
        return
    if vectors is None and (not workspace.saves_checkpoints or kept.values.numel() < _WORTH_KEEPING):
        return
    write_decomposition(workspace.ports.scratch, name, kept, workspace.resume.conditions)


def _read(workspace: Workspace, name: str, *, vectors: bool) -> Decomposition | None:
    """Read a stored decomposition; its vectors are an empty matrix where they exist and are not asked for."""
    held = _held(workspace).get(name)
    if held is not None or workspace.ports.scratch is None:
        return held
    try:
        return read_decomposition(workspace.ports.scratch, name, workspace.resume.conditions, vectors=vectors)
    except DamagedDecomposition as error:
        workspace.ports.scratch.remove(f"{name}.json")  # it is computed anew: here, or by the next attempt
        if vectors:
            raise OSError(errno.EIO, f"the stored decomposition {name} is damaged") from error
        return None


def _of_piece(workspace: Workspace, facts: LayerFacts, name: str) -> Decomposition | None:
    """Lay a decomposition aside that a piece of the job has made; None where none has made the one that is needed."""
    vectors = workspace.options.decomposition == "vectors"
    for stored in workspace.inputs.stored_decompositions:
        try:
            found = read_decomposition(stored, f"{OF_PIECES}/{name}", {}, vectors=vectors)
        except DamagedDecomposition as error:
            workspace.ports.log("warning", f"layer `{facts.name}` is decomposed again: {error}")
            continue
        if found is not None:
            _write(workspace, name, found, found.values.dtype if found.vectors is None else found.vectors.dtype)
            return found
    return None


def store_decompositions(workspace: Workspace, whole: FactorSet, layers: Iterable[LayerFacts]) -> None:
    """Decompose layers, and write what the job's own attempt would compute of them to the artifacts.

    One layer's factors and one decomposition are held.
    """
    chosen, done_a = list(layers), set[int]()
    for done, facts in enumerate(chosen):
        workspace.ports.raise_if_cancelled()
        factors = whole.load(facts.ordinal)
        device = workspace.machine.device
        arrived = Arrived(factors=factors, there_A=factors.A.to(device), there_G=factors.G.to(device))
        sides: tuple[Literal["A", "G"], ...] = ("G",) if facts.leader in done_a else ("G", "A")
        done_a.add(facts.leader)
        with workspace.machine.operation(f"layer {facts.ordinal}", "decomposition"):
            for side in sides:
                found = measure_side(workspace, whole, facts, arrived, side)
                if found.found is not None and found.found.rungs != ("diagonal",):
                    _store(workspace, found)
        workspace.ports.report("decomposition", done + 1, len(chosen), "layers")


def _store(workspace: Workspace, side: Side) -> None:
    name = _name(side.digest, side.rank_bound)
    found = _read(workspace, name, vectors=workspace.options.decomposition == "vectors") or side.found
    if found is not None:
        write_decomposition(workspace.ports.artifacts, f"{OF_PIECES}/{name}", found, {})


class _HeldBases(dict[str, Decomposition]):
    """Eigenbases of one job that stay in memory, by file name."""


def _held(workspace: Workspace) -> dict[str, Decomposition]:
    return workspace.results.of(_HeldBases)
