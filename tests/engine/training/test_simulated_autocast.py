"""Dtypes under a simulated autocast, beside those of torch's own on the CPU."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.training.mixed_precision import SimulatedAutocast


def dtypes_of(device: str) -> list[torch.dtype]:
    """Dtypes of what a convolutional net, attention and a loss give on a device."""
    with torch.device(device):
        conv, norm, linear = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4)
        images, labels = torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    autocast = SimulatedAutocast(torch.bfloat16) if device == "meta" else torch.autocast(device, torch.bfloat16)
    with autocast:
        found: list[Tensor] = [conv(images)]
        found.append(norm(found[-1]))
        found.append(functional.relu(found[-1]).mean((2, 3)))
        found.append(linear(found[-1]))
        found.append(found[-1] @ found[-2].mT)
        found.append(torch.einsum("ij,kj->ik", images[:, 0, 0], images[:, 0, 1]))
        found.append(found[3] + images[:, 0, 0, :4])
        found.append(functional.cross_entropy(found[3], labels))
    return [each.dtype for each in found]


def test_dtypes_are_those_of_autocast() -> None:
    assert dtypes_of("meta") == dtypes_of("cpu")


def test_a_weight_is_cast_once_and_its_gradient_arrives_at_full_width() -> None:
    linear = nn.Linear(4, 4, device="meta")
    with SimulatedAutocast(torch.bfloat16) as autocast:
        assert SimulatedAutocast.is_active()
        (linear(torch.empty(2, 4, device="meta")) + linear(torch.empty(3, 4, device="meta"))[:2]).sum().backward()
        assert len(autocast._weights) == 2

    assert not SimulatedAutocast.is_active()
    assert not autocast._weights
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32


def test_what_is_not_of_32_bits_stays_as_it_is() -> None:
    with SimulatedAutocast(torch.float16):
        doubles = torch.empty(3, 3, dtype=torch.float64, device="meta")
        assert (doubles @ doubles).dtype == torch.float64
        narrow = torch.empty(3, 3, dtype=torch.float16, device="meta")
        assert narrow.softmax(-1).dtype == torch.float32
