"""The choice of a structure: the smallest measured error, or the fewest bytes, and dense where nothing pays."""

from typing import Any

import pytest
import torch

from engine.semiseparable import choose as choose_module
from engine.semiseparable.block_sss import BlockSSS
from engine.semiseparable.choose import choose, relative_error
from engine.semiseparable.semiseparable_matrix import MatrixRefused
from engine.semiseparable.tridiagonal_low_rank import TridiagonalLowRank
from tests.engine.semiseparable.matrices import matrices
from tests.engine.semiseparable.structures import REAL, SCALES, covariance, sss, true_error


@pytest.mark.part(of=32, by=("kind",))
@pytest.mark.parametrize(
    ("name", "kind"),
    [("kfac_A", TridiagonalLowRank), ("kfac_G", TridiagonalLowRank), ("exp_4", BlockSSS), ("cauchy", BlockSSS)],
)
@pytest.mark.part(of=3, law="the best structure within the bytes is chosen")
def test_the_smallest_error_within_the_bytes_wins(name: str, kind: type) -> None:
    dense = matrices()[name]
    choice = choose(dense)
    assert choice.chosen is not None
    assert isinstance(choice.chosen.matrix, kind)
    allowed = 8 * (3 * 512 - 2 + 2 * 512 * 9)
    for each in (choice.chosen, *choice.losers):
        assert each.size_bytes == each.matrix.size_bytes <= allowed
        measured = float((each.matrix.to_dense() - dense).norm() / dense.norm())
        assert each.relative_error == pytest.approx(measured, rel=1e-6, abs=1e-12)
        assert each.relative_error >= choice.chosen.relative_error
    assert f"within {allowed:,} bytes" in choice.why
    for each in choice.losers:
        assert f"{each.name}: {each.relative_error:.3g} in {each.size_bytes:,} bytes" in choice.why


@pytest.mark.part(of=3, law="the best structure within the bytes is chosen")
def test_the_fewest_bytes_within_a_tolerance_win() -> None:
    dense = matrices()["kfac_A"]
    choice = choose(dense, tolerance=0.05)
    assert choice.chosen is not None
    assert choice.chosen.relative_error <= 0.05
    assert all(each.size_bytes >= choice.chosen.size_bytes for each in choice.losers if each.relative_error <= 0.05)
    assert choice.chosen.name in choice.why


def test_what_no_structure_meets_stays_dense() -> None:
    dense = matrices()["random"][:64, :64]
    choice = choose(dense, tolerance=1e-6)
    assert choice.chosen is None
    assert choice.why == "dense: at least order 32 of 64 would be needed for a relative error of 1e-06"


def test_few_rows_stay_dense() -> None:
    choice = choose(torch.eye(4, dtype=REAL))
    assert choice.chosen is None
    assert choice.why.startswith(
        "dense: no structure of a finite error takes fewer than the 128 bytes of the dense matrix (others: "
    )


def test_an_error_is_that_of_the_dense_matrix() -> None:
    matrix, dense = sss(61, 7, 3, REAL)
    other = dense + 0.1
    wanted = float((other - dense).norm() / other.norm())
    assert relative_error(other, matrix) == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("tolerance", [0.0, 1.0, -1.0])
def test_a_tolerance_is_between_0_and_1(tolerance: float) -> None:
    with pytest.raises(MatrixRefused, match="`tolerance` must be above 0 and below 1"):
        choose(torch.eye(40, dtype=REAL), tolerance=tolerance)


@pytest.mark.parametrize("rank", [0, -3])
def test_a_rank_is_at_least_1(rank: int) -> None:
    with pytest.raises(MatrixRefused, match=rf"`rank` must be at least 1.*\(got {rank}\)"):
        choose(torch.eye(64), rank=rank)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tolerance": "0.1"}, r"`tolerance` must be a number \(got '0\.1'\)"),
        ({"rank": 2.5}, r"`rank` must be a whole number \(got 2\.5\)"),
        ({"budget_bytes": 1e6}, r"`budget_bytes` must be a whole number"),
    ],
)
def test_options_are_numbers(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MatrixRefused, match=words):
        choose(torch.eye(64), **options)


def test_a_matrix_is_a_tensor() -> None:
    with pytest.raises(MatrixRefused, match=r"`matrix` must be a torch\.Tensor \(got list\)"):
        choose([[1.0]])  # type: ignore[arg-type]


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(("dtype", "scale"), SCALES)
def test_an_error_is_the_true_one_at_every_scale(dtype: torch.dtype, scale: float) -> None:
    dense = (covariance() * scale).to(dtype)
    for tolerance in (0.4, 0.05, None):
        choice = choose(dense, tolerance=tolerance)
        assert (choice.chosen is None) == (tolerance == 0.05)
        for each in (choice.chosen, *choice.losers):
            if each is not None:
                assert each.relative_error == pytest.approx(true_error(each.matrix, dense, scale), rel=1e-3)
        assert choice.chosen is None or tolerance is None or choice.chosen.relative_error <= tolerance


def test_a_candidate_without_a_finite_error_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_module, "relative_error", lambda dense, matrix: torch.nan)
    for tolerance in (None, 0.4):
        choice = choose(covariance(), tolerance=tolerance)
        assert choice.chosen is None
        assert choice.why.startswith("dense: ")


def test_a_matrix_whose_sums_overflow_is_refused() -> None:
    with pytest.raises(
        MatrixRefused, match=r"of up to 3e\+38, of which 64 add up to infinity in torch\.float32; divide"
    ):
        choose(torch.full((64, 64), -3e38))
