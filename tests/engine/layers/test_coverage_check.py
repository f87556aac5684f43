"""Covered + declared = trainable, each number once; and the share that a caller asks for."""

import re

import pytest
import torch
from torch import Tensor, nn

from catalog.record import FieldError
from catalog.requests.collection import Collection
from catalog.responses.coverage import remedy_of
from engine.collect import collect_or_read
from engine.errors import CoverageBroken, CoverageTooLow
from engine.layers import coverage
from engine.layers.coverage import Survey, survey_layers
from tests.oracles import collect, workspace


class Half(nn.Module):
    """A head of 36 numbers that is covered, and a table of 128 that is not: it writes to its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 4, max_norm=1.0)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x[:, -1], self.table(x[:, 0, 0].abs().long())], 1))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 5, 4, dtype=torch.float64, generator=generator), torch.randint(0, 4, (6,))


def test_too_little_coverage_fails_before_the_model_runs() -> None:
    model = Half().double()
    ran: list[bool] = []
    model.register_forward_pre_hook(lambda *_: ran.append(True))
    space = workspace(model, [data()], "classification", min_coverage=0.5)
    with pytest.raises(CoverageTooLow) as raised:
        collect_or_read(space)
    assert ran == []
    share = 36 / (36 + 32 * 4)
    for part in (
        f"{share:.2%} of the 164 ",
        "asks for 50.00%",
        "128 embedding_renormalised",
        "lower `min_coverage`",
        "freeze",
    ):
        assert part in raised.value.message
    assert raised.value.pointer == "/collection/min_coverage"
    assert collect(model, [data()], "classification", min_coverage=share).covered_parameters == 36


class Summing(nn.Module):
    """A layer that sees the sum of all examples, and one that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.ignored, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.ignored(x)
        return self.head((x + self.mixing(x.sum(0, keepdim=True)))[:, -1])


@pytest.mark.parametrize(
    ("wanted", "planned", "reason"), [(0.9, False, "batch_not_first"), (0.6, True, "examples_mix")]
)
def test_what_only_running_shows_fails_as_soon_as_it_is_shown(wanted: float, planned: bool, reason: str) -> None:
    plans: list[object] = []
    space = workspace(Summing().double(), [data()], "classification", min_coverage=wanted, self_check="growing")
    space.ports.announce_plan = plans.append
    with pytest.raises(CoverageTooLow, match=f"20 {reason}"):
        collect_or_read(space)
    assert bool(plans) is planned


class Left(nn.Module):
    """A branch that a draw takes or leaves for a whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x[:, -1]))
        return self.head(z + self.branch(z) if float(torch.rand(())) > 0.5 else z)


class Common(nn.Module):
    """Rows that examples have in common enter once."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows, places = torch.unique(x[:, -1], dim=0, return_inverse=True)
        return self.head(torch.tanh(self.branch(rows))[places])


@pytest.mark.parametrize("make", [Left, Common])
def test_rows_that_are_not_those_of_each_example_are_explained(make: type[nn.Module]) -> None:
    """No option is named that is in force already; and the caller's own generator decides nothing."""
    for seed in range(5):
        torch.manual_seed(seed)
        whole = collect(make().double(), [data()], "classification", sharing="expand")
        (row,) = whole.declared
        assert (row.name, row.reason) == ("branch", "batch_not_first")
        assert "not the rows of each" in row.why
        assert "collection." not in (remedy_of(row.reason) or "collection.")


def test_a_layer_that_only_a_later_batch_calls_is_no_reason_to_fail() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seldom, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.seldom(x) if float(x[0, 0, 0]) == 7 else x)[:, -1]

    x, y = data()
    # a whole batch goes there: no example decides for another
    x[4:, 0, 0] = 7
    assert collect(Routed().double(), [(x, y)], "classification", min_coverage=1.0).declared == ()


def test_a_frozen_part_is_none_of_the_share() -> None:
    model = Half().double()
    model.table.requires_grad_(False)
    whole = collect(model, [data()], "classification", min_coverage=1.0)
    assert (whole.trainable_parameters, whole.covered_parameters) == (36, 36)


def test_a_survey_that_loses_a_parameter_is_a_fault_that_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "survey", lambda model: Survey(treated=coverage_survey(model).treated, declared=()))
    with pytest.raises(CoverageBroken, match=re.escape("36 covered and 0 declared numbers are not the 164 trainable")):
        survey_layers(Half(), Collection())


coverage_survey = coverage.survey


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_outside_its_range_is_refused(share: float) -> None:
    with pytest.raises(FieldError, match="0 to 1"):
        Collection(min_coverage=share)
