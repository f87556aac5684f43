"""Measured layers: what is decomposed, in which order, once for all analyses, and again after a kill."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog import ANALYSES
from catalog.analyses.analysis import most_decomposed
from catalog.analyses.capacity import CapacityParams
from catalog.analyses.reconstruction import ReconstructionParams
from catalog.requests.collection import Stabilisation
from engine.analyses.capacity import Capacity
from engine.analyses.factors import KeptFactors
from engine.collect import collect_or_read
from engine.factors.kronecker_factors import Factors
from engine.factors.low_rank import LowRank
from engine.linalg import eigensolvers
from engine.linalg.eigendecomposition import rungs
from engine.measurement import decompose_layer
from engine.measurement.layer_measurement import measure_layers
from engine.measurement.prefetch import ahead_bytes, stream_factors
from engine.memory.budget import MemoryBudget
from engine.memory.guard import Guard
from engine.workspace import Workspace
from tests.oracles import MemoryArtifacts, workspace
from worker.execution.resolve import resolve


class Attention(nn.Module):
    """Three layers of one input, a table, and a larger layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.query, self.key = nn.Linear(6, 5), nn.Linear(6, 5)
        self.last = nn.Linear(5, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        entered = self.table(tokens).mean(1)
        return self.last(torch.tanh(self.query(entered)) * self.key(entered))


def space(**options: Any) -> Workspace:
    torch.manual_seed(3)
    tokens, labels = torch.randint(0, 11, (30, 4)), torch.randint(0, 9, (30,))
    return workspace(Attention(), [(tokens, labels)], "classification", fisher="empirical", **options)


def solved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one for each decomposition."""
    taken: list[str] = []
    original = decompose_layer.decompose

    def counted(factor: Any, layer: str, **options: Any) -> Any:
        taken.append(layer)
        return original(factor, layer, **options)

    monkeypatch.setattr(decompose_layer, "decompose", counted)
    return taken


def test_the_most_that_any_analysis_asks_for() -> None:
    class Asks:
        def __init__(self, decomposition: str) -> None:
            self.decomposition = decomposition

    none, values, vectors = Asks("none"), Asks("values"), Asks("vectors")
    assert most_decomposed([none, none]) == "none"
    assert most_decomposed([none, values]) == "values"
    assert most_decomposed([vectors, none]) == "vectors"
    # without options, or without a word about it
    assert most_decomposed([None]) == "values"
    # the entry of the menu stands for an analysis without options
    assert most_decomposed([ANALYSES["factors"]]) == "none"
    assert most_decomposed([ANALYSES["factors"], values]) == "values"
    assert most_decomposed([CapacityParams()]) in ("none", "values")


@pytest.mark.part(of=16, by=("aside",))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("aside", [False, True])
def test_bases_give_the_factors_back_and_are_made_once(
    dtype: str, aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = space(dtype=dtype)
    made.options.decomposition = "vectors"
    made.ports.scratch = MemoryArtifacts() if aside else None
    calls = solved(monkeypatch)
    list(Capacity(CapacityParams(), made).rows())
    # A of the query is the key's too
    assert sorted(calls) == ["key", "last", "last", "query", "query", "table", "table"]
    layers = list(measure_layers(made))
    list(KeptFactors(None, made).rows())
    assert len(calls) == 7
    plain = {layer.facts.name: layer for layer in measure_layers(space(dtype=dtype))}
    tolerance = 1e-13 if dtype == "float64" else 3e-6
    for layer in layers:
        factors = collect_or_read(made).load(layer.facts.ordinal)
        for side, spectrum in (("A", layer.A.spectrum), ("G", layer.G.spectrum)):
            found, factor = layer.load_basis(side), getattr(factors, side)  # type: ignore[arg-type]
            assert spectrum is not None
            assert torch.equal(found.values, spectrum)
            assert torch.allclose(spectrum, getattr(plain[layer.facts.name], side).spectrum, rtol=1e-9, atol=1e-15)
            if factor.ndim == 1:
                assert found.vectors is None
                continue
            assert found.vectors is not None
            assert found.vectors.dtype == getattr(torch, dtype)
            vectors = found.vectors.double()
            again = (vectors * spectrum) @ vectors.T
            assert float((again - factor.double()).norm()) <= tolerance * float(factor.double().norm())
        assert layer.record.residual_G is not None
        assert layer.record.residual_G < 1e-14
        assert layer.record.precision == "float64"


def test_collecting_factors_alone_decomposes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = space()
    made.options.kinds, made.options.params, made.options.decomposition = (
        ("factors",),
        {"factors": None},
        most_decomposed([ANALYSES["factors"]]),
    )
    given = entering(monkeypatch)
    rows, summary = pulled(KeptFactors(None, made).rows())
    assert given == []
    assert summary.eigendecompositions == 0
    assert made.results.plan is not None
    assert not [term for term in made.results.plan.terms if term.stage == "decomposition" and term.layer is not None]
    for row in rows:
        # what does not need eigenvalues is there all the same
        assert row.metrics.trace_A > 0
        assert row.record.lambda_G is not None
        assert (row.record.kappa_G, row.record.clipped_G, row.record.rungs_G) == (None, None, None)


def pulled(rows: Any) -> tuple[list[Any], Any]:
    found = []
    while True:
        try:
            found.append(next(rows))
        except StopIteration as end:
            return found, end.value


def entering(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Grows by each matrix that a solver is given, whoever asks."""
    given: list[Tensor] = []

    def noted(solver: Any) -> Any:
        def solve(matrix: Any, *rest: Any, **options: Any) -> Any:
            given.append(torch.as_tensor(matrix).detach().to(torch.float64, copy=True))
            return solver(matrix, *rest, **options)

        return solve

    for name in ("eigh", "eigvalsh", "svd", "eig"):
        monkeypatch.setattr(torch.linalg, name, noted(getattr(torch.linalg, name)))
    for name in ("dsyevr", "dsyev", "ssyevr", "ssyev", "dpstrf"):
        monkeypatch.setattr(eigensolvers.lapack, name, noted(getattr(eigensolvers.lapack, name)))
    return given


@pytest.mark.parametrize("aside", [False, True])
def test_three_analyses_of_one_job_decompose_each_factor_once(aside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = space()
    # what comes out is looked at by a solver too, and is told from the factor that went in
    made.options.stabilisation = Stabilisation(kappa_max=1.5)
    asked = {"factors": None, "capacity": CapacityParams(), "reconstruction": ReconstructionParams()}
    made.options.kinds, made.options.params, made.options.decomposition = (
        tuple(asked),
        asked,
        most_decomposed(asked.values()),
    )
    made.ports.scratch = MemoryArtifacts() if aside else None
    given = entering(monkeypatch)
    for kind, options in asked.items():
        assert list(resolve(ANALYSES[kind].implementation)(options, made).rows())
    whole = collect_or_read(made)
    factors = {
        (facts.name, side): getattr(whole.load(facts.ordinal), side)
        for facts in whole.layers
        for side in ("A", "G")
        if side == "G" or facts.shared_A_with is None
    }
    times = {
        key: sum(each.shape == factor.shape and torch.allclose(each, factor.double(), rtol=1e-7) for each in given)
        for key, factor in factors.items()
        if factor.ndim == 2
    }
    assert times == dict.fromkeys(
        [("table", "G"), ("query", "A"), ("query", "G"), ("key", "G"), ("last", "A"), ("last", "G")], 1
    )


def test_another_attempt_finds_what_was_laid_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = MemoryArtifacts()

    def attempt(version: str) -> list[Any]:
        made = space()
        made.options.decomposition, made.ports.scratch, made.resume.conditions = (
            "vectors",
            scratch,
            {"version": version},
        )
        return [row.record for row in Capacity(CapacityParams(), made).rows()]

    first = attempt("1")
    calls = solved(monkeypatch)
    assert attempt("1") == first
    # a diagonal is sorted as fast as it is read
    assert set(calls) == {"table"}
    assert attempt("2") == first
    assert len(calls) == 1 + 7


def damage(tensors: dict[str, Any]) -> None:
    """One bit of every tensor, as a disk may turn it."""
    for each in tensors.values():
        each.view(torch.uint8).view(-1)[:1] ^= 1


def test_damaged_decompositions_are_computed_anew_and_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = MemoryArtifacts()

    def attempt() -> tuple[list[Any], Any]:
        made = space()
        made.options.decomposition, made.ports.scratch = "vectors", scratch
        layers = list(measure_layers(made))
        return [layer.record for layer in layers], lambda: next(
            each for each in layers if each.facts.name == "last"
        ).load_basis("G")

    first, _ = attempt()
    calls = solved(monkeypatch)
    for name in [name for name in scratch.tensors if name.endswith(".values.safetensors")]:
        damage(scratch.tensors[name])
    again, basis = attempt()
    assert again == first
    assert len(calls) == 7
    for name in [name for name in scratch.tensors if name.endswith(".vectors.safetensors")]:
        damage(scratch.tensors[name])
    with pytest.raises(OSError, match="damaged"):
        basis()  # the attempt is repeated, and finds no table of what is damaged
    assert attempt()[0] == first


def test_values_are_laid_aside_where_it_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = MemoryArtifacts()
    made = space()
    made.ports.scratch, made.resume.checkpoint_seconds = scratch, 1e6
    list(measure_layers(made))
    assert not any("bases" in name for name in scratch.tensors)
    monkeypatch.setattr(decompose_layer, "_WORTH_KEEPING", 6)
    again = space()
    again.ports.scratch, again.resume.checkpoint_seconds = scratch, 1e6
    list(measure_layers(again))
    assert any("values" in name for name in scratch.tensors)
    assert not any("vectors" in name for name in scratch.tensors)
    calls = solved(monkeypatch)
    third = space()
    third.ports.scratch, third.resume.checkpoint_seconds = scratch, 1e6
    rows = {layer.facts.name: layer.record for layer in measure_layers(third)}
    assert sorted(calls) == ["key", "query"]  # their G has five rows
    assert rows["last"].rungs_A is not None


def test_nothing_is_decomposed_where_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = {row.layer: row for row in KeptFactors(None, space()).rows()}
    made = space()
    made.options.decomposition = "none"

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("decomposed")

    for name in ("eigh", "eigvalsh"):
        monkeypatch.setattr(torch.linalg, name, never)
    monkeypatch.setattr(eigensolvers.lapack, "dpstrf", never)
    layers = {layer.facts.name: layer for layer in measure_layers(made)}
    for name, layer in layers.items():
        record, full = layer.record, truth[name].record
        assert (layer.A.spectrum, layer.G.spectrum) == (None, None)
        unknown = (
            "rungs_A", "rungs_G", "precision", "residual_A", "kappa_A", "kappa_G", "kappa_A_clipped", "kappa_G_clipped",
            "clipped_A", "clipped_G",
        )  # fmt: skip
        assert [getattr(record, field) for field in unknown] == [None] * len(unknown)
        # relative damping is that of the mean eigenvalue, which the trace knows
        assert record.lambda_A == pytest.approx(full.lambda_A, rel=1e-12)
        factors = collect_or_read(made).load(layer.facts.ordinal)
        norm = factors.A.norm() if factors.A.ndim == 1 else torch.linalg.matrix_norm(factors.A)
        assert layer.A.frobenius == pytest.approx(float(norm), rel=1e-13)
        rest = dict.fromkeys(unknown) | {"lambda_A": None, "lambda_G": None}
        # what is not decomposed is not planned for either
        rest |= {"lambda_A_relative": None, "lambda_G_relative": None, "planned_peak_bytes": None}
        assert replace(record, **rest) == replace(full, **rest)


def test_the_largest_layer_comes_first_and_sums_are_in_the_models_order() -> None:
    rows = [row for row in Capacity(CapacityParams(), space()).rows() if row.status != "declared"]
    assert [row.layer for row in rows] == ["last", "query", "key", "table"]
    assert [row.ordinal for row in rows] == [3, 1, 2, 0]


def load_counted(ordinal: int) -> Factors:
    loads.append(ordinal)
    came.set()
    return Factors(layer=str(ordinal), form="kronecker", bias=False, A=torch.eye(4), G=torch.eye(3))


loads: list[int] = []
came = threading.Event()


@pytest.mark.parametrize(("room", "ahead"), [(10**9, True), (ahead_bytes(5, 5, 4), False)])
def test_the_next_layer_comes_in_meanwhile_where_there_is_room(room: int, ahead: bool) -> None:
    class Tight(Guard):
        def free_bytes(self, place: Any) -> int:
            return self.budget.host_bytes

    guard = Tight(
        budget=MemoryBudget(device_bytes=room, host_bytes=room), device=torch.device("cpu"), log=lambda *_: None
    )
    facts = collect_or_read(space()).layers[1:]
    loads.clear()
    came.clear()
    stream = stream_factors(
        facts, load_counted, device=torch.device("cpu"), guard=guard, need="values", source="stored"
    )
    first = next(stream)
    assert first.factors.layer == str(facts[0].ordinal)
    if ahead:
        came.clear()
        assert loads[1:] == [facts[1].ordinal] or came.wait(60)
    assert loads == [each.ordinal for each in facts[: 2 if ahead else 1]]
    assert [each.factors.layer for each in stream] == [str(each.ordinal) for each in facts[1:]]
    assert len(loads) == len(facts)


def test_the_next_layer_waits_for_room_beside_the_dense_factor_of_a_wide_head() -> None:
    """A head of more classes than LAPACK counts to, kept as its rows: its A is decomposed all the same."""
    rows = LowRank(rows=torch.zeros(3, 50_000), scales=torch.ones(3, dtype=torch.float64), weight=1.0)
    head = Factors(layer="head", form="kronecker", bias=False, A=torch.eye(200), G=rows)
    known = collect_or_read(space()).layers[1]
    facts = [replace(known, in_dim=200, out_dim=50_000, rank_bound_G=3), replace(known, in_dim=4, out_dim=3)]
    needed = rungs(200, need="values", device=torch.device("cpu"))[0].host_bytes
    asked: list[int] = []

    class Asked(Guard):
        def fits(self, *, device_bytes: int = 0, host_bytes: int = 0) -> bool:
            asked.append(host_bytes)
            return False

    guard = Asked(budget=MemoryBudget.unlimited(), device=torch.device("cpu"), log=lambda *_: None)
    stream = stream_factors(
        facts, lambda _: head, device=torch.device("cpu"), guard=guard, need="values", source="stored"
    )
    assert len(list(stream)) == 2
    assert asked == [needed + ahead_bytes(4, 3, 4)]


def test_a_layer_that_cannot_be_read_fails_in_its_turn() -> None:
    facts = collect_or_read(space()).layers

    def broken(ordinal: int) -> Factors:
        if ordinal == facts[1].ordinal:
            raise FileNotFoundError("gone")
        return load_counted(ordinal)

    stream = stream_factors(
        facts, broken, device=torch.device("cpu"), guard=Guard.unlimited(), need="values", source="stored"
    )
    assert next(stream).factors.layer == "0"
    with pytest.raises(FileNotFoundError, match="gone"):
        next(stream)


def test_a_job_goes_down_a_rung_where_memory_is_short_and_says_so() -> None:
    """Whatever the rung, the same numbers to rounding; what did not fit stands outside of the digest."""

    def wide() -> Workspace:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 90), nn.Tanh(), nn.Linear(90, 4))
        data = torch.randn(200, 6), torch.randint(0, 4, (200,))
        made = workspace(model, [data], "classification", fisher="empirical", dtype="float32")
        made.options.decomposition = "vectors"
        return made

    truth = {layer.facts.name: layer for layer in measure_layers(wide())}
    made = wide()
    costs = {rung.name: rung.host_bytes for rung in rungs(91, need="vectors", device=torch.device("cpu"))}

    class Tight(Guard):
        def free_bytes(self, place: Any) -> int:
            return costs["host_in_place"]

    made.machine.guard = Tight(budget=MemoryBudget.unlimited(), device=torch.device("cpu"), log=lambda *_: None)
    layers = {layer.facts.name: layer for layer in measure_layers(made)}
    assert layers["0"].record.rungs_G == ("host_in_place",)
    assert layers["0"].record.rungs_A == ("host_float64",)
    assert [each.split(" needs ")[0] for each in layers["0"].observed.refused_rungs] == [
        "G: host_float64",
        "G: host_syevr",
    ]
    assert truth["0"].record.rungs_G == ("host_float64",)
    assert truth["0"].observed.refused_rungs == ()
    for name, layer in layers.items():
        for side in ("A", "G"):
            left, right = (getattr(each, side).spectrum for each in (layer, truth[name]))
            assert torch.allclose(left, right, rtol=1e-9, atol=1e-15)
        assert layer.record.digest_G == truth[name].record.digest_G
