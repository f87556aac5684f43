"""Model bytes: weights of another precision than they are measured in are planned twice, and stand twice."""

from typing import Any

import pytest
import torch
from torch import nn

from engine.collect import collect_or_read
from engine.collection import pass_job
from engine.estimate import plan_job
from engine.model.mixed_precision import Precision
from engine.planning.model_memory import weigh_model, weight_terms
from engine.workspace import Workspace
from tests.oracles import workspace

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def net(kept: str, device: str = "cpu") -> nn.Module:
    wide, narrow = nn.Linear(8, 64, device=device), nn.Linear(64, 4, device=device)
    layers = [wide, nn.GELU(), narrow, nn.GELU(), nn.Linear(4, 3, device=device)]
    return nn.Sequential(*layers).to(DTYPES[kept])


def space(kept: str, dtype: str, device: str = "cpu", **options: Any) -> Workspace:
    chunk = torch.randn(6, 8), torch.randint(0, 3, (6,))
    made = workspace(net(kept, device), [chunk], "classification", dtype=dtype, fisher="mc", **options)
    made.inputs.examples = 6
    return made


def sizes(made: Workspace, place: Any) -> dict[tuple[str, str], int]:
    return {(term.name, term.place): term.size_bytes for term in weight_terms(made, place)}


@pytest.mark.part(of=16, by=("kept",))
@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_converted_weights_are_planned_beside_their_own(kept: str, dtype: str) -> None:
    count = sum(parameter.numel() for parameter in net(kept).parameters())
    own, converted = count * DTYPES[kept].itemsize, count * DTYPES[dtype].itemsize
    beside = {} if kept == dtype else {("converted weights", "device"): converted}
    assert sizes(space(kept, dtype), "device") == {("weights", "device"): own} | beside
    # a process on the host counts what it holds itself, unless it plans for weights that are not there
    assert sizes(space(kept, dtype), "host") == {}
    absent = {name: size for (name, _), size in sizes(space(kept, dtype, "meta"), "host").items()}
    assert absent == {"weights": own} | ({} if kept == dtype else {"converted weights": converted})
    terms = {term.name: term.size_bytes for term in plan_job(space(kept, dtype, "meta")).terms}
    assert terms["weights"] == own
    assert terms.get("converted weights", 0) == (0 if kept == dtype else converted)


def test_a_job_weighs_its_model_before_it_is_converted() -> None:
    made = space("bfloat16", "float64")
    collect_or_read(made)
    count = sum(parameter.numel() for parameter in net("bfloat16").parameters())
    assert weigh_model(made) == (2 * count, 8 * count, False, 0)


@pytest.mark.parametrize("absent", [True, False])
def test_a_graph_that_is_retained_is_planned_whole_and_its_gradients_wait(
    monkeypatch: pytest.MonkeyPatch, *, absent: bool
) -> None:
    plans: dict[str, dict[str, int]] = {}
    for amp in ("off", "fp16"):
        precision = Precision(amp=amp)  # type: ignore[arg-type]
        made = space("float32", "float32", "meta" if absent else "cpu", batch_size=6)
        monkeypatch.setattr(pass_job, "choose_precision", lambda *_, found=precision: found)
        if absent:
            plan = plan_job(made)
        else:
            collect_or_read(made)
            assert made.results.plan is not None
            plan = made.results.plan
        plans[amp] = {term.name: term.size_bytes for term in plan.terms if term.stage == "collection"}
    assert "gradients that wait" not in plans["off"]
    # six examples, three products of 64, 4 and 3 numbers in 16 bits
    assert plans["fp16"]["gradients that wait"] == 6 * (64 + 4 + 3) * 2
    if absent:
        # at full width, as on shapes alone: the first layer's gradients arrive while the others' inputs are held still
        assert plans["fp16"]["gradients"] > plans["off"]["gradients"]
