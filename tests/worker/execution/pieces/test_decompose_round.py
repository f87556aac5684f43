"""The round `decompose`: the numbers of a job that decomposes by itself, each factor decomposed once, by a piece."""

import json
from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from catalog.frames import LogLine
from engine.collection import ekfac_passes
from engine.linalg.eigendecomposition import decompose
from engine.measurement import decompose_layer
from engine.measurement.divided_layers import layer_units
from tests.worker.execution.pieces.conftest import Run, Runner
from tests.worker.execution.pieces.test_division import DIGITS
from worker.execution.pieces.division import START_SECONDS, Circumstances, divide_decompositions

ANALYSED = {**DIGITS, "kind": ["factors", "capacity", "reconstruction"], "shards": 3}
CORRECTED = {
    **DIGITS,
    "kind": ["factors", "spectrum"],
    "spectrum": {"of": "ekfac"},
    "shards": 2,
    "collection": {**DIGITS["collection"], "ekfac": True},
}


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each layer's factors are decomposed, by any attempt."""
    counts: Counter[str] = Counter()

    def counted(factor: Tensor, layer: str, **how: Any) -> Any:
        counts[layer] += 1
        return decompose(factor, layer, **how)

    monkeypatch.setattr(decompose_layer, "decompose", counted)
    monkeypatch.setattr(ekfac_passes, "decompose", counted)
    return counts


def compared(run: Run) -> list[Any]:
    """Everything of the rows that two runs have in common."""
    return [{name: value for name, value in row.items() if name != "observed"} for row in run.rows]


def rounds(run: Run) -> list[str]:
    return [each["piece"]["round"] for each in run.pieces]


@pytest.mark.parametrize("document", [ANALYSED, CORRECTED], ids=["analysed", "corrected"])
@pytest.mark.part(of=2, law="pieces decompose as the undivided job does")
def test_the_numbers_are_those_of_a_job_that_decomposes_by_itself(
    runner: Runner, decomposed: Counter[str], document: dict[str, Any]
) -> None:
    alone = runner.job("alone", document, decompose_round="never")
    once = dict(decomposed)
    decomposed.clear()
    run = runner.job("divided", document, order=lambda pieces: list(pieces)[::-1], decompose_round="always")
    assert compared(run) == compared(alone)
    # every exact block has the same A, the number 1, which whoever comes first decomposes
    for name in ("conv1", "conv2", "head"):
        assert decomposed[name] == once[name], name
    count = document["shards"]
    rest = ["correct"] * count if document is CORRECTED else []
    assert rounds(run) == ["collect"] * count + ["decompose"] * count + rest
    assert {row["record"]["pieces"] for row in run.rows if row["status"] != "declared"} == {count}
    assert rounds(alone) == ["collect"] * count + rest
    pieces = [each["piece"]["layers"] for each in run.pieces if each["piece"]["round"] == "decompose"]
    assert sorted(name for layers in pieces for name in layers) == sorted(layer.name for layer in run.factors.layers)
    curve = json.loads((run.folder / "artifacts" / "memory_curve.json").read_text())
    stage = next(each for each in curve["stages"] if each["stage"] == "decomposition")
    assert stage["planned_seconds"] > 0
    assert stage["planned_host_bytes"] > 0


@pytest.mark.part(of=2, law="pieces decompose as the undivided job does")
def test_what_is_damaged_is_computed_again(runner: Runner) -> None:
    run = runner.job("divided", ANALYSED, decompose_round="always")
    folder = next(each["path"] for each in run.pieces if each["piece"]["round"] == "decompose")
    files = sorted(
        runner.folder.glob(f"{folder}/factors/decompositions/bases/*.values.safetensors"[len(str(runner.folder)) + 1 :])
    )
    damaged = bytearray(files[0].read_bytes())
    damaged[-3] ^= 64
    files[0].write_bytes(bytes(damaged))
    own = {"document": ANALYSED, "artifacts": str(run.folder / "again"), "decompose_round": "always"}
    frames, _ = runner.attempt({**own, "pieces": run.pieces, "divided": str(run.folder / "artifacts")})
    again = Run(folder=run.folder / "again", frames=frames)
    assert compared(again) == compared(run)
    assert any("is decomposed again" in frame.message for frame in frames if isinstance(frame, LogLine))


def test_layers_are_divided_where_that_takes_less_time(runner: Runner) -> None:
    layers = runner.job("whole", {**DIGITS, "kind": "factors"}).factors.layers
    units = len(layer_units(layers))

    def divided(seconds: float | None, devices: int, collected: int = 3, wanted: Any = "auto") -> tuple[int, str]:
        plan = {"stages": {"decomposition": {"seconds": seconds}}}
        given = Circumstances(wanted=wanted, collected=collected, devices=devices, plan=plan, vectors=True)
        pieces, why = divide_decompositions(layers, given)
        named = [name for piece in pieces for name in piece.layers or ()]
        assert not pieces or sorted(named) == sorted(facts.name for facts in layers)
        return len(pieces), why

    assert divided(1e6, 2)[0] == 2
    assert divided(1e6, 99)[0] == units
    assert "save" in divided(1e6, 2)[1]
    assert divided(START_SECONDS, 2)[0] == 0
    assert divided(1e6, 1) == (0, f"1 device is at hand, and {units} groups of layers can be decomposed apart")
    assert divided(None, 4) == (0, "nobody foresees how long decompositions take")
    assert divided(1e6, 4, collected=1) == (0, "the job was collected in one piece")
    assert divided(1e6, 4, wanted="never")[0] == 0
    assert divided(0.0, 1, wanted="always")[0] == 3
