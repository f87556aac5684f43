"""Spilled factors come back as they were written, or not at all."""

import errno
from dataclasses import replace

import pytest
import torch

from engine.factors.kronecker_factors import Factors, TiedParts
from engine.factors.spilled_factors import SpilledFactors, spill
from tests.oracles import MemoryArtifacts


@pytest.fixture
def scratch() -> MemoryArtifacts:
    return MemoryArtifacts()


@pytest.fixture
def spilled(scratch: MemoryArtifacts) -> SpilledFactors:
    torch.manual_seed(0)
    root, other = torch.randn(6, 4), torch.randn(6, 3)
    head = torch.rand(3)
    factors = Factors(
        layer="a", form="linear", bias=False, A=root.T @ root, G=other.T @ other, scale_A=1.0, scale_G=1.0
    )
    tied = TiedParts(A=root.T @ root, counts=torch.rand(3), moments=root.T @ root)
    return spill(scratch, replace(factors, head_diagonal=head, tied=tied), "0", None)


def test_what_is_intact_is_read(scratch: MemoryArtifacts, spilled: SpilledFactors) -> None:
    assert spilled.intact(scratch)
    assert spilled.load(scratch).A.shape == (4, 4)


@pytest.mark.parametrize(
    ("side", "tensor"),
    [
        ("A", "A"),
        ("G", "G"),
        *[("head", each) for each in ("head", "head_activation", "table_counts", "table_moments")],
    ],
)
def test_one_bit_is_enough_to_collect_it_anew(
    scratch: MemoryArtifacts, spilled: SpilledFactors, side: str, tensor: str
) -> None:
    scratch.tensors[f"0.{side}.safetensors"][tensor].view(torch.uint8).view(-1)[0] ^= 1
    assert not spilled.intact(scratch)
    with pytest.raises(OSError, match="damaged") as refused:
        spilled.load(scratch)
    assert refused.value.errno == errno.EIO  # the attempt is repeated, which a word about the document would end


def test_all_of_its_files_are_known(scratch: MemoryArtifacts, spilled: SpilledFactors) -> None:
    assert set(spilled.files) == set(scratch.tensors)


def test_a_file_that_is_gone_is_damaged_too(scratch: MemoryArtifacts, spilled: SpilledFactors) -> None:
    scratch.remove("0.G.safetensors")
    assert not spilled.intact(scratch)
    with pytest.raises(OSError, match="damaged"):
        spilled.load(scratch)
