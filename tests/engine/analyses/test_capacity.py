"""Every metric of a layer and of the model against the dense float64 outer product, and what is asked for it."""

import copy
import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from catalog.analyses.analysis import LayerResult
from catalog.analyses.capacity import DAMPING_GRID, CapacityParams, CapacitySummary
from catalog.analyses.capacity_metrics import METRICS, WITHOUT_DECOMPOSITION, CapacityMetrics, ModelCapacity
from catalog.record import FieldError, canonical_json
from catalog.requests.collection import Stabilisation
from catalog.requests.woodbury import Woodbury
from engine.analyses.capacity import Capacity
from engine.analyses.metrics.kronecker_metrics import SCALARS, Sides
from engine.analyses.metrics.layer_metrics import curve, ordered
from engine.analyses.metrics.model_metrics import ModelLayer, model_metrics
from engine.collect import collect_or_read
from engine.factors import softmax_fisher
from engine.factors.low_rank import LowRank
from engine.linalg.damping import damping
from engine.linalg.kronecker_quantiles import quantile_rank
from engine.workspace import Workspace
from tests.oracles import workspace

PARAMS = CapacityParams(top_k=7, density_bins=9, damping_grid=(1e-9, 1e-3, 1.0))


def sides(a: Tensor, g: Tensor, options: Stabilisation | None = None) -> Sides:
    return Sides(
        in_dim=a.numel(),
        out_dim=g.numel(),
        spectrum_A=a,
        spectrum_G=g,
        trace_A=float(a.sum()),
        trace_G=float(g.sum()),
        frobenius_A=float(a.norm()),
        frobenius_G=float(g.norm()),
        damping=damping(float(a.mean()), float(g.mean()), options or Stabilisation(), block=False),
        tolerance=1e-12,
    )


def ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 and above / below < math.inf else None


def oracle(a: Tensor, g: Tensor, side: Sides) -> dict[str, float | None]:
    """Every scalar metric from all products, and from nothing else but λ."""
    f = torch.outer(g, a).flatten().sort().values
    trace, square, top = float(f.sum()), float(f.square().sum()), float(f[-1])
    share = f[f > 0] / trace
    joint, damped_a, damped_g = side.damping.joint, side.damping.A, side.damping.G
    rank = int((f > 1e-12 * top).sum())
    found: dict[str, float | None] = {
        "trace": trace,
        "frobenius_norm": math.sqrt(square),
        "spectral_norm": top,
        "stable_rank": square / top**2 if top else None,
        "participation_ratio": trace**2 / square if top else None,
        "effective_rank": math.exp(-float((share * share.log()).sum())) if top else None,
        "rank": rank,
        "logdet": float(f.log().sum()) if all(float(own[0]) > 1e-12 * float(own[-1]) for own in (a, g)) else None,
        "kappa": ratio(top, float(f[0])),
    }
    if joint is not None and damped_a is not None and damped_g is not None:
        factored = torch.outer(g + damped_g, a + damped_a).flatten()
        found |= {
            "logdet_damped": math.fsum((f + joint).log().tolist()),
            "logdet_factored": math.fsum(factored.log().tolist()),
            "effective_dimension": math.fsum((f / (f + joint)).tolist()),
            "effective_dimension_factored": math.fsum((torch.outer(g, a).flatten() / factored).tolist()),
            "kappa_damped": (top + joint) / (float(f[0]) + joint),
            "kappa_factored": float(factored.max() / factored.min()),
        }
    return found


# squares and products stay in range, so that the oracle itself is exact
VALUES = st.one_of(st.sampled_from([0.0, 1.0, 1.0, 2.0]), st.floats(1e-8, 1e3))
SPECTRA = st.lists(VALUES, min_size=1, max_size=30).map(lambda each: torch.tensor(each).double().sort().values)


@given(SPECTRA, SPECTRA, st.floats(1e-8, 10.0))
@settings(max_examples=80, deadline=None)
def test_every_scalar_is_that_of_the_dense_product(a: Tensor, g: Tensor, relative: float) -> None:
    side = sides(a, g, Stabilisation(damping=relative))
    truth = oracle(a, g, side)
    for name, measure in SCALARS.items():
        if name in ("trace_A", "trace_G", "effective_rank_A", "effective_rank_G"):
            continue
        expected = truth.get(name)
        scale = a.numel() * g.numel() if name.startswith("logdet") else 0
        found = measure(side)
        assert found == (None if expected is None else pytest.approx(expected, rel=1e-10, abs=1e-11 * scale)), name


