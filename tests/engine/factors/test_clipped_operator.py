"""A clipped spectrum as a function of what is kept of a head: against the dense matrix and its inverse."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.reconstruction import ReconstructionParams
from engine.analyses.reconstruction import Reconstruction
from engine.collect import collect_or_read
from engine.factors import softmax_fisher
from engine.factors.clipping.clipped_inverse import StabilisedLayers
from engine.factors.clipping.clipped_operator import ClippedOperator, SignPoles
from engine.factors.softmax_fisher import SoftmaxFisher
from tests.engine.factors.test_diagonal_sketch import sketched
from tests.oracles import MemoryArtifacts, workspace

V, T = 120, 20


def error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def head(*, tied: bool) -> SoftmaxFisher:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(T, V, generator=generator, dtype=torch.float64)
    # frequent classes and rare ones
    logits += torch.linspace(-6, 6, V, dtype=torch.float64)
    excess = 1e-5 * torch.rand(V, generator=generator, dtype=torch.float64) if tied else None
    share = torch.full((T,), 1 / T, dtype=torch.float64)
    return SoftmaxFisher(rows=torch.softmax(logits, -1), weights=share, excess=excess)


@pytest.mark.parametrize(("near", "far"), [(1e-3, 1.0), (1e-8, 1.0), (1e-15, 1.0), (3e-14, 5.0)])
def test_the_approximant_is_the_sign_beyond_its_corner(near: float, far: float) -> None:
    poles = SignPoles.of(near, far)
    logs = torch.linspace(0, 1, 9973, dtype=torch.float64) * torch.tensor(far / near, dtype=torch.float64).log()
    found = poles.sign(near * logs.exp())
    assert float((found - 1).abs().max()) < 1e-12
    assert float((poles.sign(-near * logs.exp()) + 1).abs().max()) < 1e-12
    assert len(poles.heights) < 130


@pytest.mark.part(of=32, by=("kind",))
@pytest.mark.parametrize("kind", ["softmax", "tied", "sketched terms", "sketched rows"])
@pytest.mark.parametrize("kappa_max", [1e2, 1e6])
def test_it_is_the_clipped_matrix_and_its_inverse(kind: str, kappa_max: float) -> None:
    side: Any = (
        head(tied=kind == "tied")
        if kind in ("softmax", "tied")
        else sketched(12, of_terms=kind == "sketched terms", seed=1)[0]
    )
    values, vectors = torch.linalg.eigh(side.to_dense(torch.float64))
    floor = float(values[-1]) / kappa_max
    operator = ClippedOperator(side=side, floor=floor, largest=float(values[-1]))
    eye = torch.eye(side.size, dtype=torch.float64)
    clipped = values.clamp_min(floor)
    assert error(operator.apply(eye), (vectors * clipped) @ vectors.T) < 1e-10
    for damping in (0.0, 3 * floor, 1e3 * float(values[-1])):
        assert error(operator.solve(eye, damping), (vectors / (clipped + damping)) @ vectors.T) < 1e-8
    came_out = torch.linalg.eigvalsh(operator.apply(eye))
    assert float(came_out[-1] / came_out[0]) == pytest.approx(float(clipped[-1] / clipped[0]), rel=1e-8)
    # as the index and the file of a layer hold it
    entry = {"name": "head", "ordinal": 0, "holder_of_A": 0, "form": "block", "sides": {"G": operator.entry()}}
    again = StabilisedLayers([entry], lambda _: operator.tensors("gradient"))["head"].G
    assert isinstance(again, ClippedOperator)
    assert (again.floor, again.largest) == (operator.floor, operator.largest)
    assert again.side.digest() == side.digest()


def test_a_wide_head_is_reconstructed_as_an_operator_and_reads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 200)).double()
    data = torch.randn(24, 6, dtype=torch.float64), torch.randint(0, 200, (24,))

    def run() -> tuple[Any, Any, Any]:
        made = workspace(model, [data], "classification", batch_size=24)
        made.inputs.examples, made.options.decomposition, made.options.kinds = 24, "vectors", ("reconstruction",)
        made.ports.artifacts = MemoryArtifacts()
        rows = {row.layer: row.metrics for row in Reconstruction(ReconstructionParams(), made).rows()}
        return made, rows, made.ports.artifacts

    made, truth, _ = run()
    dense = collect_or_read(made).load(1).G.to_dense(torch.float64)
    for name in ("DENSE_ROWS", "BASIS_ROWS"):
        monkeypatch.setattr(softmax_fisher, name, 4)
    _, rows, artifacts = run()
    own, expected = rows["2"].G, truth["2"].G
    assert (own.update, own.kind, own.size) == ("operator", "softmax_head", 200)
    assert (own.clipped, own.unclipped) == (expected.clipped, expected.unclipped)
    for name in ("floor", "floor_reached", "kappa_reached", "trace", "mass"):
        assert getattr(own, name) == pytest.approx(getattr(expected, name), rel=1e-9), name
    # what stands on the disk is the rows
    assert sum(each.numel() for each in artifacts.load_tensors(rows["2"].artifact).values()) < 200**2
    index = artifacts.load_json("stabilised/stabilised.index.json")
    read = StabilisedLayers(
        index["layers"], lambda ordinal: artifacts.load_tensors(f"stabilised/{ordinal}.safetensors")
    )
    values, vectors = torch.linalg.eigh(dense)
    clipped = values.clamp_min(float(values[-1]) / 1e6)
    right = torch.randn(200, 6, dtype=torch.float64)
    side = read["2"].G
    assert isinstance(side, ClippedOperator)
    assert error(side.solve(right), (vectors / clipped) @ (vectors.T @ right)) < 1e-8
    assert read["2"].solve(right, 1e-3, 1e-3).shape == right.shape
