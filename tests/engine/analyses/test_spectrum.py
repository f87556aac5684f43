"""The analysis `spectrum` against dense matrices by autodiff, over its refusals, its checkpoints and its plan."""

import copy
import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from catalog.analyses.analysis import LayerResult
from catalog.analyses.spectrum import SpectrumParams, SpectrumSummary
from catalog.analyses.spectrum_metrics import CurvatureSpectrum
from catalog.record import FieldError, canonical_json
from engine.analyses.spectrum import Spectrum
from engine.collect import collect_or_read
from engine.errors import BrokenFactors, ModelRefused, StopRequested, UsageError
from engine.workspace import ModelInputs, Workspace
from tests.oracles import MemoryArtifacts, kronecker, workspace

Rows = dict[str, LayerResult]
BRIEF: dict[str, Any] = {"k": 2, "steps": 6, "probes": 2, "trace_products": 6, "tolerance": 1e-6}
"""Options of searches that are stopped and compared with themselves alone."""
SMALL: dict[str, Any] = {"k": 3, "steps": 12, "probes": 4, "trace_products": 12, "tolerance": 1e-9}


class Net(nn.Module):
    """Two layers with a normalisation between them, of which all is covered."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))


def data(examples: int = 11) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(7)
    return torch.randn(examples, 5, generator=drawn, dtype=torch.float64), torch.randint(
        0, 3, (examples,), generator=drawn
    )


def job(params: SpectrumParams, model: nn.Module | None = None, **options: Any) -> Workspace:
    if model is None:
        torch.manual_seed(0)
        model = Net().double()
    space = workspace(model, [data()], "classification", **{"batch_size": 6} | options)
    space.options.kinds, space.options.params = ("spectrum",), {"spectrum": params}
    space.options.decomposition = params.decomposition
    return space


def run(params: SpectrumParams, space: Workspace) -> tuple[Rows, SpectrumSummary]:
    rows: Rows = {}
    found = Spectrum(params, space).rows()
    while True:
        try:
            row = next(found)
        except StopIteration as end:
            return rows, end.value
        rows[row.layer] = row


def the(summary: SpectrumSummary, of: str) -> CurvatureSpectrum:
    (found,) = [each for each in summary.curvatures if each.of == of]
    return found


def dense(model: nn.Module, of: str, names: tuple[str, ...] | None = None) -> Tensor:
    """The matrix over the parameters ``names`` in their order, of the mean cross-entropy over ``data``."""
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    own = {name: each for name, each in parameters.items() if names is None or name in names}
    sizes = [each.numel() for each in own.values()]
    flat = torch.cat([each.flatten() for each in own.values()])
    inputs, targets = data()

    def outputs(vector: Tensor) -> Tensor:
        parts = {
            name: part.view(each.shape)
            for (name, each), part in zip(own.items(), torch.split(vector, sizes), strict=True)
        }
        return functional_call(model, {**parameters, **parts}, (inputs,))

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, targets)

    if of == "hessian":
        # finite differences agree; torch.func's second derivative of a layer normalisation is another one
        return torch.autograd.functional.hessian(lambda vector: loss(outputs(vector)), flat)
    jacobian = jacrev(outputs)(flat)
    logits = outputs(flat)
    if of == "ggn":
        curvature = hessian(loss)(logits)
        return torch.einsum("ncp,ncmd,mdq->pq", jacobian, curvature, jacobian)
    gradient = (logits.softmax(1) - nn.functional.one_hot(targets, 3)).to(torch.float64)
    each = torch.einsum("ncp,nc->np", jacobian, gradient)
    return each.T @ each / len(targets)


@pytest.mark.parametrize("of", ["ggn", "hessian", "empirical"])
def test_the_ends_are_those_of_the_dense_matrix_within_their_bounds(of: Any) -> None:
    params = SpectrumParams(of=of, **SMALL)
    space = job(params, batch_size=11)
    true = torch.linalg.eigvalsh(dense(space.inputs.model, of))  # type: ignore[arg-type]
    found = the(run(params, space)[1], of)
    assert found.dimension == true.numel()
    assert found.largest is not None
    assert found.smallest is not None
    for each, value in zip(found.largest, true.flip(0), strict=False):
        assert each.converged
        assert each.bound is not None
        assert abs(each.value - float(value)) <= each.bound + 1e-12
        assert each.bound <= 1e-6 * float(true.abs().max())
    for each, value in zip(found.smallest, true, strict=False):
        assert each.bound is not None
        assert abs(each.value - float(value)) <= each.bound + 1e-12
    assert found.trace is not None
    assert found.trace_low is not None
    assert found.trace_high is not None
    # one interval of 95 % may miss; three times its width does not
    half = (found.trace_high - found.trace_low) / 2
    assert abs(found.trace - float(true.sum())) <= 3 * half + 1e-12
    assert found.passes <= found.products


def test_of_a_sampled_fisher_the_collections_labels_are_taken() -> None:
    params = SpectrumParams(of=("kfac", "fisher"), **SMALL)
    model = nn.Linear(5, 3).double()
    # one layer and one example: K-FAC is the Fisher of the sampled label itself
    space = workspace(model, [(data()[0][:1], data()[1][:1])], "classification", fisher="mc", seed=3)
    space.options.kinds, space.options.params = ("spectrum",), {"spectrum": params}
    _, summary = run(params, space)
    kfac, fisher = the(summary, "kfac"), the(summary, "fisher")
    assert kfac.largest is not None
    assert fisher.largest is not None
    assert fisher.largest[0].value == pytest.approx(kfac.largest[0].value, rel=1e-10)
    assert kfac.largest[0].value > 0
    assert [each.value for each in fisher.largest[1:]] == pytest.approx([0.0, 0.0], abs=1e-12)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("of", ["ggn", "hessian"])
def test_the_bands_hold_the_dense_matrix(of: Any) -> None:
    params = SpectrumParams(of=of, **SMALL | {"probes": 24, "steps": 30, "decades": 6})
    space = job(params, batch_size=11)
    true = torch.linalg.eigvalsh(dense(space.inputs.model, of))  # type: ignore[arg-type]
    found = the(run(params, space)[1], of)
    assert found.density is not None
    inside = total = drawn = near = 0
    for sign, curve in ((1.0, found.density.positive), (-1.0, found.density.negative)):
        if curve is None:
            assert of == "ggn"
            continue
        assert curve.beyond_low is not None
        assert curve.beyond_high is not None
        assert curve.density_low is not None
        assert curve.density_high is not None
        own = sign * true[sign * true > 1e-13]
        for place, point in enumerate(found.density.log10):
            beyond = float((own > 10**point).sum()) / true.numel()
            inside += curve.beyond_low[place] - 1e-9 <= beyond <= curve.beyond_high[place] + 1e-9
            total += 1
            if curve.density[place] is None:
                continue
            distance = (point - own.log10()) / found.density.width
            smooth = float(torch.exp(-0.5 * distance**2).sum()) / (
                true.numel() * found.density.width * math.sqrt(2 * math.pi)
            )
            low, high = curve.density_low[place], curve.density_high[place]
            assert low is not None
            assert high is not None
            near += low - 1e-6 <= smooth <= high + 1e-6
            drawn += 1
    assert inside >= 0.9 * total
    assert drawn > 0.3 * total
    assert near >= 0.9 * drawn
    if of == "hessian":
        share = float((true < 0).double().mean())
        assert found.negative_low is not None
        assert found.negative_high is not None
        assert found.negative_low - 0.02 <= share <= found.negative_high + 0.02
    else:
        assert found.negative_share is None


def test_kfacs_eigenvalues_are_those_of_the_dense_products() -> None:
    params = SpectrumParams(of="kfac", k=4)
    space = job(params)
    rows, summary = run(params, space)
    whole = collect_or_read(space)
    every = []
    for name, row in rows.items():
        true = torch.linalg.eigvalsh(kronecker(whole, name))
        every.append(true)
        assert row.metrics.ekfac is None
        found = row.metrics.kfac
        assert [each.value for each in found.largest] == pytest.approx(true.flip(0)[:4].tolist(), rel=1e-10)
        assert found.trace == pytest.approx(float(true.sum()))
    together = torch.cat(every).sort().values
    model = the(summary, "kfac")
    assert model.dimension == together.numel() == summary.coverage.covered_parameters
    assert model.largest is not None
    assert [each.value for each in model.largest] == pytest.approx(together.flip(0)[:4].tolist(), rel=1e-10)
    assert model.products == model.passes == 0


def test_what_rounding_may_have_drawn_has_a_bound() -> None:
    """The same net summed in float32 and in float64, on inputs of four directions."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(64, 4, generator=generator) @ torch.randn(4, 12, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3))
    found = {}
    for dtype in ("float32", "float64"):
        own = getattr(torch, dtype)
        batch = inputs.to(own), torch.arange(64) % 3
        space = workspace(copy.deepcopy(model).to(own), [batch], "classification", dtype=dtype, batch_size=64)
        space.inputs.examples, space.options.decomposition = 64, "values"
        rows, summary = run(SpectrumParams(of="kfac", k=20, end="both"), space)
        found[dtype] = [rows["0"].metrics.kfac, the(summary, "kfac")]
    for single, exact in zip(*found.values(), strict=True):
        for end in ("smallest", "largest"):
            for one, truth in zip(getattr(single, end), getattr(exact, end), strict=True):
                # the wider sums have bounds of their own
                within = 1e-3 * truth.value if one.bound is None else one.bound
                assert abs(one.value - truth.value) <= within + (truth.bound or 0)
                assert one.converged == (one.bound is None)
        assert all(each.bound is None for each in single.largest)
        assert all(each.bound is not None for each in single.smallest if each.value > 0)
        top = single.largest[0].value
        assert max(each.bound or 0 for each in single.smallest) < 1e-4 * top