def test_a_log_determinant_is_as_well_defined_as_its_factors() -> None:
    # each factor's condition is far from float32's 1/ε, their product's beyond it
    a, g = (10 ** torch.linspace(-4.5, 0, size, dtype=torch.float64) for size in (30, 20))
    single = replace(sides(a, g), tolerance=30 * torch.finfo(torch.float32).eps)
    f = torch.outer(a, g).flatten()
    assert float(f.min() / f.max()) < 1e-8
    assert SCALARS["logdet"](single) == pytest.approx(float(f.log().sum()), rel=1e-12)
    # an eigenvalue of the size of a factor's rounding says nothing
    assert SCALARS["logdet"](replace(single, spectrum_A=torch.cat([a[:1] * 1e-3, a[1:]]))) is None


def spectrum(size: int, decades: float, seed: int, zeros: int = 0) -> Tensor:
    drawn = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.zeros(zeros, dtype=torch.float64), (10 ** (-decades * drawn)).sort().values])


LAYERS = {
    "wide": (spectrum(40, 6, 0), spectrum(25, 3, 1)),
    "singular": (spectrum(30, 4, 2, zeros=7), spectrum(17, 2, 3)),
    "block": (torch.ones(1, dtype=torch.float64), spectrum(60, 5, 4)),
    "flat": (torch.zeros(5, dtype=torch.float64), spectrum(6, 1, 5)),
}


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("name", LAYERS)
def test_the_ordered_metrics_are_those_of_the_sorted_product(name: str) -> None:
    a, g = LAYERS[name]
    side = sides(a, g)
    f = torch.outer(a, g).flatten().sort().values
    products = side.products()
    assert products is not None
    found = ordered(products, PARAMS, int((f > 0).sum()))
    assert [each.value for each in found["quantiles"]] == [
        float(f[quantile_rank(level, f.numel()) - 1]) for level in PARAMS.quantile_levels
    ]
    assert found["top_eigenvalues"] == tuple(f.flip(0)[:7].tolist())
    if float(f[-1]) == 0:
        assert "density" not in found
    else:
        assert sum(found["density"].counts) + found["density"].below == f.numel()
        assert found["density"].edges[0] == pytest.approx(1e-16 * float(f[-1]))
    over = curve(side, PARAMS)
    assert over is not None
    for value, effective in zip(over.damping, over.effective_dimension, strict=True):
        assert effective == pytest.approx(float((f / (f + value)).sum()), rel=1e-12)


def model_of(names: list[str], params: CapacityParams = PARAMS) -> tuple[ModelCapacity, Tensor, list[Sides]]:
    each = [sides(*LAYERS[name]) for name in names]
    kept = [
        ModelLayer(name=name, sides=side, spectral_norm=side.spectral_norm, curve=curve(side, params))
        for name, side in zip(names, each, strict=True)
    ]
    f = torch.cat([torch.outer(*LAYERS[name]).flatten() for name in names]).sort().values
    return model_metrics(kept, params), f, each


