"""Partitions over ranks: products of real processes equal that of one, and no column is lost."""

import pytest
import torch

from engine.distributed.group import join
from engine.semiseparable.partition import multiply_columns, multiply_rows, scaling, share_columns, share_rows, shares
from engine.semiseparable.semiseparable_matrix import MatrixRefused, default_rank
from tests.engine.distributed.rank_processes import run_ranks
from tests.engine.semiseparable.structures import REAL, Draw, tridiagonal

SIZE = 61


def products(rank: int, size: int, low_rank: int) -> dict[str, torch.Tensor]:
    ranks = join(torch.device("cpu"))
    matrix, _ = tridiagonal(SIZE, low_rank, REAL)
    x = Draw(9, REAL)(SIZE, 3)
    start, stop = shares(SIZE, size)[rank]
    return {
        "rows": multiply_rows(share_rows(matrix, rank, size), x[start:stop], ranks),
        "columns": multiply_columns(share_columns(matrix, rank, size), x, ranks),
        "one": multiply_rows(share_rows(matrix, rank, size), x[start:stop, 0], ranks),
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("low_rank", [3, 9])
def test_a_product_of_ranks_is_that_of_one_process(size: int, low_rank: int) -> None:
    _, dense = tridiagonal(SIZE, low_rank, REAL)
    x = Draw(9, REAL)(SIZE, 3)
    wanted = dense @ x
    found = run_ranks(size, products, size, low_rank)
    assert float((torch.cat([each["rows"] for each in found]) - wanted).abs().max()) <= 1e-12
    assert float((torch.cat([each["one"] for each in found]) - wanted[:, 0]).abs().max()) <= 1e-12
    for each in found:
        assert float((each["columns"] - wanted).abs().max()) <= 1e-12


@pytest.mark.parametrize(("size", "world_size"), [(61, 4), (64, 4), (3, 3), (1, 1), (2, 5)])
def test_one_process_plays_all_ranks(size: int, world_size: int) -> None:
    matrix, dense = tridiagonal(size, 1, REAL)
    x = Draw(9, REAL)(size, 2)
    parts = [share_rows(matrix, rank, world_size) for rank in range(world_size)]
    bounds = shares(size, world_size)
    coupled = sum(part.coupling(x[a:b]) for part, (a, b) in zip(parts, bounds, strict=True))
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1))
    rows = [
        part.product(x[a:b], padded[a : a + 1], padded[b + 1 : b + 2], coupled)
        for part, (a, b) in zip(parts, bounds, strict=True)
        if a < b
    ]
    assert float((torch.cat(rows) - dense @ x).abs().max()) <= 1e-12


@pytest.mark.parametrize("low_rank", [9, 11, 13])
@pytest.mark.parametrize("world_size", [2, 3, 4, 20])
def test_no_column_is_lost(low_rank: int, world_size: int) -> None:
    matrix, dense = tridiagonal(SIZE, low_rank, REAL)
    parts = [share_columns(matrix, rank, world_size) for rank in range(world_size)]
    assert sum(part.rank for part in parts) == low_rank
    whole = sum((part.to_dense() for part in parts), torch.zeros(SIZE, SIZE, dtype=REAL))
    assert float((whole - dense).abs().max()) <= 1e-12


@pytest.mark.parametrize("size", [512, 2048, 131_072])
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_ranks_save_is_below_their_number_by_columns_and_equal_to_it_by_rows(size: int, world_size: int) -> None:
    r = default_rank(size)
    report = scaling(size, r, world_size)
    assert report["scaling_factor"] == pytest.approx((3 + 2 * r) / (3 + 2 * -(-r // world_size)), rel=0.01)
    assert report["scaling_factor"] < world_size
    assert report["by_rows"]["scaling_factor"] == pytest.approx(size / -(-size // world_size), rel=0.01)
    matrix, _ = tridiagonal(512, default_rank(512), torch.float32)
    if size == 512:
        largest = max(share_rows(matrix, rank, world_size).size_bytes for rank in range(world_size))
        assert largest <= -(-512 // world_size) / 512 * matrix.size_bytes + 8
        assert report["by_rows"]["memory_per_gpu_with_zero_mb"] * 2**20 == pytest.approx(largest, rel=0.001)
        kept = max(share_columns(matrix, rank, world_size).size_bytes for rank in range(world_size))
        assert report["memory_per_gpu_with_zero_mb"] * 2**20 == kept


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(MatrixRefused, match="`world_size` must be at least 1"):
        shares(10, 0)


@pytest.mark.parametrize(("size", "low_rank", "name"), [(0, 1, "size"), (8, -1, "rank")])
def test_savings_of_a_matrix_that_cannot_be_are_refused(size: int, low_rank: int, name: str) -> None:
    with pytest.raises(MatrixRefused, match=f"`{name}` must be at least"):
        scaling(size, low_rank, 2)