def test_ekfacs_eigenvalues_are_the_collected_ones() -> None:
    params = SpectrumParams(of=("ekfac", "kfac"), k=2)
    space = job(params, ekfac=True)
    rows, summary = run(params, space)
    whole = collect_or_read(space)
    assert whole.load_corrected is not None
    for row in rows.values():
        true = whole.load_corrected(row.ordinal).eigenvalues.flatten()
        assert [each.value for each in row.metrics.ekfac.largest] == true.topk(min(2, true.numel())).values.tolist()
    assert [each.of for each in summary.curvatures] == ["ekfac", "kfac"]
    assert the(summary, "ekfac").trace == pytest.approx(
        sum(float(whole.load_corrected(row.ordinal).eigenvalues.sum()) for row in rows.values())
    )


def test_ekfac_alone_decomposes_nothing() -> None:
    params = SpectrumParams(of="ekfac", k=2)
    rows, _ = run(params, job(params, ekfac=True))
    assert all(row.record.kappa_A is None and row.record.kappa_G is None for row in rows.values())
    assert all(row.metrics.kfac is None and not row.metrics.no_spectrum for row in rows.values())


class PartlyCovered(nn.Module):
    """Parameters in the middle that no layer covers, as nothing reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.unread = nn.Linear(2, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


def test_the_exact_matrix_is_that_of_the_covered_parameters() -> None:
    torch.manual_seed(1)
    model = PartlyCovered().double()
    params = SpectrumParams(of="ggn", **SMALL)
    space = job(params, model)
    _, summary = run(params, space)
    covered = tuple(name for layer in collect_or_read(space).layers for name in layer.parameters)
    assert sorted(covered) == ["first.bias", "first.weight", "head.bias", "head.weight"]
    assert summary.coverage.declared_parameters == 9
    true = torch.linalg.eigvalsh(dense(model, "ggn", covered))
    found = the(summary, "ggn")
    assert found.dimension == true.numel() == summary.coverage.covered_parameters
    assert found.largest is not None
    assert [each.value for each in found.largest] == pytest.approx(true.flip(0)[:3].tolist(), rel=1e-8)


def outcome(rows: Rows, summary: SpectrumSummary) -> str:
    plain = [dataclasses.replace(row, observed=None) for row in rows.values()]  # type: ignore[type-var]
    return canonical_json({"rows": plain, "summary": summary})


@functools.cache
def undisturbed(params: SpectrumParams) -> str:
    """The outcome of a run of its own, once for all tests that compare with it."""
    return outcome(*run(params, job(params)))


@pytest.mark.nightly(
    covered_by="tests/engine/analyses/test_spectrum.py::test_a_search_goes_on_where_it_was_and_ends_with_the_same_bits"
)
def test_two_runs_are_equal_to_the_bit() -> None:
    params = SpectrumParams(of=("kfac", "ggn", "hessian"), **BRIEF)
    assert outcome(*run(params, job(params))) == undisturbed(params)


class Stopped(StopRequested):
    """In place of a killed process."""


def stopping_after(space: Workspace, batches: int) -> None:
    """Let the job end at a batch of its products."""

    def report(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "products" and done == batches:
            raise Stopped

    space.ports.report = report


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("batches", [4, 20, 61, 80])
def test_a_search_goes_on_where_it_was_and_ends_with_the_same_bits(batches: int) -> None:
    params = SpectrumParams(of=("kfac", "ggn", "hessian"), **BRIEF)
    expected = undisturbed(params)
    scratch, lines = MemoryArtifacts(), []
    for attempt in range(2):
        space = job(params)
        space.ports.scratch, space.resume.checkpoint_seconds = scratch, 1e-9
        space.ports.log = lambda level, text: lines.append(f"{level}: {text}")
        if attempt == 0:
            stopping_after(space, batches)
            with pytest.raises(Stopped):
                run(params, space)
        else:
            assert outcome(*run(params, space)) == expected
    assert any("resumed after" in line for line in lines)
    assert not any("discarded" in line for line in lines)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("changed", ["options", "model", "tensor", "manifest"])
@pytest.mark.part(of=2, law="a checkpoint that does not belong is discarded")
def test_a_checkpoint_that_does_not_belong_is_discarded(changed: str) -> None:
    params = SpectrumParams(of="ggn", **BRIEF)
    scratch, lines = MemoryArtifacts(), []
    space = job(params)
    space.ports.scratch, space.resume.checkpoint_seconds = scratch, 1e-9
    stopping_after(space, 20)
    with pytest.raises(Stopped):
        run(params, space)
    other = dataclasses.replace(params, steps=7) if changed == "options" else params
    if changed == "tensor":
        for tensors in [each for name, each in scratch.tensors.items() if name.startswith("search/")]:
            for tensor in tensors.values():
                tensor.add_(1)
    if changed == "manifest":
        scratch.tables["search/search.json"]["body"]["counts"]["passes"] += 1

    def again() -> Workspace:
        made = job(other)
        if changed == "model":
            with torch.no_grad():
                made.inputs.model.first.weight[0, 0] += 1  # type: ignore[union-attr, index, operator]
        return made

    space = again()
    space.ports.scratch, space.resume.checkpoint_seconds = scratch, 1e-9
    space.ports.log = lambda level, text: lines.append(f"{level}: {text}")
    expected = outcome(*run(other, again())) if changed == "model" else undisturbed(other)
    assert outcome(*run(other, space)) == expected
    (said,) = [line for line in lines if "search is discarded" in line]
    assert {"options": "options of the spectrum", "model": "model"}.get(changed, "damaged") in said or (
        changed == "manifest" and "ValueError" in said
    )


# ---- refusals


@pytest.mark.parametrize(
    ("options", "field", "told"),
    [
        ({"of": ()}, "of", "is empty"),
        ({"of": ("ggn", "ggn")}, "of", "twice"),
        ({"k": 0}, "k", "is 0; take 1 to"),
        ({"k": 10**6}, "k", "is 1000000"),
        ({"of": "ggn", "probes": 1}, "probes", "is 1, of which no band can be told"),
        ({"probes": 0}, "probes", "is 0"),
        ({"steps": 1}, "steps", "is 1"),
        ({"tolerance": 0.0}, "tolerance", "is 0.0"),
        ({"tolerance": math.nan}, "tolerance", "is nan"),
        ({"trace_products": 5}, "trace_products", "is 5"),
        ({"of": "hessian", "k": 10, "most_products": 19}, "most_products", "is 19, and 20 eigenvalues"),
        ({"decades": 40, "points_per_decade": 100}, "decades", "4000 points"),
        ({"points_per_decade": 0}, "points_per_decade", "is 0"),
    ],
)
def test_options_outside_their_meaning_are_refused(options: dict[str, Any], field: str, told: str) -> None:
    with pytest.raises(FieldError, match=told) as refused:
        SpectrumParams(**options)
    assert refused.value.field == field


def test_a_single_probe_will_do_where_no_band_is_asked_for() -> None:
    assert SpectrumParams(of="ggn", probes=1, density=False).probes == 1
    assert SpectrumParams(of="kfac", probes=1).probes == 1


def test_more_eigenvalues_than_there_are_are_refused_before_anything_is_computed() -> None:
    params = SpectrumParams(of="ggn", **SMALL | {"k": 70})
    space = job(params)
    reported: list[str] = []
    space.ports.report = lambda stage, done, total, unit: reported.append(stage)
    with pytest.raises(UsageError, match="at most the dimension 69, the number of trainable") as refused:
        run(params, space)
    assert refused.value.pointer == "/spectrum/k"
    assert not reported


def test_more_eigenvalues_than_are_covered_are_refused_before_anything_is_multiplied() -> None:
    torch.manual_seed(1)
    params = SpectrumParams(of="ggn", **SMALL | {"k": 40})
    space = job(params, PartlyCovered().double())
    reported: list[str] = []
    space.ports.report = lambda stage, done, total, unit: reported.append(stage)
    with pytest.raises(UsageError, match="at most the dimension 39, the number of covered"):
        run(params, space)
    assert not {"spectrum", "products"} & set(reported)


def test_stored_factors_hold_no_model_and_no_correction() -> None:
    first = job(SpectrumParams(of="kfac", k=2))
    first.options.keep = ("factors",)
    run(SpectrumParams(of="kfac", k=2), first)

    def stored(of: Any) -> None:
        params = SpectrumParams(of=of, **SMALL)
        space = Workspace(inputs=ModelInputs(stored=first.ports.artifacts), ports=job(params).ports)
        run(params, space)

    stored("kfac")
    with pytest.raises(UsageError, match="stored factors hold no model") as refused:
        stored("ggn")
    assert refused.value.pointer == "/spectrum/of"
    with pytest.raises((UsageError, BrokenFactors), match="no eigenvalues of EK-FAC"):
        stored("ekfac")


class DropsOut(Net):
    """Draws random numbers whatever the mode."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, training=True)