@pytest.mark.parametrize("names", [["wide", "block"], list(LAYERS)])
def test_the_model_is_one_block_diagonal_matrix(names: list[str]) -> None:
    found, f, each = model_of(names)
    trace, square, top = float(f.sum()), float(f.square().sum()), float(f[-1])
    share = f[f > 0] / trace
    assert found.frobenius_norm == pytest.approx(math.sqrt(square), rel=1e-12)
    assert found.spectral_norm == top
    assert found.stable_rank == pytest.approx(square / top**2, rel=1e-12)
    assert found.participation_ratio == pytest.approx(trace**2 / square, rel=1e-12)
    assert found.rank == int((f > 1e-12 * top).sum())
    assert found.quantiles is not None
    assert [one.value for one in found.quantiles] == [
        float(f[quantile_rank(level, f.numel()) - 1]) for level in PARAMS.quantile_levels
    ]
    assert found.top_eigenvalues is not None
    assert [one.value for one in found.top_eigenvalues] == f.flip(0)[:7].tolist()
    largest = {name: float(torch.outer(*LAYERS[name]).max()) for name in names}
    assert found.top_eigenvalues[0].layer == max(largest, key=largest.__getitem__)
    assert found.effective_dimension_curve is not None
    for value, effective in zip(*vars(found.effective_dimension_curve).values(), strict=True):
        assert effective == pytest.approx(float((f / (f + value)).sum()), rel=1e-12)
    assert found.trace_shares is not None
    assert math.fsum(one.share or 0 for one in found.trace_shares) == pytest.approx(1)
    assert found.effective_rank == pytest.approx(math.exp(-float((share * share.log()).sum())), rel=1e-12)
    singular = float(f[0]) == 0
    assert (found.kappa is None) == singular
    if not singular:
        assert found.kappa == pytest.approx(top / float(f[0]))
        assert found.logdet == pytest.approx(float(f.log().sum()), rel=1e-12)
        damped = [torch.outer(*LAYERS[name]).flatten() + (one.damping.joint or 0) for name, one in zip(names, each)]  # noqa: B905
        together = torch.cat(damped)
        assert found.kappa_damped == pytest.approx(float(together.max() / together.min()))


def test_a_layer_without_eigenvalues_leaves_what_needs_them_all_undefined() -> None:
    _, _, (one, other) = model_of(["wide", "singular"])
    other = replace(other, spectrum_G=None)
    kept = [
        ModelLayer(name="a", sides=one, spectral_norm=one.spectral_norm, curve=curve(one, PARAMS)),
        ModelLayer(name="b", sides=other, spectral_norm=0.5, curve=curve(one, PARAMS)),
    ]
    found = model_metrics(kept, PARAMS)
    assert found.no_spectrum == ("b",)
    undefined = {name for name, value in vars(found).items() if value is None}
    assert undefined == {
        "effective_rank", "rank", "logdet", "kappa", "kappa_damped", "quantiles", "density", "decay", "top_eigenvalues",
        "convergence", "intervals",
    }  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_side_that_answers_for_itself_gives_what_its_matrix_would(scale: float) -> None:
    rows = torch.randn(9, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    side = LowRank(rows=rows, scales=torch.ones(9, dtype=torch.float64), weight=9.0 / scale)
    a = LAYERS["wide"][0]
    values = torch.linalg.eigvalsh(rows.mT @ rows * (scale / 9)).clamp_min(0)
    # zeros of the matrix are rounding there, and exact in the side
    values[: 14 - 9] = 0
    full = sides(a, values)
    bare = replace(full, spectrum_G=None, structured_G=side)
    undefined = {"rank", "logdet", "kappa", "kappa_damped", "kappa_factored"}
    for name, measure in SCALARS.items():
        expected = None if name in undefined else measure(full)
        assert measure(bare) == (None if expected is None else pytest.approx(expected, rel=1e-9)), name
    over, truth = curve(bare, PARAMS), curve(full, PARAMS)
    assert over is not None
    assert truth is not None
    assert over.effective_dimension == pytest.approx(truth.effective_dimension, rel=1e-10)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("rows", [16, 60])
def test_a_softmax_head_too_large_for_eigenvalues_keeps_its_sums(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax_fisher, "DENSE_ROWS", 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 200))
    data = torch.randn(rows, 12), torch.randint(0, 200, (rows,))
    params = CapacityParams(damping_grid=(1e-20, 1e-8, 1e-5, 1e-2, 1e3))

    def head(**options: Any) -> tuple[CapacityMetrics, ModelCapacity]:
        made = workspace(
            copy.deepcopy(model).double(), [(data[0].double(), data[1])], "classification", batch_size=rows
        )
        made.inputs.examples = rows
        made.options.woodbury = Woodbury(**options)
        found, summary = measured(made, params)
        return found["2"].metrics, summary.model

    (own, model_own), (dense, model_dense) = head(), head(softmax_head=False, policy="dense")
    assert (own.no_spectrum, own.approximate) == (None, False)
    assert own.estimated is not None
    assert "softmax_head" in own.estimated
    for name in ("trace", "frobenius_norm", "spectral_norm", "stable_rank", "participation_ratio", "logdet_damped",
                 "logdet_factored", "effective_dimension", "effective_dimension_factored", "damping", "effective_rank",
                 "effective_rank_G", "kappa_damped", "kappa_factored"):  # fmt: skip
        assert getattr(own, name) == pytest.approx(getattr(dense, name), rel=1e-9), name
    assert own.effective_dimension_curve is not None
    assert dense.effective_dimension_curve is not None
    assert own.effective_dimension_curve.effective_dimension[1:] == pytest.approx(
        dense.effective_dimension_curve.effective_dimension[1:], rel=1e-8
    )
    # λ within rounding: there the dense matrix would count its rounded zero as a direction
    assert own.effective_dimension_curve.effective_dimension[0] is None
    assert dense.effective_dimension_curve.effective_dimension[0] is None
    assert (model_own.no_spectrum, model_own.estimated) == ((), ("2",))
    assert model_own.stable_rank == pytest.approx(model_dense.stable_rank, rel=1e-9)
    assert model_own.effective_rank == pytest.approx(model_dense.effective_rank, rel=1e-8)
    for one, other in ((own, dense), (model_own, model_dense)):
        within(one, other)
    # with no eigenvalue in between, bounds and dense matrix agree on what is zero
    assert own.rank == dense.rank
    assert (own.kappa, own.logdet) == (None, None)
    assert own.undefined["kappa"] == own.undefined["logdet"] == "G is singular, or not told from it"


