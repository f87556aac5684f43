"""The exact Gauss-Newton's products, trace and largest eigenvalue against the dense matrix."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from catalog.analyses.capacity import CapacityParams
from catalog.analyses.capacity_metrics import CrossCheck
from engine.analyses.capacity import Capacity
from engine.analyses.metrics import exact_ggn_check
from engine.analyses.metrics.exact_ggn_check import CrossChecked, exact_ggn, interval, trace_probes
from engine.collect import collect_or_read
from engine.collection.pass_job import PassJob
from engine.errors import ModelRefused, UsageError
from engine.factors.factor_set import FactorSet
from engine.linalg.lanczos import Lanczos
from engine.model.determinism import Numerics
from engine.operators.blocks import block_of, joined
from engine.operators.products import ExactCurvature
from engine.workspace import Workspace
from tests.oracles import ggn_block, relative_error, stacked, workspace

EXACT = 1e-10


class Attending(nn.Module):
    """A table, fused attention, a norm, a convolution, a packed projection, a layer used twice, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)
        self.packed = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(4)
        self.grouped = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.twice = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.weight.requires_grad_(False)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        query, key, value = self.packed(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        x = self.norm(x + mixed.transpose(1, 2).flatten(2))
        x = torch.tanh(self.grouped(x.transpose(1, 2)).transpose(1, 2))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.head(self.drop(torch.relu(self.frozen(x))))


def attending() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(2)
    model = Attending().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    return model.eval(), torch.randint(0, 5, (7, 4)), torch.randint(0, 3, (7, 4))


def perceptron(loss: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(9, 3, dtype=torch.float64)
    targets: dict[str, Callable[[], Tensor]] = {
        "cross_entropy": lambda: torch.randint(0, 3, (9,)),
        "mse": lambda: torch.randn(9, 3, dtype=torch.float64),
        "bce": lambda: torch.rand(9, 3, dtype=torch.float64).round(),
    }
    return model, x, targets[loss]()


def matrix(space: Workspace, whole: FactorSet, **options: Any) -> ExactCurvature:
    assert space.inputs.model is not None
    assert space.inputs.task is not None
    job = PassJob(
        workspace=space, model=space.inputs.model, task=space.inputs.task, collection=whole.collection,
        dtype=torch.float64,
        numerics=Numerics.here(space.machine.device, None), heard=set(), **options,
    )  # fmt: skip
    return exact_ggn(job, whole.updates, lambda: None)


def dense(model: nn.Module, x: Tensor, y: Tensor, loss: str, names: tuple[str, ...]) -> Tensor:
    # the oracle's own derivatives know neither sparse rows nor fused attention
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False
    with sdpa_kernel(SDPBackend.MATH):
        return ggn_block(copied, x, y, loss, names, stacked(*names))


def checks(space: Workspace, **options: Any) -> tuple[dict[str, CrossCheck], CrossCheck]:
    rows, found = {}, Capacity(CapacityParams(cross_check="ggn", **options), space).rows()
    while True:
        try:
            row = next(found)
        except StopIteration as end:
            return rows, end.value.cross_check
        if row.metrics is not None:
            rows[row.layer] = row.metrics.cross_check  # type: ignore[attr-defined]


@pytest.mark.part(of=16, by=("loss",))
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce"])
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_products_are_those_of_the_dense_matrix(loss: str, micro_batch: int | None) -> None:
    model, x, y = perceptron(loss)
    task = "regression" if loss == "mse" else "classification"
    space = workspace(model, [(x[:5], y[:5]), (x[5:], y[5:])], task, loss)
    whole = collect_or_read(space)
    blocks = [block_of(model, each.name, each.parameters, each.parameter_count) for each in whole.layers]
    blocks.append(joined("all", [block for block in blocks if block is not None]))
    assert None not in blocks
    vectors = [torch.randn(block.size, dtype=torch.float64) for block in blocks]  # type: ignore[union-attr]
    found = matrix(space, whole, micro_batch=micro_batch)
    with found.prepared():
        products = found.block_products(blocks, vectors)  # type: ignore[arg-type]
    names = ("0.weight", "0.bias"), ("2.weight", "2.bias"), ("0.weight", "0.bias", "2.weight", "2.bias")
    for own, vector, product in zip(names, vectors, products, strict=True):
        assert relative_error(product, dense(model, x, y, loss, own) @ vector) < EXACT


@pytest.mark.part(of=2, law="the exact matrix is that of plain autograd")
def test_every_layer_of_an_odd_model_and_the_whole() -> None:
    model, x, y = attending()
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    rows, whole = checks(
        workspace(model, [(x, y)], "classification"), cross_check_probes=200, cross_check_iterations=60
    )
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.table.sparse is True
    names = {
        "table": ("table.weight",), "packed": ("packed.weight", "packed.bias"), "norm": ("norm.weight", "norm.bias"),
        "twice": ("twice.weight", "twice.bias"), "frozen": ("frozen.bias",), "head": ("head.weight",),
    }  # fmt: skip
    trained = tuple(name for name, wanted in flags.items() if wanted)
    grouped = dense(model, x, y, "cross_entropy", ("grouped.weight", "grouped.bias"))
    oracles = {name: dense(model, x, y, "cross_entropy", own) for name, own in names.items()}
    for group in range(2):
        own = [*range(12 * group, 12 * group + 12), *range(24 + 2 * group, 26 + 2 * group)]
        oracles[f"grouped[{group}]"] = grouped[own][:, own]
    assert rows.keys() == oracles.keys()
    for name, truth in {**oracles, "": dense(model, x, y, "cross_entropy", trained)}.items():
        found = rows.get(name, whole)
        assert found.top_converged, name
        assert found.top_eigenvalue == pytest.approx(float(torch.linalg.eigvalsh(truth)[-1]), rel=1e-8), name
        assert found.top_residual is not None
        assert found.top_residual <= 2e-8 * found.top_eigenvalue
        assert found.trace == pytest.approx(float(truth.trace()), rel=0.25), name
    assert whole.kronecker_trace == pytest.approx(sum(row.kronecker_trace for row in rows.values()))


def test_the_largest_eigenvalue_of_a_model_is_unknown_where_a_layers_is() -> None:
    found = CrossChecked(samples={0: [1.0, 2.0], 1: [3.0, 5.0]}, searches={}, whole=None)
    first = found.of_layer(0, kronecker_trace=1.0, spectral_norm=0.5)
    both = found.of_model([first, found.of_layer(1, kronecker_trace=4.0, spectral_norm=0.25)])
    assert both is not None
    assert (both.kronecker_spectral_norm, both.kronecker_trace, both.trace) == (0.5, 5.0, 5.5)
    # a head of which only the diagonal fits may well have the largest of all
    partly = found.of_model([first, found.of_layer(1, kronecker_trace=4.0, spectral_norm=None)])
    assert partly is not None
    assert (partly.kronecker_spectral_norm, partly.kronecker_trace) == (None, 5.0)


def test_a_tied_head_is_one_block() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.inner(self.table(ids))))

    torch.manual_seed(5)
    model = Tied().double()
    x, y = torch.randint(0, 5, (6, 4)), torch.randint(0, 5, (6, 4))
    rows, _ = checks(workspace(model, [(x, y)], "masked_lm", fisher="empirical"), cross_check_iterations=40)
    names = {"table": ("table.weight", "head.bias"), "inner": ("inner.weight", "inner.bias")}
    assert rows.keys() == names.keys()
    for name, own in names.items():
        truth = torch.linalg.eigvalsh(dense(model, x, y, "cross_entropy", own))
        assert rows[name].top_eigenvalue == pytest.approx(float(truth[-1]), rel=1e-8)


