"""A model whose job takes its time while the machine stays idle: in every forward pass, and before every row.

Loaded by the computing process through the factory setting. What comes out does not depend on the
pace, so the same document with another pace has the same rows and factors.
"""

import itertools
import time

import torch
from torch import nn

from worker.execution.frame_pipe import FramePipe


class Paced(nn.Module):
    def __init__(self, depth: int, width: int, seed: int, batch_seconds: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        widths = [12] + [width] * (depth - 1) + [5]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))
        self._seconds = batch_seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds)
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


def make(depth: int = 6, width: int = 16, seed: int = 0, batch_seconds: float = 0.0, row_seconds: float = 0.0) -> Paced:
    if row_seconds:
        _pace_rows(row_seconds)
    return Paced(depth, width, seed, batch_seconds)


def _pace_rows(seconds: float) -> None:
    send = FramePipe.send

    def slow(pipe: FramePipe, frame: object) -> None:
        if getattr(frame, "frame", None) == "layer":
            time.sleep(seconds)
        send(pipe, frame)

    FramePipe.send = slow
