"""Parts that an earlier version has stored are read and merged as that version merged them.

``parts_of_an_earlier_version.pt.xz`` holds the files of two parts of two jobs as the commit 2131c9d3 of 29 November
2026 wrote them, and the upper triangles of what it merged them to. One job has a tied head that keeps probabilities,
smaller sample sizes and variances over batches, the other gradient rows.
"""

import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.factors.factor_set import FactorSet, NestedSize
from engine.merging.merge import merge_factor_sets
from engine.merging.part_files import read_part
from tests.divided import difference
from tests.oracles import MemoryArtifacts

STORED = Path(__file__).with_name("parts_of_an_earlier_version.pt.xz")


def parts(stored: dict[str, Any]) -> list[MemoryArtifacts]:
    found = []
    for each in stored["parts"]:
        found.append(MemoryArtifacts())
        found[-1].tensors, found[-1].tables = each["tensors"], each["tables"]
    return found


def require_same(whole: FactorSet, merged: FactorSet | NestedSize, truth: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert [facts.name for facts in whole.layers] == list(truth)
    for facts in whole.layers:
        factors = merged.load(facts.ordinal)
        for side, expected in zip((factors.widened_A, factors.widened_G), truth[facts.name], strict=True):
            # rows are merged by LAPACK's QR, which another version may round otherwise
            assert difference(side.triu() if side.ndim == 2 else side, expected) <= 1e-6, facts.name


@pytest.mark.parametrize("name", ["tied", "rows"])
def test_parts_of_an_earlier_version_are_read_and_merged(name: str) -> None:
    with lzma.open(STORED) as file:
        stored = torch.load(file, weights_only=True)[name]
    whole = merge_factor_sets([read_part(each) for each in parts(stored)])
    require_same(whole, whole, stored["merged"])
    assert [size.eighths for size in whole.nested] == list(stored["nested"])
    for size in whole.nested:
        require_same(whole, size, stored["nested"][size.eighths])
