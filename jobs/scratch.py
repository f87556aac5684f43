"""Scratch: what an attempt leaves on the disk for the next one of the same job, and nobody else.

Finished factors that wait and checkpoints stand in ``root/<job id>/.waiting/<fence>``: an attempt
writes into its own folder only, so that a zombie cannot reach what a later attempt goes on with,
and the later one takes over what the newest before it has left. It is gone once the job is.
"""

import shutil
from pathlib import Path

from sqlalchemy import Engine, select

from jobs.database import reading
from jobs.identifiers import is_id
from jobs.lifecycle import TERMINAL
from jobs.tables import jobs

_NAME = ".waiting"


class Scratch:
    """The scratch folders below one root of artifacts."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def of_attempt(self, job_id: str, fence: int) -> Path:
        """The folder of one attempt; whoever writes makes it."""
        return self._of_job(job_id) / str(int(fence))

    def before(self, job_id: str, fence: int) -> list[Path]:
        """The folders of earlier attempts, the newest first."""
        place = self._of_job(job_id)
        fences = [int(each.name) for each in place.iterdir() if each.name.isdecimal()] if place.is_dir() else []
        return [place / str(each) for each in sorted(fences, reverse=True) if each < fence]

    def clear(self, job_id: str) -> None:
        """Delete what the job's attempts have left; what is gone already, or in use, is no error."""
        shutil.rmtree(self._of_job(job_id), ignore_errors=True)

    def jobs(self) -> list[str]:
        """Ids of the jobs that have left something."""
        if not self._root.is_dir():
            return []
        return [each.name for each in self._root.iterdir() if is_id(each.name) and (each / _NAME).is_dir()]

    def _of_job(self, job_id: str) -> Path:
        if not is_id(job_id):
            raise ValueError("a scratch folder was asked for under something that is no job id")
        return self._root / job_id / _NAME


def sweep_scratch(engine: Engine, scratch: Scratch) -> int:
    """Clear the scratch of jobs that ended while no attempt of theirs was there to do it; returns how many."""
    found = scratch.jobs()
    if not found:
        return 0
    with reading(engine) as connection:
        alive = set(
            connection.execute(
                select(jobs.c.id).where(jobs.c.id.in_(found), jobs.c.state.not_in(list(TERMINAL)))
            ).scalars()
        )
    ended = [job_id for job_id in found if job_id not in alive]
    for job_id in ended:
        scratch.clear(job_id)
    return len(ended)
