"""A head too wide for its G and for its rows: exact diagonal and trace, and a sketch with its bound where allowed."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.capacity import CapacityParams
from catalog.analyses.reconstruction import ReconstructionParams
from catalog.requests.woodbury import Woodbury
from engine.accumulation.gradient_rows import GradientRows, ProbabilityRows, RowStorage, Terms
from engine.accumulation.sketched_rows import SketchRows
from engine.analyses.capacity import Capacity
from engine.analyses.reconstruction import Reconstruction
from engine.collect import collect_or_read
from engine.errors import BeyondSolvers, BrokenFactors, BudgetExceeded, NotConverged
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.factor_files import read_factors
from engine.linalg import eigensolvers
from engine.measurement import decompose_layer
from engine.memory.budget import MemoryBudget
from engine.memory.plan import Chosen
from engine.planning import choose_plan, decomposition_memory
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, workspace

T, V = 150, 60
EYE = torch.eye(V, dtype=torch.float64)


def sketched(rank: int, *, of_terms: bool, seed: int = 0, pieces: int = 37, past: float = 1.0) -> tuple[Any, Tensor]:
    """What is kept of rows that come in pieces, and the dense sum."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(T, V, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, V, dtype=torch.float64)
    kept = SketchRows.sketching(1, V, rank, torch.float64, torch.device("cpu"), of_terms=of_terms)
    weights = torch.ones(T, dtype=torch.float64)
    for place in torch.arange(T).split(pieces):
        kept.decay_(past)
        weights[: int(place[0])] *= past
        if of_terms:
            logits = 4 * rows[place][:, None]
            here = torch.arange(len(place))
            kept.add_terms_(
                logits, Terms(here, torch.zeros_like(here), torch.ones(len(place), dtype=torch.float64), None)
            )
            kept.add_(rows[place])
        else:
            kept.add_(rows[place])
    p = torch.softmax(4 * rows, -1) if of_terms else rows
    gram = p.T @ (weights[:, None] * p)
    dense = torch.diag(p.T @ weights) - gram if of_terms else gram
    (side,) = kept.finished(float(T))
    return side, dense / T


@pytest.mark.part(of=32, by=("of_terms",))
@pytest.mark.parametrize("of_terms", [False, True])
@pytest.mark.parametrize("rank", [3, 12, 40])
@pytest.mark.parametrize("past", [1.0, 0.8])
def test_the_sketch_is_within_its_bound(rank: int, past: float, *, of_terms: bool) -> None:
    side, matrix = sketched(rank, of_terms=of_terms, past=past)
    dense = side.to_dense(torch.float64)
    missed = torch.linalg.eigvalsh(dense - matrix)
    assert 0 < float(missed.abs().max()) <= side.bound
    # what the method promises: each of the rank + 1 largest directions has lost as much
    total = float((matrix.diagonal() if not of_terms else 1 - matrix.diagonal()).sum())
    assert side.bound <= 1.01 * total / (rank + 1)
    assert float(torch.linalg.eigvalsh(dense)[0]) >= -1e-15
    assert torch.allclose(side.diagonal(), matrix.diagonal(), rtol=1e-12, atol=0)
    assert side.trace() == pytest.approx(float(matrix.trace()), rel=1e-12)
    assert side.approximate
    assert side.complete


