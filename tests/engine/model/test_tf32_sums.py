"""TF32 in the products behind A and G: the error that it leaves there, and all that it leaves as it was."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.record import FieldError
from catalog.requests.collection import Collection
from catalog.requests.memory import Memory
from catalog.requests.woodbury import Woodbury
from engine.analyses.factors import KeptFactors
from engine.collect import collect_or_read
from engine.factors.factor_files import read_factors
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import digest
from engine.linalg import gram
from engine.model.mixed_precision import Precision, choose_precision
from engine.model.state.preserve_state import preserve_state, products_in_tf32
from engine.workspace import Workspace
from tests.engine.rounded_products import ROUNDINGS, cut, emulate
from tests.oracles import relative_error, workspace

ROUNDING = 2.0**-10
MATMUL: Any = torch.backends.cuda.matmul


def job(offload: Any = "auto", **options: Any) -> Workspace:
    torch.manual_seed(0)
    x, y = torch.randn(96, 70), torch.randint(0, 9, (96,))
    net = nn.Sequential(nn.Linear(70, 130), nn.Tanh(), nn.Linear(130, 9))
    given = {"fisher": "empirical", "dtype": "float32", "batch_size": 32} | options
    made = workspace(net, [(x, y)], "classification", **given)
    made.options.memory = Memory(offload=offload)
    made.options.kinds = ("factors",)
    return made


def sides(found: FactorSet) -> list[Tensor]:
    """A and G of each layer."""
    loaded = [found.load(layer.ordinal) for layer in found.layers]
    return [side for each in loaded for side in (each.A, each.G) if isinstance(side, Tensor)]


def oracle(made: Workspace, narrow: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """A and G of each layer by plain autograd: its float32 rows are narrowed, and multiplied in float64."""
    net: Any = made.inputs.model
    assert made.inputs.batches is not None
    ((x, y),) = made.inputs.batches()
    h = net[0](x)
    inside = net[1](h)
    out = net[2](inside)
    gradients = torch.autograd.grad(nn.functional.cross_entropy(out, y, reduction="sum"), (h, out))
    found = []
    for entered, left in zip((x, inside.detach()), gradients, strict=True):
        a, g = narrow(entered).double(), narrow(left).double()
        # the column of ones is beside the product: sums of rows and a count
        sums = entered.double().sum(0)[:, None]
        found.append(torch.cat([torch.cat([a.T @ a, sums], 1), torch.cat([sums.T, sums.new_full((1, 1), len(a))], 1)]))
        found.append(g.T @ g)
    return [each / len(x) for each in found]


@pytest.mark.parametrize("offload", ["off", "on"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_factors_are_those_of_rounded_rows(rounding: str, offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = emulate(monkeypatch, ROUNDINGS[rounding])
    exact, rounded = oracle(job(), lambda rows: rows), oracle(job(), ROUNDINGS[rounding])
    plain = sides(collect_or_read(job(offload)))
    assert not taken
    found = collect_or_read(job(offload, precision="tf32"))
    assert taken
    assert (found.accumulation_precision, found.accumulation_fallback) == ("tf32", None)
    assert not found.declared
    for own, ieee, truth, narrow in zip(sides(found), plain, exact, rounded, strict=True):
        error, predicted = relative_error(own.double(), truth), relative_error(narrow, truth)
        assert relative_error(own.double(), narrow) < predicted / 10
        assert 20 * relative_error(ieee.double(), truth) < error < 2.1 * ROUNDING
        # each entry, by the bound that docs/gpu.md names
        allowed = (2 * ROUNDING + ROUNDING**2 + 1e-5) * (truth.diagonal()[:, None] * truth.diagonal()).sqrt()
        assert bool(((own.double() - truth).abs() <= allowed).all())


def test_nothing_but_those_products_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = emulate(monkeypatch, cut)
    monkeypatch.setattr(gram, "_strips", lambda *_: 1)
    options: dict[str, Any] = {"fisher": "mc", "ekfac": True, "batch_variance": True}
    wide, narrow = (collect_or_read(job(**options, precision=precision)) for precision in ("ieee", "tf32"))
    # three batches of two layers, once for A and once for G: none of a check, of a correction or of a model
    assert len(taken) == 3 * 2 * 2
    for left, right in zip(wide.layers, narrow.layers, strict=True):
        for name in ("exact_trace", "trace_standard_error", "gradient_identity", "examples_checked", "positions"):
            assert getattr(left, name) == getattr(right, name)


def test_rows_that_are_kept_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, cut)
    kept = []
    for precision in ("ieee", "tf32"):
        made = job(precision=precision)
        made.options.woodbury = Woodbury(policy="all")
        found = collect_or_read(made)
        assert {layer.representation_G for layer in found.layers} == {"woodbury"}
        kept.append([digest(found.load(layer.ordinal).G) for layer in found.layers])
    assert kept[0] == kept[1]


def test_a_device_without_the_units_falls_back_and_says_so() -> None:
    truth = [digest(side) for side in sides(collect_or_read(job()))]
    said: list[str] = []
    made = job(precision="tf32")
    made.ports.log = lambda _, message: said.append(message)
    rows = [row.record for row in KeptFactors(None, made).rows() if row.record is not None]
    expected = ("ieee", "TF32 is for CUDA devices")
    assert {(record.accumulation_precision, record.accumulation_fallback) for record in rows} == {expected}
    assert [each for record in rows for each in (record.digest_A, record.digest_G)] == truth
    assert "`collection.precision: tf32` is not used: TF32 is for CUDA devices" in said
    again = read_factors(made.ports.artifacts)
    assert (again.accumulation_precision, again.accumulation_fallback) == expected


@pytest.mark.parametrize(
    ("present", "capability", "expected"),
    [
        (True, (8, 0), ("tf32", None)),
        (True, (9, 0), ("tf32", None)),
        (True, (7, 5), ("ieee", "this device has no TF32 units")),
        # planned for a machine that has one
        (False, (0, 0), ("tf32", None)),
    ],
)
def test_the_units_come_with_the_compute_capability(
    present: bool, capability: tuple[int, int], expected: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = choose_precision("off", torch.device("cuda"), "tf32")
    assert (found.sums, found.sums_fallback) == expected
    assert (found.sums_rounding > 0) == (found.sums == "tf32")
    assert choose_precision("off", torch.device("cuda")) == Precision()


def test_tf32_rounds_float32_only() -> None:
    with pytest.raises(FieldError, match=r"`dtype: float32`, or `precision: ieee`") as refused:
        Collection(precision="tf32", dtype="float64")
    assert refused.value.field == "precision"


@pytest.fixture
def switches() -> Iterator[dict[str, Any]]:
    """The switches of products, put back afterwards."""
    names = [name for name in ("allow_tf32", "fp32_precision") if hasattr(MATMUL, name)]
    before = {name: getattr(MATMUL, name) for name in names}
    yield before
    for name, value in before.items():
        setattr(MATMUL, name, value)


@pytest.mark.parametrize(("name", "on", "off"), [("allow_tf32", True, False), ("fp32_precision", "tf32", "ieee")])
@pytest.mark.parametrize("wide", [True, False])
def test_a_devices_products_take_tf32_inside_alone(
    name: str, on: Any, off: Any, wide: bool, switches: dict[str, Any]
) -> None:
    """Whichever interface the caller has used, and whatever it has set there."""
    assert name in switches
    setattr(MATMUL, name, off if wide else on)
    cudnn = torch.backends.cudnn.allow_tf32
    with preserve_state(nn.Linear(2, 2), torch.float32):
        assert getattr(MATMUL, name) == off
        for _ in range(2):
            with products_in_tf32():
                assert getattr(MATMUL, name) == on
            assert getattr(MATMUL, name) == off
    assert getattr(MATMUL, name) == (off if wide else on)
    assert torch.backends.cudnn.allow_tf32 == cudnn
