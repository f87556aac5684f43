"""Each law of an operator, over each form that a side is kept in, against its matrix in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.errors import NotConverged, UsageError
from engine.factors import softmax_fisher
from engine.factors.dense import Dense, Diagonal, as_operator, digest, to_storage
from engine.factors.diagonal_sketch import DiagonalSketch
from engine.factors.low_rank import LowRank, scaled_rows
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.linalg.layer_matrices import arranged
from engine.linalg.linear_operator import Operator, Structured
from engine.operators.kronecker.factor_side import FactorSide

SIZE, COLUMNS, SHIFT = 23, 3, 0.3
HERE = torch.device("cpu")


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def covariance() -> Tensor:
    rows = noise(2 * SIZE, SIZE)
    return rows.mT @ rows / 7e4


def rounded(matrix: Tensor, dtype: torch.dtype) -> Operator:
    stored, scale = to_storage(matrix, dtype)
    return as_operator(stored, scale)


def low_rank() -> LowRank:
    rows, scales = scaled_rows(noise(5, SIZE), torch.float16)
    return LowRank(rows=rows, scales=scales, weight=3.0)


def head(*, tied: bool) -> SoftmaxFisher:
    rows = torch.softmax(noise(6, SIZE), 1)
    return SoftmaxFisher(
        rows=rows, weights=torch.linspace(0.1, 1, 6).double(), excess=noise(SIZE).abs() if tied else None
    )


def sketch(*, subtracts: bool) -> DiagonalSketch:
    rows = noise(4, SIZE) / 9
    base = 1 + noise(SIZE).abs()
    diagonal = base + (-1 if subtracts else 1) * rows.square().sum(0)
    return DiagonalSketch(exact_diagonal=diagonal, base=base, rows=rows, subtracts=subtracts, bound=0.1)


MEMBERS: dict[str, Callable[[], Operator]] = {
    "float64": lambda: rounded(covariance(), torch.float64),
    "float32": lambda: rounded(covariance(), torch.float32),
    "float16, scaled": lambda: rounded(covariance(), torch.float16),
    "diagonal": lambda: rounded(covariance().diagonal(), torch.float32),
    "diagonal, scaled": lambda: rounded(covariance().diagonal(), torch.float16),
    "gradient rows": low_rank,
    "softmax head": lambda: head(tied=False),
    "tied head": lambda: head(tied=True),
    "sketch": lambda: sketch(subtracts=False),
    "sketch, subtracted": lambda: sketch(subtracts=True),
}
members = pytest.mark.parametrize("name", MEMBERS)


def close(found: Tensor, truth: Tensor, most: float = 1e-12) -> bool:
    return float((found - truth).norm()) <= most * float(truth.norm())


@members
def test_numbers_are_those_of_the_matrix(name: str) -> None:
    side = MEMBERS[name]()
    truth = side.to_dense(torch.float64)
    assert truth.shape == (side.size, side.size)
    assert close(truth, truth.mT)
    assert side.trace() == pytest.approx(float(truth.trace()), rel=1e-12)
    assert side.frobenius_norm() == pytest.approx(float(truth.norm()), rel=1e-12)
    assert close(side.diagonal(), truth.diagonal())
    largest = float(torch.linalg.eigvalsh(truth)[-1])
    assert 0.9 * largest <= side.spectral_norm() <= (1 + 1e-12) * largest


@members
def test_products_and_solves_are_those_of_the_matrix(name: str) -> None:
    side = MEMBERS[name]()
    truth, right = side.to_dense(torch.float64), noise(SIZE, COLUMNS)
    damped = truth + SHIFT * torch.eye(SIZE, dtype=torch.float64)
    assert close(side.apply(right), truth @ right)
    assert close(side.solve(right, SHIFT), torch.linalg.solve(damped, right))
    matrices = arranged(noise(SIZE, 2, COLUMNS))
    assert close(side.left(matrices), torch.einsum("ab,bkm->akm", truth, matrices))
    assert side.apply(right.float()).dtype == torch.float32
    for part in (slice(0, 4), slice(20, SIZE)):
        found = side.panel(part, 2.0)
        assert close(
            torch.diag(found) if side.is_diagonal else found,
            (truth[part, part] if side.is_diagonal else truth[part]) / 2,
        )


@members
def test_functions_of_the_spectrum_are_those_of_the_matrix(name: str) -> None:
    side = MEMBERS[name]()
    truth, shifts = side.to_dense(torch.float64), torch.tensor([SHIFT, 5.0], dtype=torch.float64)
    values = torch.linalg.eigvalsh(truth)
    assert close(side.logdets(shifts), torch.log(values + shifts[:, None]).sum(1))
    known = side.spectrum("layer")
    assert (known is None) == (name.startswith("sketch"))
    if known is not None:
        assert float((known[0] - values.clamp_min(0)).abs().max()) <= 1e-12 * float(values[-1])
    if not side.has_basis:
        with pytest.raises(NotConverged, match="layer"):
            side.basis("layer", HERE, None, torch.float64)
        return
    basis, right = side.basis("layer", HERE, None, torch.float64), noise(SIZE, COLUMNS)
    assert basis.size == SIZE
    assert float((basis.all_values.sort().values - values.clamp_min(0)).abs().max()) <= 1e-12 * float(values[-1])
    assert close(basis.apply(right), truth @ right, 1e-11)
    assert close(basis.solve(right, SHIFT), side.solve(right, SHIFT), 1e-11)


@pytest.mark.part(of=16, by=("name",))
@members
@pytest.mark.parametrize("exponent", [2.0, 0.5, -1.0])
def test_a_power_is_that_of_the_eigenvalues(name: str, exponent: float) -> None:
    side, right = MEMBERS[name](), noise(SIZE, COLUMNS)
    values, vectors = torch.linalg.eigh(side.to_dense(torch.float64))
    if not side.has_basis:
        with pytest.raises(NotConverged, match="layer"):
            side.power(exponent, "layer")
    elif exponent < 0 and float(values[0]) < 1e-12 * float(values[-1]):
        with pytest.raises(UsageError, match="has no power -1"):
            side.power(exponent, "layer")
    else:
        # an eigenvalue that is zero but for rounding has a root of the root of that
        most = 1e-6 if exponent < 1 else 1e-11
        truth = (vectors * values.clamp_min(0).pow(exponent)) @ vectors.mT
        assert close(side.power(exponent, "layer").apply(right), truth @ right, most)


@members
@pytest.mark.parametrize("kappa_max", [3.0, 1e4])
def test_a_clipped_side_has_the_floor(name: str, kappa_max: float, monkeypatch: pytest.MonkeyPatch) -> None:
    side, right = MEMBERS[name](), noise(SIZE, COLUMNS)
    values, vectors = torch.linalg.eigh(side.to_dense(torch.float64))
    floor = float(values[-1]) / kappa_max
    clipped, most = values.clamp_min(floor), 1e-9
    for wide in (False, True):
        if wide:
            monkeypatch.setattr(softmax_fisher, "BASIS_ROWS", 4)
        found = side.clip(kappa_max, "layer")
        assert found.size == SIZE
        assert found.floor == pytest.approx(floor, rel=1e-9)
        assert close(found.apply(right), (vectors * clipped) @ vectors.mT @ right, most)
        assert close(found.solve(right), (vectors / clipped) @ vectors.mT @ right, most)
        assert close(found.solve(right, SHIFT), (vectors / (clipped + SHIFT)) @ vectors.mT @ right, most)


@members
def test_an_inverse_is_that_of_a_matrix_or_a_diagonal(name: str) -> None:
    side = MEMBERS[name]()
    inverse = side.inverse(SHIFT, HERE, torch.float64)
    matrices = arranged(noise(COLUMNS, 2, SIZE))
    if isinstance(side, Structured):
        assert inverse is None
        with pytest.raises(TypeError, match="A is never kept as a structured side"):
            side.right(matrices)
        return
    assert inverse is not None
    truth = side.to_dense(torch.float64)
    damped = truth + SHIFT * torch.eye(SIZE, dtype=torch.float64)
    assert close(inverse.to_dense(torch.float64), torch.linalg.inv(damped))
    assert close(side.right(matrices), matrices @ truth)
    assert side.inverse(-2 * side.trace(), HERE, torch.float64) is None


@members
def test_what_is_stored_gives_the_side_back(name: str) -> None:
    side = MEMBERS[name]()
    assert side.digest() == MEMBERS[name]().digest()
    assert side.to(HERE).digest() == side.digest()
    if isinstance(side, Structured):
        again = type(side).read(side.tensors(), side.metadata())
        assert again.digest() == side.digest()
        assert close(again.to_dense(torch.float64), side.to_dense(torch.float64), 0.0)
        return
    assert isinstance(side, Dense)
    (stored,) = side.tensors().values()
    assert side.digest() == digest(side.stored)
    assert stored.numel() == (SIZE if side.is_diagonal else SIZE * (SIZE + 1) // 2)
    assert side.metadata() == {}


@pytest.mark.parametrize("name", [name for name, made in MEMBERS.items() if isinstance(made(), Structured)])
def test_a_structured_side_is_counted_and_decomposed_without_its_matrix(name: str) -> None:
    side = MEMBERS[name]()
    assert isinstance(side, Structured)
    values, shifts = torch.linalg.eigvalsh(side.to_dense(torch.float64)), torch.tensor([SHIFT, 5.0]).double()
    rounding, kappa = 1e-12 * float(values[-1]), 3.0
    assert close(side.effective_dimensions(shifts), (values / (values + shifts[:, None])).sum(1))
    assert side.size_bytes == sum(tensor.nbytes for tensor in side.tensors().values())
    found = side.decompose("layer", need="vectors")
    if found is None:
        counted = side.counted(kappa)
        assert counted is not None
        assert counted.below_floor == int((values < values[-1] / kappa).sum())
        assert bool((counted.lower <= values + rounding).all())
        assert bool((counted.upper >= values - rounding).all())
        return
    assert float((found.values - values.clamp_min(0)).abs().max()) <= rounding
    assert found.rungs
    if side.has_basis:
        assert found.vectors is not None
        kept = found.values[side.size - found.vectors.shape[1] :]
        assert close((found.vectors * kept) @ found.vectors.mT, side.to_dense(torch.float64))


@pytest.mark.parametrize("scale", [2.0**-120, 1.0, 2.0**120])
def test_what_is_widened_holds_any_scale(scale: float) -> None:
    stored = covariance().to(torch.float16)
    for side in (Dense(stored=stored, scale=scale), Diagonal(stored=stored.diagonal(), scale=scale)):
        assert torch.equal(side.widened().double(), side.stored.double() * scale)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1e-22), (torch.float32, 1e19), (torch.float64, 1e-200), (torch.float64, 1e200)]
)
def test_norms_are_those_of_the_matrix_at_every_scale(dtype: torch.dtype, scale: float) -> None:
    matrix = covariance()
    side = as_operator((matrix * scale).to(dtype))
    values = torch.linalg.eigvalsh(matrix)
    assert side.frobenius_norm() / scale == pytest.approx(float(matrix.norm()), rel=1e-6)
    assert side.spectral_norm() / scale == pytest.approx(float(values[-1]), rel=0.03)
    shift = float(values[-1]) / 10
    damped = FactorSide(side, lambda wanted: side.basis("side", HERE, None, wanted))
    damped.damped_inverse(shift * scale, dtype)
    assert damped.least_damped(shift * scale) / scale == pytest.approx(float(values[0]) + shift, rel=0.03)
