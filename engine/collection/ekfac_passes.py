"""EK-FAC passes over the data, which re-estimate the eigenvalues in the eigenbases of the factors.

Labels are keyed by example, so every pass sees the directions that G was made of. Layers go in as
many passes as their bases and eigenvalues need; blocks need none, being exact already: their own
eigenvalues are the correction's.

Rotations keep lengths, so ``Σ λ`` of a layer is its exact trace, but for rounding. A layer of which it is not, or whose
rows a pass does not see, is not covered. The trace is not compared where there is none, where it is the mean over
labels (a head's probabilities), where `mc` drew other labels because examples came in another order, and where memory
ran out and smaller slices may have drawn other numbers. A part of the data has no trace of its own.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from catalog.responses.coverage import remedy_of
from engine.accumulation.ekfac_statistics import CorrectionStatistics
from engine.accumulation.hooks import Collector
from engine.accumulation.layer_statistics import LayerStatistics
from engine.artifacts import Artifacts
from engine.collection.collection_state import CollectionState, Cursor
from engine.collection.data_pass import Progress, decay_, note_examples, update
from engine.collection.normalise import constant, flaw
from engine.collection.pass_job import PassJob
from engine.collection.ranks.reduce_statistics import add_corrections
from engine.collection.ranks.turns import Turns
from engine.errors import ModelRefused, NonFiniteFactor
from engine.factors.factor_set import Corrected
from engine.factors.kronecker_factors import Factors
from engine.layers.layer import TreatedLayer
from engine.linalg.eigendecomposition import decompose
from engine.memory.budget import give_back_host_memory
from engine.memory.guard import Fallback
from engine.merging.corrections import MergedBases
from engine.merging.example_runs import joined
from engine.model.example_digests import EnteredExamples
from engine.model.mixed_precision import FIRST_SCALE
from engine.model.state.generators import seed_generators
from engine.workspace import Workspace

Load = Callable[[], Corrected]

TRACE_DIFFERS = "correction_differs"
"""Reason of a layer whose corrected eigenvalues do not add up to its exact trace."""
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 3e-2}
"""Part of an exact trace that rounding may explain: an example's gradient is a sum over positions, which may cancel."""
_CANCELLED = 100
"""Times the precision's ε of the largest trace of a layer that it may explain besides."""


@dataclass(frozen=True)
class _Waiting:
    """A correction in the scratch place; a shared Q_A stands with the first that had it."""

    scratch: Artifacts
    place: str
    holder: str | None

    def __call__(self) -> Corrected:
        own = self.scratch.load_tensors(f"{self.place}.safetensors")
        shared = None if self.holder is None else self.scratch.load_tensors(f"{self.holder}.A.safetensors")
        return Corrected(
            eigenvectors_A=None if shared is None else shared["eigenvectors_A"],
            eigenvectors_G=own.get("eigenvectors_G"),
            eigenvalues=own["corrected_eigenvalues"],
        )


def correct_eigenvalues(job: PassJob, state: CollectionState, parts: Sequence[Sequence[str]]) -> dict[str, Load]:
    """Re-estimate the eigenvalues of every covered layer in the eigenbases of its factors.

    ``parts`` names the layers of each pass. For each part of a layer, by name, it returns a function that loads its
    bases and eigenvalues. ``EngineError`` as ``engine.errors`` lists.

    Memory:
        Bases and eigenvalues of one pass's layers; those of all of them on the host, unless they
        are spilled, which they are where there are several passes and a scratch place.
    """
    job = job.without_masks(state.unmasked)
    scratch = job.workspace.ports.scratch if len(parts) > 1 else None
    loads: dict[str, Load] = {}
    holders: dict[str, str] = {}
    needed = [[name for name in part if flaw(state.statistics[name], job.collection) is None] for part in parts]
    total = sum(any(not _exact(state.statistics[name].layer) for name in part) for part in needed)
    done = 0
    for part in needed:
        known = [state.statistics[name] for name in part]
        bases: dict[Hashable, Tensor] = {}
        sums = [_prepared(job, each, state, bases) for each in known if not _exact(each.layer)]
        if sums:
            read, size = _guarded_run(job.laid_out(overwritten=state.overwritten), tuple(sums), done, total)
            entered = _of_ranks(job, read.entered)
            before = job.require_entered(state.entered, entered, "the correction")
            if job.workspace.machine.ranks.size > 1:
                add_corrections(job.workspace.machine.ranks, sums, job.collection, state.batches)
            same_draws = job.collection.fisher != "mc" or before.keyed == entered.keyed
            _refuse(job, state, sums, compared=same_draws and size == job.micro_batch)
            done += 1
            state.passes += 1
        by_name = {each.layer.name: each for each in sums}
        for found in known:
            if found.flaw is not None:
                continue
            leader = _leader(found)
            own = by_name.get(found.layer.name)
            made = _block(job, state, found) if own is None else _of_parts(own)
            for group, (name, correction) in enumerate(zip(found.layer.parts, made, strict=True)):
                _require_finite(name, correction)
                if scratch is None:
                    loads[name] = constant(correction)
                else:
                    place = f"corrected/{len(loads)}"
                    holder = _hold(scratch, correction, f"{leader}[{group}]", place, holders)
                    scratch.save_tensors(f"{place}.safetensors", correction.stored(own_a=False), {})
                    loads[name] = _Waiting(scratch, place, holder)
        del sums, by_name, bases
        if scratch is not None:
            give_back_host_memory()
    return loads


