"""The exact curvature is the same on a GPU as on a CPU, fused attention or not."""

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.capacity import CapacityParams
from catalog.analyses.capacity_metrics import CapacityMetrics, CrossCheck
from engine.analyses.capacity import Capacity
from tests.oracles import workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.packed, self.mix = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Conv1d(8, 8, 3, padding=1)
        self.recurrent, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        query, key, value = self.packed(self.table(ids)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return self.head(self.recurrent(self.mix(mixed.transpose(1, 2)).transpose(1, 2))[0][:, -1])


def check(device: str) -> list[CrossCheck]:
    torch.manual_seed(0)
    model, ids, y = Attending(), torch.randint(0, 9, (12, 5)), torch.randint(0, 3, (12,))
    space = workspace(model.to(device), [(ids, y)], "classification", fisher="mc")
    space.machine.device = torch.device(device)
    rows = Capacity(CapacityParams(cross_check="ggn", cross_check_probes=4), space).rows()
    metrics = [row.metrics for row in rows]
    return [each.cross_check for each in metrics if isinstance(each, CapacityMetrics) and each.cross_check]


def test_traces_and_eigenvalues_equal_those_of_the_cpu() -> None:
    here, there = check("cpu"), check("cuda")
    assert len(here) == len(there) > 0
    for left, right in zip(here, there, strict=True):
        assert right.trace == pytest.approx(left.trace, rel=1e-9)
        assert right.top_eigenvalue == pytest.approx(left.top_eigenvalue, rel=1e-9)
