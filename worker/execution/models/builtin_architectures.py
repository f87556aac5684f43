"""Architectures of the builtin models: small, of ordinary layers, trained in seconds."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

BYTES = 256
CONTEXT = 64
"""Positions of `tiny_gpt`."""


def digits_cnn() -> nn.Module:
    """Two convolutions with batch normalisation and a linear head on 8×8 images."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            norm1=nn.BatchNorm2d(16),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            norm2=nn.BatchNorm2d(32),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            head=nn.Linear(32 * 4 * 4, 10),
        )
    )


def digits_mlp() -> nn.Module:
    """Two hidden layers of 64."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden1=nn.Linear(64, 64),
            tanh1=nn.Tanh(),
            hidden2=nn.Linear(64, 64),
            tanh2=nn.Tanh(),
            head=nn.Linear(64, 10),
        )
    )


class _Block(nn.Module):
    """Causal attention and an MLP, each after a LayerNorm, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:  # (B, T, width)
        batch, length, width = hidden.shape
        normed = self.norm_attention(hidden)
        split = (batch, length, self.heads, width // self.heads)
        query, key, value = (part(normed).view(split).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        widened: Tensor = self.narrow(nn.functional.gelu(self.widen(self.norm_mlp(hidden))))
        return hidden + widened


class TinyGPT(nn.Module):
    """A byte-level GPT: 4 blocks, 64 wide."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:  # (B, T) byte values -> (B, T, 256)
        """Return the logits of the next byte at every position.

        Args:
            input_ids: Byte values, shape (B, T), int64, T at most 64.

        Returns:
            Logits, shape (B, T, 256).
        """
        # one row of positions per example: the rows' gradients must not arrive summed over the batch
        places = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        hidden = self.tokens(input_ids) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


ARCHITECTURES = {"digits_cnn": digits_cnn, "digits_mlp": digits_mlp, "tiny_gpt": TinyGPT}
