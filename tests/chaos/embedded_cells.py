"""The kill matrix of an embedded service: one of its processes killed at one point of a job's life."""

import time
from typing import Any

from tests.chaos.cells import Recovery
from tests.chaos.stack.embedded import OF_A_JOB, PROCESSES, EmbeddedService
from tests.chaos.stack.gated_jobs import GatedJob, outcomes
from tests.machine.stopwatch import until

POINTS = {"start": "start", "mid_collection": "batch12", "mid_layer": "row1"}
"""The gate at which a job stands when the process is killed."""
CELLS = tuple((process, point) for process in PROCESSES for point in POINTS)


def run_embedded_cell(
    service: EmbeddedService, process: str, point: str, undisturbed: list[tuple[Any, ...]] | None = None
) -> Recovery:
    """Kill it, start the service again where it has left, and see the job end with what was done kept.

    Seconds are counted from the kill, or from the next start of a service that has left.
    """
    service.revive()
    gate = POINTS[point]
    job = GatedJob(service, f"{process}-{point}-{time.monotonic_ns()}")
    job.hold(gate)
    job.submit()
    job.await_at(gate)
    if point == "mid_layer":
        until(lambda: service.layers(job.id), 200, "the row that was sent is stored")
    before, stored = service.row(job.id), service.layers(job.id)
    begun_at = time.monotonic()
    service.kill(process)
    job.release(gate)
    if process not in OF_A_JOB:
        # the others have left within their time; how soon a person starts the service again is not ours to measure
        begun_at = time.monotonic()
    service.revive()
    if process in OF_A_JOB:
        assert service.first.alive
    until(lambda: service.row(job.id).fence > before.fence, 60, lambda: f"goes on; {service.describe(job.id)}")
    again = time.monotonic() - begun_at
    assert service.await_end(job.id) == ["succeeded"], service.describe(job.id)
    rows = outcomes(service, job.id)
    assert len(rows) == len({(kind, ordinal) for kind, ordinal, *_ in rows}) == 6
    assert all(row in service.layers(job.id) for row in stored), "a row that stood has changed"
    assert undisturbed in (None, rows), "other digests than the undisturbed run's"
    service.verify_artifacts(job.id)
    ended = time.monotonic() - begun_at
    return Recovery(f"embedded-{process}", point, again, ended, attempts=service.row(job.id).attempt)
