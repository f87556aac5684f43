"""Models of which every rank holds a part are refused by name."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from engine.errors import ModelRefused
from kronoscope.local import measure


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_a_sharded_model_is_refused_with_its_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ModelRefused, match=r"`0\.weight` is sharded over ranks"):
        measure(model, [(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))], task="classification")
