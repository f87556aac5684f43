"""Short ids: the last 8 or more characters of a job's id, as lists and the page show it."""

import re

from kronoscope.client.connection import Connection
from kronoscope.client.errors import ClientError

_SHORT_ID = re.compile(r"[0-9a-f-]{8,35}")


def find_full_id(connection: Connection, job_id: str) -> str:
    """Return the id of the job that a short id names; what does not look like one is returned as it is.

    Raises:
        ClientError: If no job of the tenant, or more than one, has an id with this end.
    """
    if not _SHORT_ID.fullmatch(job_id):
        return job_id
    page = connection.call("GET", "/v1/jobs", params={"id": job_id, "limit": "3"})
    ids = [str(item["id"]) for item in page["items"]]
    if len(ids) == 1:
        return ids[0]
    if not ids:
        raise ClientError(404, "Not found", f"no job of yours has an id that ends with {job_id}")
    listed = ", ".join(ids)
    raise ClientError(409, "Ambiguous", f"several jobs have an id that ends with {job_id}: {listed}; give more of it")
