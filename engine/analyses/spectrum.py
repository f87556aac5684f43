"""`spectrum`: eigenvalues at both ends, trace and density of K-FAC's curvature, EK-FAC's and the exact one's.

The spectra of the curvatures that are known by their products alone, which every pass over the data multiplies.

The matrices are those of all covered parameters together, without the approximation by layers. Their searches go one
after another; each is saved between two passes, and a later attempt goes on where the last one was.

The covered parameters within the vector of all of them: the rows of a curvature that K-FAC speaks for.

An exact curvature is a matrix over all trainable numbers in the order of ``named_parameters()``. What is compared with
K-FAC is its diagonal block over the covered ones, ``Rᵀ F R``, where R puts the others to zero.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from catalog.analyses.spectrum import SpectrumParams, SpectrumSummary
from catalog.analyses.spectrum_metrics import CurvatureSpectrum, LayerSpectrum, SpectrumMetrics
from catalog.record import plain
from engine.analyses.costs.spectrum import choose_search, expected_passes, spectrum_cost
from engine.analyses.layer_analysis import LayerAnalysis
from engine.analyses.metrics.layer_metrics import no_spectrum
from engine.analyses.spectra.found_spectrum import found_spectrum, read_spectrum
from engine.analyses.spectra.kronecker_spectra import BlockSpectra, ekfac_block, kfac_block
from engine.analyses.spectra.search_checkpoints import SavedSearch, SearchCheckpoints
from engine.analyses.spectra.spectrum_search import SpectrumSearch
from engine.collection.checkpoints import fingerprint
from engine.collection.pass_job import PassJob
from engine.collection.ranks.joined_job import pass_again
from engine.errors import UsageError
from engine.factors.factor_set import FactorSet, LayerFacts, ParameterShape
from engine.measurement.layer_measurement import Measured
from engine.memory.budget import give_back_host_memory
from engine.operators.blocks import block_of
from engine.operators.exact.data_passes import Learnt
from engine.operators.products import ExactCurvature
from engine.saved_fields import load_fields, save_fields
from engine.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class CoveredParameters:
    """Runs of covered numbers in the vector of all parameters."""

    total: int
    """P: all trainable numbers."""
    runs: tuple[tuple[int, int], ...]
    """Start and stop of each run, ascending; none touches the next."""

    @classmethod
    def of(cls, whole: FactorSet, model: nn.Module, parameters: Sequence[ParameterShape]) -> "CoveredParameters":
        """Find the covered numbers; a byte is held for each number."""
        offsets, total = {}, 0
        for each in parameters:
            offsets[each.name] = total
            total += math.prod(each.shape)
        covered = torch.zeros(total, dtype=torch.bool)
        for layer in whole.layers:
            _mark(covered, layer, model, offsets)
        steps = torch.cat([torch.zeros(1), covered.to(torch.float32), torch.zeros(1)]).diff()
        starts, stops = (steps == 1).nonzero()[:, 0].tolist(), (steps == -1).nonzero()[:, 0].tolist()
        return cls(total=total, runs=tuple(zip(starts, stops, strict=True)))

    @property
    def size(self) -> int:
        """Covered numbers."""
        return sum(stop - start for start, stop in self.runs)

    def expand(self, vectors: Tensor) -> Tensor:
        """Return ``R v``, shape (P, k), of vectors (size, k): the tensor itself where everything is covered."""
        if self.size == self.total:
            return vectors
        whole = vectors.new_zeros(self.total, vectors.shape[1])
        place = 0
        for start, stop in self.runs:
            whole[start:stop] = vectors[place : place + stop - start]
            place += stop - start
        return whole

    def restrict(self, vectors: Tensor) -> Tensor:
        """Return ``Rᵀ v``, shape (size, k), of vectors (P, k): the tensor itself where everything is covered."""
        if self.size == self.total:
            return vectors
        return torch.cat([vectors[start:stop] for start, stop in self.runs])


def _mark(covered: Tensor, layer: LayerFacts, model: nn.Module, offsets: dict[str, int]) -> None:
    """Mark the numbers of one layer, by its windows or by the names of its parameters."""
    if layer.windows is not None and all(window.parameter in offsets for window in layer.windows):
        for window in layer.windows:
            start = offsets[window.parameter] + window.offset
            covered.as_strided(window.shape, window.strides, start).fill_(True)
        return
    block = block_of(model, layer.name, layer.parameters, layer.parameter_count)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known = dict(model.named_parameters(remove_duplicate=False))
    if block is None:
        raise UsageError(
            f"layer `{layer.name}`: it is not known where its numbers stand in {', '.join(layer.parameters)}, so that "
            "no exact curvature can be restricted to what K-FAC covers; take `spectrum.of: kfac` alone",
            layer=layer.name,
            pointer="/spectrum/of",
        )
    for piece in block.pieces:
        offset = offsets[names[id(known[piece.parameter])]]
        covered[offset + piece.start : offset + piece.stop] = True


_STAGE: Literal["spectrum"] = "spectrum"
_REPORTED = "products"
_REMEDY = "take `spectrum.of: kfac` alone, or write the model with operations that torch can differentiate twice"

Digests = Sequence[tuple[int, str | None, str | None]]
"""Ordinal and digests of the A and G of every layer."""


def exact_spectra(
    params: SpectrumParams, workspace: Workspace, whole: FactorSet, digests: Digests
) -> dict[str, CurvatureSpectrum]:
    """Search every exact curvature that the job asks for; ``engine.analyses.costs.spectrum`` counts the memory."""
    job = pass_again(workspace, whole, "spectrum.of", str(params.needs_model))
    return _Searches(params=params, job=job, whole=whole, digests=digests).run()


@dataclass(kw_only=True)
class _Searches:
    params: SpectrumParams
    job: PassJob
    whole: FactorSet
    digests: Digests
    _batches: int = 0
    """Done, over all passes."""
    _left: int = 0
    """Searches that follow the one under way."""
    _checkpoints: SearchCheckpoints = field(init=False)
    _finished: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, CurvatureSpectrum]:
        """Search one curvature after another."""
        self._checkpoints = SearchCheckpoints(workspace=self.job.workspace, conditions=self._conditions())
        saved = self._checkpoints.find()
        chosen = self._chosen(saved)
        if saved is not None:
            self._finished = dict(saved.finished)
            self._batches = saved.counts.get("batches", 0)
        for place, of in enumerate(self.params.exact, start=1):
            self._left = len(self.params.exact) - place
            if of not in self._finished:
                under_way = saved if saved is not None and saved.of == of else None
                self._finished[of] = plain(self._searched(of, chosen, under_way))
                if self._checkpoints.worth():
                    self._checkpoints.save(self._between(chosen), {})
                give_back_host_memory()
        self.job.workspace.ports.report(_REPORTED, self._batches, self._batches, "batches")
        return {of: read_spectrum(self._finished[of]) for of in self.params.exact}

    def _conditions(self) -> dict[str, Any]:
        """Everything that the bits of a search depend on, each entry under the name that a refusal calls it by."""
        if not self.job.workspace.saves_checkpoints:
            return {}
        return {
            **self.job.workspace.resume.conditions,
            **self.job.numerics.recorded(),
            "options of the spectrum": plain(self.params),
            "collection": asdict(self.job.collection),
            "task": asdict(self.job.task),
            "micro-batch": self.job.micro_batch,
            "model": fingerprint(self.job.model),
            "set of factors": [list(each) for each in self.digests],
        }

    def _chosen(self, saved: SavedSearch | None) -> dict[str, int]:
        """Return the choice of the plan, or of the attempt before; without either, one by what is free now."""
        plan = self.job.workspace.results.plan
        if saved is not None:
            return dict(saved.chosen)
        if plan is not None and plan.chosen.search:
            return dict(plan.chosen.search)
        guard, cuda = self.job.workspace.machine.guard, self.job.workspace.machine.device.type == "cuda"
        free = guard.free_bytes("device" if cuda else "host")
        return choose_search(self.params, self.whole.covered_parameters, self.job.dtype, free)

    def _searched(self, of: str, chosen: dict[str, int], saved: SavedSearch | None) -> CurvatureSpectrum:
        job, workspace = self.job, self.job.workspace
        matrix = ExactCurvature(
            job=job,
            of=cast("Literal['ggn', 'hessian', 'fisher', 'empirical']", of),
            updates=self.whole.updates,
            report=self._report,
            parameters=self.whole.parameters or (),
            samples=job.collection.samples if job.collection.fisher == "mc" else 1,
            what="the search of a spectrum",
            remedy=_REMEDY,
            pointer="/spectrum/of",
        )
        covered = CoveredParameters.of(self.whole, job.model, matrix.parameters)
        search = SpectrumSearch(
            size=covered.size,
            params=self.params,
            seed=job.collection.seed,
            dtype=job.dtype,
            length=chosen["length"],
            columns=chosen["columns"],
            device=workspace.machine.device,
        )
        if saved is not None:
            self._restore(search, matrix, saved)

        def multiply(vectors: Tensor) -> Tensor:
            return covered.restrict(matrix.product(covered.expand(vectors)))

        with workspace.machine.operation(f"spectrum of {of}", _STAGE), matrix.prepared():
            while not search.done:
                search.step(multiply)
                workspace.machine.curve.sample(f"spectrum of {of}", "within", workspace.machine.device)
                if self._checkpoints.due():
                    self._checkpoints.save(self._saved(matrix, chosen, search), search.state())
            found = found_spectrum(of, search)
        return replace(found, products=search.products, passes=search.passes)

    def _restore(self, search: SpectrumSearch, matrix: ExactCurvature, saved: SavedSearch) -> None:
        state = self._checkpoints.tensors()
        if state is None or saved.learnt is None:
            return
        search.restore(state)
        matrix.learnt = Learnt(**load_fields(Learnt, saved.learnt))
        search.products, search.passes = saved.counts["products"], saved.counts["passes"]
        self.job.workspace.ports.log(
            "info",
            f"the search of {matrix.of} resumed after {search.passes} passes over the data "
            f"({search.products} products)",
        )

    def _between(self, chosen: dict[str, int]) -> SavedSearch:
        return SavedSearch(finished=self._finished, of=None, chosen=chosen, counts={"batches": self._batches})

    def _saved(self, matrix: ExactCurvature, chosen: dict[str, int], search: SpectrumSearch) -> SavedSearch:
        counts = {"products": search.products, "passes": search.passes, "batches": self._batches}
        learnt = save_fields(matrix.learnt)
        return SavedSearch(finished=self._finished, of=matrix.of, chosen=chosen, counts=counts, learnt=learnt)

    def _report(self) -> None:
        """Called after every batch; how many passes a search takes is unknown beforehand, so the total grows."""
        self._batches += 1
        examples, total = self.job.workspace.inputs.examples, None
        if examples is not None:
            each = expected_passes(self.params) * -(-examples // self.job.collection.batch_size)
            total = max(len(self.params.exact) * each, self._batches + self._left * each)
        self.job.workspace.ports.report(_REPORTED, self._batches, total, "batches")


_BLOCKS: tuple[Literal["kfac", "ekfac"], ...] = ("kfac", "ekfac")


class Spectrum(LayerAnalysis[SpectrumParams]):
    """The spectrum of each layer as its factors are decomposed; then that of the exact curvatures, by their products.

    Memory:
        One layer's factors at a time; of exact curvatures the search's basis, the quadrature's vectors and the graph of
        a slice, as ``engine.analyses.costs.spectrum`` counts them.
    """

    kind = "spectrum"
    cost = staticmethod(spectrum_cost)

    @override
    def require(self) -> None:
        model = self.workspace.inputs.model
        if model is not None:
            # what is covered is known after the collection, and is no more than this
            trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
            _require_dimension(self.params, trainable, "trainable")

    @override
    def prepare(self) -> None:
        if "ekfac" in self.params.curvatures and self.whole.load_corrected is None:
            raise UsageError(
                "the factors hold no eigenvalues of EK-FAC, and `spectrum.of: ekfac` needs them; collect with "
                "`collection.ekfac: true`, or leave it out",
                pointer="/spectrum/of",
            )
        _require_dimension(self.params, self.whole.covered_parameters, "covered")
        self._blocks = {of: BlockSpectra(of=of, params=self.params) for of in _BLOCKS if of in self.params.curvatures}
        self._digests: list[tuple[int, str | None, str | None]] = []

    @override
    def layer(self, layer: Measured) -> SpectrumMetrics:
        facts, blocks = layer.facts, self._blocks
        found: dict[str, LayerSpectrum] = {}
        lacking: dict[str, str] = {}
        if "kfac" in blocks:
            why = no_spectrum(layer)
            if why is None:
                found["kfac"] = blocks["kfac"].take(facts.ordinal, kfac_block(layer, self.params))
            else:
                lacking["kfac"] = why
                blocks["kfac"].lack(facts.ordinal, facts.name, layer.A.trace * layer.G.trace, why)
        if "ekfac" in blocks and self.whole.load_corrected is not None:
            corrected = self.whole.load_corrected(facts.ordinal)
            found["ekfac"] = blocks["ekfac"].take(facts.ordinal, ekfac_block(layer, corrected, self.params))
        self._digests.append((facts.ordinal, layer.record.digest_A, layer.record.digest_G))
        return SpectrumMetrics(
            form=facts.form,
            dimension=facts.in_dim * facts.out_dim,
            kfac=found.get("kfac"),
            ekfac=found.get("ekfac"),
            no_spectrum=lacking,
            estimated=_estimated(layer) if "kfac" in found else None,
        )

    @override
    def summary(self) -> SpectrumSummary:
        params, whole = self.params, self.whole
        found: dict[str, CurvatureSpectrum] = {
            of: each.of_model(whole.covered_parameters) for of, each in self._blocks.items()
        }
        if params.exact:
            found |= exact_spectra(params, self.workspace, whole, sorted(self._digests))
        return SpectrumSummary(
            coverage=self.coverage,
            layers=len(whole.layers),
            curvatures=tuple(found[of] for of in params.curvatures),
        )


def _require_dimension(params: SpectrumParams, dimension: int, which: str) -> None:
    if params.k is not None and params.k > dimension:
        raise UsageError(
            f"`spectrum.k` must be at most the dimension {dimension}, the number of {which} parameters "
            f"(got {params.k}); take fewer",
            pointer="/spectrum/k",
        )


def _estimated(layer: Measured) -> str | None:
    """How the eigenvalues are known where G's are not computed."""
    counted = layer.G.counted
    if counted is None or layer.G.spectrum is not None:
        return None
    return (
        f"G ({layer.facts.out_dim} rows) is held as `{layer.facts.representation_G}`: its eigenvalues are estimated "
        f"between bounds that {counted.counts} inertia counts prove"
    )
