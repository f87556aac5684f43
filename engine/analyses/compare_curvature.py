"""`compare_curvature`: each layer's factors beside those of a second, stored set; no model is needed.

Layers are the same where they have one name and one size. An A that layers share in both sets is compared once.
Spectra, eigenvectors and pencils are computed here, on the host in float64: the decompositions that a
job spills are float32, to which spans would be known to 1e-7 only.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from typing_extensions import override

from catalog.analyses.compare_curvature import (
    CompareCurvatureMetrics,
    CompareCurvatureParams,
    CompareCurvatureSummary,
    CorrectedComparison,
    MatrixComparison,
    MeanOverlap,
    OptionDifference,
    OtherSize,
)
from catalog.record import canonical_json
from engine.analyses.costs.compare_curvature import comparison_cost
from engine.analyses.layer_analysis import LayerAnalysis
from engine.errors import BrokenFactors, UsageError
from engine.factors.factor_files import read_factors
from engine.factors.factor_index import INDEX, read_index, set_digest
from engine.factors.factor_set import Corrected, FactorSet, LayerFacts
from engine.factors.kronecker_factors import Factors
from engine.linalg.damping import Damping, damping
from engine.measurement.layer_measurement import Measured
from engine.operators.comparison import product_metrics, side_metrics
from engine.operators.pairs.matrix_pair import Symmetric
from engine.operators.pairs.side_comparison import SideComparison, compare_sides
from engine.operators.parameter_space import few_names
from engine.workspace import Workspace

KIND = "compare_curvature"
AGAINST = "/compare_curvature/against"
_BLOCKS = ("block", "diagonal_block")
_COUNTS = ("examples", "updates", "trainable_parameters")


@dataclass(frozen=True, kw_only=True)
class _Against:
    """The second set, and the layers of the first that it has too."""

    whole: FactorSet
    by_name: Mapping[str, LayerFacts]
    digests: Mapping[int, tuple[str | None, str | None]]
    """Digests of A and G by ordinal, as the index records them."""
    sha256: str | None
    """Digest of the whole set."""

    def load(self, facts: LayerFacts) -> tuple[Factors, Corrected | None]:
        """One layer's factors."""
        try:
            corrected = None if self.whole.load_corrected is None else self.whole.load_corrected(facts.ordinal)
            return self.whole.load(facts.ordinal), corrected
        except BrokenFactors as error:
            raise _elsewhere(error) from error


