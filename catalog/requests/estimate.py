"""An estimate: the plan of a job that is not run. In the ledger it is a kind of its own, which no menu lists."""

from catalog.field_errors import Complaint
from catalog.requests.job import JobDocument

ESTIMATE = "plan"
"""The kind's name in the ledger, which a document cannot use."""


def unplannable(document: JobDocument) -> Complaint | None:
    """Return the complaint about a document that cannot be planned before it runs; None if it can be planned."""
    if document.factors is None:
        return None
    return Complaint(
        pointer="/factors",
        code="not_planned",
        message="bring no model, and a plan is made from a model's shapes: give `model`, `data` and `task` in place of "
        "`factors`; a job from factors asks layer by layer what fits while it runs",
    )
