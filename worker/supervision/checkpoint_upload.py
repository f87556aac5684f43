"""The checkpoint upload of an attempt: each one is copied to the bucket while the child goes on.

A machine may be lost with its disk. The copy runs in a thread of its own and is never waited for
but for a moment at the attempt's end: the one before stands until a later one is whole.
"""

from pathlib import Path
from types import TracebackType

from structlog.typing import FilteringBoundLogger

from jobs.objects.scratch_store import ScratchStore, version_of
from jobs.records import Claim
from jobs.rounds import Round, Rounds
from worker.process.child_process import STOP_GRACE_SECONDS
from worker.supervision.lease_monitor import LeaseWatch

_LOOK_SECONDS = 1.0
_LAST_COPY_SECONDS = 4.0
"""How long an attempt that has ended waits for the copy of its last checkpoint."""
_LATEST_COPY_SECONDS = STOP_GRACE_SECONDS + 0.5
"""From a stop to where it is waited for no longer: what is left of ten seconds is for the ledger."""


class ScratchMirror:
    """Copies one attempt's checkpoints for as long as it is entered."""

    def __init__(
        self, store: ScratchStore, claim: Claim, folder: Path, watch: LeaseWatch, log: FilteringBoundLogger
    ) -> None:
        self._store = store
        self._claim = claim
        self._folder = folder
        self._watch = watch
        self._log = log
        self._copied: tuple[tuple[int, int] | None, ...] | None = None
        self._given_up = False
        table: list[Round] = [("copy of the checkpoint to the store", _LOOK_SECONDS, self._copy)]
        self._rounds = Rounds(f"mirror-{claim.job_id}", table, log, last=self._copy)

    def __enter__(self) -> None:
        try:
            self._rounds.start()
        except RuntimeError as error:
            self._log.warning("no checkpoint of this attempt is copied to the store", why=str(error))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Copy the last checkpoint, unless the job is another's by now, and end."""
        self._given_up = kind is not None
        left = min(_LAST_COPY_SECONDS, self._watch.left(_LATEST_COPY_SECONDS))
        self._rounds.stop(0.0 if self._given_up else left)

    def _copy(self) -> None:
        if self._given_up:
            return
        found = version_of(self._folder)
        if (
            found != self._copied
            and any(found)
            and self._store.save(self._claim.job_id, self._claim.fence, self._folder)
        ):
            self._copied = found
            self._log.debug("a checkpoint was copied to the store")