def test_a_model_that_draws_random_numbers_is_refused_by_its_products() -> None:
    torch.manual_seed(0)
    params = SpectrumParams(of="ggn", **SMALL)
    with pytest.raises(ModelRefused, match="the same outputs for the same inputs"):
        run(params, job(params, DropsOut().double(), self_check="off"))


def test_a_cancelled_job_stops_within_a_pass() -> None:
    params = SpectrumParams(of="ggn", **BRIEF)
    space = job(params)
    seen: list[int] = []
    space.ports.report = lambda stage, done, total, unit: seen.append(done) if stage == "products" else None

    def cancelled() -> None:
        if seen and seen[-1] >= 5:
            raise Stopped

    space.ports.raise_if_cancelled = cancelled
    with pytest.raises(Stopped):
        run(params, space)
    assert seen[-1] == 5


def test_a_layer_without_curvature_has_a_spectrum_of_zeros() -> None:
    torch.manual_seed(0)
    model = Net().double()
    with torch.no_grad():
        model.head.weight.zero_()
    params = SpectrumParams(of=("kfac", "ggn"), **SMALL)
    rows, summary = run(params, job(params, model))
    dead = rows["first"].metrics.kfac
    assert dead.density is None
    assert [each.value for each in dead.largest] == [0.0, 0.0, 0.0]
    assert dead.zeros == rows["first"].metrics.dimension
    ggn = the(summary, "ggn")
    assert ggn.largest is not None
    assert ggn.largest[0].value == pytest.approx(float(torch.linalg.eigvalsh(dense(model, "ggn"))[-1]), rel=1e-8)
