"""A plan counts what a merge holds, by the profiler's account of the tensors that it makes."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.collect import collect_or_read, prepare_collection
from engine.planning.joined_plan import with_merge
from engine.workspace import Workspace
from tests.divided import joining, stored
from tests.memory_profile import peak_bytes
from tests.oracles import MemoryArtifacts, workspace


class Read(MemoryArtifacts):
    """Artifacts that are read anew each time, as files are."""

    def __init__(self, kept: MemoryArtifacts) -> None:
        self.tensors, self.tables = kept.tensors, kept.tables

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        return {key: tensor.clone() for key, tensor in super().load_tensors(name).items()}


def job(**options: Any) -> Workspace:
    torch.manual_seed(0)
    x, y = torch.randn(8, 699), torch.randint(0, 500, (8,))
    made = workspace(nn.Linear(699, 500), [(x, y)], "classification", **{"dtype": "float32", "batch_size": 4} | options)
    made.inputs.examples = 8
    return made


@pytest.mark.part(of=2, by=())
@pytest.mark.parametrize(
    "options", [{"fisher": "empirical", "ekfac": True}, {"dtype": "float64", "ekfac": True}], ids=str
)
def test_a_merge_holds_what_the_plan_says(options: dict[str, Any]) -> None:
    make = partial(job, **options)
    pieces = [Read(stored(make, begin, begin + 4)) for begin in (0, 4)]
    whole = collect_or_read(joining(make, pieces))
    assert whole.layers[0].representation_G == "dense"
    with prepare_collection(make()) as (planned, _):
        plan = with_merge(planned.plan, planned.probed.probe, pieces=2)
    (term,) = [term for term in plan.terms if term.name == "merge"]
    measured = peak_bytes(lambda: whole.load(0))
    assert 0.8 * term.size_bytes <= measured <= 1.1 * term.size_bytes, (measured, term.size_bytes)
    (disk,) = [term for term in plan.terms if term.name == "factors of the pieces"]
    written = sum(
        tensor.numel() * tensor.element_size()
        for piece in pieces
        for file in piece.tensors.values()
        for tensor in file.values()
    )
    assert disk.size_bytes == written
