"""One rank, two and four: the same factors, whatever the form of the statistics and the mode of the reduction."""

import datetime as dt
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.distributed import group
from engine.errors import RankFailed
from tests.engine.distributed.rank_processes import asked_for, run_ranks
from tests.engine.distributed.rank_scenarios import SCENARIOS, outcome

MODES = ("gram", "gather")


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))


def measured(rank: int, size: int, names: Sequence[str]) -> dict[str, Any]:
    """Scenarios with the batches dealt out in turn; rows in every mode."""
    results = {}
    for name in names:
        scenario = SCENARIOS[name]
        own = scenario.batches()[rank::size]
        for mode in scenario.modes:
            results[name, mode] = outcome(scenario.measured(own, reduction=mode))
    return results


def wanted(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The scenarios of the tests that run, and rows, whose ways have a test of their own."""
    return tuple(dict.fromkeys(("rows", *asked_for(request, "name"))))


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
def together(request: pytest.FixtureRequest) -> list[Any]:
    found = run_ranks(request.param, measured, request.param, wanted(request))
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {name: outcome(SCENARIOS[name].measured(SCENARIOS[name].batches())) for name in wanted(request)}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_measure_what_one_rank_measures(name: str, together: list[Any], alone: dict[str, Any]) -> None:
    one, tolerance = alone[name], SCENARIOS[name].tolerance
    for mode in SCENARIOS[name].modes:
        for rank, found in enumerate(each[name, mode] for each in together):
            assert found["factors"].keys() == one["factors"].keys()
            assert found["declared"] == one["declared"]
            assert found["examples"] == one["examples"]
            for layer, product in one["corrected"].items():
                assert apart(found["corrected"][layer], product) <= 1e-9, (rank, layer)
            for layer, (A, G) in one["factors"].items():
                assert apart(found["factors"][layer][0], A) <= tolerance, (mode, rank, layer, "A")
                assert apart(found["factors"][layer][1], G) <= tolerance, (mode, rank, layer, "G")
                for fact, value in one["records"][layer].items():
                    own = found["records"][layer][fact]
                    assert (own is None) == (value is None), (mode, layer, fact)
                    assert value is None or own == pytest.approx(value, rel=max(100 * tolerance, 1e-9)), (layer, fact)


def test_one_process_alone_is_a_group_that_waits_for_nothing() -> None:
    ranks, value = group.join(torch.device("cpu")), torch.ones(3)
    assert (ranks.rank, ranks.size) == (0, 1)
    (gathered,) = ranks.gather(value, "values")
    assert gathered is value
    assert ranks.broadcast(value, 0, "value") is value
    ranks.sign()
    error = ValueError("its own")
    with pytest.raises(ValueError, match="its own") as raised, ranks.guarding():
        raise error
    assert raised.value is error


def test_rows_are_reduced_as_asked_where_they_are_fewer_than_the_outputs(together: list[Any]) -> None:
    """44 rows of 12 outputs have become a 12×12 G before the reduction, whichever way was asked for."""
    for found in together:
        reduced = {mode: {name: kept[1] for name, kept in found["rows", mode]["ranks"].items()} for mode in MODES}
        assert reduced == {
            "gram": {"0": "gather", "2": "gram", "4": "gather"},
            "gather": {"0": "gather", "2": "gather", "4": "gather"},
        }


def test_nccl_waits_longer_than_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, dt.timedelta] = {}
    told: dict[str, Any] = {}

    def refuse(*_: object, **options: object) -> None:
        told.update(options)
        raise RuntimeError("no other came")

    monkeypatch.setattr(group, "own_sockets", frozenset)
    monkeypatch.setattr(group, "foreign_peers", lambda _: [])
    monkeypatch.setattr(group, "_Groups", type("Groups", (group._Groups,), {}))
    monkeypatch.setattr(group.dist, "new_group", lambda *, backend, timeout: made.setdefault(backend, timeout))
    device = torch.device("cuda", 0)
    ranks: Any = SimpleNamespace(
        rank=0, size=2, device=device, timeout_seconds=30.0, note=lambda *_: 1, meet=lambda _: None
    )
    group._make_groups(ranks)
    # a rank that is silent for 30 s is told by us; NCCL's watchdog would end the process
    assert made["gloo"] == dt.timedelta(seconds=30)
    assert made["nccl"] > 2 * made["gloo"]
    monkeypatch.setattr(group.dist, "init_process_group", refuse)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RankFailed, match="no other came"):
        group.start(device)
    assert told["device_id"] == device
    # a sharded model's parts are gathered by the group of all ranks
    assert told["timeout"] > 2 * dt.timedelta(seconds=group.TIMEOUT_SECONDS)
