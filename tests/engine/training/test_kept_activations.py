"""Bytes that autograd keeps: on paper, from the backbones' table, and in a real pass."""

import pytest
import torch
from torch import Tensor, nn

from engine.fewshot.backbones import Backbone, make_backbone
from engine.training.ways import kept_activations

MIB = 2**20
TABLE = {
    ("Conv4", "imagenet", 84): 6.35,
    ("Conv4", "imagenet", 224): 45.27,
    ("Conv6", "imagenet", 84): 6.38,
    ("Conv6", "imagenet", 224): 45.51,
    ("ResNet18", "imagenet", 84): 3.13,
    ("ResNet18", "imagenet", 224): 21.15,
    ("ResNet34", "imagenet", 84): 4.67,
    ("ResNet34", "imagenet", 224): 30.72,
    ("ResNet18", "feti", 84): 7.82,
    ("ResNet18", "feti", 224): 54.77,
    ("ResNet34", "feti", 84): 13.36,
    ("ResNet34", "feti", 224): 92.84,
}
"""MiB of an image in float32, counted on paper: inputs, outputs of convolutions and ReLUs, 12 bytes a pooled number."""


def backbone(name: str, stem: str = "imagenet", device: str = "meta") -> Backbone:
    with torch.device(device):
        return make_backbone(name, stem=stem, pool="flatten")  # type: ignore[arg-type]


def packed_in_a_pass(model: nn.Module, images: Tensor) -> int:
    """Bytes of the storages that a real pass packs, told apart by their addresses."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        features = model(images)
    features.sum().backward()
    return sum(each.untyped_storage().nbytes() for address, each in held.items() if address not in own)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(("name", "stem", "size"), TABLE)
def test_an_image_keeps_the_bytes_of_the_table(name: str, stem: str, size: int) -> None:
    kept = kept_activations(backbone(name, stem), (3, size, size))

    assert kept.example_bytes / MIB == pytest.approx(TABLE[name, stem, size], rel=0.02)


def test_a_block_keeps_what_is_counted_on_paper() -> None:
    with torch.device("meta"):
        block = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    kept = kept_activations(block, (3, 8, 8))

    # the input, outputs of convolution and ReLU in float32; the places of the pooled numbers in int64
    assert kept.example_bytes == 4 * (3 * 64 + 4 * 64 + 4 * 64) + 8 * 4 * 16
    # mean and inverse deviation of each channel
    assert kept.fixed_bytes == 4 * 2 * 4


@pytest.mark.parametrize(("name", "size"), [("Conv4", 32), ("ResNet18", 64)])
def test_a_real_pass_packs_as_much(name: str, size: int) -> None:
    packed = packed_in_a_pass(backbone(name, device="cpu"), torch.randn(3, 3, size, size))

    assert kept_activations(backbone(name), (3, size, size)).of(3) == pytest.approx(packed, rel=0.02)