@pytest.mark.parametrize("of_terms", [False, True])
def test_every_number_is_that_of_the_sketch(*, of_terms: bool) -> None:
    side, _ = sketched(12, of_terms=of_terms)
    dense = side.to_dense(torch.float64)
    assert side.frobenius_norm() == pytest.approx(float(dense.norm()), rel=1e-11)
    assert side.spectral_norm() == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-11)
    right = torch.randn(V, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert torch.allclose(side.apply(right), dense @ right)
    shifts = torch.tensor([1e-6, 1e-2], dtype=torch.float64)
    for place, shift in enumerate(shifts):
        assert torch.allclose(side.solve(right, float(shift)), torch.linalg.solve(dense + shift * EYE, right))
        assert float(side.logdets(shifts)[place]) == pytest.approx(float(torch.logdet(dense + shift * EYE)), rel=1e-10)
        own = torch.linalg.solve(dense + shift * EYE, dense).trace()
        assert float(side.effective_dimensions(shifts)[place]) == pytest.approx(float(own), rel=1e-9)
    again = DiagonalSketch.read(side.tensors(), side.metadata())
    assert again.digest() == side.digest()
    assert (again.bound, again.subtracts) == (side.bound, of_terms)
    with pytest.raises(BrokenFactors, match="does not go with"):
        DiagonalSketch.read({**side.tensors(), "sketch": right}, side.metadata())


@pytest.mark.parametrize("of_terms", [False, True])
def test_many_shifts_are_answered_from_few_factorisations(*, of_terms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    side, _ = sketched(12, of_terms=of_terms)
    values = torch.linalg.eigvalsh(side.to_dense(torch.float64)).clamp_min(0)
    shifts = torch.logspace(-14, 12, 3000, dtype=torch.float64)
    factorised = DiagonalSketch._factorised
    asked = []

    def counted(self: DiagonalSketch, shift: float) -> Tensor:
        asked.append(shift)
        return factorised(self, shift)

    monkeypatch.setattr(DiagonalSketch, "_factorised", counted)
    dimensions, logdets = side.effective_dimensions(shifts), side.logdets(shifts)
    assert len(asked) < 450
    wanted = (values / (values + shifts[:, None])).sum(1)
    assert torch.allclose(dimensions, wanted, rtol=1e-9, atol=0)
    assert torch.allclose(logdets, (values + shifts[:, None]).log().sum(1), rtol=1e-9, atol=1e-7)


@pytest.mark.part(of=32, by=("of_terms",))
@pytest.mark.parametrize("of_terms", [False, True])
@pytest.mark.parametrize("rank", [3, 12, 40])
def test_its_eigenvalues_are_counted_and_those_of_g_lie_within_the_bounds(rank: int, *, of_terms: bool) -> None:
    side, matrix = sketched(rank, of_terms=of_terms)
    kept, true = (torch.linalg.eigvalsh(each) for each in (side.to_dense(torch.float64), matrix))
    found = side.counted(10.0)
    assert found is not None
    slack = 1e-13 * float(kept[-1])
    for values in (kept, true):
        assert bool((found.lower <= values + slack).all())
        assert bool((found.upper >= values - slack).all())
    assert float((found.values - kept).abs().max()) <= 1e-3 * float(kept[-1])
    assert float(found.values[-1]) == pytest.approx(float(kept[-1]), rel=1e-12)
    assert found.below_floor == int((kept < kept[-1] / 10).sum())
    middles = (kept[1:] + kept[:-1]) / 2
    assert [side.count_below(float(x)) for x in middles[::7]] == list(range(1, V, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_covers_what_is_rounded(dtype: torch.dtype) -> None:
    """Rows of a space no wider than the sketch: nothing is ever lowered, and a thousand times rounded."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((12_000, 8), (8, V)))
    rows = (left @ right).to(dtype)
    kept = SketchRows.sketching(1, V, 12, dtype, torch.device("cpu"), of_terms=False)
    kept.add_(rows)
    (side,) = kept.finished(float(len(rows)))
    matrix = rows.to(torch.float64).T @ rows.to(torch.float64) / len(rows)
    missed = torch.linalg.eigvalsh(side.to_dense(torch.float64) - matrix)
    assert side.bound is not None
    assert float(missed.abs().max()) <= side.bound <= 1e4 * torch.finfo(dtype).eps * float(matrix.norm())


@pytest.mark.part(of=16, by=("kind",))
@pytest.mark.parametrize("kind", [ProbabilityRows, SketchRows])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_of_narrow_logits_are_not_narrow(dtype: torch.dtype, kind: type[GradientRows]) -> None:
    logits = (4 * torch.randn(T, V, generator=torch.Generator().manual_seed(0))).to(dtype)
    here = torch.arange(T)
    terms = Terms(here, torch.zeros_like(here), torch.ones(T, dtype=torch.float64), None)
    device = torch.device("cpu")
    kept: Any = (
        SketchRows.sketching(1, V, 12, torch.float32, device, of_terms=True)
        if kind is SketchRows
        else ProbabilityRows.empty(
            1, V, RowStorage(capacity=T, dtype=torch.float32, working=torch.float32, arrive=device, stand=device)
        )
    )
    traces = kept.add_terms_(logits[:, None], terms)
    p = torch.softmax(logits.to(torch.float64), -1)
    spread = p * (1 - p)
    assert torch.allclose(traces, spread.sum(1), rtol=1e-5, atol=0)
    (side,) = kept.finished(float(T))
    assert torch.allclose(side.diagonal(), spread.mean(0), rtol=1e-5, atol=0)


def test_few_rows_are_kept_exactly() -> None:
    kept = SketchRows.sketching(1, V, 12, torch.float64, torch.device("cpu"), of_terms=False)
    rows = torch.randn(12, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept.add_(rows)
    (side,) = kept.finished(1.0)
    assert side.bound == 0
    assert not side.approximate
    assert torch.allclose(side.to_dense(torch.float64), rows.T @ rows)


def test_without_a_sketch_nothing_else_is_answered() -> None:
    side, matrix = sketched(0, of_terms=True)
    assert torch.allclose(side.diagonal(), matrix.diagonal(), rtol=1e-12, atol=0)
    assert not side.complete
    assert side.spectrum("head") is None
    for ask in (side.frobenius_norm, side.spectral_norm, lambda: side.solve(EYE, 1.0), lambda: side.eigenbasis("head")):
        with pytest.raises(NotConverged, match=r"woodbury\.approximate"):
            ask()


class Net(nn.Module):
    """A head of many classes."""

    def __init__(self, classes: int = 700) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.head = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


def space(*, approximate: bool, fisher: str = "mc", chosen: Chosen | None = None, classes: int = 700) -> Workspace:
    """More terms than 0.414 of the classes, and no room for G."""
    generator = torch.Generator().manual_seed(1)
    chunks = [(torch.randn(400, 5, generator=generator), torch.randint(0, classes, (400,), generator=generator))]
    made = workspace(Net(classes), chunks, "classification", fisher=fisher, dtype="float32", batch_size=40)
    made.inputs.examples, made.options.kinds = 400, ("capacity",)
    made.options.woodbury = Woodbury(approximate=approximate, sketch_rank=20)
    made.resume.chosen = chosen
    return made


FORCED = Chosen(parts=(("first", "head"),), sketched=("head",))
"""A sketch costs a buffer that only a wider head is larger than."""


def tight(monkeypatch: pytest.MonkeyPatch) -> MemoryBudget:
    """What everything takes but G."""
    from engine.memory.plan import LIBRARY_BYTES  # noqa: PLC0415
    from engine.planning import job_plan  # noqa: PLC0415

    monkeypatch.setattr(job_plan, "resident_bytes", lambda: 0)
    return MemoryBudget(device_bytes=0, host_bytes=LIBRARY_BYTES + 5 * 2**20)


@pytest.mark.part(of=32, by=("approximate",))
@pytest.mark.parametrize("fisher", ["mc", "empirical"])
@pytest.mark.parametrize("approximate", [False, True])
def test_a_head_that_does_not_fit_keeps_its_diagonal(
    fisher: str, monkeypatch: pytest.MonkeyPatch, *, approximate: bool
) -> None:
    whole = space(approximate=False, fisher=fisher)
    # the probabilities of all terms give the mean over labels, which their sketch is near
    whole.options.woodbury = Woodbury(policy="all" if fisher == "mc" else "dense")
    dense = collect_or_read(whole).load(1).widened_G
    made = space(approximate=approximate, fisher=fisher, chosen=FORCED if approximate else None)
    if not approximate:
        made.machine.budget = tight(monkeypatch)
    plans: list[Any] = []
    made.ports.announce_plan = plans.append
    rows = {row.layer: row for row in Capacity(CapacityParams(), made).rows()}
    record, metrics = rows["head"].record, rows["head"].metrics
    assert record.branch == "diagonal_sketch"
    assert ("a sketch of rank 20" if approximate else "`woodbury.approximate` is off") in record.why
    side = collect_or_read(made).load(1).G
    assert isinstance(side, DiagonalSketch)
    assert torch.allclose(side.diagonal(), dense.diagonal().double(), rtol=1e-4)
    assert metrics.trace_G == pytest.approx(float(dense.trace()), rel=1e-5)
    assert (metrics.rank is None) == (not approximate)
    if approximate:
        assert side.bound is not None
        missed = torch.linalg.eigvalsh(side.to_dense(torch.float64) - dense.double())
        assert float(missed.abs().max()) <= side.bound + 1e-7
        assert metrics.approximate
        assert record.sketch_bound == side.bound
        assert record.gradient_rows == 20
        assert metrics.effective_dimension > 0
    else:
        assert "only its diagonal" in metrics.no_spectrum
        assert record.sketch_bound is None
        assert (metrics.frobenius_norm, metrics.effective_dimension, metrics.spectral_norm) == (None, None, None)
    # a later attempt does the same, whatever is free
    again = space(approximate=approximate, fisher=fisher, chosen=Chosen.read(plans[0]))
    assert collect_or_read(again).load(1).G.digest() == side.digest()


@pytest.mark.part(of=16, by=("approximate",))
@pytest.mark.parametrize("metrics", [None, ("frobenius_norm", "participation_ratio")])
@pytest.mark.parametrize("approximate", [False, True])
def test_what_is_of_a_sketch_is_labelled_layer_and_model(metrics: tuple[str, ...] | None, *, approximate: bool) -> None:
    params = CapacityParams(metrics=metrics)
    made = space(approximate=approximate, chosen=FORCED if approximate else None)
    if not approximate:
        made.options.woodbury = Woodbury(policy="all")
    made.options.decomposition = params.decomposition
    rows, summary = finished(Capacity(params, made).rows())
    assert {name: row.metrics.approximate for name, row in rows.items()} == {"head": approximate, "first": False}
    assert summary.model.approximate == (("head",) if approximate else ())
    assert summary.model.frobenius_norm is not None


def finished(rows: Any) -> tuple[dict[str, Any], Any]:
    found = {}
    while True:
        try:
            row = next(rows)
        except StopIteration as end:
            return found, end.value
        found[row.layer] = row


class Shelf(MemoryArtifacts):
    """A cache that has nothing, and notes what it is given to keep."""

    kept = False

    def find(self) -> None:
        return None

    def shelf(self) -> MemoryArtifacts:
        return self

    def keep(self) -> None:
        self.kept = True

    def close(self) -> None:
        pass


@pytest.mark.parametrize("fits", [True, False])
def test_a_diagonal_for_want_of_memory_is_not_shared_with_other_jobs(
    monkeypatch: pytest.MonkeyPatch, *, fits: bool
) -> None:
    made, cache = space(approximate=False), Shelf()
    made.ports.cache = cache
    if not fits:
        made.machine.budget = tight(monkeypatch)
    rows = {row.layer: row for row in Capacity(CapacityParams(), made).rows()}
    assert (rows["head"].record.branch == "diagonal_sketch") == (not fits)
    assert cache.kept == fits
    assert bool(cache.tensors) == fits


def test_stored_sketches_read_back() -> None:
    made = space(approximate=True, chosen=FORCED)
    made.options.keep, artifacts = ("factors",), MemoryArtifacts()
    made.ports.artifacts = artifacts
    assert [row.layer for row in Capacity(CapacityParams(), made).rows()] == ["head", "first"]
    stored = read_factors(artifacts).load(1).G
    assert stored.digest() == collect_or_read(made).load(1).G.digest()


@pytest.mark.part(of=2, by=())
@pytest.mark.parametrize("approximate", [False, True])
def test_a_refusal_names_the_budget_for_the_least_that_the_job_may_keep(
    monkeypatch: pytest.MonkeyPatch, *, approximate: bool
) -> None:
    from engine import estimate  # noqa: PLC0415
    from engine.planning import job_plan  # noqa: PLC0415

    for module in (job_plan, estimate):
        monkeypatch.setattr(module, "resident_bytes", lambda: 0)

    def job(host_bytes: int, classes: int = 2000) -> Workspace:
        made = space(approximate=approximate, classes=classes)
        made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=host_bytes)
        return made

    with pytest.raises(BudgetExceeded) as refused:
        collect_or_read(job(2**20))
    named = re.search(r"`memory.host` to (\d+)MiB, the smallest that would do \(with (.+?)\)", str(refused.value))
    assert named is not None
    part = "a sketch of rank 20" if approximate else "the trace alone"
    assert named[2] == f"the diagonal and {part} of the G of `head`"
    least = int(named[1]) * 2**20
    assert collect_or_read(job(least)).load(1).G.kind == "diagonal_sketch"
    with pytest.raises(BudgetExceeded):
        collect_or_read(job(least - 2**20))
    # a plan from shapes alone says the same
    planned = estimate.estimate(job(2**20))
    assert (planned["smallest_budget"]["host_bytes"], planned["smallest_budget_keeps"]["host"]) == (least, named[2])
    taken = estimate.estimate(job(least))
    assert (taken["fits"], taken["sketched"]) == (True, ("head",))
    # where all of G takes no more, nothing is given up
    assert estimate.estimate(job(2**20, classes=10))["smallest_budget_keeps"]["host"] is None


def drained(rows: Any) -> tuple[list[Any], Any]:
    found = []
    while True:
        try:
            found.append(next(rows))
        except StopIteration as end:
            return found, end.value


@pytest.mark.part(of=2, by=())
@pytest.mark.parametrize("approximate", [False, True])
def test_a_head_beyond_the_eigensolvers_is_never_a_dense_matrix_whatever_the_memory(
    monkeypatch: pytest.MonkeyPatch, *, approximate: bool
) -> None:
    for module in (choose_plan, decomposition_memory, decompose_layer):
        monkeypatch.setattr(module, "LARGEST", 600)
    made = space(approximate=approximate)
    plans: list[Any] = []
    made.ports.announce_plan = plans.append
    rows, summary = drained(Capacity(CapacityParams(), made).rows())
    metrics, record = next((row.metrics, row.record) for row in rows if row.layer == "head")
    # 400 terms of 700 classes: more than rows are kept for, and fewer than a dense G would have rows
    assert record.branch == ("diagonal_sketch" if approximate else "softmax_head")
    assert plans[0]["sketched"] == (("head",) if approximate else ())
    for name in ("rank", "effective_rank", "quantiles", "density", "decay", "top_eigenvalues", "kappa_clipped"):
        assert getattr(metrics, name) is not None, name
    for name in ("rank", "effective_rank", "quantiles", "density", "decay", "top_eigenvalues"):
        assert getattr(summary.model, name) is not None, name
    assert metrics.approximate == approximate
    again = space(approximate=approximate, chosen=Chosen.read(plans[0]))
    assert collect_or_read(again).load(1).G.digest() == collect_or_read(made).load(1).G.digest()


def test_a_dense_factor_beyond_the_eigensolvers_ends_no_job_and_is_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choose_plan, decomposition_memory, decompose_layer):
        monkeypatch.setattr(module, "LARGEST", 600)
    made = space(approximate=False)
    made.options.kinds, made.options.decomposition = ("capacity", "reconstruction"), "vectors"
    made.options.woodbury = Woodbury(policy="dense", approximate=False)
    plans: list[Any] = []
    made.ports.announce_plan = plans.append
    rows, summary = drained(Capacity(CapacityParams(), made).rows())
    (metrics,) = [row.metrics for row in rows if row.layer == "head"]
    assert "so the eigenvalues of G of `head` (700 rows) stay unknown" in plans[0]["why"]
    assert "more than the" in metrics.no_spectrum
    assert (metrics.rank, metrics.quantiles) == (None, None)
    assert metrics.trace > 0
    assert metrics.frobenius_norm > 0
    assert summary.model.no_spectrum == ("head",)
    rebuilt = {row.layer: row.metrics for row in Reconstruction(ReconstructionParams(), made).rows()}
    assert rebuilt["head"].G.update == "not stabilised"
    assert rebuilt["head"].A.update != "not stabilised"


def test_the_plan_counts_what_a_sketch_takes_and_not_a_dense_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {}
    for largest in (600, 800):
        for module in (choose_plan, decomposition_memory, decompose_layer):
            monkeypatch.setattr(module, "LARGEST", largest)
        made = space(approximate=True)
        made.options.woodbury = Woodbury(sketch_rank=2)
        plans: list[Any] = []
        made.ports.announce_plan = plans.append
        collect_or_read(made)
        seconds[bool(plans[0]["sketched"])] = plans[0]["stages"]["collection"]["seconds"]
    assert seconds[True] < seconds[False]


def test_what_needs_eigenvectors_beyond_the_solvers_is_refused_before_anything_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose_plan, "LARGEST", 600)
    made = space(approximate=True)
    made.options.collection = dataclasses.replace(made.options.collection, ekfac=True)
    plans: list[Any] = []
    made.ports.announce_plan = plans.append
    with pytest.raises(BeyondSolvers, match="layer `head` has one of 700"):
        collect_or_read(made)
    assert plans == []


def test_smaller_sample_sizes_of_a_dense_factor_beyond_the_solvers_end_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choose_plan, decomposition_memory, decompose_layer):
        monkeypatch.setattr(module, "LARGEST", 600)
    made = space(approximate=False)
    made.options.woodbury = Woodbury(policy="dense", approximate=False)
    made.options.collection = dataclasses.replace(made.options.collection, nested=True)
    rows, _ = drained(Capacity(CapacityParams(), made).rows())
    (metrics,) = [row.metrics for row in rows if row.layer == "head"]
    assert len(metrics.nested) == 4
    assert metrics.nested[0].effective_rank is None
    assert metrics.nested[0].trace > 0


def rowed(*, approximate: bool, examples: int | None = 700, policy: str = "all") -> Workspace:
    """More gradient rows of a head of 700 classes than solvers would take."""
    generator = torch.Generator().manual_seed(1)
    chunks = [(torch.randn(700, 5, generator=generator), torch.randint(0, 700, (700,), generator=generator))]
    made = workspace(Net(700), chunks, "classification", fisher="empirical", dtype="float32", batch_size=100)
    made.inputs.examples, made.options.kinds = examples, ("capacity",)
    made.options.woodbury = Woodbury(policy=policy, approximate=approximate, sketch_rank=20)  # type: ignore[arg-type]
    return made


@pytest.mark.part(of=16, by=("policy",))
@pytest.mark.parametrize("policy", ["all", "hybrid"])
@pytest.mark.parametrize("examples", [700, None])
def test_rows_beyond_the_eigensolvers_are_sketched_by_the_plan(
    examples: int | None, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (choose_plan, decomposition_memory, decompose_layer, eigensolvers):
        monkeypatch.setattr(module, "LARGEST", 600)
    made = rowed(approximate=True, examples=examples, policy=policy)
    made.options.woodbury = dataclasses.replace(made.options.woodbury, hybrid_from=600)
    plans: list[Any] = []
    made.ports.announce_plan = plans.append
    rows, _ = drained(Capacity(CapacityParams(), made).rows())
    (record,) = [row.record for row in rows if row.layer == "head"]
    assert record.branch == "diagonal_sketch"
    assert plans[0]["sketched"] == ("head",)


@pytest.mark.parametrize("examples", [700, None])
def test_rows_beyond_the_eigensolvers_that_may_not_be_sketched_are_refused_before_a_batch(
    examples: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (choose_plan, decomposition_memory, decompose_layer, eigensolvers):
        monkeypatch.setattr(module, "LARGEST", 600)
    made = rowed(approximate=False, examples=examples)
    plans: list[Any] = []
    made.ports.announce_plan = plans.append
    said = "most 600 examples" if examples else "say how many examples they hold"
    with pytest.raises(BeyondSolvers, match=rf"`head`, which has 700 outputs.*approximate: true.*{said}") as refused:
        drained(Capacity(CapacityParams(), made).rows())
    assert (refused.value.layer, refused.value.pointer) == ("head", "/woodbury/policy")
    assert plans == []
    # what it says would fit does
    made = rowed(approximate=False)
    made.inputs.examples = 600
    collect_or_read(made)
