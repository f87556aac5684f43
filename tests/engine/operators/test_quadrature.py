"""Stochastic Lanczos quadrature: Gauss's identities hold, and its bands cover known spectra."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import NonFiniteFactor, WrongShape
from engine.linalg.lanczos import PANEL_BYTES
from engine.operators.krylov.spectral_bands import Axis
from engine.operators.quadrature import LanczosQuadrature, Quadrature, QuadratureOptions
from tests.known_spectra import NAMES, matrix, spectrum
from tests.memory_profile import peak_bytes

OPTIONS = QuadratureOptions(probes=12, steps=50, seed=0, dtype=torch.float64)
ROOT = Path(__file__).parents[3]
SEEDS = 3


def quadrature(full: Tensor, options: QuadratureOptions) -> Quadrature:
    made = LanczosQuadrature(len(full), options)
    while not made.done:
        made.advance(full @ made.vectors)
    assert made.products == options.probes * options.steps
    return made.result()


def covered(truth: Tensor, low: Tensor, high: Tensor) -> float:
    return float(((low <= truth + 1e-12) & (truth <= high + 1e-12)).double().mean())


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("probes", "steps"), [(10, 40), (12, 60)])
def test_bands_of_the_distribution_cover_and_are_narrow(name: str, probes: int, steps: int) -> None:
    values = spectrum(name, 300)
    full, span = matrix(values), float(values[-1] - values[0])
    # a grid, and places just beside eigenvalues, where most of them are
    grid = torch.linspace(float(values[0]) - 0.05 * span, float(values[-1]) + 0.05 * span, 50, dtype=torch.float64)
    points = torch.cat([grid, values[::10] + 1e-4 * span])
    truth = (values[None, :] <= points[:, None]).double().mean(1)
    for seed in range(SEEDS):
        options = replace(OPTIONS, probes=probes, steps=steps, seed=seed)
        estimate, low, high = quadrature(full, options).cumulative(points)
        assert covered(truth, low, high) >= 0.9
        assert float((high - low).mean()) <= 0.1
        assert bool((low <= estimate).all() and (estimate <= high).all())
        assert bool((low >= 0).all() and (high <= 1).all())


@pytest.mark.part(of=32, by=("kind",))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["linear", "symlog"])
def test_bands_of_the_density_cover(name: str, kind: str) -> None:
    values = spectrum(name, 300)
    full = matrix(values)
    axis = Axis(kind=kind, threshold=1e-3 * float(values.abs().max()))  # type: ignore[arg-type]
    places = axis.place(values)
    width = 0.03 * float(places[-1] - places[0])
    points = torch.linspace(float(places[0]), float(places[-1]), 80, dtype=torch.float64)
    bells = torch.exp(-((points - places[:, None]) / width).square() / 2) / (width * math.sqrt(2 * math.pi))
    shares = []
    for seed in range(SEEDS):
        estimate, low, high = quadrature(full, replace(OPTIONS, seed=seed)).density(points, width, axis)
        shares.append(covered(bells.mean(0), low, high))
        assert bool((low <= estimate).all() and (estimate <= high).all())
        assert float(torch.trapezoid(estimate, points)) == pytest.approx(1, abs=0.5)
    assert sum(shares) / SEEDS >= 0.9


def test_a_logarithmic_axis_holds_what_is_below_its_threshold_at_it() -> None:
    values = spectrum("low rank", 120)
    axis = Axis(kind="log", threshold=1e-4)
    points = torch.tensor([-4.0, -2.0], dtype=torch.float64)
    estimate, low, high = quadrature(matrix(values), OPTIONS).density(points, 0.1, axis)
    peak = 95 / 120 / (0.1 * math.sqrt(2 * math.pi))
    assert low[0] <= peak <= high[0]
    assert estimate[1] < 1e-8


@pytest.mark.part(of=24, by=("steps",))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_moments_are_those_of_the_probe(name: str, steps: int) -> None:
    values = spectrum(name, 150)
    full = matrix(values / values.abs().max())
    options = replace(OPTIONS, steps=steps)
    probes = LanczosQuadrature(150, options).vectors.clone()
    found = quadrature(full, options)
    assert found.nodes.shape == found.weights.shape == (12, steps)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(12, dtype=torch.float64), rtol=1e-13, atol=0)
    torch.testing.assert_close(probes.square().sum(0), torch.ones(12, dtype=torch.float64), rtol=1e-13, atol=0)
    raised = probes.clone()
    for degree in range(2 * steps):
        moments = (found.weights * found.nodes**degree).sum(1)
        torch.testing.assert_close(moments, (probes * raised).sum(0), rtol=0, atol=1e-12)
        raised = full @ raised


def test_each_probes_own_measure_is_bracketed() -> None:
    values = spectrum("bulk with outliers", 300)
    full = matrix(values)
    vectors = torch.linalg.eigh(full).eigenvectors
    options = replace(OPTIONS, steps=20)
    probes = LanczosQuadrature(300, options).vectors.clone()
    found = quadrature(full, options)
    points = torch.linspace(-1.01, 32, 67, dtype=torch.float64)  # none of which is an eigenvalue
    own = (vectors.T @ probes).square()
    truth = torch.stack([own[values <= point].sum(0) for point in points])
    for probe in range(12):
        low, high = found._bracket(torch.full((67,), probe), points)
        assert bool((low <= truth[:, probe] + 1e-9).all())
        assert bool((truth[:, probe] <= high + 1e-9).all())
        assert float((high - low).mean()) < 0.02


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("name", NAMES)
def test_traces_of_functions_lie_in_their_intervals(name: str) -> None:
    values = spectrum(name, 150)
    full = matrix(values)
    truth = float(torch.exp(-values).sum())
    inside = 0
    for seed in range(20):
        value, low, high = quadrature(full, replace(OPTIONS, steps=20, seed=seed)).trace_of(
            lambda nodes: (-nodes).exp()
        )
        assert low <= value <= high
        inside += low - 1e-9 <= truth <= high + 1e-9
    assert inside >= 18


@pytest.mark.part(of=16, by=("dtype",))
@pytest.mark.parametrize("values", [[2.5], [0.0] * 5, [1.0, 1.0, 4.0], [*([0.0] * 30), 2.0, 3.0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_exhausted_space_is_known_exactly(values: list[float], dtype: torch.dtype) -> None:
    truth = torch.tensor(values, dtype=torch.float64)
    full = matrix(truth).to(dtype)
    options = replace(OPTIONS, steps=8, dtype=dtype)
    found = quadrature(full, options)
    probes = LanczosQuadrature(len(values), options).vectors.double()
    own = (torch.linalg.eigh(full.double()).eigenvectors.T @ probes).square()
    for point in truth.unique().tolist():
        mass = (found.weights * ((found.nodes - point).abs() < 1e-4)).sum(1)
        torch.testing.assert_close(mass, own[(truth.sort().values - point).abs() < 1e-4].sum(0), rtol=0, atol=1e-5)


def test_float32_gives_what_float64_gives() -> None:
    values = spectrum("indefinite", 150)
    points = torch.linspace(-0.7, 1.1, 40, dtype=torch.float64)
    wide = quadrature(matrix(values), OPTIONS).cumulative(points)
    narrow = quadrature(matrix(values).float(), replace(OPTIONS, dtype=torch.float32)).cumulative(points)
    for one, other in zip(wide, narrow, strict=True):
        assert float((one - other).abs().max()) < 0.05


def test_a_quadrature_goes_on_from_any_state_bit_by_bit() -> None:
    full = matrix(spectrum("clusters", 60))
    options = replace(OPTIONS, steps=12)
    made = LanczosQuadrature(60, options)
    while not made.done:
        following = LanczosQuadrature(60, options)
        following.restore({name: numbers.clone() for name, numbers in made.state().items()})
        made = following
        made.advance(full @ made.vectors)
    through = quadrature(full, options)
    assert torch.equal(made.result().nodes, through.nodes)
    assert torch.equal(made.result().weights, through.weights)
    with pytest.raises(ValueError, match="of this quadrature"):
        LanczosQuadrature(60, replace(options, seed=1)).restore(made.state())


CONTINUED = """
import sys, torch
from engine.operators.quadrature import LanczosQuadrature
from tests.engine.operators.test_quadrature import OPTIONS
full, state = torch.load(sys.argv[1])
made = LanczosQuadrature(len(full), OPTIONS)
made.restore(state)
while not made.done:
    made.advance(full @ made.vectors)