@pytest.mark.part(of=2, law="the exact matrix is that of plain autograd")
def test_batches_do_not_matter_and_the_order_of_slices_neither() -> None:
    model, x, y = attending()
    several = [
        checks(workspace(model, [(x, y)], "classification", batch_size=size), cross_check_probes=3)[1]
        for size in (7, 2)
    ]
    for other in several[1:]:
        assert other.trace == pytest.approx(several[0].trace, rel=EXACT)
        assert other.top_eigenvalue == pytest.approx(several[0].top_eigenvalue, rel=1e-8)


def test_only_what_entered_the_factors_enters_with_its_weight() -> None:
    model, x, y = perceptron("cross_entropy")
    options = {"batch_size": 3, "update_freq": 2, "ema_decay": 0.5}
    _, found = checks(workspace(model, [(x, y)], "classification", **options), cross_check_iterations=60)
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    first, last = (dense(model, x[part], y[part], "cross_entropy", names) for part in (slice(0, 3), slice(6, 9)))
    truth = (0.5 * first + last) / 1.5
    assert found.top_eigenvalue == pytest.approx(float(torch.linalg.eigvalsh(truth)[-1]), rel=1e-8)


@pytest.mark.part(of=2, law="the exact matrix is that of plain autograd")
def test_weights_ignored_targets_and_smoothing_weigh_as_in_the_factors() -> None:
    model, x, y = perceptron("cross_entropy")
    y[4] = -100
    space = workspace(model, [(x, y)], "classification")
    assert space.inputs.task is not None
    space.inputs.task = replace(space.inputs.task, class_weights=(1.0, 3.0, 0.5), label_smoothing=0.1)
    rows, _ = checks(space, cross_check_probes=1, cross_check_iterations=40)
    head, whole = rows["2"], collect_or_read(space)
    # the only loss term of each example: K-FAC's A of the last layer aside, its trace is the block's own
    exact = {layer.name: layer.exact_trace for layer in whole.layers}
    space_trace = checks(space, cross_check_probes=300, cross_check_iterations=0)[0]
    for name, found in space_trace.items():
        assert found.trace_low is not None
        assert found.trace_high is not None
        assert found.trace_low * 0.98 < float(exact[name] or 0) < found.trace_high * 1.02
    assert head.top_eigenvalue is not None
    assert head.top_eigenvalue <= float(exact["2"] or 0)


