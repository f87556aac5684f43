"""Hashing ahead: the digests that threads compute are those of the factors, in whatever order they come."""

import hashlib

import torch
from torch import nn

from engine.collect import collect_or_read
from engine.factors.kronecker_factors import digest, packed, unpacked
from engine.measurement.prefetch import stream_factors
from engine.memory.guard import Guard
from tests.oracles import workspace


def sha(matrix: torch.Tensor) -> str:
    head = f"{str(matrix.dtype).removeprefix('torch.')}{tuple(matrix.shape)}".encode()
    return hashlib.sha256(head + bytes(matrix.contiguous().view(torch.uint8).flatten().tolist())).hexdigest()


def test_digests_are_those_of_each_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 12), *[nn.Linear(12, 12) for _ in range(6)], nn.Linear(12, 4))
    data = [(torch.randn(8, 300), torch.randint(0, 4, (8,)))]
    whole = collect_or_read(workspace(model, data, "classification", fisher="mc", dtype="float32"))
    stream = stream_factors(
        whole.layers,
        whole.load,
        device=torch.device("cpu"),
        guard=Guard.unlimited(),
        need="values",
        source="resident",
    )
    for facts, arrived in zip(whole.layers, stream, strict=True):
        factors = whole.load(facts.ordinal)
        assert isinstance(factors.G, torch.Tensor)
        # what is large by a thread, the rest at once
        assert set(arrived.leaving) == ({"A"} if facts.in_dim > 256 else set())
        assert arrived.digest("A") == sha(factors.A) == digest(factors.A)
        assert arrived.digest("G") == sha(factors.G)


def test_triangles_of_any_layout_come_back() -> None:
    matrix = torch.randn(65, 65, dtype=torch.float64)
    symmetric = matrix + matrix.T
    rows, columns = torch.triu_indices(65, 65)
    for given in (symmetric, torch.stack([symmetric, symmetric], -1)[..., 0], symmetric.half()):
        triangle = packed(given)
        assert torch.equal(triangle, given[rows, columns])
        assert torch.equal(unpacked(triangle, 65), given)
    assert packed(torch.empty(0, 0)).shape == (0,)
