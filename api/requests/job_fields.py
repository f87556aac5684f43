"""Job fields: the query parameter of a list that names the large ones, which are null or a part without it."""

from typing import Annotated

from fastapi import Query

from api.problem_details import invalid_parameter
from catalog.record import record
from jobs.repository.job_list import FIELDS


@record
class JobFields:
    """The large fields that a list is to hold."""

    fields: Annotated[
        str | None,
        Query(
            description="Comma list of `document` and `plan`. Without them `document` holds the sources of model, data "
            "and factors; `plan` is null. With them a page may be shorter than `limit`."
        ),
    ] = None

    def names(self) -> tuple[str, ...]:
        """Return the fields.

        Raises:
            Refusal: 422 if one of them is not known.
        """
        asked = () if self.fields is None else tuple(dict.fromkeys(self.fields.split(",")))
        if not set(asked) <= set(FIELDS):
            raise invalid_parameter("fields", f"must be a comma list of {', '.join(FIELDS)}")
        return asked