class Comparison(LayerAnalysis[CompareCurvatureParams]):
    """Each layer of the first set beside that of the second.

    Memory:
        The factors of one layer from both sets, as they are kept; one eigendecomposition, or 24 n² bytes; of every A
        that layers share, 8 k² bytes.
    """

    kind = KIND
    cost = staticmethod(comparison_cost)

    @override
    def prepare(self) -> None:
        self._against = _read_against(self.workspace, self.whole)
        self._compared: list[tuple[str, MatrixComparison]] = []
        self._digests: dict[int, tuple[str, str | None, str | None]] = {}
        self._shared = _SharedSides(self.whole, self._against)

    @override
    def layer(self, layer: Measured) -> CompareCurvatureMetrics:
        other = self._against.by_name.get(layer.facts.name)
        if other is None or not _comparable(layer.facts, other):
            return _not_compared(layer.facts, other)
        return self._compare(layer, other)

    @override
    def take(self, layer: Measured, outcome: CompareCurvatureMetrics) -> CompareCurvatureMetrics:
        facts, record = layer.facts, layer.record
        self._digests[facts.ordinal] = (facts.name, record.digest_A, record.digest_G)
        if outcome.product is not None:
            self._compared.append((facts.name, outcome.product))
        return outcome

    @override
    def summary(self) -> CompareCurvatureSummary:
        other = self._against.whole
        products = [product for _, product in self._compared]
        distance = _root_sum(product.distance for product in products)
        norm = _root_sum(product.norm_against for product in products)
        ranked = [(product.relative_distance, name) for name, product in self._compared]
        known = [(value, name) for value, name in ranked if value]
        names = {facts.name for facts in self.whole.layers}
        sizes = [(facts, self._against.by_name.get(facts.name)) for facts in self.whole.layers]
        return CompareCurvatureSummary(
            coverage=self.coverage,
            layers=len(products),
            overlaps=tuple(_mean_overlap(k, place, products) for place, k in enumerate(self.params.k)),
            distance=distance,
            relative_distance=None if distance is None or not norm else distance / norm,
            divergence=_total(product.divergence for product in products),
            reverse_divergence=_total(product.reverse_divergence for product in products),
            farthest=max(known, key=lambda each: each[0])[1] if known else None,
            only_first=tuple(facts.name for facts, twin in sizes if twin is None),
            only_against=tuple(facts.name for facts in other.layers if facts.name not in names),
            other_sizes=tuple(
                OtherSize(layer=facts.name, first=_shape(facts), against=_shape(twin))
                for facts, twin in sizes
                if twin is not None and not _comparable(facts, twin)
            ),
            differences=_differences(self.whole, other),
            factors_sha256=set_digest([self._digests[ordinal] for ordinal in sorted(self._digests)]),
            against_sha256=self._against.sha256,
        )

    def _compare(self, layer: Measured, other: LayerFacts) -> CompareCurvatureMetrics:
        facts, ks, against, guard = layer.facts, self.params.k, self._against, self.workspace.machine.guard
        factors, (factors_2, corrected_2) = self.whole.load(facts.ordinal), against.load(other)
        corrected = None if self.whole.load_corrected is None else self.whole.load_corrected(facts.ordinal)
        damped = [_damped(self.workspace, *each) for each in ((facts, factors), (other, factors_2))]
        found_a = compare_sides(
            (_side(factors, facts, "A"), _side(factors_2, other, "A")),
            facts.name,
            vectors=ks[-1],
            damping=(damped[0].A, damped[1].A),
            guard=guard,
            known=self._shared.get(facts, other),
        )
        self._shared.put(facts, other, found_a)
        found_g = compare_sides(
            (_side(factors, facts, "G"), _side(factors_2, other, "G")),
            facts.name,
            vectors=ks[-1],
            damping=(damped[0].G, damped[1].G),
            guard=guard,
        )
        digests = against.digests.get(other.ordinal, (None, None))
        return CompareCurvatureMetrics(
            form=facts.form,
            A=None if facts.form in _BLOCKS else side_metrics(found_a, ks),
            G=side_metrics(found_g, ks),
            product=product_metrics(found_g, found_a, ks),
            ekfac=None if corrected is None or corrected_2 is None else _corrected(corrected, corrected_2),
            lambda_A=damped[0].A,
            lambda_G=damped[0].G,
            lambda_A_against=damped[1].A,
            lambda_G_against=damped[1].G,
            digest_A_against=digests[0],
            digest_G_against=digests[1],
            why=None,
        )


def _read_against(workspace: Workspace, first: FactorSet) -> _Against:
    stored = workspace.inputs.stored_against
    if stored is None:
        raise UsageError(
            "there is nothing to compare with: give `compare_curvature.against`, the `job` or `path` of stored factors",
            pointer=AGAINST,
        )
    try:
        whole = read_factors(stored)
        index = read_index(stored.load_json(INDEX))
    except BrokenFactors as error:
        raise _elsewhere(error) from error
    by_name = {facts.name: facts for facts in whole.layers}
    if not any(facts.name in by_name for facts in first.layers):
        own, others = (few_names([each.name for each in of.layers]) or "none" for of in (first, whole))
        raise UsageError(
            f"the two sets have no layer in common: the first has {own}, the one compared with {others}; give factors "
            "of models whose layers have the same names",
            pointer=AGAINST,
        )
    digests = {
        each.facts.ordinal: (each.digests.get("activation_covariance"), each.digests.get("gradient_covariance"))
        for each in index.layers
    }
    return _Against(whole=whole, by_name=by_name, digests=digests, sha256=index.sha256())


def _elsewhere(error: BrokenFactors) -> BrokenFactors:
    """The same error of the set that is compared with."""
    return BrokenFactors(f"of the set compared with: {error.message}", layer=error.layer, pointer=AGAINST)