def within(found: Any, truth: Any) -> None:
    """Every metric of ``truth`` lies in the interval of ``found``, as does what is estimated."""
    rounding = 1e-12 * truth.spectral_norm
    known = {"rank": float(truth.rank), "kappa_damped": truth.kappa_damped}
    known |= {f"quantiles[{each.level:g}]": each.value for each in truth.quantiles}
    for place, each in enumerate(truth.top_eigenvalues):
        known[f"top_eigenvalues[{place}]"] = getattr(each, "value", each)
    for name, value in known.items():
        low, high = found.intervals[name]
        slack = 1e-9 * value + (0 if name in ("rank", "kappa_damped") else rounding)
        assert low - slack <= value <= high + slack, name
    for each, exact in zip(found.quantiles, truth.quantiles, strict=True):
        assert each.value == pytest.approx(exact.value, rel=0.1, abs=rounding)
    totals = [sum(count or 0 for count in each.density.counts) + each.density.below for each in (found, truth)]
    assert totals[0] == totals[1]
    assert found.decay.exponent == pytest.approx(truth.decay.exponent, rel=0.05)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("damping_g", [1e-4, 1e-11, 1e-18, 1e-30])
def test_damping_below_what_a_large_head_answers_takes_the_rest_from_its_counted_eigenvalues(
    damping_g: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_fisher, "DENSE_ROWS", 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 200)).double()
    chunks = [(torch.randn(60, 12, dtype=torch.float64), torch.randint(0, 200, (60,)))]

    def run(**options: Any) -> tuple[dict[str, LayerResult], CapacitySummary]:
        made = workspace(copy.deepcopy(model), chunks, "classification", batch_size=60)
        made.inputs.examples = 60
        made.options.stabilisation = Stabilisation(damping=damping_g, damping_G=damping_g, damping_mode="absolute")
        made.options.woodbury = Woodbury(**options)
        return measured(made, PARAMS)

    (own, summary), (dense, truth) = run(), run(softmax_head=False, policy="dense")
    head, wide = own["2"].metrics, dense["2"].metrics
    for name in ("logdet_damped", "logdet_factored", "effective_dimension", "effective_dimension_factored"):
        # the dense matrix has rounding in place of the eigenvalue that is zero
        zero = damping_g < 1e-12 * wide.spectral_norm
        assert getattr(head, name) == pytest.approx(getattr(wide, name), rel=2e-2 if zero else 1e-6), name
    if damping_g == 1e-30:
        assert head.effective_dimension == pytest.approx(11 * 199, rel=1e-6)
    assert head.effective_rank == pytest.approx(wide.effective_rank, rel=1e-8)
    assert summary.effective_rank == pytest.approx(truth.effective_rank, rel=1e-8)
    assert summary.logdet_damped == pytest.approx(truth.logdet_damped, rel=2e-2)


