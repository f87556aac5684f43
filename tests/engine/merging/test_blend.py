"""A moving average of operators is that of their dense factors, whatever form each has."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import UsageError
from engine.factors.kronecker_factors import Factors
from engine.layers.layer import Form
from kronoscope.local import Measurement, measure, operator


class Tied(nn.Module):
    """A head that is its table's weight, a norm, a convolution of two groups, and two layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 4)
        self.norm = nn.LayerNorm(4)
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mix = nn.Conv1d(4, 4, 1, groups=2)
        self.head = nn.Linear(4, 30, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        x = torch.tanh(self.q(x)) * self.k(x)
        return self.head(self.mix(x.transpose(1, 2)).mean(2))


def measured(seed: int, woodbury: Mapping[str, Any] | None = None, examples: int = 6) -> Measurement:
    torch.manual_seed(0)
    model = Tied()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 30, (examples, 3), generator=generator)
    y = torch.randint(0, 30, (examples,), generator=generator)
    collection = {"dtype": "float64", "fisher": "mc", "self_check": "off"}
    return measure(
        model, [(ids, y)], task="classification", kinds=["factors"], collection=collection, woodbury=woodbury
    )


def dense(factors: Factors) -> tuple[Tensor, Tensor]:
    """A and G as matrices."""
    sides = factors.widened_A.double(), factors.widened_G.double()
    return tuple(each.diag() if each.ndim == 1 else each for each in sides)  # type: ignore[return-value] # two


def averages(measurements: list[Measurement], decay: float) -> dict[str, tuple[Form, Tensor]]:
    """Each layer's G ⊗ A, of A and G averaged by themselves."""
    found: dict[str, tuple[Form, Tensor]] = {}
    for facts in measurements[0].factors.collected.layers:
        sides: tuple[Tensor, Tensor] | None = None
        for each in measurements:
            own = dense(each.factors.collected.load(facts.ordinal))
            sides = own if sides is None else tuple(  # type: ignore[assignment] # two
                decay * old + (1 - decay) * new for old, new in zip(sides, own, strict=True)
            )  # fmt: skip
        assert sides is not None
        found[facts.name] = facts.form, torch.kron(sides[1], sides[0])
    return found


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize("woodbury", [None, {"policy": "all"}, {"policy": "dense"}], ids=["auto", "all", "dense"])
def test_three_refreshes_are_the_dense_average(woodbury: Mapping[str, Any] | None) -> None:
    measurements = [measured(seed, woodbury) for seed in (1, 2, 3)]
    average = operator(measurements[0])
    for each in measurements[1:]:
        average = average.merged(operator(each), 0.7)
    for name, (_, truth) in averages(measurements, 0.7).items():
        if name in ("table", "head"):
            # of head and table the nearest product is sought anew, so that the sum is what is averaged
            continue
        own = average.layer(name)
        columns = torch.eye(truth.shape[0], dtype=torch.float64).view(own.G.content.size, own.A.content.size, -1)
        found = own.apply(columns.transpose(1, 2).contiguous(), 1.0).transpose(1, 2).reshape(truth.shape)
        assert float((found - truth).norm()) <= 1e-12 * float(truth.norm()), name


def test_a_product_of_head_and_table_keeps_its_trace() -> None:
    first, second = measured(1), measured(2)
    whole = operator(first).merged(operator(second), 0.25)
    name = next(facts.name for facts in first.factors.collected.layers if facts.form == "kronecker" and
                "nearest Kronecker product" in facts.why)  # fmt: skip
    traces = []
    for each in (first, second):
        (facts,) = [facts for facts in each.factors.collected.layers if facts.name == name]
        factors = each.factors.collected.load(facts.ordinal)
        assert factors.tied is not None
        assert factors.head_diagonal is not None
        traces.append(
            (
                factors.head_diagonal.sum(),
                factors.tied.A.trace(),
                factors.tied.counts.sum(),
                factors.tied.moments.trace(),
            )
        )
    G, A, D, H = (0.25 * one + 0.75 * other for one, other in zip(*traces, strict=True))
    assert whole.layer(name).trace(1.0) == pytest.approx(float(G * A + D * H), rel=1e-12)


def test_rows_of_a_long_average_are_bounded() -> None:
    average = operator(measured(0, {"policy": "all", "softmax_head": False}))
    for seed in range(1, 9):
        average = average.merged(operator(measured(seed, {"policy": "all", "softmax_head": False})), 0.5)
    assert all(
        len(own.G.content.tensors()["gradient_rows"]) <= own.G.content.size for own in map(average.layer, ("q", "k"))
    )  # type: ignore[union-attr] # rows


def test_weights_of_zero_and_one_are_the_operators_themselves() -> None:
    first, second = operator(measured(1)), operator(measured(2))
    vector = torch.randn(first.shape[0], dtype=torch.float64)
    for decay, truth in ((1.0, first @ vector), (0.0, second @ vector)):
        assert float((first.merged(second, decay) @ vector - truth).norm()) <= 1e-12 * float(truth.norm())


def test_what_cannot_be_averaged_is_refused() -> None:
    first, second = operator(measured(1)), operator(measured(2))
    with pytest.raises(UsageError, match=r"`decay` must be from 0 to 1.*got 1\.5"):
        first.merged(second, 1.5)
    with pytest.raises(UsageError, match="must be of the same layers"):
        first.merged(second.restricted(["q"]), 0.5)
    with pytest.raises(UsageError, match="merge first"):
        first.inverse().merged(second, 0.5)
