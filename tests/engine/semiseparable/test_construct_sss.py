"""Construction of block SSS: exact where the structure is, with a bound that holds, and from rows alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import NonFiniteFactor, WrongShape
from engine.semiseparable.construct_sss import construct_sss
from engine.semiseparable.semiseparable_matrix import MatrixRefused
from tests.engine.semiseparable.matrices import EXACT, NAMES, SIZE, matrices
from tests.engine.semiseparable.structures import COMPLEX, REAL, SCALES, Draw, covariance, sss, true_error

CHOICES = [{"block": 4, "order": 3}, {"block": 16, "tolerance": 1e-3}, {"block": 32, "order": 8}]


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_stated_bound_is_the_error(name: str, choice: dict[str, float]) -> None:
    dense = matrices()[name]
    matrix = construct_sss(dense, **choice)  # type: ignore[arg-type]
    error, norm = float((matrix.to_dense() - dense).norm()), float(dense.norm())
    assert matrix.error_bound is not None
    assert error <= matrix.error_bound
    if error > 1e-8:
        # rounding is within the bound
        assert matrix.error_bound <= error * (1 + 1e-6) + 1e-12 * norm
    if name in EXACT and "order" in choice:
        assert error <= 1e-12 * norm
    if "tolerance" in choice:
        assert error <= choice["tolerance"] * norm
    else:
        assert max(map(max, matrix.orders)) <= choice["order"]


@pytest.mark.parametrize(("name", "order"), list(zip(EXACT, (1, 1, 1, 2, 3), strict=True)))
def test_an_exact_matrix_gets_its_order(name: str, order: int) -> None:
    matrix = construct_sss(matrices()[name], block=16, tolerance=1e-9)
    assert set(matrix.orders[0]) == set(matrix.orders[1]) == {order}


@pytest.mark.part(of=16, by=("dtype",))
@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
@pytest.mark.parametrize(("size", "block"), [(96, 8), (101, 8), (8, 8), (1, 1), (40, 1), (70, 70), (300, 100)])
def test_orders_that_are_found_are_those_that_were_given(size: int, block: int, dtype: torch.dtype) -> None:
    given, dense = sss(size, block, 3, dtype)
    # an edge near a corner carries no more than the rows beyond it, and a chain no more than its narrowest edge needs
    found = construct_sss(dense, block=block, tolerance=1e-12)
    ranks = [
        [int(torch.linalg.matrix_rank(dense[:at, at:], rtol=1e-11)) for at in range(block, size, block)],
        [int(torch.linalg.matrix_rank(dense[at:, :at], rtol=1e-11)) for at in range(block, size, block)],
    ]
    assert [list(side) for side in found.orders] == ranks
    assert all(
        a <= b for own, most in zip(found.orders, given.orders, strict=True) for a, b in zip(own, most, strict=True)
    )
    assert float((found.to_dense() - dense).norm()) <= 1e-12 * float(dense.norm())


def rows_of(dense: Tensor, asked: list[tuple[int, int]]) -> Callable[[int, int], Tensor]:
    def rows(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return dense[start:stop].clone()

    return rows


@pytest.mark.parametrize("block", [16, 100])
def test_rows_give_the_same_matrix_as_the_dense_one(block: int) -> None:
    dense, asked = matrices()["gauss"], list[tuple[int, int]]()
    for choice in ({"order": 5}, {"tolerance": 1e-5}):
        whole = construct_sss(dense, block=block, **choice)  # type: ignore[arg-type]
        by_rows = construct_sss(rows_of(dense, asked), SIZE, block=block, **choice)  # type: ignore[arg-type]
        assert by_rows.orders == whole.orders
        assert by_rows.error_bound == whole.error_bound
        assert all(torch.equal(a, b) for a, b in zip(by_rows.tensors().values(), whole.tensors().values(), strict=True))
    assert max(stop - start for start, stop in asked) <= 64
    reads = [sum(start <= row < stop for start, stop in asked) for row in (0, 77, SIZE - 1)]
    assert reads == [5, 5, 5]  # twice, and three times with a tolerance


def test_rows_that_cannot_be_are_refused() -> None:
    dense = matrices()["gauss"]
    with pytest.raises(WrongShape, match=r"rows\(0, 16\) must have shape \(16, 512\) \(got \(16, 511\)\)"):
        construct_sss(lambda start, stop: dense[start:stop, 1:], SIZE, order=3)
    broken = dense.clone()
    broken[99, 3] = torch.inf
    with pytest.raises(NonFiniteFactor, match="NaN or Inf in row 99"):
        construct_sss(lambda start, stop: broken[start:stop], SIZE, order=3)
    with pytest.raises(
        WrongShape, match=r"must be of torch\.float64 on cpu, as rows before \(got torch\.float32 on cpu\)"
    ):
        construct_sss(
            lambda start, stop: dense[start:stop].to(torch.float32 if start % 128 else REAL), SIZE, block=128, order=3
        )


@pytest.mark.parametrize("given", [None, [[1.0] * 8] * 8, torch.eye(8).to_sparse()], ids=["None", "list", "sparse"])
def test_rows_that_are_no_dense_tensor_are_refused(given: Any) -> None:
    with pytest.raises(MatrixRefused, match=r"`rows\(0, 8\)` must be (a torch\.Tensor|dense)"):
        construct_sss(lambda start, stop: given, 8, block=8, order=1)


def test_rows_of_another_dtype_the_second_time_are_refused() -> None:
    dense, asked = torch.eye(8), list[int]()

    def rows(start: int, stop: int) -> Tensor:
        asked.append(start)
        return dense[start:stop].to(torch.float32 if len(asked) <= 2 else REAL)

    with pytest.raises(WrongShape, match=r"rows\(4, 8\) must be of torch\.float32"):
        construct_sss(rows, 8, block=4, order=1)


def test_rows_that_change_are_refused() -> None:
    draw = Draw(0, REAL)
    with pytest.raises(MatrixRefused, match=r"rows .* came with other numbers the second time"):
        construct_sss(lambda start, stop: draw(stop - start, 64), 64, order=3)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({}, "either `order` or `tolerance`"),
        ({"order": 3, "tolerance": 0.1}, "either `order` or `tolerance`"),
        ({"order": 0}, "`order` must be from 1 to 512"),
        ({"order": 513}, "`order` must be from 1 to 512"),
        ({"tolerance": 1.0}, "`tolerance` must be above 0 and below 1"),
        ({"tolerance": 0.0}, "`tolerance` must be above 0 and below 1"),
        ({"order": 3, "block": 0}, "`block` must be at least 1"),
        ({"order": 2.5}, r"`order` must be a whole number \(got 2\.5\)"),
        ({"order": 3, "block": 4.0}, r"`block` must be a whole number \(got 4\.0\)"),
        ({"tolerance": "0.1"}, r"`tolerance` must be a number \(got '0\.1'\)"),
        ({"tolerance": torch.nan}, "`tolerance` must be a finite number"),
        ({"tolerance": 0.1, "most_order": "3"}, "`most_order` must be a whole number"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(choice: dict[str, float], words: str) -> None:
    with pytest.raises(MatrixRefused, match=words):
        construct_sss(matrices()["gauss"], **choice)  # type: ignore[arg-type]


def test_a_callback_needs_a_size() -> None:
    with pytest.raises(MatrixRefused, match="`size` must be the rows"):
        construct_sss(lambda start, stop: torch.zeros(stop - start, 4), order=1)
    with pytest.raises(MatrixRefused, match=r"`size` must be a whole number \(got 4\.0\)"):
        construct_sss(lambda start, stop: torch.zeros(stop - start, 4), 4.0, order=1)  # type: ignore[arg-type]


def test_float32_states_the_error_of_float32() -> None:
    for name in ("gauss", "exp_64", "random", "kfac_A"):
        dense = matrices()[name].to(torch.float32)
        matrix = construct_sss(dense, block=16, order=8)
        error = float((matrix.to_dense().to(REAL) - dense.to(REAL)).norm())
        assert matrix.error_bound is not None
        assert matrix.D.dtype == torch.float32
        assert error <= matrix.error_bound <= error + 1e-3 * float(dense.norm())


def test_what_gives_no_rows_is_refused() -> None:
    with pytest.raises(MatrixRefused, match=r"`matrix` must be a torch\.Tensor, or a callback .*\(got list\)"):
        construct_sss([[1.0]], 1, order=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "scale"), SCALES)
def test_tolerance_and_bound_hold_at_every_scale(dtype: torch.dtype, scale: float) -> None:
    dense = (covariance() * scale).to(dtype)
    for choice in ({"tolerance": 0.1}, {"tolerance": 1e-3}, {"order": 3}):
        matrix = construct_sss(dense, block=8, **choice)
        error, norm = true_error(matrix, dense, scale), float((dense.to(REAL) / scale).norm())
        assert matrix.error_bound is not None
        bound = matrix.error_bound / scale / norm
        # at 1e-40 an entry has four digits
        assert error <= bound <= error + 0.01
        assert error <= choice.get("tolerance", 1.0) + (0.01 if scale == 1e-40 else 0)


@pytest.mark.parametrize(("dtype", "block", "size", "seed"), [(COMPLEX, 1, 3, 1), (torch.float32, 2, 17, 0)])
def test_the_bound_holds_where_nothing_but_rounding_is_left_out(
    dtype: torch.dtype, block: int, size: int, seed: int
) -> None:
    for first in range(seed, seed + 40):
        draw = Draw(first, dtype)
        for dense in (draw(size, size), torch.outer(draw(size), draw(size)), sss(size, block, 3, dtype, first)[1]):
            matrix = construct_sss(dense, block=block, order=size)
            assert matrix.error_bound is not None
            assert float((matrix.to_dense().to(COMPLEX) - dense.to(COMPLEX)).norm()) <= matrix.error_bound