def correct_part(
    job: PassJob,
    layers: Sequence[TreatedLayer],
    parts: Sequence[Sequence[str]],
    bases: MergedBases,
    keep: Callable[[str, Tensor, float], None],
) -> list[list[int]]:
    """Re-estimate eigenvalues in eigenbases of all examples' factors, over the examples of a part of the data.

    ``parts`` names the layers of each pass, of those that the part's probe found. ``keep`` receives, for each part of a
    layer, its name, its eigenvalues (out_dim, in_dim) over the part's examples, on the host, and the loss terms that
    they were divided by, weighted. It returns the indices of the examples, ``[begin, end]`` of each run, and holds
    bases and eigenvalues of one pass's layers.

    Raises:
        NotMergeable: If a layer of the bases was not found in this part.
        ModelRefused: If a layer is called in a way that the probe did not show.
        EngineError: As ``engine.errors`` lists.
    """
    unmasked = frozenset((call.part, call.number) for call in bases.table.unmasked)
    job = job.without_masks(unmasked).laid_out(overwritten=job.layout.overwritten | frozenset(bases.table.overwritten))
    by_name = {layer.name: layer for layer in layers if layer.parts[0] in bases.holders}
    bases.require_all(name for layer in by_name.values() for name in layer.parts)
    needed = [[by_name[name] for name in part if name in by_name] for part in parts]
    total, read = sum(bool(part) for part in needed), Cursor(number=0)
    entered: EnteredExamples | None = None
    for done, part in enumerate(part for part in needed if part):
        shared: dict[Hashable, Tensor] = {}
        sums = [
            _zeroed(job, layer, bases.holders[layer.parts[0]], shared, bases.load_A, bases.load_G) for layer in part
        ]
        read, _ = _guarded_run(job, tuple(sums), done, total)
        entered = job.require_entered(entered, read.entered, f"pass {done + 1} of the correction")
        for own in sums:
            if own.eigenvalues is None:
                raise ValueError(f"layer `{own.layer.name}` was never allocated")
            if own.flaw is not None:
                raise ModelRefused(
                    f"layer `{own.layer.name}` was collected, and its rows are not seen now ({own.flaw}); "
                    f"{remedy_of(own.flaw)}",
                    layer=own.layer.name,
                    pointer="/model",
                )
            values = own.eigenvalues.div_(own.weight_G or 1.0).to("cpu")
            for name, each in zip(own.layer.parts, values, strict=True):
                keep(name, each, own.weight_G)
        del sums, shared
    return joined(read.runs)


def _zeroed(
    job: PassJob,
    layer: TreatedLayer,
    holder: Hashable,
    shared: dict[Hashable, Tensor],
    load_A: Callable[[str], Tensor],
    load_G: Callable[[str], Tensor],
) -> CorrectionStatistics:
    """Zeroed eigenvalues of a layer, and its bases; ``shared`` holds those of each A for the layers that share it."""
    device, dense = job.workspace.machine.device, layer.form == "kronecker"
    if dense and holder not in shared:
        shared[holder] = torch.stack([load_A(name) for name in layer.parts]).to(device, job.dtype)
    made = CorrectionStatistics(
        layer=layer,
        sharing=job.collection.sharing if dense else "expand",
        basis_A=shared.get(holder) if dense else None,
        basis_G=torch.stack([load_G(name) for name in layer.parts]).to(device, job.dtype),
    )
    made.allocate(job.dtype, device)
    return made


