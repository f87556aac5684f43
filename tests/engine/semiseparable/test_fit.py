"""The fit of T + U Vᵀ: the error falls, and is no worse than the copied recipe's on any of fourteen matrices."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.semiseparable.fit import TridiagonalFit, fit_tridiagonal_low_rank
from engine.semiseparable.semiseparable_matrix import MatrixRefused, default_rank
from tests.engine.semiseparable.matrices import NAMES, matrices
from tests.engine.semiseparable.structures import COMPLEX, REAL, SCALES, Draw, covariance, tridiagonal, true_error

BETTER = {"gauss": 10, "kfac_G": 10, "kfac_A": 5}


def naive(dense: Tensor, rank: int) -> float:
    """T = the band of H, U Vᵀ = the truncated SVD of the rest."""
    band = sum(torch.diag(dense.diagonal(offset), offset) for offset in (-1, 0, 1))
    left, values, right = torch.linalg.svd(dense - band)
    rest = dense - band - (left[:, :rank] * values[:rank]) @ right[:rank]
    return float(rest.norm() / dense.norm())


def imputed(dense: Tensor, rank: int, sweeps: int) -> float:
    """Expectation and maximisation: impute the band from U Vᵀ, truncate, repeat; from the SVD of H."""
    n = dense.shape[0]
    i = torch.arange(n)
    near = (i[:, None] - i).abs() <= 1
    filled = dense
    for _ in range(sweeps):
        left, values, right = torch.linalg.svd(filled)
        low = (left[:, :rank] * values[:rank]) @ right[:rank]
        filled = torch.where(near, low, dense)
    return float((dense - low).masked_fill(near, 0).norm() / dense.norm())


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.part(of=3, law="the error falls and beats the copied recipe")
def test_the_error_falls_and_beats_the_copied_recipe(name: str) -> None:
    dense = matrices()[name]
    rank = default_rank(512)
    fitted = fit_tridiagonal_low_rank(dense, rank)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in zip(fitted.errors, fitted.errors[1:], strict=False))
    measured = float((fitted.matrix.to_dense() - dense).norm() / dense.norm())
    assert fitted.relative_error == pytest.approx(measured, rel=1e-8)
    copied = naive(dense, rank)
    assert measured <= copied
    assert measured * BETTER.get(name, 1) <= copied


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("name", ["gauss", "kfac_G", "exp_64"])
def test_the_end_is_that_of_expectation_and_maximisation(name: str) -> None:
    dense = matrices()[name][:128, :128]
    fitted = fit_tridiagonal_low_rank(dense, 5)
    assert fitted.relative_error <= 1.05 * imputed(dense, 5, 200)


@pytest.mark.part(of=24, by=("dtype",))
@pytest.mark.parametrize("dtype", [REAL, COMPLEX, torch.float32])
@pytest.mark.parametrize(("size", "rank"), [(60, 4), (61, 1), (5, 2), (2, 1), (1, 1)])
def test_a_matrix_of_the_structure_is_met(size: int, rank: int, dtype: torch.dtype) -> None:
    dense = tridiagonal(size, rank, dtype)[1]
    fitted = fit_tridiagonal_low_rank(dense, rank)
    assert fitted.matrix.dtype == dtype
    error = float((fitted.matrix.to_dense() - dense).norm() / dense.norm())
    assert error <= (2e-6 if dtype == torch.float32 else 1e-9)


def test_levels_are_columns_of_one_rank() -> None:
    dense = matrices()["gauss"]
    levels, one = fit_tridiagonal_low_rank(dense, (9, 4, 2)), fit_tridiagonal_low_rank(dense, 15)
    assert levels.matrix.ranks == (9, 4, 2)
    assert levels.relative_error == one.relative_error


@pytest.mark.parametrize("rank", [0, 513])
def test_a_rank_that_cannot_be_is_refused(rank: int) -> None:
    with pytest.raises(MatrixRefused, match="`rank` must be from 1 to 512"):
        fit_tridiagonal_low_rank(matrices()["gauss"], rank)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2.0, r"`rank` must be a whole number \(got 2\.0\)"),
        ("2", r"`rank` must be a whole number \(got '2'\)"),
        ((3, -1), r"`rank` must be at least 1 \(got -1\)"),
        ((3, 1.5), r"`rank` must be a whole number \(got 1\.5\)"),
        ((), r"`rank` must be from 1 to 8"),
    ],
)
def test_ranks_that_are_no_numbers_are_refused(ranks: Any, words: str) -> None:
    with pytest.raises(MatrixRefused, match=words):
        fit_tridiagonal_low_rank(torch.eye(8), ranks)


def test_a_rank_of_another_type_of_integer_is_one() -> None:
    assert fit_tridiagonal_low_rank(torch.eye(8), np.int64(2)).matrix.rank == 2  # type: ignore[arg-type]


def test_a_sparse_matrix_is_refused() -> None:
    with pytest.raises(MatrixRefused, match=r"`matrix` must be dense \(got torch\.sparse_coo\); give its to_dense\(\)"):
        fit_tridiagonal_low_rank(torch.eye(8).to_sparse(), 2)


def test_zeros_and_a_full_rank_are_met() -> None:
    assert fit_tridiagonal_low_rank(torch.zeros(20, 20, dtype=REAL), 2).relative_error == 0
    dense = Draw(1, REAL)(12, 12)
    assert fit_tridiagonal_low_rank(dense, 12).relative_error <= 1e-10


def test_the_caller_can_stop_between_sweeps() -> None:
    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        TridiagonalFit(matrices()["gauss"], stop).at(3)


@pytest.mark.parametrize(("dtype", "scale"), SCALES)
def test_the_error_is_the_true_one_at_every_scale(dtype: torch.dtype, scale: float) -> None:
    dense = (covariance() * scale).to(dtype)
    fitted = fit_tridiagonal_low_rank(dense)
    assert fitted.relative_error == pytest.approx(true_error(fitted.matrix, dense, scale), rel=1e-3)
    assert fitted.relative_error == pytest.approx(fit_tridiagonal_low_rank(covariance()).relative_error, rel=1e-3)
