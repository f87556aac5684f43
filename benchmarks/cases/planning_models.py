"""Six models at sizes at which memory counts, with their data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Data = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A model, its data, and how it is measured."""

    make: Callable[[], nn.Module]
    data: Callable[[], Data]
    task: str
    batch_size: int


def _digits_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


class _Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(entering, width, 3, stride, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(entering, width, 1, stride, bias=False) if stride > 1 or entering != width else None

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(inside)) + (x if self.around is None else self.around(x)))


def _digits_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 192, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192 * 16, 10),
    )  # fmt: skip


def _resnet18() -> nn.Module:
    widths = (32, 32, 64, 64, 128, 128, 160, 160)
    blocks = [
        _Block(before, after, 2 if after != before and place else 1)
        for place, (before, after) in enumerate(zip((32, *widths), widths, strict=False))
    ]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 10),
    )  # fmt: skip


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=3, n_head=4, n_embd=256, n_positions=128, vocab_size=2000)
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=256, intermediate_size=1024,
        vocab_size=1500, max_position_embeddings=128,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _minilm() -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=3, num_attention_heads=12, hidden_size=384, intermediate_size=1536, vocab_size=3000,
        max_position_embeddings=128,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)


def _images(count: int, *shape: int) -> Data:
    return [(torch.randn(count, *shape), torch.randint(0, 10, (count,)))]


def _tokens(count: int, length: int, vocabulary: int) -> Data:
    ids = torch.randint(0, vocabulary, (count, length))
    return [({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids)]


CASES = {
    "digits MLP": Case(_digits_mlp, lambda: _images(8192, 1, 8, 8), "classification", 8192),
    "digits CNN": Case(_digits_cnn, lambda: _images(2048, 1, 8, 8), "classification", 2048),
    "ResNet-18, narrow": Case(_resnet18, lambda: _images(96, 3, 32, 32), "classification", 96),
    "GPT-2, tiny": Case(_gpt2, lambda: _tokens(64, 64, 2000), "causal_lm", 64),
    "Llama, tiny": Case(_llama, lambda: _tokens(64, 64, 1500), "causal_lm", 64),
    "BERT like MiniLM": Case(_minilm, lambda: _tokens(64, 64, 3000), "sentence_embedding", 64),
}