def _refuse(job: PassJob, state: CollectionState, sums: Sequence[CorrectionStatistics], *, compared: bool) -> None:
    """Refuse each layer whose rows this pass has not seen as the passes before it did; ``compared`` are the traces."""
    known = [each for found in state.statistics.values() for each in found.exact_traces if each is not None]
    slack = _CANCELLED * torch.finfo(job.dtype).eps * max(known, default=0.0)
    for own in sums:
        found = state.statistics[own.layer.name]
        found.flaw, why = own.flaw, f"EK-FAC's pass does not see its rows ({own.flaw})"
        if own.flaw is None and compared and own.eigenvalues is not None and not found.representation.of_terms:
            totals = (own.eigenvalues.sum((1, 2), dtype=torch.float64) / (own.weight_G or 1.0)).tolist()
            # what a sum below the normal numbers lost is no cancellation
            least = torch.finfo(job.dtype).smallest_normal * own.eigenvalues[0].numel()
            for total, trace in zip(totals, found.exact_traces, strict=False):
                lost = max(total, trace or 0.0) < least
                if trace is not None and abs(total - trace) > _TOLERANCES[job.dtype] * trace + (0.0 if lost else slack):
                    found.flaw = TRACE_DIFFERS
                    why = f"its corrected eigenvalues add up to {total:.6g}, and its exact trace is {trace:.6g}"
                    why += "; take `collection.dtype: float64`" if lost and job.dtype == torch.float32 else ""
        if found.flaw is not None:
            job.workspace.ports.log("warning", f"layer `{own.layer.name}`: {why}; it is not covered")


def _exact(layer: TreatedLayer) -> bool:
    """Whether the layer's factors are its block itself."""
    return layer.form not in ("kronecker", "diagonal")


def _leader(found: LayerStatistics) -> str:
    return found.layer.name if found.leader is None else found.leader.layer.name


def _prepared(
    job: PassJob, found: LayerStatistics, state: CollectionState, bases: dict[Hashable, Tensor]
) -> CorrectionStatistics:
    """Zeroed eigenvalues of a layer, and the bases of its factors."""
    factors = {name: state.factors[name]() for name in found.layer.parts}
    return _zeroed(
        job,
        found.layer,
        _leader(found),
        bases,
        lambda name: eigenvectors(job.workspace, factors[name].A, name).to(job.dtype),
        lambda name: eigenvectors(job.workspace, factors[name].dense_G, name).to(job.dtype),
    )


def eigenvectors(workspace: Workspace, factor: Tensor, layer: str) -> Tensor:
    """Return the eigenvectors Q (n, n) of a dense factor (n, n), one a column, on the job's device.

    The factor is of any float dtype and device; the job's guard knows what fits, and messages name the layer.
    ``EngineError`` if no solver succeeds, ``ValueError`` if the factor is a diagonal.
    """
    device = workspace.machine.device
    found = decompose(
        factor.to(device), layer, need="vectors", guard=workspace.machine.guard, what="the basis of EK-FAC"
    )
    if found.vectors is None:
        raise ValueError(f"layer `{layer}`: a diagonal factor has no basis of its own")
    return found.vectors.to(device)


def _of_ranks(job: PassJob, entered: EnteredExamples) -> EnteredExamples:
    """The examples that entered a pass on all ranks."""
    total = EnteredExamples()
    for own in job.workspace.machine.ranks.gather(entered, "examples of the correction"):
        total = total.joined(own)
    return total