torch.save((made.result().nodes, made.result().weights), sys.argv[2])
"""


@pytest.mark.nightly(
    covered_by=(
        "tests/engine/operators/test_quadrature.py::test_a_quadrature_goes_on_from_any_state_bit_by_bit",
        "tests/worker/execution/test_search_resume.py::test_another_attempt_takes_over_what_a_killed_one_has_searched",
    )
)
def test_another_process_ends_with_the_same_bits(tmp_path: Path) -> None:
    full = matrix(spectrum("power law", 150))
    made = LanczosQuadrature(150, OPTIONS)
    for _ in range(23):
        made.advance(full @ made.vectors)
    before, after = tmp_path / "before.pt", tmp_path / "after.pt"
    torch.save((full, made.state()), before)
    subprocess.run([sys.executable, "-c", CONTINUED, before, after], check=True, cwd=ROOT)
    nodes, weights = torch.load(after)
    through = quadrature(full, OPTIONS)
    assert torch.equal(nodes, through.nodes)
    assert torch.equal(weights, through.weights)


def test_the_memory_is_the_stated_one() -> None:
    size, options = 100_000, replace(OPTIONS, steps=20, dtype=torch.float32)
    scales = torch.linspace(-1, 1, size)[:, None]

    def work() -> None:
        made = LanczosQuadrature(size, options)
        while not made.done:
            made.advance(scales * made.vectors)

    used = peak_bytes(work)
    kept = options.probes * size * (20 * 4 + 3 * 8) + 3 * PANEL_BYTES
    stated = kept + 12 * size * 4  # the products are the caller's
    assert used <= stated <= 1.5 * used


def test_what_cannot_be_is_refused() -> None:
    for change, words in (
        ({"probes": 1}, r"at least 2.*\(got 1\)"),
        ({"steps": 0}, r"at least 1 \(got 0\)"),
        ({"dtype": torch.float16}, "float32 or float64"),
    ):
        with pytest.raises(ValueError, match=words):
            LanczosQuadrature(9, replace(OPTIONS, **change))  # type: ignore[arg-type]
    made = LanczosQuadrature(9, replace(OPTIONS, steps=1))
    with pytest.raises(ValueError, match="one product"):
        made.result()
    with pytest.raises(WrongShape, match=r"\(9, 12\) \(got \(9, 1\)\)"):
        made.advance(torch.zeros(9, 1))
    with pytest.raises(NonFiniteFactor):
        made.advance(torch.full((9, 12), math.inf))
    made.advance(torch.zeros(9, 12))
    with pytest.raises(ValueError, match="is done"):
        made.advance(torch.zeros(9, 12))
    found = made.result()
    with pytest.raises(ValueError, match="width must be positive"):
        found.density(torch.zeros(1), 0.0)
    with pytest.raises(ValueError, match="threshold must be positive"):
        Axis(kind="log", threshold=0.0)