def _comparable(facts: LayerFacts, other: LayerFacts) -> bool:
    sizes = (facts.in_dim, facts.out_dim) == (other.in_dim, other.out_dim)
    return sizes and (facts.form in _BLOCKS) == (other.form in _BLOCKS)


def _shape(facts: LayerFacts) -> str:
    return f"{facts.in_dim}×{facts.out_dim} {facts.form}"


def _not_compared(facts: LayerFacts, other: LayerFacts | None) -> CompareCurvatureMetrics:
    blank = dict.fromkeys(each.name for each in fields(CompareCurvatureMetrics))
    why = "the set compared with has no layer of this name"
    if other is not None:
        why = f"the layer is {_shape(facts)} here and {_shape(other)} in the set compared with"
    return CompareCurvatureMetrics(**blank | {"form": facts.form, "why": why})  # type: ignore[arg-type]


def _side(factors: Factors, facts: LayerFacts, which: Literal["A", "G"]) -> Symmetric:
    side, bound = (factors.side_A, facts.rank_bound_A) if which == "A" else (factors.side_G, facts.rank_bound_G)
    return Symmetric(side=side.to(torch.device("cpu")), rank_bound=bound)


def _damped(workspace: Workspace, facts: LayerFacts, factors: Factors) -> Damping:
    return damping(
        factors.side_A.trace() / facts.in_dim,
        factors.side_G.trace() / facts.out_dim,
        workspace.options.stabilisation,
        block=facts.form in _BLOCKS,
    )


def _corrected(first: Corrected, second: Corrected) -> CorrectedComparison:
    x, y = (each.eigenvalues.to("cpu", torch.float64).flatten().sort().values for each in (first, second))
    traces = float(x.sum()), float(y.sum())
    norm = float(y.norm())
    return CorrectedComparison(
        trace_log_ratio=math.log(traces[0]) - math.log(traces[1]) if min(traces) > 0 else None,
        spectral_distance=float((x - y).norm()) / norm if norm > 0 else None,
    )


class _SharedSides:
    """Comparisons of inputs that several layers of both sets share, for as long as one of those is to come."""

    def __init__(self, first: FactorSet, against: _Against) -> None:
        self._expected: Counter[tuple[int, int]] = Counter()
        for facts in first.layers:
            other = against.by_name.get(facts.name)
            if other is not None and _comparable(facts, other):
                self._expected[facts.leader, other.leader] += 1
        self._known: dict[tuple[int, int], SideComparison] = {}

    def get(self, facts: LayerFacts, other: LayerFacts) -> SideComparison | None:
        """The comparison of the two layers' A, if it was made."""
        return self._known.get((facts.leader, other.leader))

    def put(self, facts: LayerFacts, other: LayerFacts, found: SideComparison) -> None:
        """Keep it for the layers with the same two A that are to come."""
        holders = facts.leader, other.leader
        self._expected[holders] -= 1
        if self._expected[holders] > 0:
            self._known[holders] = found
        else:
            self._known.pop(holders, None)


def _mean_overlap(k: int, place: int, products: Sequence[MatrixComparison]) -> MeanOverlap:
    found = [each.overlaps[place].overlap for each in products]
    known = [each for each in found if each is not None]
    return MeanOverlap(k=k, overlap=math.fsum(known) / len(known) if known else None, layers=len(known))


def _total(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [each for each in found if each is not None]
    return math.fsum(known) if known and len(known) == len(found) else None


def _root_sum(values: Iterable[float | None]) -> float | None:
    found = _total(None if each is None else each * each for each in values)
    return None if found is None else math.sqrt(found)


def _differences(first: FactorSet, against: FactorSet) -> tuple[OptionDifference, ...]:
    found = [
        (each.name, getattr(first.collection, each.name), getattr(against.collection, each.name))
        for each in fields(first.collection)
    ]
    found += [(name, getattr(first, name), getattr(against, name)) for name in _COUNTS]
    return tuple(
        OptionDifference(option=name, first=canonical_json(one), against=canonical_json(two))
        for name, one, two in found
        if one != two
    )
