"""What every refusal must look like."""

import httpx

MEMBERS = {"type", "title", "status", "detail", "instance", "errors"}


def problem(answer: httpx.Response, status: int) -> dict[str, object]:
    """The answer is a problem of this status, complete, and shows nothing of the inside."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert set(body) == MEMBERS
    assert body["status"] == status
    assert body["type"].startswith("urn:kronoscope:problem:")
    assert body["instance"] == f"urn:uuid:{answer.headers['x-request-id']}"
    assert body["title"]
    assert body["detail"]
    assert "Traceback" not in answer.text
    assert "sqlalchemy" not in answer.text.lower()
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert len(answer.content) < 16_384
    return dict(body)


def pointers(body: dict[str, object]) -> set[str]:
    errors = body["errors"]
    assert isinstance(errors, list)
    return {str(each["pointer"]) for each in errors}