class Net(nn.Module):
    """Dense factors, a diagonal A, an exact block, a diagonal block, and a layer without curvature."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.position = nn.Parameter(0.1 * torch.randn(1, 5, 6))
        self.norm = nn.LayerNorm(6)
        self.hidden = nn.Linear(6, 7)
        self.dead = nn.Linear(6, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.table(ids) + self.position)
        return self.head(torch.tanh(self.hidden(h) + 0 * self.dead(h)).mean(1))


def space(**options: Any) -> Workspace:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 9, (32, 5), generator=generator), torch.randint(0, 3, (32,), generator=generator)
    made = workspace(Net(), [data], "classification", **options)
    made.inputs.examples = 32
    return made


def measured(made: Workspace, params: CapacityParams | None = None) -> tuple[dict[str, Any], Any]:
    rows = Capacity(params or CapacityParams(), made).rows()
    found = {}
    while True:
        try:
            row = next(rows)
        except StopIteration as end:
            return found, end.value
        found[row.layer] = row


def dense(side: Tensor) -> Tensor:
    return torch.diag(side) if side.ndim == 1 else side


def test_rows_of_every_form_are_those_of_the_dense_factors() -> None:
    made = space()
    rows, summary = measured(made)
    whole = collect_or_read(made)
    assert {row.metrics.form for row in rows.values() if row.metrics} >= {
        "kronecker", "diagonal", "block", "diagonal_block",
    }  # fmt: skip
    everything = []
    for facts in whole.layers:
        metrics = rows[facts.name].metrics
        factors = whole.load(facts.ordinal)
        values = torch.linalg.eigvalsh(torch.kron(dense(factors.G), dense(factors.A))).clamp_min(0)
        everything.append(values)
        assert metrics.dimension == values.numel()
        assert metrics.trace == pytest.approx(float(values.sum()), rel=1e-10, abs=1e-20)
        assert metrics.frobenius_norm == pytest.approx(float(values.norm()), rel=1e-10, abs=1e-20)
        for value, effective in zip(*vars(metrics.effective_dimension_curve).values(), strict=True):
            if value >= 1e-6:
                assert effective == pytest.approx(float((values / (values + value)).sum()), rel=1e-8, abs=1e-12)
        if rows[facts.name].status == "zero_curvature":
            assert metrics.effective_rank is metrics.damping is metrics.density is metrics.decay is None
            assert (metrics.rank, metrics.trace, metrics.quantiles[-1].value) == (0, 0, 0)
            continue
        joint = metrics.damping
        assert metrics.logdet_damped == pytest.approx(float((values + joint).log().sum()), rel=1e-9)
        assert metrics.effective_dimension == pytest.approx(float((values / (values + joint)).sum()), rel=1e-9)
        assert metrics.kappa_damped == pytest.approx(float((values[-1] + joint) / (values[0] + joint)), rel=1e-9)
        assert metrics.top_eigenvalues == pytest.approx(values.flip(0)[:10].tolist(), rel=1e-9, abs=1e-16)
    assert "zero_curvature" in {row.status for row in rows.values()}
    f = torch.cat(everything)
    assert summary.trace == pytest.approx(float(f.sum()), rel=1e-10)
    assert summary.model.stable_rank == pytest.approx(float(f.square().sum() / f.max() ** 2), rel=1e-10)
    canonical_json(summary)
    for row in rows.values():
        canonical_json(row.metrics)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_density_and_curve_end_where_rounding_begins(dtype: str) -> None:
    """Of a factor of rank 3 the other eigenvalues are rounding: their number is known, and not where they lie."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40, bias=False), nn.Linear(40, 5, bias=False))
    data = [(torch.randn(200, 3), torch.randint(0, 5, (200,)))]
    made = workspace(model, data, "classification", fisher="mc", dtype=dtype, batch_size=50)
    made.options.kinds = ("capacity", "spectrum")
    rows, _ = measured(made, CapacityParams())
    found = rows["1"].metrics
    rounding = 40 * torch.finfo(getattr(torch, dtype)).eps * found.spectral_norm
    assert found.density is not None
    edges, counts = found.density.edges, found.density.counts
    assert [count is None for count in counts] == [edge < rounding for edge in edges[:-1]]
    assert sum(count or 0 for count in counts) + found.density.below == 200
    assert found.effective_dimension_curve is not None
    grid, values = found.effective_dimension_curve.damping, found.effective_dimension_curve.effective_dimension
    assert [value is None for value in values] == [damping < rounding for damping in grid]
    # A of rank 3, and G of rank 4, since a softmax does not see a common shift; 200 where rounding was drawn
    assert max(value for value in values if value is not None) < 14
    # what was drawn from rounding before: eigenvalues in decades where the exact matrix has none
    assert all(not count for edge, count in zip(edges, counts, strict=False) if edge < 1e-7 * found.spectral_norm)


