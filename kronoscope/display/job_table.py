"""The list of jobs on a terminal."""

from collections.abc import Iterable

from rich.table import Table

from catalog.responses import JobView


def job_table(jobs: Iterable[JobView]) -> Table:
    """Tabulate jobs, one row each.

    Args:
        jobs: In the order in which they are shown.

    Returns:
        Id, kinds, state, progress and time of submission.
    """
    table = Table(pad_edge=False, show_edge=False)
    for heading in ("id", "kind", "state", "progress", "created"):
        # an id must not be cut, so the kinds wrap
        fixed_width = {"id": 36, "state": 9, "progress": 8, "created": 16}.get(heading)
        table.add_column(heading, no_wrap=fixed_width is not None, overflow="fold", min_width=fixed_width)
    for job in jobs:
        percent = job.progress.percent if job.progress is not None else None
        table.add_row(job.id, ", ".join(job.kinds), job.state, "–" if percent is None else f"{percent:.0f} %",
                      (job.created_at or "")[:16].replace("T", " "))  # fmt: skip
    return table
