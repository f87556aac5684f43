"""What a schedule may say; and that nothing of it reaches the stored document or its digest."""

import dataclasses
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from catalog.duration import duration_seconds
from catalog.record import FieldError
from catalog.requests.schedule import Schedule
from jobs.codec import document_json, parse_document, parse_record
from jobs.errors import DocumentRefused

BODY: dict[str, Any] = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}


@pytest.mark.parametrize(
    ("written", "moment"),
    [
        ("2026-12-01T12:00Z", datetime(2026, 12, 1, 12, tzinfo=UTC)),
        ("2026-12-01T12:00:30.5+02:00", datetime(2026, 12, 1, 10, 0, 30, 500_000, tzinfo=UTC)),
        ("2026-12-01 00:30-01:00", datetime(2026, 12, 1, 1, 30, tzinfo=UTC)),
    ],
)
def test_a_deadline_is_a_moment_anywhere(written: str, moment: datetime) -> None:
    assert Schedule(deadline=written).deadline_at == moment


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172_800), ("0s", 0), (" 4h ", 14_400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "4", "h", "4 h", "-1h", "4w", "1e3s", "٤h", "4h30m", "1234567890s"])
def test_what_is_no_duration(text: str) -> None:
    assert duration_seconds(text) is None
    with pytest.raises(FieldError, match="no duration"):
        Schedule(within=text)


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"priority": 11}, "priority", "-10 .last. to 10 .first."),
        ({"priority": -11}, "priority", "is -11"),
        ({"deadline": "tomorrow"}, "deadline", "no moment"),
        ({"deadline": "2026-12-01T12:00"}, "deadline", "without an offset"),
        ({"deadline": "2026-12-01"}, "deadline", "without an offset"),
        # cut at 40 characters it was a moment with another offset
        ({"deadline": "2026-12-01T12:00:00.12345678901234567+01:30"}, "deadline", "has 43 characters"),
        ({"deadline": "0001-01-01T00:00+10:00"}, "deadline", "beyond all calendars"),
        ({"deadline": "2026-12-01T12:00Z", "within": "4h"}, "within", "one of the two"),
        ({"within": "0.5s"}, "within", "1 second to 3650 days"),
        ({"within": "3651d"}, "within", "1 second to 3650 days"),
    ],
)
def test_what_cannot_be_meant_names_its_field_and_a_remedy(given: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(FieldError, match=said) as refused:
        Schedule(**given)
    assert refused.value.field == field
    with pytest.raises(DocumentRefused) as document:
        parse_document(json.dumps(BODY | {"schedule": given}).encode())
    assert [each.pointer for each in document.value.complaints] == [f"/schedule/{field}"]
    with pytest.raises(DocumentRefused) as alone:
        parse_record(json.dumps(given).encode(), Schedule)
    assert [each.pointer for each in alone.value.complaints] == [f"/{field}"]


def test_a_schedule_is_no_part_of_what_is_stored() -> None:
    without = parse_document(json.dumps(BODY).encode())
    scheduled = parse_document(json.dumps(BODY | {"schedule": {"priority": 7, "within": "4h"}}).encode())
    assert scheduled.schedule == Schedule(priority=7, within="4h")
    assert "schedule" not in document_json(scheduled)
    assert document_json(scheduled) == document_json(without)
    assert set(document_json(without)) == {field.name for field in dataclasses.fields(without)} - {"name", "schedule"}