@pytest.mark.part(of=2, law="the exact matrix is that of plain autograd")
def test_the_interval_covers_in_about_95_of_100_seeds() -> None:
    model, x, y = perceptron("cross_entropy")
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    truth = float(dense(model, x, y, "cross_entropy", names).trace())
    space = workspace(model, [(x, y)], "classification", batch_size=9)
    whole = collect_or_read(space)
    blocks = [block_of(model, each.name, each.parameters, each.parameter_count) for each in whole.layers]
    block = joined("all", [block for block in blocks if block is not None])
    found, seeds, probes = matrix(space, whole), 150, 12
    covered = 0
    with found.prepared():
        for seed in range(seeds):
            (vectors,) = zip(*trace_probes(found, [block], range(probes), seed), strict=True)
            low, high = interval([float(vector.square().sum()) for vector in vectors])
            assert low is not None
            assert high is not None
            covered += low <= truth <= high
    # five standard errors of a proportion of 0.95
    assert abs(covered / seeds - 0.95) < 5 * math.sqrt(0.95 * 0.05 / seeds)


@pytest.mark.parametrize("length", [3, 5, 40])
def test_a_short_basis_restarts_and_arrives(length: int) -> None:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))[0]
    values = torch.cat([0.8 ** torch.arange(30, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)])
    truth = basis @ torch.diag(values) @ basis.T
    search = Lanczos(start=torch.randn(40, dtype=torch.float64), length=length)
    while not search.converged:
        search.advance(truth @ search.vector)
        assert abs(search.value - values).min() <= search.residual + 1e-14
        assert search.products < 400
    assert search.value == pytest.approx(1.0, rel=1e-12)


def test_a_zero_matrix_and_a_single_number() -> None:
    nothing = Lanczos(start=torch.zeros(4), length=3)
    assert nothing.converged
    assert nothing.value == 0
    single = Lanczos(start=torch.tensor([-2.0]), length=3)
    single.advance(torch.tensor([3.0]) * single.vector)
    assert (single.converged, single.value, single.residual) == (True, 3.0, 0.0)


def test_memory_that_runs_out_halves_the_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = perceptron("cross_entropy")
    expected = checks(workspace(model, [(x, y)], "classification", batch_size=9), cross_check_probes=2)[1]
    heard: list[str] = []
    space = workspace(model, [(x, y)], "classification", batch_size=9)
    space.ports.log = lambda _, message: heard.append(message)
    real = exact_ggn_check.signs

    def scarce(outputs: Tensor, index: Tensor, seed: int, probe: int) -> Tensor:
        if outputs.shape[0] > 2 and probe == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(outputs, index, seed, probe)

    monkeypatch.setattr(exact_ggn_check, "signs", scarce)
    assert checks(space, cross_check_probes=2)[1].trace == pytest.approx(expected.trace, rel=EXACT)
    assert any("2 examples at a time" in message for message in heard)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("slope", [1.0, 2.0])
def test_a_model_whose_gradient_is_another_derivative_without_one_of_its_own_is_refused(
    beside: bool, slope: float
) -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return slope * gradient

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            # torch says nothing where another way leads around the function
            return Once.apply(x) + (x if beside else 0)

    model, (_, x, y) = Model().double(), perceptron("cross_entropy")
    space = workspace(model, [(x, y)], "classification")
    if slope != 1.0:
        with pytest.raises(ModelRefused, match="cannot be differentiated twice"):
            checks(space)
        return
    # its derivative forward is its gradient's, so that it needs no second one
    _, found = checks(space, cross_check_iterations=40)
    plain = nn.Sequential(nn.Linear(3, 3)).double()
    plain[0].load_state_dict({name: (2.0 if beside else 1.0) * own for name, own in model.layer.state_dict().items()})
    truth = dense(plain, x, y, "cross_entropy", ("0.weight", "0.bias")) * (4.0 if beside else 1.0)
    assert found.top_eigenvalue == pytest.approx(float(torch.linalg.eigvalsh(truth)[-1]), rel=1e-8)


def test_stored_factors_hold_no_model() -> None:
    model, x, y = perceptron("cross_entropy")
    space = workspace(model, [(x, y)], "classification")
    collect_or_read(space)
    space.inputs.model = None
    with pytest.raises(UsageError, match="hold no model"):
        checks(space)
