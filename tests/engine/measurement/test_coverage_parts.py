"""The parts of a model's coverage: of which parameters a full block is kept, and of which a diagonal alone."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.capacity import CapacityParams
from catalog.requests.woodbury import Woodbury
from engine.analyses.capacity import Capacity
from engine.memory.plan import Chosen
from kronoscope.local import PartlyCovered, measure
from tests.oracles import workspace


class Mixed(nn.Module):
    """A lookup, a scale, a linear head, a part without gradient, and a table that no form describes."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, width)  # 7·width numbers, one-hot inputs
        self.norm = nn.LayerNorm(width)  # 2·width: an exact block
        self.shift = nn.Parameter(torch.randn(5, width))  # 5·width, which enter a sum: a diagonal
        self.renormed = nn.Embedding(4, width, max_norm=1.0)  # 4·width: not covered
        self.head = nn.Linear(width, 3)  # 3·width + 3
        self.unused = nn.Linear(2, 2)  # 6, without gradient

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.words(ids) + self.shift) + self.renormed(ids % 4)
        logits: Tensor = self.head(hidden.mean(1))
        return logits


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(12.0).reshape(6, 2) / 12)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.sum(0).tanh()


def data() -> list[Any]:
    return [(torch.randint(0, 7, (6, 5), generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3)]


def test_every_parameter_is_in_one_part_and_what_no_block_holds_is_named() -> None:
    with pytest.warns(PartlyCovered) as warned:
        found = measure(Mixed(), data(), task="classification")
    parts = found.summary["capacity"].coverage.parts
    assert {part.reason or part.kind: (part.parameters, part.layers) for part in parts} == {
        "block": (21 + 6 + 12, 3),
        "diagonal": (15, 1),
        "embedding_renormalised": (12, 1),
        "no_gradient": (6, 1),
    }
    assert {part.reason or part.kind: [(each.names, each.module) for each in part.named] for part in parts} == {
        "block": [],
        "diagonal": [(("shift",), "Mixed")],
        "embedding_renormalised": [(("renormed.weight",), "Embedding")],
        "no_gradient": [(("unused.weight", "unused.bias"), "Linear")],
    }
    # 39, 15, 12 and 6 of 72
    assert repr(found) == ("<Measurement: capacity of 4 layers; 54.2% full block, 20.8% diagonal, 25.0% not covered>")
    (said,) = (str(each.message) for each in warned)
    assert "75.0% of the 72 trainable parameters were measured; not measured: 12 embedding_renormalised: " in said
    assert "renormed.weight (Embedding)" in said


def test_a_part_that_the_caller_accepts_is_not_warned_of() -> None:
    found = measure(Mixed(), data(), task="classification", collection={"min_coverage": 0.7})
    assert "25.0% not covered" in repr(found)


def test_a_model_of_diagonals_is_warned_of() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Table())
    batches = [(torch.randn(6, 2, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 2)]
    with pytest.warns(PartlyCovered, match=r"33\.3% full block, 66\.7% diagonal; diagonal: 1\.scale \("):
        measure(model, batches, task="classification")


@pytest.mark.parametrize("approximate", [True, False])
def test_a_head_too_wide_for_a_dense_factor_is_sketched_or_a_diagonal(*, approximate: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(first=nn.Linear(5, 6), head=nn.Linear(6, 40)))
    chunks = [(torch.randn(60, 5, generator=generator), torch.randint(0, 40, (60,), generator=generator))]
    made = workspace(model, chunks, "classification", fisher="mc", batch_size=20)
    made.options.kinds, made.inputs.examples = ("capacity",), 60
    made.options.woodbury = Woodbury(approximate=approximate, sketch_rank=8)
    made.resume.chosen = Chosen(parts=(("first", "head"),), sketched=("head",))
    analysis = Capacity(CapacityParams(), made)
    rows = {row.layer: row for row in analysis.rows()}
    assert rows["head"].record.branch == "diagonal_sketch"
    parts = {part.kind: part.parameters for part in analysis.coverage.parts or ()}
    assert parts == {"block": 36, "sketched" if approximate else "diagonal": 280}