def _guarded_run(
    job: PassJob, sums: tuple[CorrectionStatistics, ...], done: int, total: int
) -> tuple[Cursor, int | None]:
    """One pass over the data; begun anew, with half as many examples at a time, where memory runs out.

    Returns the position at its end, and the examples that went through the model at once; None for whole batches.
    """
    before = [each.plain() for each in sums]
    seen: list[tuple[Cursor, int | None]] = []

    def begun(size: int | None) -> None:
        for each, kept in zip(sums, before, strict=True):
            each.put_plain(kept)
            if each.eigenvalues is not None:
                each.eigenvalues.zero_()
        seen[:] = [(_run(replace(job, micro_batch=size), sums, done, total), size)]

    sizes: list[int | None] = [job.micro_batch]
    whole = min(job.collection.batch_size, job.workspace.inputs.examples or job.collection.batch_size)
    while (last := sizes[-1] or whole) > 1:
        sizes.append(-(-last // 2))
    rungs = [
        Fallback(
            name="whole batches" if size is None else f"slices of {size}",
            formula="as the plan counts them",
            device_bytes=0,
            host_bytes=0,
            run=partial(begun, size),
        )
        for size in sizes
    ]
    job.workspace.machine.guard.run_with_fallbacks(rungs, what="the correction", layer=None, stage="correction")
    return seen[0]


def _run(job: PassJob, sums: tuple[CorrectionStatistics, ...], done: int, total: int) -> Cursor:
    """One pass over the data; returns the position at its end."""
    collection, ranks = job.collection, job.workspace.machine.ranks
    collector = Collector(statistics=sums, layout=job.layout, scale=job.precision.loss_scale(FIRST_SCALE, 0))
    progress, cursor = Progress(job, done, total, "correction"), Cursor(number=done)
    turns = Turns.of(ranks, collection.update_freq)
    # the numbers that the passes before this one drew
    seed_generators(collection.seed)
    with collector.attached(), torch.enable_grad():
        for batch in job.batches():
            job.workspace.ports.raise_if_cancelled()
            ranks.sign()
            # before the model, which may write to its inputs
            note_examples(job, cursor, batch, turns)
            if turns.update(cursor.batches) is not None:
                decay_(collection, cursor, turns, sums)
                update(job, batch, collector)
                cursor.updates += 1
            cursor.take(batch, checked=False)
            progress.report(cursor.batches)
    return cursor


def _of_parts(sums: CorrectionStatistics) -> list[Corrected]:
    if sums.eigenvalues is None or sums.basis_G is None:
        raise ValueError(f"layer `{sums.layer.name}` was never allocated")
    values = sums.eigenvalues.div_(sums.weight_G or 1.0).to("cpu")
    return [
        Corrected(
            eigenvectors_A=None if sums.basis_A is None else sums.basis_A[group].to("cpu"),
            eigenvectors_G=sums.basis_G[group].to("cpu"),
            eigenvalues=values[group],
        )
        for group in range(sums.layer.groups)
    ]


def _block(job: PassJob, state: CollectionState, found: LayerStatistics) -> list[Corrected]:
    """An exact block in its own eigenbasis; where only its diagonal is kept, that diagonal."""
    return [correct_block(job.workspace, state.factors[name](), job.dtype) for name in found.layer.parts]


def correct_block(workspace: Workspace, factors: Factors, dtype: torch.dtype) -> Corrected:
    """Return the correction of an exact block: its own eigenvalues, or its diagonal where that is all that is kept.

    Q_G (n, n), None of a diagonal, and the eigenvalues (n, 1) are on the host, in ``dtype``; the job's device
    decomposes.
    """
    block = factors.widened_G.to(workspace.machine.device, torch.float64)
    basis = None if factors.side_G.is_diagonal else eigenvectors(workspace, block, factors.layer)
    values = block if basis is None else (basis * (block @ basis)).sum(0)
    return Corrected(
        eigenvectors_A=None,
        eigenvectors_G=None if basis is None else basis.to("cpu", dtype),
        eigenvalues=values.to("cpu", dtype)[:, None],
    )


def _require_finite(name: str, found: Corrected) -> None:
    if not bool(torch.isfinite(found.eigenvalues).all()):
        raise NonFiniteFactor(
            f"layer `{name}`: the corrected eigenvalues hold NaN or Inf; take `collection.dtype: float64`", layer=name
        )


def _hold(scratch: Artifacts, found: Corrected, shared: str, place: str, holders: dict[str, str]) -> str | None:
    """Write Q_A once for all who share it, and return where it stands."""
    if found.eigenvectors_A is None:
        return None
    if shared not in holders:
        scratch.save_tensors(f"{place}.A.safetensors", {"eigenvectors_A": found.eigenvectors_A}, {})
        holders[shared] = place
    return holders[shared]
