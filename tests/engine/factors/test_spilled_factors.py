"""Spilled factors come back as they were written, or not at all."""

import errno
from dataclasses import replace

import pytest
import torch

from engine.factors.kronecker_factors import Factors
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
    return spill(scratch, replace(factors, head_diagonal=head), "0", None)


def test_what_is_intact_is_read(scratch: MemoryArtifacts, spilled: SpilledFactors) -> None:
    assert spilled.intact(scratch)
    assert spilled.load(scratch).A.shape == (4, 4)


@pytest.mark.parametrize("side", ["A", "G", "head"])
def test_one_bit_is_enough_to_collect_it_anew(scratch: MemoryArtifacts, spilled: SpilledFactors, side: str) -> None:
    scratch.tensors[f"0.{side}.safetensors"][side].view(torch.uint8).view(-1)[0] ^= 1
    assert not spilled.intact(scratch)
    with pytest.raises(OSError, match="damaged") as refused:
        spilled.load(scratch)
    assert refused.value.errno == errno.EIO  # the attempt is repeated, which a word about the document would end


def test_a_file_that_is_gone_is_damaged_too(scratch: MemoryArtifacts, spilled: SpilledFactors) -> None:
    scratch.remove("0.G.safetensors")
    assert not spilled.intact(scratch)
    with pytest.raises(OSError, match="damaged"):
        spilled.load(scratch)
