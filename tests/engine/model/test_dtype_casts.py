"""Own casts: a cast to what a model is kept in does nothing, in whatever precision it is measured."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.errors import ModelRefused
from engine.estimate import plan_job
from engine.model import dtype_casts
from engine.model.dtype_casts import OwnCasts, casts_of, note_conversion, settle_casts
from tests.oracles import collect, curvature_traces, relative_error, require_traces, workspace

EXACT = 1e-10
Use = Callable[["Casting", Tensor], Tensor]


class Casting(nn.Module):
    """A net whose hidden tensor is cast as a test says, before it enters the next layer."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.LayerNorm(4)
        self.p = nn.Parameter(torch.randn(4))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self, torch.tanh(self.first(x))).mean(1))


def attended(h: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(weights, h)


def autocast_within(model: Casting, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=model.first.weight.dtype == torch.float64):
        inner = model.inner(h)
    return model.norm(inner.float()) * model.p


NOTHING: list[tuple[Use, Use]] = [
    (lambda model, h: model.inner(h.float()), lambda model, h: model.inner(h)),
    (lambda model, h: model.inner(h.to(torch.float32)) * model.p.float(), lambda model, h: model.inner(h) * model.p),
    (lambda model, h: model.conv(h.mT.type(torch.float32)).mT, lambda model, h: model.conv(h.mT).mT),
    (lambda model, h: model.norm(h.to(dtype=torch.float32)), lambda model, h: model.norm(h)),
    (
        lambda model, h: model.inner(attended(h, torch.softmax(h @ h.mT, -1, dtype=torch.float32))),
        lambda model, h: model.inner(attended(h, torch.softmax(h @ h.mT, -1))),
    ),
    (
        lambda model, h: torch.bmm(torch.eye(5, dtype=torch.float32).expand(h.shape[0], 5, 5), model.inner(h)),
        lambda model, h: model.inner(h),
    ),
    (autocast_within, lambda model, h: model.norm(model.inner(h)) * model.p),
]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    # numbers that sixteen bits hold
    x = torch.randn(7, 5, 4, generator=generator).to(torch.bfloat16).float()
    return x, torch.randint(0, 3, (7,), generator=generator)


def require_twin(model: nn.Module, twin: nn.Module) -> None:
    """A, G and the exact traces of ``model`` are those of a ``twin`` in float64 that casts nothing."""
    x, y = data()
    found = collect(model, [(x, y)], "classification", exact_trace=True)
    wide = copy.deepcopy(twin).double()
    truth = collect(wide, [(x.double(), y)], "classification", exact_trace=True)
    traces = curvature_traces(wide, x.double(), y, "cross_entropy")
    assert [layer.name for layer in found.layers] == [layer.name for layer in truth.layers]
    for left, right in zip(found.layers, truth.layers, strict=True):
        one, other = found.load(left.ordinal), truth.load(right.ordinal)
        assert relative_error(one.A, other.A) < EXACT
        assert relative_error(one.G, other.G) < EXACT
        own = sum(float(traces[name].sum()) for name in left.parameters) / 7
        assert left.exact_trace == pytest.approx(own, rel=EXACT)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize(("use", "without"), NOTHING)
def test_casts_to_what_a_float32_model_is_kept_in_do_nothing_in_float64(use: Use, without: Use) -> None:
    model = Casting(use)
    require_twin(model, Casting(without))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("method", ["to", "bfloat16", "type"])
def test_casts_to_what_a_bfloat16_model_is_kept_in_do_nothing_in_float64(method: str) -> None:
    def use(model: Casting, h: Tensor) -> Tensor:
        given = () if method == "bfloat16" else (torch.bfloat16,)
        return model.inner(getattr(h, method)(*given))

    model, twin = Casting(use).to(torch.bfloat16), Casting(lambda model, h: model.inner(h)).to(torch.bfloat16)
    require_twin(model, twin)


def test_a_cast_that_narrows_in_the_model_itself_still_narrows() -> None:
    """Each example alone: the gradients of the loss, of a twin in float64 that rounds at the same place."""
    model = Casting(lambda own, h: own.inner(h.to(torch.bfloat16).float()))
    twin = Casting(lambda own, h: own.inner(h.to(torch.bfloat16).double())).double()
    x, y = data()
    found = collect(model, [(x, y)], "classification", fisher="empirical")
    truth = torch.zeros(4, 4, dtype=torch.float64)
    for example, target in zip(x.double(), y, strict=True):
        loss = nn.functional.cross_entropy(twin(example[None]), target[None])
        (gradient,) = torch.autograd.grad(loss, [twin.first.bias])
        rows = gradient[:, None]
        truth += rows @ rows.T / 7
    whole = collect(model, [(x, y)], "classification", fisher="empirical", sharing="reduce")
    assert relative_error(whole.load(0).G, truth) < EXACT
    entered = twin.first(x.double()).tanh().to(torch.bfloat16).double().reshape(-1, 4)
    ones = torch.cat([entered, entered.new_ones(35, 1)], 1).detach()
    (inner,) = (layer.ordinal for layer in found.layers if layer.name == "inner")
    assert relative_error(found.load(inner).A, ones.T @ ones / 35) < EXACT


def test_what_needs_no_help_is_run_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def entered(_: OwnCasts) -> None:
        raise AssertionError

    monkeypatch.setattr(dtype_casts.OwnCasts, "__enter__", entered)
    x, y = data()
    for use in (lambda model, h: model.inner(h), lambda model, h: model.inner(h.float().to(model.p.dtype))):
        # the self-check runs what narrows in float64
        collect(Casting(use), [(x, y)], "classification", self_check="off")
    # in the model's own precision nothing is converted, and its own mistakes are its own
    with pytest.raises(ModelRefused, match="same dtype"):
        collect(Casting(lambda model, h: model.inner(h.bfloat16())), [(x, y)], "classification", dtype="float32")


def test_a_plan_from_shapes_alone_casts_as_the_job_does() -> None:
    x, y = data()
    with torch.device("meta"):
        model = Casting(NOTHING[0][0])
    space = workspace(model, [(x, y)], "classification")
    space.inputs.examples = 7
    assert plan_job(space).terms


def test_another_precision_is_settled_anew() -> None:
    model = Casting(NOTHING[0][0])

    def fail() -> None:
        raise RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Double")

    note_conversion(model, frozenset({torch.float32}), torch.float64)
    settle_casts(model, lambda: None)
    assert not isinstance(casts_of(model), OwnCasts)
    settle_casts(model, fail)
    assert isinstance(casts_of(model), OwnCasts)
    note_conversion(model, frozenset({torch.float32}), torch.float64)
    assert isinstance(casts_of(model), OwnCasts)
    note_conversion(model, frozenset(), torch.float32)
    assert not isinstance(casts_of(model), OwnCasts)


@pytest.mark.part(of=16, by=("reentrant",))
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_casts_do_nothing_where_a_checkpoint_runs_them_again(fisher: str, *, reentrant: bool) -> None:
    def recomputed(model: Casting, h: Tensor) -> Tensor:
        def inside(h: Tensor) -> Tensor:
            return model.norm(model.inner(torch.tanh(h).float()).to(torch.float32)) * model.p.float()

        return h + checkpoint(inside, h, use_reentrant=reentrant)

    model = Casting(recomputed)
    twin = Casting(lambda model, h: h + model.norm(model.inner(torch.tanh(h))) * model.p).double()
    x, y = data()
    found = collect(model, [(x, y)], "classification", fisher=fisher, exact_trace=True, batch_size=3)
    truth = collect(twin, [(x.double(), y)], "classification", fisher=fisher, exact_trace=True, batch_size=3)
    assert [layer.name for layer in found.layers] == [layer.name for layer in truth.layers]
    for left, right in zip(found.layers, truth.layers, strict=True):
        one, other = found.load(left.ordinal), truth.load(right.ordinal)
        assert relative_error(one.A, other.A) < EXACT
        assert relative_error(one.G, other.G) < EXACT
    if fisher == "empirical":
        # each example alone, in plain autograd
        losses = (
            nn.functional.cross_entropy(twin(example[None]), target[None])
            for example, target in zip(x.double(), y, strict=True)
        )
        require_traces(twin, found, losses, 7)
