import hashlib
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BiasColumnMismatch, BrokenFactors
from engine.factors.factor_files import read_factors
from engine.factors.kronecker_factors import Factors, digest, mirrored_, packed, unpacked
from tests.oracles import MemoryArtifacts


@given(st.integers(1, 40), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None, max_examples=30)
def test_packing_loses_nothing(size: int, dtype: torch.dtype) -> None:
    matrix = torch.randn(size, size, dtype=dtype)
    matrix = matrix + matrix.T
    triangle = packed(matrix)
    assert triangle.shape == (size * (size + 1) // 2,)
    assert torch.equal(unpacked(triangle, size), matrix)


def test_packed_triangle_is_the_upper_one_row_by_row() -> None:
    matrix = torch.tensor([[1.0, 2, 3], [2, 4, 5], [3, 5, 6]])
    assert packed(matrix).tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("size", [1, 7, 1024, 1500])
def test_mirroring_takes_the_upper_triangle(size: int) -> None:
    matrix = torch.randn(size, size)
    expected = matrix.triu() + matrix.triu(1).T
    assert torch.equal(mirrored_(matrix.clone()), expected)


def test_mirroring_takes_each_of_several_matrices_within_a_larger_tensor() -> None:
    around = torch.randn(2, 3, 220, 300)
    expected = around.clone()
    inside = expected[..., 5:205, 40:240]
    inside.copy_(inside.triu() + inside.triu(1).mT)
    mirrored_(around[..., 5:205, 40:240])
    assert torch.equal(around, expected)


def test_digest_is_sha256_of_dtype_shape_and_bytes() -> None:
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = hashlib.sha256(b"float32(2, 2)" + struct.pack("<4f", 1, 2, 3, 4)).hexdigest()
    assert digest(matrix) == expected
    assert digest(matrix.T) != expected
    assert digest(matrix.T.contiguous().T) == expected
    assert digest(matrix.reshape(4)) != expected
    assert digest(matrix.double()) != expected


def test_gradient_whose_bias_column_disagrees_raises_with_both_shapes() -> None:
    factors = Factors(layer="head", form="kronecker", bias=True, A=torch.eye(5), G=torch.eye(3))
    factors.require_fit(torch.zeros(3, 5))
    with pytest.raises(BiasColumnMismatch, match=r"`head`.*\(3, 4\).*with a bias column.*\(3, 5\)"):
        factors.require_fit(torch.zeros(3, 4))


def test_stored_factor_whose_bias_column_disagrees_raises_with_both_shapes() -> None:
    store = MemoryArtifacts()
    facts = {
        "ordinal": 0, "name": "head", "module": "Linear", "form": "kronecker", "why": "", "parameters": ["head.weight"],
        "parameter_count": 15, "in_dim": 5, "out_dim": 3, "bias": True, "positions": 1, "terms": 1, "calls": 1,
        "sharing": "expand", "rank_bound_A": 1, "rank_bound_G": 1, "shared_A_with": None,
    }  # fmt: skip
    counts = {"trainable_parameters": 15, "examples": 1, "updates": 1, "passes": 1}
    store.save_json(
        "factors/factors.index.json",
        {"format": "kronoscope-factors/1", "collection": {}, "layers": [facts], "declared": [], **counts},
    )
    store.save_tensors(
        "factors/0.safetensors", {"activation_covariance": torch.ones(10), "gradient_covariance": torch.ones(6)}, {}
    )
    with pytest.raises(BiasColumnMismatch, match=r"`head`.*\(10,\).*with a bias column.*\(15,\)"):
        read_factors(store).load(0)


def test_absent_or_foreign_index_is_refused() -> None:
    with pytest.raises(BrokenFactors, match=r"there is no `factors/factors\.index\.json`"):
        read_factors(MemoryArtifacts())
    store = MemoryArtifacts()
    store.save_json("factors/factors.index.json", {"format": "other/2"})
    with pytest.raises(BrokenFactors, match="not of the format"):
        read_factors(store)
