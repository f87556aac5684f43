"""A model that `fully_shard` has cut over a mesh of one GPU has the factors of the whole one."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kronoscope.local import Measurement, measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def _one_rank() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 33), nn.LayerNorm(33), nn.Linear(33, 5)).cuda()


def measured(model: nn.Module) -> Measurement:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(20, 12, generator=generator), torch.randint(0, 5, (20,), generator=generator)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 20, 8)]
    return measure(model, batches, task="classification", collection={"batch_size": 8, "ekfac": True})


@pytest.mark.usefixtures("_one_rank")
def test_a_sharded_model_on_a_gpu_has_the_factors_of_the_whole() -> None:
    whole, model = measured(net()), net()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=init_device_mesh("cuda", (1,)))
    found = measured(model)
    for row in whole.layers:
        own, one = found.factors[row.layer], whole.factors[row.layer]
        assert torch.equal(own.G, one.G)
        assert torch.equal(own.A, one.A)
    # a training step of FSDP's own afterwards
    model(torch.randn(4, 12, device="cuda")).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
