"""What a document alone tells of the memory that its job needs."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from catalog import DOCUMENT, JobDocument
from catalog.needs import BUILTIN_PARAMETERS, least_bytes, planned_bytes
from worker.model_loading.builtin_models import ARCHITECTURES

DOCUMENTED: dict[str, Any] = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}
SYNTHETIC = {"source": "synthetic", "shape": [3, 5], "examples": 40, "classes": 10}


def document(**changes: Any) -> JobDocument:
    return TypeAdapter(DOCUMENT).validate_json(json.dumps(DOCUMENTED | changes), strict=True)


def test_the_weights_of_builtin_models_are_counted_as_they_are() -> None:
    counted = {name: sum(each.numel() for each in make().parameters()) for name, make in ARCHITECTURES.items()}
    assert counted == BUILTIN_PARAMETERS


# digits_mlp: (64 + 1) · 64 twice, and (64 + 1) · 10
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 8970 * 4),
        ({"collection": {"dtype": "float64"}}, 8970 * 8),
        ({"data": SYNTHETIC}, 8970 * 4 + 15 * 4),
        ({"data": SYNTHETIC, "memory": {"micro_batch": 8}}, 8970 * 4 + 8 * 15 * 4),
        ({"data": SYNTHETIC, "memory": {"micro_batch": 100}, "collection": {"batch_size": 100}}, 8970 * 4 + 40 * 60),
        ({"data": {**SYNTHETIC, "vocabulary": 50}}, 8970 * 4 + 15 * 8),
        ({"model": {"source": "directory", "path": "/m"}, "data": SYNTHETIC}, 15 * 4),
        ({"model": {"source": "directory", "path": "/m"}}, None),
        ({"model": {"source": "directory", "path": "/m"}, "memory": {"device": "20GiB"}}, None),
    ],
)
def test_a_document_gives_a_bound_from_below_or_nothing(changes: dict[str, Any], expected: int | None) -> None:
    assert least_bytes(document(**changes)) == expected


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"device_peak_bytes": 7, "host_peak_bytes": 9}, 7),
        ({"device_peak_bytes": 0, "host_peak_bytes": 9}, 9),
        ({"threads": 2}, None),
        ({"device_peak_bytes": 2**63, "host_peak_bytes": "9"}, None),
    ],
)
def test_a_plan_gives_the_peak_where_the_job_computes(plan: dict[str, Any], expected: int | None) -> None:
    assert planned_bytes(plan) == expected
