"""Clipped reconstruction against Q max(Λ, f) Qᵀ in float64."""

import math

import pytest
import torch
from torch import Tensor

from engine.errors import NonFiniteFactor
from engine.factors.clipping import clip_eigenvalues
from engine.factors.clipping.clip_eigenvalues import Placement, stabilise_, tile_extent, update_rank

PLACEMENTS: tuple[Placement, ...] = ("device", "panels", "host")


def spectrum(shape: str, size: int) -> Tensor:
    steps = torch.arange(size, dtype=torch.float64)
    shapes = {
        "power": (1 + steps) ** -3.0,
        "exponential": 10 ** (-9 * steps / max(size - 1, 1)),
        "flat": torch.where(steps < size // 2, 1.0, 1e-9).to(torch.float64),
        "short": torch.where(steps < size // 8, 1 / (1 + steps), 0.0),
    }
    return shapes[shape].flip(0).contiguous()


def factor(values: Tensor, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = values.numel()
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]
    matrix = (basis * values) @ basis.mT
    return ((matrix + matrix.mT) / 2).to(dtype)


def decomposed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix.to(torch.float64))
    return values.clamp_min(0), vectors


def oracle(values: Tensor, vectors: Tensor, kappa_max: float) -> Tensor:
    return (vectors * values.clamp_min(float(values[-1]) / kappa_max)) @ vectors.mT


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found.to(torch.float64) - truth).norm() / truth.norm())


