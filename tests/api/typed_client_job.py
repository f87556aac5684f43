"""Typed client job: a whole job through the generated Python client, run by the environment that generated it.

python typed_client_job.py URL, in the folder that holds ``kronoscope_client``
"""

import sys
import time
from typing import Any

sys.path.insert(0, ".")

from kronoscope_client import Client
from kronoscope_client.api.artifacts import list_artifacts
from kronoscope_client.api.jobs import list_jobs, read_job, submit_job
from kronoscope_client.api.results import list_layers, read_results
from kronoscope_client.models import JobDocument, JobView, ResultsView

_DOCUMENT = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits", "limit": 64},
    "task": {"type": "classification"},
    "labels": {"made": "by a typed client", "round": "1"},
}
_SECONDS = 600


def run(url: str) -> None:
    """Submit a job, wait for its end, and read what it left."""
    client: Any = Client(base_url=url, raise_on_unexpected_status=True)
    job = submit_job.sync(client=client, body=JobDocument.from_dict(_DOCUMENT))
    assert isinstance(job, JobView), job
    ends = time.monotonic() + _SECONDS
    while job.state not in ("succeeded", "failed", "cancelled"):
        assert time.monotonic() < ends, job
        time.sleep(0.5)
        job = read_job.sync(job.id, client=client)
        assert isinstance(job, JobView), job
    assert job.state == "succeeded", job.failure
    found = read_results.sync(job.id, client=client)
    assert isinstance(found, ResultsView)
    assert found.summary.capacity.trace > 0
    rows = list_layers.sync(job.id, client=client).items
    # which metrics a row has its kind says, which is beside them: a generator takes the first class that fits
    assert sum(row.metrics.to_dict()["trace"] for row in rows if row.metrics) > 0
    assert list_artifacts.sync(job.id, client=client).items
    listed = list_jobs.sync(client=client, label=["made=by a typed client", "round=1"], sort="oldest")
    assert [each.id for each in listed.items] == [job.id]
    sys.stdout.write(f"a job of {len(rows)} layers: {job.state}\n")


if __name__ == "__main__":
    run(sys.argv[1])
