"""Stabilised factors on a GPU: every placement gives what the CPU gives, where the factor is, in its precision."""

import pytest
import torch
from torch import Tensor

from engine.factors.clipping import clip_eigenvalues
from engine.factors.clipping.clip_eigenvalues import Placement, stabilise_
from engine.linalg.eigenbasis import Eigenbasis

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PLACEMENTS: tuple[Placement, ...] = ("device", "panels", "host")


def given(size: int, dtype: torch.dtype, clipped: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]
    kept = size - int(size * clipped)
    values = (1 + torch.arange(size, dtype=torch.float64)).pow(-6 / torch.tensor(kept + 0.5).log10()).flip(0)
    matrix = (basis * values) @ basis.mT
    matrix = ((matrix + matrix.mT) / 2).to(dtype)
    exact, vectors = torch.linalg.eigh(matrix.double())
    return matrix, exact.clamp_min(0), vectors


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found.cpu().double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("clipped", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)]
)
def test_every_placement_is_the_definition(
    placement: Placement,
    on_device: bool,
    clipped: float,
    dtype: torch.dtype,
    most: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix, values, vectors = given(600, dtype, clipped)
    truth = (vectors * values.clamp_min(float(values[-1]) / 1e6)) @ vectors.mT
    place = torch.device("cuda", 0)
    factor = matrix.to(place) if on_device else matrix
    monkeypatch.setattr(clip_eigenvalues, "SCRATCH_BYTES", 2**20)
    basis = vectors.to(torch.float32) if dtype != torch.float64 else vectors
    found = stabilise_(factor, values, basis, 1e6, placement=placement, device=place)
    assert (factor.device.type, factor.dtype) == ("cuda" if on_device else "cpu", dtype)
    assert torch.equal(factor, factor.mT)
    assert distance(factor, truth) <= most
    assert found.placement == placement


def test_panels_leave_the_device_nearly_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_eigenvalues, "SCRATCH_BYTES", 2**20)
    matrix, values, vectors = given(1024, torch.float32, 0.5)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stabilise_(matrix, values, vectors, 1e6, placement="panels", device=torch.device("cuda", 0))
    assert torch.cuda.max_memory_allocated() - before <= 2**21


def test_the_inverse_is_applied_where_the_gradient_is() -> None:
    _, values, vectors = given(400, torch.float64, 0.5)
    side = Eigenbasis(values, vectors).clip(1e6)
    right = torch.randn(400, 8, generator=torch.Generator().manual_seed(1))
    found = side.solve(right.cuda(), 1e-4)
    assert found.device.type == "cuda"
    assert distance(found, side.solve(right, 1e-4).double()) <= 1e-5
