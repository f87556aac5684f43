"""A collection is a sum: its parts, in any order, on ranks or read back, finish to the factors of one pass."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from catalog.requests.woodbury import Woodbury
from engine.accumulation.layer_statistics import LayerStatistics
from engine.collect import collect_or_read, prepare_collection
from engine.collection.checkpoints import Checkpoints
from engine.collection.collection_state import CollectionState
from engine.collection.data_pass import run_pass
from engine.collection.normalise import finish_layer, flaw
from engine.collection.pass_statistics import begin_statistics
from engine.collection.probe import ProbedModel
from engine.collection.run_passes import complete_pass
from engine.distributed.group import join
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.kronecker_factors import Factors
from engine.factors.representation import Representation
from engine.memory.plan import Chosen
from engine.merging.merge import merge_factor_sets
from engine.merging.part_files import read_part
from engine.workspace import Workspace
from tests.divided import difference, stored
from tests.engine.distributed.rank_processes import run_ranks
from tests.machine.parts import ALL, chosen_part, first_of
from tests.oracles import MemoryArtifacts, workspace

EXAMPLES, BATCH = 16, 2
UNCHECKED = {"self_check": "off"}
ROUNDING = 1e-12
"""Relative to the factor's norm, of sums in float64 that are made in another order."""
CPU = torch.device("cpu")


class Net(nn.Module):
    """A table, groups, a norm, two layers of one input, a bare parameter, and a head that may be the table."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 6)
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.mix = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 60, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = self.norm(torch.tanh(self.q(x)) * self.k(x) + self.mix(x.mT).mT)
        return self.head(x.mean(1) * self.scale)


def job(*, tied: bool = False, woodbury: Mapping[str, Any] | None = None, **options: Any) -> Workspace:
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(1)
    ids, y = (torch.randint(0, 60, size, generator=drawn) for size in ((EXAMPLES, 3), (EXAMPLES,)))
    made = workspace(
        Net(tied=tied), [(ids, y)], "classification", dtype="float64", batch_size=BATCH, **UNCHECKED | options
    )
    made.inputs.examples = EXAMPLES
    made.options.woodbury = Woodbury(**woodbury or {"policy": "dense"})
    return made


ROWS = {"policy": "all", "softmax_head": False}
KINDS: dict[str, Callable[[], Workspace]] = {
    "sums": partial(job, fisher="mc", samples=2, batch_variance=True),
    "reduced sums": partial(job, fisher="empirical", sharing="reduce"),
    "no gradients": partial(job, fisher="forward_only"),
    "rows": partial(job, fisher="mc", woodbury=ROWS),
    "terms": partial(job, fisher="mc", woodbury={"policy": "auto"}),
    "tied sums": partial(job, fisher="empirical", tied=True),
    "tied terms": partial(job, fisher="mc", tied=True, woodbury={"policy": "auto"}),
    "diagonals": partial(job, fisher="mc"),
    "sketches": partial(job, fisher="mc"),
    "sketched terms": partial(job, fisher="mc", tied=True, woodbury={"policy": "auto"}),
}
"""One job for each kind of statistics that a layer has."""
SKETCHED = {
    "diagonals": Representation(kind="diagonal_sketch", why="", dtype=torch.float64),
    "sketches": Representation(kind="diagonal_sketch", why="", dtype=torch.float64, rank=4),
    "sketched terms": Representation(kind="diagonal_sketch", why="", dtype=torch.float64, rank=20, of_terms=True),
}
"""A form of the head's G that no plan of so small a job would choose."""
MERGED = [name for name in KINDS if "sketch" not in name and name != "diagonals"]
"""The same of pieces: a sketch that left something out is refused by the merge."""


