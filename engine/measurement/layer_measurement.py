"""Measured layers: each covered layer's factors, digests and spectra, made once for all analyses of a job.

Artifacts that the job keeps are written here, a layer at a time, so that two analyses over one
collection neither decompose nor write anything twice.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from catalog.responses.layer_record import LayerRecord, Observed
from engine.artifacts import Artifacts
from engine.collect import collect_or_read
from engine.factors.factor_files import Kept, write_factors, write_index, write_run
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.factors.kronecker_factors import digest
from engine.linalg.damping import Clipping, Damping, damping, identity_warnings
from engine.linalg.eigendecomposition import Decomposition
from engine.measurement.decompose_layer import (
    Side,
    keep_spectra,
    least_precise,
    load_basis,
    measure_side,
    refused_rungs,
    share_bases,
    underflow,
)
from engine.measurement.divided_layers import DividedLayers, SentFiles
from engine.measurement.prefetch import Arrived, Source, stream_factors
from engine.measurement.representation_record import (
    branch,
    factorise_rows,
    held_bytes,
    observe,
    row_facts,
    with_factorisation,
)
from engine.measurement.subsample_spectra import MeasuredSize, smaller_sizes
from engine.workspace import FactorCache, Workspace


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One covered layer with everything the analyses read; its factors are not held."""

    facts: LayerFacts
    A: Side
    G: Side
    nested: tuple[MeasuredSize, ...]
    """Ascending sample sizes up to the whole, where they were asked for; else none."""
    damping: Damping
    clipping_G: Clipping
    record: LayerRecord
    observed: Observed
    bases: Workspace | None
    """The job that ``load_basis`` reads; None on the way from another rank."""
    metadata_G: Mapping[str, str]
    """Strings that reading a structured G needs besides its tensors; empty for a dense one."""

    @property
    def status(self) -> Literal["covered", "zero_curvature"]:
        """`covered`, or `zero_curvature` where the layer has no curvature at all."""
        return "covered" if self.A.trace > 0 and self.G.trace > 0 else "zero_curvature"

    def load_basis(self, side: Literal["A", "G"]) -> Decomposition:
        """Return the decomposition of one side with its vectors, on the host.

        It is there only where an analysis of the job asks for vectors, and on the rank that made it or one that the
        bases of all layers were sent to.
        """
        if self.bases is None:
            raise ValueError(f"the basis of {side} has not arrived")
        return load_basis(self.bases, self.A if side == "A" else self.G)


class _MeasuredLayers(dict[int, Measured]):
    """Layers of one job that were measured, by ordinal."""


class _SharedSides(dict[int, Side]):
    """Measured sides A that several layers share, by the ordinal of the first."""


def measure_layers(workspace: Workspace) -> Iterator[Measured]:
    """Measure every covered layer once, the largest first; later analyses of the job get the same records.

    Factors are not held. After the last, the index of the kept factors is written.
    """
    known = workspace.results.of(_MeasuredLayers)
    factors = collect_or_read(workspace)
    # merged ones are stored nowhere yet
    keep_factors = workspace.inputs.stored is None and workspace.options.keeps_factors
    cache = _cache(workspace, factors)
    order = sorted(factors.layers, key=_by_size)
    division = DividedLayers.of(workspace, factors)
    arriving = stream_factors(
        [facts for facts in order if facts.ordinal not in known and (division is None or division.is_own(facts))],
        factors.load,
        device=workspace.machine.device,
        guard=workspace.machine.guard,
        need=None if workspace.options.decomposition == "none" else workspace.options.decomposition,
        source=_source(workspace, factors),
        packs=keep_factors or cache is not None,
    )

    def measure(facts: LayerFacts) -> Measured:
        with workspace.machine.operation(f"layer {facts.ordinal}", "decomposition"):
            return _measure(workspace, factors, facts, arriving, keep_factors=keep_factors and division is None)

    with contextlib.closing(arriving):
        if division is not None and not known:
            _measure_divided(workspace, factors, division, (order, measure), keep_factors=keep_factors)
        for facts in order:
            if facts.ordinal not in known:
                known[facts.ordinal] = measure(facts)
                if len(known) == len(order):
                    _complete(workspace, factors, cache, keep_factors=keep_factors)
            yield known[facts.ordinal]


def _complete(workspace: Workspace, whole: FactorSet, cache: FactorCache | None, *, keep_factors: bool) -> None:
    """Write the indices of the factors that are kept, after the last layer."""
    kept = {place: _kept(one) for place, one in workspace.results.of(_MeasuredLayers).items()}
    if keep_factors:
        write_index(workspace.ports.artifacts, whole, kept)
    if cache is not None:
        write_run(cache.shelf(), whole)
        write_index(cache.shelf(), whole, kept)
        cache.keep()


