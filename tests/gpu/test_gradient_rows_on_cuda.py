"""Gradient rows that a GPU brings, wherever they stand, are those of a CPU."""

from typing import Any

import pytest
import torch
from torch import nn

from catalog.analyses.capacity import CapacityParams
from catalog.requests.memory import Memory
from catalog.requests.woodbury import Woodbury
from engine.analyses.capacity import Capacity
from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.factors.low_rank import LowRank
from engine.workspace import Workspace
from tests.oracles import relative_error, workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on(device: str, woodbury: Woodbury, memory: Memory | None = None, **options: Any) -> Workspace:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    chunk = torch.randn(50, 16, generator=generator), torch.randint(0, 10, (50,), generator=generator)
    net = nn.Sequential(nn.Linear(16, 300), nn.LayerNorm(300), nn.Tanh(), nn.Linear(300, 10))
    space = workspace(net, [chunk], "classification", **({"batch_size": 16, "fisher": "mc"} | options))
    space.machine.device, space.options.woodbury, space.inputs.examples = torch.device(device), woodbury, 50
    space.options.memory = memory or Memory()
    assert space.inputs.model is not None
    space.inputs.model = space.inputs.model.to(device)
    return space


def same(here: FactorSet, there: FactorSet, tolerance: float) -> None:
    for layer in here.layers:
        left, right = here.load(layer.ordinal).G, there.load(layer.ordinal).G
        assert isinstance(left, LowRank)
        assert isinstance(right, LowRank)
        # the narrow last layer has more rows than outputs, which are made one in both
        assert right.rows.device.type == "cpu"
        assert relative_error(right.to_dense(torch.float64), left.to_dense(torch.float64)) < tolerance


@pytest.mark.parametrize("store_device", ["device", "host"])
@pytest.mark.parametrize("offload", ["on", "off"])
def test_rows_equal_those_of_the_cpu(store_device: Any, offload: Any) -> None:
    options = Woodbury(policy="all", store_device=store_device)
    there = collect_or_read(on("cuda", options, Memory(offload=offload), ema_decay=0.9))
    same(collect_or_read(on("cpu", options, ema_decay=0.9)), there, 1e-11)


@pytest.mark.parametrize("store_device", ["device", "host"])
def test_rows_in_sixteen_bits_reach_the_host(store_device: Any) -> None:
    options = Woodbury(policy="all", dtype="fp16", store_device=store_device)
    same(collect_or_read(on("cpu", options)), collect_or_read(on("cuda", options)), 1e-3)


def test_arithmetic_on_the_device_gives_the_same_metrics() -> None:
    options = Woodbury(policy="all")
    rows = [list(Capacity(CapacityParams(), on(device, options)).rows()) for device in ("cpu", "cuda")]
    for left, right in zip(*rows, strict=True):
        assert right.record.branch == left.record.branch == "woodbury"
        assert right.metrics.trace == pytest.approx(left.metrics.trace, rel=1e-10)
        assert right.metrics.effective_dimension == pytest.approx(left.metrics.effective_dimension, rel=1e-9)
