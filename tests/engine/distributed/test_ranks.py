"""One rank, two and four: the same factors, whatever the form of the statistics and the mode of the reduction."""

from typing import Any

import pytest
from torch import Tensor

from tests.engine.distributed.rank_processes import run_ranks
from tests.engine.distributed.rank_scenarios import SCENARIOS, outcome


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))


def measured(rank: int, size: int) -> dict[str, Any]:
    """Every scenario, with the batches dealt out in turn; rows in every mode."""
    results = {}
    for name, scenario in SCENARIOS.items():
        own = scenario.batches()[rank::size]
        for mode in scenario.modes:
            results[name, mode] = outcome(scenario.measured(own, reduction=mode))
    return results


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
def together(request: pytest.FixtureRequest) -> list[Any]:
    found = run_ranks(request.param, measured, request.param)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: outcome(scenario.measured(scenario.batches())) for name, scenario in SCENARIOS.items()}


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