def _measure_divided(
    workspace: Workspace,
    whole: FactorSet,
    division: DividedLayers,
    work: tuple[Sequence[LayerFacts], Callable[[LayerFacts], Measured]],
    *,
    keep_factors: bool,
) -> None:
    """Measure this rank's layers, and take those of the others from them; write what this rank keeps of all."""
    known, cache = workspace.results.of(_MeasuredLayers), _cache(workspace, whole)
    order, measure = work
    places = ([workspace.ports.artifacts] if keep_factors else []) + ([] if cache is None else [cache.shelf()])
    # a rank that keeps files writes what it has, and is sent what it has not
    files = SentFiles(division=division, places=places) if whole.owners is not None and places else None

    def write(facts: LayerFacts, places: Sequence[Artifacts]) -> None:
        for place in places:
            corrected = None if whole.load_corrected is None else whole.load_corrected(facts.ordinal)
            write_factors(place, facts, whole.load(facts.ordinal), corrected=corrected)

    def compute(facts: LayerFacts) -> Measured:
        found = measure(facts)
        if files is not None:
            write(facts, [files])
        return replace(found, bases=None)

    for facts, found in division.compute(order, compute, "decomposition", files):
        # of these each rank has its own
        record = replace(found.record, positions_local=_positions_local(facts), sent_bytes=facts.sent_bytes)
        known[facts.ordinal] = replace(found, facts=facts, record=record, bases=workspace)
        if division.needs_bases:
            share_bases(division, facts, (found.A, found.G))
        if files is None:
            write(facts, places)
        if "spectra" in workspace.options.keep and not division.is_own(facts):
            keep_spectra(workspace, facts, found.A, found.G)
    _complete(workspace, whole, cache, keep_factors=keep_factors)


def _positions_local(facts: LayerFacts) -> int:
    return facts.positions if facts.positions_local is None else facts.positions_local


def _source(workspace: Workspace, whole: FactorSet) -> Source:
    if workspace.inputs.stored_pieces:
        return "merged"
    return "resident" if whole.storage_policy == "resident" and whole.reused_from is None else "stored"


def _cache(workspace: Workspace, whole: FactorSet) -> FactorCache | None:
    """Return the cache that keeps the factors for other jobs; None where they are not kept.

    A head of which only the diagonal fitted is nothing to share: a job with more memory keeps all of it.
    """
    sketched = workspace.results.plan is not None and bool(workspace.results.plan.chosen.sketched)
    inputs = workspace.inputs
    unshared = inputs.reads_stored or inputs.part is not None or whole.reused_from is not None
    return None if unshared or sketched else workspace.ports.cache


def _by_size(facts: LayerFacts) -> tuple[int, int]:
    """Order by the cost of decompositions, the largest first: a failure is known before the rest is done."""
    dense_a = facts.in_dim if facts.form == "kronecker" else 0
    dense_g = facts.out_dim if facts.form != "diagonal_block" else 0
    return -(dense_a**3 + dense_g**3), facts.ordinal


