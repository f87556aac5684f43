"""What a collection computed in between is gone when it is done: a worker's process may hold many of them."""

import gc

import torch
from torch import nn

from tests.oracles import collect

_WIDTH = 37


def test_no_graph_outlives_a_collection() -> None:
    """Operations that save their own output are the ones whose graph could come to hold itself."""
    model = nn.Sequential(
        nn.Linear(5, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Softmax(-1), nn.Linear(_WIDTH, 3)
    ).double()
    data = [(torch.randn(6, 5, dtype=torch.double), torch.randn(6, 3, dtype=torch.double))]
    whole = collect(model, data, "regression", fisher="mc")
    gc.collect()
    rows = [held for held in gc.get_objects() if type(held) is torch.Tensor and held.shape[1:] == (_WIDTH,)]
    factors = [whole.load(place).A for place in range(len(whole.layers))]
    alive = [tuple(held.shape) for held in rows if held.shape[0] in (1, 2, 3, 4, 6)]
    assert factors
    assert not alive, alive
