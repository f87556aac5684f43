"""The share of a model that a job measured: what is missing, what would cover it, and what is not missing."""

import itertools
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from catalog.analyses.analysis import CoveragePart, NamedParameters
from catalog.record import plain
from catalog.responses.coverage import (
    _REMEDIES,
    FLAT_REASONS,
    CoverageView,
    apportion,
    assess_coverage,
    coverage_warning,
    describe_kinds,
    percentage,
)


def summary(share: float, **reasons: int) -> dict[str, Any]:
    counts = {"trainable_parameters": 1000, "covered_share": share, "reasons": reasons}
    return {"capacity": {"layers": 2, "coverage": counts}, "factors": {"coverage": counts}}


NAMES = ("block", "diagonal", "sketched", "tied", "no_gradient", "unheard_of")


def in_parts(**parameters: int) -> CoverageView:
    """Coverage of a model with so many parameters of each kind; a name that is no kind is a reason."""
    kinds = {"block", "diagonal", "sketched"}
    parts = [
        CoveragePart(
            kind=name if name in kinds else "not_covered",  # type: ignore[arg-type] # one of them
            reason=None if name in kinds else name,
            parameters=count,
            layers=4,
            named=() if name == "block" else (NamedParameters(names=(f"{name}.w",), module="Own", why=None),),
        )
        for name, count in parameters.items()
    ]
    trainable = sum(parameters.values())
    missing = {name: count for name, count in parameters.items() if name not in kinds}
    covered = trainable - sum(missing.values())
    counts = {"trainable_parameters": trainable, "covered_share": covered / trainable, "reasons": missing}
    found = assess_coverage({"capacity": {"coverage": counts | {"parts": [plain(part) for part in parts]}}}, None)
    assert found is not None
    return found


def test_the_parts_of_a_model_add_up_to_a_hundred() -> None:
    """23.6 and 76.3 per cent were shown of one model."""
    found = in_parts(block=23_649, diagonal=76_351)
    assert describe_kinds(found) == "23.6% full block, 76.4% diagonal"
    assert (found.status, found.measured_percent) == ("complete", 100)
    draws = random.Random(0)
    for _ in range(200):
        counts = {name: draws.choice((1, 7, 10**3, 10**6, 10**9)) * draws.randint(1, 9) for name in NAMES}
        chosen = in_parts(**dict(draws.sample(sorted(counts.items()), draws.randint(1, len(counts)))))
        assert round(sum(10 * part.percent for part in chosen.parts)) == 1000
        assert all(part.percent >= 0.1 for part in chosen.parts)
        whole = sum(part.parameters for part in chosen.parts)
        for part in chosen.parts:  # a part of less than 0.1 takes a tenth of another
            assert abs(part.percent - 100 * part.parameters / whole) < 0.1 * len(NAMES)
        assert (chosen.measured_percent == 100) == all(part.kind != "not_covered" for part in chosen.parts)


def test_units_go_by_largest_remainders() -> None:
    """The exact division of each differs by less than one unit, and no other such division is nearer in sum."""
    for counts in ([23_649, 76_351], [1, 1, 1], [5, 3, 2, 90], [600, 364, 12]):
        exact = [count * 1000 / sum(counts) for count in counts]
        roundings = itertools.product(*([math.floor(each), math.ceil(each)] for each in exact))
        errors = {
            given: sum(abs(a - b) for a, b in zip(given, exact, strict=True))
            for given in roundings
            if sum(given) == 1000
        }
        found = tuple(apportion(counts, 1000))
        assert errors[found] == pytest.approx(min(errors.values()))
    assert apportion([10**9, 1, 1], 1000) == [998, 1, 1]
    assert apportion([1, 1, 1], 1) == [1, 0, 0]
    assert apportion([0, 0], 1000) == [0, 0]


def test_what_a_model_has_more_diagonals_than_blocks_of_is_warned_of() -> None:
    assert coverage_warning(None) is None
    assert coverage_warning(in_parts(block=6, diagonal=4)) is None
    assert coverage_warning(in_parts(block=6, no_gradient=4)) is None
    assert coverage_warning(in_parts(block=83, diagonal=917)) == (
        "of the model's trainable parameters 8.3% full block, 91.7% diagonal; diagonal: diagonal.w (Own); and 3 more"
    )
    assert coverage_warning(in_parts(block=6, tied=4)) == (
        "of the model's trainable parameters 60.0% full block, 40.0% not covered; 60.0% of the 10 trainable "
        "parameters were measured; not measured: 4 tied: tied.w (Own); and 3 more"
    )


def test_a_summary_that_a_job_made_up_is_read_as_one_without_parts() -> None:
    for parts in ("all", [{"kind": "block"}], [{"kind": "whole", "parameters": "many"}], {"kind": "block"}):
        counts = {"trainable_parameters": 10, "covered_share": 0.6, "reasons": {"tied": 4}, "parts": parts}
        found = assess_coverage({"capacity": {"coverage": counts}}, None)
        assert found is not None
        assert describe_kinds(found) == "60.0% covered, 40.0% not covered"


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


def test_what_rounding_may_have_spoilt_has_wider_sums_as_a_remedy() -> None:
    for reason in ("correction_differs", "gradient_identity"):
        found = assess_coverage(summary(0.5, **{reason: 500}), None)
        assert found is not None
        assert "`collection.dtype: float64`" in str(found.not_measured[0].remedy)


def test_what_is_not_whole_never_reads_whole() -> None:
    assert [percentage(share) for share in (1.0, 0.99999, 0.351, 0.0)] == ["100.0%", "99.9%", "35.1%", "0.0%"]


def test_every_reason_of_the_engine_has_a_remedy_or_no_curvature() -> None:
    """The engine's list of reasons is the first docstring of its module on coverage."""
    listed = Path("engine/layers/coverage.py").read_text().partition("Reasons:")[2].partition('"""')[0]
    reasons = {name for line in re.findall(r"(?m)^- (.*?):", listed) for name in re.findall(r"``(\w+)``", line)}
    reasons |= {"embedding_renormalised", "batch_statistics"}
    assert len(reasons) >= 18
    assert reasons == set(_REMEDIES) | FLAT_REASONS