DAMPED = (
    "effective_dimension", "effective_dimension_share", "effective_dimension_factored", "logdet_damped",
    "logdet_factored", "kappa_damped", "kappa_factored",
)  # fmt: skip


def agrees(one: Any, other: Any) -> bool:
    """Hold the numbers of float32 sums against those of float64 sums; return whether some are null, with the reason."""
    null = [metric for metric in DAMPED if hasattr(one, metric) and getattr(one, metric) is None]
    for metric in DAMPED:
        value, truth = getattr(one, metric, None), getattr(other, metric, None)
        if metric in null:
            assert "take a larger `stabilisation.damping`" in one.undefined[metric]
        elif truth is not None:
            assert value == pytest.approx(truth, rel=0.01), metric
    assert one.kappa is None or one.kappa == pytest.approx(other.kappa, rel=0.1)
    true = {each.level: each.value for each in other.quantiles}
    for each in one.quantiles:
        assert each.value == pytest.approx(true.get(each.level, each.value), rel=0.01), each.level
    return bool(null)


@pytest.mark.part(of=40, by=())
@pytest.mark.parametrize("name", ["full", "deficient", "head", "few", "many batches"])
def test_numbers_at_small_damping_are_not_drawn_by_the_rounding_of_the_sums(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same net summed in float32 and in float64: a number that both report is one number."""
    monkeypatch.setattr(softmax_fisher, "DENSE_ROWS", 4)
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(256, 20, generator=generator)
    if name in ("deficient", "many batches"):
        inputs = inputs[:, :4] @ torch.randn(4, 20, generator=generator)
    inputs = inputs[:12] if name in ("few", "head") else inputs
    classes = 200 if name == "head" else 5
    labels = torch.randint(0, classes, (len(inputs),), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, classes))
    batch = 2 if name == "many batches" else 64
    woodbury = Woodbury() if name == "head" else Woodbury(softmax_head=False, policy="dense")

    def found(share: float, **options: Any) -> tuple[dict[str, Any], Any]:
        dtype = torch.float64 if options["dtype"] == "float64" else torch.float32
        rows = zip(torch.split(inputs.to(dtype), batch), torch.split(labels, batch), strict=True)
        made = workspace(copy.deepcopy(model).to(dtype), list(rows), "classification", batch_size=batch, **options)
        made.inputs.examples = len(inputs)
        made.options.stabilisation = Stabilisation(damping=share)
        made.options.woodbury = woodbury
        return measured(made)

    silent = set()
    for share in (1e-30, 1e-9, 1e-6, 1e-3):
        exact, total = found(share, dtype="float64")
        for options in ({"dtype": "float32"}, {"dtype": "float32", "storage_dtype": "float64"}):
            single, summary = found(share, **options)
            pairs = [(single[key].metrics, exact[key].metrics, key) for key in exact]
            for one, other, key in [*pairs, (summary.model, total.model, "model")]:
                if agrees(one, other):
                    silent.add((key, share))
    if name in ("deficient", "many batches"):
        assert {("0", 1e-30), ("0", 1e-9)} <= silent
        assert ("0", 1e-3) not in silent
        # 16 of 21 eigenvalues of A are rounding
        assert not {0.5, 0.75} & {each.level for each in single["0"].metrics.quantiles}
    else:
        # G of the head is singular, and its zero is rounding in a matrix alone
        assert {key for key, _ in silent} <= (set() if name == "head" else {"4", "model"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_numbers_at_small_damping_are_not_drawn_by_the_rounding_of_rows(seed: int, dtype: torch.dtype) -> None:
    """G as 15 gradient rows of rank 10: the rows of one example, √p times those of the classes, depend on each other.

    The oracle is the singular values of the float64 rows, the five that are zero by algebra set to zero.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 60), nn.Tanh(), nn.Linear(60, 3)).to(dtype)
    inputs, labels = torch.randn(5, 3).to(dtype), torch.randint(3, (5,))
    wide = copy.deepcopy(model).double()
    hidden = wide[0](inputs.double()).tanh()
    p = wide[2](hidden).softmax(1).detach()
    directions = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]
    slopes = (1 - hidden.detach() ** 2)[:, None] * wide[2].weight.detach()
    rows = torch.einsum("nck,nco->nko", directions, slopes).reshape(15, 60)
    columns = torch.cat((inputs.double(), torch.ones(5, 1, dtype=torch.float64)), 1)
    left = torch.linalg.svdvals(columns).square() / 5
    right = torch.cat((torch.linalg.svdvals(rows)[:10].square() / 5, torch.zeros(50, dtype=torch.float64)))
    null = set()
    for damped in (1e-2, 1e-7, 1e-12, 1e-15, 1e-18, 1e-26):
        made = workspace(
            model, [(inputs, labels)], "classification", fisher="type2", dtype=str(dtype).removeprefix("torch.")
        )
        made.options.stabilisation = Stabilisation(damping=damped, damping_mode="absolute")
        made.inputs.examples = 5
        found = measured(made)[0]["0"]
        assert found.record.branch == "woodbury"
        truth = oracle(left, right, sides(left, right, made.options.stabilisation))
        for name in ("effective_dimension", "logdet_damped", "kappa_damped"):
            value, expected = getattr(found.metrics, name), truth[name]
            assert expected is not None
            if value is None:
                null.add(damped)
                assert "take a larger `stabilisation.damping`" in found.metrics.undefined[name]
            else:
                assert value == pytest.approx(expected, rel=0.01, abs=2.4 if name == "logdet_damped" else 0), name
    assert max(null) < (1e-7 if dtype == torch.float32 else 1e-12)


