"""Scratch: files on disk that an attempt leaves for the next attempt of the same job alone.

Finished factors that wait and checkpoints stand in ``root/<job id>/.waiting/<fence>``: an attempt
writes into its own folder only, so that a zombie cannot reach what a later attempt goes on with,
and the later one takes over what the newest before it has left. It is gone once the job is. Between two
attempts only the newest checkpoint stays (or what an attempt that ended in a decomposition on the device has
left, with its marker), and its bytes count for the job's tenant.
Where machines share no folder, checkpoints are copied to the bucket (`jobs.objects.scratch_store`).
"""

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Engine, select, update

from jobs.errors import StoreUnavailable
from jobs.lifecycle import HELD, TERMINAL
from jobs.objects import job_folders
from jobs.objects.object_store import ObjectStore
from jobs.objects.s3_store import S3Objects
from jobs.objects.scratch_store import ScratchStore, version_of
from jobs.schema.database import reading, writing
from jobs.schema.identifiers import is_id
from jobs.schema.tables import jobs
from jobs.settings import LedgerSettings

_NAME = ".waiting"
_RANKS = "rank-*"
"""Folders of the ranks of an attempt, each with a checkpoint of its own part."""
_MARKERS = "bases/*.device.json"
"""Markers of decompositions that the attempt ended in, which stay as a checkpoint does."""


class Scratch:
    """The scratch folders below one root of artifacts."""

    def __init__(self, root: Path, copies: ScratchStore | None = None) -> None:
        """Set up the scratch.

        Args:
            root: The folder of all attempts on this machine.
            copies: The store that carries checkpoints to other machines; None where there is none.
        """
        self._root = root.absolute()
        self.copies = copies
        """The copies of checkpoints in a bucket; None where all machines share the folder."""

    def attempt_folder(self, job_id: str, fence: int) -> Path:
        """Return the folder of one attempt, which may not exist yet."""
        return self._of_job(job_id) / str(int(fence))

    def give(self, job_id: str, fence: int, group: int) -> None:
        """Make the folder of one attempt, and give it and those before it to the job's group."""
        folder = self.attempt_folder(job_id, fence)
        folder.mkdir(parents=True, exist_ok=True)
        job_folders.give(folder.parent, group, written=False)
        job_folders.give(folder, group, written=True)

    def before(self, job_id: str, fence: int) -> list[Path]:
        """Return the folders of a job's attempts before this one on this machine, the newest first."""
        place = self._of_job(job_id)
        fences = [int(each.name) for each in place.iterdir() if each.name.isdecimal()] if place.is_dir() else []
        return [place / str(each) for each in sorted(fences, reverse=True) if each < fence]

    def fetch(self, job_id: str, fence: int) -> None:
        """Download the newest checkpoint of an earlier attempt on another machine, unless a newer one is here.

        Raises:
            ArtifactDamaged: If the copy is damaged, so that there is no checkpoint to resume from.
            StoreUnavailable: If the store does not answer.
            OSError: If a disk is full or fails.
        """
        if self.copies is None:
            return
        newest = self.copies.newest(job_id, fence)
        before = self.before(job_id, fence)
        here = [int(each.name) for each in before if any(version_of(each))]
        if newest is not None and newest > max(here, default=-1):
            self._of_job(job_id).mkdir(parents=True, exist_ok=True)
            with job_folders.within(self._of_job(job_id)):
                self.copies.fetch(job_id, newest, self.attempt_folder(job_id, newest))

    def prune(self, job_id: str, fence: int) -> None:
        """Delete what attempts up to this one have left beside the newest checkpoint: the next needs nothing else."""
        kept = False
        for folder in self.before(job_id, fence + 1):
            if not kept and _holds_one(folder):
                kept = True
            else:
                job_folders.clear(folder)

    def size(self, job_id: str) -> int:
        """Return the bytes that the attempts of a job have left: on the disk, or in the bucket that all machines share.

        ``StoreUnavailable`` if the bucket does not answer.
        """
        return job_folders.size(self._of_job(job_id)) if self.copies is None else self.copies.size(job_id)

    def clear(self, job_id: str) -> None:
        """Delete everything that the job's attempts have left; files that are gone or in use are not an error."""
        job_folders.clear(self._of_job(job_id))
        if self.copies is not None:
            with contextlib.suppress(StoreUnavailable):  # the clean-up removes it later
                self.copies.clear(job_id)

    def jobs(self) -> list[str]:
        """Ids of the jobs that have left something."""
        there = set() if self.copies is None else self.copies.jobs()
        if self._root.is_dir():
            there |= {each.name for each in self._root.iterdir() if is_id(each.name) and (each / _NAME).is_dir()}
        return sorted(there)

    def _of_job(self, job_id: str) -> Path:
        if not is_id(job_id):
            raise ValueError("a scratch folder was asked for under something that is not a job id")
        return self._root / job_id / _NAME


def _holds_one(folder: Path) -> bool:
    """Whether there is a checkpoint or a marker in an attempt's folder, or may be, where a disk does not answer."""
    try:
        with job_folders.within(folder):
            parts = (folder, *folder.glob(_RANKS))
            marked = any(any(each.glob(_MARKERS)) for each in parts)
        return marked or any(any(version_of(each)) for each in parts)
    except OSError as error:  # otherwise its job has closed it, or put something else there
        return error.errno in (errno.EIO, errno.ESTALE)


def open_scratch(
    settings: LedgerSettings, around: Callable[[ObjectStore], ObjectStore] = lambda store: store
) -> Scratch:
    """Open the scratch under the operator's settings, as yet without a connection.

    ``around`` wraps the store of the copies, for instance to retry its calls.
    """
    copies = None if settings.bucket is None else ScratchStore(around(S3Objects(settings.bucket)))
    return Scratch(settings.artifact_root, copies)


def sweep_scratch(engine: Engine, scratch: Scratch) -> int:
    """Clear the scratch of jobs that ended without an attempt to do it, and return their number.

    Between two attempts of a job it is pruned and counted.
    """
    found = scratch.jobs()
    if not found:
        return 0
    with reading(engine) as connection:
        rows = connection.execute(
            select(jobs.c.id, jobs.c.state, jobs.c.fence, jobs.c.checkpoint_bytes).where(
                jobs.c.id.in_(found), jobs.c.state.not_in(list(TERMINAL))
            )
        ).all()
    for row in rows:
        if row.state not in HELD and row.checkpoint_bytes is None:
            _count(engine, scratch, row.id, row.fence)
    ended = sorted(set(found) - {row.id for row in rows})
    for job_id in ended:
        scratch.clear(job_id)
    return len(ended)


def _count(engine: Engine, scratch: Scratch, job_id: str, fence: int) -> None:
    """Note what a job's attempts have left, unless the next one has begun meanwhile."""
    scratch.prune(job_id, fence)
    size = scratch.size(job_id)
    with writing(engine) as connection:
        same = jobs.c.id == job_id, jobs.c.fence == fence, jobs.c.state.not_in(list(HELD))
        connection.execute(update(jobs).where(*same).values(checkpoint_bytes=size))
