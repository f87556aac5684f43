"""The list of jobs on a terminal."""

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from catalog.responses.coverage import percentage
from catalog.responses.views import JobView
from kronoscope.display.printable import printable

_WHOLE_ID_WIDTH = 130
_SHORT_ID = 12


def job_table(jobs: Iterable[JobView], width: int = 100) -> Table:
    """Tabulate jobs, one row each.

    Args:
        jobs: In the order in which they are shown.
        width: Columns of the terminal; where it is narrow, ids are shown by their last part, which every command takes.

    Returns:
        Id, name, kinds, state, progress and time of submission.
    """
    listed = list(jobs)
    named = any(job.name for job in listed)
    short = named and width < _WHOLE_ID_WIDTH
    table = Table(pad_edge=False, show_edge=False)
    for heading in ("id", *(["name"] if named else []), "kind", "state", "progress", "created"):
        # an id must not be cut, so names and kinds wrap
        fixed_width = {"id": _SHORT_ID if short else 36, "state": 9, "progress": 8, "created": 16}.get(heading)
        table.add_column(heading, no_wrap=fixed_width is not None, overflow="fold", min_width=fixed_width)
    for job in listed:
        percent = job.progress.percent if job.progress is not None else None
        cells = [
            job.id[-_SHORT_ID:] if short else job.id,
            *([printable(job.name or "–", lines=False)] if named else []),
            ", ".join(job.kinds),
            _state(job),
            "–" if percent is None else f"{percent:.0f} %",
            (job.created_at or "")[:16].replace("T", " "),
        ]
        table.add_row(*map(Text, cells))
    return table


def _state(job: JobView) -> str:
    """Return the state; of a job that measured a part of its model, or did a part of its analyses, also which."""
    if job.state != "succeeded":
        return job.state
    share = job.coverage is not None and job.coverage.status == "partial"
    said = [percentage(job.coverage.measured_share)] if job.coverage is not None and share else []
    if job.refused:
        said.append(f"{len(job.refused)}/{len(job.kinds)} refused")
    return f"partial {', '.join(said)}" if said else job.state
