"""Models whose examples mix and cannot be run alone: held against the same example beside others."""

import pytest
import torch
from torch import Tensor, nn

from tests.oracles import collect, gradient_squares


class Untracked(nn.Module):
    """Statistics of the batch in evaluation too, which a batch of one example has none of; one layer beside them."""

    def __init__(self, *, mixing: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5, track_running_stats=False, affine=False)
        self.second = nn.Linear(5, 4)
        self.side = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.mixing = mixing
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            raise ValueError("more than one example is needed")
        hidden = self.first(x).tanh()
        hidden = self.second(self.norm(hidden) if self.mixing else hidden)
        return self.head(hidden.tanh()) + self.side(x)[:, :3]


def data(examples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(examples, 4, dtype=torch.float64), torch.arange(examples) % 3


@pytest.mark.part(of=16, by=("batch_size",))
@pytest.mark.parametrize("batch_size", [2, 4])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_batch_statistics_are_seen_where_no_example_runs_alone(batch_size: int, dtype: str) -> None:
    whole = collect(
        Untracked(mixing=True), [data(8)], "classification", fisher="empirical", batch_size=batch_size, dtype=dtype
    )
    assert [layer.name for layer in whole.layers] == ["side"]
    assert {row.name: row.reason for row in whole.declared} == dict.fromkeys(
        ["first", "second", "head"], "examples_mix"
    )


@pytest.mark.parametrize("batch_size", [2, 4])
def test_a_model_that_refuses_one_example_alone_is_covered(batch_size: int) -> None:
    model, (x, y) = Untracked(mixing=False), data(8)
    whole = collect(model, [(x, y)], "classification", fisher="empirical", batch_size=batch_size)
    assert whole.declared == ()

    class Alone(Untracked):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(self.first(x).tanh()).tanh()) + self.side(x)[:, :3]

    alone = Alone(mixing=False)
    alone.load_state_dict(model.state_dict())
    truth = gradient_squares(alone, x, y, "cross_entropy")
    for layer in whole.layers:
        expected = sum(float(truth[name].sum()) for name in layer.parameters) / 8
        assert layer.exact_trace == pytest.approx(expected, rel=1e-10), layer.name
