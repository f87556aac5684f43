"""NVIDIA's devices as the driver's library tells them, beside what torch sees."""

import pytest
import torch

from worker.devices import devices_of, nvidia_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_what_the_driver_lists_is_what_torch_computes_on() -> None:
    seen = nvidia_gpus(None)
    assert seen
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert uuid in {each.uuid.removeprefix("GPU-") for each in seen}
    free, total = torch.cuda.mem_get_info(0)
    mine = next(each for each in seen if each.uuid.endswith(uuid))
    assert mine.kind == "cuda"
    assert 0.9 * total <= mine.capacity_bytes <= 1.02 * total
    assert abs((mine.capacity_bytes - mine.used_bytes) - free) < 2**30
    assert devices_of("node", (), {})() != ()


def test_only_what_is_visible_is_offered() -> None:
    first = nvidia_gpus(None)[0]
    assert nvidia_gpus("") == nvidia_gpus("-1") == ()
    assert [each.uuid for each in nvidia_gpus("0")] == [first.uuid]
    assert [each.uuid for each in nvidia_gpus(first.uuid[:12])] == [first.uuid]
    assert [each.uuid for each in nvidia_gpus(f"{first.uuid},GPU-none,0")] == [first.uuid]
    assert devices_of("node", (), {"CUDA_VISIBLE_DEVICES": ""})()[0].kind == "host"
