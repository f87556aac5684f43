"""A series in a job document: what is refused, by which field, and the documents of its jobs."""

import json
from typing import Any

import pytest

from catalog.requests.series import checkpoint_documents
from jobs.codec import parse_document
from jobs.errors import DocumentRefused

BODY: dict[str, Any] = {
    "kind": "capacity",
    "model": {"source": "directory", "path": "/c/0"},
    "data": {"source": "synthetic", "shape": [6], "examples": 8, "vocabulary": 17},
    "task": {"type": "causal_lm"},
    "series": {"model": ["/c/1", "/c/2"]},
}
HUB = {"source": "huggingface", "id": "owner/name"}


def parsed(**changes: Any) -> Any:
    return parse_document(json.dumps(BODY | changes).encode())


@pytest.mark.parametrize(
    ("changes", "pointer", "said"),
    [
        ({"series": {"model": ["/c/1"]}}, "/series/model", "names 1 checkpoints; give 2 to 200"),
        ({"series": {"model": []}}, "/series/model", "names 0 checkpoints"),
        ({"series": {"model": [f"/c/{each}" for each in range(201)]}}, "/series/model", "names 201 checkpoints"),
        ({"series": {"model": ["/c/1", "/c/2", "/c/1"]}}, "/series/model", "names `/c/1` twice"),
        ({"series": {"model": ["/c/1", ""]}}, "/series/model", "names nothing"),
        ({"series": {"model": ["/c/1", "/c/2"], "learning_rate": 0}}, "/series/learning_rate", "holds 0"),
        ({"series": {"model": ["/c/1", "/c/2"], "learning_rate": [0.1, -1]}}, "/series/learning_rate", "holds -1"),
        ({"series": {"model": ["/c/1", "/c/2"], "learning_rate": [0.1]}}, "/series/learning_rate", "has 1 values for"),
        ({"model": {"source": "builtin", "name": "digits_mlp"}}, "/series", "directory or huggingface"),
        ({"shards": 2}, "/shards", "`series` makes a job for each checkpoint"),
        ({"model": None, "data": None, "task": None, "factors": {"path": "/f"}}, "/series", "directory or huggingface"),
        ({"model": None, "task": None, "extends": {"path": "/f"}}, "/series", "directory or huggingface"),
    ],
)  # fmt: skip
def test_what_is_no_series_is_refused_by_its_field(changes: dict[str, Any], pointer: str, said: str) -> None:
    with pytest.raises(DocumentRefused) as refused:
        parsed(**changes)
    (complaint,) = refused.value.complaints
    assert complaint.pointer == pointer
    assert said in complaint.message


def test_each_checkpoint_gets_the_document_with_its_model_alone() -> None:
    documents = checkpoint_documents(parsed(keep=["spectra"], collection={"seed": 5}))
    assert [each.model.path for each in documents] == ["/c/1", "/c/2"]
    assert {(each.series, each.keep, each.collection.seed) for each in documents} == {
        (None, ("spectra", "factors"), 5)
    }  # fmt: skip
    revisions = checkpoint_documents(parsed(model=HUB, series={"model": ["step1", "step2"], "overlaps": False}))
    assert [(each.model.id, each.model.revision, each.keep) for each in revisions] == [
        ("owner/name", "step1", ("spectra",)), ("owner/name", "step2", ("spectra",)),
    ]  # fmt: skip
    assert checkpoint_documents(parsed(series=None)) == ()


def test_as_many_as_may_be_are_taken() -> None:
    assert len(checkpoint_documents(parsed(series={"model": [f"/c/{each}" for each in range(200)]}))) == 200
