"""Documents that extend a finished collection: what they leave out, and what they cannot ask."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from catalog import DOCUMENT, JobDocument
from catalog.field_errors import complaints
from catalog.record import canonical_json

ADAPTER = TypeAdapter(DOCUMENT)
GOOD: dict[str, Any] = {
    "kind": ["factors", "capacity"],
    "data": {"source": "builtin", "name": "digits"},
    "extends": {"path": "out"},
}


def parse(document: Any) -> JobDocument:
    return ADAPTER.validate_json(json.dumps(document), strict=True)


@pytest.mark.parametrize("extends", [{"path": "out"}, {"job": "01a2"}])
def test_an_extension_names_a_job_and_data(extends: Any) -> None:
    document = parse({**GOOD, "extends": extends})
    assert parse(json.loads(canonical_json(document))) == document


@pytest.mark.parametrize(
    ("change", "pointer", "message"),
    [
        ({"extends": {}}, "/extends/job", "give either `job` or `path`"),
        ({"extends": {"job": "a", "path": "b"}}, "/extends/job", "give either `job` or `path`"),
        ({"extends": {"path": ""}}, "/extends/path", "names nothing"),
        ({"data": None}, "/data", "is missing; with `extends` give `data`"),
        ({"model": {"source": "builtin", "name": "digits_cnn"}}, "/model", "is that of the job that `extends` names"),
        ({"task": {"type": "classification"}}, "/task", "leave `task` out"),
        ({"collection": {"seed": 3}}, "/collection", "leave `collection` out"),
        ({"woodbury": {"policy": "all"}}, "/woodbury", "leave `woodbury` out"),
        ({"factors": {"path": "other"}}, "/factors", "has no place beside `extends`"),
        ({"shards": 2}, "/shards", "extend by several jobs one after another"),
        ({"kind": "capacity", "capacity": {"cross_check": "ggn"}}, "/extends", "`capacity.cross_check: ggn` passes"),
        ({"kind": "spectrum", "spectrum": {"of": "ggn"}}, "/extends", "`spectrum.of: ggn` passes over all of them"),
        ({"kind": "natural_gradient"}, "/natural_gradient/gradient", "is missing, so the gradient is taken of all"),
    ],
)
def test_what_contradicts_an_extension_is_refused(change: Any, pointer: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse({**GOOD, **change})
    said = [(each.pointer, each.message) for each in complaints(caught.value.errors(include_url=False), DOCUMENT)]
    assert [each[0] for each in said] == [pointer]
    assert message in said[0][1]