def test_a_condition_that_storage_in_float16_leaves_unknown_has_a_reason() -> None:
    """The smallest eigenvalue of A is beyond what float16 holds of A, though above the tolerance of the rank."""
    torch.manual_seed(0)
    inputs = torch.randn(60, 4)
    inputs[:, 0] = inputs[:, 1] + 4e-2 * torch.randn(60)
    made = workspace(
        nn.Linear(4, 3), [(inputs, torch.randn(60, 3))], "regression", dtype="float32", storage_dtype="float16"
    )
    rows, summary = measured(made)
    (row,) = rows.values()
    for found, name in ((row.metrics, "A"), (summary.model, f"A of `{row.layer}`")):
        assert (found.rank, found.kappa, found.logdet) == (15, None, None)
        assert {found.undefined[each] for each in ("kappa", "logdet")} == {f"{name} is singular, or not told from it"}


class Beside(nn.Module):
    """A small layer whose inputs have rank 3, beside large ones whose inputs have full rank."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.first, self.last = nn.Linear(12, 4), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        z = self.last(self.first(x[:, 12:]).tanh())
        return z + nn.functional.pad(self.small(x[:, :12]), (0, 60))


def test_a_total_that_rounding_hardly_touches_stands_beside_a_layer_that_it_decides() -> None:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(512, 3, generator=generator) @ torch.randn(3, 12, generator=generator)
    inputs = torch.cat((inputs, torch.randn(512, 64, generator=generator)), 1)
    labels = torch.randint(0, 64, (512,), generator=generator)
    torch.manual_seed(0)
    model = Beside()
    found = {}
    for dtype in (torch.float32, torch.float64):
        data = [(inputs.to(dtype), labels)]
        options = {"dtype": str(dtype).removeprefix("torch."), "batch_size": 512}
        made = workspace(copy.deepcopy(model).to(dtype), data, "classification", **options)
        made.options.stabilisation, made.options.woodbury = Stabilisation(damping=1e-5), Woodbury(policy="dense")
        found[dtype] = measured(made)
    (rows, summary), (_, exact) = found.values()
    assert [key for key, row in rows.items() if row.metrics.effective_dimension is None] == ["small"]
    assert summary.effective_dimension == pytest.approx(exact.effective_dimension, rel=0.01)
    assert summary.effective_dimension_share == pytest.approx(exact.effective_dimension_share, rel=0.01)


def test_default_grid_is_absolute_and_shows_a_uniform_shrinkage() -> None:
    a, g = LAYERS["wide"]
    large, small = curve(sides(a, g), CapacityParams()), curve(sides(a * 1e-4, g), CapacityParams())
    assert large is not None
    assert small is not None
    assert large.damping == small.damping == DAMPING_GRID
    # eight half decades of λ further down the same numbers stand
    assert small.effective_dimension[:-8] == pytest.approx(large.effective_dimension[8:], rel=1e-9)
    assert SCALARS["effective_dimension"](sides(a * 1e-4, g)) == pytest.approx(
        SCALARS["effective_dimension"](sides(a, g)) or 0, rel=1e-9
    )


@pytest.fixture
def no_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an eigendecomposition was made")

    for name in ("eigh", "eigvalsh", "eig", "svd", "svdvals"):
        monkeypatch.setattr(torch.linalg, name, refuse)


@pytest.mark.parametrize("names", [("trace",), ("frobenius_norm", "participation_ratio"), WITHOUT_DECOMPOSITION])
def test_what_the_factors_give_decomposes_nothing(names: tuple[str, ...], no_eigenvalues: None) -> None:
    params = CapacityParams(metrics=names)
    made = space(nested=True)
    made.options.decomposition = params.decomposition
    rows, summary = measured(made, params)
    assert summary.eigendecompositions == 0
    for row in rows.values():
        for name in METRICS:
            unset = name not in names or (row.status == "zero_curvature" and name == "participation_ratio")
            assert (getattr(row.metrics, name) is None) == unset, (row.layer, name)
        assert {each.metric for each in row.metrics.convergence} == set(names)
    assert (summary.trace is None) == ("trace" not in names)


def test_cheap_metrics_are_the_same_numbers_with_and_without_eigenvalues() -> None:
    with_values, _ = measured(space())
    made = space()
    made.options.decomposition = "none"
    without, _ = measured(made, CapacityParams(metrics=WITHOUT_DECOMPOSITION))
    for name, row in with_values.items():
        for metric in WITHOUT_DECOMPOSITION:
            assert getattr(row.metrics, metric) == getattr(without[name].metrics, metric)


@functools.cache
def all_metrics() -> dict[str, Any]:
    return measured(space())[0]


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("name", METRICS)
def test_each_metric_can_be_asked_for_alone(name: str) -> None:
    whole = all_metrics()
    alone, summary = measured(space(), CapacityParams(metrics=(name,)))
    for layer, row in alone.items():
        given = {each for each in METRICS if getattr(row.metrics, each) is not None}
        assert given <= {name}
        assert getattr(row.metrics, name) == getattr(whole[layer].metrics, name)
    assert {each for each in vars(summary.model) if getattr(summary.model, each) is not None} <= {
        "no_spectrum", "approximate", "estimated", "undefined", "trace_shares", name,
    }  # fmt: skip


def test_options_are_refused_by_name() -> None:
    for wrong, said in (
        ({"metrics": ("trace", "stable_rnak")}, "`stable_rnak`; take null for all, or some of trace, frobenius_norm"),
        ({"metrics": ()}, "is empty"),
        ({"quantile_levels": (0.5, 1.5)}, "holds 1.5"),
        ({"top_k": -1}, "is -1"),
        ({"density_bins": 0}, "is 0"),
        ({"damping_grid": (1.0, 0.5)}, "does not ascend"),
        ({"damping_grid": (0.0,)}, "holds 0.0"),
        ({"damping_grid": ()}, "has 0 numbers"),
    ):
        with pytest.raises(FieldError) as refused:
            CapacityParams(**wrong)  # type: ignore[arg-type]
        assert refused.value.field == next(iter(wrong))
        assert said in refused.value.message


def test_a_resumed_job_gives_the_same_summary_and_only_the_missing_rows() -> None:
    rows, summary = measured(space())
    resumed = space()
    resumed.resume.completed = frozenset({("capacity", 0), ("capacity", 2)})
    rest, again = measured(resumed)
    assert again == summary
    assert {row.ordinal for row in rows.values()} - {row.ordinal for row in rest.values()} == {0, 2}


def test_the_record_names_what_can_be_selected() -> None:
    apart = {
        "form", "dimension", "approximate", "no_spectrum", "estimated", "intervals", "undefined", "damping", "nested",
        "convergence", "cross_check",
    }  # fmt: skip
    assert set(METRICS) | apart == set(CapacityMetrics.__dataclass_fields__)
    assert set(SCALARS) <= set(METRICS)