class Summed:
    """The sums of one pass, and how to make empty ones of the same layers."""

    def __init__(self, name: str, probed: ProbedModel) -> None:
        if name in SKETCHED:
            kept = {**probed.probe.representations}
            kept[next(layer.name for layer in probed.survey.treated if layer.out_dim == 60)] = SKETCHED[name]
            probed = probed.with_probe(replace(probed.probe, representations=kept))
        self.probed, self.job = probed, probed.job
        self.state = CollectionState(statistics={}, factors={}, shared=dict(probed.probe.shared))
        self.state.chosen = Chosen(parts=(tuple(layer.name for layer in probed.survey.treated),))
        checkpoints = Checkpoints(workspace=self.job.workspace, model=self.job.model, conditions={})
        self.statistics, self.cursor = run_pass(probed, 0, self.state, checkpoints, None)

    def empty(self) -> tuple[LayerStatistics, ...]:
        layers = self.probed.survey.treated
        return begin_statistics(self.probed, layers, self.state, iter(()), None, None)  # type: ignore[arg-type]

    def finished(self, statistics: tuple[LayerStatistics, ...] | None = None) -> dict[str, Factors]:
        found: dict[str, Factors] = {}
        shared: dict[str, Any] = {}
        for each in statistics or self.statistics:
            each.end_pass_()
        for each in statistics or self.statistics:
            if flaw(each, self.job.collection) is None:
                made = finish_layer(each, self.job.collection, torch.float64, shared)
                found |= {factors.layer: factors for factors in made}
        return found


@contextmanager
def summed(name: str) -> Iterator[Summed]:
    with prepare_collection(KINDS[name]()) as (planned, _):
        yield Summed(name, planned.probed.for_passes(planned.plan.chosen, None))


def sides(factors: Factors) -> tuple[Tensor, Tensor]:
    G = factors.side_G
    alone = isinstance(G, DiagonalSketch) and G.rows is None
    return factors.widened_A, G.diagonal() if alone else G.widened()


def exact(found: Mapping[str, Factors], truth: Mapping[str, Factors]) -> None:
    assert found.keys() == truth.keys()
    for name, factors in found.items():
        for own, other in zip(sides(factors), sides(truth[name]), strict=True):
            assert torch.equal(own, other), name


def near(found: Mapping[str, Factors], truth: Mapping[str, Factors]) -> None:
    assert found.keys() == truth.keys()
    for name, factors in found.items():
        errors = [difference(*pair) for pair in zip(sides(factors), sides(truth[name]), strict=True)]
        assert max(errors) <= ROUNDING, (name, errors)


def numbers(statistics: LayerStatistics) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in statistics.state().items()}


def test_the_jobs_have_every_kind_of_statistics() -> None:
    kinds: set[tuple[str, str]] = set()
    for name in KINDS:
        with summed(name) as each:
            for own in each.statistics:
                rows = None if own.gradient_rows is None else type(own.gradient_rows).__name__
                kinds.add((type(own).__name__, rows or own.layer.form))
                if name == "rows" and own.layer.name == "q":
                    assert own.gradient_rows is not None
                    assert own.gradient_rows.triangle is not None
    assert kinds >= {
        *(("LayerStatistics", form) for form in ("kronecker", "diagonal", "block", "diagonal_block")),
        *(("LayerStatistics", rows) for rows in ("GradientRows", "ProbabilityRows", "SketchRows")),
        *(("TiedHeadStatistics", rows) for rows in ("kronecker", "ProbabilityRows", "SketchRows")),
    }


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("name", KINDS)
def test_a_state_comes_back_in_every_bit(name: str) -> None:
    with summed(name) as each:
        later = each.empty()
        for own, other in zip(each.statistics, later, strict=True):
            plain = json.loads(json.dumps(own.plain(), allow_nan=False))
            tensors = {entry: value for entry, value in numbers(own).items() if isinstance(value, Tensor)}
            other.put_plain(plain)
            for entry, tensor in tensors.items():
                other.put(entry, tensor, CPU)
            back = other.state()
            assert back.keys() == own.state().keys()
            for entry, value in own.state().items():
                same = torch.equal(back[entry], value) if isinstance(value, Tensor) else back[entry] == value
                assert same, (own.layer.name, entry)
        exact(each.finished(later), each.finished())


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("name", KINDS)
def test_decay_leaves_the_factors_of_what_has_entered(name: str) -> None:
    # a power of two in every sum, and in the root that rows are weighed by: nothing is rounded
    with summed(name) as each, summed(name) as other:
        for own in other.statistics:
            own.decay_(0.25)
        exact(other.finished(), each.finished())
        for own, before in zip(other.statistics, each.statistics, strict=True):
            assert (own.total_A, own.total_G) == ((before.total_A or 0) / 4, (before.total_G or 0) / 4)
            assert own.exact_traces == before.exact_traces
            assert own.variance_A.variances == before.variance_A.variances


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("name", KINDS)
def test_decays_multiply(name: str) -> None:
    with summed(name) as once, summed(name) as twice:
        for one, other in zip(once.statistics, twice.statistics, strict=True):
            one.decay_(0.25**3)
            for past in (0.25, 0.25**2):
                other.decay_(past)
            for (entry, value), again in zip(one.state().items(), other.state().values(), strict=True):
                same = torch.equal(value, again) if isinstance(value, Tensor) else value == again
                assert same, (one.layer.name, entry)


