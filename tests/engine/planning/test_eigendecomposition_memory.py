"""The bytes of one matrix's eigendecomposition are those that it takes, and those that plans count."""

from typing import Any

import pytest
import torch

from engine.linalg.eigendecomposition import decompose, rungs
from engine.planning.decomposition_memory import eigendecomposition_bytes
from kronoscope import local
from tests.memory_profile import peak_bytes


def test_it_answers_by_the_ladder_that_plans_are_made_with() -> None:
    for device in ("cpu", "cuda"):
        for vectors in (False, True):
            found = eigendecomposition_bytes(3000, torch.float32, device, vectors=vectors)
            need = "vectors" if vectors else "values"
            assert found.ladder == rungs(3000, need=need, device=torch.device(device), dtype=torch.float32)
            assert (found.rung, found.host_bytes) == (found.ladder[0].name, found.ladder[0].host_bytes)
            assert (found.device_bytes > 0) == (device == "cuda")
    assert local.eigendecomposition_bytes is eigendecomposition_bytes


@pytest.mark.parametrize("vectors", [False, True])
def test_a_decomposition_takes_what_was_said(vectors: bool) -> None:
    rows = torch.randn(900, 700, generator=torch.Generator().manual_seed(0))
    matrix = rows.T @ rows
    foreseen = eigendecomposition_bytes(700, torch.float32, vectors=vectors).host_bytes
    taken = peak_bytes(lambda: decompose(matrix, "fc", need="vectors" if vectors else "values"))
    assert 0.8 * foreseen < taken < 1.1 * foreseen


@pytest.mark.parametrize(("n", "said"), [(0, "at least 1 (got 0)"), (10**6, "at most 46,340")])
def test_sizes_that_cannot_be_are_refused(n: int, said: str) -> None:
    with pytest.raises(ValueError, match="n must be") as refused:
        eigendecomposition_bytes(n)
    assert said in str(refused.value)


@pytest.mark.parametrize("n", ["x", None, [], float("nan"), 1.5, True])
def test_sizes_that_are_not_whole_numbers_are_refused(n: Any) -> None:
    with pytest.raises(TypeError, match=r"`n` must be a whole number \(got"):
        eigendecomposition_bytes(n)
    with pytest.raises(TypeError, match="`dtype` must be dtype"):
        eigendecomposition_bytes(3, n)
