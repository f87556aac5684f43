"""Padded channels: blocks of 16 of what convolutions read and write, by hand."""

import pytest
import torch

from engine.fewshot.backbones import make_backbone
from engine.training.ways import padded_bytes


@pytest.mark.parametrize(
    ("name", "width", "channels", "size", "numbers"),
    [
        # the first convolution writes one channel of 224×224, which is padded to 16
        ("Conv4", 1, 3, 224, 16 * 224 * 224),
        ("Conv4", 20, 3, 84, 32 * 84 * 84),
        # the image is read as it is, whatever channels it has
        ("Conv4", 16, 5, 32, 0),
        ("Conv4", 64, 3, 84, 0),
        ("ResNet18", 64, 3, 84, 0),
    ],
)
def test_only_channels_that_fill_no_block_are_padded(
    name: str, width: int, channels: int, size: int, numbers: int
) -> None:
    with torch.device("meta"):
        model = make_backbone(name, width=width, channels=channels)
    assert padded_bytes(model, (channels, size, size), 105) == 105 * numbers * 4
    assert model.training


def test_what_a_later_convolution_reads_is_padded_too() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 1), torch.nn.ReLU(), torch.nn.Conv2d(16, 3, 1),
                                    torch.nn.Conv2d(3, 5, 1))  # fmt: skip
    assert padded_bytes(model, (16, 7, 6), 2) == 2 * (16 + 16) * 7 * 6 * 4
