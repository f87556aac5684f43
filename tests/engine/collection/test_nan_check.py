"""A number that is not finite is noticed at its batch, and its origin is named."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.analyses.factors import KeptFactors
from engine.collection.nan_check import CurrentBatch
from engine.errors import NonFiniteFactor, NonFiniteLoss, NonFiniteModel
from engine.factors.factor_set import FactorSet
from tests.oracles import collect, workspace


class Net(nn.Module):
    """Three layers, of which the middle one meets a logarithm of what may be negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.act = nn.Identity()
        self.double()

    def inner(self, h: Tensor) -> Tensor:
        return torch.tanh(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.middle(self.inner(self.first(x)))))


def data(examples: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(examples, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (examples,), generator=generator)


def measured(model: nn.Module, x: Tensor, y: Tensor, **options: object) -> FactorSet:
    return collect(model, [(x, y)], "classification", batch_size=8, **options)


def test_nan_between_two_modules_names_batch_examples_and_module() -> None:
    class Root(Net):
        def inner(self, h: Tensor) -> Tensor:
            return torch.sqrt(h + 50)

    x, y = data()
    x[21] = 1000.0  # the only example with features below −50
    with pytest.raises(NonFiniteLoss) as caught:
        measured(Root(), x, y)
    said = str(caught.value)
    assert caught.value.layer == "middle"
    assert "batch 2 (examples 20 to 21)" in said
    bad = int((Net().first(x[21:22]) < -50).sum())
    # one row with a NaN spoils its six outputs
    assert f"`middle` (Linear), 6 of 12, and {bad} such numbers entered it, made between modules" in said


def test_a_module_that_makes_them_is_named_with_their_count() -> None:
    class Root(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return torch.where(h.abs() > 50, torch.full_like(h, float("nan")), h)

    model = Net()
    model.act = Root()  # type: ignore[assignment]
    x, y = data()
    x[12] = 1000.0
    model.inner = lambda h: h  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLoss, match=r"`act` \(Root\), \d of 12, and what entered it is finite") as caught:
        measured(model, x, y)
    assert "batch 1 (examples 12 to 13)" in str(caught.value)
    assert caught.value.layer == "act"


def test_the_very_first_example_is_no_exception() -> None:
    """A dry run looks at it before any batch, and finds it first."""
    model = Net()
    model.last.weight.data[0] = 1e300
    x, y = data()
    x[0] = 1e200
    model.inner = lambda h: h  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLoss, match=r"batch 0 \(examples 0 to 1\); .* `last` \(Linear\), 1 of 6"):
        measured(model, x, y)


def test_nan_in_the_data_is_the_datas() -> None:
    x, y = data()
    x[33, 1] = float("nan")
    with pytest.raises(
        NonFiniteLoss, match=r"the data's inputs hold 1 NaN or infinite number in batch 4 \(examples 32 to 33"
    ):
        measured(Net(), x, y)


def test_squares_that_overflow_are_noticed_at_their_batch_not_at_the_end() -> None:
    x, y = data()
    batches_seen = []

    class Loud(Net):
        def forward(self, x: Tensor) -> Tensor:
            batches_seen.append(x.shape[0])
            loud = 1e25 * (x[:, :1].abs() > 100)
            return super().forward(x) + self.extra(loud * x.sign()) * 1e-30

        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(4, 3)

    x[17, 0] = 1000.0
    with pytest.raises(NonFiniteFactor) as caught:
        measured(Loud().float(), x.float(), y, fisher="mc", dtype="float32", self_check="growing")
    said = str(caught.value)
    assert caught.value.layer == "extra"
    assert (
        "`extra`: 4 of the 5 moments on the diagonal of A are NaN or infinite after batch 2 (examples 16 to 23)" in said
    )
    assert "float32" in said
    # dry runs are of fewer examples; then the first check and batches 0, 1 and 2: the other two were not waited for
    assert batches_seen.count(8) == 4


def test_a_gradient_that_is_not_finite_names_the_layer_next_to_it() -> None:
    class Root(Net):
        def inner(self, h: Tensor) -> Tensor:
            # the root's gradient at zero is infinite, and zero times that is NaN, though its value is zero
            return torch.tanh(h) + (h * 0).sqrt()

    x, y = data()
    with pytest.raises(NonFiniteFactor, match=r"layer `first`: \d of the 6 moments on the diagonal of G .* batch 0"):
        measured(Root(), x, y)


