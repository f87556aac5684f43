"""The share of a model that a job measured: what is missing, what would cover it, and what is not missing."""

import re
from pathlib import Path
from typing import Any

import pytest

from catalog.responses.coverage import _REMEDIES, FLAT_REASONS, assess_coverage, percentage


def summary(share: float, **reasons: int) -> dict[str, Any]:
    counts = {"trainable_parameters": 1000, "covered_share": share, "reasons": reasons}
    return {"capacity": {"layers": 2, "coverage": counts}, "factors": {"coverage": counts}}


def test_a_part_of_a_model_is_called_a_part() -> None:
    found = assess_coverage(summary(0.351, tied=49, embedding_renormalised=600), None)
    assert found is not None
    assert found.status == "partial"
    assert found.measured_share == 0.351
    assert [(each.reason, each.parameters, each.share) for each in found.not_measured] == [
        ("embedding_renormalised", 600, 0.6),
        ("tied", 49, 0.049),
    ]
    assert found.not_measured[0].remedy is not None
    assert "max_norm" in found.not_measured[0].remedy
    assert found.message == (
        "35.1% of the 1,000 trainable parameters were measured; not measured: 600 embedding_renormalised, 49 tied"
    )


def test_parameters_without_curvature_are_not_missing() -> None:
    found = assess_coverage(summary(0.9, no_gradient=60, never_routed=40), None)
    assert found is not None
    assert (found.status, found.not_measured, found.message) == ("complete", (), None)


def test_a_share_that_the_document_asks_for_is_accepted() -> None:
    found = assess_coverage(summary(0.9, tied=100), 0.9)
    assert found is not None
    assert found.status == "accepted"
    assert found.message is not None  # it is still said


@pytest.mark.parametrize("nothing", [None, {}, {"reconstruction": {"layers": 1}}, {"later": None}])
def test_without_a_model_there_is_nothing_to_cover(nothing: dict[str, Any] | None) -> None:
    assert assess_coverage(nothing, None) is None


def test_a_reason_of_a_later_version_has_no_remedy() -> None:
    found = assess_coverage(summary(0.5, unheard_of=500), None)
    assert found is not None
    assert (found.status, found.not_measured[0].remedy) == ("partial", None)


def test_what_is_not_whole_never_reads_whole() -> None:
    assert [percentage(share) for share in (1.0, 0.99999, 0.351, 0.0)] == ["100.0%", "99.9%", "35.1%", "0.0%"]


def test_every_reason_of_the_engine_has_a_remedy_or_no_curvature() -> None:
    """The engine's list of reasons is the first docstring of its module on coverage."""
    listed = Path("engine/layers/coverage.py").read_text().partition("Reasons:")[2].partition('"""')[0]
    reasons = {name for line in re.findall(r"(?m)^- (.*?):", listed) for name in re.findall(r"``(\w+)``", line)}
    reasons |= {"embedding_renormalised", "batch_statistics"}
    assert len(reasons) >= 18
    assert reasons == set(_REMEDIES) | FLAT_REASONS
