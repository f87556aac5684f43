"""Student's quantiles are those of SciPy."""

import pytest
from scipy.stats import t as student

from engine.linalg.student import student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 7, 31, 500])
def test_quantiles_are_students(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(float(student.ppf(0.975, freedom)), rel=1e-6)
