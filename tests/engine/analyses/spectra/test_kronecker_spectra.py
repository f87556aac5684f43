"""K-FAC's and EK-FAC's spectra against the dense G ⊗ A, and against every corrected eigenvalue."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.spectrum import SpectrumParams
from engine.analyses.spectra.kronecker_spectra import BlockSpectra, ekfac_block, kfac_block
from engine.collect import collect_or_read
from engine.measurement.layer_measurement import Measured, measure_layers
from engine.workspace import Workspace
from tests.oracles import kronecker, workspace


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.first = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(self.norm(self.table(index).mean(1)))))


def measured(**options: Any) -> tuple[Workspace, list[Measured]]:
    torch.manual_seed(0)
    data = [(torch.randint(0, 7, (9, 4)), torch.randint(0, 3, (9,)))]
    space = workspace(Net().double(), data, "classification", **options)
    space.options.decomposition = "values"
    return space, sorted(measure_layers(space), key=lambda layer: layer.facts.ordinal)


def filled(space: Workspace, layers: list[Measured], of: Any, params: SpectrumParams) -> BlockSpectra:
    whole = collect_or_read(space)
    spectra = BlockSpectra(of=of, params=params)
    for layer in layers:
        if of == "kfac":
            spectra.take(layer.facts.ordinal, kfac_block(layer, params))
        else:
            assert whole.load_corrected is not None
            corrected = whole.load_corrected(layer.facts.ordinal)
            spectra.take(layer.facts.ordinal, ekfac_block(layer, corrected, params))
    return spectra


def eigenvalues(space: Workspace, layers: list[Measured], of: str) -> list[Tensor]:
    whole = collect_or_read(space)
    if of == "kfac":
        return [torch.linalg.eigvalsh(kronecker(whole, layer.facts.name)) for layer in layers]
    assert whole.load_corrected is not None
    return [whole.load_corrected(layer.facts.ordinal).eigenvalues.flatten().sort().values for layer in layers]


@pytest.mark.parametrize("of", ["kfac", "ekfac"])
@pytest.mark.parametrize("end", ["both", "largest", "smallest"])
def test_each_layer_and_the_model_have_the_dense_eigenvalues(of: Any, end: Any) -> None:
    params = SpectrumParams(of=of, k=8, end=end, decades=6, points_per_decade=5)
    space, layers = measured(ekfac=True)
    spectra = filled(space, layers, of, params)
    dense = eigenvalues(space, layers, of)
    for layer, true in zip(layers, dense, strict=True):
        found = spectra.blocks[layer.facts.ordinal].of_layer
        tolerance = 1e-12 * float(true[-1])
        k = min(8, true.numel())
        assert [each.value for each in found.largest] == (
            [] if end == "smallest" else pytest.approx(true.flip(0)[:k].tolist(), abs=tolerance)
        )
        assert [each.value for each in found.smallest] == (
            [] if end == "largest" else pytest.approx(true[:k].tolist(), abs=tolerance)
        )
        assert found.trace == pytest.approx(float(true.sum()), rel=1e-12)
        assert found.density is not None
        edges, counts = found.density.log10_edges, found.density.counts
        assert found.density.below + sum(counts) == true.numel()
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
            assert count == int(((true > 10**low) & (true <= 10**high)).sum())
    every = torch.cat(dense).sort().values
    model = spectra.of_model(every.numel())
    assert model.dimension == every.numel()
    if end != "smallest":
        assert model.largest is not None
        assert [each.value for each in model.largest] == pytest.approx(every.flip(0)[:8].tolist(), rel=1e-10)
    if end != "largest":
        assert model.smallest is not None
        tolerance = 1e-12 * float(every[-1])
        assert [each.value for each in model.smallest] == pytest.approx(every[:8].tolist(), abs=tolerance)
    assert model.trace == pytest.approx(float(every.sum()), rel=1e-12)
    assert model.density is not None
    for point, beyond in zip(model.density.log10, model.density.positive.beyond, strict=True):
        assert beyond == pytest.approx(float((every > 10**point).double().mean()), abs=1e-12)
    smooth = torch.tensor(model.density.log10, dtype=torch.float64)[:, None] - every.clamp_min(1e-300).log10()
    expected = torch.exp(-0.5 * (smooth / 0.25) ** 2).mean(1) / (0.25 * math.sqrt(2 * math.pi))
    assert torch.allclose(
        torch.tensor(model.density.positive.density, dtype=torch.float64), expected, atol=1e-4 * float(expected.max())
    )


def test_zeros_are_counted_and_none_is_drawn() -> None:
    # ten outputs of a softmax sum to one: G has the eigenvalue zero
    params = SpectrumParams(of="kfac", k=3)
    space, layers = measured()
    spectra = filled(space, layers, "kfac", params)
    (head,) = [layer for layer in layers if layer.facts.name == "head"]
    found = spectra.blocks[head.facts.ordinal].of_layer
    true = eigenvalues(space, [head], "kfac")[0]
    assert found.zeros == int((true <= 1e-13 * true[-1]).sum())
    assert found.zeros >= 7


def test_without_a_density_none_is_made() -> None:
    params = SpectrumParams(of="kfac", k=3, density=False)
    space, layers = measured()
    model = filled(space, layers, "kfac", params).of_model(100)
    assert model.density is None
    assert not model.missing


def test_a_layer_without_eigenvalues_leaves_the_models_undefined_and_says_why() -> None:
    params = SpectrumParams(of="kfac", k=3)
    space, layers = measured()
    spectra = filled(space, layers[1:], "kfac", params)
    spectra.lack(layers[0].facts.ordinal, "table", 4.5, "G (7 rows) is too large")
    model = spectra.of_model(100)
    assert model.largest is model.smallest is model.density is None
    assert set(model.missing) == {"largest", "smallest", "density"}
    assert "`table`: G (7 rows) is too large" in model.missing["largest"]
    assert model.trace == pytest.approx(4.5 + sum(layer.A.trace * layer.G.trace for layer in layers[1:]))