@pytest.mark.part(of=24, by=("placement", "shape"))
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("shape", ["power", "exponential", "flat", "short"])
@pytest.mark.parametrize("kappa_max", [1.5, 1e3, 1e6, 1e12])
def test_float64_is_the_definition(
    shape: str, kappa_max: float, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = factor(spectrum(shape, 150), torch.float64)
    # the basis of the numbers as they are, negative rounding included
    values, vectors = torch.linalg.eigh(matrix)
    truth = oracle(values, vectors, kappa_max)
    monkeypatch.setattr(clip_eigenvalues, "SCRATCH_BYTES", 2**16)
    found = stabilise_(matrix, values, vectors, kappa_max, placement=placement)
    assert distance(matrix, truth) <= 1e-12
    assert torch.equal(matrix, matrix.mT)
    assert found.clipped == int((values < values[-1] / kappa_max).sum())
    assert found.mass == pytest.approx(float(truth.trace() - values.sum()), abs=1e-12)
    assert found.floor == float(values[-1]) / kappa_max


@pytest.mark.part(of=24, by=("shape",))
@pytest.mark.parametrize("shape", ["power", "exponential", "short"])
@pytest.mark.parametrize("size", [256, 400])
@pytest.mark.parametrize("basis", [torch.float32, torch.float64])
def test_float32_keeps_the_floor_to_a_percent_at_a_million(shape: str, size: int, basis: torch.dtype) -> None:
    original = factor(spectrum(shape, size), torch.float32)
    values, vectors = decomposed(original)
    results = []
    for placement in PLACEMENTS:
        matrix = original.clone()
        found = stabilise_(matrix, values, vectors.to(basis), 1e6, placement=placement)
        assert matrix.dtype == torch.float32
        assert torch.equal(matrix, matrix.mT)
        smallest = float(torch.linalg.eigvalsh(matrix.to(torch.float64))[0])
        assert smallest == pytest.approx(found.floor, rel=0.01)
        assert distance(matrix, oracle(values, vectors, 1e6)) <= 1e-6
        results.append(matrix)
    assert all(distance(each, results[0].to(torch.float64)) <= 1e-6 for each in results)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_flat_spectrum_keeps_what_float32_itself_keeps(placement: Placement) -> None:
    """Nothing in float32 is nearer than the definition rounded, which falls 3 % short here."""
    matrix = factor(spectrum("flat", 256), torch.float32)
    values, vectors = decomposed(matrix)
    rounded = oracle(values, vectors, 1e6).to(torch.float32).to(torch.float64)
    found = stabilise_(matrix, values, vectors, 1e6, placement=placement)
    smallest, best = (float(torch.linalg.eigvalsh(each)[0]) for each in (matrix.to(torch.float64), rounded))
    assert smallest >= best - 0.03 * found.floor


def test_the_smaller_update_is_taken() -> None:
    for clipped, update in ((1, "clipped"), (99, "clipped"), (100, "clipped"), (101, "unclipped"), (199, "unclipped")):
        values = torch.cat([torch.full((clipped,), 1e-9), torch.linspace(0.1, 1, 200 - clipped)]).to(torch.float64)
        matrix = factor(values, torch.float64)
        exact, vectors = torch.linalg.eigh(matrix)
        found = stabilise_(matrix, exact, vectors, 1e6)
        assert (found.clipped, found.update) == (clipped, update)
    assert update_rank(300, 200, torch.float32) == 200
    assert update_rank(300, 201, torch.float32) == 99


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nothing_clipped_changes_no_bit(placement: Placement, dtype: torch.dtype) -> None:
    matrix = factor(torch.linspace(0.5, 1, 40, dtype=torch.float64), dtype)
    values, vectors = decomposed(matrix)
    before = matrix.clone()
    found = stabilise_(matrix, values, vectors, 10, placement=placement)
    assert torch.equal(matrix, before)
    assert (found.clipped, found.update, found.mass) == (0, "none", 0.0)


@pytest.mark.part(of=16, by=("placement",))
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("size", [1, 2, 65, 130])
def test_all_but_one_clipped(placement: Placement, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.zeros(size, dtype=torch.float64)
    values[-1] = 4.0
    matrix = factor(values, torch.float64)
    truth = oracle(*torch.linalg.eigh(matrix), 100)
    exact, vectors = torch.linalg.eigh(matrix)
    monkeypatch.setattr(clip_eigenvalues, "SCRATCH_BYTES", 2**12)
    found = stabilise_(matrix, exact, vectors, 100, placement=placement)
    assert found.clipped == size - 1
    assert distance(matrix, truth) <= 1e-14


def test_a_basis_of_the_largest_alone_gives_the_same() -> None:
    """A factor of rank 30 whose null space nobody has vectors of."""
    matrix = factor(spectrum("short", 240), torch.float64)
    values, vectors = decomposed(matrix)
    values[:210] = 0
    truth = oracle(values, vectors, 1e6)
    found = stabilise_(matrix, values, vectors[:, 210:], 1e6)
    assert found.update == "unclipped"
    assert distance(matrix, truth) <= 1e-12


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rounding_below_zero_that_the_values_do_not_show_is_not_left_in(placement: Placement) -> None:
    """Rank 200 of 256 in float32: the null space holds the rounding of a hundred times the floor."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(256, 256, generator=generator, dtype=torch.float64) * 3e-8
    clean = spectrum("exponential", 256)
    clean[:56] = 0
    matrix = (factor(clean, torch.float64) + noise + noise.mT).to(torch.float32)
    values, vectors = decomposed(matrix)
    values[:56] = 0
    found = stabilise_(matrix, values, vectors, 1e6, placement=placement)
    assert found.update == "unclipped"
    smallest = float(torch.linalg.eigvalsh(matrix.to(torch.float64))[0])
    assert smallest == pytest.approx(found.floor, rel=0.01)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(placement: Placement, dtype: torch.dtype) -> None:
    matrix = factor(spectrum("exponential", 96) * 1000, dtype)
    values, vectors = decomposed(matrix)
    truth = oracle(values, vectors, 50)
    stabilise_(matrix, values, vectors, 50, placement=placement)
    assert matrix.dtype == dtype
    once = truth.to(torch.float32).to(dtype)
    # a tie that float32 rounds the other way, at most
    assert distance(matrix, once.to(torch.float64)) <= torch.finfo(dtype).eps / 8
    assert torch.equal(matrix, matrix.mT)


def test_a_diagonal_is_raised_to_the_floor() -> None:
    diagonal = torch.tensor([3.0, 0.0, 1e-5, 1.0])
    found = stabilise_(diagonal, torch.sort(diagonal).values.to(torch.float64), None, 1000)
    torch.testing.assert_close(diagonal, torch.tensor([3.0, 0.003, 0.003, 1.0]))
    assert (found.clipped, found.update) == (2, "diagonal")


def test_no_curvature_stays_none() -> None:
    matrix = torch.zeros(5, 5)
    found = stabilise_(matrix, torch.zeros(5, dtype=torch.float64), torch.eye(5, dtype=torch.float64), 1e6)
    assert torch.equal(matrix, torch.zeros(5, 5))
    assert (found.clipped, found.floor, found.update) == (0, 0.0, "none")


@pytest.mark.parametrize("spoilt", ["factor", "values", "vectors"])
def test_what_is_not_finite_is_refused(spoilt: str) -> None:
    matrix = factor(spectrum("exponential", 20), torch.float32)
    values, vectors = decomposed(matrix)
    {"factor": matrix[3], "values": values, "vectors": vectors[3]}[spoilt][0] = math.nan
    with pytest.raises(NonFiniteFactor, match="NaN or Inf"):
        stabilise_(matrix, values, vectors, 1e3)


@pytest.mark.parametrize("rank", [1, 100, 2048, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiles_keep_to_their_bytes(rank: int, dtype: torch.dtype) -> None:
    item = 8 if dtype == torch.float64 else 4
    rows, columns = tile_extent(32_768, rank, dtype)
    held = 2 * rows * rank * item + columns * rank * item + 8 * rows * columns
    assert held <= 48 * 2**20