def _measure(
    workspace: Workspace, whole: FactorSet, facts: LayerFacts, arriving: Iterator[Arrived], *, keep_factors: bool
) -> Measured:
    workspace.ports.raise_if_cancelled()
    begun, before = time.perf_counter(), held_bytes(workspace.machine.device)
    # those between were measured by another analysis meanwhile
    arrived = next(each for each in arriving if each.factors.layer == facts.name)
    factors, kept = arrived.factors, arrived.factors.side_G
    corrected = None if whole.load_corrected is None else whole.load_corrected(facts.ordinal)
    ekfac = {} if corrected is None else {name: digest(each) for name, each in corrected.stored(own_a=True).items()}
    side_g = measure_side(workspace, whole, facts, arrived, "G")
    shared_a = workspace.results.of(_SharedSides)
    if facts.leader not in shared_a:
        shared_a[facts.leader] = measure_side(workspace, whole, facts, arrived, "A")
    side_a = shared_a[facts.leader]
    cache = _cache(workspace, whole) if workspace.machine.ranks.size == 1 else None  # several write theirs together
    for place in ([workspace.ports.artifacts] if keep_factors else []) + ([] if cache is None else [cache.shelf()]):
        write_factors(place, facts, factors, corrected=corrected, stored=arrived.stored)
    if whole.let_go is not None:
        whole.let_go(facts.ordinal)
    spectrum_a, spectrum_g = side_a.spectrum, side_g.spectrum
    if "spectra" in workspace.options.keep:
        keep_spectra(workspace, facts, side_a, side_g)
    damped = damping(
        side_a.trace / facts.in_dim if spectrum_a is None else float(spectrum_a.mean()),
        side_g.trace / facts.out_dim if spectrum_g is None else float(spectrum_g.mean()),
        workspace.options.stabilisation,
        block=facts.form in ("block", "diagonal_block"),
    )
    for warning in identity_warnings(
        facts.name, damped, workspace.options.stabilisation, side_a.largest, side_g.largest
    ):
        workspace.ports.log("warning", warning)
    ekfac_trace = None if corrected is None else float(corrected.eigenvalues.sum(dtype=torch.float64))
    if whole.collection.dtype == "float32":
        flat = not facts.exact_trace
        sums = [
            ("moments of A", side_a.trace, facts.in_dim, flat),
            ("moments of G", side_g.trace, facts.out_dim, flat and not facts.reached),
        ]
        if ekfac_trace is not None:
            sums.append(("corrected eigenvalues", ekfac_trace, facts.in_dim * facts.out_dim, flat))
        for name, trace, size, zero in sums:
            lost = underflow(facts.name, name, trace, size, zero=zero)
            if lost is not None:
                workspace.ports.notice(lost)
    kappa_max, counted = workspace.options.stabilisation.kappa_max, side_g.counted
    clipped_a = Clipping.at(spectrum_a, kappa_max, side_a.entry_rounding)
    clipped_g = Clipping.at(spectrum_g if counted is None else counted, kappa_max, side_g.entry_rounding)
    taken = factorise_rows(workspace, factors, damped.G)
    smaller = smaller_sizes(workspace, whole, facts, keep_factors=keep_factors) if whole.nested else ()
    after, refused = held_bytes(workspace.machine.device), refused_rungs({"A": side_a, "G": side_g})
    complete = MeasuredSize(
        examples=whole.examples,
        spectrum_A=spectrum_a,
        spectrum_G=spectrum_g,
        trace_A=side_a.trace,
        trace_G=side_g.trace,
        frobenius_A=side_a.frobenius,
        frobenius_G=side_g.frobenius,
    )
    kronecker_trace = side_a.trace * side_g.trace
    return Measured(
        facts=facts,
        A=side_a,
        G=side_g,
        bases=workspace,
        nested=(*smaller, complete) if whole.collection.nested else (),
        damping=damped,
        clipping_G=clipped_g,
        record=LayerRecord(
            **_repeated(whole, facts) | row_facts(factors, facts),
            branch=branch(facts),
            policy=whole.woodbury.policy,
            damping_split=workspace.options.stabilisation.damping_split,
            lambda_A=damped.A,
            lambda_G=damped.G,
            lambda_A_relative=damped.relative_A,
            lambda_G_relative=damped.relative_G,
            kappa_max=kappa_max,
            kappa_A=clipped_a.kappa,
            kappa_G=clipped_g.kappa,
            kappa_A_clipped=clipped_a.kappa_clipped,
            kappa_G_clipped=clipped_g.kappa_clipped,
            clipped_A=clipped_a.clipped,
            clipped_G=clipped_g.clipped,
            update_freq=whole.collection.update_freq,
            update_index=whole.updates,
            ema_decay=whole.collection.ema_decay,
            kronecker_trace=kronecker_trace,
            trace_ratio=kronecker_trace / facts.exact_trace if facts.exact_trace else None,
            storage_device=whole.device,
            dtype=str(factors.A.dtype).removeprefix("torch."),
            accumulation_dtype=whole.collection.dtype,
            scale_A=factors.scale_A,
            scale_G=factors.scale_G,
            factor_bytes=kept.size_bytes + (factors.side_A.size_bytes if facts.shared_A_with is None else 0),
            cholesky_jitter=None if taken is None else taken.jitter,
            fisher=whole.collection.fisher,
            samples=whole.collection.samples if whole.collection.fisher == "mc" else None,
            seed=whole.collection.seed if whole.collection.fisher == "mc" else None,
            digest_A=side_a.digest,
            digest_G=side_g.digest,
            digest_ekfac=ekfac.get("corrected_eigenvalues"),
            digest_eigenvectors_A=ekfac.get("eigenvectors_A"),
            digest_eigenvectors_G=ekfac.get("eigenvectors_G"),
            ekfac_trace=ekfac_trace,
            precision=least_precise(side_a, side_g),
            rungs_A=side_a.rungs,
            rungs_G=with_factorisation(side_g.rungs, taken),
            residual_A=None if side_a.found is None else side_a.found.residual,
            residual_G=None if side_g.found is None else side_g.found.residual,
        ),
        observed=observe(begun, before, after, workspace, whole, refused),
        metadata_G=kept.metadata(),
    )


def _repeated(whole: FactorSet, facts: LayerFacts) -> dict[str, Any]:
    """Facts of a set and of its layer that a record holds under their own names, rank bounds within the sizes."""
    names = LayerRecord.__dataclass_fields__
    known: dict[str, Any] = {name: getattr(of, name) for of in (whole, facts) for name in names if hasattr(of, name)}
    for name, size in (("rank_bound_A", facts.in_dim), ("rank_bound_G", facts.out_dim)):
        known[name] = None if known[name] is None else min(known[name], size)
    return known | {"positions_local": _positions_local(facts)}


def _kept(measured: Measured) -> Kept:
    record = measured.record
    return Kept(
        digest_A=str(record.digest_A),
        digest_G=str(record.digest_G),
        scale_A=record.scale_A or 1.0,
        scale_G=record.scale_G or 1.0,
        metadata_G=measured.metadata_G,
        ekfac={
            name: sha256
            for name, sha256 in (
                ("corrected_eigenvalues", record.digest_ekfac),
                ("eigenvectors_A", record.digest_eigenvectors_A),
                ("eigenvectors_G", record.digest_eigenvectors_G),
            )
            if sha256 is not None
        },
    )
