"""The ladder begins on the device, takes there what it says, and layers come in on a stream of their own."""

import pytest
import torch
from torch import Tensor

from engine.linalg import eigensolvers
from engine.linalg.eigendecomposition import decompose, rungs
from engine.measurement.layer_measurement import measure_layers
from tests.gpu.test_collection_on_cuda import on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda")


def graded(size: int) -> tuple[Tensor, Tensor]:
    noise = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    basis, _ = torch.linalg.qr(noise)
    values = torch.logspace(-12, 0, size, dtype=torch.float64)
    made = (basis * values) @ basis.T
    return (made + made.T) / 2, values


@pytest.mark.parametrize("need", ["values", "vectors"])
def test_known_spectra_on_the_device(need: eigensolvers.Need) -> None:
    matrix, truth = graded(400)
    there = matrix.to(DEVICE)
    found = decompose(there, "layer", need=need)
    assert torch.equal(there.cpu(), matrix)
    assert found.rungs == ("device_float64",)
    assert float((found.values - truth).abs().max()) < 1e-12
    if found.vectors is not None:
        assert found.vectors.device.type == "cuda"
        assert found.residual is not None
        assert found.residual < 1e-12
    single = decompose(there, "layer", need=need, smallest_ratio=1e-4)
    assert (single.rungs, single.precision) == (("device_float32",), "float32")


def test_a_device_that_fails_leaves_it_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, truth = graded(100)
    working = torch.linalg.eigh

    def broken(given: Tensor, out: tuple[Tensor, Tensor]) -> object:
        if given.is_cuda:
            raise torch.linalg.LinAlgError("did not converge")
        return working(given, out=out)

    monkeypatch.setattr(torch.linalg, "eigh", broken)
    found = decompose(matrix.to(DEVICE), "layer", need="vectors")
    assert found.rungs == ("device_float64", "host_float64")
    assert float((found.values - truth).abs().max()) < 1e-13


@pytest.mark.parametrize("need", ["values", "vectors"])
def test_the_device_holds_no_more_than_the_rung_says(need: eigensolvers.Need) -> None:
    size = 3000
    matrix = torch.eye(size, device=DEVICE) + torch.ones(size, size, device=DEVICE) / size
    decompose(matrix, "layer", need=need)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decompose(matrix, "layer", need=need)
    taken = torch.cuda.max_memory_allocated() - before
    (cost,) = (rung for rung in rungs(size, need=need, device=DEVICE) if rung.name == "device_float64")
    assert taken <= 1.1 * cost.device_bytes


def test_streamed_layers_are_the_same_as_those_of_the_host() -> None:
    here, there = on("cuda", fisher="empirical"), on("cpu", fisher="empirical")
    for left, right in zip(measure_layers(here), measure_layers(there), strict=True):
        assert left.facts.name == right.facts.name
        assert left.G.spectrum is not None
        assert right.G.spectrum is not None
        assert torch.allclose(left.G.spectrum, right.G.spectrum, rtol=1e-8, atol=1e-12)
