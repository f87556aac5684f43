import pytest
import torch

from engine.factors.kronecker_factors import mirrored_
from engine.linalg.gram import add_gram_, add_grams_


@pytest.mark.part(of=24, by=("size", "columns_together"))
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 383, 384, 390, 1001, 1100])
@pytest.mark.parametrize("rows", [0, 1, 17])
@pytest.mark.parametrize("columns_together", [False, True])
def test_upper_triangle_of_the_product(size: int, rows: int, columns_together: bool) -> None:
    matrix = torch.randn(rows, size, dtype=torch.float64)
    matrix = matrix.T.contiguous().T if columns_together else matrix
    before = torch.randn(size, size, dtype=torch.float64)
    found = mirrored_(add_gram_(before.clone(), matrix))
    expected = mirrored_(before + matrix.T @ matrix)
    assert torch.allclose(found, expected, atol=1e-12)


def test_a_view_into_a_larger_matrix_is_filled() -> None:
    total = torch.zeros(6, 6)
    add_gram_(total[:5, :5], torch.ones(2, 5))
    assert total[:5, :5].triu().eq(torch.full((5, 5), 2.0).triu()).all()
    assert not total[5].any()
    assert not total[:, 5].any()


@pytest.mark.parametrize(("groups", "size"), [(3, 1), (4, 5), (2, 400)])
def test_groups_of_columns_apart(groups: int, size: int) -> None:
    matrix = torch.randn(17, groups * size, dtype=torch.float64)
    before = torch.randn(groups, size, size, dtype=torch.float64)
    found = mirrored_(add_grams_(before.clone(), matrix))
    for group in range(groups):
        own = matrix[:, group * size : (group + 1) * size]
        assert torch.allclose(found[group], mirrored_(before[group] + own.T @ own), atol=1e-12)