@cache
def whole(name: str) -> dict[str, Factors]:
    found = collect_or_read(KINDS[name]())
    return {facts.name: found.load(facts.ordinal) for facts in found.layers}


@cache
def pieces(name: str, cuts: tuple[int, ...]) -> tuple[MemoryArtifacts, ...]:
    bounds = itertools.pairwise((0, *cuts, EXAMPLES))
    return tuple(stored(KINDS[name], begin, end) for begin, end in bounds)


CUTS = st.sets(st.integers(1, EXAMPLES // BATCH - 1), min_size=1, max_size=3).map(
    lambda marks: tuple(BATCH * mark for mark in sorted(marks))
)


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("name", MERGED)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_pieces_in_any_order_are_one_pass(name: str, data: st.DataObject) -> None:
    kept = pieces(name, data.draw(CUTS))
    order = data.draw(st.permutations(range(len(kept))))
    found = merge_factor_sets([read_part(kept[place]) for place in order])
    near({facts.name: found.load(facts.ordinal) for facts in found.layers}, whole(name))


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("name", MERGED)
def test_the_counts_of_a_merge_are_the_sums_of_its_parts(name: str) -> None:
    kept = [read_part(each) for each in pieces(name, (4, 6, 12))]
    together = merge_factor_sets(kept)
    for facts in together.layers:
        alone = [each.layers[facts.ordinal].sums for each in kept]
        for entry in ("weight_A", "weight_G", "rows_A", "rows_G", "gradients", "examples"):
            every = [getattr(sums, entry) for sums in alone]
            assert getattr(facts.sums, entry) == sum(every), (facts.name, entry)


def on_a_rank(rank: int, size: int, name: str) -> dict[str, tuple[Tensor, Tensor]]:
    made = KINDS[name]()
    batches = made.inputs.batches
    assert batches is not None
    ((ids, y),) = batches()
    own = [(ids[start : start + BATCH], y[start : start + BATCH]) for start in range(0, EXAMPLES, BATCH)][rank::size]
    made.inputs.batches, made.inputs.examples = lambda: iter(own), BATCH * len(own)
    made.machine.ranks = join(CPU)
    with prepare_collection(made) as (planned, _):
        found = Summed(name, planned.probed.for_passes(planned.plan.chosen, None))
        complete_pass(found.job, found.state, found.statistics, found.cursor, alone=False)
        return {layer: sides(factors) for layer, factors in found.finished().items()}


def all_on_a_rank(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    return {name: on_a_rank(rank, size, name) for name in names}


def test_ranks_finish_to_one_pass(request: pytest.FixtureRequest) -> None:
    part = chosen_part(request.config)
    # a landing takes every third kind
    names = [*KINDS] if part == ALL else [*KINDS][first_of(part, 3) :: 3]
    found = run_ranks(3, all_on_a_rank, 3, names)
    for each in found:
        if isinstance(each, Exception):
            raise each
    for name in names:
        if name == "sketches":
            # another order of rows is another sketch; its diagonal is exact
            continue
        with summed(name) as alone:
            truth = alone.finished()
            for each in found:
                assert each[name].keys() == truth.keys()
                for layer, pair in each[name].items():
                    errors = [difference(*both) for both in zip(pair, sides(truth[layer]), strict=True)]
                    assert max(errors) <= ROUNDING, (name, layer, errors)
