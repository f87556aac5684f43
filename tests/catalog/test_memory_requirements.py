"""What a document alone tells of the memory that its job needs."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from catalog import DOCUMENT, JobDocument
from catalog.requests.memory import Memory
from catalog.requests.memory_requirements import BUILTIN_PARAMETERS, least_bytes, memory_of, planned_bytes
from worker.execution.models.builtin import ARCHITECTURES

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
        ({"device_peak_bytes": 9, "host_peak_bytes": 90}, 11),
        ({"device_peak_bytes": 0, "host_peak_bytes": 90}, 101),
        ({"device_peak_bytes": 0, "host_peak_bytes": 91}, 102),
        ({"threads": 2}, None),
        ({"device_peak_bytes": 2**63, "host_peak_bytes": "9"}, None),
    ],
)
def test_a_plan_gives_the_peak_and_what_is_to_be_left_free_beside_it(plan: Any, expected: int | None) -> None:
    assert planned_bytes(plan, Memory()) == expected


def test_a_named_budget_is_taken_whole_and_a_fraction_in_part() -> None:
    plan = {"device_peak_bytes": 8, "host_peak_bytes": 90}
    assert planned_bytes(plan, Memory(device="20GiB")) == 8
    assert planned_bytes(plan, Memory(device=0.5)) == 16
    assert planned_bytes(plan, Memory(host=0.5)) == 9
    assert memory_of({"memory": {"device": "1GiB", "micro_batch": 3}}) == Memory(device="1GiB")
    assert memory_of({}) == Memory()
