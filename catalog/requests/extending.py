"""Extending: more examples for a collection that an earlier job has finished.

    extends: {job: ID}      model, task, collection and woodbury are those of that job's document
    data: {…}               the examples to add

The factors are those of one job over the earlier job's data followed by these: an example of the new data has its index
after all of theirs. Results other than sums over examples cannot be extended, and are refused.
"""

from dataclasses import replace
from typing import Any, TypeVar

from catalog.record import FieldError, record
from catalog.requests.collection import Collection
from catalog.requests.inputs import require_job_or_path
from catalog.requests.pieces import require_one_pass
from catalog.requests.woodbury import Woodbury

_INHERITED = {"model": None, "task": None, "collection": Collection(), "woodbury": Woodbury()}
"""Fields of a document that are those of the job that it extends, with what stands for none of its own."""
_Document = TypeVar("_Document")


@record
class ExtendsReference:
    """The job that is extended: give `job` or `path`."""

    job: str | None = None
    """Id of a succeeded job that kept its factors."""
    path: str | None = None
    """The output folder of a run that kept its factors, with its `job.json`. A service reads what lies in folders that
    its operator lists."""

    def __post_init__(self) -> None:
        """Require exactly one of the two."""
        require_job_or_path(self.job, self.path)


def require_extension(document: Any) -> None:  # noqa: ANN401 - a job document, whose module imports this one
    """Refuse what contradicts `extends`, or is not to be had of data that are not there any more.

    Raises:
        FieldError: If the document has `extends` and something beside it that it cannot have.
    """
    if document.extends is None:
        return
    if document.data is None:
        raise FieldError("data", "is missing; with `extends` give `data`, the examples to add")
    for name, default in _INHERITED.items():
        if getattr(document, name) != default:
            raise FieldError(name, f"is that of the job that `extends` names; leave `{name}` out")
    if document.factors is not None:
        raise FieldError(
            "factors", "has no place beside `extends`, which names the factors to add to; leave one of the two out"
        )
    if document.shards is not None:
        raise FieldError(
            "shards",
            f"is {document.shards}, and `extends` adds its examples in one process; leave `shards` out, or extend by "
            "several jobs one after another, each with a part of the data",
        )
    again = (
        "names data that this job does not read again, and `{}` passes over all of them; leave it out, or give model "
        "and all data in place of `extends`"
    )
    data, remedy = "all the data, which `extends` does not read again", "model and all data in place of `extends`"
    require_one_pass(document, "extends", again, data, remedy)


def completed(document: _Document, first: _Document) -> _Document:
    """Return a job document that extends another's collection, with the fields that it has of the one that began it.

    Raises:
        FieldError: If the two do not go together.
    """
    inherited = {name: getattr(first, name) for name in _INHERITED}
    return replace(document, extends=None, **inherited)  # type: ignore[type-var] # a record, as above
