"""The format of an answer is the one that `Accept` gives the largest weight, and never one with a weight of 0."""

import pytest

from api.requests.accepted_formats import preferred

SERVED = {"application/json": "json", "text/csv": "csv", "application/jsonl": "lines", "application/x-ndjson": "lines"}


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (None, "json"),
        ("", "json"),
        ("*/*", "json"),
        ("text/html", "json"),
        ("text/html, */*;q=0.8", "json"),
        ("TEXT/CSV", "csv"),
        ("text/csv; header=present", "csv"),
        ("text/csv, application/json", "csv"),
        ("application/json, text/csv", "json"),
        ("text/csv;q=0, application/json", "json"),
        ("text/csv;q=0", "json"),
        ("text/csv ; Q=0.000, application/x-ndjson", "lines"),
        ("text/csv;q=0.5, application/json;q=0.9", "json"),
        ("application/json;q=0.5, text/csv", "csv"),
        ("application/json;q=0, */*", "csv"),
        ("application/*;q=0.2, application/jsonl;q=0.3", "lines"),
        ("text/*", "csv"),
        ("*/*, text/csv", "csv"),
        # a weight that cannot be read
        ("text/csv;q=much, application/jsonl;q=0.1", "lines"),
        ("text/csv;q=2, application/jsonl;q=0.1", "lines"),
    ],
)
def test_the_largest_weight_decides_then_the_most_specific_range_then_the_order(
    accept: str | None, chosen: str
) -> None:
    assert preferred(accept, SERVED, "json") == chosen
