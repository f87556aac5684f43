"""Operators on a GPU give the CPU's numbers: K-FAC by factors, exact products, searches and densities by products."""

import pytest
import torch

from engine.operators.extreme_eigenvalues import ExtremeEigenvalues, SearchOptions
from engine.operators.products import Curvature
from engine.operators.quadrature import LanczosQuadrature, QuadratureOptions
from tests.engine.operators.test_operator import NETS as MEASURED
from tests.engine.operators.test_operator import factor_set, measured, operator
from tests.engine.operators.test_products_exact import NETS, made, product, size_of, targets_of, vectors
from tests.known_spectra import matrix as with_spectrum
from tests.oracles import relative_error, workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("kind", ["none", "exact", "factored"])
@pytest.mark.parametrize("net", MEASURED)
def test_products_solves_and_roots_equal_those_of_the_cpu(net: str, kind: str) -> None:
    factors = factor_set(measured(net)[1])
    here, there = operator(factors, kind), operator(factors, kind, device=DEVICE)
    right = torch.randn(here.shape[0], 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for exponent in (1.0, 0.5) if kind == "none" else (1.0, 0.5, -0.5, -1.0):
        # a vector on the host comes back there, and one on the device stays there
        found = there.power(exponent) @ right.to(DEVICE)
        assert found.device.type == "cuda"
        # without damping, an eigenvalue that is zero but for rounding has a root of √eps beside the largest one's
        bound = torch.finfo(torch.float64).eps ** 0.5 if (kind, exponent) == ("none", 0.5) else 1e-9
        assert relative_error(found.cpu(), here.power(exponent) @ right) < bound
        assert (there.power(exponent) @ right).device.type == "cpu"
    assert there.trace() == pytest.approx(here.trace(), rel=1e-10)
    assert relative_error(there.diagonal(), here.diagonal()) < 1e-10


# bags of embeddings have no second derivative in torch, and are refused
@pytest.mark.parametrize(
    ("net", "of"),
    [
        (net, of)
        for net in NETS
        for of in ("ggn", "hessian", "fisher", "empirical")
        if (net, of) != ("packed", "hessian")
    ],
)
def test_exact_products_equal_those_of_the_cpu(net: str, of: Curvature) -> None:
    model, x = made(net)
    y, right = targets_of(model, x, "cross_entropy"), vectors(size_of(model), 3)
    here = product(workspace(model, [(x, y)], "classification"), of, right)
    space = workspace(model.to(DEVICE), [(x, y)], "classification")
    space.machine.device = DEVICE
    assert relative_error(product(space, of, right), here) < 1e-9


def test_a_search_and_a_density_run_on_the_device() -> None:
    values = torch.cat([torch.linspace(-1, 1, 197, dtype=torch.float64), torch.tensor([5.0] * 3)])
    matrix = with_spectrum(values).to(DEVICE)
    search = ExtremeEigenvalues(
        200,
        SearchOptions(
            count=4, end="both", tolerance=None, seed=0, dtype=torch.float64, most_products=2000, length=None
        ),
        DEVICE,
    )
    while not search.done:
        search.advance(matrix @ search.vectors)
    found = search.result()
    truth = values.sort().values
    for place, own in enumerate(found.largest):
        assert own.converged
        assert abs(own.value - float(truth[-1 - place])) <= own.bound
    for place, own in enumerate(found.smallest):
        assert abs(own.value - float(truth[place])) <= own.bound
    quadrature = LanczosQuadrature(200, QuadratureOptions(probes=12, steps=60, seed=0, dtype=torch.float64), DEVICE)
    while not quadrature.done:
        quadrature.advance(matrix @ quadrature.vectors)
    points = torch.linspace(-1.2, 5.2, 50, dtype=torch.float64)
    _, low, high = quadrature.result().cumulative(points)
    share = (truth[None, :] <= points[:, None]).double().mean(1)
    assert float(((low <= share) & (share <= high)).double().mean()) >= 0.9
