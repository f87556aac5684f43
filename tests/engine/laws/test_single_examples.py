"""Batches of one example: the layers covered, and their numbers, are those of larger batches."""

import pytest
import torch
from torch import Tensor, nn

from tests.oracles import collect, curvature_traces

T, WIDTH = 4, 6


class Distances(nn.Module):
    """Attention with a table of distances, looked up once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.table = nn.Embedding(2 * T - 1, 1)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        places = torch.arange(T)
        bias = self.table(places[:, None] - places[None] + T - 1).squeeze(-1)
        scores = (hidden @ hidden.transpose(1, 2) + bias).softmax(-1)
        logits: Tensor = self.head((scores @ hidden).mean(1))
        return logits


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_a_table_of_distances_is_covered(batch_size: int) -> None:
    torch.manual_seed(0)
    model = Distances().double()
    nn.init.normal_(model.table.weight)
    x, y = torch.randn(6, T, 5, dtype=torch.float64), torch.randint(0, 3, (6,))
    whole = collect(model, [(x, y)], "classification", min_coverage=1.0, batch_size=batch_size)
    traces = curvature_traces(model, x, y, "cross_entropy")
    for layer in whole.layers:
        truth = float(sum(traces[name].sum() for name in layer.parameters)) / len(x)
        assert layer.exact_trace == pytest.approx(truth, rel=1e-10), layer.name


def test_experts_that_no_example_alone_reaches_are_compared() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.experts = nn.Linear(5, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.router, self.head = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.stem(x).tanh()
            weight, chosen = self.router(hidden).softmax(-1).max(-1)
            out = torch.zeros_like(hidden)
            for place, expert in enumerate(self.experts):
                out[chosen == place] = expert(hidden[chosen == place])
            logits: Tensor = self.head((hidden + weight.unsqueeze(-1) * out).mean(1))
            return logits

    torch.manual_seed(0)
    x, y = torch.randn(6, T, 5, dtype=torch.float64), torch.randint(0, 3, (6,))
    model = Routed().double()
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([0.0, 0.0, -99.0]))  # an expert without rows
    whole = collect(model, [(x, y)], "classification", batch_size=4)
    assert "stem" in {layer.name for layer in whole.layers}