def test_looking_at_finite_sums_moves_no_number_to_the_host_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look a batch, whatever the number of layers: a device need not be waited for at each."""
    looks = []
    original = Tensor.__bool__

    def counted(self: Tensor) -> bool:
        looks.append(1)
        return original(self)

    counts = []
    require = CurrentBatch.require_finite

    def watched(self: CurrentBatch, statistics: object) -> None:
        before = len(looks)
        require(self, statistics)  # type: ignore[arg-type]
        counts.append(len(looks) - before)

    monkeypatch.setattr(Tensor, "__bool__", counted)
    monkeypatch.setattr(CurrentBatch, "require_finite", watched)
    x, y = data()
    measured(Net(), x, y)
    assert counts == [1] * 5


def test_minus_infinity_in_a_mask_is_no_fault() -> None:
    class Masked(Net):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x * torch.softmax(mask, -1)) * (x[:, :1] * 1e300)

    x, y = data()
    x[9, 0] = 1e300
    mask = torch.zeros_like(x)
    mask[:, 1] = -torch.inf
    with pytest.raises(
        NonFiniteLoss, match=r"first module to put out such numbers is the model itself \(Masked\), 3 of 6"
    ):
        collect(Masked(), [((x, mask), y)], "classification", batch_size=8)


class Causal(nn.Module):
    """Attention with a causal mask, that a buffer keeps or every call makes anew."""

    mask: Tensor

    def __init__(self, kept: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.v, self.h = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.kept = kept
        self.register_buffer("mask", self.made() if kept else torch.zeros(1))
        self.register_buffer("best", torch.tensor(float("inf")))

    def made(self) -> Tensor:
        return torch.full((7, 7), -torch.inf).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ x.mT + (self.mask if self.kept else self.made())
        mixed: Tensor = self.h((scores.softmax(-1) @ self.v(x)).mean(1))
        return mixed


def test_infinities_that_a_buffer_keeps_are_no_fault() -> None:
    x, y = torch.randn(12, 7, 6), torch.randint(5, (12,))
    found = [collect(Causal(kept), [(x, y)], "classification", batch_size=4) for kept in (True, False)]
    assert found[0].declared == ()
    assert [each.exact_trace for each in found[0].layers] == [each.exact_trace for each in found[1].layers]


def test_nan_in_a_buffer_is_one() -> None:
    model = Causal(kept=True)
    model.best.fill_(float("nan"))
    with pytest.raises(NonFiniteModel, match="`best` holds 1 NaN of 1; mend the checkpoint"):
        collect(model, [(torch.randn(4, 7, 6), torch.randint(5, (4,)))], "classification")


@pytest.mark.parametrize(
    ("scale", "dtype", "told"), [(1e-21, "float32", 1), (1e-12, "float32", 0), (1e-21, "float64", 0)]
)
def test_moments_below_float32_are_told(scale: float, dtype: str, told: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 3))
    x, y = scale * torch.randn(16, 6, dtype=torch.float64), torch.randint(3, (16,))
    made = workspace(model, [(x, y)], "classification", dtype=dtype, fisher="type2")
    notices: list[str] = []
    made.ports.notice = notices.append
    list(KeptFactors(None, made).rows())
    assert len([each for each in notices if "layer `0`: the moments of A average" in each]) == told
    assert all("collection.dtype: float64" in each for each in notices)


class Saturated(nn.Module):
    """Gradients of 1e-26, whose squares float32 has none of, and a layer whose gradients are zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.idle, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.zeros(4))
        self.head.bias.data = torch.tensor([60.0, 0.0, 0.0])

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.head((self.body(x) + self.shift + 0 * self.idle(x)).tanh())
        return mixed


@pytest.mark.parametrize("exact_trace", [True, False])
def test_moments_of_gradients_that_float32_has_lost_altogether_are_noticed(exact_trace: bool) -> None:
    x, y = torch.randn(16, 6), torch.zeros(16, dtype=torch.long)
    options: dict[str, Any] = {"dtype": "float32", "fisher": "empirical", "batch_size": 5}
    made = workspace(Saturated(), [(x, y)], "classification", exact_trace=exact_trace, **options)
    notices = list[str]()
    made.ports.notice = notices.append
    rows = {row.layer: row for row in KeptFactors(None, made).rows()}
    lost = {"body", "head", "shift"}
    assert {name for name, row in rows.items() if row.status == "zero_curvature"} == {*lost, "idle"}
    said = {name for name in rows if any(f"layer `{name}`: the moments of G average 0" in each for each in notices)}
    assert said == lost


def test_trainable_tensors_that_no_parameter_lists_are_told() -> None:
    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.h = nn.Linear(4, 6), nn.Linear(6, 3)
            self.hidden, self.w = [nn.Linear(6, 6)], torch.randn(6, 6, requires_grad=True)
            self.tables = {"shift": torch.zeros(6, requires_grad=True), "fixed": torch.zeros(6), "same": self.a}

        def forward(self, x: Tensor) -> Tensor:
            mixed: Tensor = self.h((self.hidden[0](self.a(x)) @ self.w + self.tables["shift"]).tanh())
            return mixed

    x, y = data()
    made = workspace(Hiding(), [(x.float(), y)], "classification")
    notices: list[str] = []
    made.ports.notice = notices.append
    covered = {row.layer for row in KeptFactors(None, made).rows()}
    assert covered == {"a", "h"}
    (told,) = notices
    assert told.startswith("`hidden[0].weight`, `hidden[0].bias`, `w` and 1 more of the model require gradients")
